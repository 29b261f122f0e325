"""The cold limit against the log-MGF itself, polytopes against SciPy's hulls and linear programmes.

Expressions are drawn at random from all operations that `measureattn.polytopes` reads.
"""

import itertools
import math

import networkx
import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.spatial import ConvexHull

from measureattn import (
    Discrete,
    Empirical,
    Gaussian,
    Mixture,
    Product,
    Rademacher,
    UniformBox,
    attend,
)
from measureattn.measures.algebra import Convolution
from measureattn.polytopes import (
    _expression,
    _extreme,
    cold_limit,
    cross_polytope,
    cyclic,
    depth_bounds,
    expression_depth,
    maximum_network,
    vertex_graph,
    vertices,
)

F64 = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, rng):
    return torch.randn(*shape, generator=rng, dtype=F64)


def weights(n, rng):
    return torch.rand(n, generator=rng, dtype=F64) + 0.05


def atoms(k, d, rng):
    return Discrete(normal(k, d, rng=rng), weights(k, rng))


def expression(d, layers, rng):
    """A random law on R^d: about `layers` operations deep, with every kind of node."""
    kind = torch.randint(6, (), generator=rng).item() if layers else 0
    if kind == 0:
        return atoms(1 + torch.randint(3, (), generator=rng).item(), d, rng)
    if kind == 1:
        return Rademacher(d)
    if kind == 2:
        inner = expression(1 + d % 3, layers - 1, rng)
        return inner.pushforward(normal(d, inner.dim, rng=rng), normal(d, rng=rng))
    if kind == 3 and d > 1:
        return Product([expression(1, layers - 1, rng), expression(d - 1, layers - 1, rng)])
    parts = [expression(d, layers - 1, rng) for _ in range(2)]
    return Convolution(parts) if kind == 4 else Mixture(parts, weights(2, rng))


def clique(points):
    return len(networkx.max_weight_clique(vertex_graph(points), weight=None)[0])


def as_set(points, digits=9):
    return {tuple(row) for row in (points.numpy().round(digits) + 0.0).tolist()}


def hull_of(points):
    """SciPy's own vertices, of points in general position."""
    return points[torch.from_numpy(ConvexHull(points.numpy()).vertices).long()]


# -- the cold limit ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_atomic_form_is_the_same_law(seed):
    rng = generator(seed)
    law = expression(3, 3, rng)
    a = normal(10, 3, rng=rng)
    plain = _expression(law)
    assert (plain.log_mgf(a) - law.log_mgf(a)).abs().max() < 1e-12
    assert (plain.tilted_mean(a) - law.tilted_mean(a)).abs().max() < 1e-12


def test_the_log_mgf_lies_below_the_support_function_and_within_the_face_mass():
    """1,000 random laws, tilts and inverse temperatures from 0.1 to 1,000."""
    rng = generator()
    for case in range(1_000):
        d = 1 + case % 4
        law = expression(d, case % 4, rng)
        a = normal(d, rng=rng)
        beta = 10 ** (4 * torch.rand((), generator=rng, dtype=F64) - 1)
        support, log_mass, _ = cold_limit(law, a)
        gap = beta * support - law.log_mgf(beta * a)
        rounding = 1e-13 * (1 + beta * support.abs())
        assert -rounding <= gap <= -log_mass + rounding, (case, gap, log_mass)


def test_the_gap_is_at_most_the_log_of_the_smallest_vertex_weight_and_tends_to_the_face_mass():
    rng = generator()
    for d in (1, 2, 3, 5):
        law = atoms(8, d, rng)
        at_vertex = [
            i
            for i, x in enumerate(law.tokens)
            if tuple(x.tolist()) in {tuple(v.tolist()) for v in vertices(law)}
        ]
        smallest = law.log_weights[at_vertex].min()
        a = normal(50, d, rng=rng)
        support, log_mass, _ = cold_limit(law, a)
        assert (log_mass >= smallest - 1e-12).all()
        gap = 1e6 * support - law.log_mgf(1e6 * a)
        scores = (a @ law.tokens.mT).sort(-1).values
        clear = scores[:, -1] - scores[:, -2] > 1e-4
        assert clear.sum() > 40
        assert (gap + log_mass)[clear].abs().max() < 1e-8


def test_the_tilted_mean_goes_to_the_mean_on_the_exposed_face():
    """At rate exp(-beta times the distance in score), both constants known."""
    rng = generator(3)
    law = expression(3, 0, rng)
    law = Mixture([law, atoms(6, 3, rng)], [0.3, 0.7])
    a = normal(20, 3, rng=rng)
    tokens = torch.cat([part.tokens for part in law.parts])
    scores = (a @ tokens.mT).sort(-1).values
    distance = scores[:, -1] - scores[:, -2]
    diameter = torch.cdist(tokens, tokens).max()
    _, log_mass, mean = cold_limit(law, a)
    for beta in (1.0, 10.0, 100.0):
        error = torch.linalg.vector_norm(law.tilted_mean(beta * a) - mean, dim=-1)
        assert (error <= diameter * torch.exp(-beta * distance - log_mass) + 1e-12).all()
    assert (distance > 0.1).sum() > 10


def test_an_exposed_edge_gives_the_weighted_mean_and_not_a_vertex():
    """Ties of atoms, in a mixture and in a convolution, an atom inside the edge among them."""
    points = torch.tensor([[0.0, 1.0], [2.0, 1.0], [0.5, 1.0], [1.0, -3.0]], dtype=F64)
    law = Discrete(points, torch.tensor([0.3, 0.1, 0.1, 0.5], dtype=F64))
    up = torch.tensor([0.0, 1.0], dtype=F64)
    expected = torch.tensor([0.5, 1.0], dtype=F64)
    support, log_mass, mean = cold_limit(law, up)
    assert support == 1 and (mean - expected).abs().max() < 1e-15
    assert abs(log_mass.exp() - 0.5) < 1e-15
    assert (law.tilted_mean(50 * up) - expected).abs().max() < 1e-12
    corner = Discrete(points[:1], torch.ones(1, dtype=F64))
    mixed = cold_limit(Mixture([law, corner], [0.5, 0.5]), up)
    assert (mixed.mean - (0.25 * expected + 0.5 * points[0]) / 0.75).abs().max() < 1e-15
    summed = cold_limit(law.convolve(law), up)
    assert (summed.mean - 2 * expected).abs().max() < 1e-15
    assert abs(summed.log_mass.exp() - 0.25) < 1e-15


def test_at_tilt_zero_the_face_is_the_whole_polytope():
    law = expression(2, 3, generator(5))
    support, log_mass, mean = cold_limit(law, torch.zeros(2, dtype=F64))
    assert support == 0 and log_mass.abs() < 1e-12
    assert (mean - law.mean).abs().max() < 1e-12


def test_what_has_no_weight_does_not_count():
    far = Empirical(torch.tensor([[9.0]], dtype=F64))
    near = Discrete(
        torch.tensor([[0.0], [1.0], [5.0]], dtype=F64), torch.tensor([1.0, 1, 0]).double()
    )
    law = Mixture([near, far], [1.0, 0.0])
    assert cold_limit(law, torch.ones(1, dtype=F64)).support == 1
    assert as_set(vertices(law)) == {(0.0,), (1.0,)}


def test_dtype_and_query_axes_are_kept(dtype):
    law = Mixture([Rademacher(2), Rademacher(2).pushforward(torch.ones(2, 2, dtype=dtype))])
    limit = cold_limit(law, torch.ones(4, 3, 2, dtype=dtype))
    assert [tuple(x.shape) for x in limit] == [(4, 3), (4, 3), (4, 3, 2)]
    assert all(x.dtype == dtype for x in limit)
    assert (limit.support == 4).all() and vertices(law).dtype == F64


def test_equal_scores_are_seen_in_float32():
    """Two groupings of one sum, which differ by rounding in float32, lie on one face."""
    p, q, r = (torch.tensor([[0.0, y]]) for y in (0.1, 0.7, 0.6))
    a = torch.tensor([0.0, 1.0])
    assert ((p + q) + r)[0, 1] != (p + (q + r))[0, 1]
    left = Empirical(p).convolve(Empirical(q)).convolve(Empirical(r))
    right = Empirical(p + torch.tensor([1.0, 0.0])).convolve(Empirical(q).convolve(Empirical(r)))
    limit = cold_limit(Mixture([left, right]), a)
    assert abs(limit.log_mass) < 1e-6 and abs(limit.mean[0] - 0.5) < 1e-6


# -- vertices and edges --------------------------------------------------------------------------


@pytest.mark.parametrize("d", [2, 3, 4])
def test_a_mixture_is_the_hull_and_a_convolution_the_minkowski_sum(d):
    """Vertices and volumes against SciPy, from all points of the union and from all sums."""
    rng = generator(d)
    for _ in range(10):
        P, Q = (atoms(7, d, rng) for _ in range(2))
        union = torch.cat([P.tokens, Q.tokens])
        sums = (P.tokens[:, None] + Q.tokens).reshape(-1, d)
        for law, points in ((Mixture([P, Q]), union), (P.convolve(Q), sums)):
            mine = vertices(law)
            assert as_set(mine) == as_set(hull_of(points))
            volume = ConvexHull(points.numpy()).volume
            assert abs(ConvexHull(mine.numpy()).volume - volume) < 1e-12 * volume
            a = normal(20, d, rng=rng)
            expected = (a @ points.mT).amax(-1)
            assert (cold_limit(law, a).support - expected).abs().max() < 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_the_support_function_is_the_largest_score_of_a_vertex(seed):
    rng = generator(seed)
    law = expression(3, 3, rng)
    a = normal(50, 3, rng=rng)
    largest = (a @ vertices(law).mT).amax(-1)
    assert (cold_limit(law, a).support - largest).abs().max() < 1e-9


def is_vertex(points, i):
    """By a linear programme: no mean of the other points, duplicates of it set aside."""
    others = np.array([x for x in points if np.abs(x - points[i]).max() > 1e-9])
    if len(others) == 0:
        return True
    equal = np.vstack([others.T, np.ones(len(others))])
    found = linprog(np.zeros(len(others)), A_eq=equal, b_eq=np.append(points[i], 1))
    return found.status == 2  # infeasible


def awkward_points():
    """Duplicates, points inside edges and faces and the body, and flat sets in a larger space."""
    rng = generator(1)
    square = torch.tensor(list(itertools.product([0.0, 0.5, 1.0], repeat=2)), dtype=F64)
    cube = torch.tensor(list(itertools.product([0.0, 0.5, 1.0], repeat=3)), dtype=F64)
    segment = torch.linspace(0, 1, 5, dtype=F64)[:, None] * torch.tensor([[1.0, 2.0]], dtype=F64)
    yield "square with midpoints", square
    yield "square twice", torch.cat([square, square])
    yield "cube with midpoints", cube
    yield "flat cube in five dimensions", cube @ normal(3, 5, rng=rng) + normal(5, rng=rng)
    yield "segment with points inside", segment
    yield "one point three times", torch.ones(3, 2, dtype=F64)
    yield "a cloud", normal(30, 3, rng=rng)
    yield "a needle", cube @ torch.diag(torch.tensor([1.0, 1e-4, 1e3], dtype=F64))


AWKWARD = dict(awkward_points())


@pytest.mark.parametrize("points", AWKWARD.values(), ids=AWKWARD)
def test_vertices_are_those_of_a_linear_programme(points):
    array = points.numpy()
    expected = {tuple(x) for i, x in enumerate(array.round(9) + 0.0) if is_vertex(array, i)}
    found = _extreme(points)
    assert as_set(found) == expected and len(found) == len(expected)


def is_edge(points, u, v):
    """By a linear programme: some tilt puts u and v equally high and all others lower."""
    others = np.delete(points, [u, v], 0)
    n = points.shape[1]
    # variables: tilt in [-1, 1]^n and a margin t; largest t with a.(x - u) + t <= 0
    upper = np.hstack([others - points[u], np.ones((len(others), 1))])
    equal = np.append(points[v] - points[u], 0)[None]
    bounds = [(-1, 1)] * n + [(None, None)]
    cost = np.append(np.zeros(n), -1)
    best = linprog(cost, upper, np.zeros(len(others)), equal, [0], bounds=bounds)
    return -best.fun > 1e-7


@pytest.mark.parametrize(
    "law",
    [
        cyclic(8, 3),
        cyclic(7, 4),
        cross_polytope(4),
        Rademacher(3),
        Product([cyclic(3, 2), cyclic(4, 2)]),
        Empirical(normal(12, 3, rng=generator(2))),
        Empirical(normal(9, 4, rng=generator(3))),
        cyclic(3, 2).convolve(Empirical(normal(4, 2, rng=generator(4)))),
    ],
    ids=repr,
)
def test_edges_are_those_of_a_linear_programme(law):
    points = vertices(law)
    graph = vertex_graph(points)
    for u, v in itertools.combinations(range(len(points)), 2):
        assert graph.has_edge(u, v) == is_edge(points.numpy(), u, v), (u, v)


def test_edges_are_counted_right():
    """Textbook counts: simplex, cube, cross-polytope, simplicial 3-polytope, polygon."""

    def edges(law):
        return vertex_graph(vertices(law)).number_of_edges()

    for n in range(1, 7):
        assert edges(Empirical(torch.eye(n + 1))) == n * (n + 1) // 2
        assert edges(cross_polytope(n)) == (2 * n * (n - 1) if n > 1 else 1)
    for n in range(1, 6):
        assert edges(Rademacher(n)) == n * 2 ** (n - 1)
    for k in (5, 8, 15):
        assert edges(cyclic(k, 3)) == 3 * k - 6
        assert edges(cyclic(k, 2)) == k


def test_affine_maps_keep_the_graph():
    rng = generator(7)
    points = vertices(Empirical(normal(10, 3, rng=rng)))
    before = set(vertex_graph(points).edges)
    for stretch in (1.0, 30.0, 1e3):
        A = normal(5, 3, rng=rng) @ torch.diag(torch.tensor([1.0, stretch, 1 / stretch])).double()
        assert set(vertex_graph(points @ A.mT + 3).edges) == before


# -- depth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("law", "omega", "bounds"),
    [
        (cyclic(6, 4), 6, (3, 3)),
        (cyclic(8, 4), 8, (3, 3)),
        (cyclic(9, 4), 9, (4, 4)),
        (cyclic(7, 5), 7, (3, 3)),
        (cyclic(8, 3), 4, (2, 3)),
        (Empirical(torch.eye(5)), 5, (3, 3)),
        (Rademacher(3), 2, (1, 1)),
        (cross_polytope(3), 3, (2, 2)),
        (cross_polytope(5), 5, (3, 3)),
        (Empirical(torch.ones(2, 3)), 1, (0, 0)),
        (Empirical(torch.tensor([[0.0, 0.0], [3.0, 0.0], [1.0, 1.0], [2.0, 1.0]])), 2, (1, 2)),
    ],
)
def test_reference_values(law, omega, bounds):
    assert clique(vertices(law)) == omega
    assert depth_bounds(law) == bounds


def test_the_bounds_meet_for_simplices():
    for n in range(1, 32):
        assert depth_bounds(Empirical(torch.eye(n + 1))) == (math.ceil(math.log2(n + 1)),) * 2


@pytest.mark.parametrize("n", [4, 5, 6])
def test_the_bounds_meet_for_cyclic_polytopes(n):
    for k in range(n + 1, 13):
        assert len(vertices(cyclic(k, n))) == k
        assert depth_bounds(cyclic(k, n)) == (math.ceil(math.log2(k)),) * 2


def test_the_bounds_meet_for_cross_polytopes():
    for n in range(2, 11):
        law = cross_polytope(n)
        both_signs = torch.cat([torch.eye(n), -torch.eye(n)]).double()
        assert as_set(vertices(law)) == as_set(both_signs)
        assert depth_bounds(law) == (math.ceil(math.log2(n)),) * 2


@pytest.mark.parametrize("seed", range(150))
def test_a_clique_is_at_most_two_to_the_depth(seed):
    """The theorem itself, on random expressions: it would expose a wrong depth or graph."""
    law = expression(2 + seed % 3, 3, generator(seed))
    assert clique(vertices(law)) <= 2 ** expression_depth(law)
    lower, upper = depth_bounds(law)
    assert lower <= upper <= expression_depth(law)


def test_the_two_steps_of_the_proof():
    """Sums have no larger clique than a summand; hulls at most the sum of the two."""
    rng = generator(11)
    larger = 0
    for _ in range(20):
        P, Q = (atoms(6, 4, rng) for _ in range(2))
        each = [clique(vertices(law)) for law in (P, Q)]
        assert clique(vertices(P.convolve(Q))) <= max(each)
        joined = clique(vertices(Mixture([P, Q])))
        assert joined <= sum(each)
        larger += joined > max(each)
    assert larger > 0  # hulls do enlarge cliques


@pytest.mark.parametrize("seed", range(20))
def test_relu_icnn_polytopes_have_cliques_of_at_most_layers_plus_one(seed):
    """Layer by layer: hulls of a point with a sum of polytopes of the layer before."""
    rng = generator(seed)
    d, width = 4, 2

    def point():
        return Empirical(normal(1, d, rng=rng))

    layer = [point() for _ in range(width)]
    for hidden in range(1, 4):
        layer = [Mixture([point(), Convolution([*layer, point()])]) for _ in range(width)]
        assert clique(vertices(Convolution(layer))) <= hidden + 1


@pytest.mark.parametrize("seed", range(2))
def test_a_maxout_icnn_is_the_cold_limit_of_a_law_of_its_depth(seed):
    """A random network evaluated, and written in mixtures, dilations and convolutions."""
    rng, width, d = generator(seed), 3, 2
    x = normal(200, d, rng=rng)
    z, laws = torch.zeros(200, 0, dtype=F64), []
    for hidden in range(1, 4):
        values, branches = [], []
        for _ in range(2):
            S = normal(width, d, rng=rng)
            W = torch.rand(width, len(laws), generator=rng, dtype=F64)
            values.append(z @ W.mT + x @ S.mT)
            branches.append(
                [
                    Convolution(
                        [
                            Empirical(s[None]),
                            *(
                                P.pushforward(w * torch.eye(d).double())
                                for w, P in zip(row, laws, strict=True)
                            ),
                        ]
                    )
                    for s, row in zip(S, W, strict=True)
                ]
            )
        z, laws = torch.maximum(*values), [Mixture(pair) for pair in zip(*branches, strict=True)]
        for unit, law in zip(z.T, laws, strict=True):
            assert (cold_limit(law, x).support - unit).abs().max() < 1e-11
            assert expression_depth(law) <= hidden


def best_join(depths):
    """The depth of the best tree of pairwise hulls, by trying all."""
    if len(depths) == 1:
        return depths[0]
    joins = []
    for i, j in itertools.combinations(range(len(depths)), 2):
        rest = [d for k, d in enumerate(depths) if k not in (i, j)]
        joins.append(best_join([*rest, max(depths[i], depths[j]) + 1]))
    return min(joins)


COUNTS = list(itertools.combinations_with_replacement([1, 2, 3, 5], 4))


@pytest.mark.parametrize("counts", COUNTS)
def test_the_depth_of_a_mixture_is_that_of_the_best_tree(counts):
    """Parts are sums, whose depths cannot be undone: best tree by trial against the formula."""
    rng = generator()
    parts = [
        atoms(n, 4, rng).convolve(Rademacher(4)) if n > 1 else atoms(1, 4, rng) for n in counts
    ]
    depths = [expression_depth(part) for part in parts]
    assert depths == [{1: 0, 2: 1, 3: 2, 5: 3}[n] for n in counts]
    assert expression_depth(Mixture(parts)) == best_join(depths)


def test_nested_mixtures_count_as_one_and_shifts_cost_nothing():
    rng = generator()
    three, one = atoms(3, 5, rng), atoms(1, 5, rng)
    assert expression_depth(Mixture([three, one])) == 2
    assert expression_depth(Mixture([three.convolve(one), one])) == 2
    assert expression_depth(Mixture([Mixture([three, one]), Mixture([three, one])])) == 3
    assert expression_depth(Mixture([three.convolve(three), one])) == 3
    assert expression_depth(one.convolve(one)) == 0


# -- networks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 8, 13])
def test_the_network_is_the_maximum(k):
    """1e5 random points, to 1e-12, in ceil(log2 k) hidden layers."""
    rng = generator(k)
    weight, bias = normal(k, 6, rng=rng), normal(k, rng=rng)
    state = torch.get_rng_state()
    network = maximum_network(weight, bias)
    assert torch.equal(torch.get_rng_state(), state)
    x = normal(100_000, 6, rng=rng)
    with torch.no_grad():
        error = network(x)[:, 0] - (x @ weight.mT + bias).amax(-1)
    assert error.abs().max() < 1e-12
    hidden = sum(isinstance(layer, torch.nn.ReLU) for layer in network)
    assert hidden == math.ceil(math.log2(k))


def test_the_network_has_its_own_weights_and_trains(dtype):
    weight = torch.eye(3, dtype=dtype)
    network = maximum_network(weight)
    network(torch.ones(2, 3, dtype=dtype)).sum().backward()
    assert all(p.grad is not None and p.dtype == dtype for p in network.parameters())
    network[0].weight.data.zero_()
    assert torch.equal(weight, torch.eye(3, dtype=dtype))


def test_softmax_is_below_the_maximum_by_at_most_log_k_over_beta():
    rng = generator(2)
    for k in (2, 5, 40):
        law, x = Empirical(normal(k, 4, rng=rng)), normal(300, 4, rng=rng)
        maximum = (x @ law.tokens.mT).amax(-1)
        for beta in (0.1, 1.0, 10.0, 1000.0):
            eye = torch.eye(4, dtype=F64)
            layer = (x * attend(law, x, U=beta * eye, V=eye)).sum(-1)
            for below in (law.log_mgf(beta * x) / beta, layer):
                error = maximum - below
                assert (error > -1e-12).all() and (error <= math.log(k) / beta + 1e-12).all()
            assert (layer >= law.log_mgf(beta * x) / beta - 1e-12).all()


# -- refusals ------------------------------------------------------------------------------------

TILT = torch.ones(2, dtype=F64)
CLOUD = Gaussian(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: cold_limit(CLOUD, TILT), TypeError, ["finitely many", "Gaussian", "prompt"]),
        (
            lambda: vertices(Mixture([Rademacher(2), UniformBox(torch.ones(2))])),
            TypeError,
            ["finitely many", "UniformBox", "prompt"],
        ),
        (
            lambda: depth_bounds(Empirical(torch.zeros(3, 4, 2))),
            TypeError,
            ["one law", "(3,)", "one by one"],
        ),
        (lambda: cold_limit(Rademacher(3), TILT), ValueError, ["last axis of a", "3", "U z"]),
        (
            lambda: vertex_graph(torch.tensor([[0.0], [1.0], [2.0]])),
            ValueError,
            ["vertices of their hull", "3 points of which 2", "vertices(Empirical"],
        ),
        (lambda: vertex_graph([[0.0]]), TypeError, ["torch.Tensor", "list", "as_tensor"]),
        (lambda: cyclic(4, 4), ValueError, ["k > n >= 1", "k = 4 and n = 4", "Raise k"]),
        (lambda: cross_polytope(0), ValueError, ["1 or more", "got 0"]),
        (
            lambda: maximum_network(torch.eye(3), torch.zeros(2)),
            ValueError,
            ["one entry a row", "(2,)", "Expand"],
        ),
        (
            lambda: maximum_network(torch.eye(3), torch.zeros(3, dtype=F64)),
            TypeError,
            ["dtype", "float64", "Convert"],
        ),
    ],
)
def test_refusals_say_what_came_and_how_to_repair_it(call, kind, words, no_shape_hook):
    with pytest.raises(kind) as refusal:
        call()
    assert all(word in str(refusal.value) for word in words), refusal.value

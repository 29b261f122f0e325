"""The cold limit of the log-MGF: measures with finitely many atoms are polytopes.

For such a measure kappa(beta a)/beta grows to h(a), the support function of the polytope P that
the atoms span, and the tilted mean goes to the mean on the face of P that a exposes. Operations on
measures become operations on polytopes, so that P can be read off the expression of the measure:

    mixture        convex hull of the union      the larger support function
    convolution    Minkowski sum                 the sum of the support functions

How deep the hulls are nested bounds the depth of P from above; the largest clique in the graph of
its vertices and edges bounds it from below.
"""

import math
from functools import reduce
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from measureattn._checks import require_ndim, require_same, require_tensor
from measureattn._typing import Float
from measureattn.measures import Empirical, Measure, Mixture, Product, Rademacher
from measureattn.measures.algebra import Convolution, PushForward

ON_FACET = 1e-9  # a distance that counts as zero, for points of covariance 1


def _expression(measure: Measure, device: torch.device | None = None) -> Measure:
    """The same law in atoms, mixtures and convolutions alone, in float64, without zero weights.

    device  that of a law without tensors of its own
    """
    if len(measure.batch_shape) > 0:
        raise TypeError(
            f"a polytope belongs to one law, got a batch of shape {tuple(measure.batch_shape)}. "
            f"Take its members one by one."
        )
    own = measure._reference()
    device = device if own is None else own.device
    return _atomic(measure.to(torch.float64), torch.zeros((), dtype=torch.float64, device=device))


def _atomic(measure: Measure, like: Tensor) -> Measure:
    match measure:
        case Empirical(tokens=tokens, log_weights=log_weights):
            if log_weights is None:
                log_weights = tokens.new_zeros(len(tokens))
            there = log_weights > -torch.inf
            return Empirical(tokens[there], log_weights[there])
        case Mixture(parts=parts):
            weights = measure.log_weights.exp().to(like)
            pairs = [(part, w) for part, w in zip(parts, weights, strict=True) if w > 0]
            return Mixture([_atomic(part, like) for part, _ in pairs], weights[weights > 0])
        case Convolution(parts=parts):
            return Convolution([_atomic(part, like) for part in parts])
        case PushForward(parts=[inner]):
            return _image(_atomic(inner, like), measure.A, measure.b)
        case Product(parts=parts):
            blocks = torch.eye(measure.dim).to(like).split(measure.sizes, -1)
            pairs = zip(parts, blocks, strict=True)
            return Convolution([_image(_atomic(part, like), block) for part, block in pairs])
        case Rademacher():
            signs = torch.tensor([[-1.0], [1.0]]).to(like)
            coins = [Empirical(signs * axis) for axis in torch.eye(measure.dim).to(like)]
            return Convolution([_atomic(coin, like) for coin in coins])
    raise TypeError(
        f"a polytope needs a law with finitely many atoms, got {type(measure).__name__}. "
        f"Take a prompt of it: Empirical(law.sample(...))."
    )


def _image(measure: Measure, A: Tensor, b: Tensor | None = None) -> Measure:
    """The law of A x + b, the map pushed down to the atoms."""
    match measure:
        case Mixture(parts=parts):
            return Mixture([_image(part, A, b) for part in parts], measure.log_weights.exp())
        case Convolution(parts=[first, *rest]):
            return Convolution([_image(first, A, b), *(_image(part, A) for part in rest)])
    return measure.pushforward(A, b)


def _read(measure: Measure, atoms, hull, add):
    """Evaluate an atomic expression: what atoms, mixtures and convolutions stand for is given."""
    if isinstance(measure, Empirical):
        return atoms(measure)
    parts = [_read(part, atoms, hull, add) for part in measure.parts]
    return hull(parts, measure.log_weights) if isinstance(measure, Mixture) else add(parts)


# -- the limit -----------------------------------------------------------------------------------


class ColdLimit(NamedTuple):
    """kappa(beta a) = beta support + log_mass + o(1), and the tilted mean goes to `mean`.

    support   (*query), h(a), the largest score of an atom
    log_mass  (*query), log of the mass on the exposed face
    mean      (*query, D), mean of the law on that face, the answer of hardmax attention

    Source: ours. See: chapter 12.

    >>> cold_limit(Rademacher(2), torch.tensor([3.0, 0.0])).mean
    tensor([1., 0.])
    """

    support: Tensor
    log_mass: Tensor
    mean: Tensor


def cold_limit(
    measure: Measure, a: Float[Tensor, "*query D"], *, tolerance: float = 1e-9
) -> ColdLimit:
    """What the log-MGF and the tilted mean at beta a tend to, read off the expression.

    measure    made of atoms by mixtures, convolutions, products and affine maps
    a          (*query, D)
    tolerance  atoms this near to the supporting hyperplane lie on the exposed face

    support - kappa(beta a)/beta lies between 0 and -log_mass/beta. Raises TypeError for a law with
    infinitely many atoms or a batch of laws, and what `Measure.log_mgf` raises.
    Source: ours. See: chapter 12.

    >>> cold_limit(Rademacher(2), torch.tensor([3.0, 0.0])).support
    tensor(3.)
    """
    query = measure._query(a)
    a = query.double()  # so that equal scores are seen as equal
    near = (tolerance * torch.linalg.vector_norm(a, dim=-1))[..., None]

    def face(support: Tensor, log_mass: Tensor, mean: Tensor) -> ColdLimit:
        """Of several candidates (..., n), those with the largest support."""
        top = support.amax(-1, keepdim=True)
        log_mass = torch.where(support >= top - near, log_mass, -torch.inf)
        total = log_mass.logsumexp(-1, keepdim=True)
        share = (log_mass - total).exp()[..., None]
        return ColdLimit(top[..., 0], total[..., 0], (share * mean).sum(-2))

    def hull(parts, log_weights):
        support, log_mass, mean = zip(*parts, strict=True)
        log_mass = torch.stack(log_mass, -1) + log_weights
        return face(torch.stack(support, -1), log_mass, torch.stack(mean, -2))

    limit = _read(
        _expression(measure, a.device),
        atoms=lambda prompt: face(a @ prompt.tokens.mT, prompt.log_weights, prompt.tokens),
        hull=hull,
        add=lambda parts: ColdLimit(*map(sum, zip(*parts, strict=True))),
    )
    return ColdLimit(*(value.to(query.dtype) for value in limit))


# -- the polytope --------------------------------------------------------------------------------


def vertices(measure: Measure) -> Float[Tensor, "k D"]:
    """The vertices of the polytope of a measure, (k, D) in float64.

    Raises TypeError as `cold_limit`. Source: ours. See: chapter 12.

    >>> len(vertices(Rademacher(3)))
    8
    """
    return _read(
        _expression(measure),
        atoms=lambda prompt: _extreme(prompt.tokens),
        hull=lambda parts, log_weights: _extreme(torch.cat(parts)),
        add=lambda parts: reduce(
            lambda P, Q: _extreme((P[:, None] + Q).reshape(-1, P.shape[1])), parts
        ),
    )


def _extreme(points: Tensor) -> Tensor:
    """The vertices of the hull of points (n, D), each once."""
    on = _facets(points)
    # p -> q: q lies on all facets through p, so in the smallest face that holds p
    reaches = on @ on.T == on.sum(1)[:, None]
    alone = (reaches == (reaches & reaches.T)).all(1)
    first = reaches.argmax(1) == np.arange(len(on))  # of points that coincide, one
    return points[torch.from_numpy(alone & first).to(points.device)]


def _facets(points: Tensor) -> np.ndarray:
    """Which points (n, D) lie on which facets of their hull, (n, facets) of 0 and 1.

    Affine maps keep faces, so the points are first given covariance 1 in the space they span; that
    also makes Qhull safe for thin polytopes.
    """
    from scipy.spatial import ConvexHull

    x = points.double().cpu().numpy()
    x, widths, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    x = x[:, widths > 1e-9 * widths[0]] * math.sqrt(len(x))
    if x.shape[1] == 0:  # one point, perhaps many times
        return np.ones((len(x), 1))
    if x.shape[1] == 1:
        distance = np.hstack([x - x.min(), x.max() - x])
    else:
        planes = np.unique(ConvexHull(x).equations.round(12), axis=0)
        distance = -(x @ planes[:, :-1].T + planes[:, -1])
    return (distance < ON_FACET).astype(float)


def vertex_graph(points: Float[Tensor, "k D"]):
    """The graph of the vertices 0 to k - 1 of a polytope and of its edges, a `networkx.Graph`.

    points  (k, D), the vertices: two make an edge if no third lies on all facets through both

    Raises ValueError if a point is no vertex, and what `Empirical` raises.
    Source: ours. See: chapter 12.

    >>> vertex_graph(torch.eye(4)).number_of_edges()
    6
    """
    import networkx

    if (extreme := len(vertices(Empirical(points)))) != len(points):
        raise ValueError(
            f"points must be the vertices of their hull, got {len(points)} points of which "
            f"{extreme} are. Take vertices(Empirical(points))."
        )
    on = _facets(points)
    graph = networkx.empty_graph(len(on))
    for u, facets in enumerate(on):
        shared = facets * on
        on_shared = shared @ on.T == shared.sum(1)[:, None]
        graph.add_edges_from((u, v) for v in np.flatnonzero(on_shared.sum(1) == 2).tolist())
    return graph


# -- depth ---------------------------------------------------------------------------------------


def expression_depth(measure: Measure) -> int:
    """How many layers of pairwise hulls the expression of a measure needs; sums are free.

    Parts of depths d_1, d_2, ... are joined in ceil(log2(2^d_1 + 2^d_2 + ...)) layers, the shallow
    ones first. Raises TypeError as `cold_limit`.
    Source: ours; depth as in arXiv 2402.15315. See: chapter 12.

    >>> expression_depth(Rademacher(3))
    1
    """

    def add(leaves):
        several = [n for n in leaves if n > 1]  # to add a point costs nothing
        return several[0] if len(several) == 1 else 2 ** _layers(max(leaves))

    # leaves: how many points can be joined in as many layers
    leaves = _read(
        _expression(measure),
        atoms=lambda prompt: len(_extreme(prompt.tokens)),
        hull=lambda parts, log_weights: sum(parts),
        add=add,
    )
    return _layers(leaves)


def depth_bounds(measure: Measure) -> tuple[int, int]:
    """(lower, upper) bounds on the depth of the polytope of a measure.

    lower  ceil(log2 omega), omega the size of the largest clique of the vertex graph
    upper  the expression's depth or ceil(log2 k) for k vertices, whichever is less

    Raises TypeError as `cold_limit`.
    Source: ours; depth as in arXiv 2402.15315. See: chapter 12.

    >>> depth_bounds(cyclic(9, 4))
    (4, 4)
    """
    import networkx

    points = vertices(measure)
    clique, _ = networkx.max_weight_clique(vertex_graph(points), weight=None)
    return _layers(len(clique)), min(expression_depth(measure), _layers(len(points)))


def _layers(leaves: int) -> int:
    return (leaves - 1).bit_length()  # ceil(log2(leaves)) in whole numbers


def cyclic(k: int, n: int) -> Empirical:
    """The uniform law on k points of the curve (t, t^2, ..., t^n): the cyclic polytope C(k, n).

    Raises ValueError unless k > n >= 1. Source: ours. See: chapter 12.

    >>> len(vertices(cyclic(9, 4)))
    9
    """
    if not k > n >= 1:
        raise ValueError(f"C(k, n) needs k > n >= 1, got k = {k} and n = {n}. Raise k.")
    t = torch.linspace(-1, 1, k, dtype=torch.float64)
    return Empirical(t[:, None] ** torch.arange(1, n + 1))


def cross_polytope(n: int) -> Mixture:
    """A law on the points +-e_j of R^n that mixes squares: two diagonals span one.

    A square is a sum of two segments, so the expression has depth ceil(log2 n) for n >= 2. Raises
    ValueError unless n >= 1. Source: ours. See: chapter 12.

    >>> expression_depth(cross_polytope(5))
    3
    """
    if n < 1:
        raise ValueError(f"n must be a dimension, 1 or more, got {n}.")
    axes = torch.eye(n, dtype=torch.float64)

    def segment(x):
        return Empirical(torch.stack([-x, x]))

    parts = [
        Convolution([segment((x + y) / 2), segment((x - y) / 2)])
        for x, y in zip(axes[: n - 1 : 2], axes[1::2], strict=True)
    ]
    return Mixture(parts + [segment(axes[-1])] * (n % 2))


# -- a network -----------------------------------------------------------------------------------


def maximum_network(
    weight: Float[Tensor, "k n"], bias: Float[Tensor, "k"] | None = None
) -> torch.nn.Sequential:
    """A ReLU network of ceil(log2 k) hidden layers: x (*batch, n) -> max_i weight_i.x + bias_i.

    weight  (k, n), one affine form a row;  bias  (k,), or None for 0

    Each layer halves the number of forms by max(f, g) = relu(f - g) + relu(g) - relu(-g). That
    minus sign lies between hidden layers: the network is not input-convex. Outputs (*batch, 1).
    Raises ValueError or TypeError if shapes or dtypes do not fit.
    Source: Arora et al., arXiv 1611.01491. See: chapter 12.

    >>> maximum_network(torch.eye(3))(torch.tensor([1.0, 5.0, 2.0]))
    tensor([5.], grad_fn=<ViewBackward0>)
    """
    require_tensor("weight", weight)
    require_ndim("weight", weight, 2, "(k, n)")
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    require_same("bias", bias, "weight", weight)
    if bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias must have one entry a row of weight, shape ({len(weight)},), got shape "
            f"{tuple(bias.shape)}. Expand it first."
        )
    split = weight.new_tensor([[1, -1], [0, 1], [0, -1]])
    join = weight.new_tensor([[1, 1, -1]])
    layers = []
    while len(weight) > 1:
        if len(weight) % 2:  # max(f, f) = f
            weight, bias = torch.cat([weight, weight[-1:]]), torch.cat([bias, bias[-1:]])
        pairs = torch.eye(len(weight) // 2).to(weight)
        into = torch.kron(pairs, split)
        layers += [_linear(into @ weight, into @ bias), torch.nn.ReLU()]
        weight = torch.kron(pairs, join)
        bias = weight.new_zeros(len(weight))
    return torch.nn.Sequential(*layers, _linear(weight, bias))


def _linear(weight: Tensor, bias: Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(*weight.mT.shape, device="meta")  # made without random numbers
    layer.weight = torch.nn.Parameter(weight.clone())
    layer.bias = torch.nn.Parameter(bias.clone())
    return layer

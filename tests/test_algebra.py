"""New laws from old: the algebra of log-MGFs, by inherited laws and on random expressions."""

import functools
from dataclasses import dataclass

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measure_case import (
    F32,
    F64,
    STANDARD_ERRORS,
    FromNumbers,
    MeasureCase,
    OracleCase,
    assert_close,
    assert_refused,
    atoms_oracle,
    generator,
)
from test_uniform import box_oracle, coin_oracle, sphere_oracle

from measureattn import (
    Discrete,
    Empirical,
    Gaussian,
    Mixture,
    Product,
    Rademacher,
    UniformBox,
    UniformSphere,
    attend,
)
from measureattn.measures import Convolution, PushForward


def randn(*shape, seed):
    """Numbers that float32 holds exactly, so that both dtypes make the same law."""
    return torch.randn(shape, generator=generator(seed), dtype=F64).float().double()


def numbers_of_a_gaussian(i):
    factor = torch.tensor([[1.5, 0.0], [0.75, 0.5]], dtype=F64) * (1 + i / 4)
    return dict(mean=torch.tensor([0.5, -1.0], dtype=F64) * (1 - i), cov=factor @ factor.mT)


# -- mixtures -------------------------------------------------------------------------------------


class TestMixtureOfGaussians(FromNumbers):
    """Batched components and batched weights."""

    dim = 2
    scale = 6.0

    def numbers(self, i):
        weights = torch.tensor([0.25, 0.5, 0.25], dtype=F64).roll(i)
        return numbers_of_a_gaussian(i) | dict(weights=weights)

    def law(self, options, mean, cov, weights):
        parts = [Gaussian(shift + mean, cov * size, **options) for shift, size in
                 ((-2.0, 1.0), (0.0, 0.25), (3.0, 0.5))]
        return Mixture(parts, weights, **options)


class TestMixtureOfBatchedAndUnbatched(FromNumbers):
    """One batched law, one prompt for all, one law without numbers; batched weights, one of 0."""

    dim = 2
    scale = 5.0
    shared = ("tokens",)

    def numbers(self, i):
        weights = torch.tensor([0.5, 0.25, 0.0], dtype=F64).roll(i)
        return numbers_of_a_gaussian(i) | dict(tokens=randn(5, 2, seed=1), weights=weights)

    def law(self, options, mean, cov, tokens, weights):
        parts = [Gaussian(mean, cov, **options), Empirical(tokens, **options)]
        return Mixture([*parts, Rademacher(2, **options)], weights, **options)


class TestMixtureOfPlainNumbers(MeasureCase):
    """No tensor anywhere: the law follows the query."""

    dim = 2
    scale = 2.5

    def make(self, dtype, device, batched=False, **options):
        parts = [UniformBox([2.0, 1.0], **options), UniformSphere(1.5, 2, **options)]
        return Mixture(parts, [3.0, 1.0], **options)


class TestFarMixture(OracleCase, MeasureCase):
    """Components a thousand standard deviations apart, up to tilts of 1e4, against mpmath."""

    dim = 1
    scale = 1e3
    direction = (1.0,)
    weights, centres, variances = (0.75, 0.25), (-1000.0, 500.0), (1.0, 0.25)

    def make(self, dtype, device, batched=False, **options):
        like = dict(dtype=dtype, device=device)
        parts = [
            Gaussian(torch.tensor([m], **like), torch.tensor([[v]], **like), **options)
            for m, v in zip(self.centres, self.variances, strict=True)
        ]
        return Mixture(parts, torch.tensor(self.weights, **like), **options)

    def oracle(self, a):
        t = a[0]
        parts = [
            (mpmath.mpf(w), m * t + v * t**2 / 2, m + v * t, v)
            for w, m, v in zip(self.weights, self.centres, self.variances, strict=True)
        ]
        masses = [w * mpmath.exp(kappa) for w, kappa, _, _ in parts]
        total = mpmath.fsum(masses)
        mean = mpmath.fsum(m / total * p[2] for m, p in zip(masses, parts, strict=True))
        cov = mpmath.fsum(
            m / total * (p[3] + (p[2] - mean) ** 2) for m, p in zip(masses, parts, strict=True)
        )
        return mpmath.log(total), [mean], [[cov]]


def test_equal_weights_are_the_default():
    parts = [Rademacher(1), UniformBox(2.0), UniformSphere(3.0, 1)]
    a = torch.tensor([0.75], dtype=F64)
    mean = sum(part.log_mgf(a).exp() for part in parts) / 3
    for law in (Mixture(parts), Mixture(parts, [2.0, 2.0, 2.0])):
        torch.testing.assert_close(law.log_mgf(a), mean.log(), rtol=1e-14, atol=0)


def test_a_mixture_is_sampled_by_weight():
    """Shares of the components within 4.5 standard errors; weight 0 is never drawn."""
    points = [Gaussian(torch.tensor([m]), torch.zeros(1, 1)) for m in (0.0, 1.0, 2.0, 3.0)]
    weights = torch.tensor([[0.0, 0.2, 0.5, 0.3], [0.7, 0.0, 0.3, 0.0]])
    tokens = Mixture(points, weights).sample(10_000, generator=generator())[..., 0]
    for row, shares in zip(tokens, weights, strict=True):
        counts = torch.stack([(row == m).double().mean() for m in range(4)])
        std_error = (shares * (1 - shares) / 10_000).sqrt()
        assert ((counts - shares).abs() <= STANDARD_ERRORS * std_error + 1e-7).all()
        # neighbours are independent: the chance to see the same component twice is sum of squares
        twice = (row[1:] == row[:-1]).double().mean()
        assert abs(twice - shares.square().sum()) <= STANDARD_ERRORS * 0.5 / 100


def test_a_mixture_of_prompts_is_the_prompt_of_all_tokens(device):
    """What folding a prompt chunk by chunk rests on."""
    tokens = randn(10, 2, seed=1).to(device)
    chunks = [Empirical(tokens[:3]), Empirical(tokens[3:])]
    mixed = Mixture(chunks, torch.tensor([0.3, 0.7], dtype=F64, device=device))
    a = randn(4, 2, seed=2).to(device)
    for name, power in (("tilted_mean", 1), ("tilted_cov", 2)):
        whole, parts = (getattr(law, name)(a) for law in (Empirical(tokens), mixed))
        assert_close(parts, whole, a, 3.0, power)


# -- products -------------------------------------------------------------------------------------


class TestProduct(FromNumbers):
    """Blocks of different sizes: a batched Gaussian, signs, a batched box."""

    dim = 5
    scale = 6.0

    def numbers(self, i):
        half_width = torch.tensor([1.5, 0.5], dtype=F64) * (1 - i / 4)
        return numbers_of_a_gaussian(i) | dict(half_width=half_width)

    def law(self, options, mean, cov, half_width):
        box = UniformBox(half_width, **options)
        return Product([Gaussian(mean, cov, **options), Rademacher(1, **options), box])


def test_a_product_of_signs_is_signs(device):
    a = randn(4, 5, seed=1).to(device)
    product = Product([Rademacher(2), Rademacher(3)])
    for name in ("log_mgf", "tilted_mean", "tilted_cov"):
        got, expected = (getattr(law, name)(a) for law in (product, Rademacher(5)))
        torch.testing.assert_close(got, expected, rtol=1e-14, atol=0)


# -- affine images --------------------------------------------------------------------------------


class TestImageOfSigns(FromNumbers):
    """Three signs mapped to the plane and moved, each member by its own map."""

    dim = 2
    scale = 6.0

    def numbers(self, i):
        return dict(A=randn(2, 3, seed=i), b=randn(2, seed=10 + i))

    def law(self, options, A, b):
        return Rademacher(3, **options).pushforward(A, b)


class TestImageOfASphere(FromNumbers):
    """Batched maps into a larger space, one radius for all, no offset."""

    dim = 3
    scale = 4.0
    shared = ("radius",)

    def numbers(self, i):
        return dict(A=randn(3, 2, seed=i), radius=torch.tensor(1.5, dtype=F64))

    def law(self, options, A, radius):
        return UniformSphere(radius, 2, **options).pushforward(A)


class TestImageOfAGaussian(FromNumbers):
    """Gaussian again, in closed form."""

    dim = 3
    scale = 12.0
    closed = Gaussian

    def numbers(self, i):
        return numbers_of_a_gaussian(i) | dict(A=randn(3, 2, seed=i), b=randn(3, seed=10 + i))

    def law(self, options, mean, cov, A, b):
        return Gaussian(mean, cov, **options).pushforward(A, b)

    def test_the_result_is_of_the_closed_class(self, device, batched):
        assert type(self.make(F64, device, batched)) is self.closed


class TestImageOfAPrompt(TestImageOfAGaussian):
    """A prompt again: its tokens are mapped, their weights stay."""

    scale = 8.0
    closed = Empirical
    shared = ("tokens", "log_weights")

    def numbers(self, i):
        tokens, log_weights = randn(6, 2, seed=20), randn(6, seed=21)
        return dict(
            tokens=tokens, log_weights=log_weights, A=randn(3, 2, seed=i), b=randn(3, seed=10 + i)
        )

    def law(self, options, tokens, log_weights, A, b):
        return Empirical(tokens, log_weights, **options).pushforward(A, b)


@pytest.mark.parametrize("name", ["Gaussian", "Empirical"])
def test_closed_images_equal_the_general_one(device, name):
    A, b = randn(2, 3, 2, seed=1).to(device), randn(3, seed=2).to(device)
    mean, cov = (x.to(device) for x in numbers_of_a_gaussian(0).values())
    law = {"Gaussian": Gaussian(mean, cov), "Empirical": Empirical(randn(5, 2, seed=3).to(device))}
    closed, general = law[name].pushforward(A, b), PushForward(law[name], A, b)
    a = randn(4, 1, 3, seed=4).to(device)
    wide = a.expand(4, 2, 3)
    for method, power in (("tilted_mean", 1), ("tilted_cov", 2)):
        got, expected = (getattr(law, method)(a) for law in (closed, general))
        assert_close(got, expected, wide, 12.0, power)


def test_images_compose(device):
    A, b = randn(3, 2, seed=1).to(device), randn(3, seed=2).to(device)
    B, c = randn(2, 3, seed=3).to(device), randn(2, seed=4).to(device)
    a = randn(5, 2, seed=5).to(device)
    for law in (Rademacher(2), UniformSphere(1.5, 2)):
        twice = law.pushforward(A, b).pushforward(B, c)
        once = law.pushforward(B @ A, B @ b + c)
        assert_close(twice.tilted_mean(a), once.tilted_mean(a), a, 9.0, 1)
        assert_close(twice.cov, once.cov, a[0], 9.0, 2)


# -- sums -----------------------------------------------------------------------------------------


class TestGaussianPlusCoin(FromNumbers):
    dim = 2
    scale = 5.0

    numbers = staticmethod(numbers_of_a_gaussian)

    def law(self, options, mean, cov):
        return Gaussian(mean, cov, **options).convolve(Rademacher(2, **options))


class TestPromptPlusGaussian(FromNumbers):
    """A smoothed prompt; the prompt is one for all members."""

    dim = 2
    scale = 6.0
    shared = ("tokens",)

    def numbers(self, i):
        return numbers_of_a_gaussian(i) | dict(tokens=randn(5, 2, seed=1))

    def law(self, options, mean, cov, tokens):
        return Empirical(tokens, **options).convolve(Gaussian(mean, cov, **options))


class TestPromptPlusPrompt(FromNumbers):
    """Sums of tokens of two prompts, one of them weighted."""

    dim = 2
    scale = 6.0

    def numbers(self, i):
        first, second = randn(4, 2, seed=i), randn(6, 2, seed=10 + i)
        return dict(first=first, second=second, log_weights=randn(6, seed=20 + i))

    def law(self, options, first, second, log_weights):
        return Empirical(first, **options).convolve(Empirical(second, log_weights, **options))


class TestGaussianPlusGaussian(TestImageOfAGaussian):
    """Gaussian again, in closed form; one of the two is not batched."""

    dim = 2
    scale = 6.0
    shared = ("other",)

    def numbers(self, i):
        return numbers_of_a_gaussian(i) | dict(other=torch.eye(2, dtype=F64) / 4)

    def law(self, options, mean, cov, other):
        blur = Gaussian(other[0], other, **options)
        return Gaussian(mean, cov, **options).convolve(blur)


def test_a_sum_of_prompts_is_the_prompt_of_all_sums(device):
    first, second = randn(3, 2, seed=1).to(device), randn(4, 2, seed=2).to(device)
    sums = (first[:, None] + second).reshape(-1, 2)
    a = randn(5, 2, seed=3).to(device)
    law = Empirical(first).convolve(Empirical(second))
    for name, power in (("tilted_mean", 1), ("tilted_cov", 2)):
        got, expected = (getattr(x, name)(a) for x in (law, Empirical(sums)))
        assert_close(got, expected, a, 5.0, power)


# -- members side by side -------------------------------------------------------------------------


class TestExpandedSigns(MeasureCase):
    """A law without numbers has a batch by `expand` alone; its members are drawn apart."""

    dim = 2
    scale = 2**0.5
    variants = ("single", "batched")

    def make(self, dtype, device, batched=False, **options):
        return Rademacher(self.dim, **options).expand((3,) if batched else ())


LAWS = {
    "signs": Rademacher(2),
    "box": UniformBox([1.0, 2.0]),
    "sphere": UniformSphere(1.5, 2),
    "gaussian": Gaussian(*numbers_of_a_gaussian(0).values()),
    "prompt": Empirical(randn(5, 2, seed=1)),
    "weighted prompt": Empirical(randn(5, 2, seed=1), randn(5, seed=2)),
    "mixture": Mixture([Rademacher(2), UniformBox([1.0, 2.0])]),
    "product": Product([Rademacher(1), UniformBox(1.0)]),
    "image": Rademacher(2).pushforward(randn(2, 2, seed=1)),
    "sum": Rademacher(2).convolve(Gaussian(*numbers_of_a_gaussian(0).values())),
}
EVERY_LAW = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())


@EVERY_LAW
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)])
def test_every_law_gives_prompts_in_every_batch_shape(law, shape):
    wide = law.expand(shape)
    tokens = wide.sample(7, generator=generator())
    prompt = Empirical(tokens)
    assert prompt.tokens.shape == (*shape, 7, 2)
    assert prompt.batch_shape == wide.batch_shape == shape
    a = randn(4, *[1] * len(shape), 2, seed=1)
    assert prompt.tilted_mean(a).shape == wide.tilted_mean(a).shape == (4, *shape, 2)
    members = tokens.reshape(-1, 7, 2)
    same = [torch.equal(x, y) for i, x in enumerate(members) for y in members[:i]]
    assert not any(same)


@EVERY_LAW
def test_queries_and_members_of_equal_number_pair_up(law):
    """Q queries against Q members: one each; with an axis between them, all against all."""
    factors = torch.tensor([1.0, 2.0, -0.5], dtype=F64)
    scaled = law.pushforward(factors[:, None, None] * torch.eye(2, dtype=F64))
    a = randn(3, 2, seed=1)
    paired, crossed = scaled.tilted_mean(a), scaled.tilted_mean(a[:, None, :])
    assert paired.shape == (3, 2)
    assert crossed.shape == (3, 3, 2)
    for q in range(3):
        assert_close(paired[q], crossed[q, q], a[q], 9.0, 1)
        for member, factor in enumerate(factors):
            alone = factor * law.tilted_mean(factor * a[q])
            assert_close(crossed[q, member], alone, a[q], 9.0, 1)
    with pytest.raises(ValueError, match="must broadcast"):
        scaled.tilted_mean(randn(4, 2, seed=1))


def test_attention_reads_batched_combinations(device):
    law = TestMixtureOfBatchedAndUnbatched().make(F64, device, batched=True)
    z, U, V = randn(5, 1, 4, seed=1), randn(2, 4, seed=2), randn(1, 2, seed=3)
    z, U, V = (x.to(device) for x in (z, U, V))
    out = attend(law, z, U=U, V=V)
    assert out.shape == (5, 3, 1)
    torch.testing.assert_close(out, law.tilted_mean(z @ U.mT) @ V.mT, rtol=1e-12, atol=1e-12)


def test_parts_keep_their_own_batch_when_converted():
    law = TestMixtureOfBatchedAndUnbatched().make(F64, "cpu", batched=True)
    for changed in (law.to(F32), law.to("meta")):
        assert [part.batch_shape for part in changed.parts] == [(3,), (), ()]
    assert all(part.batch_shape == (2, 3) for part in law.expand((2, 3)).parts)
    assert [part.batch_shape for part in law.parts] == [(3,), (), ()]


def test_weights_as_plain_numbers_keep_their_digits():
    """0.3 is no float32 number: the trip through float32 must not round what follows the query."""
    law, a = Mixture([Rademacher(1), UniformBox(2.0)], [0.3, 0.7]), torch.tensor([0.5], dtype=F64)
    assert torch.equal(law.to(F32).log_mgf(a), law.log_mgf(a))
    assert law.log_mgf(a.float()).dtype == F32


def test_reprs_name_the_parts():
    law = Mixture([Product([Rademacher(1), UniformBox(2.0)]), UniformSphere(1.0, 2).expand((3,))])
    assert repr(law) == (
        "Mixture([Product([Rademacher(dim=1, batch_shape=()), UniformBox(dim=1, batch_shape=())], "
        "dim=2, batch_shape=()), UniformSphere(dim=2, batch_shape=(3,))], dim=2, batch_shape=(3,))"
    )


# -- random expressions ---------------------------------------------------------------------------

LEAVES = ("gaussian", "prompt", "signs", "box", "sphere")
OPERATIONS = ("image", "sum", "product", "mixture")
MEMBERS = 2


@dataclass(frozen=True)
class Node:
    """A law as an expression; its numbers follow from the seed."""

    kind: str
    dim: int
    batched: bool
    seed: int
    parts: tuple["Node", ...] = ()

    def randn(self, *shape, n=0):
        """(2, *shape) for a batched node, else (*shape)."""
        return randn(*[MEMBERS] * self.batched, *shape, seed=10 * self.seed + n)

    def numbers(self) -> dict[str, torch.Tensor]:
        d, kind = self.dim, self.kind
        if kind == "gaussian":
            factor = self.randn(d, d)
            return dict(mean=self.randn(d, n=1), cov=factor @ factor.mT)
        if kind == "prompt":
            return dict(tokens=self.randn(4, d), log_weights=self.randn(4, n=1))
        if kind == "box":
            return dict(half_width=self.randn(d).abs())
        if kind == "sphere":
            return dict(radius=self.randn().abs())
        if kind == "image":
            return dict(A=self.randn(d, self.parts[0].dim), b=self.randn(d, n=1))
        if kind == "mixture":
            weights = self.randn(len(self.parts)).abs()
            weights[..., 0] *= self.seed % 3  # one in three has a component of weight 0
            return dict(weights=weights)
        return {}

    def member(self, i) -> dict[str, list]:
        return {k: (v[i] if self.batched else v).tolist() for k, v in self.numbers().items()}


@functools.cache
def expressions(dim, depth):
    """Expressions of exactly this depth on R^dim; of the parts the first is the deepest."""
    seeds, batched = st.integers(0, 999), st.booleans()

    def nodes(kind, *parts):
        return st.builds(Node, st.sampled_from(kind), st.just(dim), batched, seeds,
                         st.tuples(*parts))

    if depth == 0:
        return nodes(LEAVES)

    def deep(d):
        return expressions(d, depth - 1)

    def any_depth(d):
        return st.one_of(*(expressions(d, k) for k in range(depth)))

    images = st.integers(1, 3).flatmap(lambda inner: nodes(["image"], deep(inner)))
    sums = nodes(["sum", "mixture"], deep(dim), any_depth(dim))
    mixtures = nodes(["mixture"], deep(dim), any_depth(dim), expressions(dim, 0))
    if dim == 1:
        return st.one_of(images, sums, mixtures)
    products = st.integers(1, dim - 1).flatmap(
        lambda first: nodes(["product"], deep(first), any_depth(dim - first))
    )
    return st.one_of(images, sums, mixtures, products)


def build(node, device):
    """The package's law of an expression."""
    numbers = {k: v.to(device) for k, v in node.numbers().items()}
    parts = [build(part, device) for part in node.parts]
    plain = node.seed % 2 and not node.batched  # now and then as plain numbers
    if node.kind == "gaussian":
        return Gaussian(**numbers)
    if node.kind == "prompt":
        return Empirical(**numbers)
    if node.kind == "signs":
        return Rademacher(node.dim).expand((MEMBERS,) if node.batched else ())
    if node.kind == "box":
        return UniformBox(numbers["half_width"].tolist() if plain else numbers["half_width"])
    if node.kind == "sphere":
        radius = numbers["radius"]
        return UniformSphere(radius.item() if plain else radius, node.dim)
    if node.kind == "image":
        return parts[0].pushforward(**numbers)
    if node.kind == "sum":
        return functools.reduce(lambda x, y: x.convolve(y), parts)
    if node.kind == "product":
        return Product(parts)
    return Mixture(parts, numbers["weights"].tolist() if plain else numbers["weights"])


def leaf(node, i, a):
    """(kappa, mean, cov, size of tokens) of a leaf, from its definition."""
    given, axes = node.member(i), range(node.dim)
    if node.kind == "gaussian":
        mean, cov = mpmath.matrix(given["mean"]), mpmath.matrix(given["cov"])
        a = mpmath.matrix(a)
        moved = mean + cov * a
        size = mpmath.norm(mean) + mpmath.norm(cov * a) + mpmath.sqrt(mpmath.mnorm(cov, "f"))
        return (a.T * (mean + moved))[0] / 2, list(moved), cov.tolist(), size
    if node.kind == "prompt":
        weights = [mpmath.exp(w) for w in given["log_weights"]]
        size = max(mpmath.norm(x) for x in given["tokens"])
        return *atoms_oracle(given["tokens"], weights, a), size
    if node.kind == "sphere":
        radius, length = mpmath.mpf(given["radius"]), mpmath.norm(a)
        kappa, mean, across, along = sphere_oracle(node.dim, radius * length)
        u = [x / length for x in a]
        cov = [
            [radius**2 * (across * (j == k) + (along - across) * u[j] * u[k]) for k in axes]
            for j in axes
        ]
        return kappa, [radius * mean * x for x in u], cov, radius
    if node.kind == "box":
        width = [mpmath.mpf(h) for h in given["half_width"]]
        coordinates = [box_oracle(h, x) for h, x in zip(width, a, strict=True)]
    else:
        width, coordinates = [1] * node.dim, [coin_oracle(x) for x in a]
    kappas, mean, variances = zip(*coordinates, strict=True)
    cov = mpmath.diag(list(variances)).tolist()
    return mpmath.fsum(kappas), list(mean), cov, mpmath.norm(width)


def evaluate(node, i, a):
    """The same of any expression at member i, by the algebra's formulas alone."""
    given = node.member(i)
    if node.kind in LEAVES:
        return leaf(node, i, a)
    if node.kind == "image":
        A, b = mpmath.matrix(given["A"]), mpmath.matrix(given["b"])
        a = mpmath.matrix(a)
        kappa, mean, cov, size = evaluate(node.parts[0], i, list(A.T * a))
        size = mpmath.mnorm(A, "f") * size + mpmath.norm(b)
        mean, cov = A * mpmath.matrix(mean) + b, A * mpmath.matrix(cov) * A.T
        return kappa + (b.T * a)[0], list(mean), cov.tolist(), size
    if node.kind == "product":
        blocks = [a[: node.parts[0].dim], a[node.parts[0].dim :]]
        parts = [evaluate(part, i, x) for part, x in zip(node.parts, blocks, strict=True)]
        (k, m, c, r), (k2, m2, c2, r2) = parts
        zeros = [mpmath.mpf(0)]
        cov = [row + zeros * len(m2) for row in c] + [zeros * len(m) + row for row in c2]
        return k + k2, m + m2, cov, r + r2
    kappas, means, covs, sizes = zip(*(evaluate(p, i, a) for p in node.parts), strict=True)
    if node.kind == "sum":
        return mpmath.fsum(kappas), combine(means), combine(covs), sum(sizes)
    weights = [mpmath.mpf(w) for w in given["weights"]]
    masses = [w * mpmath.exp(k) for w, k in zip(weights, kappas, strict=True)]
    shares = [m / mpmath.fsum(masses) for m in masses]
    mean = combine(means, shares)
    spread = [[[(x - y) * (v - w) for v, w in zip(m, mean, strict=True)]
               for x, y in zip(m, mean, strict=True)] for m in means]
    within = combine(covs, shares)
    between = combine(spread, shares)
    kappa = mpmath.log(mpmath.fsum(masses) / mpmath.fsum(weights))
    return kappa, mean, combine([within, between]), max(sizes)


def combine(tables, shares=None):
    """The (weighted) sum of nested lists of equal shape."""
    shares = shares or [1] * len(tables)
    if isinstance(tables[0], list):
        return [combine(rows, shares) for rows in zip(*tables, strict=True)]
    return mpmath.fsum(s * x for s, x in zip(shares, tables, strict=True))


@given(st.integers(1, 3).flatmap(lambda d: expressions(d, 3)), st.integers(0, 999))
def test_random_expressions_follow_the_algebra(device, node, seed):
    """Laws built by the package against the algebra's formulas over mpmath, to 1e-12 of scale.

    The scale of kappa is |a| r, of the mean r, of the covariance r^2, r the size of the tokens;
    tilts go up to |a| r = 10, where rounding is 8 eps |a| r = 2e-14.
    """
    law = build(node, device)
    assert law.dim == node.dim
    members = range(law.batch_shape.numel())
    assert law.batch_shape in ((), (MEMBERS,))
    with mpmath.workdps(40):
        direction = randn(2, node.dim, seed=seed)
        direction = direction / direction.norm(dim=-1, keepdim=True)
        r = max(float(evaluate(node, i, [mpmath.mpf(1e-9)] * node.dim)[3]) for i in members)
        tilts = direction * torch.tensor([[0.5], [10.0]], dtype=F64) / r
        a = (tilts[:, None, :] if law.batch_shape else tilts).to(device)
        w = direction[1].to(device)
        got = [law.log_mgf(a), law.tilted_mean(a), law.tilted_cov(a), law.tilted_cov_product(a, w)]
        got = [x.cpu() if law.batch_shape else x.cpu()[:, None] for x in got]
        for q, tilt in enumerate(tilts.tolist()):
            for i in members:
                kappa, mean, cov, size = evaluate(node, i, [mpmath.mpf(x) for x in tilt])
                exact = [torch.tensor(to_floats(x), dtype=F64) for x in (kappa, mean, cov)]
                exact.append(exact[2] @ direction[1])
                length, size = tilts[q].norm().item(), float(size)
                for value, expected, scale in zip(
                    got, exact, (length * size, size, size**2, size**2), strict=True
                ):
                    assert (value[q, i] - expected).abs().max() <= 1e-12 * scale


def to_floats(table):
    return [to_floats(x) for x in table] if isinstance(table, list) else float(table)


def test_random_expressions_reach_every_law_and_operation():
    """The search above is worth its name: its forty examples use all that there is."""
    seen, depths = set(), set()

    def depth(node):
        seen.add((node.kind, node.batched))
        return 1 + max(map(depth, node.parts)) if node.parts else 0

    @given(st.integers(1, 3).flatmap(lambda d: expressions(d, 3)))
    def look(node):
        depths.add(depth(node))

    look()
    assert depths == {3}
    assert seen >= {(kind, batched) for kind in LEAVES + OPERATIONS for batched in (True, False)}


# -- bad input ------------------------------------------------------------------------------------

PLANE = Gaussian(torch.zeros(2), torch.eye(2))
LINE = Gaussian(torch.zeros(1), torch.eye(1))
BATCH = Gaussian(torch.zeros(4, 2), torch.eye(2))
EYE = torch.eye(2)
CASES = {
    # mixtures
    "no component": (
        lambda: Mixture([]),
        ValueError, "one measure or more", "got none", "Put at least one",
    ),
    "one component without a list": (
        lambda: Mixture(PLANE),
        TypeError, "expected a list of measures", "one Gaussian", "Put it in a list",
    ),
    "tokens as a component": (
        lambda: Mixture([PLANE, torch.zeros(3, 2)]),
        TypeError, "expected measures", "Tensor", "Empirical(tokens)",
    ),
    "components on two spaces": (
        lambda: Mixture([PLANE, LINE]),
        ValueError, "must live in one space", "2 and 1", "pushforward",
    ),
    "components of two dtypes": (
        lambda: Mixture([PLANE, PLANE.to(F64)]),
        TypeError, "must have the dtype of", "torch.float64", "torch.float32",
    ),
    "components on two devices": (
        lambda: Mixture([Rademacher(2), PLANE, PLANE.to("meta")]),
        TypeError, "must have the device of", "meta",
    ),
    "batches of components differ": (
        lambda: Mixture([BATCH, BATCH.expand((4,)), UniformSphere(torch.ones(3), 2)]),
        ValueError, "must broadcast", "(3,)", "(4,)",
    ),
    "a weight too many": (
        lambda: Mixture([PLANE, PLANE], [1.0, 1.0, 1.0]),
        ValueError, "one entry a measure, shape (*batch, 2)", "(3,)", "last axis",
    ),
    "one weight without an axis": (
        lambda: Mixture([PLANE], 1.0),
        ValueError, "one entry a measure, shape (*batch, 1)", "()", "last axis",
    ),
    "a negative weight": (
        lambda: Mixture([PLANE, PLANE], [1.5, -0.5]),
        ValueError, "0 or more and not all 0", "[1.5, -0.5]", "not a token law",
    ),
    "all weights 0 in one member": (
        lambda: Mixture([PLANE, PLANE], torch.tensor([[1.0, 0.0], [0.0, 0.0]])),
        ValueError, "0 or more and not all 0", "[0.0, 0.0]", "not a token law",
    ),
    "a nan weight": (
        lambda: Mixture([PLANE, PLANE], [torch.nan, 1.0]),
        ValueError, "weights must be finite", "nan at index (0,)", "Remove it",
    ),
    "weights of text": (
        lambda: Mixture([PLANE], ["half"]),
        TypeError, "weights must be a torch.Tensor, a number", "['half']", "torch.as_tensor",
    ),
    "weights of another dtype": (
        lambda: Mixture([PLANE, PLANE], torch.ones(2).double()),
        TypeError, "weights must have the dtype of the measures", "float64", "weights.to(",
    ),
    "whole weights": (
        lambda: Mixture([PLANE, PLANE], torch.tensor([1, 2])),
        TypeError, "weights must be float32 or float64", "torch.int64", "weights.to(torch.float64)",
    ),
    "batch of weights does not fit": (
        lambda: Mixture([BATCH, BATCH], torch.ones(3, 2)),
        ValueError, "leading axes of weights, (3,)", "(4,) of the measures",
    ),
    # products and sums
    "no block": (
        lambda: Product([]),
        ValueError, "one measure or more", "got none", "Put at least one",
    ),
    "a number as a block": (
        lambda: Product([PLANE, 2.0]),
        TypeError, "expected measures", "float", "Empirical(tokens)",
    ),
    "blocks of two dtypes": (
        lambda: Product([PLANE, Rademacher(1), LINE.to(F64)]),
        TypeError, "must have the dtype of", "torch.float64", "torch.float32",
    ),
    "batches of blocks differ": (
        lambda: Product([BATCH, UniformBox(torch.ones(3, 1))]),
        ValueError, "must broadcast", "(3,)", "(4,)",
    ),
    "no term": (
        lambda: Convolution([]),
        ValueError, "one measure or more", "got none", "Put at least one",
    ),
    "terms on two spaces": (
        lambda: PLANE.convolve(Rademacher(3)),
        ValueError, "must live in one space", "2 and 3", "pushforward",
    ),
    "Gaussian terms on two spaces": (
        lambda: PLANE.convolve(LINE),
        ValueError, "must live in one space", "2 and 1", "pushforward",
    ),
    "a vector as a term": (
        lambda: Rademacher(2).convolve(torch.ones(2)),
        TypeError, "expected measures", "Tensor", "Empirical(tokens)",
    ),
    # affine images
    "A transposed": (
        lambda: Rademacher(3).pushforward(torch.ones(3, 2)),
        ValueError, "tokens of dimension 3", "(*batch, M, 3)", "(3, 2)", "Transpose it?",
    ),
    "A is a vector": (
        lambda: PLANE.pushforward(torch.ones(2)),
        ValueError, "A must have shape (*batch, M, D)", "(2,)", "unsqueeze",
    ),
    "A is a list": (
        lambda: Rademacher(1).pushforward([[1.0]]),
        TypeError, "A must be a torch.Tensor", "list", "torch.as_tensor(A",
    ),
    "A maps to nowhere": (
        lambda: Rademacher(2).pushforward(torch.ones(0, 2)),
        ValueError, "dimension 1 or more", "got 0", "Check axis -1",
    ),
    "A of another dtype": (
        lambda: PLANE.pushforward(EYE.double()),
        TypeError, "A must have the dtype of the Gaussian measure", "float64", "A.to(",
    ),
    "A is nan": (
        lambda: Rademacher(2).pushforward(EYE * torch.nan),
        ValueError, "A must be finite", "nan at index (0, 0)", "Remove it",
    ),
    "b is infinite": (
        lambda: Rademacher(2).pushforward(EYE, torch.tensor([0.0, torch.inf])),
        ValueError, "b must be finite", "inf at index (1,)", "Remove it",
    ),
    "b of another size": (
        lambda: Rademacher(2).pushforward(EYE, torch.ones(3)),
        ValueError, "one entry a row of A, shape (*batch, 2)", "(3,)", "Expand",
    ),
    "b without an axis": (
        lambda: Rademacher(2).pushforward(EYE, torch.tensor(1.0)),
        ValueError, "one entry a row of A, shape (*batch, 2)", "()", "Expand",
    ),
    "b of another dtype": (
        lambda: Rademacher(2).pushforward(EYE, torch.ones(2).double()),
        TypeError, "b must have the dtype of A", "torch.float64", "b.to(torch.float32)",
    ),
    "batches of A and b differ": (
        lambda: Rademacher(2).pushforward(EYE.expand(3, 2, 2), torch.ones(4, 2)),
        ValueError, "must broadcast", "(4,)", "(3,) of the batch of A",
    ),
    "batch of A does not fit the law": (
        lambda: BATCH.pushforward(EYE.expand(3, 2, 2)),
        ValueError, "must broadcast", "(3,)", "(4,) of the measure's batch",
    ),
    # queries and samples of combinations
    "query of another dtype": (
        lambda: Product([Rademacher(1), LINE]).log_mgf(torch.zeros(2).double()),
        TypeError, "dtype of the Product measure", "torch.float64", "a.to(torch.float32)",
    ),
    "query of another dimension": (
        lambda: Product([PLANE, LINE]).tilted_mean(torch.zeros(2)),
        ValueError, "dimension of the tokens, 3", "(2,)", "a = U z",
    ),
    "half a token": (
        lambda: Mixture([PLANE, PLANE]).sample(0.5, generator=generator()),
        ValueError, "whole number of tokens, 0 or more", "0.5",
    ),
    "a seed in place of a generator": (
        lambda: Product([PLANE, LINE]).sample(3, generator=0),
        TypeError, "generator must be a torch.Generator", "int", "manual_seed",
    ),
    "sample of another dtype": (
        lambda: Convolution([Rademacher(2), PLANE]).sample(3, generator=generator(), dtype=F64),
        TypeError, "torch.float32 on cpu", "got torch.float64", "Convert the law: .to()",
    ),
}


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_bad_input_is_refused(case):
    assert_refused(*case)


def test_value_checks_can_be_skipped():
    unchecked = dict(validate_args=False)
    assert Mixture([PLANE, PLANE], [1.5, -0.5], **unchecked).dim == 2
    law = Rademacher(2, **unchecked).pushforward(EYE * torch.nan)
    assert not law.validate_args
    assert not Product([law, LINE]).validate_args
    assert Product([LINE, PLANE]).validate_args
    coin = Discrete(torch.tensor([[0.0], [1.0]]), torch.ones(2), **unchecked)
    assert not LINE.convolve(coin).validate_args

"""Uniform laws on boxes and spheres: one radial function against mpmath, in any dimension."""

import math

import mpmath
import pytest
import torch
from measure_case import (
    F32,
    F64,
    FromNumbers,
    MeasureCase,
    OracleCase,
    assert_close,
    assert_close_log_mgf,
    assert_refused,
    generator,
)

from measureattn import Discrete, Rademacher, UniformBox, UniformSphere

DIMS = (1, 2, 3, 7, 1000, 2000)
TILTS = [10 ** (k / 4) for k in range(-32, 17)]  # 1e-8 to 1e4
WIDTHS = (1.5, 0.5, 0.25)


def box_oracle(width, a):
    """kappa, mean and variance of a uniform number on [-width, width]."""
    x = width * a
    kappa, mean = mpmath.log(mpmath.sinh(x) / x), width * (mpmath.coth(x) - 1 / x)
    return kappa, mean, width**2 * (1 / x**2 - mpmath.csch(x) ** 2)


def coin_oracle(a):
    return mpmath.log(mpmath.cosh(a)), mpmath.tanh(a), mpmath.sech(a) ** 2


def sphere_oracle(dim, t):
    """k, A = k', A/t (variance across) and A' (along) of the unit sphere, by 0F1."""
    if dim == 1:  # where 1 - A^2 would lose all its digits
        kappa, mean, variance = coin_oracle(mpmath.mpf(t))
        return kappa, mean, mean / t, variance
    t, half = mpmath.mpf(t), mpmath.mpf(dim) / 2
    here = mpmath.hyp0f1(half, t**2 / 4)
    across = mpmath.hyp0f1(half + 1, t**2 / 4) / here / dim
    mean = t * across
    return mpmath.log(here), mean, across, 1 - mean**2 - (dim - 1) * across


# -- boxes ----------------------------------------------------------------------------------------


class TestBox(OracleCase, FromNumbers):
    """Half widths in a tensor, in batches."""

    dim = 3
    scale = 2.0
    direction = (1.0, -0.6, 0.3)

    def numbers(self, i):
        return dict(half_width=torch.tensor(WIDTHS[: self.dim], dtype=F64) * (1 - i / 4))

    def law(self, options, half_width):
        return UniformBox(half_width, **options)

    def oracle(self, a):
        parts = [box_oracle(mpmath.mpf(h), x) for h, x in zip(WIDTHS, a, strict=False)]
        kappas, means, variances = zip(*parts, strict=True)
        return mpmath.fsum(kappas), list(means), mpmath.diag(list(variances)).tolist()


class TestBoxOfAList(OracleCase, MeasureCase):
    """Half widths as plain numbers: the law follows the query."""

    dim = 3
    scale = 2.0
    direction = (1.0, -0.6, 0.3)
    oracle = TestBox.oracle

    def make(self, dtype, device, batched=False, **options):
        return UniformBox(list(WIDTHS), **options)


class TestInterval(TestBoxOfAList):
    dim = 1
    scale = 1.5
    direction = (1.0,)

    def make(self, dtype, device, batched=False, **options):
        return UniformBox(1.5, **options)


class TestFlatBox(FromNumbers):
    """One side of length 0: a coordinate that is always 0."""

    dim = 2
    scale = 2.0

    def numbers(self, i):
        return dict(half_width=torch.tensor([1.5 - i / 2, 0.0], dtype=F64))

    def law(self, options, half_width):
        return UniformBox(half_width, **options)


def test_a_box_is_made_of_its_sides(device):
    a = torch.tensor([0.5, -2.0, 30.0], dtype=F64, device=device)
    box = UniformBox(list(WIDTHS))
    sides = [UniformBox(h).log_mgf(x[None]) for h, x in zip(WIDTHS, a, strict=True)]
    torch.testing.assert_close(box.log_mgf(a), sum(sides), rtol=1e-14, atol=0)


def test_samples_fill_the_box(dtype, device):
    like = dict(generator=generator(), dtype=dtype, device=device)
    tokens = UniformBox([1.5, 0.5]).sample(10_000, **like)
    size = torch.tensor([1.5, 0.5], dtype=dtype, device=device)
    assert (tokens.abs() <= size).all()
    # the largest of n uniform sizes falls short of 1 by more than 12/n once in exp(12) draws
    assert (tokens.abs().amax(0) >= size * (1 - 12e-4)).all()


# -- spheres --------------------------------------------------------------------------------------


class TestSphere(OracleCase, FromNumbers):
    """The radius in a tensor, in batches."""

    dim = 3
    scale = 1.5

    @property
    def direction(self):
        return (1.0, -0.6, 0.3, 0.5, 0.2, -0.1, 0.7)[: self.dim]

    def numbers(self, i):
        return dict(radius=torch.tensor(1.5 - i / 2, dtype=F64))

    def law(self, options, radius):
        return UniformSphere(radius, self.dim, **options)

    def oracle(self, a):
        radius, size = mpmath.mpf(1.5), mpmath.sqrt(mpmath.fsum(x * x for x in a))
        kappa, mean, across, along = sphere_oracle(self.dim, radius * size)
        unit = [x / size for x in a]
        cov = [
            [radius**2 * (across * (i == j) + (along - across) * u * v) for j, v in enumerate(unit)]
            for i, u in enumerate(unit)
        ]
        return kappa, [radius * mean * u for u in unit], cov


class TestSphereOnTheLine(TestSphere):
    """A scaled coin."""

    dim = 1


class TestCircle(TestSphere):
    dim = 2


class TestSphereInSeven(TestSphere):
    dim = 7


class TestSphereOfANumber(OracleCase, MeasureCase):
    """The radius as a plain number: the law follows the query."""

    dim = 3
    scale = 1.5
    direction = (1.0, -0.6, 0.3)
    oracle = TestSphere.oracle

    def make(self, dtype, device, batched=False, **options):
        return UniformSphere(1.5, self.dim, **options)


class TestSphereInAThousand(MeasureCase):
    """All the laws for the shadow on a plane of a sphere in R^1000, of radius sqrt(1000)."""

    inside = 1000
    dim = 2
    scale = 3.0
    n_queries = 3
    n_sample = 2_500  # a standard error of a covariance is sqrt(2 / n), a fifteenth of 0.05 r^2

    def make(self, dtype, device, batched=False, **options):
        shadow = torch.randn(self.dim, self.inside, generator=generator(5), dtype=F64)
        shadow = (shadow / shadow.norm(dim=-1, keepdim=True)).to(device, dtype)
        return UniformSphere(self.inside**0.5, self.inside, **options).pushforward(shadow)


class TestSphereInTwoThousand(TestSphereInAThousand):
    inside = 2000


@pytest.mark.parametrize("dim", DIMS)
def test_the_radial_function_in_every_dimension(device, dim):
    """log-MGF to 1e-12, mean ratio and variances along and across, each in relative terms.

    For a coin A' is 4 exp(-2t), which carries 2t eps. Elsewhere it falls like d/(2 t^2) and is a
    difference of numbers near 1 up to the turn to a series in 1/t.
    """
    eps, turn = torch.finfo(F64).eps, 40 + dim**2 / 4
    tilts = [*TILTS, turn / 2, 0.99 * turn, 1.01 * turn, 2 * turn, 1e8]
    a = torch.zeros(len(tilts), dim, dtype=F64, device=device)
    a[:, 0] = torch.tensor(tilts, dtype=F64)
    law, e = UniformSphere(1.0, dim), torch.eye(1, dim, dtype=F64, device=device)
    log_mgf, mean = law.log_mgf(a), law.tilted_mean(a)[:, 0]
    along = law.tilted_cov_product(a, e)[:, 0]
    f = torch.eye(dim, dtype=F64, device=device)[-1]
    across = law.tilted_cov_product(a, f)[:, -1] if dim > 1 else None
    tiny = torch.finfo(F64).tiny  # below it a number cannot keep its digits
    for i, t in enumerate(a[:, 0].tolist()):
        with mpmath.workdps(60):
            exact = [float(x) for x in sphere_oracle(dim, t)]
        allowed = 1e-12 + 8 * eps * t if dim == 1 else 1e-12 + 16 * eps * min(t, turn) ** 2 / dim
        assert allowed <= 1e-8 or t > 1e4
        assert log_mgf[i].item() == pytest.approx(exact[0], rel=1e-12, abs=0)
        assert mean[i].item() == pytest.approx(exact[1], rel=1e-12, abs=0)
        assert along[i].item() == pytest.approx(exact[3], rel=allowed, abs=tiny)
        if across is not None:
            assert across[i].item() == pytest.approx(exact[2], rel=1e-12, abs=0)


def test_a_known_ratio(device):
    """A_1000(50) = 0.0498759, where the Bessel functions themselves are near 1e-600."""
    a = torch.zeros(1000, dtype=F64, device=device)
    a[0] = 50
    assert UniformSphere(1.0, 1000).tilted_mean(a)[0].item() == pytest.approx(0.0498759, abs=5e-8)


@pytest.mark.parametrize("law", ["coin", "box"])
def test_values_keep_their_relative_digits(device, law):
    """log-MGF and mean to 1e-12, variances to 1e-12 + 8 eps t, from 1e-8 to 1e4."""
    measure, oracle = {
        "coin": (Rademacher(1), coin_oracle),
        "box": (UniformBox(1.0), lambda a: box_oracle(1, a)),
    }[law]
    a = torch.tensor(TILTS, dtype=F64, device=device)[:, None]
    got = measure.log_mgf(a), measure.tilted_mean(a)[:, 0], measure.tilted_cov(a)[:, 0, 0]
    tiny = torch.finfo(F64).tiny
    for i, t in enumerate(a[:, 0].tolist()):
        with mpmath.workdps(60):
            exact = [float(x) for x in oracle(mpmath.mpf(t))]
        allowed = 1e-12 + 8 * torch.finfo(F64).eps * t
        assert got[0][i].item() == pytest.approx(exact[0], rel=1e-12, abs=0)
        assert got[1][i].item() == pytest.approx(exact[1], rel=1e-12, abs=0)
        assert got[2][i].item() == pytest.approx(exact[2], rel=allowed, abs=tiny)


def test_one_dimension_is_a_coin_and_three_are_a_box(device):
    a = torch.linspace(-30, 30, 61, dtype=F64, device=device)[:, None]
    wide = torch.cat([a, 0 * a, 0 * a], -1)
    for name in ("log_mgf", "tilted_mean", "tilted_cov"):
        line, ball = UniformSphere(1.0, 1), UniformSphere(1.0, 3)
        first, coin = (getattr(law, name)(a).flatten() for law in (line, Rademacher(1)))
        torch.testing.assert_close(first, coin, rtol=1e-12, atol=1e-300)
        shadow = getattr(ball, name)(wide)
        shadow = shadow if name == "log_mgf" else shadow.reshape(61, -1)[:, 0]  # Archimedes
        box = getattr(UniformBox(1.0), name)(a).flatten()
        torch.testing.assert_close(shadow, box, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("dim", DIMS)
def test_high_spheres_agree_with_their_own_derivatives(device, dim):
    law = UniformSphere(2.0, dim)
    a = torch.randn(3, dim, generator=generator(), dtype=F64).to(device)
    a = a / a.norm(dim=-1, keepdim=True) * torch.tensor([[0.0], [3.0], [300.0]], dtype=F64).to(a)
    leaf = a.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(law.log_mgf(leaf).sum(), leaf)
    assert_close(law.tilted_mean(a), gradient, a, 2.0, 1)
    w = torch.randn(dim, generator=generator(1), dtype=F64).to(device)
    w = (w / w.norm()).expand_as(a)
    slope = torch.func.jvp(law.tilted_mean, (a,), (w,))[1]
    assert_close(law.tilted_cov_product(a, w), slope, a, 2.0, 1)
    assert_close((law.tilted_cov(a) @ w[..., None])[..., 0], slope, a, 2.0, 1)


@pytest.mark.parametrize("dim", [1000, 2000])
def test_high_spheres_in_single_precision(device, dim):
    law = UniformSphere(1.0, dim)
    a = torch.randn(6, dim, generator=generator(), dtype=F32).to(device)
    a = a * torch.logspace(-4, 2, 6).to(a)[:, None]
    wide = a.double()
    assert_close_log_mgf(law.log_mgf(a), law.log_mgf(wide), a, 1.0)
    assert_close(law.tilted_mean(a), law.tilted_mean(wide), a, 1.0, 1)


@pytest.mark.parametrize("dim", DIMS)
def test_samples_lie_on_the_sphere(dtype, device, dim):
    like = dict(generator=generator(), dtype=dtype, device=device)
    tokens = UniformSphere(1.5, dim).expand((2,)).sample(100, **like)
    assert tokens.shape == (2, 100, dim)
    assert (tokens.norm(dim=-1) - 1.5).abs().max() <= 8 * torch.finfo(dtype).eps
    assert not torch.equal(tokens[0], tokens[1])


def test_a_huge_tilt_overflows_nothing(device):
    a = torch.tensor([1e150, -1e150], dtype=F64, device=device)
    unit = torch.tensor([0.5, -0.5], dtype=F64, device=device).sqrt() * a.sign()
    for law in (UniformSphere(1.0, 2), UniformBox([1.0, 1.0])):
        assert law.log_mgf(a).isfinite()
        assert law.tilted_cov(a).isfinite().all()
    torch.testing.assert_close(UniformSphere(1.0, 2).tilted_mean(a), unit.nan_to_num(-(0.5**0.5)))
    torch.testing.assert_close(UniformBox([1.0, 1.0]).tilted_mean(a), a.sign())


def test_points_at_the_origin(device):
    a = torch.tensor([3.0, -4.0], dtype=F64, device=device)
    for law in (UniformSphere(0.0, 2), UniformBox([0.0, 0.0])):
        assert law.log_mgf(a) == 0
        assert (law.tilted_mean(a) == 0).all()
        assert (law.tilted_cov(a) == 0).all()


# -- sub-Gaussian laws ----------------------------------------------------------------------------


def proxy(kappa, a):
    """2 kappa(a) / a^2, whose supremum is the sub-Gaussian variance proxy."""
    return 2 * kappa / a**2


@pytest.mark.parametrize("law", ["coin", "box", 2, 3, 7, 1000])
def test_strictly_sub_gaussian(device, law):
    """2 kappa(a) / a^2 stays below the variance and meets it as a -> 0.

    The gap is -kappa_4 a^2 / 12 to first order: of the order of a^2 times the variance squared.
    """
    measure = {"coin": Rademacher(1), "box": UniformBox(1.5)}.get(law)
    measure = measure or UniformSphere(1.5, law)
    a = torch.tensor(TILTS, dtype=F64, device=device)
    tilt = torch.zeros(len(TILTS), measure.dim, dtype=F64, device=device)
    tilt[:, 0] = a
    variance = measure.tilted_cov_product(torch.zeros_like(tilt[:1]), tilt[:1])[0, 0] / a[0]
    ratio = proxy(measure.log_mgf(tilt), a)
    assert (ratio <= variance * (1 + 1e-14)).all()
    seen = a >= 1e-3  # where the gap exceeds rounding the inequality is strict
    assert (ratio[seen] < variance * (1 - 1e-9 * a[seen].clamp(max=1))).all() or law == 1000
    assert (ratio.diff() <= 1e-14 * variance).all()  # and the ratio falls all the way
    small = a <= 1e-2
    assert ((variance - ratio)[small] <= variance * (1e-14 + variance * a[small] ** 2)).all()


@pytest.mark.parametrize("p", [0.01, 0.2, 0.45])
def test_the_skewed_coin_is_sub_gaussian_but_not_strictly(device, p):
    """Its best constant is Buldygin and Moskvichova's, (1 - 2p) / (2 log((1 - p)/p)).

    It is reached at a = 2 log((1 - p)/p) and lies above the variance p (1 - p).
    """
    points = torch.tensor([[-p], [1 - p]], dtype=F64, device=device)
    coin = Discrete(points, torch.tensor([1 - p, p], dtype=F64, device=device))
    odds = math.log((1 - p) / p)
    constant = (1 - 2 * p) / (2 * odds)
    at = torch.tensor([2 * odds], dtype=F64, device=device)
    assert proxy(coin.log_mgf(at), at[0]).item() == pytest.approx(constant, rel=1e-12)
    a = torch.linspace(-20, 20, 4000, dtype=F64, device=device)[:, None]
    assert (proxy(coin.log_mgf(a), a[:, 0]) <= constant * (1 + 1e-12)).all()
    assert p * (1 - p) < constant * (1 - 1e-4)


# -- bad input ------------------------------------------------------------------------------------

NAN = torch.nan
CASES = {
    "half width below 0": (
        lambda: UniformBox(torch.tensor([1.0, -0.5])),
        ValueError, "half_width must be 0 or more", "-0.5 (shape (2,))", "absolute value",
    ),
    "half width of a number below 0": (
        lambda: UniformBox(-1.0),
        ValueError, "half_width must be 0 or more", "-1 (shape ())", "absolute value",
    ),
    "nan half width": (
        lambda: UniformBox([1.0, NAN]),
        ValueError, "half_width must be finite", "nan at index (1,)", "Remove it",
    ),
    "half width without an axis": (
        lambda: UniformBox(torch.tensor(1.0)),
        ValueError, "half_width must have shape (*batch, D)", "()", "unsqueeze",
    ),
    "a table of half widths": (
        lambda: UniformBox([[1.0, 2.0], [3.0, 4.0]]),
        ValueError, "a list of D numbers", "(2, 2)", "torch.tensor(half_width)",
    ),
    "half width of text": (
        lambda: UniformBox("wide"),
        TypeError, "half_width must be a torch.Tensor, a number", "'wide'", "torch.as_tensor",
    ),
    "half width in half precision": (
        lambda: UniformBox(torch.ones(2).half()),
        TypeError, "half_width must be float32 or float64", "torch.float16", "half_width.float()",
    ),
    "whole half widths": (
        lambda: UniformBox(torch.tensor([1, 2])),
        TypeError, "half_width must be float32 or float64", "int64", "half_width.to(torch.float64)",
    ),
    "no half width": (
        lambda: UniformBox([]),
        ValueError, "dimension 1 or more", "got 0", "Check axis -1",
    ),
    "radius below 0": (
        lambda: UniformSphere(torch.tensor([1.0, -2.0]), 3),
        ValueError, "radius must be 0 or more", "-2 (shape (2,))", "absolute value",
    ),
    "infinite radius": (
        lambda: UniformSphere(math.inf, 3),
        ValueError, "radius must be finite", "inf at index ()", "Remove it",
    ),
    "radius of nothing": (
        lambda: UniformSphere(None, 3),
        TypeError, "radius must be a torch.Tensor, a number", "None", "torch.as_tensor",
    ),
    "sphere of dimension 0": (
        lambda: UniformSphere(1.0, 0),
        ValueError, "dimension 1 or more", "got 0", "Check axis -1",
    ),
    "sphere of half a dimension": (
        lambda: UniformSphere(1.0, 2.5),
        ValueError, "dimension 1 or more", "got 2.5", "Check axis -1",
    ),
    "query of another dtype": (
        lambda: UniformBox(torch.ones(2)).log_mgf(torch.ones(2).double()),
        TypeError, "dtype of the UniformBox measure", "torch.float64", "a.to(torch.float32)",
    ),
    "query that does not broadcast": (
        lambda: UniformSphere(torch.ones(3), 2).log_mgf(torch.ones(4, 2)),
        ValueError, "must broadcast", "(4,)", "(3,)", "a[:, None, :]",
    ),
    "sample of another dtype": (
        lambda: UniformBox(torch.ones(2)).sample(3, generator=generator(), dtype=F64),
        TypeError, "torch.float32 on cpu", "got torch.float64", "Convert the law: .to()",
    ),
    "sample on another device": (
        lambda: UniformBox(torch.ones(2)).sample(3, generator=generator(), device="meta"),
        TypeError, "torch.float32 on cpu", "on meta", "Convert the law: .to()",
    ),
}


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_bad_input_is_refused(case):
    assert_refused(*case)


def test_value_checks_can_be_skipped():
    assert UniformBox([-1.0], validate_args=False).dim == 1
    assert UniformSphere(torch.tensor(NAN), 2, validate_args=False).dim == 2


def test_a_law_of_plain_numbers_keeps_them_in_every_dtype(device):
    """0.1 is no float32 number: a law that follows the query must not round it on the way."""
    a = torch.tensor([3.0], dtype=F64, device=device)
    for law in (UniformBox(0.1), UniformSphere(0.1, 1)):
        assert torch.equal(law.to(F32).to(device).log_mgf(a), law.log_mgf(a))
        assert law.to(F32).log_mgf(a.float()).dtype == F32


def test_a_sample_takes_the_name_of_its_own_device():
    law = UniformBox(torch.ones(2))
    for device in (None, "cpu", torch.device("cpu")):
        assert law.sample(3, generator=generator(), device=device).shape == (3, 2)

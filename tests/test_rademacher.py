"""Fair signs, the smallest law that is not Gaussian."""

import mpmath
import pytest
import torch
from measure_case import F32, F64, MeasureCase, OracleCase, generator

from measureattn import Discrete, Gaussian, Rademacher, attend


class TestRademacher(OracleCase, MeasureCase):
    dim = 3
    scale = 3**0.5
    direction = (1.0, -0.6, 0.3)

    def make(self, dtype, device, batched=False, **options):
        return Rademacher(self.dim, **options)

    def draw(self, law, n, generator, dtype, device):
        return law.sample(n, generator=generator, dtype=dtype, device=device)

    def oracle(self, a):
        kappa = mpmath.fsum(mpmath.log(mpmath.cosh(x)) for x in a)
        cov = [[mpmath.sech(x) ** 2 if i == j else 0 for j in range(3)] for i, x in enumerate(a)]
        return kappa, [mpmath.tanh(x) for x in a], cov


class TestOneSign(TestRademacher):
    dim = 1
    scale = 1.0
    direction = (1.0,)

    def oracle(self, a):
        return mpmath.log(mpmath.cosh(a[0])), [mpmath.tanh(a[0])], [[mpmath.sech(a[0]) ** 2]]


def test_the_negative_control_of_the_book(device):
    """At a = 2 the tilted mean is tanh 2, where a Gaussian of the same moments says 2."""
    a = torch.tensor([2.0], dtype=F64, device=device)
    one = torch.ones(1, 1, dtype=F64, device=device)
    value = attend(Rademacher(1), a, U=one, V=one).item()
    assert value == pytest.approx(0.9640275800758169, rel=1e-15)
    gaussian = Gaussian(torch.zeros(1, dtype=F64, device=device), one)
    assert attend(gaussian, a, U=one, V=one).item() == 2.0


def test_equals_two_atoms(device):
    atoms = torch.tensor([[-1.0], [1.0]], dtype=F64, device=device)
    coin = Discrete(atoms, torch.tensor([0.5, 0.5], dtype=F64, device=device))
    a = torch.linspace(-4, 4, 17, dtype=F64, device=device)[:, None]
    for method in ("log_mgf", "tilted_mean", "tilted_cov"):
        theirs, ours = getattr(coin, method)(a), getattr(Rademacher(1), method)(a)
        torch.testing.assert_close(theirs, ours, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1e-8, 0.5, 1.0, 20.0, 300.0])
def test_the_variance_keeps_its_digits(device, size):
    """1 - tanh^2 would be 0 from a = 20 on."""
    a = torch.tensor([size], dtype=F64, device=device)
    with mpmath.workdps(60):
        exact = float(mpmath.sech(mpmath.mpf(a.item())) ** 2)
    # exp(-2a) carries the rounding of its argument, 2a eps
    allowed = 1e-15 * (4 + 2 * size)
    assert Rademacher(1).tilted_cov(a).item() == pytest.approx(exact, rel=allowed)


def test_samples_are_signs(dtype, device):
    tokens = Rademacher(2).sample(1_000, generator=generator(), dtype=dtype, device=device)
    assert tokens.dtype == dtype
    assert set(tokens.unique().tolist()) == {-1.0, 1.0}


def test_samples_agree_between_dtypes_in_law_only():
    """Both dtypes sample; each is fair on its own (4.5 standard errors of 1/sqrt n)."""
    for dtype in (F32, F64):
        tokens = Rademacher(1).sample(10_000, generator=generator(), dtype=dtype)
        assert abs(tokens.mean().item()) <= 4.5 / 100

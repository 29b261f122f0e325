"""A law of one's own, as CONTRIBUTING.md describes it: kappa, a sampler, the inherited tests."""

import inspect

import mpmath
import pytest
import torch
from measure_case import F64, MeasureCase, assert_refused

from measureattn import Gaussian, Measure, attend
from measureattn._checks import require_domain
from measureattn.measures.base import draw


class Laplace(Measure):
    """Independent coordinates of density exp(-|x|/b) / 2b; kappa is finite for |a_j| < 1/b."""

    def __init__(self, dim, b, **options):
        super().__init__(dim, **options)
        self.b = b

    def log_mgf(self, a):
        return -torch.log1p(-(self.b * self._query(a)).square()).sum(-1)

    def _require_domain(self, a):
        require_domain(a, (self.b * a.abs() < 1).all(-1), f"|a_j| < {1 / self.b}")

    def sample(self, n, *, generator, dtype=None, device=None):
        like = self._sampling(n, generator, dtype, device)
        uniforms = draw(torch.rand, (2, *self.batch_shape, n, self.dim), **like)
        waits = -torch.log1p(-uniforms)  # a difference of two exponentials is Laplace's
        return self.b * (waits[0] - waits[1])


class TestLaplace(MeasureCase):
    dim = 2
    scale = 4.0  # tilts up to 5/4 a coordinate, inside the domain |a_j| < 2

    def make(self, dtype, device, batched=False, **options):
        return Laplace(self.dim, 0.5, **options)


def test_a_law_with_its_tests_takes_under_40_lines():
    lines = [inspect.getsource(part).splitlines() for part in (Laplace, TestLaplace)]
    assert sum(map(len, lines)) < 40


def test_the_case_inherits_its_tests():
    inherited = {name for name in dir(TestLaplace) if name.startswith("test_")}
    assert not any(name in vars(TestLaplace) for name in inherited)
    assert {"test_sample_has_the_mean_and_covariance", "test_compiles_in_one_graph"} <= inherited


@pytest.mark.parametrize("size", [1e-8, 0.1, 1.0, 1.99, 1.999999])
def test_values_up_to_the_edge_of_the_domain(device, size):
    """kappa, its slope 2 b^2 a / (1 - b^2 a^2) and the slope's slope, in relative terms.

    Near the edge the rounding of b^2 a^2 counts 1 / (1 - b^2 a^2) times, once in kappa, once a
    derivative.
    """
    a = torch.tensor([size], dtype=F64, device=device)
    law = Laplace(1, 0.5)
    with mpmath.workdps(40):
        x = mpmath.mpf(a.item()) / 2
        kappa, slope = -mpmath.log(1 - x**2), x / (1 - x**2)
        curvature = (1 + x**2) / (1 - x**2) ** 2 / 2
        gap = float(1 - x**2)
        exact = [float(v) for v in (kappa, slope, curvature)]
    got = law.log_mgf(a), law.tilted_mean(a), law.tilted_cov(a)
    for value, expected in zip(got, exact, strict=True):
        assert value.item() == pytest.approx(expected, rel=1e-15 * 8 / gap, abs=0)


OUTSIDE = torch.tensor([[0.5, 0.5], [0.5, -2.0]], dtype=F64)
BLUR = Gaussian(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))
CALLS = {
    "log_mgf": lambda law, a: law.log_mgf(a),
    "tilted_mean": lambda law, a: law.tilted_mean(a),  # derived by torch.func, which hides values
    "tilted_cov": lambda law, a: law.tilted_cov(a),
    "tilted_cov_product": lambda law, a: law.tilted_cov_product(a, a),
    "attend": lambda law, a: attend(law, a, U=BLUR.cov, V=BLUR.cov),
    "in a sum": lambda law, a: law.convolve(BLUR).tilted_mean(a),
    "in an affine image": lambda law, a: law.pushforward(2 * BLUR.cov).tilted_mean(a / 2),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_outside_its_domain_the_law_is_refused(call):
    law = Laplace(2, 0.5)
    words = "where the log-MGF is finite, |a_j| < 2.0", "[0.5, -2.0] at index (1,)", "Shrink U"
    assert_refused(lambda: call(law, OUTSIDE), ValueError, *words)
    call(law, 0.99 * OUTSIDE)


def test_a_direction_may_lie_outside_the_domain():
    law, a = Laplace(2, 0.5), OUTSIDE[0]
    expected = law.tilted_cov(a) @ (100 * a)
    torch.testing.assert_close(law.tilted_cov_product(a, 100 * a), expected)


def test_the_domain_is_not_checked_where_it_is_not_asked_for():
    assert Laplace(2, 0.5, validate_args=False).log_mgf(1.5 * OUTSIDE)[1].isnan()

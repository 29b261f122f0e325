"""Gaussian laws: closed forms against mpmath and quadrature, singular ones included."""

import functools

import mpmath
import numpy as np
import pytest
import torch
from measure_case import F32, F64, BatchedCase, OracleCase, assert_close, generator

from measureattn import Gaussian

# no eigenvalue is 1: a covariance in the place of its root must not go unseen
FACTOR = ((1.5, 0.0, 0.0), (0.75, 0.5, 0.0), (-0.25, 1.0, 0.25))
MEAN = [0.5, -1.0, 0.25]


class TestGaussian(OracleCase, BatchedCase):
    dim = 3
    factor = FACTOR
    direction = (1.0, -0.75, 0.5)

    @property
    def scale(self):
        return torch.linalg.matrix_norm(torch.tensor(self.factor), 2).item() * 2 + 2

    def member(self, i, dtype, device, **options):
        factor = torch.tensor(self.factor, dtype=F64) * (1 + i / 2)
        mean = torch.tensor(MEAN[: self.dim], dtype=F64) * (1 - i)
        return Gaussian(mean.to(device, dtype), (factor @ factor.mT).to(device, dtype), **options)

    def make(self, dtype, device, batched=False, **options):
        if not batched:
            return self.member(0, dtype, device, **options)
        members = [self.member(i, dtype, device) for i in range(self.batch)]
        mean, cov = (torch.stack([getattr(m, k) for m in members]) for k in ("mean", "cov"))
        return Gaussian(mean, cov, **options)

    def oracle(self, a):
        law = self.member(0, F64, "cpu")  # its entries are binary fractions, exact in float64
        mean, cov = mpmath.matrix(law.mean.tolist()), mpmath.matrix(law.cov.tolist())
        a = mpmath.matrix(a)
        kappa = (a.T * mean)[0] + (a.T * cov * a)[0] / 2
        return kappa, list(mean + cov * a), cov.tolist()


class TestSingularGaussian(TestGaussian):
    """Rank one in three dimensions: no density, no Cholesky factor."""

    factor = ((1.5, 0.0, 0.0), (0.75, 0.0, 0.0), (-0.25, 0.0, 0.0))


class TestGaussianOnTheLine(TestGaussian):
    dim = 1
    factor = ((1.5,),)
    direction = (1.0,)


def hermite(n):
    """Nodes and weights of E f(t), t ~ N(0, 1)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(n)
    return torch.tensor(nodes, dtype=F64), torch.tensor(weights / weights.sum(), dtype=F64)


@pytest.mark.parametrize("dim", [1, 3])
def test_moments_by_gauss_hermite_quadrature(device, dim):
    """kappa, tilted mean and covariance as integrals over N(0, I) through a Cholesky factor.

    30 nodes an axis integrate t^2 exp(c t) to rounding for |c| <= 2, which the tilts here respect.
    """
    factor = torch.tensor(FACTOR, dtype=F64)[:dim, :dim]
    mean = torch.tensor(MEAN, dtype=F64)[:dim]
    law = Gaussian(mean.to(device), (factor @ factor.mT).to(device))
    nodes, weights = hermite(30)
    grid = torch.cartesian_prod(*[nodes] * dim).reshape(-1, dim)
    mass = functools.reduce(torch.mul, torch.meshgrid(*[weights] * dim, indexing="ij")).reshape(-1)
    tokens = mean + grid @ factor.mT
    for a in (torch.zeros(dim, dtype=F64), torch.tensor([0.9, -0.4, 0.6], dtype=F64)[:dim]):
        masses = mass * torch.exp(tokens @ a)
        tilted = masses / masses.sum()
        tilted_mean = tilted @ tokens
        centred = tokens - tilted_mean
        asked = a.to(device)
        scale = tokens.norm(dim=-1).max().item()  # of the outermost node
        expected = masses.sum().log().item()
        assert law.log_mgf(asked).item() == pytest.approx(expected, abs=1e-12)
        assert_close(law.tilted_mean(asked).cpu(), tilted_mean, a, scale, 1)
        tilted_cov = centred.mT @ (tilted[:, None] * centred)
        assert_close(law.tilted_cov(asked).cpu(), tilted_cov, a, scale, 2)


def test_the_root_is_symmetric_and_squares_to_the_covariance(device):
    law = TestGaussian().make(F64, device, batched=True)
    size = law.cov.abs().amax()
    assert (law.root - law.root.mT).abs().max() <= 1e-14 * size
    assert (law.root @ law.root - law.cov).abs().max() <= 1e-14 * size


def test_samples_of_a_singular_law_lie_on_its_support(device):
    law = TestSingularGaussian().make(F64, device)
    tokens = law.sample(1_000, generator=generator()) - law.mean
    off = torch.tensor([0.75, -1.5, 0.0], dtype=F64, device=device)  # orthogonal to the factor
    # a zero eigenvalue is known to eps times the largest; its root would be visible, so it is cut
    assert (tokens @ off).abs().max() <= 1e-13 * tokens.abs().max()
    assert tokens.abs().max() > 1


def test_a_point_mass(dtype, device):
    mean = torch.tensor([1.0, -2.0], dtype=dtype, device=device)
    law = Gaussian(mean, torch.zeros(2, 2, dtype=dtype, device=device))
    a = torch.tensor([3.0, 0.5], dtype=dtype, device=device)
    assert law.log_mgf(a).item() == 2.0
    assert torch.equal(law.tilted_mean(a), mean)
    assert torch.equal(law.sample(4, generator=generator()), mean.expand(4, 2))


def test_the_tilted_mean_is_affine(device):
    law = TestGaussian().make(F64, device)
    a, b = TestGaussian().queries(F64, device, batched=False)[:2]
    middle = (law.tilted_mean(a) + law.tilted_mean(b)) / 2
    assert_close(law.tilted_mean((a + b) / 2), middle, a, 3.0, 1)


def test_mean_and_covariance_broadcast(dtype, device):
    means = torch.arange(8.0, dtype=dtype, device=device).reshape(4, 2)
    law = Gaussian(means, torch.eye(2, dtype=dtype, device=device))
    assert law.batch_shape == (4,)
    a = torch.tensor([1.0, -1.0], dtype=dtype, device=device)
    assert torch.equal(law.tilted_mean(a), means + a)
    assert law.sample(5, generator=generator()).shape == (4, 5, 2)


def test_rounding_below_zero_is_accepted(device):
    """A rank-deficient product in float32 has eigenvalues a little below 0: still a covariance."""
    factor = torch.randn(64, 8, generator=generator(), dtype=F32).to(device)
    cov = factor @ factor.mT
    assert torch.linalg.eigvalsh(cov)[0] < 0
    law = Gaussian(cov.new_zeros(64), cov)
    assert law.sample(10, generator=generator()).isfinite().all()


def test_a_draw_on_the_cpu_is_the_same_everywhere(device):
    here, there = (TestGaussian().make(F64, where) for where in (device, "cpu"))
    one, other = (law.sample(8, generator=generator()) for law in (here, there))
    torch.testing.assert_close(one.cpu(), other, rtol=1e-12, atol=1e-12)


def test_a_map_orthogonal_to_the_support_gives_a_point_mass(device):
    """What is left of the covariance is rounding; it must not be taken for a faulty covariance."""
    v = torch.tensor([0.3, -0.7, 0.2], dtype=F64, device=device)
    law = Gaussian(v, torch.outer(v, v))
    basis = torch.linalg.qr(torch.cat([v[:, None], torch.eye(3).to(v)[:, :2]], 1)).Q
    image = law.pushforward(basis[:, 1:].mT)
    assert image.cov.abs().max() <= 1e-15
    assert image.validate_args
    samples = image.sample(5, generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(samples).all()

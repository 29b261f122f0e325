"""The Gaussian law: the one whose tilted mean is affine in the tilt."""

from typing import ClassVar

import torch
from torch import Tensor

from measureattn._checks import (
    require_broadcast,
    require_finite,
    require_ndim,
    require_same,
    require_tensor,
    values_visible,
)
from measureattn._typing import Float
from measureattn.measures.base import Measure, draw, require_affine, require_same_space


class Gaussian(Measure):
    """N(mean, cov) on R^D; the covariance may be singular, down to a point mass.

    mean  (*batch, D)
    cov   (*batch, D, D), symmetric positive semidefinite, in squared units of the tokens

    kappa(a) = a.mean + a'cov a / 2, so the tilted mean is mean + cov a and the tilted covariance
    is cov at every tilt. Raises ValueError or TypeError if shapes, dtypes or values do not fit.

    Source: Lemma 2.1, arXiv 2512.11784. See: chapter 2.

    >>> law = Gaussian(torch.zeros(2), torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    >>> law.tilted_mean(torch.tensor([1.0, -1.0]))
    tensor([ 1., -1.])
    """

    def __init__(self, mean: Tensor, cov: Tensor, *, validate_args: bool = True):
        require_tensor("mean", mean)
        require_tensor("cov", cov)
        require_ndim("mean", mean, 1, "(*batch, D)")
        require_ndim("cov", cov, 2, "(*batch, D, D)")
        require_same("cov", cov, "mean", mean)
        dim = mean.shape[-1]
        if cov.shape[-2:] != (dim, dim):
            raise ValueError(
                f"cov must have shape (*batch, {dim}, {dim}) to fit a mean of shape "
                f"{tuple(mean.shape)}, got shape {tuple(cov.shape)}. A vector of variances goes in "
                f"as torch.diag_embed(variances)."
            )
        batch = require_broadcast("cov", cov.shape[:-2], "the batch of mean", mean.shape[:-1])
        super().__init__(dim, batch, validate_args=validate_args)
        if validate_args:
            require_finite("mean", mean, "Remove it first.")
            require_finite("cov", cov, "Remove it first.")
            _require_psd(cov)
        self._mean = mean.expand(*batch, dim)
        self._cov = cov.expand(*batch, dim, dim)

    _tensors: ClassVar = {"_mean": 1, "_cov": 2}

    def log_mgf(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape"]:
        a = self._query(a)
        return (a * (self._mean + _apply(self._cov, a) / 2)).sum(-1)

    def tilted_mean(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D"]:
        return self._mean + _apply(self._cov, self._query(a))

    def tilted_cov(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D D"]:
        a = self._query(a)
        return self._cov.expand(*a.shape[:-1], self.dim, self.dim)

    def tilted_cov_product(
        self, a: Float[Tensor, "*tilt D"], w: Float[Tensor, "*direction D"]
    ) -> Float[Tensor, "*shape D"]:
        _, w = self._query_and_direction(a, w)
        return _apply(self._cov, w)

    def pushforward(
        self, A: Float[Tensor, "*matrix M D"], b: Float[Tensor, "*offset M"] | None = None
    ) -> "Gaussian":
        A, b = require_affine(self, A, b)
        return self._made(_apply(A, self._mean) + b, A @ self._cov @ A.mT)

    def convolve(self, other: Measure) -> Measure:
        if not isinstance(other, Gaussian):
            return super().convolve(other)
        require_same_space([self, other])
        return self._made(self._mean + other._mean, self._cov + other._cov)

    def sample(
        self, n: int, *, generator: torch.Generator, dtype=None, device=None
    ) -> Float[Tensor, "*batch n D"]:
        like = self._sampling(n, generator, dtype, device)
        normals = draw(torch.randn, (*self.batch_shape, n, self.dim), **like)
        return self._mean[..., None, :] + normals @ self.root

    def _made(self, mean: Tensor, cov: Tensor) -> "Gaussian":
        """A law computed from valid ones: its covariance is positive but for rounding, which next
        to nothing (A orthogonal to the support) would look like a fault."""
        law = Gaussian(mean, (cov + cov.mT) / 2, validate_args=False)
        law.validate_args = self.validate_args
        return law

    @property
    def root(self) -> Float[Tensor, "*batch D D"]:
        """The symmetric square root of cov: unlike a Cholesky factor it exists for singular laws,
        and unlike eigenvectors it is unique, so samples agree between machines."""
        values, vectors = torch.linalg.eigh(self._cov)
        floor = values.abs().amax(-1, keepdim=True) * self.dim * torch.finfo(values.dtype).eps
        values = torch.where(values > floor, values, torch.zeros_like(values))
        return (vectors * values.sqrt()[..., None, :]) @ vectors.mT


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]


def _require_psd(cov: Tensor) -> None:
    """Symmetric, with no eigenvalue below what rounding explains."""
    if not values_visible(cov) or cov.numel() == 0:
        return
    slack = 100 * cov.shape[-1] * torch.finfo(cov.dtype).eps * cov.abs().amax((-2, -1))
    gap = (cov - cov.mT).abs().amax((-2, -1))
    if (gap > slack).any():
        raise ValueError(
            f"cov must be symmetric positive semidefinite; it differs from its transpose by up to "
            f"{gap.max().item():.2g} (shape {tuple(cov.shape)}). "
            f"Symmetrise it first: (cov + cov.mT) / 2."
        )
    smallest = torch.linalg.eigvalsh(cov)[..., 0]
    if (smallest < -slack).any():
        raise ValueError(
            f"cov must be symmetric positive semidefinite; its smallest eigenvalue is "
            f"{smallest.min().item():.2g} (shape {tuple(cov.shape)}). "
            f"Symmetrise it or clip its spectrum first."
        )

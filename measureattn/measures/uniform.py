"""Uniform laws on boxes and spheres, through the one radial function of `_radial`."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from measureattn._checks import (
    as_numbers,
    require_finite,
    require_ndim,
    require_tensor,
    values_visible,
)
from measureattn._typing import Float
from measureattn.measures import _radial
from measureattn.measures.base import Measure, draw


class UniformBox(Measure):
    """Uniform on the box [-h_1, h_1] x ... x [-h_D, h_D].

    half_width  (*batch, D), 0 or more. A number or a list of D numbers makes a law without
                tensors, which follows the query's dtype and device.

    kappa(a) = sum_j log( sinh(h_j a_j) / (h_j a_j) ), tilted mean h_j Langevin(h_j a_j), each to
    rounding at every tilt. Raises ValueError or TypeError if shapes or values do not fit.

    Source: ours, from the definition of kappa. See: chapter 3.

    >>> UniformBox([1.0, 3.0]).tilted_cov(torch.zeros(2))
    tensor([[0.3333, 0.0000],
            [0.0000, 3.0000]])
    """

    def __init__(
        self, half_width: Tensor | float | Sequence[float], *, validate_args: bool = True
    ):
        width, self._follows = _parameter("half_width", half_width, validate_args)
        if self._follows:
            width = _one_axis(width)
        require_ndim("half_width", width, 1, "(*batch, D)")
        super().__init__(width.shape[-1], width.shape[:-1], validate_args=validate_args)
        self.half_width = width

    _tensors: ClassVar = {"half_width": 1}

    def log_mgf(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape"]:
        a, width = self._query_and_width(a)
        return _radial.log_mgf(_square(width * a), 3).sum(-1).to(a.dtype)

    def tilted_mean(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D"]:
        a, width = self._query_and_width(a)
        slope = _radial.slope(_square(width * a), 3)
        return (width.square() * a * slope).to(a.dtype)

    def tilted_cov(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D D"]:
        return torch.diag_embed(self._variance(a))

    def tilted_cov_product(
        self, a: Float[Tensor, "*tilt D"], w: Float[Tensor, "*direction D"]
    ) -> Float[Tensor, "*shape D"]:
        a, w = self._query_and_direction(a, w)
        return self._variance(a) * w

    def sample(
        self, n: int, *, generator: torch.Generator, dtype=None, device=None
    ) -> Float[Tensor, "*batch n D"]:
        like = self._sampling(n, generator, dtype, device)
        uniforms = draw(torch.rand, (*self.batch_shape, n, self.dim), **like)
        return (2 * uniforms - 1) * self.half_width[..., None, :].to(uniforms)

    def _variance(self, a: Tensor) -> Tensor:
        a, width = self._query_and_width(a)
        return (width.square() * _radial.curvature(_square(width * a), 3)).to(a.dtype)

    def _query_and_width(self, a: Tensor) -> tuple[Tensor, Tensor]:
        a = self._query(a)
        return a, self.half_width.to(a)


class UniformSphere(Measure):
    """Uniform on the sphere of the given radius in R^dim; dim = 1 is a scaled coin.

    radius  (*batch), 0 or more; a number makes a law without tensors, which follows the query
    dim     D, 1 or more

    kappa(a) = log[ Gamma(D/2) (2/t)^(D/2-1) I_(D/2-1)(t) ] with t = radius |a|; the tilted law is
    von Mises and Fisher's, its mean radius I_(D/2)/I_(D/2-1)(t) along a. No Bessel function is
    computed, so nothing under- or overflows. Raises ValueError or TypeError if the shapes or
    values do not fit.

    Source: ours, from the definition of kappa. See: chapter 3.

    >>> UniformSphere(2.0, 4).tilted_cov(torch.zeros(4)).diagonal()
    tensor([1., 1., 1., 1.])
    """

    def __init__(self, radius: Tensor | float, dim: int, *, validate_args: bool = True):
        radius, self._follows = _parameter("radius", radius, validate_args)
        super().__init__(dim, radius.shape, validate_args=validate_args)
        self.radius = radius

    _tensors: ClassVar = {"radius": 0}

    def log_mgf(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape"]:
        _, _, q = self._query_and_radius(a)
        return _radial.log_mgf(q, self.dim).to(a.dtype)

    def tilted_mean(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D"]:
        a, radius, q = self._query_and_radius(a)
        return (radius.square() * _radial.slope(q, self.dim))[..., None].to(a.dtype) * a

    def tilted_cov(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D D"]:
        a, across, along = self._variances(a)
        unit = _unit(a)
        eye = torch.eye(self.dim, dtype=a.dtype, device=a.device)
        outer = unit[..., :, None] * unit[..., None, :]
        return across[..., None, None] * (eye - outer) + along[..., None, None] * outer

    def tilted_cov_product(
        self, a: Float[Tensor, "*tilt D"], w: Float[Tensor, "*direction D"]
    ) -> Float[Tensor, "*shape D"]:
        a, w = self._query_and_direction(a, w)
        a, across, along = self._variances(a)
        unit = _unit(a)
        inner = (unit * w).sum(-1, keepdim=True) * unit
        return across[..., None] * (w - inner) + along[..., None] * inner

    def sample(
        self, n: int, *, generator: torch.Generator, dtype=None, device=None
    ) -> Float[Tensor, "*batch n D"]:
        like = self._sampling(n, generator, dtype, device)
        normals = draw(torch.randn, (*self.batch_shape, n, self.dim), **like)
        unit = normals / normals.norm(dim=-1, keepdim=True)
        return self.radius[..., None, None].to(unit) * unit

    def _variances(self, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(a, variance across the tilt, variance along it)."""
        a, radius, q = self._query_and_radius(a)
        square = radius.square()
        across = square * _radial.slope(q, self.dim)
        along = square * _radial.curvature(q, self.dim)
        return a, across.to(a.dtype), along.to(a.dtype)

    def _query_and_radius(self, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = self._query(a)
        radius = self.radius.to(a)
        return a, radius, _square(radius[..., None] * a).sum(-1)


def _parameter(name: str, value, validate_args: bool) -> tuple[Tensor, bool]:
    """(the parameter as a tensor, whether the law follows the query's dtype and device)."""
    follows = not isinstance(value, Tensor)
    if follows:
        value = as_numbers(name, value)
    require_tensor(name, value)
    if validate_args:
        require_finite(name, value, "Remove it first.")
        if values_visible(value) and (value < 0).any():
            raise ValueError(
                f"{name} must be 0 or more, got {value.min().item():.3g} (shape "
                f"{tuple(value.shape)}). Take its absolute value."
            )
    return value, follows


def _one_axis(width: Tensor) -> Tensor:
    """A number as a vector of one; a table of plain numbers could mean a batch or a mistake."""
    if width.ndim > 1:
        raise ValueError(
            f"half_width must be a number, a list of D numbers or a tensor (*batch, D), got a list "
            f"of shape {tuple(width.shape)}. Pass a batch as a tensor: torch.tensor(half_width)."
        )
    return width.reshape(-1)


def _square(x: Tensor) -> Tensor:
    """x^2 in float64, where the radial function is evaluated."""
    return x.double().square()


def _unit(a: Tensor) -> Tensor:
    """a/|a|, and 0 at 0, where along and across agree; scaled first, so nothing overflows."""
    peak = a.abs().amax(-1, keepdim=True)
    scaled = a / torch.where(peak > 0, peak, torch.ones_like(peak))
    square = scaled.square().sum(-1, keepdim=True)
    return scaled / torch.where(square > 0, square, torch.ones_like(square)).sqrt()

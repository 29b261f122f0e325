"""New laws from old: every operation on measures is one line on log-MGFs.

    affine image   A x + b            b.a + kappa(A'a)
    convolution    x + x'             the log-MGFs add
    product        (x, x')            the log-MGFs of the blocks add
    mixture        one of several     the weighted log-mean-exp of the log-MGFs

The last line is also why a prompt can be read in chunks: see `measureattn.streaming`.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from measureattn._checks import (
    as_numbers,
    require_broadcast,
    require_finite,
    require_same,
    require_tensor,
    values_visible,
)
from measureattn._typing import Float
from measureattn.measures.base import Measure, draw, require_affine, require_same_space
from measureattn.streaming import log_mean_exp


class Combination(Measure):
    """What the operations share: parts, and what follows from having parts."""

    parts: list[Measure]

    def _reference(self) -> Tensor | None:
        own = super()._reference()
        return _first_reference(self.parts) if own is None else own

    def _rebuild(self, change, batch_shape: torch.Size | None = None) -> Measure:
        new = super()._rebuild(change, batch_shape)
        new.parts = [part._rebuild(change, batch_shape) for part in self.parts]
        return new

    def _samples(self, n: int, generator, dtype, device) -> list[Tensor]:
        """n tokens of each part for every member of the batch."""
        like = self._sampling(n, generator, dtype, device)
        return [part.expand(self.batch_shape).sample(n, **like) for part in self.parts]

    def __repr__(self) -> str:
        inside = ", ".join(map(repr, self.parts))
        shape = tuple(self.batch_shape)
        return f"{type(self).__name__}([{inside}], dim={self.dim}, batch_shape={shape})"


class PushForward(Combination):
    """The law of A x + b for x of the given law: kappa(a) = b.a + kappa_x(A'a).

    measure  a law on R^D;  A  (*batch, M, D);  b  (*batch, M), or None for 0

    Raises ValueError or TypeError if shapes, dtypes or values do not fit.
    Source: section 2, arXiv 2512.11784 (rephrased). See: chapter 1.

    >>> Rademacher(2).pushforward(torch.ones(1, 2)).cov
    tensor([[2.]])
    """

    def __init__(self, measure: Measure, A: Tensor, b: Tensor | None = None):
        require_same_space([measure])
        A, b = require_affine(measure, A, b)
        batch = torch.broadcast_shapes(A.shape[:-2], b.shape[:-1], measure.batch_shape)
        super().__init__(A.shape[-2], batch, validate_args=measure.validate_args)
        self.parts = [measure]
        self.A, self.b = A.expand(*batch, *A.shape[-2:]), b.expand(*batch, A.shape[-2])

    _tensors: ClassVar = {"A": 2, "b": 1}

    def log_mgf(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape"]:
        a = self._query(a)
        return (self.b * a).sum(-1) + self.parts[0].log_mgf(_apply(self.A.mT, a))

    def tilted_mean(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D"]:
        inner = _apply(self.A.mT, self._query(a))
        return self.b + _apply(self.A, self.parts[0].tilted_mean(inner))

    def tilted_cov(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D D"]:
        inner = _apply(self.A.mT, self._query(a))
        return self.A @ self.parts[0].tilted_cov(inner) @ self.A.mT

    def tilted_cov_product(
        self, a: Float[Tensor, "*tilt D"], w: Float[Tensor, "*direction D"]
    ) -> Float[Tensor, "*shape D"]:
        inner, direction = (_apply(self.A.mT, x) for x in self._query_and_direction(a, w))
        return _apply(self.A, self.parts[0].tilted_cov_product(inner, direction))

    def sample(
        self, n: int, *, generator: torch.Generator, dtype=None, device=None
    ) -> Float[Tensor, "*batch n D"]:
        (tokens,) = self._samples(n, generator, dtype, device)
        return tokens @ self.A.mT + self.b[..., None, :]


class Convolution(Combination):
    """The law of the sum of independent tokens, one of each law: kappas add.

    measures  one or more laws on the same R^D

    Raises ValueError or TypeError if dimensions, dtypes or devices do not fit.
    Source: section 2, arXiv 2512.11784 (rephrased). See: chapter 1.

    >>> Rademacher(1).convolve(Rademacher(1)).tilted_mean(torch.tensor([2.0]))
    tensor([1.9281])
    """

    def __init__(self, measures: Sequence[Measure]):
        batch = require_same_space(measures)
        super().__init__(measures[0].dim, batch, validate_args=_validates(measures))
        self.parts = list(measures)

    def log_mgf(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape"]:
        a = self._query(a)
        return sum(part.log_mgf(a) for part in self.parts)

    def tilted_mean(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D"]:
        a = self._query(a)
        return sum(part.tilted_mean(a) for part in self.parts)

    def tilted_cov(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D D"]:
        a = self._query(a)
        return sum(part.tilted_cov(a) for part in self.parts)

    def tilted_cov_product(
        self, a: Float[Tensor, "*tilt D"], w: Float[Tensor, "*direction D"]
    ) -> Float[Tensor, "*shape D"]:
        a, w = self._query_and_direction(a, w)
        return sum(part.tilted_cov_product(a, w) for part in self.parts)

    def sample(
        self, n: int, *, generator: torch.Generator, dtype=None, device=None
    ) -> Float[Tensor, "*batch n D"]:
        return sum(self._samples(n, generator, dtype, device))


class Product(Combination):
    """Independent blocks side by side: kappa is the sum of the blocks' kappas.

    measures  one or more laws, on R^D_1, R^D_2, ...; the product lives on R^(D_1 + D_2 + ...)

    Raises ValueError or TypeError if dtypes or devices do not fit.
    Source: section 2, arXiv 2512.11784 (rephrased). See: chapter 1.

    >>> law = Product([Gaussian(torch.zeros(1), torch.eye(1)), Rademacher(1)])
    >>> law.tilted_mean(torch.tensor([2.0, 2.0]))
    tensor([2.0000, 0.9640])
    """

    def __init__(self, measures: Sequence[Measure]):
        batch = require_same_space(measures, same_dim=False)
        self.sizes = [part.dim for part in measures]
        super().__init__(sum(self.sizes), batch, validate_args=_validates(measures))
        self.parts = list(measures)

    def log_mgf(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape"]:
        return sum(part.log_mgf(block) for part, block in self._blocks(self._query(a)))

    def tilted_mean(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D"]:
        blocks = self._blocks(self._query(a))
        return torch.cat([part.tilted_mean(block) for part, block in blocks], -1)

    def tilted_cov(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D D"]:
        a = self._query(a)
        rows, before = [], 0
        for part, block in self._blocks(a):
            after = self.dim - before - part.dim
            rows.append(torch.nn.functional.pad(part.tilted_cov(block), (before, after)))
            before += part.dim
        return torch.cat(rows, -2)

    def tilted_cov_product(
        self, a: Float[Tensor, "*tilt D"], w: Float[Tensor, "*direction D"]
    ) -> Float[Tensor, "*shape D"]:
        a, w = self._query_and_direction(a, w)
        pairs = zip(self._blocks(a), w.split(self.sizes, -1), strict=True)
        return torch.cat([part.tilted_cov_product(x, y) for (part, x), y in pairs], -1)

    def sample(
        self, n: int, *, generator: torch.Generator, dtype=None, device=None
    ) -> Float[Tensor, "*batch n D"]:
        return torch.cat(self._samples(n, generator, dtype, device), -1)

    def _blocks(self, a: Tensor):
        return zip(self.parts, a.split(self.sizes, -1), strict=True)


class Mixture(Combination):
    """Draw one of the laws by weight, then a token from it.

    measures  one or more laws on the same R^D
    weights   (*batch, n), one a law, 0 or more, not all 0; normalised inside; None: equal weights

    kappa is the weighted log-mean-exp of the kappas. Tilting moves weight between the laws: it is
    attention to the components. Raises ValueError or TypeError if shapes or values do not fit.
    Source: section 2, arXiv 2512.11784 (rephrased). See: chapter 1.

    >>> left, right = (Gaussian(torch.tensor([m]), torch.eye(1)) for m in (-3.0, 3.0))
    >>> Mixture([left, right], torch.tensor([0.5, 0.5])).cov
    tensor([[10.]])
    """

    def __init__(
        self,
        measures: Sequence[Measure],
        weights: Tensor | Sequence[float] | None = None,
        *,
        validate_args: bool = True,
    ):
        batch = require_same_space(measures)
        self.parts = list(measures)
        log_weights, self._follows = self._checked(weights, validate_args)
        batch = require_broadcast("weights", log_weights.shape[:-1], "the measures", batch)
        super().__init__(measures[0].dim, batch, validate_args=validate_args)
        like = _first_reference(measures)
        if like is not None and not self._follows:
            require_same("weights", log_weights, "the measures", like)
        self.log_weights = log_weights.expand(*batch, len(measures))

    _tensors: ClassVar = {"log_weights": 1}

    def log_mgf(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape"]:
        return self._tilt(self._query(a))[0]

    def tilted_mean(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D"]:
        a = self._query(a)
        _, shares = self._tilt(a)
        return (shares[..., None] * self._each("tilted_mean", a, axis=-2)).sum(-2)

    def tilted_cov(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D D"]:
        """Within the components plus between them."""
        a = self._query(a)
        _, shares = self._tilt(a)
        means = self._each("tilted_mean", a, axis=-2)
        centred = means - (shares[..., None] * means).sum(-2, keepdim=True)
        within = (shares[..., None, None] * self._each("tilted_cov", a, axis=-3)).sum(-3)
        return within + (shares[..., None] * centred).mT @ centred

    def tilted_cov_product(
        self, a: Float[Tensor, "*tilt D"], w: Float[Tensor, "*direction D"]
    ) -> Float[Tensor, "*shape D"]:
        a, w = self._query_and_direction(a, w)
        _, shares = self._tilt(a)
        means = self._each("tilted_mean", a, axis=-2)
        centred = means - (shares[..., None] * means).sum(-2, keepdim=True)
        within = torch.stack([part.tilted_cov_product(a, w) for part in self.parts], -2)
        between = (centred * w[..., None, :]).sum(-1, keepdim=True) * centred
        return (shares[..., None] * (within + between)).sum(-2)

    def sample(
        self, n: int, *, generator: torch.Generator, dtype=None, device=None
    ) -> Float[Tensor, "*batch n D"]:
        tokens = torch.stack(self._samples(n, generator, dtype, device), -2)
        like = dict(generator=generator, dtype=torch.float64, device=tokens.device)
        uniforms = draw(torch.rand, (*self.batch_shape, n), **like)
        steps = self.log_weights.double().to(tokens.device).exp().cumsum(-1)
        choice = torch.searchsorted(steps.contiguous(), uniforms * steps[..., -1:], right=True)
        choice = choice.clamp(max=len(self.parts) - 1)[..., None, None]
        return tokens.gather(-2, choice.expand(*choice.shape[:-1], self.dim))[..., 0, :]

    def _tilt(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """(log_mgf, shares of the components after tilting)."""
        return log_mean_exp(self._each("log_mgf", a, axis=-1), self.log_weights.to(a))

    def _each(self, what: str, a: Tensor, axis: int) -> Tensor:
        return torch.stack([getattr(part, what)(a) for part in self.parts], axis)

    def _checked(self, weights, validate_args: bool) -> tuple[Tensor, bool]:
        """(normalised log weights, whether they follow the query's dtype and device)."""
        follows = not isinstance(weights, Tensor)
        if weights is None:
            weights = [1.0] * len(self.parts)
        if follows:
            weights = as_numbers("weights", weights)
        require_tensor("weights", weights)
        if weights.ndim == 0 or weights.shape[-1] != len(self.parts):
            raise ValueError(
                f"weights must have one entry a measure, shape (*batch, {len(self.parts)}), got "
                f"shape {tuple(weights.shape)}. Check the last axis."
            )
        if validate_args:
            require_finite("weights", weights, "Remove it first.")
            if values_visible(weights) and ((weights < 0).any() or (weights.sum(-1) == 0).any()):
                raise ValueError(
                    f"weights must be 0 or more and not all 0, got {weights.tolist()}. "
                    f"A signed measure is not a token law."
                )
        log_weights = weights.log()
        return log_weights - log_weights.logsumexp(-1, keepdim=True), follows


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]


def _first_reference(measures: Sequence[Measure]) -> Tensor | None:
    return next((r for r in (m._reference() for m in measures) if r is not None), None)


def _validates(measures: Sequence[Measure]) -> bool:
    return all(part.validate_args for part in measures)

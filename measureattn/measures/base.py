"""The contract of a token law: everything follows from its log-MGF."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from measureattn._checks import (
    require_broadcast,
    require_finite,
    require_ndim,
    require_same,
    require_tensor,
)
from measureattn._typing import Float


class Measure(ABC):
    """A law of tokens in R^D, known through kappa(a) = log E exp(a.x), its log-MGF.

    A law of your own needs `log_mgf` alone: call `a = self._query(a)` first and return one number
    a tilt. The tilted moments then come from torch.func; every law shipped here has closed forms.
    If kappa is infinite somewhere, say so in `_require_domain`.

    dim            D, the dimension of a token
    batch_shape    independent laws side by side, as in torch.distributions
    validate_args  whether values (NaN, positive definiteness) are checked; shapes always are

    A query a is broadcast to (*query, *batch, D) before anything else, so that equal sizes pair
    up: Q queries against each member of a batch of Q are asked with a[:, None, :].

    Source: section 2, arXiv 2512.11784 (rephrased). See: chapter 1.

    >>> class Poisson(Measure):
    ...     def log_mgf(self, a):
    ...         return self._query(a).expm1().sum(-1)
    >>> Poisson(1).tilted_mean(torch.tensor([0.0]))
    tensor([1.])
    """

    def __init__(
        self, dim: int, batch_shape: torch.Size = torch.Size(), *, validate_args: bool = True
    ):
        if not isinstance(dim, int) or dim < 1:
            raise ValueError(f"tokens must have dimension 1 or more, got {dim!r}. Check axis -1.")
        self.dim = dim
        self.batch_shape = torch.Size(batch_shape)
        self.validate_args = validate_args

    # -- what a law answers ---------------------------------------------------------------------

    @abstractmethod
    def log_mgf(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape"]:
        """kappa(a) = log E exp(a.x): (*query, *batch, D) -> (*query, *batch)."""

    def tilted_mean(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D"]:
        """grad kappa(a), the mean under the law tilted by exp(a.x): -> (*query, *batch, D)."""
        return torch.func.grad(self._total)(self._query(a).contiguous())

    def tilted_cov(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D D"]:
        """Hess kappa(a), the covariance under the tilted law: -> (*query, *batch, D, D)."""
        a = self._query(a)
        basis = torch.eye(self.dim, dtype=a.dtype, device=a.device)
        columns = torch.func.vmap(lambda e: self.tilted_cov_product(a, e))(basis)
        return columns.movedim(0, -1)

    def tilted_cov_product(
        self, a: Float[Tensor, "*tilt D"], w: Float[Tensor, "*direction D"]
    ) -> Float[Tensor, "*shape D"]:
        """Hess kappa(a) @ w without forming the matrix: -> (*query, *batch, D)."""
        a, w = self._query_and_direction(a, w)
        gradient = torch.func.grad(self._total)
        return torch.func.jvp(gradient, (a.contiguous(),), (w.contiguous(),))[1]

    @property
    def mean(self) -> Float[Tensor, "*batch D"]:
        """The tilted mean at a = 0."""
        return self.tilted_mean(self._zero())

    @property
    def cov(self) -> Float[Tensor, "*batch D D"]:
        """The tilted covariance at a = 0."""
        return self.tilted_cov(self._zero())

    def sample(
        self,
        n: int,
        *,
        generator: torch.Generator,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Float[Tensor, "*batch n D"]:
        """n independent tokens a member, (*batch, n, D): `Empirical` of it is a prompt of the law.

        dtype and device are those of the law's tensors; a law without tensors takes them here
        (float64 on the CPU unless told). A CPU generator gives the same tokens on every device.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sampler: give it a sample method.")

    def pushforward(self, A: Float[Tensor, "*batch M D"], b: Tensor | None = None) -> "Measure":
        """The law of A x + b, with A (*batch, M, D) and b (*batch, M) or None for 0.

        Its log-MGF is b.a + kappa(A'a). Raises ValueError or TypeError if shapes do not fit.
        Source: section 2, arXiv 2512.11784 (rephrased). See: chapter 1.
        """
        from measureattn.measures.algebra import PushForward

        return PushForward(self, A, b)

    def convolve(self, other: "Measure") -> "Measure":
        """The law of x + x' for independent x and x': log-MGFs add.

        Raises ValueError or TypeError if dimensions or dtypes do not fit.
        Source: section 2, arXiv 2512.11784 (rephrased). See: chapter 1.
        """
        from measureattn.measures.algebra import Convolution

        return Convolution([self, other])

    def to(self, *args, **kwargs) -> "Measure":
        """The same law with its tensors moved and converted as torch.Tensor.to does.

        A law that follows the query's dtype keeps its numbers in float64; they only move.
        """

        def converted(tensor, event, follows):
            new = tensor.to(*args, **kwargs)
            return tensor.to(new.device) if follows else new

        return self._rebuild(converted)

    def expand(self, batch_shape) -> "Measure":
        """The same law broadcast to `batch_shape`: more members side by side, no memory copied.

        Raises ValueError if the law's own batch does not broadcast to it.
        """
        shape = torch.Size(batch_shape)
        common = require_broadcast("batch_shape", shape, "the measure's batch", self.batch_shape)
        if common != shape:
            raise ValueError(
                f"batch_shape {tuple(shape)} is smaller than the measure's own, "
                f"{tuple(self.batch_shape)}. Expand to a shape that contains it."
            )

        def expanded(tensor, event, follows):
            return tensor.expand(shape + tensor.shape[tensor.ndim - event :])

        return self._rebuild(expanded, shape)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dim={self.dim}, batch_shape={tuple(self.batch_shape)})"

    # -- what a law's author uses ---------------------------------------------------------------

    #: Names of the tensors that make the law, with the number of their axes after the batch.
    _tensors: ClassVar[dict[str, int]] = {}
    #: Whether these were given as plain numbers, and follow the query's dtype and device.
    _follows = False

    def _rebuild(self, change, batch_shape: torch.Size | None = None) -> "Measure":
        """A copy with every tensor changed: change(tensor, number of event axes, follows).

        Without batch_shape the law, and each part of a combination, keeps its own.
        """
        new = copy.copy(self)
        new.batch_shape = self.batch_shape if batch_shape is None else batch_shape
        for name, event in self._tensors.items():
            tensor = getattr(self, name)
            setattr(new, name, None if tensor is None else change(tensor, event, self._follows))
        return new

    def _reference(self) -> Tensor | None:
        """A tensor whose dtype and device queries must share; None if the law follows the query."""
        own = None if self._follows else next(iter(self._tensors), None)
        return None if own is None else getattr(self, own)

    def _sampling(self, n: int, generator, dtype, device) -> dict:
        """Keyword arguments for `draw`, after the caller's have been checked."""
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise ValueError(f"n must be a whole number of tokens, 0 or more, got {n!r}.")
        if not isinstance(generator, torch.Generator):
            raise TypeError(
                f"generator must be a torch.Generator, got {type(generator).__name__}. "
                f"Make one: torch.Generator().manual_seed(0)."
            )
        like = self._reference()
        if like is None:
            like = torch.empty(0, dtype=dtype or torch.float64, device=device or "cpu")
        elif dtype not in (None, like.dtype) or not _names(device, like.device):
            raise TypeError(
                f"{type(self).__name__} samples in the dtype and on the device of its tensors, "
                f"{like.dtype} on {like.device}; got {dtype} on {device}. Convert the law: .to()."
            )
        return dict(generator=generator, dtype=like.dtype, device=like.device)

    def _zero(self) -> Tensor:
        """The tilt 0 of every member, in the law's dtype and device."""
        like = self._reference()
        if like is None:
            return torch.zeros(*self.batch_shape, self.dim)
        return like.new_zeros(*self.batch_shape, self.dim)

    def _require_domain(self, a: Tensor) -> None:  # noqa: B027 - most laws have nothing to ask
        """Raises ValueError at tilts of infinite kappa, if there are any: see `require_domain`.

        Every method asks here, also those that torch.func derives, in which values are hidden.
        """

    def _query(self, a: Tensor, name: str = "a") -> Tensor:
        """The query, checked and broadcast to (*query, *batch, D)."""
        require_tensor(name, a)
        require_ndim(name, a, 1, "(*query, *batch, D)")
        if a.shape[-1] != self.dim:
            raise ValueError(
                f"the last axis of {name} must have the dimension of the tokens, {self.dim}, got "
                f"shape {tuple(a.shape)}. Map the query into token space first (a = U z)."
            )
        like = self._reference()
        if like is not None:
            require_same(name, a, f"the {type(self).__name__} measure", like)
        if self.validate_args:
            require_finite(name, a, "Look for the query or parameter that produced it.")
            if name == "a":  # a direction w may point anywhere
                self._require_domain(a)
        shape = require_broadcast(name, a.shape[:-1], "the measure's batch", self.batch_shape)
        return a.expand(*shape, self.dim)

    def _query_and_direction(self, a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Both checked, and broadcast against each other."""
        a, w = self._query(a), self._query(w, "w")
        require_same("w", w, "a", a)
        shape = require_broadcast("w", w.shape[:-1], "a", a.shape[:-1])
        return a.expand(*shape, self.dim), w.expand(*shape, self.dim)

    def _total(self, a: Tensor) -> Tensor:
        """Sum of all log-MGFs: each depends on its own tilt, so its gradient is all of theirs."""
        return self.log_mgf(a).sum()


def _names(device: torch.device | str | None, own: torch.device) -> bool:
    """Whether `device` means `own`: None and a type without index ("cuda") mean any such."""
    if device is None:
        return True
    device = torch.device(device)
    return device.type == own.type and device.index in (None, own.index)


def draw(kind, shape, *, generator: torch.Generator, dtype: torch.dtype, device) -> Tensor:
    """Random numbers of torch.`kind` made where the generator lives, then moved to `device`.

    A CPU generator therefore gives the same numbers on every device.
    """
    return kind(shape, generator=generator, dtype=dtype, device=generator.device).to(device)


def require_affine(measure: Measure, A: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
    """A (*batch, M, D) and b (*batch, M) that fit the measure; None becomes 0."""
    require_tensor("A", A)
    require_ndim("A", A, 2, "(*batch, M, D)")
    if A.shape[-1] != measure.dim:
        raise ValueError(
            f"A must map tokens of dimension {measure.dim}, shape (*batch, M, {measure.dim}), got "
            f"shape {tuple(A.shape)}. Transpose it?"
        )
    like = measure._reference()
    if like is not None:
        require_same("A", A, f"the {type(measure).__name__} measure", like)
    if b is None:
        b = A.new_zeros(A.shape[-2])
    require_tensor("b", b)
    require_same("b", b, "A", A)
    if b.ndim == 0 or b.shape[-1] != A.shape[-2]:
        raise ValueError(
            f"b must have one entry a row of A, shape (*batch, {A.shape[-2]}), got shape "
            f"{tuple(b.shape)}. Expand it first."
        )
    require_broadcast("b", b.shape[:-1], "the batch of A", A.shape[:-2])
    require_broadcast("A", A.shape[:-2], "the measure's batch", measure.batch_shape)
    if measure.validate_args:
        require_finite("A", A, "Remove it first.")
        require_finite("b", b, "Remove it first.")
    return A, b


def require_same_space(measures: Sequence[Measure], same_dim: bool = True) -> torch.Size:
    """Measures that can be combined (one dtype, device, dimension); returns their common batch."""
    if isinstance(measures, Measure):
        raise TypeError(
            f"expected a list of measures, got one {type(measures).__name__}. Put it in a list."
        )
    for measure in measures:
        if not isinstance(measure, Measure):
            raise TypeError(
                f"expected measures, got {type(measure).__name__}. "
                f"Tokens become one by Empirical(tokens)."
            )
    if not measures:
        raise ValueError("expected one measure or more, got none. Put at least one in the list.")
    first, shape = measures[0], measures[0].batch_shape
    references = [m for m in measures if m._reference() is not None]
    for measure in measures[1:]:
        if same_dim and measure.dim != first.dim:
            raise ValueError(
                f"all measures must live in one space, got dimensions {first.dim} and "
                f"{measure.dim}. Map one into the other's space with pushforward."
            )
        shape = require_broadcast("one measure", measure.batch_shape, "the others", shape)
    for measure in references[1:]:
        require_same(
            type(measure).__name__, measure._reference(),
            type(references[0]).__name__, references[0]._reference(),
        )
    return shape

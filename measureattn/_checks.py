"""Clear errors for bad input: what was expected, what came, how to repair it.

Shape and dtype checks always run. Value checks need to look at numbers, so they run only where
numbers can be seen: not inside vmap, not while compiling, not while a CUDA graph is recorded.
"""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64)


def values_visible(tensor: Tensor) -> bool:
    """Whether a check may look at the numbers of `tensor`."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return False
    if tensor.is_meta:  # shapes without numbers
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def require_tensor(name: str, tensor: object) -> None:
    """A float32 or float64 tensor with at least one axis."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, got {type(tensor).__name__}. "
            f"Convert it first: torch.as_tensor({name}, dtype=torch.float64)."
        )
    if tensor.dtype in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"{name} must be float32 or float64, got {tensor.dtype}: sums over a prompt lose all "
            f"digits or overflow in half precision. Convert it first: {name}.float()."
        )
    if tensor.dtype not in FLOATS:
        raise TypeError(
            f"{name} must be float32 or float64, got {tensor.dtype}. "
            f"Convert it first: {name}.to(torch.float64)."
        )


def as_numbers(name: str, numbers: object) -> Tensor:
    """A number or a list of numbers as a float64 tensor."""
    try:
        return torch.tensor(numbers, dtype=torch.float64)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be a torch.Tensor, a number or a list of numbers, got {numbers!r}. "
            f"Convert it first: torch.as_tensor({name}, dtype=torch.float64)."
        ) from None


def require_domain(a: Tensor, inside: Tensor, domain: str) -> None:
    """Tilts a (..., D) where the log-MGF is finite: `inside` (...) says which, `domain` in words.

    For example `require_domain(a, (a.abs() < 2).all(-1), "|a_j| < 2")`.
    """
    if values_visible(inside) and not inside.all():
        where = tuple((~inside).nonzero()[0].tolist())
        raise ValueError(
            f"a must lie where the log-MGF is finite, {domain}; found {a[where].tolist()} at index "
            f"{where} (shape {tuple(a.shape)}). Shrink U or the query."
        )


def require_ndim(name: str, tensor: Tensor, least: int, axes: str) -> None:
    """At least `least` axes, none of which the law needs may be empty."""
    if tensor.ndim < least:
        raise ValueError(
            f"{name} must have shape {axes}, got shape {tuple(tensor.shape)}. "
            f"Add the missing axis with unsqueeze."
        )


def require_same(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Same dtype and device: nothing is moved or converted behind the caller's back."""
    for what in ("dtype", "device"):
        mine, theirs = getattr(tensor, what), getattr(other, what)
        if mine != theirs:
            raise TypeError(
                f"{name} must have the {what} of {other_name}, {theirs}, got {mine}. "
                f"Convert it first: {name}.to({theirs!r})."
            )


def require_finite(name: str, tensor: Tensor, repair: str) -> None:
    """No NaN and no infinity; the first one found is named with its position."""
    if not values_visible(tensor):
        return
    bad = ~torch.isfinite(tensor)
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"{name} must be finite; found {tensor[where].item()} at index {where} "
            f"(shape {tuple(tensor.shape)}). {repair}"
        )


def require_broadcast(name: str, shape: torch.Size, other_name: str, other: torch.Size):
    """The common shape of two sets of batch axes, or an error that names both."""
    try:
        return torch.broadcast_shapes(shape, other)
    except RuntimeError:
        raise ValueError(
            f"the leading axes of {name}, {tuple(shape)}, must broadcast against the shape "
            f"{tuple(other)} of {other_name}. Ask Q queries of every member with an axis of size 1 "
            f"between, e.g. {name}[:, None, :]."
        ) from None

"""What every chapter needs besides the mathematics: a seed, and checks that can fail.

A check prints what was compared and the bound, never the difference itself: at the level of
rounding that number changes from machine to machine.
"""

import os

import torch

DEFAULT_SEED = 251211784


def book_seed(chapter: int) -> int:
    """The seed from which all generators of a chapter derive; MEASUREATTN_SEED overrides the base.

    Raises ValueError if MEASUREATTN_SEED is not a whole number. Source: ours. See: notation.

    >>> book_seed(2)
    251211784002
    """
    given = os.environ.get("MEASUREATTN_SEED", str(DEFAULT_SEED))
    if not given.isdecimal():
        raise ValueError(f"MEASUREATTN_SEED must be a whole number, got {given!r}. Unset it?")
    return int(given) * 1000 + chapter


def check(name, value, reference_name, reference, *, within=None, relative=None, std_error=None):
    """Print `ok: ...` if two results agree, raise AssertionError if they do not.

    value, reference  numbers or tensors that broadcast against each other
    within            absolute bound on the largest difference
    relative          bound on the difference relative to the reference, entry by entry
    std_error         standard errors of the difference: at most 4.5 of them, entry by entry

    Exactly one of the three bounds is given. Source: ours. See: notation.

    >>> check("softmax", 0.9640275801, "tanh 2", 0.9640275801, within=1e-12)
    ok: softmax 0.964028 = tanh 2 0.964028, within 1e-12
    """
    if sum(bound is not None for bound in (within, relative, std_error)) != 1:
        raise TypeError("check takes exactly one of within=, relative= and std_error=.")
    value, reference = (torch.as_tensor(x, dtype=torch.float64) for x in (value, reference))
    if within is not None:
        bound, how = torch.as_tensor(within, dtype=torch.float64), f"within {within:g}"
    elif relative is not None:
        bound, how = relative * reference.abs(), f"within {relative:g} of its size"
    else:
        bound = 4.5 * torch.as_tensor(std_error, dtype=torch.float64)
        how = f"within 4.5 standard errors, each {_show(bound.max() / 4.5)}"
    gap = (value - reference).abs()
    # an infinite bound (of an infinite reference, say) would let anything pass
    if gap.numel() == 0 or not bool(((gap <= bound) & bound.isfinite()).all()):
        raise AssertionError(f"{name} {value} is not {reference_name} {reference}, {how}")
    if gap.ndim == 0:
        floor = 0 if std_error is not None else float(bound.max())
        sides = f"{name} {_show(value, floor)} = {reference_name} {_show(reference, floor)}"
    else:
        sides = f"{name} = {reference_name}, all {gap.numel()} values"
    print(f"ok: {sides}, {how}")


def check_below(name, value, bound_name, bound):
    """Print `ok: ...` if every value is strictly below its bound, raise AssertionError if not.

    Source: ours. See: notation.

    >>> check_below("error", 0.02, "tolerance", 0.05)
    ok: error 0.02 < tolerance 0.05
    """
    value, bound = (torch.as_tensor(x, dtype=torch.float64) for x in (value, bound))
    below = value < bound
    if below.numel() == 0 or not bool(below.all()):
        raise AssertionError(f"{name} {value} is not below {bound_name} {bound}")
    if below.ndim == 0:
        print(f"ok: {name} {_show(value)} < {bound_name} {_show(bound)}")
    else:
        print(f"ok: {name} < {bound_name}, all {below.numel()} values")


def _show(number, floor=0.0) -> str:
    """Six digits; what lies below the bound of a comparison is rounding and shown as 0."""
    return "0" if abs(float(number)) <= floor else f"{float(number):.6g}"

"""The checks of the book's chapters: they print what agrees and raise on everything else."""

import math

import pytest
import torch

from measureattn.book import book_seed, check, check_below

NAN, INF = math.nan, math.inf


def test_a_check_prints_what_was_compared(capsys):
    check("softmax", 0.9640275801, "tanh 2", math.tanh(2), within=1e-9)
    check("risk", 1.0, "theory", 1.05, relative=0.1)
    check("mean", 0.1, "exact", 0.0, std_error=0.05)
    check("tokens", torch.ones(2, 3), "ones", 1.0, within=1e-12)
    assert capsys.readouterr().out.splitlines() == [
        "ok: softmax 0.964028 = tanh 2 0.964028, within 1e-09",
        "ok: risk 1 = theory 1.05, within 0.1 of its size",
        "ok: mean 0.1 = exact 0, within 4.5 standard errors, each 0.05",
        "ok: tokens = ones, all 6 values, within 1e-12",
    ]


def test_a_difference_of_rounding_is_never_printed(capsys):
    """What lies below the bound changes from machine to machine: both print the same."""
    for rounding in (3e-17, -2e-16):
        check("bias", rounding, "theory", 0.0, within=1e-12)
    first, second = capsys.readouterr().out.splitlines()
    assert first == second == "ok: bias 0 = theory 0, within 1e-12"


@pytest.mark.parametrize(
    ("value", "reference", "bound"),
    [
        (1.0, 1.1, {"within": 0.05}),
        (1.1, 1.0, {"within": 0.05}),
        (-1.0, 1.0, {"within": 0.05}),
        (1.0, 1.2, {"relative": 0.1}),
        (1e-30, 0.0, {"relative": 0.1}),
        (1.0, 0.0, {"std_error": 0.2}),
        (1.0, 1.0 + 1e-15, {"within": 0.0}),
        (1.0, 1.0, {"within": -1.0}),
        (NAN, 1.0, {"within": 1.0}),
        (1.0, NAN, {"within": 1.0}),
        (NAN, NAN, {"within": 1.0}),
        (1.0, NAN, {"relative": 1.0}),
        (1.0, 1.0, {"within": NAN}),
        (1.0, 1.0, {"std_error": NAN}),
        (INF, INF, {"within": 1.0}),
        (INF, 1.0, {"within": 1.0}),
        (1.0, INF, {"relative": 0.1}),
        (1.0, 2.0, {"within": INF}),
        (1.0, 2.0, {"std_error": INF}),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), {"within": 0.5}),
        (torch.tensor([1.0, NAN]), 1.0, {"within": 0.5}),
        (torch.tensor([1.0, 2.0]), 1.0, {"std_error": torch.tensor([1.0, 0.1])}),
        (torch.tensor([]), torch.tensor([]), {"within": 1.0}),
    ],
)
def test_a_failing_check_raises_and_prints_no_ok(capsys, value, reference, bound):
    with pytest.raises(AssertionError, match=r"left .* is not right"):
        check("left", value, "right", reference, **bound)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("bounds", [{}, {"within": 1.0, "relative": 1.0}])
def test_a_check_has_exactly_one_bound(bounds):
    with pytest.raises(TypeError, match="exactly one of within=, relative= and std_error="):
        check("left", 1.0, "right", 1.0, **bounds)


def test_the_bounds_are_where_they_say():
    """Just inside passes, just outside raises, for each of the three kinds."""
    limits = (({"within": 0.5}, 0.5), ({"relative": 0.25}, 0.5), ({"std_error": 0.5}, 2.25))
    for bound, limit in limits:
        check("left", 2.0 + 0.999 * limit, "right", 2.0, **bound)
        with pytest.raises(AssertionError):
            check("left", 2.0 + 1.001 * limit, "right", 2.0, **bound)


def test_check_below(capsys):
    check_below("error", 0.02, "tolerance", 0.05)
    check_below("errors", torch.tensor([1.0, 2.0]), "bounds", torch.tensor([1.5, 2.5]))
    assert capsys.readouterr().out.splitlines() == [
        "ok: error 0.02 < tolerance 0.05",
        "ok: errors < bounds, all 2 values",
    ]


@pytest.mark.parametrize(
    ("value", "bound"),
    [
        (1.0, 0.5),
        (1.0, 1.0),
        (NAN, 1.0),
        (1.0, NAN),
        (INF, INF),
        (torch.tensor([0.1, 0.9]), 0.5),
        (torch.tensor([0.1, NAN]), 0.5),
        (torch.tensor([]), 1.0),
    ],
)
def test_a_value_that_is_not_below_raises(capsys, value, bound):
    with pytest.raises(AssertionError, match=r"error .* is not below limit"):
        check_below("error", value, "limit", bound)
    assert capsys.readouterr().out == ""


def test_seeds(monkeypatch):
    monkeypatch.delenv("MEASUREATTN_SEED", raising=False)
    default = [book_seed(n) for n in range(20)]
    assert len(set(default)) == 20
    assert default == [book_seed(n) for n in range(20)]
    monkeypatch.setenv("MEASUREATTN_SEED", "7")
    other = [book_seed(n) for n in range(20)]
    assert other != default
    assert len({*default, *other}) == 40
    torch.Generator().manual_seed(book_seed(19))


@pytest.mark.parametrize("given", ["seven", "-1", "1.5", ""])
def test_a_bad_seed_is_refused(monkeypatch, given):
    monkeypatch.setenv("MEASUREATTN_SEED", given)
    with pytest.raises(ValueError, match="MEASUREATTN_SEED must be a whole number, got"):
        book_seed(1)

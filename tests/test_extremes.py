"""Prompts by their extreme tokens: against brute force, order statistics and exact means."""

import functools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from scipy.special import log_ndtr

from measureattn import Gaussian, extremes
from measureattn.concentration import exponent, fit_slope, gaussian_mean_error
from measureattn.extremes import largest_tokens, mean_error, prompt_errors, typical_error

F64 = torch.float64
FAR = [10**10, 10**30, 10**60]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@functools.cache
def exact_mean(s, length):
    one = torch.eye(1, dtype=F64)
    law, queries = (Gaussian(torch.zeros(1, dtype=F64), v * one) for v in (s, 1.0))
    return gaussian_mean_error(law, queries, one, one, length).value


# -- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [200, 10**6, 10**60, 10**400])
@pytest.mark.parametrize("rank", [1, 2, 50])
def test_largest_tokens_have_the_law_of_order_statistics(length, rank):
    """1 - Phi of the rank-th largest is Beta(rank, L + 1 - rank); L times it Gamma far out."""
    tokens = largest_tokens(length, 4000, k=50, generator=generator(rank))[:, rank - 1].numpy()
    log_tail = log_ndtr(-tokens)
    if length < 10**7:
        chance = scipy.stats.beta(rank, length + 1 - rank).cdf(np.exp(log_tail))
    else:
        chance = scipy.stats.gamma(rank).cdf(np.exp(log_tail + math.log(length)))
    assert scipy.stats.kstest(chance, "uniform").pvalue > 1e-3


def test_both_ends_are_drawn_jointly():
    """k largest, then k smallest of the rest: at L = 2k the bulk is empty and all L are there."""
    n, k = 4000, 20
    top, bottom = (extremes._exponentials((n, k), generator(i)) for i in (1, 2))
    upper, lower, (right, left) = extremes._extremes(math.log(2 * k), top, bottom)
    assert (np.diff(upper) <= 0).all()
    assert (np.diff(lower) <= 0).all()
    assert (right >= -left).all()
    tokens = np.concatenate([upper, -lower], 1)
    assert abs(tokens.mean()) < 4 / math.sqrt(tokens.size)
    assert abs(tokens.var() - 1) < 4 * math.sqrt(2 / tokens.size)
    chance = scipy.stats.norm.cdf(lower[:, 0]) ** (2 * k)
    assert scipy.stats.kstest(chance, "uniform").pvalue > 1e-3


def test_the_bulk_has_its_exact_moments():
    """The Legendre nodes carry E exp((t + t') xi) of the truncated normal, the mean its own."""
    cut = np.array([3.0]), np.array([2.5])
    nodes, log_masses = extremes._slices(cut)
    mass = scipy.stats.norm.cdf(3.0) - scipy.stats.norm.cdf(-2.5)
    for theta in (-3.0, 0.0, 0.7, 5.0):
        shifted = scipy.stats.norm.cdf(3.0 - theta) - scipy.stats.norm.cdf(-2.5 - theta)
        expected = math.exp(theta**2 / 2) * shifted / mass
        weights = np.exp(log_masses[0] + theta * nodes[0])
        assert weights.sum() == pytest.approx(expected, rel=1e-12)
        log_mean, shift = extremes._bulk_mean(theta, cut, math.log(7))
        assert math.exp(log_mean[0]) == pytest.approx(7 * expected, rel=1e-12)
        centred = weights @ (nodes[0] - theta) / weights.sum()
        assert shift[0] == pytest.approx(centred, rel=1e-10, abs=1e-13)


# -- whole prompts -------------------------------------------------------------------------------

STEP = 0.25  # in the tilt theta = r z, shared by all s


def brute_force(length, n_prompts, levels):
    """err^2 of prompts with all their tokens: {s: (prompts)}; weights step by multiplication."""
    counts = {s: math.ceil((6.5 if s < 2 else 5.2) * math.sqrt(s) / STEP) for s in levels}
    theta = STEP * np.arange(max(counts.values()) + 1)
    errors, draws = {s: [] for s in levels}, generator(length)
    for _ in range(n_prompts):
        sums = np.zeros((2, 2, len(theta)))
        for part in torch.randn(length, generator=draws, dtype=F64).numpy().reshape(-1, 10_000):
            for side, step in enumerate((np.exp(STEP * part), np.exp(-STEP * part))):
                weights = np.ones_like(part)
                for j in range(len(theta)):
                    sums[side, :, j] += weights.sum(), weights @ part
                    weights *= step
        tilt = np.stack([theta, -theta])
        square = (sums[:, 1] / sums[:, 0] - tilt) ** 2
        for s in levels:
            n, r = counts[s], math.sqrt(s)
            density = STEP / r * np.exp(-((theta[: n + 1] / r) ** 2) / 2) / math.sqrt(2 * math.pi)
            density[0] /= 2  # theta = 0 is counted from both sides
            errors[s].append(s * (square[:, : n + 1].sum(0) @ density))
    return errors


@functools.cache
def brute_medians(length, n_prompts):
    errors = brute_force(length, n_prompts, (0.25, 1.0, 4.0))
    draws = np.random.default_rng(0)
    result = {}
    for s, values in errors.items():
        values = np.array(values)
        resampled = np.median(values[draws.integers(n_prompts, size=(999, n_prompts))], axis=1)
        result[s] = np.median(values), resampled.std()
    return result


@pytest.mark.parametrize("s, detects", [(0.25, 1.2), (1.0, 1.0), (4.0, 0.4)])
@pytest.mark.parametrize("length, n_prompts", [(10**4, 1000), (10**6, 80)])
def test_medians_against_brute_force(s, detects, length, n_prompts):
    """In level: a median that is wrong by `detects` times its size would be seen."""
    brute, brute_error = brute_medians(length, n_prompts)[s]
    got = typical_error(s, [length], 2000, k=600, generator=generator(3))
    std_error = math.hypot(brute_error, float(got.std_error[0]))
    assert std_error <= detects * brute / 5
    assert abs(float(got.value[0]) - brute) <= 4 * std_error


def test_the_number_of_tokens_kept_does_not_matter():
    """The bulk's Gaussian takes over where it should: 4 times fewer tokens, the same medians."""
    medians = [
        typical_error(2.0, [10**6, 10**40], 1500, k=k, generator=generator(k)) for k in (150, 600)
    ]
    gap = (medians[0].value - medians[1].value).abs()
    noise = (medians[0].std_error.square() + medians[1].std_error.square()).sqrt()
    assert (gap <= 4 * noise).all()
    assert (noise <= 0.1 * medians[1].value).all()


@pytest.mark.parametrize("s", [1.0, 2.0, 4.0])
def test_median_slopes_far_out(s):
    lengths = [10**40, 10**60]
    errors = prompt_errors(s, lengths, 400, k=400, generator=generator(1))
    slope = fit_slope(lengths, errors, typical=True, generator=generator(2))
    assert slope.high - slope.low < 0.04
    assert -slope.value == pytest.approx(exponent(s, typical=True), abs=0.02)


@pytest.mark.parametrize("s", [0.25, 1.0, 2.0, 4.0])
def test_importance_sampling_sees_the_mean(s):
    exact = torch.tensor([exact_mean(s, length) for length in FAR], dtype=F64)
    got = mean_error(s, FAR, 2400, k=200, generator=generator(6))
    assert (got.std_error <= 0.1 * exact).all(), got.std_error / exact
    assert ((got.value - exact).abs() <= 4 * got.std_error).all(), got.value / exact


def test_importance_sampling_agrees_with_exact_means_of_short_prompts():
    lengths = [10**4, 10**6]
    exact = torch.tensor([exact_mean(1.0, length) for length in lengths], dtype=F64)
    for importance in (False, True):
        got = mean_error(1.0, lengths, 4000, importance=importance, k=200, generator=generator(6))
        assert (got.std_error <= 0.07 * exact).all()
        assert ((got.value - exact).abs() <= 4 * got.std_error).all()


def test_plain_sampling_cannot_see_the_mean():
    """s = 1, L = 1e60: off by more than ten, and its own standard error does not say so."""
    exact = exact_mean(1.0, 10**60)
    plain = mean_error(1.0, [10**60], 1000, importance=False, k=200, generator=generator(6))
    assert float(plain.value[0]) < 0.1 * exact
    assert float(plain.value[0] + 20 * plain.std_error[0]) < exact


def test_centred_sums_pass_the_floor_of_subtraction():
    """At s = 1/4, L = 1e60 the error is 1e-60; T minus its limit in float64 stops at 1e-32."""
    errors = prompt_errors(0.25, [10**60], 200, k=100, generator=generator())
    assert (errors > 0).all()
    ratio = errors.mean() / exact_mean(0.25, 10**60)
    assert abs(float(ratio) - 1) <= 4 * float(errors.std() / errors.mean()) / math.sqrt(200)


def test_randomness_is_the_generators():
    state = torch.get_rng_state()
    one, two = (prompt_errors(1.0, [10**20], 5, k=50, generator=generator(1)) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "bad, message",
    [
        (lambda: largest_tokens(10, 2, k=11, generator=generator()), "11 tokens or more, got 10"),
        (lambda: prompt_errors(0.0, [10], 2, generator=generator()), "above 0, got 0"),
        (lambda: prompt_errors(1.0, [3], 2, generator=generator()), "4 tokens or more, got 3"),
        (lambda: mean_error(1.0, [10**6], 3, generator=generator()), "must be even"),
    ],
)
def test_bad_input_is_refused_with_a_repair(bad, message, no_shape_hook):
    with pytest.raises(ValueError, match=message):
        bad()

"""Errors of finite prompts: exact laws against brute force, estimators against exact laws.

A Monte Carlo result is judged in its own standard errors, four of them; each test first asserts
that the standard error is at most a fifth of the error it claims to detect.
"""

import functools
import math

import numpy as np
import pytest
import scipy.stats
import torch

from measureattn import (
    Discrete,
    Empirical,
    Gaussian,
    Mixture,
    Rademacher,
    UniformSphere,
    _gaussian_law,
    attend,
    concentration,
)
from measureattn.concentration import (
    delta_method,
    exponent,
    fit_slope,
    gaussian_error,
    gaussian_mean_error,
    mean_squared_error,
    prompt_errors,
    required_length,
)
from measureattn.streaming import TiltedSums

F64 = torch.float64
ONE = torch.eye(1, dtype=F64)
LEVELS = (0.25, 1.0, 2.25, 4.0)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(variance, dim=1):
    return Gaussian(torch.zeros(dim, dtype=F64), variance * torch.eye(dim, dtype=F64))


def assert_within(value, std_error, expected, detects, extra=0.0):
    """|value - expected| <= 4 standard errors + extra, able to see a relative error `detects`."""
    triple = (value, std_error, expected)
    value, std_error, expected = (torch.as_tensor(x, dtype=F64) for x in triple)
    assert (std_error <= detects * expected.abs() / 5).all(), (std_error / expected.abs()).max()
    assert ((value - expected).abs() <= 4 * std_error + extra).all(), (value, expected, std_error)


# -- the exact Gaussian laws -------------------------------------------------------------------


def brute_force(length, n_prompts, batch):
    """T - r and sum p^2 for every s in LEVELS, and the influence function's mean: (s, prompts)."""
    gap, squares, first = ([[] for _ in LEVELS] for _ in range(3))
    draws = generator(length)
    for _ in range(n_prompts // batch):
        xi = torch.randn(batch, length, generator=draws, dtype=F64)
        for i, s in enumerate(LEVELS):
            r = math.sqrt(s)
            w = (r * xi - s / 2).exp()
            centred = (w * (xi - r)).sum(-1)
            total = w.sum(-1)
            gap[i].append(centred / total)
            squares[i].append(w.square().sum(-1) / total.square())
            first[i].append(centred / length)
    return (torch.stack([torch.cat(x) for x in part]) for part in (gap, squares, first))


@pytest.mark.parametrize(
    "length, n_prompts", [(2, 400_000), (10, 400_000), (64, 200_000), (1000, 60_000)]
)
def test_exact_law_against_brute_force(length, n_prompts):
    gap, squares, first = brute_force(length, n_prompts, 20_000 if length < 100 else 2_000)
    f, f2, bias = gaussian_error(torch.tensor(LEVELS), length)
    root = math.sqrt(n_prompts)
    assert_within(gap.square().mean(1), gap.square().std(1) / root, f, 0.1)
    assert_within(squares.mean(1), squares.std(1) / root, f2, 0.1)
    # the mean of the influence function is zero: regressed out, the bias can be seen at all
    centred = first - first.mean(1, keepdim=True)
    beta = (centred * gap).sum(1) / centred.square().sum(1)
    rest = gap - beta[:, None] * first
    assert_within(rest.mean(1), rest.std(1) / root, bias, 0.1)


def test_one_token_is_itself():
    s = torch.tensor([0.0, 1e-6, 0.25, 4.0, 50.0], dtype=F64)
    f, f2, bias = gaussian_error(s, 1)
    torch.testing.assert_close(f, 1 + s, rtol=1e-11, atol=0)
    torch.testing.assert_close(f2, torch.ones_like(s), rtol=1e-11, atol=0)
    torch.testing.assert_close(bias, -s.sqrt(), rtol=1e-11, atol=0)


def test_no_score_is_the_plain_mean():
    for value in gaussian_error(0.0, [2, 100, 1e60])[:2]:
        expected = torch.tensor([0.5, 0.01, 1e-60], dtype=F64)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("s", [1e-4, 0.25, 1.0, 4.0, 30.0])
def test_halving_the_step_changes_nothing(s, monkeypatch):
    """The documented accuracy, 1e-12 (the logarithm of 1e60 itself rounds at 3e-14)."""
    lengths = [1, 2, 64, 10**6, 10**60]
    coarse = gaussian_error(s, lengths)
    monkeypatch.setattr(_gaussian_law, "STEP", _gaussian_law.STEP / 2)
    for one, two in zip(coarse, gaussian_error(s, lengths), strict=True):
        torch.testing.assert_close(one, two, rtol=3e-12, atol=0)


def test_ratios_to_first_order():
    """Exact error over exp(s)(1+s)/L; three digits."""
    table = {1.0: (0.547, 0.857, 0.980, 0.998), 2.25: (0.176, 0.413, 0.777, 0.959),
             4.0: (0.037, 0.095, 0.290, 0.639)}  # fmt: skip
    lengths = torch.tensor([1e1, 1e2, 1e3, 1e4], dtype=F64)
    for s, expected in table.items():
        ratio = gaussian_error(s, lengths)[0] * lengths / (math.exp(s) * (1 + s))
        assert [round(x, 3) for x in ratio.tolist()] == list(expected)
    assert round(float(gaussian_error(9.0, 1e6)[0]) * 1e6 / (math.exp(9) * 10), 3) == 0.223


def test_lengths_beyond_the_floats():
    """At light tilts first order is exact there: F = 0 in float64, but its ratio is right."""
    f, f2, _ = gaussian_error(0.5, [10**250, 10**1000])
    assert float(f[0] / f2[0]) == pytest.approx(1.5, rel=1e-10)
    assert f[1] == 0
    log_f, _ = _gaussian_law.log_errors(0.5, 1000 * math.log(10))
    assert log_f == pytest.approx(0.5 + math.log(1.5) - 1000 * math.log(10), rel=1e-14)


@functools.cache
def mean_on_the_line(s, length):
    return gaussian_mean_error(normal(s), normal(1.0), ONE, ONE, length).value


@pytest.mark.parametrize(
    "s, expected", [(0.5, 0.021859), (1.0, 0.087185), (2.0, 0.447181), (4.0, 2.750860)]
)
def test_reference_values_of_random_queries(s, expected):
    assert mean_on_the_line(s, 64) == pytest.approx(expected, abs=6e-7)


@pytest.mark.parametrize("s, expected", [(1.0, 0.6136), (2.0, 0.3620), (4.0, 0.2064)])
def test_slopes_of_the_mean_far_out(s, expected):
    near, far = (mean_on_the_line(s, 10**k) for k in (40, 60))
    assert math.log10(near / far) / 20 == pytest.approx(expected, abs=1e-3)
    assert math.log10(near / far) / 20 < exponent(s)


def test_interpolation_over_queries_is_fine_enough(monkeypatch):
    """More nodes and further queries: the same mean within the documented 1e-8 (here at 1e6)."""
    law = normal(1.0)
    coarse = gaussian_mean_error(law, normal(1.0), ONE, ONE, 1e6).value
    monkeypatch.setattr(_gaussian_law, "NODES", 90)
    monkeypatch.setattr(_gaussian_law, "FAR", 30.0)
    fine = gaussian_mean_error(law, normal(1.0), ONE, ONE, 1e6).value
    assert coarse == pytest.approx(fine, rel=1e-8)


def general_setting():
    cov = torch.tensor([[1.0, 0.3, 0.0], [0.3, 0.5, 0.1], [0.0, 0.1, 0.8]], dtype=F64)
    law = Gaussian(torch.tensor([0.5, -1.0, 2.0], dtype=F64), cov)
    query_cov = torch.tensor([[0.4, 0.1], [0.1, 0.3]], dtype=F64)
    queries = Gaussian(torch.tensor([0.1, 0.2], dtype=F64), query_cov)
    U = torch.tensor([[0.6, -0.2], [0.1, 0.7], [0.4, 0.3]], dtype=F64)
    V = torch.tensor([[1.0, 0.5, -0.3], [0.2, -0.8, 1.1]], dtype=F64)
    return law, queries, U, V


@pytest.mark.parametrize("length", [5, 60])
def test_any_dimension_against_monte_carlo(length):
    law, queries, U, V = general_setting()
    exact = gaussian_mean_error(law, queries, U, V, length)
    assert 0 < exact.std_error < 1e-3 * exact.value
    sampled = mean_squared_error(law, queries, U, V, [length], 4000, generator=generator())
    assert_within(sampled.value[0], sampled.std_error[0], exact.value, 0.1, 4 * exact.std_error)


@pytest.mark.parametrize("dim", [1, 5])
def test_isotropic_queries_need_no_sampling(dim):
    law, eye = normal(0.3, dim), torch.eye(dim, dtype=F64)
    exact = gaussian_mean_error(law, normal(1.0, dim), eye, eye, 30)
    assert exact.std_error == 0
    sampled = mean_squared_error(law, normal(1.0, dim), eye, eye, [30], 3000, generator=generator())
    assert_within(sampled.value[0], sampled.std_error[0], exact.value, 0.1)


def test_a_query_that_does_not_vary_is_one_query():
    z = torch.tensor([0.7], dtype=F64)
    point = Gaussian(z, torch.zeros(1, 1, dtype=F64))
    value = gaussian_mean_error(normal(2.0), point, ONE, ONE, 50).value
    assert value == pytest.approx(2 * float(gaussian_error(2.0 * 0.49, 50)[0]), rel=1e-9)


# -- exponents -----------------------------------------------------------------------------------


def test_exponents():
    golden = (math.sqrt(5) - 1) / 2
    assert exponent(1.0) == pytest.approx(golden, rel=1e-15)
    assert exponent(1.0, typical=True) == pytest.approx(2 / 3, rel=1e-15)
    for typical in (False, True):
        assert exponent(0.3, typical) == 1 == exponent(0.5 + 1e-12, typical=typical).__round__(9)
        assert 1e8 * exponent(1e8, typical) == pytest.approx(1, rel=1e-7)
    for s in (0.6, 1.0, 3.0):
        assert exponent(s) < exponent(s, typical=True)


def spike_error(length):
    """E err^2 of (1 - 1/L) delta_0 + (delta_x + delta_-x)/2L, x^2 = 2 log L, unit query, s = 1.

    Counts of +x and -x in L tokens are Poisson(1/2) each up to 1/L; the mean over z is a sum.
    """
    x = math.sqrt(2 * math.log(length))
    z = np.arange(0.0, 16.0, 0.01)
    density = np.exp(-(z**2) / 2) * np.where(z > 0, 2, 1) * 0.01 / math.sqrt(2 * math.pi)
    up, down = np.exp(z * x), np.exp(-z * x)
    limit = x * (up - down) / 2 / (length - 1 + (up + down) / 2)
    total, chance = 0.0, scipy.stats.poisson(0.5).pmf
    for plus in range(16):
        for minus in range(16):
            softmax = x * (plus * up - minus * down) / (
                length - plus - minus + plus * up + minus * down
            )
            error = ((softmax - limit) ** 2) @ density
            total += chance(plus) * chance(minus) * error
    return total


@pytest.mark.parametrize(
    "first, last, slope", [(4, 8, 0.2015), (8, 16, 0.2279), (16, 24, 0.2378), (24, 32, 0.2415)]
)
def test_the_law_that_attains_a_quarter(first, last, slope):
    near, far = spike_error(10.0**first), spike_error(10.0**last)
    assert math.log10(near / far) / (last - first) == pytest.approx(slope, abs=2e-3)


@pytest.mark.parametrize("length", [10, 10**4, 10**16, 10**32])
def test_that_law_is_sub_gaussian(length):
    """kappa(a) <= a^2/2 at all a: what its place in the paper's class asks for."""
    x = math.sqrt(2 * math.log(length))
    points = torch.tensor([[0.0], [x], [-x]], dtype=F64)
    law = Discrete(points, torch.tensor([1 - 1 / length, 0.5 / length, 0.5 / length], dtype=F64))
    a = torch.linspace(0.01, 4 * x, 4000, dtype=F64)[:, None]
    kappa = law.log_mgf(a)
    assert (kappa <= a[:, 0].square() / 2 * (1 + 1e-12)).all()
    assert (kappa / a[:, 0].square()).max() > 0.1  # of 1/2, which it tends to as L grows


# -- first order ---------------------------------------------------------------------------------


def laws():
    components = [
        Gaussian(torch.tensor(m, dtype=F64), v * torch.eye(2, dtype=F64))
        for m, v in (([1.0, 0.0], 0.3), ([-0.5, 0.8], 0.6))
    ]
    cov = torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=F64)
    return {
        "gaussian": (Gaussian(torch.tensor([0.3, -0.5], dtype=F64), cov), [0.5, -0.4]),
        "rademacher": (Rademacher(2), [0.7, -0.4]),
        "sphere": (UniformSphere(1.5, 2), [0.4, 0.5]),
        "mixture": (Mixture(components, torch.tensor([0.4, 0.6], dtype=F64)), [0.8, 0.3]),
    }


@pytest.mark.parametrize("name", ["gaussian", "rademacher", "sphere", "mixture"])
def test_delta_method_against_monte_carlo(name):
    """Covariance along the axes and across, and bias, at L = 1000; the second-order term is
    measured as the change from L = 500, to which it contributes once more."""
    law, tilt = laws()[name]
    a, n, draws = torch.tensor(tilt, dtype=F64), 12_000, generator(5)
    covariance, bias = delta_method(law, a)
    second, drift = [], []
    state = TiltedSums.empty(a.expand(n, 2))
    prompts = law.expand((n,))
    for length, part in ((500, 100),) * 5 + ((1000, 100),) * 5:
        state = state.update(prompts.sample(part, generator=draws))
        read_at = round(float(state.log_total[0].exp()))
        if read_at == length:
            gap = state.mean - law.tilted_mean(a)
            first = (state.log_mgf - law.log_mgf(a)).exp()[:, None] * gap
            second.append(length * gap[:, :, None] * gap[:, None, :])
            drift.append(length * (gap - first))
    scale = covariance.diagonal().sqrt()
    unit = covariance / scale[:, None] / scale
    half, full = (x / scale[:, None] / scale for x in second)
    spread = full.std(0) / math.sqrt(n)
    change = (half.mean(0) - full.mean(0)).abs()
    assert (spread < 0.02).all()
    assert ((full.mean(0) - unit).abs() <= 4 * spread + change).all()
    assert_within(full.mean(0).diagonal(), spread.diagonal(), unit.diagonal(), 0.1, change.max())
    along = bias / bias.norm()
    half, full = (x @ along for x in drift)
    assert_within(full.mean(), full.std() / math.sqrt(n), bias.norm(), 0.1,
                  (half.mean() - full.mean()).abs())  # fmt: skip


def test_delta_method_is_the_covariance_of_the_influence_function():
    """On atoms every expectation is a sum: equality to rounding, queries side by side."""
    points = torch.tensor([[0.0, 1.0], [1.0, -1.0], [2.0, 0.5]], dtype=F64)
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
    law, a = Discrete(points, weights), torch.tensor([[0.0, 0.0], [1.0, -2.0]], dtype=F64)
    covariance, bias = delta_method(law, a)
    for i in range(2):
        w = (points @ a[i] - law.log_mgf(a[i])).exp()
        h = w[:, None] * (points - law.tilted_mean(a[i]))
        torch.testing.assert_close(covariance[i], (weights[:, None] * h).mT @ h)
        torch.testing.assert_close(bias[i], -(weights[:, None] * w[:, None] * h).sum(0))


def test_delta_method_refuses_an_infinite_kappa():
    class Laplace(Rademacher):
        def log_mgf(self, a):
            a = self._query(a)
            return torch.where(a.abs() < 1, -torch.log1p(-a.square()), torch.inf).sum(-1)

    with pytest.raises(ValueError, match=r"kappa finite at a and at 2a.*query \(1,\)"):
        delta_method(Laplace(1), torch.tensor([[0.2], [0.6]], dtype=F64))


# -- measured ------------------------------------------------------------------------------------


def test_control_variate_cuts_the_variance():
    """At a'Ga = 0.5, L = 1000: at least 50 times, in six dimensions, and no bias."""
    law, eye = normal(1.0, 6), torch.eye(6, dtype=F64)
    z = torch.full((1, 6), math.sqrt(0.5 / 6), dtype=F64)
    plain, better = (
        mean_squared_error(
            law, z, eye, eye, [1000], 2000, generator=generator(3), control_variate=c
        )
        for c in (False, True)
    )
    cut = (plain.std_error / better.std_error).square()
    assert cut > 50
    f, f2, _ = gaussian_error(0.5, 1000)
    assert_within(better.value[0], better.std_error[0], f + 5 * f2, 0.02)
    assert_within(plain.value[0], plain.std_error[0], f + 5 * f2, 0.1)
    assert (better.value - plain.value).abs() <= 4 * plain.std_error


@pytest.mark.parametrize("s", [0.2, 1.0, 4.0])
def test_control_variate_is_unbiased_and_never_hurts(s):
    """Random queries, below and far above s = 1/2, where its own mean would not exist."""
    lengths = [2, 16, 64, 500]
    exact = [mean_on_the_line(s, length) for length in lengths]
    plain, better = (
        mean_squared_error(
            normal(s), normal(1.0), ONE, ONE, lengths, 2400, n_queries=16,
            generator=generator(8), control_variate=c,
        )
        for c in (False, True)
    )  # fmt: skip
    for estimate in (plain, better):
        assert_within(estimate.value, estimate.std_error, exact, 0.5)
    assert (better.std_error < 1.05 * plain.std_error).all()


def test_value_derivative_error_is_the_error_with_unit_v():
    law, queries, U, V = general_setting()
    eye = torch.eye(3, dtype=F64)
    exact = gaussian_mean_error(law, queries, U, eye, 60)
    got = mean_squared_error(law, queries, U, V, [60], 4000, generator=generator(), of="V")
    assert_within(got.value[0], got.std_error[0], exact.value, 0.1, 4 * exact.std_error)


def test_score_derivative_error_without_scores():
    """U = 0: the prompt's covariance of N(0, g) errs by g^2 (2L - 1)/L^2, times V^2 |z|^2.

    At L = 1 that is the witness against reading the bounds at L = 1: ln(1) = 0.
    """
    z, g = torch.tensor([[2.0]], dtype=F64), 1.5
    lengths = torch.tensor([1.0, 2.0, 20.0], dtype=F64)
    got = mean_squared_error(
        normal(g), z, 0 * ONE, 3 * ONE, [1, 2, 20], 40_000, generator=generator(), of="U"
    )
    expected = 9 * 4 * g**2 * (2 * lengths - 1) / lengths**2
    assert_within(got.value, got.std_error, expected, 0.1)


def test_score_derivative_error_of_a_known_prompt():
    """One token has covariance 0: the error is the law's own covariance."""
    law, _, U, V = general_setting()
    z = torch.tensor([[0.3, -0.4], [1.0, 2.0]], dtype=F64)
    got = prompt_errors(law, z, U, V, [1], 3, generator=generator(), of="U")
    expected = (V @ law.cov).square().sum() * z.square().sum(-1).mean()
    torch.testing.assert_close(got, expected.expand(3, 1))


def test_errors_are_those_of_empirical_prompts():
    """Nested prefixes, many queries: against attend on the very same tokens."""
    law, _, U, V = general_setting()
    z = torch.tensor([[0.3, -0.4], [1.0, 2.0], [0.0, 0.5]], dtype=F64)
    lengths = [3, 10]
    got = prompt_errors(law, z, U, V, lengths, 4, generator=generator(2))
    draws, prompts = generator(2), law.expand((4,))
    tokens = torch.cat([prompts.sample(n, generator=draws) for n in (3, 7)], -2)
    for column, length in enumerate(lengths):
        prompt = Empirical(tokens[:, :length])
        gap = attend(prompt, z[:, None], U=U, V=V) - attend(law, z, U=U, V=V)[:, None]
        torch.testing.assert_close(got[:, column], gap.square().sum(-1).mean(0))


def test_slopes_have_intervals():
    """Errors L^-0.7 times a common factor per prompt: the slope is exact; with noise it is
    covered."""
    lengths = [10, 100, 10**30]
    logs = torch.tensor([math.log(x) for x in lengths], dtype=F64)
    factor = torch.rand(50, 1, generator=generator(), dtype=F64) + 0.5
    for typical in (False, True):
        slope = fit_slope(lengths, factor * (-0.7 * logs).exp(), typical=typical,
                          generator=generator())  # fmt: skip
        assert slope.value == pytest.approx(-0.7, rel=1e-12)
        assert slope.high - slope.low < 1e-12
    noise = torch.randn(50, 3, generator=generator(1), dtype=F64).exp()
    slope = fit_slope(lengths, noise * (-0.7 * logs).exp(), generator=generator())
    assert slope.low < -0.7 < slope.high
    assert 1e-4 < slope.high - slope.low < 0.05


def test_measured_slope_at_a_light_tilt():
    errors = prompt_errors(
        normal(0.1), normal(1.0), ONE, ONE, [64, 256, 1024], 400, n_queries=8, generator=generator()
    )
    slope = fit_slope([64, 256, 1024], errors, generator=generator())
    assert slope.low < -1 < slope.high
    assert slope.high - slope.low < 0.2


# -- how long a prompt must be --------------------------------------------------------------------


@pytest.mark.parametrize(
    "s, tolerance", [(0.1, 0.1), (0.25, 0.1), (0.5, 0.1), (1.0, 0.1), (1.5, 0.2)]
)
def test_required_length_of_gaussian_laws(s, tolerance):
    answer = required_length(normal(s), normal(1.0), ONE, ONE, tolerance)
    length, target = answer.length, (tolerance * s) ** 2
    assert mean_on_the_line(s, length) <= target * (1 + 1e-9)
    assert mean_on_the_line(s, length - 1) > target
    assert mean_on_the_line(s, int(length / 1.1)) > target
    assert answer.interval == (length, length)


@pytest.mark.parametrize("s", [0.1, 0.2])
def test_required_length_agrees_with_monte_carlo(s):
    length = required_length(normal(s), normal(1.0), ONE, ONE, 0.1).length
    got = mean_squared_error(
        normal(s), normal(1.0), ONE, ONE, [length], 2000, n_queries=16, generator=generator()
    )
    assert_within(got.value[0], got.std_error[0], (0.1 * s) ** 2, 0.1)


@pytest.mark.parametrize("name", ["gaussian", "rademacher", "sphere", "mixture"])
def test_required_length_at_fixed_queries(name):
    """Measured at the returned length the error is what was asked for, within 20%."""
    law, tilt = laws()[name]
    eye, z = torch.eye(2, dtype=F64), torch.tensor([tilt, tilt[::-1]], dtype=F64)
    answer = required_length(law, z, eye, eye, 0.1)
    signal = (law.tilted_mean(z) - law.tilted_mean(0 * z)).square().sum(-1).mean()
    got = mean_squared_error(law, z, eye, eye, [answer.length], 2000, generator=generator(4))
    assert_within(got.value[0], got.std_error[0], 0.01 * signal, 0.1, 0.1 * 0.01 * signal)
    assert answer.interval[0] <= answer.length <= answer.interval[1]


def test_required_length_by_sampling():
    """A law that is not Gaussian at random queries: inside the interval, checked with new ones."""
    law = Rademacher(1)
    answer = required_length(law, normal(1.0), ONE, ONE, 0.1, generator=generator(1))
    got = mean_squared_error(
        law, normal(1.0), ONE, ONE, [answer.length], 3000, generator=generator(9)
    )
    signal = float(scipy.stats.norm.expect(lambda z: np.tanh(z) ** 2))
    assert_within(got.value[0], got.std_error[0], 0.01 * signal, 0.15, 0.1 * 0.01 * signal)
    assert "95% interval" in answer.sure
    assert answer.interval[0] < answer.length < answer.interval[1]


def test_a_typical_prompt_may_be_shorter():
    mean = required_length(normal(1.0), normal(1.0), ONE, ONE, 0.2).length
    typical = required_length(normal(1.0), normal(1.0), ONE, ONE, 0.2, True, generator=generator())
    assert typical.length < mean
    errors = prompt_errors(
        normal(1.0), normal(1.0), ONE, ONE, [typical.length], 600, generator=generator(1)
    )
    above = int((errors > 0.04).sum())  # a median: half of new prompts, four standard deviations
    assert abs(above - 300) < 4 * math.sqrt(150) * math.sqrt(1 + 600 / 200)


def test_astronomical_lengths_are_said_in_words():
    exact = required_length(normal(1.5), normal(1.0), ONE, ONE, 1e-30)
    assert exact.length > 10**100
    assert "astronomically long" in str(exact)
    ratio = mean_on_the_line(1.5, exact.length) / (1.5e-30) ** 2
    assert ratio == pytest.approx(1, rel=1e-6)
    guess = required_length(
        normal(1.5), normal(1.0), ONE, ONE, 1e-30, typical=True, generator=generator()
    )
    assert "conjectured exponent" in str(guess)
    assert "order of magnitude" in str(guess)
    assert 10**100 < guess.length < exact.length


def test_a_loose_tolerance_is_met_by_one_token():
    assert required_length(normal(1.0), normal(1.0), ONE, ONE, 10.0).length == 1


# -- bad input -----------------------------------------------------------------------------------


def call(function, *args, **kwargs):
    return lambda: function(*args, **kwargs)


LINE = (normal(1.0), normal(1.0), ONE, ONE)
DRAWS = dict(generator=generator())


@pytest.mark.parametrize(
    "bad, message",
    [
        (call(gaussian_error, -1.0, 10), "score variances, 0 or more, got -1"),
        (call(gaussian_error, 1.0, 0), "1 token or more"),
        (call(exponent, -0.1), "0 or more, got -0.1"),
        (call(gaussian_mean_error, Rademacher(1), *LINE[1:], 9), "measure must be Gaussian"),
        (call(gaussian_mean_error, *LINE[:2], torch.ones(2, 1), ONE, 9), "dtype of U"),
        (call(gaussian_mean_error, *LINE[:2], ONE.expand(2, 1), ONE, 9), "U must have shape"),
        (call(mean_squared_error, *LINE, [10, 5], 8, **DRAWS), "increasing whole numbers"),
        (call(mean_squared_error, *LINE, [], 8, **DRAWS), "increasing whole numbers"),
        (call(mean_squared_error, *LINE, [5], 8, of="W", **DRAWS), "of must be one of"),
        (call(mean_squared_error, *LINE, [5], 3, **DRAWS), "4 prompts or more"),
        (call(prompt_errors, normal(1.0).expand((2,)), *LINE[1:], [5], 8, **DRAWS), "single law"),
        (call(prompt_errors, LINE[0], ONE[0], *LINE[2:], [5], 8, **DRAWS), r"shape \(Q, E\)"),
        (call(fit_slope, [1, 2], torch.ones(4, 3), **DRAWS), "one column a length"),
        (call(required_length, *LINE, 0.0), "relative error above 0"),
        (call(required_length, *LINE, 0.1, True), "pass generator"),
        (call(required_length, *LINE[:2], 0 * ONE, ONE, 0.1), "does not depend on the query"),
    ],
)
def test_bad_input_is_refused_with_a_repair(bad, message, no_shape_hook):
    with pytest.raises((ValueError, TypeError), match=message):
        bad()


def test_public_names():
    assert all(hasattr(concentration, name) for name in concentration.__all__)


# -- the paper's slips of Part II ----------------------------------------------------------------


@pytest.mark.parametrize("of", ["output", "V", "U"])
def test_one_token_breaks_the_bounds_as_printed(of):
    """At L = 1 the printed right-hand sides are 0 (log 1 = 0); the errors are 1: they need L >= 2.

    d = 1, standard normal tokens and queries, U = 0, V = 1.
    """
    law, one = Gaussian(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64)), torch.eye(1, dtype=F64)
    found = mean_squared_error(
        law, law, 0 * one, one, [1], 40_000, n_queries=1, generator=generator(11), of=of,
        control_variate=False,
    )  # fmt: skip
    assert 5 * found.std_error <= 0.05
    assert (found.value - 1).abs() <= 4.5 * found.std_error


@pytest.mark.parametrize("s", [0.25, 1.0])
def test_first_order_law_of_the_score_derivative(s):
    """L times the error of C_a tends to e^s (2 + 4 s + s^2) for standard normal tokens."""
    law, one = Gaussian(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64)), torch.eye(1, dtype=F64)
    length = 4_000
    found = mean_squared_error(
        law, one, math.sqrt(s) * one, one, [length], 8_000, generator=generator(12), of="U"
    )
    constant = math.exp(s) * (2 + 4 * s + s**2) / length
    assert 5 * found.std_error <= 0.25 * constant  # a wrong term (1 of 2 + 4 s + s^2) is more
    assert (found.value - constant).abs() <= 4.5 * found.std_error


def test_score_variances_beyond_the_tables_are_refused():
    with pytest.raises(ValueError, match="temperature"):
        gaussian_error(2e4, 10)


def test_tables_made_in_parts_are_the_tables(monkeypatch):
    """Rows are grouped to bound memory; the grouping must not show."""
    whole = gaussian_error(30.0, 1_000)
    monkeypatch.setattr(_gaussian_law, "ROOM", 10_000)
    _gaussian_law._table.cache_clear()
    for one, other in zip(whole, gaussian_error(30.0, 1_000), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-15, atol=0)
    _gaussian_law._table.cache_clear()

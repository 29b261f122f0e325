"""Attention as a mean-field flow: against its Gaussian oracle, closed forms and plain softmax.

Monte Carlo is judged over independent systems in its own standard errors, 4.5 of them.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.special import eval_hermitenorm
from scipy.stats import binom

from measureattn import Discrete, Empirical, Gaussian, attend
from measureattn.meanfield import (
    SelfAttention,
    gaussian_flow,
    gaussian_layers,
    interacting,
    sequential,
)
from measureattn.particle_study import (
    cells,
    errors,
    final_law,
    moments,
    rotated,
    run_cell,
    setting,
    two_groups,
)
from measureattn.running_laws import FlowLaw, Reservoir, TiltTable

F64 = torch.float64
SYSTEM, START = setting(2)
SCALAR = SelfAttention(torch.eye(1, dtype=F64), torch.eye(1, dtype=F64))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def numbers(*values):
    return torch.tensor(values, dtype=F64)


def systems(law, count, n, generator):
    """`count` independent prompts of n tokens, (count, n, D)."""
    return law.sample(count * n, generator=generator).reshape(count, n, -1)


def last(states):
    *_, state = states
    return state


def assert_laws_agree(x, truth, detects):
    """Mean and covariance of the systems x (count, n, D), entry by entry; `detects` is what an
    error must be, absolutely, to be seen: five standard errors at most."""
    law, root = Empirical(x), math.sqrt(len(x))
    for found, expected in ((law.mean, truth.mean), (law.cov, truth.cov)):
        std_error = found.std(0) / root
        assert 5 * std_error.max() < detects
        assert ((found.mean(0) - expected).abs() < 4.5 * std_error).all()


# -- the Gaussian oracle -----------------------------------------------------------------------


def test_the_oracle_at_its_reference_values():
    law = gaussian_flow(SYSTEM, START, [0.0, 1.0])
    assert torch.equal(law.mean[0], START.mean) and torch.equal(law.cov[0], START.cov)
    assert (law.mean[1] - numbers(0.798704, -0.475074)).abs().max() < 1e-6
    cov = numbers(0.191631, 0.030888, 0.030888, 0.167744).reshape(2, 2)
    assert (law.cov[1] - cov).abs().max() < 1e-6


@pytest.mark.parametrize("beta", [0.5, 0.9, -2.0])
def test_without_noise_the_scalar_flow_is_elementary(beta):
    """1/G = beta + (1/G_0 - beta) e^(2t); m' = beta G m, whose solution is a multiple of
    e^t sqrt(G)."""
    system = SelfAttention(beta * torch.eye(1, dtype=F64), torch.eye(1, dtype=F64))
    times = np.array([0.3, 1.0, 2.0])
    law = gaussian_flow(system, Gaussian(numbers(2.0), numbers(1.0)[:, None]), times)
    exact = 1 / (beta + (1 - beta) * np.exp(2 * times))
    assert np.abs(law.cov.flatten().numpy() / exact - 1).max() < 1e-8
    mean = 2 * np.exp(times) * np.sqrt(exact)
    assert np.abs(law.mean.flatten().numpy() / mean - 1).max() < 1e-8


def test_without_attention_it_is_ornstein_and_uhlenbeck():
    """U = 0: G' = -2 G + noise^2, and the mean moves by V - 1 alone."""
    V = numbers(0.5, 0.2, -0.1, 0.3).reshape(2, 2)
    system = SelfAttention(torch.zeros(2, 2, dtype=F64), V, noise=0.7)
    law = gaussian_flow(system, START, [1.5])
    decay = math.exp(-3.0)
    expected = decay * START.cov + (1 - decay) * 0.49 / 2 * torch.eye(2, dtype=F64)
    assert (law.cov[0] - expected).abs().max() < 1e-8
    mean = torch.linalg.matrix_exp(1.5 * (V - torch.eye(2, dtype=F64))) @ START.mean
    assert (law.mean[0] - mean).abs().max() < 1e-8


def test_with_a_value_matrix_that_turns_it_is_the_law_of_particles():
    system, start = rotated()
    rng = seeded(1)
    x = last(interacting(system, systems(start, 64, 400, rng), 0.1, 10, generator=rng))
    truth = gaussian_flow(system, start, [1.0])
    assert_laws_agree(x, Gaussian(truth.mean[0], truth.cov[0]), detects=0.05)
    other = gaussian_flow(SelfAttention(system.U, system.V.mT, system.noise), start, [1.0])
    assert (other.cov - truth.cov).abs().max() > 0.05  # V's transpose would be seen


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_a_gaussian_law_blows_up_and_a_prompt_of_it_cannot(decay):
    """G' = 2 G^2 - 2 decay G from G_0 = 2: until 1/4 or until log(2)/2."""
    system = SelfAttention(SCALAR.U, SCALAR.V, decay=decay)
    start = Gaussian(numbers(0.0), numbers(2.0)[:, None])
    end = math.log(2) / 2 if decay else 0.25
    assert gaussian_flow(system, start, [0.999 * end]).cov > 200
    with pytest.raises(ValueError, match=f"blows up near t = {end:.4g}"):
        gaussian_flow(system, start, [2 * end])
    if decay:
        x = start.sample(300, generator=seeded())
        assert last(interacting(system, x, 0.02, 100)).abs().max() <= x.abs().max()


# -- layers ------------------------------------------------------------------------------------


def test_layers_are_attention_on_the_law_before():
    """The queries' law pushed through `attend` on itself, computed from its affine coefficients."""
    system = SelfAttention(SYSTEM.U, rotated()[0].V, noise=0.3, decay=0.5)
    laws, dt = gaussian_layers(system, START, 0.7, 3), 0.7
    corners = torch.cat([torch.zeros(1, 2, dtype=F64), torch.eye(2, dtype=F64)])
    for k in range(3):
        law = Gaussian(laws.mean[k], laws.cov[k])
        moved = corners + dt * (attend(law, corners, U=system.U, V=system.V) - 0.5 * corners)
        A = (moved[1:] - moved[0]).mT
        cov = A @ law.cov @ A.mT + 0.09 * dt * torch.eye(2, dtype=F64)
        assert (laws.mean[k + 1] - A @ law.mean - moved[0]).abs().max() < 1e-12
        assert (laws.cov[k + 1] - cov).abs().max() < 1e-12


def test_many_short_layers_are_the_flow():
    truth = gaussian_flow(SYSTEM, START, [1.0])
    gaps = []
    for steps in (50, 100, 200):
        law = gaussian_layers(SYSTEM, START, 1 / steps, steps)
        gaps.append((law.cov[-1] - truth.cov[0]).abs().max().item())
    assert np.log2(np.divide(gaps[:-1], gaps[1:])) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("u", [0.3, 0.5, 0.9])
def test_a_layer_multiplies_each_hermite_mode_by_its_factor(u):
    """N(0, 1) is fixed by a layer with v u = 1; (1 + e He_k) N(0, 1) comes out with e times
    1 + k u^(k-2). By Gauss-Hermite quadrature, whose atoms are the tokens."""
    points, weights = np.polynomial.hermite_e.hermegauss(60)
    x, w = torch.from_numpy(points)[:, None], weights / weights.sum()
    U, V = numbers(u)[:, None], numbers(1 / u)[:, None]
    for k in range(1, 6):
        outcome = []
        for e in (1e-6, -1e-6):
            law = Discrete(x, torch.from_numpy(w * (1 + e * eval_hermitenorm(k, points))).clamp(0))
            y = attend(law, x, U=U, V=V)[:, 0].numpy()
            outcome.append(law.log_weights.exp().numpy() @ eval_hermitenorm(k, y))
        factor = (outcome[0] - outcome[1]) / 2e-6 / math.factorial(k)
        assert factor == pytest.approx(1 + k * u ** (k - 2), rel=1e-3), k


# -- interacting particles ---------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2])
def test_a_step_is_softmax_attention_of_the_tokens_on_themselves(order, dtype):
    system = SelfAttention(SYSTEM.U.to(dtype), rotated()[0].V.to(dtype), decay=0.5)
    x = torch.randn(3, 7, 2, generator=seeded(), dtype=dtype)

    def slope(x):
        weights = torch.softmax(x @ system.U.mT @ x.mT, -1)
        return weights @ x @ system.V.mT - 0.5 * x

    expected = x + 0.2 * slope(x)
    if order == 2:
        expected = x + 0.1 * (slope(x) + slope(expected))
    start, moved = interacting(system, x, 0.2, 1, order=order)
    assert start is x and moved.dtype == dtype
    assert (moved - expected).abs().max() < 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("order", [1, 2])
def test_the_order_of_the_time_stepping(order):
    """Without noise the particles follow an ordinary differential equation."""
    system = SelfAttention(2 * SYSTEM.U, rotated()[0].V)
    x = START.sample(40, generator=seeded(3))
    exact = last(interacting(system, x, 1 / 320, 320))
    gaps = [
        (last(interacting(system, x, 1 / n, n, order=order)) - exact).abs().max().item()
        for n in (5, 10, 20)
    ]
    slopes = np.log2(np.divide(gaps[:-1], gaps[1:]))
    assert slopes[-1] == pytest.approx(order, abs=0.1)


def heun_by_moments(system, start, dt, steps):
    """Mean and covariance of Heun's scheme on an infinite prompt: each step is affine in the
    particle and its kick, so two laws, at the step's start and of the guess, give the next one."""
    m, G, eye = start.mean, start.cov, torch.eye(2, dtype=F64)
    kick = system.noise**2 * dt * eye
    for _ in range(steps):
        first, v = system.V @ G @ system.U - system.decay * eye, system.V @ m
        A = eye + dt * first
        guess_m, guess_G = A @ m + dt * v, A @ G @ A.mT + kick
        second, w = system.V @ guess_G @ system.U - system.decay * eye, system.V @ guess_m
        step = eye + dt / 2 * (first + second @ A)
        spread = eye + dt / 2 * second
        m = step @ m + dt / 2 * (v + dt * second @ v + w)
        G = step @ G @ step.mT + spread @ kick @ spread.mT
    return Gaussian(m, G)


def test_heuns_scheme_keeps_its_order_with_noise():
    """Weak order 2 since the noise is additive: by moments, which the particles have."""
    loud = SelfAttention(SYSTEM.U, rotated()[0].V, noise=1.5)
    truth = gaussian_flow(loud, START, [1.0])
    gaps = []
    for steps in (8, 16, 32):
        law = heun_by_moments(loud, START, 1 / steps, steps)
        gaps.append([(law.mean - truth.mean).abs().max(), (law.cov - truth.cov).abs().max()])
    slopes = np.log2(np.divide(gaps[:-1], gaps[1:]))
    assert slopes[-1] == pytest.approx(2, abs=0.1)
    coarse, rng = heun_by_moments(loud, START, 0.5, 2), seeded(4)
    x = last(interacting(loud, systems(START, 64, 1000, rng), 0.5, 2, generator=rng))
    assert_laws_agree(x, coarse, detects=0.05)
    assert (coarse.cov - truth.cov).abs().max() > 0.05


def test_the_error_falls_like_one_over_the_root_of_the_number_of_particles():
    """Mean absolute error against the oracle, from 256 systems of 50 to 64 of 800."""
    truth, rng, sizes, found = gaussian_flow(SYSTEM, START, [1.0]), seeded(5), (50, 200, 800), []
    for n, count in zip(sizes, (256, 128, 64), strict=True):
        x = systems(START, count, n, rng)
        law = Empirical(last(interacting(SYSTEM, x, 0.1, 10, generator=rng)))
        gaps = (law.mean - truth.mean).abs().mean(-1) + (law.cov - truth.cov).abs().mean((-2, -1))
        assert gaps.std() / gaps.mean() / math.sqrt(count) < 0.1
        found.append(gaps.mean().item())
    assert np.polyfit(np.log(sizes), np.log(found), 1)[0] == pytest.approx(-0.5, abs=0.1)


def test_particles_are_exchangeable_and_stay_in_their_hull():
    """With V = 1 and decay 1 a step of at most 1 moves every token towards an average of all."""
    system = SelfAttention(3 * torch.eye(2, dtype=F64), torch.eye(2, dtype=F64))
    x, order = START.sample(50, generator=seeded()), torch.randperm(50, generator=seeded())
    states = list(interacting(system, x, 0.5, 8, order=1))
    shuffled = last(interacting(system, x[order], 0.5, 8, order=1))
    assert (states[-1][order] - shuffled).abs().max() < 1e-12
    angles = torch.arange(64, dtype=F64) * math.tau / 64
    support = [(y @ torch.stack([angles.cos(), angles.sin()])).amax(0) for y in states]
    for before, after in pairwise(support):
        assert (after <= before + 1e-12).all()


# -- running laws ------------------------------------------------------------------------------


def test_a_reservoir_is_a_uniform_choice():
    """Each of 60 paths is kept equally often, whichever batch it came in."""
    kept = np.zeros(60)
    for seed in range(400):
        law = Reservoir(15, generator=seeded(seed))
        for batch in torch.arange(60, dtype=F64).reshape(3, 1, 20, 1):
            law.add(batch)
        kept[law.law(0).tokens.flatten().long().numpy()] += 1
    assert kept.sum() == 400 * 15 and law.numbers == 30
    low, high = binom.ppf([1e-5, 1 - 1e-5], 400, 0.25)
    assert low <= kept.min() and kept.max() <= high


def test_a_table_answers_as_all_particles_together():
    """Merged batch by batch; the more nodes, the closer, and fast."""
    path = torch.stack(list(interacting(SYSTEM, systems(START, 5, 80, seeded()), 0.1, 2,
                                        generator=seeded(1))), 1)  # fmt: skip
    whole = Empirical(path.movedim(0, 1).flatten(1, 2))
    tilts = START.sample(50, generator=seeded(2)) @ SYSTEM.U.mT
    gaps = []
    for nodes in (4, 8, 12):
        table = TiltTable(SYSTEM.U, nodes)
        for batch in path:
            table.add(batch)
        law = table.law(1)
        gaps.append((law.tilted_mean(tilts) - whole.tilted_mean(tilts[:, None])[:, 1]).abs().max())
        assert table.seen == 400 and table.numbers == nodes**2 * 3 * 6
    assert gaps[1] < 0.1 * gaps[0] and gaps[2] < 1e-4
    assert (law.log_mgf(tilts) - whole.log_mgf(tilts[:, None])[:, 1]).abs().max() < 1e-4
    assert (law.cov - whole.cov[1]).abs().max() < 1e-3  # by torch.func, from the log-MGF


def mean_errors(kind, n, runs):
    truth, found, kept = gaussian_flow(SYSTEM, START, [1.0]), [], set()
    for seed in range(runs):
        law, count = final_law(kind, n, generator=seeded(seed))
        found.append(sum(errors(law, truth)) / 2)
        kept.add(count)
    return np.mean(found), kept


def test_sequential_particles_keep_their_memory_while_the_error_falls():
    """A table is as good as all particles; a reservoir of its size has stopped."""
    small, large = mean_errors("table", 400, 16), mean_errors("table", 3200, 8)
    assert small[1] == large[1] == {8 * 8 * 6 * 11}
    assert large[0] < 0.6 * small[0]  # 0.35 is expected
    stalled, kept = mean_errors("reservoir", 3200, 8)
    assert max(kept) <= 8 * 8 * 6 * 11
    assert stalled > 1.4 * large[0]


def test_deep_sequential_particles_come_close_to_interacting_ones():
    """In dimension 2 within three times the error, at the same number of particles."""
    pytest.importorskip("zuko")
    deep, _ = mean_errors("flow", 800, 4)
    plain, _ = mean_errors("interacting", 800, 16)
    assert deep < 3 * plain
    assert plain < 0.03


def test_a_flow_keeps_less_in_dimension_ten():
    pytest.importorskip("zuko")
    flow = FlowLaw(10, 10, hidden=(32, 32), generator=seeded())
    assert flow.numbers < 6400 * 10


def test_a_flow_learns_a_law_with_two_groups_and_touches_no_global_seed():
    pytest.importorskip("zuko")
    state = torch.random.get_rng_state()
    system, start = two_groups()
    twice = []
    for _ in range(2):
        rng = seeded(6)
        flow = FlowLaw(2, 5, fits=5, generator=rng)
        sequential(system, start, flow, 400, batch=200, dt=0.2, steps=5, generator=rng)
        twice.append(flow.sample(5, 64))
    assert torch.equal(*twice)
    assert torch.equal(state, torch.random.get_rng_state())
    assert 0.5 < Empirical(flow.sample(5, 1000)).cov[0, 0] < 1.4  # 0.94 in the limit


def test_where_gaussianity_is_lost_particles_and_table_agree_and_the_oracle_is_wrong():
    system, start = two_groups()
    rng, n = seeded(7), 400
    x = last(interacting(system, systems(start, 64, n, rng), 0.1, 10, generator=rng))
    spread = Empirical(x).cov[:, 0, 0]
    tables = [
        sequential(
            system, start, TiltTable(system.U, 12), 3200, batch=200, dt=0.1, steps=10, generator=rng
        ).law(10).cov[0, 0]
        for _ in range(6)
    ]  # fmt: skip
    tables = torch.stack(tables)
    std_error = (spread.var() / 64 + tables.var() / 6).sqrt()
    gaussian = gaussian_flow(system, Gaussian(start.mean, start.cov), [1.0]).cov[0, 0, 0]
    assert abs(spread.mean() - tables.mean()) < 4.5 * std_error
    assert abs(gaussian - spread.mean()) > 10 * std_error


# -- the study of chapter 13, and errors -------------------------------------------------------


def test_the_study_runs_what_it_lists(tmp_path):
    assert len({tuple(cell.values()) for cell in cells()}) == len(cells())
    row = moments(*rotated(), 200, generator=seeded())[-1]
    assert row["time"] == 1.0 and abs(row["m1"]) < 3
    found = run_cell({"study": "interacting", "dim": 2, "n": 50, "seed": 1})["rows"]
    assert len(found) == 16 and {row["numbers"] for row in found} == {100}
    assert found == run_cell({"study": "interacting", "dim": 2, "n": 50, "seed": 1})["rows"]


def test_errors_say_what_to_do(no_shape_hook):
    one, x = torch.eye(1, dtype=F64), torch.zeros(4, 1, dtype=F64)
    with pytest.raises(ValueError, match="square and of one size"):
        SelfAttention(torch.ones(2, 1), torch.ones(1, 2))
    with pytest.raises(TypeError, match="dtype of U"):
        SelfAttention(one, one.float())
    with pytest.raises(ValueError, match="0 or more, got -1"):
        SelfAttention(one, one, noise=-1)
    with pytest.raises(TypeError, match="needs generator="):
        last(interacting(SelfAttention(one, one, noise=1.0), x, 0.1, 1))
    with pytest.raises(ValueError, match="order must be 1"):
        last(interacting(SCALAR, x, 0.1, 1, order=4))
    law = Gaussian(numbers(0.0), one)
    with pytest.raises(ValueError, match="increasing"):
        gaussian_flow(SCALAR, law, [1.0, 0.5])
    with pytest.raises(ValueError, match="single law"):
        gaussian_flow(SCALAR, law.expand((2,)), [1.0])
    with pytest.raises(ValueError, match="multiple of batch"):
        kept = Reservoir(3, generator=seeded())
        sequential(SCALAR, law, kept, 25, batch=10, dt=0.1, steps=1, generator=seeded())

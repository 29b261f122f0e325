"""In-context tasks: exact infinite prompts, closed-form gradients, frozen episodes.

Monte Carlo is judged in its own standard errors, four of them, each first shown to be at most a
fifth of the relative error that the test detects.
"""

import functools
import math

import pytest
import torch

from measureattn import Gaussian, linear_attend
from measureattn.regression import Task
from measureattn.regression.task import blocks
from measureattn.tasks import (
    BooleanTask,
    InContextTask,
    MixtureTask,
    majority,
    parity,
    risk,
    risk_gradient,
)

F64 = torch.float64
COV = torch.tensor([[2.0, 0.6], [0.6, 0.5]], dtype=F64)
TASKS = {
    "parity": BooleanTask(parity),
    "majority": BooleanTask(majority),
    "mixture": MixtureTask(2),
    "regression": Task(COV, noise_var=0.3),
    "noise-free": Task(COV),
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def scaled(task, c, v):
    """U = c I on the inputs, V = v times the label."""
    return blocks(c * torch.eye(task.dim - 1, dtype=F64), v)


def random_parameters(task, seed=0):
    draws = generator(seed)
    shapes = (task.dim, task.dim), (1, task.dim)
    return tuple(0.5 * torch.randn(shape, generator=draws, dtype=F64) for shape in shapes)


def brute_force(episodes, U, V):
    """The losses of finite prompts by a dense softmax."""
    scores = torch.einsum("nld,de,qne->qnl", episodes.prompts.tokens, U, episodes.queries)
    means = torch.einsum("qnl,nld->qnd", scores.softmax(-1), episodes.prompts.tokens)
    return episodes.task.loss(means @ V.mT - episodes.targets).mean(0)


@pytest.mark.parametrize("c", [0.3, 1.0, 2.5])
def test_parity_is_solved_at_every_temperature(c):
    episodes = TASKS["parity"].episodes(2, generator=generator())
    readout = math.tanh(c) ** 3
    for v in (1 / readout, 0.4):
        expected = (v * readout - 1) ** 2 / 2
        assert abs(episodes.risk(*scaled(TASKS["parity"], c, v)) - expected) < 1e-12


def test_majority_is_solved_only_in_the_limit():
    """t = tanh c reads (3t - t^3)/2 on the 2 unanimous points and (t + t^3)/2 on the other 6."""
    episodes = TASKS["majority"].episodes(2, generator=generator())
    risks = []
    for c in (0.5, 1.0, 2.0, 4.0):
        t = math.tanh(c)
        two, six = (3 * t - t**3) / 2, (t + t**3) / 2
        v = (2 * two + 6 * six) / (2 * two**2 + 6 * six**2)
        expected = (2 * (v * two - 1) ** 2 + 6 * (v * six - 1) ** 2) / 16
        risks.append(episodes.risk(*scaled(TASKS["majority"], c, v)))
        assert abs(risks[-1] - expected) < 1e-12
    assert risks[0] > risks[1] > risks[2] > risks[3] > 1e-7


def test_softmax_is_bayes_for_the_mixture_and_linear_attention_is_not():
    task = MixtureTask(3, radius=1.2, spread=0.7)
    episodes = task.episodes(50, n_queries=40, generator=generator())
    U, V = scaled(task, 1 / 0.7, 1.0)
    assert episodes.risk(U, V) < 1e-28
    linear = functools.partial(linear_attend, episodes.prompts, episodes.queries, U=U)
    losses = [
        task.loss(linear(V=c * V) - episodes.targets)
        for c in torch.linspace(0.05, 2, 40)
    ]
    assert min(float(loss.mean()) for loss in losses) > 0.01


def test_the_mixtures_target_is_the_mean_label():
    """Tokens near a point x: their mean label is tanh(theta.x/spread)."""
    task = MixtureTask(1, radius=1.0, spread=0.5)
    theta = torch.ones(1, 1, dtype=F64)
    tokens = task.prompts(theta, 2_000_000, generator=generator())[0]
    near = tokens[(tokens[:, 0] - 0.4).abs() < 0.02, 1]
    target = task.target(theta, torch.tensor([[[0.4, 0.0]]], dtype=F64))
    std_error = near.std() / math.sqrt(len(near))
    assert std_error < 0.05 * target / 5
    assert (near.mean() - target).abs() < 4 * std_error
    assert set(tokens[:, 1].tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("length", [None, 1, 7], ids=str)
@pytest.mark.parametrize("name", TASKS)
def test_gradients_equal_autograds(name, length):
    task = TASKS[name]
    episodes = task.episodes(6, length, n_queries=3, generator=generator(1))
    U, V = (x.requires_grad_() for x in random_parameters(task))
    expected = torch.autograd.grad(episodes.risk(U, V), (U, V))
    for mine, theirs in zip(episodes.gradient(U.detach(), V.detach()), expected, strict=True):
        assert (mine - theirs).abs().max() < 1e-10
        assert theirs.abs().max() > 1e-3 or length == 1  # one token has weight 1, whatever U


@pytest.mark.parametrize("name", TASKS)
def test_finite_risks_equal_brute_force(name):
    task = TASKS[name]
    episodes = task.episodes(6, 9, n_queries=3, generator=generator(2))
    parameters = random_parameters(task)
    expected = brute_force(episodes, *parameters)
    assert (episodes.losses(*parameters) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("name", TASKS)
def test_long_prompts_have_the_infinite_risk(name):
    """On common parameters and queries: from 16 to 256 tokens the gap falls to about a 16th."""
    task = TASKS[name]
    U, V = scaled(task, 0.25, 1.0)
    gaps = []
    for length in (16, 256):
        finite, infinite = (
            task.episodes(8000, n, n_queries=2, generator=generator(3)).losses(U, V)
            for n in (length, None)
        )
        gap = finite - infinite
        gaps.append((float(gap.mean()), float(gap.std()) / math.sqrt(8000)))
    (first, spread), (last, std_error) = gaps
    assert spread < first / 15 and std_error < first / 60
    assert first / 40 - 4 * std_error < last < first / 10 + 4 * std_error


def test_risk_and_its_gradient_are_those_of_the_episodes():
    task = TASKS["regression"]
    U, V = random_parameters(task)
    kw = dict(n_queries=2)
    losses = task.episodes(50, 8, **kw, generator=generator(4)).losses(U, V)
    estimate = risk(task, U, V, 8, n_prompts=50, **kw, generator=generator(4))
    assert (estimate.value, estimate.n) == (losses.mean(), 50)
    assert abs(estimate.std_error - losses.std() / math.sqrt(50)) < 1e-15
    mine = risk_gradient(task, U, V, 8, n_prompts=50, **kw, generator=generator(4))
    expected = task.episodes(50, 8, **kw, generator=generator(4)).gradient(U, V)
    assert all(torch.equal(x, y) for x, y in zip(mine, expected, strict=True))


def test_equal_generators_share_parameters_and_queries():
    task = TASKS["mixture"]
    one, two, infinite = (
        task.episodes(5, n, n_queries=2, generator=generator()) for n in (3, 8, None)
    )
    for other in (two, infinite):
        assert torch.equal(one.queries, other.queries) and torch.equal(one.targets, other.targets)
    assert one.prompts.tokens.shape == (5, 3, 3) and two.prompts.tokens.shape == (5, 8, 3)


@pytest.mark.parametrize("name", ["parity", "mixture"])
def test_losses_are_1_smooth_with_slope_0_at_0(name):
    task = TASKS[name]
    r = torch.linspace(-3, 3, 241, dtype=F64)[:, None].requires_grad_()
    slope = task.loss_slope(r.detach())
    (expected,) = torch.autograd.grad(task.loss(r).sum(), r)
    assert (slope - expected).abs().max() < 1e-15
    steps = slope.diff(dim=0) / r.detach().diff(dim=0)
    assert steps.max() <= 1 + 1e-12 and steps.min() >= 0 and abs(slope[120]) < 1e-15
    assert abs(task.loss(r)[120]) < 1e-15 and task.loss(r)[0] > task.loss(r)[60]


def test_finite_parameter_laws_are_used_evenly():
    episodes = TASKS["parity"].episodes(6, generator=generator())
    assert episodes.queries.shape == (8, 6, 4) and episodes.targets.sum() == 0
    with pytest.raises(ValueError, match="multiple of the 2 values"):
        TASKS["parity"].episodes(5, generator=generator())


def test_wrong_rules_and_spreads_are_refused():
    with pytest.raises(ValueError, match="labels -1 or 1"):
        BooleanTask(majority, k=2)
    with pytest.raises(ValueError, match="variance above 0"):
        MixtureTask(2, spread=0.0)


def test_a_task_of_ones_own_needs_four_things():
    """Tokens N(theta, 1): attention says theta + U z, and the target is theta."""

    class Mean(InContextTask):
        dim = 1
        parameter_law = Gaussian(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))

        def token_law(self, theta):
            return Gaussian(theta, torch.eye(1, dtype=F64))

        def query_law(self, theta):
            return Gaussian(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))

        def target(self, theta, z):
            return theta.expand(z.shape)

    one = torch.ones(1, 1, dtype=F64)
    assert Mean().episodes(9, generator=generator()).risk(0 * one, one) == 0
    # E (mean of L tokens - theta)^2 / 2 = 1/(2 L)
    estimate = risk(Mean(), 0 * one, one, 4, n_prompts=20_000, generator=generator())
    assert estimate.std_error < 0.1 / 8 / 5
    assert abs(estimate.value - 1 / 8) < 4 * estimate.std_error

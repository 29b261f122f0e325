"""Gradient flows: limits, invariants, orders, exact solutions, and what prompt length changes."""

import functools
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from measureattn.regression import (
    EigenRisk,
    LinearRisk,
    PromptRisk,
    QueryRisk,
    Task,
    gradient_flow,
)
from measureattn.regression.flow import distance, gronwall_bound, limit_gaps
from measureattn.regression.task import blocks, start
from measureattn.tasks import BooleanTask, Episodes, MixtureTask, majority, parity

F64 = torch.float64
# A flow asks for 10^5 gradients, whose shapes the tests of the risks have checked.
pytestmark = pytest.mark.usefixtures("no_shape_hook")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def autoregressive(d):
    i = torch.arange(d, dtype=F64)
    return 0.5 ** (i - i[:, None]).abs()


def ill_conditioned(d):
    """Eigenvalues from 0.01 to 1 in random directions."""
    vectors, _ = torch.linalg.qr(torch.randn(d, d, generator=generator(d), dtype=F64))
    cov = (vectors * torch.logspace(-2, 0, d, dtype=F64)) @ vectors.mT
    return (cov + cov.mT) / 2


def printed_bound(cov):
    return math.sqrt(2) / (len(cov) ** 0.25 * float(torch.linalg.matrix_norm(cov, 2)))


def dense_start(alpha, d):
    return start(alpha, torch.randn(d, d, generator=generator(7), dtype=F64))


PAPER = Task(autoregressive(5), task_var=0.2, noise_var=0.1)  # setting P
BALANCED = LinearRisk(PAPER).limit()
ONE = torch.eye(1, dtype=F64)
ALPHAS = ("1e-3", "0.1", "bound", "10 bound")


def alpha_of(name, cov):
    bound = printed_bound(cov)
    return {"1e-3": 1e-3, "0.1": 0.1, "bound": bound, "10 bound": 10 * bound}[name]


def assert_at_limit(flow, limit, tolerance=1e-6):
    """Parameters at the limit, invariant kept to 1e-8 max(1, b*^2)."""
    assert flow.stationary
    for got, expected in zip(flow.end, limit, strict=True):
        assert (got - expected).abs().max() < tolerance
    assert flow.invariants().abs().max() < 1e-8 * max(1.0, float(limit[1]) ** 2)


# -- infinite prompts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, d, alpha",
    [("I", d, alpha) for d in (1, 2, 5, 20) for alpha in ALPHAS]
    + [("0.5^|i-j|", d, alpha) for d in (2, 5) for alpha in ALPHAS]
    + [("0.5^|i-j|", 20, alpha) for alpha in ("1e-3", "10 bound")],
)
def test_the_infinite_flow_ends_where_theory_says(kind, d, alpha):
    """A* = tr(S^-2)^(-1/4) S^-1, b* = tr(S^-2)^(1/4), from every alpha > 0."""
    cov = torch.eye(d, dtype=F64) if kind == "I" else autoregressive(d)
    inverse = torch.linalg.inv(cov)
    b = float((inverse @ inverse).trace()) ** 0.25
    risk = LinearRisk(Task(cov))
    flow = gradient_flow(risk, dense_start(alpha_of(alpha, cov), d), rtol=1e-12)
    assert_at_limit(flow, (inverse / b, torch.tensor(b, dtype=F64)))
    assert risk.risk(*flow.end) < 1e-12


@pytest.mark.parametrize("alpha", ["1e-3", "10 bound"])
def test_a_condition_number_of_100(alpha):
    """Rates from 1e-4 to 100: an implicit integrator with the Jacobian."""
    cov = ill_conditioned(5)
    risk = LinearRisk(Task(cov))
    first = dense_start(alpha_of(alpha, cov), 5)
    flow = gradient_flow(
        risk, first, method="BDF", rtol=1e-11, atol=1e-13, rest=1e-11, time=1e7
    )
    assert_at_limit(flow, risk.limit())


@pytest.mark.parametrize("alpha", ["1e-3", "10 bound"])
def test_a_condition_number_of_100_in_the_eigenbasis(alpha):
    cov = ill_conditioned(20)
    risk = EigenRisk(Task(cov))
    _, _, gamma = risk.spectra
    b = gamma.pow(-2).sum() ** 0.25
    scale = alpha_of(alpha, cov)
    a = torch.rand(20, generator=generator(), dtype=F64)
    first = scale * a / torch.linalg.norm(a), torch.tensor(scale, dtype=F64)
    flow = gradient_flow(
        risk, first, method="Radau", rtol=1e-11, atol=1e-13, rest=1e-11, time=1e7
    )
    assert_at_limit(flow, (1 / (gamma * b), b))


def test_the_jacobian_is_used_and_methods_agree():
    """Radau with the Hessian against DOP853 without, at times on the way."""
    task = Task(autoregressive(3), noise_var=0.3)
    risk, first = LinearRisk(task, 15), dense_start(0.3, 3)
    explicit = gradient_flow(risk, first)
    implicit = gradient_flow(risk, first, method="Radau", rtol=1e-8, atol=1e-10)
    for time in (0.5, 2.0, 10.0):
        assert distance(explicit, implicit, time) < 1e-5

    class Numeric:
        """The same risk without its Hessian: SciPy differences the gradient instead."""

        calls = 0

        @classmethod
        def gradient(cls, A, b):
            cls.calls += 1
            return risk.gradient(A, b)

    numeric = gradient_flow(Numeric, first, method="Radau", rtol=1e-8, atol=1e-10)
    assert distance(numeric, implicit, 2.0) < 1e-5
    counted = Numeric.calls
    Numeric.hessian, Numeric.calls = staticmethod(risk.hessian), 0
    gradient_flow(Numeric, first, method="Radau", rtol=1e-8, atol=1e-10)
    assert Numeric.calls < counted


def test_the_eigenbasis_reproduces_the_flow():
    task = Task(autoregressive(4), task_var=0.5, noise_var=0.4)
    values, vectors = torch.linalg.eigh(task.prompt_cov)
    a = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=F64)
    b = torch.linalg.norm(a)
    whole = gradient_flow(LinearRisk(task, 30), (vectors @ torch.diag(a) @ vectors.mT, b))
    parts = gradient_flow(EigenRisk(task, 30), (a, b))
    for time in (1.0, 5.0, 20.0):
        (A, big), (eigenvalues, small) = whole(time), parts(time)
        assert (vectors.mT @ A @ vectors - torch.diag(eigenvalues)).abs().max() < 1e-9
        assert abs(big - small) < 1e-9
    assert (values - EigenRisk(task).spectra[0]).abs().max() < 1e-14


def test_a_start_of_the_wrong_sign_goes_to_the_origin():
    """d = 1, A(0) = -alpha: the one way to miss the limit, and unstable."""
    task = Task(ONE)
    flow = gradient_flow(LinearRisk(task), (-0.5 * ONE, torch.tensor(0.5, dtype=F64)), time=16.0)
    assert all(part.abs().max() < 1e-5 for part in flow(16.0))
    assert abs(task.risk_infinite(*flow(16.0)) - 0.5) < 1e-9
    pushed = gradient_flow(LinearRisk(task), (-0.5 * ONE, torch.tensor(0.500001, dtype=F64)))
    assert abs(pushed.end[1] - 1) < 1e-5 and task.risk_infinite(*pushed.end) < 1e-12


# -- linear attention, finite prompts ----------------------------------------------------------


@pytest.mark.parametrize("as_published", [False, True])
@pytest.mark.parametrize("length", [1, 10, 1000])
def test_the_linear_flow_ends_at_gamma(length, as_published):
    """A = (tr Gamma^-2)^(-1/4) Gamma^-1, from a start without symmetry too."""
    S = autoregressive(3)
    C = torch.linalg.cholesky(S)
    P = C @ S @ C.mT if as_published else S
    task = Task(S, task_var=0.5, noise_var=0.2, as_published=as_published)
    gamma = (1 + 1 / length) * P + (P.trace() + 0.4) / length * torch.eye(3, dtype=F64)
    inverse = torch.linalg.inv(gamma)
    b = (inverse @ inverse).trace() ** 0.25
    skewed = torch.tensor([[1.0, 0.5, 0.0], [-0.5, 1.0, 0.0], [0.0, 0.2, 1.0]], dtype=F64)
    first = 0.4 * skewed / torch.linalg.norm(skewed), torch.tensor(0.4, dtype=F64)
    flow = gradient_flow(LinearRisk(task, length), first)
    assert_at_limit(flow, (inverse / b, b))


def test_the_general_flow_keeps_the_blocks():
    """U = diag(A, 0), V = (0, b) stay so, and A and b move as in the blocks.

    Exactly on an infinite prompt with weights +-sqrt(d) e_k and queries +-sqrt(d) C e_k: they have
    the means and covariances of the task, and inside the blocks the loss asks for no more.
    """
    S = autoregressive(2)
    task = Task(S, noise_var=0.3)
    signs = math.sqrt(2) * torch.cat([torch.eye(2, dtype=F64), -torch.eye(2, dtype=F64)])
    z = torch.nn.functional.pad(signs @ torch.linalg.cholesky(S).mT, (0, 1))
    z = z[:, None, :].expand(-1, 4, -1)
    episodes = Episodes(task, task.token_law(signs), z, task.target(signs, z))
    A, b = start(0.5, torch.tensor([[1.0, 0.3], [0.2, 0.7]], dtype=F64))
    general = gradient_flow(episodes, blocks(A, b), rtol=1e-10)
    block = gradient_flow(LinearRisk(task), (A, b))
    for time in (1.0, 3.0, general.times[-1]):
        expected = blocks(*block(min(time, block.times[-1])))
        for got, want in zip(general(time), expected, strict=True):
            assert (got - want).abs().max() < 1e-7
    assert_at_limit(block, LinearRisk(task).limit())


# -- the integrator ----------------------------------------------------------------------------


def logistic(time, first):
    """d = 1, S = 1, a = b: a' = a - a^3."""
    return (1 + (first**-2 - 1) * math.exp(-2 * time)) ** -0.5


@pytest.mark.parametrize("method, order", [("RK45", 5), ("DOP853", 8), ("Radau", 5)])
def test_the_order_of_convergence(method, order):
    """The error at time 4 against the number of steps, over tolerances from 1e-5 to 1e-10.

    Adaptive steps are not equal steps, so the slope is within one of the method's order.
    """
    risk, first = LinearRisk(Task(ONE)), (0.01 * ONE, torch.tensor(0.01, dtype=F64))
    steps, errors = [], []
    for rtol in (1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10):
        flow = gradient_flow(risk, first, method=method, rtol=rtol, atol=rtol * 1e-2, time=4.0)
        assert not flow.stationary and flow.times[-1] == 4.0
        steps.append(len(flow.times) - 1)
        errors.append(abs(float(flow.end[1]) - logistic(4.0, 0.01)))
    slope = np.polyfit(np.log(steps), np.log(errors), 1)[0]
    assert abs(-slope - order) < 1, (slope, steps, errors)


def test_dense_output_is_the_exact_solution():
    flow = gradient_flow(LinearRisk(Task(ONE)), (0.1 * ONE, torch.tensor(0.1, dtype=F64)))
    for time in torch.linspace(0, float(flow.times[-1]), 57).tolist():
        assert abs(float(flow(min(time, flow.times[-1]))[1]) - logistic(time, 0.1)) < 1e-9


def test_the_flow_stops_when_the_gradient_is_at_rest():
    risk = LinearRisk(Task(autoregressive(3)))
    for rest in (1e-3, 1e-6):
        flow = gradient_flow(risk, dense_start(0.5, 3), rest=rest)
        A, b = risk.gradient(*flow.end)
        assert abs(math.hypot(torch.linalg.norm(A), b) / rest - 1) < 1e-3
        assert flow.stationary
    assert not gradient_flow(risk, dense_start(0.5, 3), time=1.0).stationary


def test_wrong_starts_and_times_are_refused():
    risk = LinearRisk(Task(ONE))
    with pytest.raises(ValueError, match="start is at rest"):
        gradient_flow(risk, risk.limit())
    with pytest.raises(ValueError, match="float64"):
        gradient_flow(risk, (ONE.float(), torch.tensor(0.5)))
    flow = gradient_flow(risk, (ONE / 2, torch.tensor(0.5, dtype=F64)), time=1.0)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        flow(1.5)

    class Explosive:
        @staticmethod
        def gradient(x):
            return (-(x**2),)

    with pytest.raises(RuntimeError, match="stopped at time"):
        gradient_flow(Explosive, (torch.tensor([1.0], dtype=F64),), time=2.0)


# -- two flows from one start ------------------------------------------------------------------


@pytest.mark.parametrize("length", [20, 200])
def test_gronwalls_bound_holds_at_every_time(length):
    """Linear attention at L tokens against the infinite prompt; the gap is not vacuous either."""
    task = Task(autoregressive(2) / 2, noise_var=0.1)
    infinite, finite = LinearRisk(task), LinearRisk(task, length)
    first = dense_start(0.5, 2)
    theirs, mine = gradient_flow(infinite, first), gradient_flow(finite, first)
    times = np.linspace(0.05, 8.0, 40)
    gaps, radius = [], 0.0
    for time in np.linspace(0, 8.0, 161):
        A, b = mine(time)
        both = zip(finite.gradient(A, b), infinite.gradient(A, b), strict=True)
        gaps.append(math.sqrt(sum(float((x - y).square().sum()) for x, y in both)))
        radius = max(radius, *(math.hypot(torch.linalg.norm(f(time)[0]), f(time)[1])
                               for f in (mine, theirs)))
    lipschitz = infinite.lipschitz(radius)
    for time in times:
        bound = gronwall_bound(max(gaps), lipschitz, time)
        assert 0 < distance(mine, theirs, time) < bound
        assert bound < max(gaps) * time * math.exp(lipschitz * time)
    assert distance(mine, theirs, 0.05) > gronwall_bound(gaps[0], lipschitz, 0.05) / 2


# -- softmax, finite prompts -------------------------------------------------------------------


@functools.cache
def softmax_flow(length):
    queries = QueryRisk.draw(PAPER, length, 1024, generator=generator())
    flow = gradient_flow(
        queries, BALANCED, method="BDF", rtol=1e-6, atol=1e-8, rest=1e-6, time=1e5
    )
    return queries, flow


@pytest.mark.parametrize("length, end", [(20, 1.07), (1000, 7.13)])
def test_softmax_leaves_the_balanced_point_for_its_own(length, end):
    """b^2 from 3.93: the limits in t and in L do not commute for b, but for b A and the risk."""
    queries, flow = softmax_flow(length)
    assert flow.stationary and abs(float(BALANCED[1]) ** 2 - 3.93) < 0.01
    assert abs(float(flow.end[1]) ** 2 / end - 1) < 0.02
    risks = [float(queries.risk(*flow(t))) for t in flow.times]
    assert all(later <= before + 1e-12 for before, later in pairwise(risks))
    moving = flow.invariants()
    assert moving[1] * PAPER.drift(1 / float(BALANCED[1]), float(BALANCED[1]), length) > 0
    assert abs(moving[-1]) > 0.5


def test_longer_prompts_bring_the_product_closer_to_theory():
    inverse = torch.linalg.inv(PAPER.prompt_cov)
    gaps = []
    for length in (20, 1000):
        A, b = softmax_flow(length)[1].end
        gaps.append(float(torch.linalg.norm(b * A - inverse) / torch.linalg.norm(inverse)))
    assert gaps[1] < 0.05 < gaps[0]


@pytest.mark.parametrize("length, n_prompts, sign", [(20, 400, 1), (1000, 200, -1)])
def test_the_drift_has_its_sign_on_simulated_prompts(length, n_prompts, sign):
    """Frozen prompts, the flow itself; the mean over prompts is four standard errors from 0."""
    prompts = PromptRisk.draw(PAPER, length, n_prompts, generator=generator(3))
    flow = gradient_flow(
        prompts, BALANCED, method="BDF", rtol=1e-4, atol=1e-6, rest=1e-5, time=1.0
    )
    assert sign * float(flow.invariants()[-1]) > 0
    A, b = BALANCED
    drifts = []
    for part in range(0, n_prompts, n_prompts // 20):
        some = slice(part, part + n_prompts // 20)
        one = PromptRisk(PAPER, prompts.tokens[some], prompts.queries[some])
        in_A, in_b = one.gradient(A, b)
        drifts.append(float(2 * (b * in_b - (A * in_A).sum())))
    std_error = np.std(drifts, ddof=1) / math.sqrt(20)
    assert sign * np.mean(drifts) > 4 * std_error


# -- Theorem 4.3 -------------------------------------------------------------------------------

SMALL = {
    "parity": (BooleanTask(parity), None),
    "mixture": (MixtureTask(2), 8),
    "regression": (Task(torch.eye(2, dtype=F64)), 8),
}


@pytest.mark.parametrize("name", SMALL)
def test_limits_of_long_prompts_approach_the_infinite_one(name):
    """lim R_L - lim R_inf at 8 and 128 tokens: positive, then less than a third."""
    task, n_queries = SMALL[name]
    first = blocks(0.7 * torch.eye(task.dim - 1, dtype=F64), 0.7)
    gaps = limit_gaps(
        task, first, [8, 128], n_prompts=16, replicates=4, n_queries=n_queries,
        generator=generator(), method="BDF", rtol=1e-3, atol=1e-5, rest=3e-3, time=10.0,
    )  # fmt: skip
    (short, long), (_, std_error) = gaps.value, gaps.std_error
    assert gaps.n == 4 and short > 0
    assert std_error < short / 12
    assert long < short / 3


def test_majority_has_no_bounded_flow():
    """The hypothesis of Theorem 4.3 that fails: the scores grow without end, the risk goes to 0."""
    task = BooleanTask(majority)
    episodes = task.episodes(2, generator=generator())
    first = blocks(0.7 * torch.eye(3, dtype=F64), 0.7)
    flow = gradient_flow(episodes, first, method="BDF", rtol=1e-6, atol=1e-8, time=1000.0)
    sizes = [float(torch.linalg.norm(flow(t)[0])) for t in (10.0, 100.0, 1000.0)]
    risks = [float(episodes.risk(*flow(t))) for t in (10.0, 100.0, 1000.0)]
    assert not flow.stationary
    assert sizes[1] - sizes[0] > 0.3 and sizes[2] - sizes[1] > 0.3
    assert risks[0] > 4 * risks[1] > 16 * risks[2]

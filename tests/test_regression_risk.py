"""Risks in linear regression: closed forms against brute force, against each other, against theory.

Monte Carlo is judged in its own standard errors, four of them; each test first asserts that the
standard error is at most a fifth of the relative error that it detects.
"""

import math

import pytest
import torch

from measureattn import Empirical
from measureattn.concentration import gaussian_error
from measureattn.regression import EigenRisk, LinearRisk, PromptRisk, QueryRisk, Task
from measureattn.regression.softmax import _errors
from measureattn.regression.task import blocks, start
from measureattn.tasks import Episodes, risk

F64 = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def autoregressive(d, rho=0.5):
    i = torch.arange(d, dtype=F64)
    return rho ** (i - i[:, None]).abs()


PAPER = Task(autoregressive(5), task_var=0.2, noise_var=0.1)  # setting P


def random_setting(seed, as_published=False):
    """(task, A, b): a covariance of condition up to about 10 and a block without symmetry."""
    draws = generator(seed)
    d = 1 + seed % 4
    factor = torch.randn(d, d, generator=draws, dtype=F64) / d**0.5
    A = torch.randn(d, d, generator=draws, dtype=F64) / d
    omega2, tau2, b = (torch.rand(3, generator=draws, dtype=F64) * 1.5 + 0.1).tolist()
    cov = factor @ factor.mT + 0.2 * torch.eye(d, dtype=F64)
    tau2 = 0.0 if seed % 3 == 0 else tau2
    return Task(cov, task_var=omega2, noise_var=tau2, as_published=as_published), A, b


def assert_within(estimate, expected, detects):
    assert estimate.std_error < detects * abs(expected) / 5, (estimate, expected)
    assert abs(estimate.value - expected) < 4 * estimate.std_error, (estimate, expected)


def assert_gradient(loss, gradient, *parameters):
    leaves = [x.detach().clone().requires_grad_() for x in parameters]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for mine, theirs in zip(gradient(*parameters), expected, strict=True):
        assert (mine - theirs).abs().max() < 1e-10
        assert theirs.abs().max() > 1e-4


# -- the task ----------------------------------------------------------------------------------


@pytest.mark.parametrize("as_published", [False, True])
def test_prompts_and_queries_have_the_covariances_they_should(as_published):
    """Every entry of both sample covariances, four standard errors each; 3% would be seen."""
    S = autoregressive(3)
    C = torch.linalg.cholesky(S)
    task = Task(S, noise_var=0.5, as_published=as_published)
    w = torch.tensor([[1.0, -2.0, 0.5]], dtype=F64)
    P, Q = (C @ S @ C.mT, torch.eye(3, dtype=F64)) if as_published else (S, S)
    top = torch.cat([P, P @ w.mT], 1)
    law = torch.cat([top, torch.cat([w @ P, w @ P @ w.mT + 0.5], 1)])
    assert (task.token_law(w).cov[0] - law).abs().max() < 1e-12
    n = 200_000
    z = task.query_law(w).sample(n, generator=generator(1))
    for sample, cov in ((task.prompts(w, n, generator=generator())[0], law), (z[:, :3], Q)):
        error = ((cov.diagonal()[:, None] * cov.diagonal() + cov**2) / n).sqrt()
        assert error.max() < 0.03 * cov.diagonal().max() / 5
        assert ((sample.mT @ sample / n - cov).abs() < 4 * error).all()
    assert (z[:, 3] == 0).all()


def test_the_published_law_has_the_published_eigenvalue():
    task = Task(autoregressive(5), as_published=True)
    assert abs(torch.linalg.eigvalsh(task.prompt_cov)[-1] - 5.00) < 0.005
    assert abs(torch.linalg.eigvalsh(PAPER.prompt_cov)[-1] - 2.26) < 0.005


def test_labels_without_noise_are_exact():
    task = Task(autoregressive(4))
    w = torch.randn(3, 4, generator=generator(), dtype=F64)
    tokens = task.prompts(w, 50, generator=generator())
    labels = torch.einsum("nld,nd->nl", tokens[..., :-1], w)
    assert (tokens[..., -1] - labels).abs().max() < 1e-13
    assert torch.linalg.eigvalsh(task.token_law(w).cov)[:, 0].abs().max() < 1e-13


def test_wrong_tasks_are_refused():
    one = torch.eye(2, dtype=F64)
    with pytest.raises(ValueError, match="smallest eigenvalue is 0"):
        Task(torch.ones(2, 2, dtype=F64))
    with pytest.raises(ValueError, match="differs from its transpose by up to 1"):
        Task(torch.tensor([[3.0, 1.0], [0.0, 3.0]], dtype=F64))
    with pytest.raises(ValueError, match=r"shape \(d, d\)"):
        Task(torch.ones(2, 3, dtype=F64))
    with pytest.raises(ValueError, match="not standard deviations"):
        Task(one, task_var=0.0)
    with pytest.raises(ValueError, match="not standard deviations"):
        Task(one, noise_var=-0.1)
    with pytest.raises(ValueError, match="shape of cov"):
        Task(one).risk_linear(torch.eye(3, dtype=F64), 1.0, 10)
    with pytest.raises(ValueError, match="1 token or more"):
        Task(one).risk_linear(one, 1.0, 0)


def test_the_start_is_balanced_to_the_last_digit():
    A, b = start(14.1, torch.randn(3, 3, generator=generator(), dtype=F64))
    assert b == 14.1 and abs(torch.linalg.norm(A) - b) < 1e-14
    assert torch.linalg.eigvalsh(A)[0] > -1e-12


# -- infinite prompts and linear attention -----------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_infinite_risk_is_the_risk_of_the_general_task(seed):
    task, A, b = random_setting(seed, as_published=seed == 2)
    U, V = blocks(A, b)
    estimate = risk(task, U, V, n_prompts=4000, n_queries=32, generator=generator(seed))
    assert_within(estimate, task.risk_infinite(A, b), detects=0.25)
    quiet = Task(task.prompt_cov, task_var=task.task_var)
    if seed != 2:
        assert abs(quiet.risk_infinite(A, b) - task.risk_infinite(A, b)) < 1e-15


@pytest.mark.parametrize("seed", range(20))
def test_the_linear_risk_is_the_mean_over_prompts(seed):
    """Labels, noise and all, by brute force: detects 10% (standard error below 2%)."""
    task, A, b = random_setting(seed, as_published=seed % 5 == 4)
    length, draws = (1, 2, 5, 17, 40)[seed % 5], generator(seed)
    n = 60_000 if length < 5 else 20_000  # few tokens: heavy tails
    w = task.parameter_law.sample(n, generator=draws)
    tokens = task.prompts(w, length, generator=draws)
    x = task.query_inputs(n, 16, generator=draws)
    mean = torch.einsum("nl,nld->nd", tokens[..., -1], tokens[..., :-1]) / length
    gaps = torch.einsum("nd,nqd->nq", b * mean @ A - w, x)
    losses = gaps.square().mean(1) / 2
    expected = task.risk_linear(A, b, length)
    std_error = losses.std() / math.sqrt(n)
    assert std_error < 0.02 * expected
    assert abs(losses.mean() - expected) < 4 * std_error


@pytest.mark.parametrize("length", [math.inf, 7.0])
@pytest.mark.parametrize("seed", range(4))
def test_linear_gradients_and_hessians_equal_autograds(seed, length):
    task, A, b = random_setting(seed, as_published=seed == 1)
    b = torch.tensor(b, dtype=F64)
    d = len(A)
    curve = LinearRisk(task, length)
    assert_gradient(curve.risk, curve.gradient, A, b)

    def flat(state):
        return curve.risk(state[:-1].reshape(d, d), state[-1])

    state = torch.cat([A.reshape(-1), b.reshape(1)])
    expected = torch.autograd.functional.hessian(flat, state)
    assert (curve.hessian(A, b) - expected).abs().max() < 1e-10
    assert torch.linalg.matrix_norm(expected, 2) < curve.lipschitz(float(state.norm()))
    best, scale = curve.limit()
    assert all(part.abs().max() < 1e-12 for part in curve.gradient(best, scale))
    assert abs(torch.linalg.norm(best) - scale) < 1e-12
    assert abs(curve.risk(best, scale) - task.risk_one_step(length)) < 1e-13


@pytest.mark.parametrize("length", [math.inf, 7.0])
@pytest.mark.parametrize("as_published", [False, True])
def test_the_eigenbasis_has_the_same_risk_and_gradient(as_published, length):
    task = Task(autoregressive(4), task_var=0.7, noise_var=0.2, as_published=as_published)
    a, b = torch.tensor([0.3, -0.2, 0.9, 1.4], dtype=F64), torch.tensor(0.8, dtype=F64)
    _, vectors = torch.linalg.eigh(task.prompt_cov)
    A = vectors @ torch.diag(a) @ vectors.mT
    whole, parts = LinearRisk(task, length), EigenRisk(task, length)
    assert abs(whole.risk(A, b) - parts.risk(a, b)) < 1e-13
    assert_gradient(parts.risk, parts.gradient, a, b)
    in_A, in_b = whole.gradient(A, b)
    in_a, also_b = parts.gradient(a, b)
    assert (vectors.mT @ in_A @ vectors - torch.diag(in_a)).abs().max() < 1e-12
    assert abs(in_b - also_b) < 1e-12
    expected = torch.autograd.functional.hessian(
        lambda state: parts.risk(state[:-1], state[-1]), torch.cat([a, b.reshape(1)])
    )
    assert (parts.hessian(a, b) - expected).abs().max() < 1e-12


def test_the_eigenvalues_of_theory_flow_as_theory_says():
    """omega = 1, no noise: a_i' = b s_i^2 (1 - b s_i a_i)."""
    s = torch.tensor([0.5, 2.0], dtype=F64)
    a, b = torch.tensor([0.3, 0.7], dtype=F64), 1.3
    slope, _ = EigenRisk(Task(torch.diag(s))).gradient(a, b)
    assert (-slope - b * s**2 * (1 - b * s * a)).abs().max() < 1e-14


@pytest.mark.parametrize("length, noise_var", [(1, 0.0), (3, 0.0), (3, 0.5), (12, 0.5)])
def test_the_bayes_risk_is_that_of_ridge_regression(length, noise_var):
    """Ridge itself, on labels, by brute force: detects 10%."""
    task = Task(autoregressive(4), task_var=0.8, noise_var=noise_var)
    n, draws = 20_000, generator(length)
    w = task.parameter_law.sample(n, generator=draws)
    tokens = task.prompts(w, length, generator=draws)
    x, y = tokens[..., :-1], tokens[..., -1:]
    gram = x @ x.mT + (noise_var / 0.8 + 1e-12) * torch.eye(length, dtype=F64)
    gap = (x.mT @ torch.linalg.solve(gram, y))[..., 0] - w
    losses = ((gap @ task.query_cov) * gap).sum(-1) / 2
    floor = task.risk_bayes(length, 5000, generator=draws)
    std_error = math.hypot(losses.std() / math.sqrt(n), floor.std_error)
    assert std_error < 0.1 * floor.value / 5
    assert abs(losses.mean() - floor.value) < 4 * std_error
    assert floor.value < task.risk_one_step(length) + 4 * floor.std_error


def test_the_bayes_risk_vanishes_without_noise_from_d_tokens_on():
    task = Task(torch.eye(3, dtype=F64))
    assert task.risk_bayes(3, 100, generator=generator()).value == 0
    # one token leaves d - 1 of d directions, exactly
    assert abs(task.risk_bayes(1, 100, generator=generator()).value - 1.0) < 1e-13


# -- softmax on given prompts ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_softmax_gradients_on_prompts_equal_autograds(seed):
    task, A, b = random_setting(seed)
    prompts = PromptRisk.draw(task, 9, 6, n_queries=3, generator=generator(seed))
    assert_gradient(prompts.risk, prompts.gradient, A, torch.tensor(b, dtype=F64))


def test_softmax_on_prompts_is_the_mean_over_labels_of_the_general_task():
    """Without noise the loss is quadratic in w: the d weights sqrt(d omega^2) e_k give its mean."""
    task, A, b = random_setting(3)
    prompts = PromptRisk.draw(task, 9, 5, n_queries=2, generator=generator())
    d, tokens, z = task.dim_x, prompts.tokens, prompts.queries.movedim(1, 0)
    z = torch.nn.functional.pad(z, (0, 1))
    U, V = blocks(A, b)
    losses, slopes = [], []
    for k in range(d):
        w = math.sqrt(d * task.task_var) * torch.eye(d, dtype=F64)[k]
        law = Empirical(torch.cat([tokens, (tokens @ w)[..., None]], -1))
        episodes = Episodes(task, law, z, task.target(w.expand(5, d), z))
        losses.append(episodes.risk(U, V))
        slopes.append(episodes.gradient(U, V))
    assert abs(prompts.risk(A, b) - sum(losses) / d) < 1e-13
    in_A, in_b = prompts.gradient(A, b)
    assert (in_A - sum(u[:d, :d] for u, _ in slopes) / d).abs().max() < 1e-13
    assert abs(in_b - sum(v[0, d] for _, v in slopes) / d) < 1e-13


def test_noise_costs_what_labels_with_noise_cost():
    """Detects 10% of the noise's share, which is a third of the risk."""
    task = Task(autoregressive(2), noise_var=1.0)
    A, b, n = 0.5 * torch.eye(2, dtype=F64), 1.5, 100_000
    U, V = blocks(A, b)
    labelled = risk(task, U, V, 6, n_prompts=n, n_queries=4, generator=generator())
    averaged = task.risk_softmax(A, b, 6, n, n_queries=4, generator=generator(1))
    std_error = math.hypot(labelled.std_error, averaged.std_error)
    assert std_error < 0.1 * averaged.value / 15
    assert abs(labelled.value - averaged.value) < 4 * std_error


def test_the_control_variates_mean_is_known_and_it_helps():
    A, b = 0.3 * torch.linalg.inv(PAPER.prompt_cov), 2.0
    prompts = PromptRisk.draw(PAPER, 100, 5000, generator=generator())
    plain, control = prompts.losses(A, b), prompts.linear_losses(A, b)
    known = PAPER.risk_linear(A, b, 100) + b**2 * (0.2 * 5 + 0.1) / 200
    std_error = control.std() / math.sqrt(5000)
    assert std_error < 0.05 * known / 5
    assert abs(control.mean() - known) < 4 * std_error
    estimate = PAPER.risk_softmax(A, b, 100, 5000, generator=generator())
    assert estimate.std_error < 0.5 * plain.std() / math.sqrt(5000)


# -- softmax, exact ----------------------------------------------------------------------------


def test_exact_values_of_setting_p():
    A, b = LinearRisk(PAPER).limit()
    a = 1 / float(b)
    for (a_, b_, length), expected in {
        (0.3, 2.0, 100): 0.122789,
        (0.3, 2.0, 1000): 0.084428,
        (a, float(b), 100): 0.088701,
        (a, float(b), 1000): 0.0126867,
    }.items():
        assert abs(PAPER.risk_softmax_exact(a_, b_, length) / expected - 1) < 1e-5
    for length, expected in ((100, 0.0325), (1000, 0.00325)):
        assert abs(PAPER.risk_linear(A, b, length) / expected - 1) < 1e-12


def test_dimension_one_is_the_averaged_error_of_attention():
    """S = 1, a = b = 1: half of E err^2, whose reference value at L = 64 is 0.087185."""
    value = Task(torch.eye(1, dtype=F64)).risk_softmax_exact(1.0, 1.0, 64)
    assert abs(2 * value - 0.087185) < 5e-7


def test_one_token_is_elementary():
    """L = 1: the token is the average, so R = (omega^2 (b^2 + 1) tr S + tau^2 b^2)/2."""
    value = PAPER.risk_softmax_exact(0.7, 1.5, 1)
    assert abs(value - (0.2 * 5 * (1.5**2 + 1) + 0.1 * 1.5**2) / 2) < 1e-9


MONTE_CARLO = [
    (d, a, b, length, tau2)
    for d, length, tau2 in ((1, 3, 0.4), (1, 30, 0.0), (2, 10, 0.4), (5, 40, 0.1))
    for a, b in ((0.3, 2.0), (0.6, 1.4), (-1.0, -0.7))
]


@pytest.mark.parametrize("d, a, b, length, tau2", MONTE_CARLO)
def test_monte_carlo_agrees_with_the_exact_law(d, a, b, length, tau2):
    """Twelve settings; detects 10%."""
    task = Task(autoregressive(d), task_var=1 / d, noise_var=tau2)
    A = a * torch.linalg.inv(task.prompt_cov)
    estimate = task.risk_softmax(A, b, length, 20_000, generator=generator(d))
    assert_within(estimate, task.risk_softmax_exact(a, b, length), detects=0.1)


@pytest.mark.parametrize("seed", [1, 2, 3, 5])
def test_given_queries_agree_with_monte_carlo_for_any_block(seed):
    """A without symmetry, queries of another covariance: detects 10%."""
    task, A, b = random_setting(seed, as_published=seed == 3)
    estimate = task.risk_softmax(A, b, 12, 20_000, generator=generator(seed))
    queries = QueryRisk.draw(task, 12, 2**14, generator=generator(seed))
    assert_within(estimate, queries.risk(A, b), detects=0.1)


def test_given_queries_agree_with_the_exact_law():
    """Sobol queries: 16,384 of them leave less than 0.2%; as derivatives too, less than 1%."""
    queries = QueryRisk.draw(PAPER, 100, 2**14, generator=generator())
    inverse = torch.linalg.inv(PAPER.prompt_cov)
    a, b = (torch.tensor(x, dtype=F64, requires_grad=True) for x in (0.5, 1.8))
    exact = PAPER.risk_softmax_exact(a, b, 100)
    in_a, in_b = torch.autograd.grad(exact, (a, b))
    A = 0.5 * inverse
    assert abs(queries.risk(A, 1.8) / exact - 1) < 2e-3
    got_A, got_b = queries.gradient(A, 1.8)
    assert abs((got_A * inverse).sum() / in_a - 1) < 1e-2
    assert abs(got_b / in_b - 1) < 1e-2


@pytest.mark.parametrize("length", [1, 20, 1000, 10**30])
def test_exact_derivatives_are_those_of_the_exact_law(length):
    """Central differences with step 1e-4 are right to about 1e-8."""
    a, b = (torch.tensor(x, dtype=F64, requires_grad=True) for x in (0.5, 1.8))
    slopes = torch.autograd.grad(PAPER.risk_softmax_exact(a, b, length), (a, b))
    for i, slope in enumerate(slopes):
        up, down = ([0.5, 1.8] for _ in range(2))
        up[i] += 1e-4
        down[i] -= 1e-4
        ends = [PAPER.risk_softmax_exact(*at, length) for at in (up, down)]
        assert abs(slope - (ends[0] - ends[1]) / 2e-4) < 1e-7
    queries = QueryRisk.draw(PAPER, length, 64, generator=generator())
    A = torch.randn(5, 5, generator=generator(), dtype=F64) / 5
    direction = torch.randn(5, 5, generator=generator(1), dtype=F64)
    in_A, _ = queries.gradient(A, 1.8)
    ends = [queries.risk(A + h * direction, 1.8) for h in (1e-5, -1e-5)]
    assert abs((in_A * direction).sum() - (ends[0] - ends[1]) / 2e-5) < 1e-7


def test_interpolated_errors_equal_the_exact_ones():
    s = torch.tensor([0.03, 0.9, 1.0, 3.7, 4.2, 15.0, 40.0], dtype=F64)
    for length in (1, 2, 50, 10**5):
        f, f2, _ = gaussian_error(s, length)
        values, _ = _errors(s.numpy(), length)
        assert abs(values[0] / f2.numpy() - 1).max() < 1e-9
        assert abs(values[1] / ((f - f2) / s).numpy() - 1).max() < 1e-9


def test_exact_laws_refuse_queries_of_another_covariance():
    task = Task(autoregressive(2), as_published=True)
    with pytest.raises(ValueError, match="Use QueryRisk"):
        task.risk_softmax_exact(0.5, 1.0, 10)
    with pytest.raises(ValueError, match="Use QueryRisk"):
        task.best_tilt()


# -- softmax, to first order -------------------------------------------------------------------


def test_first_order_values_of_setting_p():
    A = 0.3 * torch.linalg.inv(PAPER.prompt_cov)
    assert abs(PAPER.risk_softmax_first_order(A, 2.0, 100) - 0.1245) < 5e-5
    assert abs(PAPER.risk_softmax_first_order(A, 2.0, 1000) - 0.0845) < 5e-5


@pytest.mark.parametrize("as_published", [False, True])
def test_first_order_is_the_limit_of_the_exact_law(as_published):
    """A without symmetry and bounded tilts, the same queries' mean of the exact law at L = 10^9."""
    task = Task(autoregressive(3), task_var=0.5, noise_var=0.2, as_published=as_published)
    A, b = 0.06 * torch.randn(3, 3, generator=generator(), dtype=F64), 1.7
    infinite = task.risk_infinite(A, b)
    first = (task.risk_softmax_first_order(A, b, 10**6) - infinite) * 10**6
    queries = QueryRisk.draw(task, 10**6, 2**15, generator=generator())
    # infinite risk of these very queries, so that only the 1/L part is compared
    miss = b * queries.queries @ A.mT @ task.prompt_cov - queries.queries
    known = task.task_var / 2 * miss.square().sum(-1).mean()
    exact = (queries.risk(A, b) - known) * 10**6
    assert abs(exact / first - 1) < 0.01
    assert first > 0.1


@pytest.mark.parametrize("a", [0.2, 0.3])
def test_first_order_is_the_limit_of_the_exact_law_on_the_diagonal(a):
    A = a * torch.linalg.inv(PAPER.prompt_cov)
    infinite = PAPER.risk_infinite(A, 2.0)
    gaps = [
        abs(
            (PAPER.risk_softmax_exact(a, 2.0, n) - infinite)
            / (PAPER.risk_softmax_first_order(A, 2.0, n) - infinite)
            - 1
        )
        for n in (10**3, 10**5)
    ]
    assert gaps[1] < 0.005 and gaps[1] < gaps[0] / 5


def test_first_order_is_refused_outside_its_domain():
    """Score covariance a^2 I at A = a S^-1: from a^2 = 1/2 on."""
    inverse = torch.linalg.inv(PAPER.prompt_cov)
    assert PAPER.risk_softmax_first_order(0.7 * inverse, 1.0, 10) > 0
    with pytest.raises(ValueError, match=r"largest of the 5 is 0\.5041"):
        PAPER.risk_softmax_first_order(0.71 * inverse, 1.0, 10)
    balanced, b = LinearRisk(Task(torch.eye(2, dtype=F64))).limit()
    with pytest.raises(ValueError, match="below 1/2"):
        Task(torch.eye(2, dtype=F64)).risk_softmax_first_order(balanced, b, 10)


# -- the valley --------------------------------------------------------------------------------


@pytest.mark.parametrize("d, expected", [(1, 0.2324), (2, 0.1910), (5, 0.1228), (10, 0.0764)])
def test_the_best_point_of_the_valley(d, expected):
    """Without noise (d+2) s^2 - (d+4) s + 1 = 0, whatever S."""
    root = ((d + 4) - math.sqrt((d + 4) ** 2 - 4 * (d + 2))) / (2 * (d + 2))
    for cov in (torch.eye(d, dtype=F64), 3 * autoregressive(d)):
        found = Task(cov, task_var=0.4).best_tilt()
        assert abs(found - root) < 1e-6 and abs(found - expected) < 5e-4


def test_the_valley_of_setting_p():
    best = PAPER.best_tilt()
    q, tau2, d, s = 1.0, 0.1, 5, 0.2
    constant = (1 - 2 * s) ** (-d / 2) * (q + tau2 + s * q / (1 - 2 * s)) / (2 * s)
    assert abs(PAPER.valley_constant(s) / constant - 1) < 1e-12
    rest = 1 - 2 * best
    slope = -1 / best + d / rest + q / (rest**2 * (q + tau2) + best * q * rest)
    assert abs(slope) < 1e-4
    assert abs(best - 0.1242) < 5e-4 and abs(PAPER.valley_constant(best) - 10.40) < 5e-3
    assert abs(PAPER.best_tilt(10**9) / best - 1) < 0.01


DRIFT = {
    10: 0.950, 20: 0.390, 40: 0.113, 60: 0.030, 80: -0.007, 100: -0.0260, 200: -0.0512,
    500: -0.0462, 1000: -0.0345, 10**4: -0.0077, 10**5: -0.00114,
}  # fmt: skip


@pytest.mark.parametrize("length", DRIFT)
def test_the_drift_of_setting_p(length):
    """To 2%, or to the digits the table has."""
    _, b = LinearRisk(PAPER).limit()
    drift, expected = PAPER.drift(1 / float(b), float(b), length), DRIFT[length]
    digits = 5e-6 if length == 10**5 else 5e-5 if length >= 100 else 5e-4
    assert abs(drift - expected) < max(0.02 * abs(expected), digits)
    assert drift * expected > 0
    s, h = 1 / float(b) ** 2, 1e-4  # on the valley the drift is -4 s R'(s)
    ends = [PAPER.risk_softmax_exact(x**0.5, x**-0.5, length) for x in (s + h, s - h)]
    assert abs(drift + 4 * s * (ends[0] - ends[1]) / (2 * h)) < 1e-4 * abs(expected) + 1e-7


def test_the_drift_of_very_long_prompts():
    """L times it: -168.8 in setting P, and +20.85 where S = 0.1 I."""
    for task, expected in ((PAPER, -168.8), (Task(0.1 * torch.eye(5, dtype=F64)), 20.85)):
        _, b = LinearRisk(task).limit()
        s, h = 1 / float(b) ** 2, 1e-5
        slope = (task.valley_constant(s + h) - task.valley_constant(s - h)) / (2 * h)
        assert abs(-4 * s * slope / expected - 1) < 1e-3
        assert abs(10**12 * task.drift(1 / float(b), float(b), 10**12) / expected - 1) < 0.01

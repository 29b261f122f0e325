"""Risks of the blocks (A, b) in linear regression: linear attention exactly, softmax on prompts.

Prompts have inputs of covariance P, queries covariance Q (both S, but for `as_published`); weights
have variance omega^2, labels noise of variance tau^2. Averaged over weights and noise, a prompt is
charged

    1/2 [omega^2 |b m - x|^2 + tau^2 b^2 sum p_i^2],    m = sum p_i x_i,   x the query,

with p_i = softmax_i(x_i . A x), or x_i . A x / L for linear attention. All risks start here, those
of `measureattn.regression.softmax` too, where the mean over prompts is taken exactly. The functions
are the methods of `Task`; the classes are risks to descend, with gradients.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from measureattn._checks import require_same, require_tensor
from measureattn._monte_carlo import _without_first_order
from measureattn._typing import Float
from measureattn.concentration import Estimate

WORKING_SET = 2**21  # scores held at once


# -- infinite prompts and linear attention ------------------------------------------------------


@dataclass(frozen=True)
class LinearRisk:
    """The exact risk of linear attention on prompts of L tokens; L = inf: any attention's.

    With Gamma_L = (1 + 1/L) P + (tr P + tau^2/omega^2)/L I it is
    omega^2/2 (b^2 tr[A Q A' P Gamma_L] - 2 b tr[P A Q] + tr Q), least at b A = Gamma_L^-1. A need
    not be symmetric. Parameters are (A, b), A (d, d) and b a number.
    Source: section 5, arXiv 2512.11784; finite L as in Zhang, Frei, Bartlett 2024. See: chapter 9.

    >>> from measureattn.regression import Task
    >>> risk = LinearRisk(Task(torch.eye(2).double()), 100)
    >>> A, b = risk.limit()
    >>> float(risk.gradient(A, b)[0].norm()) < 1e-12
    True
    """

    task: object
    length: float = math.inf

    def __post_init__(self):
        require_length(self.length)

    @functools.cached_property
    def excess(self) -> Float[Tensor, "d d"]:
        """Gamma_L - P."""
        P, ratio = self.task.prompt_cov, self.task.noise_var / self.task.task_var
        return (P + (P.trace() + ratio) * torch.eye(len(P)).to(P)) / self.length

    @functools.cached_property
    def gamma(self) -> Float[Tensor, "d d"]:
        return self.task.prompt_cov + self.excess

    @functools.cached_property
    def _curved(self) -> tuple[Tensor, Tensor, Tensor]:
        """(P Gamma, Q, P Q)."""
        P, Q = self.task.prompt_cov, self.task.query_cov
        return P @ self.gamma, Q, P @ Q

    def risk(self, A: Float[Tensor, "d d"], b: Tensor | float) -> Float[Tensor, ""]:
        require_block(self.task, A)
        P, Q = self.task.prompt_cov, self.task.query_cov
        miss = b * P @ A - torch.eye(len(P)).to(P)  # squared, so that nothing cancels near risk 0
        infinite = ((miss @ Q) * miss).sum()
        return self.task.task_var / 2 * (infinite + b**2 * ((P @ self.excess @ A @ Q) * A).sum())

    def gradient(self, A: Float[Tensor, "d d"], b: Tensor | float) -> tuple[Tensor, Tensor]:
        require_block(self.task, A)
        curved, Q, known = self._curved
        slope = self.task.task_var * (b * curved @ A @ Q - known)
        return b * slope, (slope * A).sum()

    def hessian(self, A: Float[Tensor, "d d"], b: Tensor | float) -> Float[Tensor, "n n"]:
        """In the d^2 entries of A, row by row, then b."""
        require_block(self.task, A)
        curved, Q, known = self._curved
        moved = curved @ A @ Q
        inner, corner = b**2 * torch.kron(curved, Q), (moved * A).sum().reshape(1, 1)
        return self.task.task_var * _bordered(inner, (2 * b * moved - known).reshape(-1, 1), corner)

    def limit(self) -> tuple[Tensor, Tensor]:
        """Where the flow from a balanced start (|A|_F = b) ends, of all (A, b) of least risk."""
        inverse = torch.linalg.inv(self.gamma)
        b = torch.linalg.norm(inverse).sqrt()
        return inverse / b, b

    def lipschitz(self, radius: float) -> float:
        """A bound on the Lipschitz constant of `gradient` where |A|_F^2 + b^2 <= radius^2."""
        curved, Q, known = self._curved
        top = float(torch.linalg.matrix_norm(curved, 2) * torch.linalg.matrix_norm(Q, 2))
        # both diagonal blocks, then the off-diagonal one with 2 |b| |A|_F <= radius^2
        return self.task.task_var * (2 * top * radius**2 + float(torch.linalg.norm(known)))


@dataclass(frozen=True)
class EigenRisk:
    """`LinearRisk` where A commutes with S: parameters (a, b), a (d,) the eigenvalues of A.

    The flow's equations fall apart: a_i' = omega^2 q_i p_i b (1 - b gamma_i a_i), in ascending
    order of the eigenvalues p_i of P; q_i and gamma_i are those of Q and Gamma_L.
    Source: section 5, arXiv 2512.11784. See: chapter 8.

    >>> from measureattn.regression import Task
    >>> EigenRisk(Task(torch.eye(2).double())).gradient(torch.ones(2).double(), 0.5)[0]
    tensor([-0.2500, -0.2500], dtype=torch.float64)
    """

    task: object
    length: float = math.inf

    @functools.cached_property
    def spectra(self) -> tuple[Tensor, Tensor, Tensor]:
        """(p, q, gamma)."""
        p, vectors = torch.linalg.eigh(self.task.prompt_cov)
        q, gamma = (
            ((vectors.mT @ matrix) * vectors.mT).sum(-1)
            for matrix in (self.task.query_cov, LinearRisk(self.task, self.length).gamma)
        )
        return p, q, gamma

    def risk(self, a: Float[Tensor, "d"], b: Tensor | float) -> Float[Tensor, ""]:
        p, q, gamma = self.spectra
        inner = (b * p * a - 1).square() + b**2 * p * (gamma - p) * a**2
        return self.task.task_var / 2 * (q * inner).sum()

    def gradient(self, a: Float[Tensor, "d"], b: Tensor | float) -> tuple[Tensor, Tensor]:
        p, q, gamma = self.spectra
        slope = self.task.task_var * q * p * (b * gamma * a - 1)
        return b * slope, (slope * a).sum()

    def hessian(self, a: Float[Tensor, "d"], b: Tensor | float) -> Float[Tensor, "n n"]:
        p, q, gamma = self.spectra
        across = (q * p * (2 * b * gamma * a - 1))[:, None]
        inner, corner = torch.diag(q * p * gamma * b**2), (q * p * gamma * a**2).sum().reshape(1, 1)
        return self.task.task_var * _bordered(inner, across, corner)


def risk_infinite(task, A: Float[Tensor, "d d"], b: Tensor | float) -> Float[Tensor, ""]:
    """The risk on infinite prompts, omega^2/2 tr[(b P A - I) Q (b P A - I)']; noise adds nothing.

    Source: section 5, arXiv 2512.11784. See: chapter 8.

    >>> from measureattn.regression import Task
    >>> Task(torch.eye(2).double()).risk_infinite(torch.eye(2).double(), 0.5)
    tensor(0.2500, dtype=torch.float64)
    """
    return LinearRisk(task).risk(A, b)


def risk_linear(
    task, A: Float[Tensor, "d d"], b: Tensor | float, length: float
) -> Float[Tensor, ""]:
    """The risk of linear attention on prompts of `length` tokens, exact; see `LinearRisk`.

    Source: Zhang, Frei, Bartlett 2024, with A not symmetric and noise: ours. See: chapter 9.

    >>> from measureattn.regression import Task
    >>> Task(torch.eye(2).double()).risk_linear(torch.eye(2).double(), 1.0, 100)
    tensor(0.0300, dtype=torch.float64)
    """
    return LinearRisk(task, length).risk(A, b)


def risk_one_step(task, length: float) -> Float[Tensor, ""]:
    """The best that linear attention can do, one step from sum y_i x_i: b A = Gamma_L^-1.

    Source: Zhang, Frei, Bartlett 2024. See: chapter 9.

    >>> from measureattn.regression import Task
    >>> Task(torch.eye(2).double()).risk_one_step(100)
    tensor(0.0291, dtype=torch.float64)
    """
    risk = LinearRisk(task, length)
    return risk.risk(torch.linalg.inv(risk.gamma), 1.0)


def risk_bayes(task, length: int, n_prompts: int, *, generator: torch.Generator) -> Estimate:
    """The least risk of any predictor: ridge regression with penalty tau^2/omega^2 on X'X.

    Exact given the inputs, averaged over n_prompts of them; 0 without noise from L = d on.
    Source: textbook; the floor of chapter 9's pictures. See: chapter 9.

    >>> from measureattn.regression import Task
    >>> g = torch.Generator().manual_seed(0)
    >>> Task(torch.eye(2).double()).risk_bayes(1, 10, generator=g).value
    tensor(0.5000, dtype=torch.float64)
    """
    penalty = task.noise_var / task.task_var
    values = []
    for n in _batches(n_prompts, length * task.dim_x):
        x = task.inputs(n, int(require_length(length)), generator=generator)
        scatter, vectors = torch.linalg.eigh(x.mT @ x)
        seen = scatter > 1e-12 * scatter[:, -1:]
        left = torch.where(seen, penalty / torch.where(seen, scatter + penalty, 1.0), 1.0)
        along = ((vectors.mT @ task.query_cov) * vectors.mT).sum(-1)
        values.append(task.task_var / 2 * (left * along).sum(-1))
    return _estimate(torch.cat(values))


# -- softmax on given prompts, and their mean by Monte Carlo ------------------------------------


@dataclass(frozen=True)
class PromptRisk:
    """The risk of softmax attention on given prompts and queries, in the blocks (A, b).

    tokens   (n, L, d) inputs, for instance `Task.inputs`;  queries  (n, Q, d) inputs

    The mean over weights and noise is taken exactly, so labels are not needed. Closed-form
    gradient; equal to the mean over labels of `Episodes.gradient`, restricted to the blocks.
    Source: section 5, arXiv 2512.11784, with the mean over labels taken. See: chapter 9.

    >>> from measureattn.regression import Task
    >>> task, g = Task(torch.eye(2).double()), torch.Generator().manual_seed(0)
    >>> PromptRisk.draw(task, 10, 5, generator=g).risk(torch.eye(2).double(), 0.0) > 0
    tensor(True)
    """

    task: object
    tokens: Tensor
    queries: Tensor

    @classmethod
    def draw(
        cls, task, length: int, n_prompts: int, *, n_queries: int = 8, generator: torch.Generator
    ) -> "PromptRisk":
        """Fresh prompts and queries; equal generators give equal queries at all lengths."""
        queries = task.query_inputs(n_prompts, n_queries, generator=generator)
        tokens = task.inputs(n_prompts, int(require_length(length)), generator=generator)
        return cls(task, tokens, queries)

    def losses(self, A: Float[Tensor, "d d"], b: Tensor | float) -> Float[Tensor, "n"]:
        """One a prompt, averaged over its queries."""
        p, mean = self._weights(A)
        return self._cost(b * mean - self.queries, b**2 * p.square().sum(-1))

    def linear_losses(self, A: Float[Tensor, "d d"], b: Tensor | float) -> Float[Tensor, "n"]:
        """The same with weights (1 + score)/L, which softmax has to first order in the scores.

        Their mean is exactly risk_linear + b^2 (omega^2 tr P + tau^2)/(2 L): a control variate.
        """
        weights = (1 + self.queries @ A.mT @ self.tokens.mT) / self.tokens.shape[1]
        return self._cost(
            b * weights @ self.tokens - self.queries, b**2 * weights.square().sum(-1)
        )

    def risk(self, A: Float[Tensor, "d d"], b: Tensor | float) -> Float[Tensor, ""]:
        return self.losses(A, b).mean()

    def gradient(self, A: Float[Tensor, "d d"], b: Tensor | float) -> tuple[Tensor, Tensor]:
        p, mean = self._weights(A)
        miss = b * mean - self.queries
        squares = p.square().sum(-1, keepdim=True)
        along = miss @ self.tokens.mT - (miss * mean).sum(-1, keepdim=True)
        omega2, tau2 = self.task.task_var, self.task.noise_var
        in_score = p * (omega2 * b * along + tau2 * b**2 * (p - squares))
        in_tilt = in_score @ self.tokens
        in_b = omega2 * (miss * mean).sum(-1) + tau2 * b * squares[..., 0]
        count = self.queries[..., 0].numel()
        return in_tilt.flatten(0, 1).mT @ self.queries.flatten(0, 1) / count, in_b.mean()

    def _weights(self, A: Tensor) -> tuple[Tensor, Tensor]:
        """p (n, Q, L) and the softmax averages (n, Q, d)."""
        require_block(self.task, A)
        p = torch.softmax(self.queries @ A.mT @ self.tokens.mT, -1)
        return p, p @ self.tokens

    def _cost(self, miss: Tensor, squares: Tensor) -> Tensor:
        inner = self.task.task_var * miss.square().sum(-1) + self.task.noise_var * squares
        return inner.mean(-1) / 2


def risk_softmax(
    task, A: Float[Tensor, "d d"], b: Tensor | float, length: int, n_prompts: int, *,
    n_queries: int = 8, generator: torch.Generator,
) -> Estimate:  # fmt: skip
    """The risk of softmax attention on prompts of `length` tokens, by Monte Carlo over prompts.

    Weights and noise are averaged exactly; the first order in the scores, whose mean is known, is
    a control variate with a coefficient fitted on the other half of the prompts (no bias). The
    standard error is over n_prompts, 4 or more. Raises ValueError if an argument does not fit.
    Source: ours. See: chapter 9.

    >>> from measureattn.regression import Task
    >>> task, g = Task(torch.eye(2).double()), torch.Generator().manual_seed(0)
    >>> task.risk_softmax(torch.eye(2).double() / 4, 4.0, 1000, 100, generator=g).value < 0.1
    tensor(True)
    """
    if n_prompts < 4:
        raise ValueError(f"n_prompts must be 4 or more for a standard error, got {n_prompts}.")
    P = task.prompt_cov
    known = LinearRisk(task, length).risk(A, b)
    known = known + b**2 * (task.task_var * P.trace() + task.noise_var) / (2 * length)
    losses, controls = [], []
    for n in _batches(n_prompts, length * n_queries):
        batch = PromptRisk.draw(task, length, n, n_queries=n_queries, generator=generator)
        losses.append(batch.losses(A, b))
        controls.append(batch.linear_losses(A, b) - known)
    values = _without_first_order(torch.cat(losses)[:, None], torch.cat(controls)[:, None])
    return _estimate(values[:, 0])


def require_length(length: float) -> float:
    if not length >= 1:
        raise ValueError(f"length must be 1 token or more, got {length}.")
    return length


def require_block(task, A: Tensor) -> None:
    """The block A fits the task's inputs."""
    require_tensor("A", A)
    require_same("A", A, "cov", task.prompt_cov)
    if A.shape != task.prompt_cov.shape:
        raise ValueError(
            f"A must have the shape of cov, {tuple(task.prompt_cov.shape)}, got shape "
            f"{tuple(A.shape)}. Of U it is the block that meets the inputs."
        )


def _bordered(inner: Tensor, across: Tensor, corner: Tensor) -> Tensor:
    return torch.cat([torch.cat([inner, across], 1), torch.cat([across.mT, corner], 1)])


def _batches(n: int, scores: int) -> list[int]:
    """n prompts in parts whose scores fit the working set."""
    size = max(1, WORKING_SET // scores)
    return [min(size, n - done) for done in range(0, n, size)]


def _estimate(values: Tensor) -> Estimate:
    return Estimate(values.mean(), values.std() / math.sqrt(len(values)), len(values))

"""Softmax risks of the blocks (A, b) with the mean over prompts taken exactly, or to first order.

A query x has the tilt A x, the shift g = P A x and the score variance s = (A x).g. Over prompts of
L Gaussian tokens the softmax average m then has E m = (1 - F2) g and, with the exact F and F2 of
`measureattn.concentration.gaussian_error` and Phi = (F - F2)/s,

    E |m - g|^2 = |g|^2 Phi + tr(P) F2,        E sum p_i^2 = F2,

so a query costs 1/2 {omega^2 [b^2 |g|^2 (Phi - 2 F2) + 2 b x.g F2 + |b g - x|^2]
+ b^2 (omega^2 tr P + tau^2) F2}. What is left is a mean over queries.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.polynomial import Chebyshev
from numpy.polynomial.legendre import leggauss
from scipy.optimize import minimize_scalar
from scipy.stats import chi
from torch import Tensor

from measureattn._typing import Float
from measureattn.concentration import gaussian_error
from measureattn.regression.risk import LinearRisk, require_block, require_length

NODES = 32  # a panel of score variances
RADII = 160  # Gauss-Legendre nodes for the size of a query
WIDEST = 0.5  # score variance of the widest query direction from which the 1/L law fails


@dataclass(frozen=True)
class QueryRisk:
    """The risk of softmax attention averaged exactly over prompts, at given queries.

    length   L, 1 or more, of any size;  queries  (N, d) inputs

    Parameters are the blocks (A, b). No prompt is drawn: what is left to chance is the mean over
    the queries, so flows are smooth and sharp at every L, 10^60 included.
    Source: ours. See: chapter 9.

    >>> from measureattn.regression import Task
    >>> task, g = Task(torch.eye(2).double()), torch.Generator().manual_seed(0)
    >>> risk = QueryRisk.draw(task, 100, 1024, generator=g).risk(torch.eye(2).double() / 2, 2.0)
    >>> exact = task.risk_softmax_exact(0.5, 2.0, 100)
    >>> abs(float(risk / exact) - 1) < 0.01
    True
    """

    task: object
    length: float
    queries: Tensor

    @classmethod
    def draw(cls, task, length: float, n: int, *, generator: torch.Generator) -> "QueryRisk":
        """n scrambled Sobol points, made Gaussian: a power of two serves best."""
        seed = int(torch.randint(2**31, (), generator=generator))
        engine = torch.quasirandom.SobolEngine(task.dim_x, scramble=True, seed=seed)
        uniforms = engine.draw(n, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
        factor = torch.linalg.cholesky(task.query_cov)
        return cls(task, length, torch.special.ndtri(uniforms).to(factor) @ factor.mT)

    def losses(self, A: Float[Tensor, "d d"], b: Tensor | float) -> Float[Tensor, "n"]:
        """One a query."""
        require_block(self.task, A)
        P, x = self.task.prompt_cov, self.queries
        omega2, noise = self.task.task_var, self.task.noise_var
        tilt = x @ A.mT
        g = tilt @ P
        f2, phi = _MeanErrors.apply((tilt * g).sum(-1), self.length)
        inner = b**2 * g.square().sum(-1) * (phi - 2 * f2) + 2 * b * (x * g).sum(-1) * f2
        inner = inner + (b * g - x).square().sum(-1)
        return (omega2 * inner + b**2 * (omega2 * P.trace() + noise) * f2) / 2

    def risk(self, A: Float[Tensor, "d d"], b: Tensor | float) -> Float[Tensor, ""]:
        return self.losses(A, b).mean()

    def gradient(self, A: Float[Tensor, "d d"], b: Tensor | float) -> tuple[Tensor, Tensor]:
        """By autograd through the exact derivatives of F and F2."""
        b = torch.as_tensor(b, dtype=A.dtype)
        A, b = A.detach().requires_grad_(), b.detach().requires_grad_()
        in_A, in_b = torch.autograd.grad(self.risk(A, b), (A, b))
        return in_A, in_b


def risk_softmax_exact(
    task, a: Tensor | float, b: Tensor | float, length: float
) -> Float[Tensor, ""]:
    """The risk of softmax attention at A = a S^-1, exact at every L, right to 1e-8 of itself.

    a, b  numbers, or tensors through which the result can be differentiated

    Raises ValueError for a task `as_published`, whose queries lack the prompts' covariance: its
    size and direction do not part. Use `QueryRisk` there and for other A.
    Source: ours. See: chapter 9.

    >>> from measureattn.regression import Task
    >>> S = 0.5 ** (torch.arange(5.0) - torch.arange(5.0)[:, None]).abs().double()
    >>> Task(S, task_var=0.2, noise_var=0.1).risk_softmax_exact(0.3, 2.0, 100)
    tensor(0.1228, dtype=torch.float64)
    """
    _require_matched(task)
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    r, weight = _chi_rule(task.dim_x)
    f2, phi = _MeanErrors.apply((a * r).square(), length)
    q, d = task.task_var * float(task.prompt_cov.trace()), task.dim_x
    miss = b * a - 1
    along = b**2 * (f2 + (a * r).square() * phi) - 2 * b * a * miss * r**2 * f2 + (miss * r) ** 2
    across = b**2 * (q * (1 - 1 / d) + task.noise_var) * f2
    return (weight * (q / d * along + across)).sum() / 2


def risk_softmax_first_order(
    task, A: Float[Tensor, "d d"], b: Tensor | float, length: float
) -> Float[Tensor, ""]:
    """The risk of softmax attention to first order in 1/L, for any A.

    Raises ValueError where the top eigenvalue of the score covariance Q^(1/2) A'P A Q^(1/2) is 1/2
    or more: there the risk falls more slowly than 1/L. Near 1/2 prompts must be very long: compare
    with `risk_softmax_exact` or `QueryRisk`.
    Source: ours, `delta_method` averaged over queries. See: chapter 9.

    >>> from measureattn.regression import Task
    >>> S = 0.5 ** (torch.arange(5.0) - torch.arange(5.0)[:, None]).abs().double()
    >>> task = Task(S, task_var=0.2, noise_var=0.1)
    >>> task.risk_softmax_first_order(0.3 * torch.linalg.inv(S), 2.0, 100)
    tensor(0.1245, dtype=torch.float64)
    """
    require_length(length)
    require_block(task, A)
    P, Q, one = task.prompt_cov, task.query_cov, torch.eye(task.dim_x).to(A)
    factor = torch.linalg.cholesky(Q)
    scores = factor.mT @ A.mT @ P @ A @ factor
    top = float(torch.linalg.eigvalsh(scores)[-1])
    if not top < WIDEST:
        raise ValueError(
            f"the 1/L law needs the eigenvalues of the score covariance Q^(1/2) A'P A Q^(1/2) "
            f"below 1/2; the largest of the {len(A)} is {top:.4g}. Shrink A by more than "
            f"{math.sqrt(2 * top):.3g}, or use risk_softmax_exact or QueryRisk."
        )
    tilted = factor @ torch.linalg.inv(one - 2 * scores) @ factor.mT
    weight = torch.linalg.det(one - 2 * scores).rsqrt()
    omega2, shift = task.task_var, P @ A
    spread = omega2 * (P.trace() + (shift @ tilted @ shift.mT).trace()) + task.noise_var
    bias = omega2 * ((b * shift - one) @ tilted @ shift.mT).trace()
    constant = weight * (b**2 * spread / 2 - b * bias)
    return LinearRisk(task).risk(A, b) + constant / length


def valley_constant(task, s: float) -> float:
    """c(s) of risk = c/L + ... on the valley A = sqrt(s) S^-1, b = 1/sqrt(s), for 0 < s < 1/2.

    On an infinite prompt the whole valley has risk 0. Source: ours. See: chapter 9.

    >>> from measureattn.regression import Task
    >>> round(Task(torch.eye(1).double()).valley_constant(0.25), 4)
    4.2426
    """
    A, b = _valley(task, s)
    return float(risk_softmax_first_order(task, A, b, 1))


def best_tilt(task, length: float | None = None) -> float:
    """The s that is best on the valley A = sqrt(s) S^-1, b = 1/sqrt(s): the score variance there.

    length  L for the exact risk, sought from s = 0.01 to 4; None for the limit of long prompts,
            where s is below 1/2

    Source: ours. See: chapter 9.

    >>> from measureattn.regression import Task
    >>> round(Task(torch.eye(1).double()).best_tilt(), 4)
    0.2324
    """
    if length is None:
        cost, ends = valley_constant, (1e-6, WIDEST - 1e-9)
    else:
        ends = (1e-2, 4.0)

        def cost(task, s):
            return float(risk_softmax_exact(task, s**0.5, s**-0.5, length))

    # by log s: large s, whose errors take the longest to tabulate, are met only where they matter
    found = minimize_scalar(
        lambda x: cost(task, math.exp(x)), bounds=np.log(ends), options={"xatol": 1e-8}
    )
    return math.exp(found.x)


def drift(task, a: float, b: float, length: float) -> float:
    """How fast |A|_F^2 - b^2 moves along softmax's gradient flow, at A = a S^-1: exact.

    2 (b dR/db - a dR/da), which is 0 for linear attention at every L.
    Source: ours. See: chapter 9.

    >>> from measureattn.regression import Task
    >>> task = Task(torch.eye(1).double())
    >>> task.drift(1.0, 1.0, 1000) < 0 < task.drift(0.2, 5.0, 1000)
    True
    """
    a, b = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (a, b))
    in_a, in_b = torch.autograd.grad(risk_softmax_exact(task, a, b, length), (a, b))
    return float((2 * (b * in_b - a * in_a)).detach())


def _valley(task, s: float) -> tuple[Tensor, float]:
    _require_matched(task)
    if not s > 0:
        raise ValueError(f"s must be a score variance above 0, got {s}. Square it?")
    return math.sqrt(s) * torch.linalg.inv(task.prompt_cov), 1 / math.sqrt(s)


def _require_matched(task) -> None:
    if not torch.equal(task.prompt_cov, task.query_cov):
        raise ValueError(
            "this law needs queries with the prompts' covariance, which a task as_published lacks. "
            "Use QueryRisk, or as_published=False."
        )


def _chi_rule(d: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of E f(r), r the norm of d standard normals."""
    reach = math.sqrt(d) + 10
    x, w = leggauss(RADII)
    r = reach * (1 + x) / 2
    return torch.tensor(r), torch.tensor(reach / 2 * w * chi.pdf(r, d))


class _MeanErrors(torch.autograd.Function):
    """(F2, Phi) at score variances s, with their derivatives in s."""

    @staticmethod
    def forward(ctx, s, length):
        values, slopes = _errors(s.double().numpy(force=True), require_length(length))
        ctx.save_for_backward(*(torch.as_tensor(x).to(s) for x in slopes))
        return tuple(torch.as_tensor(x).to(s) for x in values)

    @staticmethod
    def backward(ctx, in_f2, in_phi):
        f2, phi = ctx.saved_tensors
        return in_f2 * f2 + in_phi * phi, None


def _errors(s: np.ndarray, length) -> tuple[np.ndarray, np.ndarray]:
    """Values and slopes, each (2, N), of F2 and Phi, interpolated panel by panel in log."""
    panels = np.ceil(np.log2(np.maximum(s, 1.0)) / 2).astype(int)
    values, slopes = np.empty((2, *s.shape)), np.empty((2, *s.shape))
    for k in np.unique(panels):
        here = panels == k
        for i, (curve, slope) in enumerate(_panel(int(k), length)):
            values[i][here] = np.exp(curve(s[here]))
            slopes[i][here] = values[i][here] * slope(s[here])
    return values, slopes


@functools.lru_cache(maxsize=256)
def _panel(k: int, length) -> list[tuple[Chebyshev, Chebyshev]]:
    """log F2 and log Phi on [4^(k-1), 4^k] (from 0 on for k = 0), with derivatives.

    Both are analytic in s and vary on the scale of s itself, so panels grow with it. Relative
    errors are below 1e-9 up to s = 16, and where s is larger, up to L = 10^5; beyond, below 1e-6.
    """
    domain = [4.0 ** (k - 1) if k else 0.0, 4.0**k]
    nodes = np.cos(np.pi * (np.arange(NODES) + 0.5) / NODES)
    s = domain[0] + (domain[1] - domain[0]) * (1 + nodes) / 2
    f, f2, _ = (x.numpy() for x in gaussian_error(torch.tensor(s), length))
    curves = [Chebyshev.fit(s, np.log(y), NODES - 1, domain=domain) for y in (f2, (f - f2) / s)]
    return [(curve, curve.deriv()) for curve in curves]

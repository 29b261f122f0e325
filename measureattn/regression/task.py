"""The task: tokens (x, w.x + noise), a query x, the answer w.x; its laws and its sampling.

Given w the token law is Gaussian, so the infinite prompt is linear attention, exactly. Training
from the usual start keeps U = diag(A, 0) and V = (0, b): these blocks (A, b) are what
`measureattn.regression.risk` speaks of.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from measureattn._checks import require_finite, require_ndim, require_tensor
from measureattn._typing import Float
from measureattn.measures import Gaussian
from measureattn.regression import risk, softmax
from measureattn.tasks import InContextTask


class Task(InContextTask):
    """In-context linear regression with inputs N(0, S), weights N(0, task_var I), noisy labels.

    cov        S, (d, d), symmetric positive definite
    task_var   omega^2, variance of each weight, above 0
    noise_var  tau^2, variance of the noise on a prompt's labels, 0 or more; targets have none

    as_published takes the law of the authors' public code instead, where the Cholesky factor C of
    S meets the prompts twice and the queries never: inputs N(0, C S C'), queries N(0, I).
    Risks have the factor 1/2. Raises ValueError or TypeError if an argument does not fit.
    Source: section 5, arXiv 2512.11784. See: chapter 8.

    >>> task = Task(torch.eye(2).double(), task_var=0.5)
    >>> task.risk_infinite(torch.eye(2).double(), 0.0)
    tensor(0.5000, dtype=torch.float64)
    """

    def __init__(
        self, cov: Tensor, *, task_var: float = 1.0, noise_var: float = 0.0,
        as_published: bool = False,
    ):  # fmt: skip
        require_tensor("cov", cov)
        require_ndim("cov", cov, 2, "(d, d)")
        require_finite("cov", cov, "Remove it first.")
        if not task_var > 0 or not noise_var >= 0:
            raise ValueError(
                f"task_var must be above 0 and noise_var 0 or more, got {task_var} and "
                f"{noise_var}. They are variances, not standard deviations."
            )
        factor = _cholesky(cov)
        self.dim_x = len(cov)
        self.dim = self.dim_x + 1
        self.task_var, self.noise_var = float(task_var), float(noise_var)
        one = torch.eye(self.dim_x, dtype=cov.dtype, device=cov.device)
        self.prompt_factor = factor @ factor if as_published else factor
        self.query_cov = one if as_published else cov
        self.prompt_cov = self.prompt_factor @ self.prompt_factor.mT if as_published else cov
        self.parameter_law = Gaussian(cov.new_zeros(self.dim_x), task_var * one)

    def factor(self, w: Float[Tensor, "n d"]) -> Float[Tensor, "n D D"]:
        """[[C, 0], [w'C, tau]] with C C' the inputs' covariance: a square root of the token law's.

        It is exact also where the law is singular, without noise.
        """
        top = pad(self.prompt_factor, (0, 1)).expand(len(w), self.dim_x, self.dim)
        last = pad((w @ self.prompt_factor)[:, None, :], (0, 1), value=self.noise_var**0.5)
        return torch.cat([top, last], -2)

    def token_law(self, theta: Float[Tensor, "n p"]) -> Gaussian:
        root = self.factor(theta)
        return Gaussian(root.new_zeros(self.dim), root @ root.mT)

    def query_law(self, theta: Float[Tensor, "n p"]) -> Gaussian:
        return Gaussian(theta.new_zeros(self.dim), pad(self.query_cov, (0, 1, 0, 1)))

    def target(
        self, theta: Float[Tensor, "n p"], z: Float[Tensor, "queries n D"]
    ) -> Float[Tensor, "queries n M"]:
        return (theta * z[..., :-1]).sum(-1, keepdim=True)

    def prompts(
        self, theta: Float[Tensor, "n p"], length: int, *, generator: torch.Generator
    ) -> Float[Tensor, "n L D"]:
        """By `factor`: without noise the labels are w.x to the last digit."""
        shape = (len(theta), length, self.dim)
        normals = torch.randn(shape, generator=generator, dtype=theta.dtype)
        return normals @ self.factor(theta).mT

    def inputs(self, n: int, length: int, *, generator: torch.Generator) -> Tensor:
        """n prompts without their labels, (n, length, d)."""
        shape = (n, length, self.dim_x)
        like = self.prompt_cov
        return torch.randn(shape, generator=generator, dtype=like.dtype) @ self.prompt_factor.mT

    def query_inputs(self, *shape: int, generator: torch.Generator) -> Tensor:
        """Queries without the label's 0, (*shape, d)."""
        normals = torch.randn((*shape, self.dim_x), generator=generator, dtype=self.query_cov.dtype)
        return normals @ torch.linalg.cholesky(self.query_cov).mT

    risk_infinite = risk.risk_infinite
    risk_linear = risk.risk_linear
    risk_one_step = risk.risk_one_step
    risk_bayes = risk.risk_bayes
    risk_softmax = risk.risk_softmax
    risk_softmax_exact = softmax.risk_softmax_exact
    risk_softmax_first_order = softmax.risk_softmax_first_order
    valley_constant = softmax.valley_constant
    best_tilt = softmax.best_tilt
    drift = softmax.drift


def blocks(A: Float[Tensor, "d d"], b: Tensor | float) -> tuple[Tensor, Tensor]:
    """The parameters U = diag(A, 0), (d+1, d+1), and V = (0, b), (1, d+1), of the blocks (A, b).

    Source: Eq. 9, arXiv 2512.11784; V is the last row, the only one that predicts. See: chapter 8.

    >>> blocks(torch.ones(1, 1), 2.0)
    (tensor([[1., 0.],
            [0., 0.]]), tensor([[0., 2.]]))
    """
    last = torch.as_tensor(b, dtype=A.dtype, device=A.device).reshape(1, 1)
    return pad(A, (0, 1, 0, 1)), pad(last, (A.shape[0], 0))


def start(alpha: float, root: Float[Tensor, "d r"]) -> tuple[Tensor, Tensor]:
    """The paper's initial blocks: A = alpha root root', normalised, and b = alpha.

    Balanced (|A|_F = b = alpha) and positive semidefinite, which is why the flow leaves the origin.
    Source: Eq. 9, arXiv 2512.11784. See: chapter 8.

    >>> start(0.5, torch.ones(1, 1))
    (tensor([[0.5000]]), tensor(0.5000))
    """
    A = root @ root.mT
    return alpha * A / torch.linalg.norm(A), torch.tensor(alpha, dtype=A.dtype, device=A.device)


def _cholesky(cov: Tensor) -> Tensor:
    if cov.ndim != 2 or cov.shape[0] != cov.shape[1]:
        raise ValueError(
            f"cov must have shape (d, d), got {tuple(cov.shape)}. A vector of variances goes in as "
            f"torch.diag(variances)."
        )
    values = torch.linalg.eigvalsh(cov)
    slack = 100 * len(cov) * torch.finfo(cov.dtype).eps * cov.abs().max()
    if (cov - cov.mT).abs().max() > slack or not values[0] > slack:
        raise ValueError(
            f"cov must be symmetric positive definite; its smallest eigenvalue is {values[0]:.2g} "
            f"and it differs from its transpose by up to {(cov - cov.mT).abs().max():.2g}. "
            f"Symmetrise it, or restrict the inputs to the space they span."
        )
    return torch.linalg.cholesky(cov)

"""The test error of trained parameters (U, v): exact for linear attention, sampled for softmax.

Trained matrices are not exactly blocks, so the forms of `measureattn.regression.risk` do not apply.
Errors are mean squared errors of a query's noisy label: 2 R + tau^2.
"""

import math

import torch
from torch import Tensor

from measureattn._checks import require_tensor
from measureattn._monte_carlo import Estimate
from measureattn._typing import Float
from measureattn.regression.risk import require_length
from measureattn.regression.samplers import ExactSampler

TOKENS = 2**20  # drawn at once


def mse_linear(
    task, U: Float[Tensor, "*runs D D"], v: Float[Tensor, "*runs 1 D"], length: float
) -> Float[Tensor, "*runs"]:
    """Linear attention's mean squared error on prompts of `length` tokens, exact for any (U, v).

    Given the weights w the prediction's moments are those of a Wishart matrix; what is left is a
    polynomial of degree 4 in w, whose mean a cubature of degree 5 takes exactly.
    Source: ours; the cubature is Stroud's E_n^(r^2) 5-2. See: chapter 10.

    >>> from measureattn.regression.task import Task, blocks
    >>> task, A = Task(torch.eye(2).double()), torch.eye(2).double()
    >>> U, v = blocks(A, 1.0)
    >>> mse_linear(task, U, v, 100), 2 * task.risk_linear(A, 1.0, 100)
    (tensor(0.0600, dtype=torch.float64), tensor(0.0600, dtype=torch.float64))
    """
    require_tensor("U", U)
    require_length(length)
    queries = U[..., :-1] @ task.query_cov
    spread = (queries @ U[..., :-1].mT)[..., None, :, :]  # E a a'
    nodes, probabilities = _weights_cubature(task)
    root = task.factor(nodes)
    law = root @ root.mT
    seen = v[..., None, :, :] @ law  # v'G
    square = ((seen @ spread) * seen).sum((-1, -2))
    trace = (law * spread).sum((-1, -2))
    spare = (seen * v[..., None, :, :]).sum((-1, -2))
    second = square + (square + trace * spare) / length
    cross = ((seen @ queries[..., None, :, :])[..., 0, :] * nodes).sum(-1)
    target = ((nodes @ task.query_cov) * nodes).sum(-1)
    total = second - 2 * cross + target
    return (total * probabilities).sum(-1) + task.noise_var


def mse_softmax(
    task, U: Float[Tensor, "D D"], v: Float[Tensor, "1 D"], length: int, n_prompts: int, *,
    generator: torch.Generator,
) -> Estimate:  # fmt: skip
    """Softmax attention's mean squared error on `n_prompts` fresh prompts, exact in law.

    The query's label noise is not drawn but added as tau^2. The standard error is over prompts.
    Source: ours. See: chapter 10.

    >>> from measureattn.regression.task import Task, blocks
    >>> task, g = Task(torch.eye(2).double()), torch.Generator().manual_seed(0)
    >>> mse_softmax(task, *blocks(torch.eye(2).double() / 4, 0.0), 9, 9, generator=g).n
    9
    """
    require_tensor("U", U)
    losses, left, column = [], n_prompts, v.mT[None]
    while left:
        n = min(left, max(1, TOKENS // length))
        sampler = ExactSampler(task, [length], ["softmax"], batch=n)
        now = sampler.ahead(1, [generator])[0]
        directions = {"softmax": (U @ now["z"], column)}
        mean, _ = sampler.averages(now, directions, [generator])["softmax"]
        target = (now["w"] * now["z"][:, :-1]).sum(-2)
        losses.append(((column * mean).sum(-2) - target).square()[0] + task.noise_var)
        left -= n
    losses = torch.cat(losses)
    return Estimate(losses.mean(), losses.std() / math.sqrt(n_prompts), n_prompts)


def product(U: Float[Tensor, "*runs D D"], v: Float[Tensor, "*runs 1 D"]) -> Tensor:
    """b A, the product of the effective blocks: all that a prediction on long prompts sees.

    Shape (*runs, d, d); A is U's block between inputs, b the weight of v on the label.
    Source: section 6, arXiv 2512.11784. See: chapter 10.

    >>> product(torch.eye(3), torch.tensor([[0.0, 0.0, 2.0]]))
    tensor([[2., 0.],
            [0., 2.]])
    """
    return v[..., -1:] * U[..., :-1, :-1]


def _weights_cubature(task) -> tuple[Tensor, Tensor]:
    """Nodes (n, d) and probabilities with which polynomials of degree 5 in w have exact means."""
    d, like = task.dim_x, task.query_cov
    one = torch.eye(d).to(like)
    near = math.sqrt(d + 2) * torch.cat([one, -one])
    i, j = torch.triu_indices(d, d, 1)
    pairs = [s * one[i] + t * one[j] for s in (1, -1) for t in (1, -1)]
    far = math.sqrt((d + 2) / 2) * torch.cat(pairs)
    nodes = torch.cat([one[:1] * 0, near, far])
    shares = [2 / (d + 2), (4 - d) / (2 * (d + 2) ** 2), 1 / (d + 2) ** 2]
    each = [like.new_full((n,), x) for n, x in zip((1, len(near), len(far)), shares, strict=True)]
    return math.sqrt(task.task_var) * nodes, torch.cat(each)

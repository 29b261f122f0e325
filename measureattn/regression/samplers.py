"""What a step of training needs to know of its prompts: from their tokens, or exactly in law.

Given the weights w a token is F n, n standard normal in D dimensions, F = `Task.factor(w)`. Softmax
attention with tilt a and read-out v asks a prompt for two averages, and linear attention for two,

    softmax   sum p_i z_i        sum p_i (t_i - tbar) z_i       p = softmax(s), tbar = sum p_i t_i
    linear    sum s_i z_i / L    sum t_i z_i / L

with scores s_i = a.z_i and values t_i = v.z_i. The first is the prediction's derivative in v, and
read by v the prediction itself; the second is its derivative in a. `PlainSampler` draws the
tokens. `ExactSampler` draws two normals a token for softmax, whatever the dimension, and none for
linear attention:

- In whitened coordinates n_i = g_i e + h_i f + nu_i, with e, f an orthonormal basis of the span of
  F'a and F'v. Scores and values are combinations of g and h. The nu_i are independent of them, so
  that only their components along g, h, p and p (t - tbar), as vectors of R^L, matter: four fresh
  vectors whatever L. The prompt is replaced by four *pseudo-tokens*.
- Linear attention needs sum n_i n_i' alone, a Wishart matrix: D pseudo-tokens, the columns of
  Bartlett's triangle. On softmax's own prompt it is the four pseudo-tokens and a Wishart matrix
  with L - 4 degrees of freedom in the directions of nu.

Tensors have the batch last: small loops run over the axes of a token, long ones over prompts.
Source: ours; Bartlett (1933) for the Wishart matrix. See: chapter 10.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ACTIVATIONS = ("softmax", "linear")
LOST = 1e-6  # of a squared length, taken for float32's rounding

Directions = dict[str, tuple[Tensor, Tensor]]  # activation: a (runs, D, batch), v (runs, D, 1)
Averages = dict[str, tuple[Tensor, Tensor]]  # activation: its two averages, (runs, D, batch)


class PlainSampler:
    """Tasks, queries and whole prompts: the naive twin of `ExactSampler`.

    lengths      one for each group of `replicates` runs, runs = lengths x replicates
    activations  those that will ask, of the same prompts
    batch        prompts a run

    Source: section 6, arXiv 2512.11784. See: chapter 10.

    >>> from measureattn.regression import Task
    >>> sampler = PlainSampler(Task(torch.eye(2).double()), [9], ["softmax"], batch=5)
    >>> g = [torch.Generator().manual_seed(0)]
    >>> now = sampler.ahead(1, g)[0]
    >>> a, v = torch.zeros(1, 3, 5).double(), torch.ones(1, 3, 1).double()
    >>> mean, moved = sampler.averages(now, {"softmax": (a, v)}, g)["softmax"]
    >>> mean.shape
    torch.Size([1, 3, 5])
    """

    def __init__(
        self, task, lengths: Sequence[int], activations: Sequence[str], *, batch: int,
        replicates: int = 1,
    ):  # fmt: skip
        self.task, self.lengths, self.activations = task, list(lengths), list(activations)
        self.batch, self.replicates = batch, replicates
        self.root = torch.linalg.cholesky(task.query_cov)

    def ahead(self, steps: int, generators: Sequence[torch.Generator]) -> list[dict[str, Tensor]]:
        """For each of `steps` what does not depend on the parameters.

        w (runs, d, batch), queries z = (x, 0) (runs, D, batch), noisy labels (runs, batch).
        generators  one a length; its draws do not depend on the other lengths
        """
        d, task = self.task.dim_x, self.task
        draws = self._normals(steps, (2 * d + 1,), generators)
        w = task.task_var**0.5 * draws[..., :d, :]
        x = self.root @ draws[..., d:-1, :]
        label = (w * x).sum(-2) + task.noise_var**0.5 * draws[..., -1, :]
        z = torch.cat([x, torch.zeros_like(x[..., :1, :])], -2)
        each = zip(w, z, label, strict=True)
        return [dict(zip(("w", "z", "label"), one, strict=True)) for one in each]

    def averages(
        self, now: dict[str, Tensor], directions: Directions, generators: Sequence[torch.Generator]
    ) -> Averages:
        """Each activation's two averages over fresh prompts; `now` is one of what is `ahead`."""
        parts = []
        for i, (length, generator) in enumerate(zip(self.lengths, generators, strict=True)):
            runs = slice(i * self.replicates, (i + 1) * self.replicates)
            shape = (self.replicates, length, self.task.dim, self.batch)
            tokens = torch.randn(shape, generator=generator, device=generator.device)
            tokens = push(self.task, now["w"][runs, None], tokens.to(self.root))
            here = {k: (a[runs], v[runs]) for k, (a, v) in directions.items()}
            parts.append({k: _EXACTLY[k](tokens, a, v, length) for k, (a, v) in here.items()})
        return {
            k: tuple(torch.cat([part[k][j] for part in parts]) for j in range(2))
            for k in directions
        }

    def _normals(
        self, steps: int, shape: Sequence[int], generators: Sequence[torch.Generator]
    ) -> Tensor:
        """(steps, runs, *shape, batch), drawn in float32, which is several times faster."""
        shape = (steps, self.replicates, *shape, self.batch)
        each = [torch.randn(shape, generator=g, device=g.device) for g in generators]
        return torch.cat(each, 1).to(self.root)


class ExactSampler(PlainSampler):
    """The same averages, equal in law, without the tokens; arguments and methods as there.

    Source: ours. See: chapter 10.

    >>> from measureattn.regression import Task
    >>> sampler = ExactSampler(Task(torch.eye(2).double()), [10**9], ["linear"], batch=5)
    >>> g = [torch.Generator().manual_seed(0)]
    >>> now = sampler.ahead(1, g)[0]
    >>> a, v = torch.ones(1, 3, 5).double(), torch.tensor([[[1.0], [1.0], [0.0]]]).double()
    >>> _, second = sampler.averages(now, {"linear": (a, v)}, g)["linear"]
    >>> bool((second[:, :2] - 1).abs().max() < 1e-3)  # E z z' v = (1, 1, w.1)
    True
    """

    def ahead(self, steps: int, generators: Sequence[torch.Generator]) -> list[dict[str, Tensor]]:
        now, D = super().ahead(steps, generators), self.task.dim
        spare = {}
        if "softmax" in self.activations:
            spare["fresh"] = self._normals(steps, (4, D), generators)
        if "linear" in self.activations:
            spare["columns"] = self._bartlett(steps, generators)
        if self.activations == ["linear"]:  # nothing else asks: finish the pseudo-tokens
            w = torch.stack([one["w"] for one in now])[:, :, None]
            scale = self._each_run(self.lengths).rsqrt()[:, None, None, None]
            spare["columns"] = push(self.task, w, spare["columns"]) * scale
        return [one | {k: x[i] for k, x in spare.items()} for i, one in enumerate(now)]

    def averages(
        self, now: dict[str, Tensor], directions: Directions, generators: Sequence[torch.Generator]
    ) -> Averages:
        if "softmax" not in directions:
            return {"linear": _linear(now["columns"], *directions["linear"], 1)}
        found, w = {}, now["w"]
        pulled = {k: [pull(self.task, w, x) for x in pair] for k, pair in directions.items()}
        tokens, weights, basis = self._pseudo_tokens(now, *pulled["softmax"], generators)
        found["softmax"] = (weights[:, :, :, None] * tokens[:, None]).sum(2).unbind(1)
        if "linear" in directions:
            tokens = torch.cat([tokens, _off(now["columns"], basis)], 1)
            length = self._each_run(self.lengths)[:, None, None]
            found["linear"] = _linear(tokens, *pulled["linear"], length)
        return {k: tuple(push(self.task, w, x) for x in pair) for k, pair in found.items()}

    def _pseudo_tokens(
        self, now: dict[str, Tensor], a: Tensor, v: Tensor, generators: Sequence[torch.Generator]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Four tokens (runs, 4, D, batch), the weights p and p (t - tbar) on them (runs, 2, 4,
        batch), and the basis (e, f), each (runs, D, batch)."""
        e, score = _unit(a, a)
        along = (v * e).sum(-2, keepdim=True)
        rest = v - along * e
        f, across = _unit(rest - (rest * e).sum(-2, keepdim=True) * e, v)
        scales = torch.cat([score, along, across], -2).float()
        each = zip(scales.split(self.replicates), self.lengths, generators, strict=True)
        root = _cholesky(torch.cat([_gram(*one) for one in each]).to(a))
        tokens = root[:, 0, :, None] * e[:, None] + root[:, 1, :, None] * f[:, None]
        tokens = tokens + _off(now["fresh"], (e, f))
        if min(self.lengths) < 4:  # L < 4 tokens span L directions only
            exists = torch.arange(4).to(self.root) < self._each_run(self.lengths)[:, None]
            tokens = tokens * exists[..., None, None]
        return tokens, root[:, 2:], (e, f)

    def _bartlett(self, steps: int, generators: Sequence[torch.Generator]) -> Tensor:
        """Columns (steps, runs, D, D, batch) of a triangle T with T T' Wishart, identity scale.

        It has L degrees of freedom, less the four that softmax has used; with fewer than D the
        triangle is a trapezium, and the columns that are missing are 0.
        """
        D, used = self.task.dim, 4 if "softmax" in self.activations else 0
        left = (self._each_run(self.lengths) - used)[:, None] - torch.arange(D).to(self.root)
        shape = (steps, self.replicates, D, self.batch)
        halves = left.clamp_min(1).split(self.replicates)
        chi = [
            torch._standard_gamma((half[..., None] / 2).expand(shape).contiguous(), generator=g)
            for half, g in zip(halves, generators, strict=True)
        ]
        columns = self._normals(steps, (D, D), generators)
        columns *= torch.ones(D, D).to(columns).triu(1)[..., None]
        columns.diagonal(dim1=2, dim2=3).copy_((2 * torch.cat(chi, 1)).sqrt_().mT)
        if (left <= 0).any():
            columns *= (left > 0)[..., None, None]
        return columns

    def _each_run(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor(lengths).to(self.root).repeat_interleave(self.replicates)


def pull(task, w: Tensor, a: Tensor) -> Tensor:
    """F'a for w (..., d, batch), a (..., D, batch or 1): a token F n meets a as n meets F'a.

    See: chapter 10.

    >>> from measureattn.regression import Task
    >>> pull(Task(torch.eye(1).double()), torch.ones(1, 1).double(), torch.ones(2, 1).double())
    tensor([[2.],
            [0.]], dtype=torch.float64)
    """
    inputs = task.prompt_factor.mT @ (a[..., :-1, :] + a[..., -1:, :] * w)
    label = (task.noise_var**0.5 * a[..., -1:, :]).expand_as(inputs[..., :1, :])
    return torch.cat([inputs, label], -2)


def push(task, w: Tensor, n: Tensor) -> Tensor:
    """F n for w (..., d, batch), n (..., D, batch): the tokens of standard normals.

    See: chapter 10.

    >>> from measureattn.regression import Task
    >>> push(Task(torch.eye(1).double()), torch.ones(1, 1).double(), torch.ones(2, 1).double())
    tensor([[1.],
            [1.]], dtype=torch.float64)
    """
    x = task.prompt_factor @ n[..., :-1, :]
    label = (w * x).sum(-2, keepdim=True) + task.noise_var**0.5 * n[..., -1:, :]
    return torch.cat([x, label], -2)


def _softmax(tokens: Tensor, a: Tensor, v: Tensor, length) -> tuple[Tensor, Tensor]:
    p = torch.softmax((tokens * a[:, None]).sum(-2), 1)
    t = (tokens * v[:, None]).sum(-2)
    q = p * (t - (p * t).sum(1, keepdim=True))
    return (p[:, :, None] * tokens).sum(1), (q[:, :, None] * tokens).sum(1)


def _linear(tokens: Tensor, a: Tensor, v: Tensor, length) -> tuple[Tensor, Tensor]:
    s, t = ((tokens * x[:, None]).sum(-2, keepdim=True) for x in (a, v))
    return (s * tokens).sum(1) / length, (t * tokens).sum(1) / length


_EXACTLY = {"softmax": _softmax, "linear": _linear}


def _gram(scale: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Inner products over the tokens of g, h, p and p (t - tbar), (replicates, 4, 4, batch)."""
    batch = scale.shape[-1]
    score, along, across = scale.transpose(0, 1).reshape(3, -1, 1)
    vectors = torch.empty(4, len(score), length, device=scale.device)
    g, h, p, q = vectors
    vectors[:2].normal_(generator=generator)
    torch.softmax(score * g, -1, out=p)
    torch.mul(along, g, out=q).addcmul_(across, h)
    q.sub_((p * q).sum(-1, keepdim=True)).mul_(p)
    gram = torch.bmm(vectors.transpose(0, 1), vectors.permute(1, 2, 0))
    return gram.reshape(-1, batch, 4, 4).movedim(1, -1)


def _cholesky(gram: Tensor) -> Tensor:
    """Lower triangle (runs, 4, 4, batch); a vector in the span of those before it adds nothing."""
    columns, left = [], gram.contiguous()
    least = LOST * left.diagonal(dim1=1, dim2=2).mT
    for k in range(4):
        pivot = left[:, k, k]
        scale = torch.where(pivot > least[:, k], pivot, torch.inf).rsqrt()
        column = left[:, :, k] * scale[:, None]
        columns.append(column)
        left = left - column[:, :, None] * column[:, None]
    return torch.stack(columns, 2)


def _unit(x: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """x / |x| and |x|, or zeros where x is 0 but for the rounding of `like`."""
    size, least = ((y * y).sum(-2, keepdim=True) for y in (x, like))
    inverse = torch.where(size > 1e-20 * least, size, torch.inf).rsqrt()
    return x * inverse, size * inverse


def _off(x: Tensor, basis: tuple[Tensor, Tensor]) -> Tensor:
    """Tokens x (runs, k, D, batch) less their parts along e and f."""
    e, f = (one[:, None] for one in basis)
    return x - e * (x * e).sum(-2, keepdim=True) - f * (x * f).sum(-2, keepdim=True)

"""The mergeable state of an empirical measure at given tilts.

A prompt is a mixture of its chunks, and the log-MGF of a mixture is the weighted log-mean-exp of
the log-MGFs of its parts. So a prompt of any length can be read chunk by chunk, in any order and
on any number of machines, and the parts merged: that is all this module does. It works on plain
tensors and knows nothing of measures or attention.

    tokens       (*batch, L, D)         L tokens of dimension D
    log_weights  (*batch, L)            not normalised; -inf is padding; None means equal weights
    a            (*query, *batch, D)    the tilts, broadcast against the batch axes of the tokens
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from measureattn._checks import FLOATS, require_broadcast, values_visible
from measureattn._typing import Float

CHUNK = 10_000  # longer sums in float32 lose the digits that concentration errors live in
BUDGET = 2**24  # numbers held at once by one chunk's largest intermediate


@dataclass(frozen=True)
class TiltedSums:
    """What a set of weighted tokens contributes at the tilts `a`, (*query, *batch, D).

    log_total  log of the total weight                                    (*query, *batch)
    log_mgf    log of the weighted mean of exp(a.x), kappa(a)             (*query, *batch)
    mean       mean under the tilted weights                              (*query, *batch, D)
    cov        covariance under the tilted weights, or None if not asked  (*query, *batch, D, D)

    Source: section 2, arXiv 2512.11784 (rephrased). See: chapter 1.

    >>> state = TiltedSums.empty(torch.zeros(1)).update(torch.tensor([[1.0], [2.0], [6.0]]))
    >>> state.mean
    tensor([3.], dtype=torch.float64)
    """

    a: Float[Tensor, "*shape D"]
    log_total: Float[Tensor, "*shape"]
    log_mgf: Float[Tensor, "*shape"]
    mean: Float[Tensor, "*shape D"]
    cov: Float[Tensor, "*shape D D"] | None

    @classmethod
    def empty(
        cls, a: Tensor, *, with_cov: bool = False, accumulate: torch.dtype = torch.float64
    ) -> "TiltedSums":
        """The state of no tokens at all, at the tilts a (*query, *batch, D).

        `accumulate` is the dtype in which chunks are merged, float64 unless told.
        """
        if accumulate not in FLOATS:
            raise TypeError(
                f"accumulate must be torch.float32 or torch.float64, got {accumulate}: a running "
                f"sum in half precision overflows after 65,504 equal weights. Use torch.float64."
            )
        shape, dim = a.shape[:-1], a.shape[-1]
        like = dict(dtype=accumulate, device=a.device)
        cov = torch.zeros(*shape, dim, dim, **like) if with_cov else None
        log_total = torch.full(shape, -torch.inf, **like)
        mgf, mean = torch.zeros(shape, **like), torch.zeros(*shape, dim, **like)
        return cls(a, log_total, mgf, mean, cov)

    def update(self, tokens: Tensor, log_weights: Tensor | None = None) -> "TiltedSums":
        """The state with the tokens (*batch, L, D) added; L may be 0."""
        length = tokens.shape[-2]
        shape, batch = self.a.shape[:-1], tokens.shape[:-2]
        if require_broadcast("tokens", batch, "the tilts", shape) != shape:
            raise ValueError(
                f"the tilts, shape {tuple(self.a.shape)}, must already be broadcast to "
                f"(*query, *batch, D) for tokens of shape {tuple(tokens.shape)}. Expand them first."
            )
        wide = self.a.numel() if self.cov is not None else self.a[..., 0].numel()
        size = max(64, min(CHUNK, BUDGET // max(1, wide)))
        state = self
        for start in range(0, length, size):
            part = slice(start, start + size)
            weights = None if log_weights is None else log_weights[..., part]
            chunk = _chunk_sums(self.a, tokens[..., part, :], weights, self.cov is not None)
            state = state.merge(chunk)
        return state

    def merge(self, other: "TiltedSums") -> "TiltedSums":
        """The state of both sets of tokens together; both must be asked at the same tilts."""
        if self.a is not other.a and not _same_tilts(self.a, other.a):
            raise ValueError(
                f"states can only be merged at the same tilts, and these differ (shapes "
                f"{tuple(self.a.shape)} and {tuple(other.a.shape)}). Build both from one tensor a."
            )
        dtype = self.log_mgf.dtype
        log_totals = torch.stack([self.log_total, other.log_total.to(dtype)], -1)
        mgfs = torch.stack([self.log_mgf, other.log_mgf.to(dtype)], -1)
        log_total, log_shares = normalise(log_totals)
        log_mgf, shares = log_mean_exp(mgfs, log_shares)
        step = other.mean.to(dtype) - self.mean
        first, second = shares[..., 0, None], shares[..., 1, None]
        mean = self.mean + second * step
        cov = None
        if self.cov is not None:
            within = first[..., None] * self.cov + second[..., None] * other.cov.to(dtype)
            cov = within + (first * second * step)[..., :, None] * step[..., None, :]
        return replace(self, log_total=log_total, log_mgf=log_mgf, mean=mean, cov=cov)


def _same_tilts(a: Tensor, b: Tensor) -> bool:
    """Equal shapes and, where they can be seen, equal values."""
    return a.shape == b.shape and (not values_visible(a) or torch.equal(a, b))


def normalise(log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """(log of the total, logs of the shares) along the last axis; all -inf gives -inf and -inf."""
    log_total, _ = _log_sum_exp(log_weights)
    some = torch.isfinite(log_total)[..., None]
    shift = torch.where(some, log_total[..., None], torch.zeros_like(log_total[..., None]))
    return log_total, log_weights - shift


def log_mean_exp(scores: Tensor, log_shares: Tensor) -> tuple[Tensor, Tensor]:
    """(log sum_i p_i exp(s_i), tilted shares p_i exp(s_i) / sum) along the last axis.

    The shares p_i = exp(log_shares) sum to one, or are all zero: then both results are 0. Scores
    of share 0 do not count. Where all scores are small the logarithm is taken by log1p, so that
    kappa keeps its *relative* accuracy near zero.
    """
    far, tilted = _log_sum_exp(scores + log_shares)
    seen = torch.where(log_shares > -torch.inf, scores, torch.zeros_like(scores))
    near = seen.detach().abs().amax(-1) <= 1
    seen, shares = seen.clamp(-1, 1), log_shares.exp()
    # the scores of a centred law cancel: summed on their own they do not bury what is left
    excess = (shares * seen).sum(-1) + (shares * _expm1_beyond_linear(seen)).sum(-1)
    return torch.where(near, excess.log1p(), far), tilted


def _expm1_beyond_linear(x: Tensor) -> Tensor:
    """exp(x) - 1 - x, with all its digits near 0, where the subtraction would lose them."""
    series = x.square() / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6))))
    return torch.where(x.detach().abs() < 2**-8, series, x.expm1() - x)


def _log_sum_exp(x: Tensor) -> tuple[Tensor, Tensor]:
    """(logsumexp, softmax) along the last axis; unlike torch's, all -inf gives (-inf, 0)."""
    peak = x.detach().amax(-1, keepdim=True)
    peak = torch.where(peak > -torch.inf, peak, torch.zeros_like(peak))
    weights = torch.exp(x - peak)
    total = weights.sum(-1, keepdim=True)
    safe = torch.where(total > 0, total, torch.ones_like(total))
    log_total = torch.where(total > 0, peak + safe.log(), torch.full_like(total, -torch.inf))
    return log_total[..., 0], weights / safe


def fold_queries(a: Tensor, batch_shape: torch.Size) -> tuple[Tensor, torch.Size]:
    """a (*query, *batch, D) as (*batch, Q, D), and the shape (*query, *batch) to unfold to."""
    shape = torch.broadcast_shapes(a.shape[:-1], batch_shape)
    query = shape[: len(shape) - len(batch_shape)]
    batch = shape[len(query) :]
    a = a.expand(*shape, a.shape[-1]).reshape(query.numel(), *batch, a.shape[-1])
    return a.movedim(0, -2), shape


def unfold_queries(x: Tensor, shape: torch.Size, n_batch: int) -> Tensor:
    """x (*batch, Q, ...) as (*query, *batch, ...): the inverse of `fold_queries`."""
    return x.movedim(n_batch, 0).reshape(shape + x.shape[n_batch + 1 :])


def _chunk_sums(a: Tensor, tokens: Tensor, log_weights: Tensor | None, with_cov: bool):
    """The state of one chunk, in the tokens' own dtype: the plain way."""
    n_batch = tokens.ndim - 2
    folded, shape = fold_queries(a, tokens.shape[:-2])
    scores = folded @ tokens.mT
    if log_weights is None:
        log_weights = scores.new_zeros(tokens.shape[-2])
    log_total, log_shares = normalise(log_weights)
    log_mgf, tilted = log_mean_exp(scores, log_shares[..., None, :])
    mean = tilted @ tokens
    cov = None
    if with_cov:
        centred = tokens[..., None, :, :] - mean[..., None, :]
        cov = unfold_queries((tilted[..., None] * centred).mT @ centred, shape, n_batch)
    log_total = log_total[..., None].expand(log_mgf.shape)
    log_total, log_mgf, mean = (
        unfold_queries(x, shape, n_batch) for x in (log_total, log_mgf, mean)
    )
    return TiltedSums(a, log_total, log_mgf, mean, cov)

"""The mergeable state of an empirical measure at given tilts.

A prompt is a mixture of its chunks, and the log-MGF of a mixture is the weighted log-mean-exp of
the log-MGFs of its parts. So a prompt of any length can be read chunk by chunk, in any order and
on any number of machines, and the parts merged: that is all this module does. It works on plain
tensors and knows nothing of measures or attention.

There is a plain way, which every derivative and every transform of torch understands, and a fast
way: chunks of the prompt go on the heads axis of torch's fused attention kernel, whose
log-sum-exps merge the chunks in float64. One fused call over a long prompt is slower and, in
float32 on some processors, loses the digits that concentration errors live in (chapter 6).

    tokens       (*batch, L, D)         L tokens of dimension D
    log_weights  (*batch, L)            not normalised; -inf is padding; None means equal weights
    a            (*query, *batch, D)    the tilts, broadcast against the batch axes of the tokens
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from measureattn._checks import FLOATS, require_broadcast, values_visible
from measureattn._typing import Float

CHUNK = 8192  # longer sums in float32 lose the digits that concentration errors live in
BUDGET = 2**22  # numbers held at once by one chunk's largest intermediate
WORTH_IT = 2**16  # scores below which the plain way is as fast
PADDING = -1e30  # stands in for -inf, which the fused kernel turns into NaN in an empty chunk


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
        """The state with the tokens (*batch, L, D) added; L may be 0.

        Where it pays and is right, through the fused kernel: log_mgf is then exact to rounding of
        log L rather than of itself. Everywhere else `update_plainly`.
        """
        shape, batch = self.a.shape[:-1], tokens.shape[:-2]
        if require_broadcast("tokens", batch, "the tilts", shape) != shape:
            raise ValueError(
                f"the tilts, shape {tuple(self.a.shape)}, must already be broadcast to "
                f"(*query, *batch, D) for tokens of shape {tuple(tokens.shape)}. Expand them first."
            )
        if self.cov is None and can_fuse(self.a, tokens):
            length = tokens.shape[-2]
            body = length - length % CHUNK
            state = self
            for part in (slice(0, body), slice(body, length)):
                weights = None if log_weights is None else log_weights[..., part]
                if part.stop > part.start:
                    state = state.merge(_fused_sums(self.a, tokens[..., part, :], weights))
            return state
        return self.update_plainly(tokens, log_weights)

    def update_plainly(self, tokens: Tensor, log_weights: Tensor | None = None) -> "TiltedSums":
        """`update` without the fused kernel: its twin, and the way to keep log_mgf's relative
        accuracy near zero."""
        wide = self.a.numel() if self.cov is not None else self.a[..., 0].numel()
        size = max(64, min(CHUNK, 4 * BUDGET // max(1, wide)))
        state = self
        for start in range(0, tokens.shape[-2], size):
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


def can_fuse(a: Tensor, tokens: Tensor) -> bool:
    """Whether the fused kernel can be used here and pays; if not, the plain way is taken."""
    return (
        tokens.device.type == "cpu"
        and values_visible(tokens)
        and a.dtype == tokens.dtype
        and a.shape[-1] == tokens.shape[-1]
        and a.shape[a.ndim - tokens.ndim + 1 : -1] == tokens.shape[:-2]
        and a[..., 0].numel() * tokens.shape[-2] >= WORTH_IT
        and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    )


def _fused_sums(a: Tensor, tokens: Tensor, log_weights: Tensor | None) -> TiltedSums:
    """The state of tokens (*batch, L, D), where L is at most CHUNK or a multiple of it."""
    n_batch = tokens.ndim - 2
    folded, shape = fold_queries(a, tokens.shape[:-2])
    if log_weights is None:
        weights, log_total = None, torch.tensor(float(tokens.shape[-2])).double().log()
    else:
        weights = log_weights.expand(tokens.shape[:-1])
        log_total, _ = normalise(weights.double())
        log_total, weights = log_total[..., None], weights.clamp(min=PADDING)
    mean, log_sum = _Fused.apply(folded, tokens, weights)
    log_total = log_total.to(a.device).expand(log_sum.shape)
    some = log_sum > PADDING / 2
    log_mgf = torch.where(some, log_sum - log_total, torch.zeros_like(log_sum))
    mean = torch.where(some[..., None], mean, torch.zeros_like(mean))
    parts = (unfold_queries(x, shape, n_batch) for x in (log_total, log_mgf, mean))
    return TiltedSums(a, *parts, None)


class _Fused(torch.autograd.Function):
    """(tilted mean, log-sum-exp of the scores) in float64, with their closed-form derivative.

    The kernel's own backward pass knows nothing of its log-sum-exp: merging chunks through it
    would be silently wrong.
    """

    @staticmethod
    def forward(ctx, a, tokens, log_weights):
        ctx.save_for_backward(a, tokens, log_weights)
        *batch, length, dim = tokens.shape
        size = min(length, CHUNK)
        keys = tokens.reshape(-1, length // size, size, dim)
        queries = a.reshape(len(keys), 1, a.shape[-2], dim).expand(-1, keys.shape[1], -1, -1)
        bias = None
        if log_weights is not None:
            bias = log_weights.reshape(len(keys), -1, 1, size)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        means, log_sums = [], []
        group = max(1, BUDGET // max(1, queries[:, 0].numel()))
        for part in (slice(i, i + group) for i in range(0, keys.shape[1], group)):
            mask = None if bias is None else bias[:, part].expand(-1, -1, a.shape[-2], -1)
            key = keys[:, part]
            mean, log_sum = fused(queries[:, part], key, key, attn_mask=mask, scale=1.0)
            means.append(mean.double())
            log_sums.append(log_sum.double())
        log_sum = torch.cat(log_sums, 1)
        total, shares = _log_sum_exp(log_sum.movedim(1, -1))
        mean = torch.einsum("bqh,bhqd->bqd", shares, torch.cat(means, 1))
        return mean.reshape(*batch, -1, dim), total.reshape(*batch, -1)

    @staticmethod
    def backward(ctx, grad_mean, grad_log_sum):
        """One more pass over the chunks: p_i is the softmax weight, c_i = g.(x_i - m) + h."""
        a, tokens, log_weights = ctx.saved_tensors
        mean, log_sum = _Fused.apply(a, tokens, log_weights)
        grad_a = torch.zeros_like(mean)
        token_grads, weight_grads = [], []
        offset = (grad_mean * mean).sum(-1) - grad_log_sum
        for start in range(0, tokens.shape[-2], CHUNK):
            part = slice(start, start + CHUNK)
            x = tokens[..., part, :].double()
            scores = a.double() @ x.mT
            if log_weights is not None:
                scores = scores + log_weights[..., None, part].double()
            p = torch.exp(scores - log_sum[..., None])
            pull = p * (grad_mean @ x.mT - offset[..., None])
            grad_a = grad_a + pull @ x
            token_grads.append(p.mT @ grad_mean + pull.mT @ a.double())
            weight_grads.append(pull.sum(-2))
        grad_tokens = torch.cat(token_grads, -2).to(tokens.dtype)
        if log_weights is None:
            return grad_a.to(a.dtype), grad_tokens, None
        return grad_a.to(a.dtype), grad_tokens, torch.cat(weight_grads, -1).to(log_weights.dtype)

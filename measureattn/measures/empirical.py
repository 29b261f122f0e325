"""The empirical measure of a prompt: softmax attention as everybody knows it."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from measureattn._checks import (
    require_finite,
    require_ndim,
    require_same,
    require_tensor,
    values_visible,
)
from measureattn._typing import Float
from measureattn.measures.base import Measure, draw, require_affine
from measureattn.streaming import (
    CHUNK,
    TiltedSums,
    can_fuse,
    fold_queries,
    unfold_queries,
)


class Empirical(Measure):
    """The weighted mean of point masses at the tokens of a prompt.

    tokens       (*batch, L, D), L >= 1
    log_weights  (*batch, L), normalised inside; -inf is padding, so prompts of unequal length fit
                 in one batch; None means equal weights

    Its tilted mean is the softmax average sum_i p_i x_i, p = softmax(log_weights + tokens a), and
    its log-MGF is the log-sum-exp of the scores minus log L. Chunks of at most 10,000 tokens are
    summed in the tokens' dtype and merged in float64; results come back in the tokens' dtype.
    Raises ValueError or TypeError if shapes, dtypes or values do not fit.

    Source: section 2, arXiv 2512.11784. See: chapter 1.

    >>> Empirical(torch.tensor([[0.0], [1.0]])).tilted_mean(torch.tensor([0.0]))
    tensor([0.5000])
    """

    def __init__(
        self, tokens: Tensor, log_weights: Tensor | None = None, *, validate_args: bool = True
    ):
        require_tensor("tokens", tokens)
        require_ndim("tokens", tokens, 2, "(*batch, L, D)")
        *batch, length, dim = tokens.shape
        if length == 0:
            raise ValueError(
                f"a prompt needs at least one token, got shape {tuple(tokens.shape)}. Drop the "
                f"empty prompt, or pad a ragged batch and give the padding log_weights of -inf."
            )
        super().__init__(dim, torch.Size(batch), validate_args=validate_args)
        if validate_args:
            require_finite("tokens", tokens, "Drop the token, or set it to 0 with log weight -inf.")
        if log_weights is not None:
            log_weights = _checked_log_weights(log_weights, tokens, validate_args)
        self.tokens = tokens
        self.log_weights = log_weights

    _tensors: ClassVar = {"tokens": 2, "log_weights": 1}

    def log_mgf(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape"]:
        state = self._sums(a)
        # near zero the fused kernel's log-sum-exp, less log L, keeps no relative accuracy
        if can_fuse(state.a, self.tokens) and (state.log_mgf.abs() < 0.01).any():
            state = TiltedSums.empty(state.a).update_plainly(self.tokens, self.log_weights)
        return state.log_mgf.to(self.tokens.dtype)

    def tilted_mean(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D"]:
        return self._sums(a).mean.to(self.tokens.dtype)

    def tilted_cov(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D D"]:
        return self._sums(a, with_cov=True).cov.to(self.tokens.dtype)

    def tilted_cov_product(
        self, a: Float[Tensor, "*tilt D"], w: Float[Tensor, "*direction D"]
    ) -> Float[Tensor, "*shape D"]:
        a, w = self._query_and_direction(a, w)
        # Cov(x, w.x) weighs the tokens by p_i (w.x_i - w.m): the mean m needs a pass of its own
        state = self._sums(a)
        (a, shape), (w, _), (mean, _) = (
            fold_queries(x, self.batch_shape) for x in (a, w, state.mean.to(a.dtype))
        )
        log_mgf, _ = fold_queries(state.log_mgf.to(a.dtype)[..., None], self.batch_shape)
        total = torch.zeros_like(mean, dtype=state.mean.dtype)
        for tokens, log_weights in self._chunks():
            tilted = torch.exp(a @ tokens.mT + log_weights[..., None, :] - log_mgf)
            centred = tilted * (w @ tokens.mT - (w * mean).sum(-1, keepdim=True))
            total = total + centred @ tokens - centred.sum(-1, keepdim=True) * mean
        return unfold_queries(total, shape, len(self.batch_shape)).to(self.tokens.dtype)

    def pushforward(
        self, A: Float[Tensor, "*matrix M D"], b: Float[Tensor, "*offset M"] | None = None
    ) -> "Empirical":
        A, b = require_affine(self, A, b)
        tokens = self.tokens @ A.mT + b[..., None, :]
        log_weights = self.log_weights
        if log_weights is not None:
            log_weights = log_weights.expand(tokens.shape[:-1])
        return Empirical(tokens, log_weights, validate_args=self.validate_args)

    def sample(
        self, n: int, *, generator: torch.Generator, dtype=None, device=None
    ) -> Float[Tensor, "*batch n D"]:
        """n tokens a member, drawn with replacement by weight."""
        like = self._sampling(n, generator, dtype, device) | {"dtype": torch.float64}
        *batch, length, dim = self.tokens.shape
        uniforms = draw(torch.rand, (*batch, n), **like)
        if self.log_weights is None:
            index = (uniforms * length).long().clamp(max=length - 1)
        else:
            # inverse CDF: torch.multinomial stops at 2**24 categories
            steps = self.log_weights.double().exp().cumsum(-1)
            index = torch.searchsorted(steps, uniforms * steps[..., -1:], right=True)
            last = (self.log_weights > -torch.inf).long().cumsum(-1).argmax(-1, keepdim=True)
            index = torch.minimum(index, last)
        return self.tokens.gather(-2, index[..., None].expand(*batch, n, dim))

    def _chunks(self):
        """(tokens, normalised log weights), at most CHUNK tokens at a time."""
        length = self.tokens.shape[-2]
        for start in range(0, length, CHUNK):
            tokens = self.tokens[..., start : start + CHUNK, :]
            if self.log_weights is None:
                yield tokens, tokens.new_full(tokens.shape[-2:-1], -math.log(length))
            else:
                yield tokens, self.log_weights[..., start : start + CHUNK]

    def _sums(self, a: Tensor, with_cov: bool = False) -> TiltedSums:
        state = TiltedSums.empty(self._query(a), with_cov=with_cov)
        return state.update(self.tokens, self.log_weights)

    def __repr__(self) -> str:
        length = self.tokens.shape[-2]
        return f"Empirical(length={length}, dim={self.dim}, batch_shape={tuple(self.batch_shape)})"


def Discrete(
    points: Float[Tensor, "*batch L D"], weights: Float[Tensor, "*batch L"], *,
    validate_args: bool = True,
) -> Empirical:
    """The law with mass weights[i] at points[i]: an `Empirical` measure given by its weights.

    points   (*batch, L, D)
    weights  (*batch, L), 0 or more, not all 0; normalised inside

    Raises ValueError or TypeError if shapes, dtypes or values do not fit.
    Source: section 2, arXiv 2512.11784. See: chapter 1.

    >>> coin = Discrete(torch.tensor([[-1.0], [1.0]]), torch.tensor([0.5, 0.5]))
    >>> coin.tilted_mean(torch.tensor([2.0]))
    tensor([0.9640])
    """
    require_tensor("weights", weights)
    if validate_args:
        require_finite("weights", weights, "Remove it first.")
        if values_visible(weights) and (weights < 0).any():
            where = tuple((weights < 0).nonzero()[0].tolist())
            raise ValueError(
                f"weights must be 0 or more; found {weights[where].item()} at index {where} "
                f"(shape {tuple(weights.shape)}). A signed measure is not a token law."
            )
    return Empirical(points, weights.log(), validate_args=validate_args)


def _checked_log_weights(log_weights: Tensor, tokens: Tensor, validate_args: bool) -> Tensor:
    """Log weights (*batch, L) that fit the tokens and add up to one."""
    require_tensor("log_weights", log_weights)
    require_same("log_weights", log_weights, "tokens", tokens)
    if log_weights.shape != tokens.shape[:-1]:
        raise ValueError(
            f"log_weights must have one entry a token, shape {tuple(tokens.shape[:-1])}, got shape "
            f"{tuple(log_weights.shape)}. Expand it to the tokens' batch first."
        )
    if validate_args and values_visible(log_weights):
        bad = torch.isnan(log_weights) | (log_weights == torch.inf)
        if bad.any():
            where = tuple(bad.nonzero()[0].tolist())
            raise ValueError(
                f"log_weights must be finite or -inf; found {log_weights[where].item()} at index "
                f"{where} (shape {tuple(log_weights.shape)}). Use -inf for padding."
            )
        empty = (log_weights == -torch.inf).all(-1)
        if empty.any():
            where = tuple(empty.nonzero()[0].tolist())
            raise ValueError(
                f"every prompt needs at least one token of positive weight; prompt {where} has "
                f"none (shape {tuple(log_weights.shape)}). Drop it from the batch."
            )
    return log_weights - log_weights.logsumexp(-1, keepdim=True)

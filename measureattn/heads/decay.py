"""How the error of a prompt falls with its length: measured on prompts drawn from the pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from measureattn._monte_carlo import _require_lengths, _without_first_order
from measureattn._typing import Float
from measureattn.concentration import Estimate
from measureattn.heads.pool import Pool
from measureattn.streaming import TiltedSums

QUERIES = 32  # a head: prompts, not queries, decide the standard error
NUMBERS = 2**22  # of the prompts' tokens held at once


@dataclass(frozen=True)
class Decay:
    """L times the mean squared error of prompts of L tokens, beside the constant of the 1/L law.

    lengths    the prompt lengths L
    measured   Estimate (H, lengths), standard errors over prompts; squared units of the values
    predicted  (H), by the delta method on the pool: no fit
    n_queries  how many of the report's queries were used, its first ones

    Source: ours, the delta method. See: chapter 11.

    >>> from measureattn.heads import measure_heads
    >>> g = torch.Generator().manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 2_000, 2, generator=g)
    >>> decay = measure_heads(q / 4, k, k, lengths=[1_000], generator=g).decay
    >>> 0.8 < float(decay.measured.value / decay.predicted) < 1.2
    True
    """

    lengths: tuple[int, ...]
    measured: Estimate
    predicted: Float[Tensor, "heads"]
    n_queries: int


def measure_decay(
    a: Float[Tensor, "heads Q D"],
    keys: Float[Tensor, "heads N D"],
    values: Float[Tensor, "heads N M"],
    pool: Pool,
    lengths: Sequence[int],
    n_prompts: int,
    generator: torch.Generator,
) -> Decay:
    """Errors of `n_prompts` prompts a head, nested prefixes, drawn from the pool with replacement.

    The first-order error |h|^2, h the prompt's mean of the influence function, is subtracted with
    its exact mean constant/L as a control variate, which keeps the estimate unbiased.
    """
    lengths = _require_lengths(lengths)
    if n_prompts < 4:
        raise ValueError(f"n_prompts must be 4 or more for a standard error, got {n_prompts}.")
    scale = torch.tensor(lengths, dtype=torch.float64, device=keys.device)
    centre = pool.mean.to(keys.dtype)
    means, errors = [], []
    for h in range(len(keys)):
        tokens = torch.cat([keys[h], values[h]], -1) - centre[h]
        at, truth, kappa, constant = (
            x[h, :QUERIES] for x in (a, pool.gap, pool.kappa[0], pool.constant)
        )
        error, log_mgf = _prompts(at, tokens, truth, lengths, n_prompts, generator)
        first = (2 * (log_mgf - kappa[:, None, None])).exp() * error
        control = (first - constant[:, None, None] / scale).mean(0)
        samples = scale * _without_first_order(error.mean(0), control)
        means.append(samples.mean(0))
        errors.append(samples.std(0) / n_prompts**0.5)
    measured = Estimate(torch.stack(means), torch.stack(errors), n_prompts)
    predicted = pool.constant[:, :QUERIES].mean(1)
    return Decay(tuple(lengths), measured, predicted, min(QUERIES, a.shape[1]))


def _prompts(a, tokens, truth, lengths, n_prompts, generator) -> tuple[Tensor, Tensor]:
    """|T[prompt] - T|^2 and the prompts' kappa, each (Q, prompts, lengths), for one head."""
    many, dim = a.shape
    size = max(1, min(n_prompts, NUMBERS // (lengths[-1] * tokens.shape[1])))
    errors, mgfs = [], []
    for start in range(0, n_prompts, size):
        here = min(size, n_prompts - start)
        tilts = pad(a, (0, tokens.shape[1] - dim))[:, None, :].expand(many, here, -1)
        state, seen, error, mgf = TiltedSums.empty(tilts), 0, [], []
        for length in lengths:
            drawn = torch.randint(len(tokens), (here, length - seen), generator=generator)
            state = state.update(tokens[drawn.to(tokens.device)])
            seen = length
            error.append((state.mean[..., dim:] - truth[:, None]).square().sum(-1))
            mgf.append(state.log_mgf)
        errors.append(torch.stack(error, -1))
        mgfs.append(torch.stack(mgf, -1))
    return torch.cat(errors, 1), torch.cat(mgfs, 1)

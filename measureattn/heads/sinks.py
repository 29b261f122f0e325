"""Sink tokens: those that receive far more attention than their share of the pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from measureattn.heads.pool import Pool
from measureattn.streaming import BUDGET

SINK_ATTENTION, SINK_EXCESS = 0.1, 10  # of all attention; times the token's share of the pool


@dataclass(frozen=True)
class Sink:
    """A token that takes a tenth of the attention or more, and ten times its share of the pool.

    Source: ours. See: chapter 11.

    >>> print(Sink("[CLS]", attention=0.3, frequency=0.004))
    [CLS] takes 30% of the attention
    """

    label: str
    attention: float
    frequency: float

    def __str__(self) -> str:
        return f"{self.label} takes {100 * self.attention:.0f}% of the attention"


def find_sinks(a: Tensor, keys: Tensor, pool: Pool, labels) -> tuple[tuple[Sink, ...], ...]:
    """Who receives far more attention than its share of the pool, head by head."""
    words, index = _words(keys.shape[1], labels, keys.device)
    kappa = pool.kappa[0, :, : a.shape[1]].to(a.dtype)
    received = torch.zeros(len(keys), len(words), dtype=torch.float64, device=keys.device)
    frequency = torch.bincount(index, minlength=len(words)).double() / len(index)
    centre = pool.mean_key[:, None].to(a.dtype)
    step = max(1, BUDGET // kappa.numel())
    for start in range(0, keys.shape[1], step):
        part = slice(start, start + step)
        scores = a @ (keys[:, part] - centre).mT
        weights = (scores - kappa[..., None]).exp_().mean(1).double() / keys.shape[1]
        received.index_add_(1, index[part], weights)
    strong = (received >= SINK_ATTENTION) & (received >= SINK_EXCESS * frequency)
    return tuple(
        tuple(
            Sink(words[i], float(received[h, i]), float(frequency[i]))
            for i in received[h].argsort(descending=True).tolist()
            if strong[h, i]
        )
        for h in range(len(keys))
    )


def _words(n: int, labels: Sequence[str] | None, device) -> tuple[list[str], Tensor]:
    """The different labels, and for each token which it has; without labels, its position."""
    if labels is None:
        return [f"token {i}" for i in range(n)], torch.arange(n, device=device)
    words = {word: i for i, word in enumerate(dict.fromkeys(labels))}
    return list(words), torch.tensor([words[label] for label in labels], device=device)

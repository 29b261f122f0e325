"""Two passes over a pool of keys and values: its moments, then its tilted sums at the queries."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from measureattn.measures import Gaussian
from measureattn.streaming import CHUNK, TiltedSums

BLOCK = 2_048  # queries at once


@dataclass(frozen=True)
class Pool:
    """What the passes over a pool leave: moments (H, ...), and at Q queries a (H, Q, ...)."""

    mean: Tensor  # (H, D + M), of the joint tokens (k, v)
    cov: Tensor  # (H, D + M, D + M)
    dim: int  # D
    kappa: Tensor  # (3, H, Q), at a, 2a and 3a, of centred keys
    gap: Tensor  # (H, Q, M), T - mean(v)
    unexplained: Tensor  # (H, Q), |T - linear|^2
    constant: Tensor  # (H, Q), of the 1/L law: E w^2 |v - T|^2

    @classmethod
    def read(cls, a: Tensor, chunks: Callable[[], Iterator[tuple[Tensor, Tensor]]]) -> "Pool":
        """Read the chunks for the moments, then for the tilted sums at a (H, Q, D), by blocks."""
        mean, cov = _moments(chunks())
        blocks = [_tilted(block, chunks(), mean, cov) for block in a.split(BLOCK, 1)]
        kappa, *rest = zip(*blocks, strict=True)
        return cls(mean, cov, a.shape[-1], torch.cat(kappa, 2), *(torch.cat(x, 1) for x in rest))

    @property
    def mean_key(self) -> Tensor:
        return self.mean[:, : self.dim]

    @property
    def mean_value(self) -> Tensor:
        return self.mean[:, self.dim :]

    @property
    def matrix(self) -> Tensor:
        """Cov(v, k)."""
        return self.cov[:, self.dim :, : self.dim]

    @property
    def signal(self) -> Tensor:
        """|T - mean(v)|^2, (H, Q)."""
        return self.gap.square().sum(-1)

    @property
    def spread(self) -> Tensor:
        """E w^2, (H, Q)."""
        return (self.kappa[1] - 2 * self.kappa[0]).exp()

    def score_variance(self, a: Tensor) -> Tensor:
        """a' Cov(k) a, (H, Q)."""
        a = a.double()
        return ((a @ self.cov[:, : self.dim, : self.dim]) * a).sum(-1)

    @property
    def value_variance(self) -> Tensor:
        """tr Cov(v)."""
        return self.cov[:, self.dim :, self.dim :].diagonal(dim1=-2, dim2=-1).sum(-1)

    def gaussian_chunks(self, like: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """As many Gaussian tokens with the pool's moments; the same ones at every call."""
        generator = torch.Generator().manual_seed(seed)
        law = Gaussian(self.mean.to(like), self.cov.to(like), validate_args=False)
        for start in range(0, like.shape[1], CHUNK):
            n = min(CHUNK, like.shape[1] - start)
            tokens = law.sample(n, generator=generator, dtype=like.dtype, device=like.device)
            yield tokens[..., : self.dim], tokens[..., self.dim :]


def chunks(keys: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(keys, values), at most CHUNK tokens at a time."""
    for start in range(0, keys.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        yield keys[:, part], values[:, part]


def _moments(chunks: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the joint tokens (k, v), float64."""
    state = None
    for k, v in chunks:
        tokens = torch.cat([k, v], -1).double()
        if state is None:
            state = TiltedSums.empty(torch.zeros_like(tokens[:, 0]), with_cov=True)
        state = state.update(tokens)
    return state.mean, state.cov


def _tilted(a: Tensor, chunks: Iterator[tuple[Tensor, Tensor]], mean: Tensor, cov: Tensor):
    """kappa, gap, unexplained and constant at the queries a; chunks are centred first."""
    heads, many, dim = a.shape
    tilts = torch.cat([a, 2 * a, 3 * a], 1).transpose(0, 1)
    state = TiltedSums.empty(pad(tilts, (0, mean.shape[1] - dim + 1)))
    centre = mean[:, None].to(a.dtype)
    for k, v in chunks:
        tokens = torch.cat([k, v], -1) - centre
        square = tokens[..., dim:].square().sum(-1, keepdim=True)
        state = state.update(torch.cat([tokens, square], -1))
    kappa = state.log_mgf.reshape(3, many, heads).transpose(1, 2)
    means = state.mean.reshape(3, many, heads, -1).transpose(1, 2)
    gap, double_gap, second = means[0, ..., dim:-1], means[1, ..., dim:-1], means[1, ..., -1]
    unexplained = (gap - a.double() @ cov[:, dim:, :dim].mT).square().sum(-1)
    # E_2a |v - T|^2, from the moments of centred values
    around = second - 2 * (gap * double_gap).sum(-1) + gap.square().sum(-1)
    return kappa, gap, unexplained, (kappa[1] - 2 * kappa[0]).exp() * around

"""Fair coin flips: the smallest law that is not Gaussian."""

import math

import torch
from torch import Tensor

from measureattn._typing import Float
from measureattn.measures.base import Measure, draw


class Rademacher(Measure):
    """D independent signs, each -1 or +1 with probability 1/2.

    kappa(a) = sum_j log cosh a_j, tilted mean tanh a_j, tilted variance 1/cosh^2 a_j. The law has
    no tensors of its own: it follows the query's dtype and device.

    Source: ours, from the definition of kappa. See: chapter 2.

    >>> Rademacher(1).tilted_mean(torch.tensor([2.0]))
    tensor([0.9640])
    """

    def log_mgf(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape"]:
        a = self._query(a)
        size = a.abs()
        # log cosh t = log1p(sinh(t)^2)/2 keeps its digits near 0, the other form far from it
        near = torch.log1p(torch.sinh(a.clamp(-1, 1)).square()) / 2
        far = size + torch.log1p(torch.exp(-2 * size)) - math.log(2)
        return torch.where(size <= 1, near, far).sum(-1)

    def tilted_mean(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D"]:
        return torch.tanh(self._query(a))

    def tilted_cov(self, a: Float[Tensor, "*tilt D"]) -> Float[Tensor, "*shape D D"]:
        return torch.diag_embed(_variance(self._query(a)))

    def tilted_cov_product(
        self, a: Float[Tensor, "*tilt D"], w: Float[Tensor, "*direction D"]
    ) -> Float[Tensor, "*shape D"]:
        a, w = self._query_and_direction(a, w)
        return _variance(a) * w

    def sample(
        self, n: int, *, generator: torch.Generator, dtype=None, device=None
    ) -> Float[Tensor, "*batch n D"]:
        like = self._sampling(n, generator, dtype, device)
        coins = draw(torch.rand, (*self.batch_shape, n, self.dim), **like)
        return torch.where(coins < 0.5, -torch.ones_like(coins), torch.ones_like(coins))


def _variance(a: Tensor) -> Tensor:
    """1/cosh^2 without the cancellation of 1 - tanh^2 and without overflow."""
    decay = torch.exp(-2 * a.abs())
    return 4 * decay / (1 + decay).square()

"""Running laws: what is kept of the particles that have gone by, so that the next ones can move.

All of them, a random choice, their tilted sums at a grid of tilts, or a normalizing flow: memory
grows with the number of particles in the first case only. Nothing here knows how particles move.

    path  (steps + 1, n, D)   n particles at the times 0, ..., steps of a grid
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from measureattn._monte_carlo import seed_from
from measureattn._typing import Float
from measureattn.measures import Empirical, Measure
from measureattn.streaming import TiltedSums


class RunningLaw(ABC):
    """The law at each time of a grid, learnt from paths (steps + 1, n, D) that come in batches.

    `add(path)` mixes a batch in by its share of all particles so far, `law(k)` is the law at time
    k, `numbers` counts the floats kept from batch to batch. A kind of your own defines `_mix(path)`
    and the last two. Source: arXiv 2408.16403. See: chapter 13.

    >>> issubclass(Reservoir, RunningLaw)
    True
    """

    seen = 0

    def add(self, path: Float[Tensor, "times n D"]) -> None:
        self._mix(path)
        self.seen += path.shape[-2]

    @abstractmethod
    def _mix(self, path: Tensor) -> None: ...

    @abstractmethod
    def law(self, k: int) -> Measure: ...

    @property
    @abstractmethod
    def numbers(self) -> int: ...


class Reservoir(RunningLaw):
    """A uniform choice of at most `capacity` of all paths so far: the error stops falling.

    Every path gets a random key when it comes, and the smallest keys stay.
    Source: ours, the simplest law of bounded memory. See: chapter 13.

    >>> kept = Reservoir(2, generator=torch.Generator().manual_seed(0))
    >>> kept.add(torch.arange(5.0).reshape(1, 5, 1))
    >>> kept.law(0).tokens.shape
    torch.Size([2, 1])
    """

    def __init__(self, capacity: int, *, generator: torch.Generator):
        self.capacity, self.generator = capacity, generator

    def _mix(self, path):
        keys = torch.rand(path.shape[-2], generator=self.generator)
        if self.seen:
            path, keys = torch.cat([self._paths, path], -2), torch.cat([self._keys, keys])
        kept = keys.argsort()[: self.capacity]
        self._paths, self._keys = path[:, kept], keys[kept]

    def law(self, k):
        return Empirical(self._paths[k])

    @property
    def numbers(self):
        return self._paths.numel() + self._keys.numel()


class TiltTable(RunningLaw):
    """The log-MGF and tilted mean of all particles at a Chebyshev grid of tilts: for small D.

    U       (D, D), the system's: the grid covers the tilts U x of the first batch, at each time
    nodes   grid points an axis, nodes^D in all
    margin  by which the grid is wider than those tilts; beyond it answers stay those of its border

    One `TiltedSums` holds all times, and particles merge into it exactly: nothing is forgotten, and
    only the interpolation between tilts, which kappa's smoothness makes spectral, is approximate.
    Source: ours. See: chapter 13.

    >>> table = TiltTable(torch.eye(1), nodes=8)
    >>> table.add(torch.tensor([[[-1.0], [1.0]]]))
    >>> table.law(0).tilted_mean(torch.tensor([1.0], dtype=torch.float64))  # tanh 1 = 0.7616
    tensor([0.7613], dtype=torch.float64)
    """

    def __init__(self, U: Tensor, nodes: int = 8, margin: float = 0.75):
        self.U, self.margin = U.double(), margin
        index = torch.arange(nodes, dtype=torch.float64, device=U.device)
        self._points = torch.cos(math.pi * (index + 0.5) / nodes)
        self._to_weights = torch.linalg.inv(_chebyshev(self._points, nodes))

    def _mix(self, path):
        path = path.double()
        if not self.seen:
            tilts = path @ self.U.mT
            low, high = tilts.amin(-2), tilts.amax(-2)
            self._centre, self._radius = (low + high) / 2, (high - low) / 2 * (1 + self.margin)
            grid = torch.cartesian_prod(*[self._points] * path.shape[-1])
            grid = grid.reshape(-1, 1, path.shape[-1])
            self._sums = TiltedSums.empty(self._centre + self._radius * grid)
        self._sums = self._sums.update(path)

    def weights(self, a: Tensor, k: int) -> Tensor:
        """Lagrange's weights of the grid points at the tilts a, (*query, nodes^D)."""
        place = ((a - self._centre[k]) / self._radius[k]).clamp(-1, 1)
        axes = _chebyshev(place, len(self._points)) @ self._to_weights
        weights = axes[..., 0, :]
        for j in range(1, a.shape[-1]):
            weights = (weights[..., :, None] * axes[..., j, None, :]).flatten(-2)
        return weights

    def law(self, k):
        return _Tabulated(self, k)

    @property
    def numbers(self):
        sums = self._sums
        return sum(x.numel() for x in (sums.a, sums.log_total, sums.log_mgf, sums.mean))


class _Tabulated(Measure):
    """One time of a `TiltTable`."""

    def __init__(self, table: TiltTable, k: int):
        super().__init__(table.U.shape[0])
        self.table, self.k = table, k

    def log_mgf(self, a):
        return self.table.weights(self._query(a), self.k) @ self.table._sums.log_mgf[:, self.k]

    def tilted_mean(self, a):
        return self.table.weights(self._query(a), self.k) @ self.table._sums.mean[:, self.k]


def _chebyshev(x: Tensor, n: int) -> Tensor:
    """T_0(x), ..., T_{n-1}(x) on a new last axis."""
    index = torch.arange(n, dtype=x.dtype, device=x.device)
    return torch.cos(index * torch.acos(x)[..., None])


class FlowLaw(RunningLaw):
    """A normalizing flow that knows the time: the running law of DeepSPoC, for any D.

    dim, steps  D, and the number of time steps of the paths
    hidden      widths of the networks in each of `transforms` masked autoregressive transforms
    fits        Adam steps a batch (ten times as many for the first), of step size rate/sqrt(batch)
    samples     tokens that stand for the law at a time, a scrambled Sobol set pushed forward

    A batch that is the share w of all particles is mixed in by likelihood: w times the batch's plus
    1 - w times that of as many paths redrawn from the flow as it was. Needs zuko, or raises
    ImportError; float64. Source: arXiv 2408.16403, with another flow and loss. See: chapter 13.

    >>> flow = FlowLaw(1, 0, fits=1, samples=8, generator=torch.Generator().manual_seed(0))
    >>> flow.add(torch.randn(1, 50, 1, dtype=torch.float64))
    >>> flow.law(0)
    Empirical(length=8, dim=1, batch_shape=())
    """

    def __init__(
        self, dim: int, steps: int, *, hidden=(16, 16), transforms: int = 2, fits: int = 10,
        rate: float = 1e-2, samples: int = 256, generator: torch.Generator,
    ):  # fmt: skip
        try:
            import zuko
        except ImportError as error:
            raise ImportError("FlowLaw needs zuko. Install it: pip install zuko.") from error
        self.dim, self.generator, self.samples = dim, generator, samples
        self.fits, self.rate, self._batches = fits, rate, 0
        with torch.random.fork_rng(devices=[]):  # zuko draws its first weights without generator
            torch.manual_seed(seed_from(generator))
            flow = zuko.flows.MAF(dim, 1, transforms=transforms, hidden_features=hidden)
        self._flow = flow.double()
        self._times = torch.linspace(-1, 1, steps + 1, dtype=torch.float64)[:, None]
        self._adam = torch.optim.Adam(self._flow.parameters())

    def _mix(self, path):
        n = path.shape[-2]
        if not self.seen:
            self._centre, self._scale = path.mean((0, 1)), path.flatten(0, 1).std(0)
        y = (path - self._centre) / self._scale
        share = torch.full((n,), 1 / (self.seen + n), dtype=torch.float64)
        if self.seen:
            old = torch.stack([self._redraw(k, n) for k in range(len(self._times))])
            y, share = torch.cat([y, old], 1), torch.cat([share, (1 / n - share)])
        self._batches += 1
        self._adam.param_groups[0]["lr"] = self.rate / math.sqrt(self._batches)
        for _ in range(self.fits if self.seen else 10 * self.fits):
            times = self._times[:, None].expand(-1, y.shape[1], -1)
            loss = -(self._flow(times).log_prob(y) * share).sum(1).mean()
            loss.backward()
            self._adam.step()
            self._adam.zero_grad()  # here, so that gradients are not kept between batches

    def _redraw(self, k: int, n: int) -> Tensor:
        """n points of the law at time k, centred and scaled, spread evenly by a Sobol set."""
        seed = seed_from(self.generator) % 2**31
        sobol = torch.quasirandom.SobolEngine(self.dim, scramble=True, seed=seed)
        normals = torch.special.ndtri(sobol.draw(n, dtype=torch.float64).clamp(1e-9, 1 - 1e-9))
        with torch.no_grad():
            return self._flow(self._times[k]).transform.inv(normals)

    def sample(self, k: int, n: int) -> Float[Tensor, "n D"]:
        """n points of the law at time k."""
        return self._centre + self._scale * self._redraw(k, n)

    def law(self, k):
        return Empirical(self.sample(k, self.samples))

    @property
    def numbers(self):
        """Weights, Adam's two averages of each, and the units; not the masks (bits)."""
        return 3 * sum(x.numel() for x in self._flow.parameters()) + 2 * self.dim

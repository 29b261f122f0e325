"""Attention applied again and again to its own output: tokens are particles, their law flows.

    dX = (T[mu_t](X) - decay X) dt + noise dB,     mu_t = law of X,     T[mu](x) = V grad kappa(U x)

A finite prompt is a system of interacting particles, a stack of layers is Euler's scheme for it,
an infinite prompt is the flow of laws itself. Gaussian laws stay Gaussian and follow a closed
ordinary differential equation, the oracle of everything else here.

    x  (*batch, n, D)   particles, in any number of independent systems side by side
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from measureattn._checks import require_same, require_tensor
from measureattn._typing import Float
from measureattn.attention import attend
from measureattn.measures import Empirical, Gaussian, Measure
from measureattn.measures.base import draw
from measureattn.running_laws import RunningLaw

BLOWN_UP = 1e8  # times the covariance at the start: a Gaussian law gone there has no later time


@dataclass(frozen=True)
class SelfAttention:
    """The mean-field drift T[mu](x) - decay x, and the noise added to it.

    U, V   (D, D), key-query and value matrices
    noise  standard deviation of the Brownian motion added in a unit of time
    decay  1: a layer's output replaces its input; 0: it is added to it (residual)

    Raises ValueError or TypeError if the matrices do not fit or a number is negative.
    Source: ours; the particle picture of attention is surveyed in arXiv 2312.10794.
    See: chapter 13.

    >>> system = SelfAttention(torch.eye(1), torch.eye(1))
    >>> system.drift(Gaussian(torch.ones(1), torch.eye(1)), torch.tensor([[3.0]]))
    tensor([[1.]])
    """

    U: Tensor
    V: Tensor
    noise: float = 0.0
    decay: float = 1.0

    def __post_init__(self):
        require_tensor("U", self.U)
        require_tensor("V", self.V)
        require_same("V", self.V, "U", self.U)
        dim = self.U.shape[-1]
        if self.U.shape != (dim, dim) or self.V.shape != (dim, dim):
            raise ValueError(
                f"U and V must be square and of one size, since outputs become tokens; got shapes "
                f"{tuple(self.U.shape)} and {tuple(self.V.shape)}. Multiply V by the output matrix?"
            )
        if not (self.noise >= 0 and self.decay >= 0):
            raise ValueError(
                f"noise and decay must be 0 or more, got {self.noise} and {self.decay}."
            )

    def drift(self, law: Measure, x: Float[Tensor, "*batch n D"]) -> Float[Tensor, "*batch n D"]:
        """T[law](x) - decay x, where law has the batch of x. `attend` reads the law in chunks."""
        output = attend(law, x.movedim(-2, 0), U=self.U, V=self.V).movedim(0, -2)
        return output - self.decay * x

    def kicks(self, x: Tensor, dt: float, generator: torch.Generator | None) -> Tensor | float:
        """noise (B_{t + dt} - B_t) for each particle."""
        if self.noise == 0:
            return 0.0
        if generator is None:
            raise TypeError(
                "a system with noise needs generator=, a torch.Generator. "
                "Make one: torch.Generator().manual_seed(0)."
            )
        like = dict(generator=generator, dtype=x.dtype, device=x.device)
        return self.noise * math.sqrt(dt) * draw(torch.randn, x.shape, **like)


def gaussian_flow(system: SelfAttention, start: Gaussian, times) -> Gaussian:
    """The laws at `times` of the flow from a Gaussian law: batch (len(times),), float64.

    m' = (V + V G U - decay) m,  G' = B G + G B' + noise^2,  B = V G U - decay, solved to 1e-10.
    Raises ValueError if the law blows up before the last time, as it does from a covariance too
    large for U and V; a finite prompt cannot.
    Source: ours, from Lemma 2.1, arXiv 2512.11784. See: chapter 13.

    >>> half = SelfAttention(0.5 * torch.eye(1), torch.eye(1))
    >>> gaussian_flow(half, Gaussian(torch.ones(1), torch.ones(1, 1)), [0.0, 1.0]).cov.flatten()
    tensor([1.0000, 0.2384], dtype=torch.float64)
    """
    U, V = (matrix.double().numpy(force=True) for matrix in (system.U, system.V))
    dim, eye = len(U), np.eye(len(U))
    times = np.asarray(times, dtype=float)
    if times.ndim != 1 or len(times) == 0 or times[0] < 0 or (np.diff(times) <= 0).any():
        raise ValueError(f"times must be 0 or more and increasing, got {times}. Sort them.")
    if start.batch_shape:
        raise ValueError(f"start must be a single law, got batch_shape {tuple(start.batch_shape)}.")

    def slope(_, state):
        m, G = state[:dim], state[dim:].reshape(dim, dim)
        B = V @ G @ U - system.decay * eye
        return np.concatenate([V @ m + B @ m, (B @ G + G @ B.T + system.noise**2 * eye).ravel()])

    begin = torch.cat([start.mean, start.cov.flatten()]).double().numpy(force=True)
    ceiling = BLOWN_UP * max(1.0, np.abs(begin).max())

    def blown_up(_, state):
        return np.abs(state).max() - ceiling

    blown_up.terminal = True
    path = solve_ivp(
        slope, (0.0, times[-1]), begin, t_eval=times, method="DOP853", rtol=1e-10, atol=1e-12,
        events=blown_up,
    )  # fmt: skip
    if path.status != 0:
        end = path.t_events[0][0] if path.t_events[0].size else path.t[-1]
        raise ValueError(
            f"the Gaussian law blows up near t = {end:.4g}, before the last time {times[-1]:g}. "
            f"Ask for earlier times, or shrink U, V or the covariance."
        )
    state = torch.from_numpy(path.y.T.copy())
    cov = state[:, dim:].reshape(-1, dim, dim)
    return Gaussian(state[:, :dim], (cov + cov.mT) / 2)


def gaussian_layers(system: SelfAttention, start: Gaussian, dt: float, steps: int) -> Gaussian:
    """The laws of an infinite prompt after 0, ..., steps steps of Euler's scheme: batch (steps+1,).

    Exact: a step is an affine map of Gaussian tokens. dt = 1 with decay 1 is a plain stack of
    attention layers, dt = 1 with decay 0 a residual stack. Raises as `Gaussian`.
    Source: ours, from Lemma 2.1, arXiv 2512.11784. See: chapter 13.

    >>> cube = SelfAttention(torch.eye(1), torch.eye(1))
    >>> gaussian_layers(cube, Gaussian(torch.zeros(1), 2 * torch.eye(1)), 1.0, 2).cov.flatten()
    tensor([  2.,   8., 512.])
    """
    eye = torch.eye(start.dim, dtype=system.U.dtype, device=system.U.device)
    kick = Gaussian(torch.zeros_like(start.mean), system.noise**2 * dt * eye)
    laws = [start]
    for _ in range(steps):
        law = laws[-1]
        A = (1 - system.decay * dt) * eye + dt * system.V @ law.cov @ system.U
        laws.append(law.pushforward(A, dt * system.V @ law.mean).convolve(kick))
    return Gaussian(torch.stack([x.mean for x in laws]), torch.stack([x.cov for x in laws]))


def interacting(
    system: SelfAttention,
    start: Float[Tensor, "*batch n D"],
    dt: float,
    steps: int,
    *,
    generator: torch.Generator | None = None,
    order: int = 2,
) -> Iterator[Tensor]:
    """The particles (*batch, n, D) at the times 0, dt, ..., steps dt, each moved by the law of all.

    order 1 is Euler's scheme (`gaussian_layers` is its infinite prompt), 2 is Heun's: both its
    slopes ask the law of their own moment. Raises ValueError or TypeError if arguments do not fit.
    Source: propagation of chaos, as in arXiv 2408.16403. See: chapter 13.

    >>> system = SelfAttention(torch.eye(1), torch.eye(1))
    >>> *_, last = interacting(system, torch.tensor([[-1.0], [1.0]]), 0.1, 100)
    >>> last.abs().max() < 1e-3
    tensor(True)
    """
    if order not in (1, 2):
        raise ValueError(f"order must be 1 (Euler) or 2 (Heun), got {order!r}.")
    x = start
    yield x
    for _ in range(steps):
        kick = system.kicks(x, dt, generator)
        x = _step(system, x, dt, kick, Empirical(x), Empirical if order == 2 else None)
        yield x


def _step(system, x, dt, kick, law: Measure, ahead: Callable[[Tensor], Measure] | None) -> Tensor:
    """One step against `law`; Heun's if `ahead` gives the law at its end from the guessed x."""
    slope = system.drift(law, x)
    guess = x + dt * slope + kick
    if ahead is None:
        return guess
    return x + dt / 2 * (slope + system.drift(ahead(guess), guess)) + kick


def sequential(
    system: SelfAttention,
    start: Measure,
    running: RunningLaw,
    n: int,
    *,
    batch: int,
    dt: float,
    steps: int,
    generator: torch.Generator,
) -> RunningLaw:
    """`running` after n particles that came in batches, each moved by the law of those before it.

    The first batch moves as `interacting` particles do, the others by Heun's scheme against
    `running`, which keeps what it wants of them: nothing else is stored. n is a multiple of batch.
    Raises ValueError if it is not.
    Source: sequential propagation of chaos, arXiv 2408.16403. See: chapter 13.

    >>> system, g = SelfAttention(torch.eye(1), torch.eye(1)), torch.Generator().manual_seed(0)
    >>> from measureattn.running_laws import Reservoir
    >>> start, kept = Gaussian(torch.zeros(1), torch.eye(1)), Reservoir(5, generator=g)
    >>> sequential(system, start, kept, 100, batch=10, dt=0.1, steps=3, generator=g).numbers
    25
    """
    if n < batch or n % batch:
        raise ValueError(f"n must be a multiple of batch, got n={n} and batch={batch}.")
    x = start.sample(batch, generator=generator)
    running.add(torch.stack(list(interacting(system, x, dt, steps, generator=generator))))
    for _ in range(1, n // batch):
        x = start.sample(batch, generator=generator)
        path = [x]
        for law, ahead in pairwise(map(running.law, range(steps + 1))):
            kick = system.kicks(x, dt, generator)
            x = _step(system, x, dt, kick, law, lambda guess, ahead=ahead: ahead)
            path.append(x)
        running.add(torch.stack(path))
    return running

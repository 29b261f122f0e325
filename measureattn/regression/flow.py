"""Gradient flows by SciPy's integrators, in float64, with dense output and a stop at rest.

A risk to descend is any object with risk(*parameters) and gradient(*parameters); an implicit
integrator uses its hessian where it has one. `Episodes` are risks in (U, V); `LinearRisk`,
`EigenRisk`, `PromptRisk` and `QueryRisk` in the blocks (A, b).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.integrate import OdeSolution, solve_ivp
from torch import Tensor

from measureattn._monte_carlo import Estimate
from measureattn.tasks import InContextTask

STIFF = ("Radau", "BDF")


@dataclass(frozen=True)
class Flow:
    """A trajectory: call it with a time for the parameters then, in the shapes of the start.

    times       the integrator's own steps;  solution  its dense output
    stationary  whether it stopped because the gradient's norm fell below `rest`
    shapes      of the parameters

    Source: section 4, arXiv 2512.11784. See: chapter 7.

    >>> from measureattn.regression import LinearRisk, Task
    >>> start = torch.eye(1).double() / 2, torch.tensor(0.5).double()
    >>> flow = gradient_flow(LinearRisk(Task(torch.eye(1).double())), start)
    >>> flow.stationary, round(float(flow.end[1]), 6)
    (True, 1.0)
    """

    times: np.ndarray
    solution: OdeSolution
    stationary: bool
    shapes: tuple[torch.Size, ...]

    def __call__(self, time: float) -> tuple[Tensor, ...]:
        if not self.times[0] <= time <= self.times[-1]:
            raise ValueError(
                f"time must lie in [0, {self.times[-1]:.6g}], where the flow was followed, got "
                f"{time}. Raise `time`, or lower `rest` if it stopped at rest."
            )
        return _unpack(self.solution(time), self.shapes)

    @property
    def end(self) -> tuple[Tensor, ...]:
        return self(self.times[-1])

    def invariants(self) -> Tensor:
        """|A|_F^2 - b^2 at each of `times`; linear attention conserves it.

        For parameters (A, b), or (a, b) with a the eigenvalues of A; in (U, V) it is
        |U|_F^2 - |V|_F^2. Source: section 5, arXiv 2512.11784. See: chapter 8.
        """
        sizes = [shape.numel() for shape in self.shapes]
        states = torch.from_numpy(self.solution(self.times)).split(sizes)
        first, second = (part.square().sum(0) for part in states)
        return first - second


def gradient_flow(
    risk, start: Sequence[Tensor], *, time: float = 1e4, rest: float = 1e-9,
    method: str = "DOP853", rtol: float = 1e-13, atol: float = 1e-14,
) -> Flow:  # fmt: skip
    """Follow theta' = -gradient(theta) from `start` for `time`, or until the gradient is at rest.

    risk    see the module; start  its parameters, float64
    rest    norm of the gradient at which the flow is taken to have arrived
    method  of scipy.integrate.solve_ivp; for stiff flows "Radau" or "BDF", with risk.hessian if any

    Raises ValueError if the start is not float64 or already at rest, RuntimeError if the
    integrator fails. Source: section 4, arXiv 2512.11784. See: chapters 7 and 8.

    >>> from measureattn.regression import LinearRisk, Task
    >>> start = torch.tensor([[-0.5]]).double(), torch.tensor(0.5).double()
    >>> flow = gradient_flow(LinearRisk(Task(torch.eye(1).double())), start)
    >>> abs(float(flow.end[1])) < 1e-6  # from A < 0 in dimension one it goes to the origin
    True
    """
    shapes = tuple(part.shape for part in start)
    for part in start:
        if part.dtype != torch.float64 or part.is_cuda:
            raise ValueError(
                f"flows run in float64 on the CPU, got {part.dtype} on {part.device}. "
                f"Convert the start and the risk: .to(torch.float64)."
            )

    def slope(_, state):
        return -_pack(risk.gradient(*_unpack(state, shapes)))

    def moving(t, state):
        return math.log(max(float(np.linalg.norm(slope(t, state))), 1e-300) / rest)

    def curvature(_, state):
        return -risk.hessian(*_unpack(state, shapes)).numpy()

    stiff = method in STIFF and hasattr(risk, "hessian")

    moving.terminal, moving.direction = True, -1
    first = _pack(start)
    if moving(0.0, first) <= 0:
        raise ValueError(
            f"the start is at rest: the gradient's norm is below rest = {rest:g}. Start elsewhere, "
            f"or lower rest."
        )
    result = solve_ivp(
        slope, (0.0, time), first, method=method, rtol=rtol, atol=atol, dense_output=True,
        events=moving, **({"jac": curvature} if stiff else {}),
    )  # fmt: skip
    if result.status < 0:
        raise RuntimeError(
            f"{method} stopped at time {result.t[-1]:.6g}: {result.message} Loosen rtol and atol, "
            f"or take a stiff method."
        )
    return Flow(result.t, result.sol, result.status == 1, shapes)


def distance(flow: Flow, other: Flow, time: float) -> float:
    """|theta(t) - theta'(t)|, a flow at rest standing where it stopped.

    Source: Lemma D.1, arXiv 2512.11784 (what it bounds). See: chapter 7.

    >>> from measureattn.regression import LinearRisk, Task
    >>> start = torch.eye(1).double() / 2, torch.tensor(0.5).double()
    >>> flow = gradient_flow(LinearRisk(Task(torch.eye(1).double())), start)
    >>> distance(flow, flow, 1.0)
    0.0
    """
    here, there = (_pack(f(min(time, f.times[-1]))) for f in (flow, other))
    return float(np.linalg.norm(here - there))


def gronwall_bound(gradient_gap: float, lipschitz: float, time: float) -> float:
    """How far two flows from one start can part: g (exp(beta t) - 1)/beta.

    gradient_gap  g, the largest distance of the two gradients where the flows go
    lipschitz     beta, of one of the gradients there

    Sharper than g t exp(beta t), from which it differs by a factor beta t at most.
    Source: Lemma D.1, arXiv 2512.11784, sharpened. See: chapter 7.

    >>> round(gronwall_bound(0.1, 2.0, 1.0), 4)
    0.3195
    """
    growth = math.expm1(lipschitz * time) if lipschitz * time < 709 else math.inf
    return gradient_gap * growth / lipschitz


def limit_gaps(
    task: InContextTask, start: Sequence[Tensor], lengths: Sequence[int], *, n_prompts: int,
    replicates: int, generator: torch.Generator, n_queries: int | None = None, **options,
) -> Estimate:  # fmt: skip
    """lim R_L - lim R_inf of the flows in (U, V), one value a length, over frozen episodes.

    Each replicate draws parameters and queries once, and a prompt of each length for them; every
    flow runs on them from `start` until it rests or `time` is over. Standard errors are over the
    replicates, at least 2. `options` go to `gradient_flow`.
    Source: Theorem 4.3, arXiv 2512.11784. See: chapter 7.

    >>> from measureattn.tasks import BooleanTask, parity
    >>> g = torch.Generator().manual_seed(0)
    >>> start = torch.eye(4).double(), torch.eye(4).double()[3:]
    >>> kw = dict(n_prompts=2, replicates=2, generator=g, time=1.0, rtol=1e-6)
    >>> limit_gaps(BooleanTask(parity), start, [8], **kw).value.shape
    torch.Size([1])
    """
    rows = []
    for _ in range(replicates):
        seed = int(torch.randint(2**62, (), generator=generator))
        limits = []
        for length in (None, *lengths):
            draws = torch.Generator().manual_seed(seed)
            episodes = task.episodes(n_prompts, length, n_queries=n_queries, generator=draws)
            limits.append(episodes.risk(*gradient_flow(episodes, start, **options).end))
        rows.append(torch.stack(limits[1:]) - limits[0])
    gaps = torch.stack(rows)
    return Estimate(gaps.mean(0), gaps.std(0) / math.sqrt(replicates), replicates)


def _pack(parameters: Sequence[Tensor]) -> np.ndarray:
    return torch.cat([part.detach().reshape(-1) for part in parameters]).numpy()


def _unpack(state: np.ndarray, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
    parts = torch.from_numpy(state).split([shape.numel() for shape in shapes])
    return tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))

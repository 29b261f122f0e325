"""Plain stochastic gradient descent on fresh prompts: the paper's experiment, many runs at once.

A run is an activation, a prompt length and a replicate. All runs advance together, along one first
axis of the weights; softmax and linear attention see the same prompts, so that data have lengths x
replicates there, and their prompts last. The loss is the mean squared error of a query's noisy
label, 2 R + tau^2 for the risk R of the rest of the package.
"""

import itertools
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

import measureattn
from measureattn.regression.checkpoint import load, save
from measureattn.regression.risk import require_length
from measureattn.regression.samplers import ACTIVATIONS, ExactSampler, PlainSampler
from measureattn.regression.task import Task, start

SAMPLERS = {"exact": ExactSampler, "plain": PlainSampler}
AHEAD = 16  # steps whose parameter-free draws are made at once
RECORDED = frozenset(math.ceil(10 ** (k / 10)) for k in range(91))  # ten steps a decade


class FullModel:
    """One head with four matrices K, Q, V (D, D) and O (1, D), and scores divided by sqrt(D).

    It acts through U = K'Q / sqrt(D) and v = (O V)' alone. Started as `torch.nn.Linear` would be.
    Source: section 6, arXiv 2512.11784. See: chapter 10.

    >>> model = FullModel(Task(torch.eye(2).double()))
    >>> weights = model.start(torch.Generator().manual_seed(0))
    >>> U, v = model.effective({name: x[None] for name, x in weights.items()})
    >>> U.shape, v.shape
    (torch.Size([1, 3, 3]), torch.Size([1, 3, 1]))
    """

    def __init__(self, task: Task):
        self.dim, self.scale = task.dim, task.dim**-0.5

    def start(self, generator: torch.Generator) -> dict[str, Tensor]:
        sizes = {"K": self.dim, "Q": self.dim, "V": self.dim, "O": 1}
        return {
            name: self.scale * (2 * torch.rand(rows, self.dim, generator=generator).double() - 1)
            for name, rows in sizes.items()
        }

    def effective(self, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        K, Q, V, out = weights.values()
        return torch.bmm(K.mT, Q) * self.scale, torch.bmm(V.mT, out.mT)

    def descend(self, weights: dict[str, Tensor], dU: Tensor, dv: Tensor, rate: float) -> None:
        """One step of length `rate` down the gradient with these derivatives in U and v."""
        K, Q, V, out = weights.values()
        weights["K"] = torch.baddbmm(K, Q, dU.mT, alpha=-rate * self.scale)
        weights["Q"] = torch.baddbmm(Q, K, dU, alpha=-rate * self.scale)
        weights["V"] = torch.baddbmm(V, out.mT, dv.mT, alpha=-rate)
        weights["O"] = torch.baddbmm(out, dv.mT, V.mT, alpha=-rate)


class BlockModel:
    """The blocks (A, b) that the theory follows: U = diag(A, 0), v = (0, b).

    Started at `regression.task.start` with |A|_F = b = 0.4, inside the paper's range in setting P.
    Source: Eq. 9, arXiv 2512.11784. See: chapter 10.

    >>> model = BlockModel(Task(torch.eye(2).double()))
    >>> weights = model.start(torch.Generator().manual_seed(0))
    >>> model.effective({name: x[None] for name, x in weights.items()})[1].flatten()
    tensor([0.0000, 0.0000, 0.4000], dtype=torch.float64)
    """

    def __init__(self, task: Task):
        self.dim = task.dim

    def start(self, generator: torch.Generator) -> dict[str, Tensor]:
        A, b = start(0.4, torch.randn(self.dim - 1, self.dim - 1, generator=generator).double())
        return {"A": A, "b": b.reshape(1, 1)}

    def effective(self, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        A, b = weights.values()
        return pad(A, (0, 1, 0, 1)), pad(b, (0, 0, self.dim - 1, 0))

    def descend(self, weights: dict[str, Tensor], dU: Tensor, dv: Tensor, rate: float) -> None:
        """One step of length `rate` down the gradient with these derivatives in U and v."""
        weights["A"] = weights["A"] - rate * dU[:, :-1, :-1]
        weights["b"] = weights["b"] - rate * dv[:, -1:]


MODELS = {"full": FullModel, "block": BlockModel}


@dataclass(frozen=True)
class History:
    """What a training run went through, at ten steps a decade and at the end.

    steps          (n,), after how many steps
    loss           (n, activations, lengths, replicates), mean over the steps since the last record
    std_error      of the loss, from the spread of the batches
    U, v           (n, activations, lengths, replicates, D, D) and (..., 1, D), effective parameters

    See: chapter 10.
    """

    steps: Tensor
    loss: Tensor
    std_error: Tensor
    U: Tensor
    v: Tensor


class Training:
    """Runs of stochastic gradient descent from fresh prompts, advancing together.

    lengths       prompt lengths;  replicates  runs a length
    activations   "softmax", "linear", or both, on the same prompts
    model         "full" (K, Q, V, O) or "block" (A, b)
    rate, batch   learning rate and prompts a step
    seed          of everything random; a length's draws depend on it and on that length alone
    shared_start  the same initial weights for all activations and lengths, or, as published, other
                  ones for each
    sampler       "exact" in law, or the "plain" tokens

    Weights and sums have the task's dtype and device; normals are drawn in float32. Raises
    ValueError if an argument does not fit.
    Source: section 6, arXiv 2512.11784. See: chapter 10.

    >>> task = Task(torch.eye(2).double(), task_var=0.5)
    >>> training = Training(task, [20, 50], seed=0, batch=8)
    >>> training.run(30)
    >>> training.history.loss.shape
    torch.Size([13, 2, 2, 1])
    """

    def __init__(
        self, task: Task, lengths: Sequence[int], *, seed: int, replicates: int = 1,
        activations: Sequence[str] = ACTIVATIONS, model: str = "full", rate: float = 1e-3,
        batch: int = 128, shared_start: bool = True, sampler: str = "exact",
    ):  # fmt: skip
        _require_known("model", [model], MODELS)
        _require_known("sampler", [sampler], SAMPLERS)
        _require_known("activations", activations, ACTIVATIONS)
        if not lengths or not activations or len(set(activations)) < len(activations):
            raise ValueError(
                f"lengths and activations must name one or more, each activation once, got "
                f"{list(lengths)} and {list(activations)}."
            )
        self.lengths = [int(require_length(length)) for length in lengths]
        self.activations, self.replicates, self.rate = list(activations), replicates, rate
        self.shape = len(self.activations), len(self.lengths), replicates
        self.model = MODELS[model](task)
        self.sampler = SAMPLERS[sampler](
            task, self.lengths, activations, batch=batch, replicates=replicates
        )
        self.config = {
            "prompt_factor": task.prompt_factor.tolist(), "query_cov": task.query_cov.tolist(),
            "task_var": task.task_var, "noise_var": task.noise_var, "lengths": self.lengths,
            "seed": seed, "replicates": replicates, "activations": self.activations,
            "model": model, "rate": rate, "batch": batch, "shared_start": shared_start,
            "sampler": sampler, "device": task.query_cov.device.type,
            "versions": {"measureattn": measureattn.__version__, "torch": torch.__version__},
        }  # fmt: skip
        device = task.query_cov.device
        self.weights = {k: x.to(task.query_cov) for k, x in self._start(seed, shared_start).items()}
        seeds = [_mixed(seed, length) for length in self.lengths]
        # what is drawn ahead has its own stream: a resumed run redraws it from where it began
        self.ahead = [torch.Generator(device).manual_seed(x) for x in seeds]
        self.now = [torch.Generator(device).manual_seed(x + 1) for x in seeds]
        self.drawn, self.before = [], [g.get_state() for g in self.ahead]
        self.steps, self.seconds = 0, 0.0
        self.window = self._window()
        self.records: list[tuple[Tensor, ...]] = []

    @property
    def history(self) -> History:
        return History(*(torch.stack(column) for column in zip(*self.records, strict=True)))

    def effective(self) -> tuple[Tensor, Tensor]:
        """U (activations, lengths, replicates, D, D) and v (..., 1, D), through which it acts."""
        U, v = self.model.effective(self.weights)
        return U.unflatten(0, self.shape), v.unflatten(0, self.shape).mT

    @torch.inference_mode()
    def run(self, until: int, *, checkpoint: Path | None = None, every: float = 20.0) -> None:
        """Take steps until there are `until` of them, at least 1.

        checkpoint  a file to resume from, if it is there, and to write to every `every` seconds; a
                    run that was killed ends with the same bits as one that was not

        Raises ValueError if the training is past `until` or the checkpoint damaged or of another
        training, OSError if it cannot be written, ArithmeticError if the training diverges.
        """
        if checkpoint is not None and checkpoint.exists():
            self._resume(checkpoint)
        if not until >= max(self.steps, 1):
            raise ValueError(
                f"until must be {max(self.steps, 1)} steps or more, got {until}; {self.steps} have "
                f"been taken. Ask for more, or start anew."
            )
        began = saved = time.perf_counter()
        earlier = self.seconds
        while self.steps < until:
            self._step()
            now = time.perf_counter()
            self.seconds = earlier + now - began
            if self.steps in RECORDED or self.steps == until:
                self._record()
            if checkpoint is not None and (now - saved > every or self.steps == until):
                self._save(checkpoint)
                saved = now

    def _step(self) -> None:
        if not self.drawn:
            self.before = [g.get_state() for g in self.ahead]
            self.drawn = self.sampler.ahead(AHEAD, self.ahead)[::-1]
        U, v = self.model.effective(self.weights)
        loss, dU, dv = self._gradient(self.drawn.pop(), U, v)
        self.model.descend(self.weights, dU, dv, self.rate)
        count, total, squares = self.window
        count += 1
        total += loss
        squares += loss.square()
        self.steps += 1

    def _gradient(
        self, now: dict[str, Tensor], U: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The batch's loss, and its derivatives in U (all runs, D, D) and v (all runs, D, 1)."""
        parts, many = [], len(self.activations)
        each = zip(self.activations, U.chunk(many), v.chunk(many), strict=True)
        directions = {k: (torch.bmm(u, now["z"]), one) for k, u, one in each}
        averages = self.sampler.averages(now, directions, self.now)
        for k, (_, one) in directions.items():
            first, second = averages[k]
            miss = (one * first).sum(-2, keepdim=True) - now["label"][:, None]
            slope = miss * (2 / miss.shape[-1])
            dv = (first * slope).sum(-1, keepdim=True)
            parts.append((miss.square().mean((-1, -2)), (second * slope) @ now["z"].mT, dv))
        if many == 1:
            return parts[0]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _start(self, seed: int, shared: bool) -> dict[str, Tensor]:
        """Weights (all runs, ...), drawn on the CPU."""
        names = itertools.product(range(self.shape[0]), self.lengths, range(self.replicates))
        each = [
            self.model.start(
                torch.Generator().manual_seed(
                    _mixed(seed, replicate) if shared else _mixed(seed, replicate, length, k)
                )
            )
            for k, length, replicate in names
        ]
        return {name: torch.stack([one[name] for one in each]) for name in each[0]}

    def _window(self) -> Tensor:
        """Number, sum and sum of squares of each run's losses since the last record."""
        like = next(iter(self.weights.values()))
        return torch.zeros(3, len(like)).to(like)

    def _record(self) -> None:
        count, total, squares = self.window.unflatten(1, self.shape)
        loss = total / count
        if not torch.isfinite(loss).all():
            k, i, r = (~torch.isfinite(loss)).nonzero()[0].tolist()
            raise ArithmeticError(
                f"training diverged before step {self.steps}: the loss of {self.activations[k]} at "
                f"length {self.lengths[i]} is {loss[k, i, r].item()}. Lower the rate"
            )
        spread = (squares / count - loss.square()).clamp_min(0) / (count - 1).clamp_min(1)
        self.records.append((torch.tensor(self.steps), loss, spread.sqrt(), *self.effective()))
        self.window = self._window()

    def _save(self, path: Path) -> None:
        history = self.history if self.records else None
        tensors = {f"weights.{name}": weight for name, weight in self.weights.items()}
        for i, (before, now) in enumerate(zip(self.before, self.now, strict=True)):
            tensors |= {f"ahead.{i}": before, f"now.{i}": now.get_state()}
        tensors["window"] = self.window
        if history is not None:
            tensors |= {f"history.{name}": value for name, value in vars(history).items()}
        save(path, tensors, {"steps": self.steps, "seconds": self.seconds, "config": self.config})

    def _resume(self, path: Path) -> None:
        tensors, rest = load(path)
        theirs = rest.get("config", {})
        other = [name for name in self.config if theirs.get(name) != self.config[name]]
        if other:
            raise ValueError(
                f"{path} belongs to another training: it differs in {', '.join(other)}. Give the "
                f"same arguments and versions, or another file"
            )
        like = self.window
        self.steps, self.seconds = rest["steps"], rest["seconds"]
        self.weights = {name: tensors[f"weights.{name}"].to(like) for name in self.weights}
        for i, (ahead, now) in enumerate(zip(self.ahead, self.now, strict=True)):
            ahead.set_state(tensors[f"ahead.{i}"])
            now.set_state(tensors[f"now.{i}"])
        self.before = [g.get_state() for g in self.ahead]
        self.drawn = self.sampler.ahead(AHEAD, self.ahead)[::-1] if self.steps else []
        del self.drawn[AHEAD - (self.steps % AHEAD or AHEAD) :]
        self.window = tensors["window"].to(like)
        columns = [tensors.get(f"history.{name}") for name in History.__dataclass_fields__]
        self.records = [] if columns[0] is None else list(zip(*columns, strict=True))


def _mixed(seed: int, *more: int) -> int:
    """One seed of several whole numbers, by NumPy's seed sequence."""
    return int(np.random.SeedSequence((seed, *more)).generate_state(1, np.uint64)[0] >> 1)


def _require_known(name: str, given: Sequence[str], known: Collection[str]) -> None:
    for one in given:
        if one not in known:
            raise ValueError(f"{name} must be of {', '.join(known)}, got {one!r}.")

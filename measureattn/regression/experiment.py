"""The paper's grid of experiments: setting P, prompt lengths 10 to 1000, 300,000 steps.

`cells` lists what is to be trained, `run_cell` trains one and tests it; `measureattn.sweeps` does
so over many processes, and `python -m measureattn experiment` from the command line.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from measureattn.regression.evaluation import mse_linear, mse_softmax, product
from measureattn.regression.task import Task
from measureattn.regression.training import Training

LENGTHS = [*range(10, 100, 10), *range(100, 1001, 100)]
SEED, STEPS = 327, 300_000
LAWS = ("intended", "published")
TOGETHER = 2000  # tokens a prompt that runs of one program have between them
TESTED = 20_000  # prompts a record; ten times as many at the end


def setting(law: str = "intended") -> Task:
    """Setting P: S_ij = 0.5^|i-j| in dimension 5, weights of variance 1/5, noise of variance 0.1.

    law  "intended", or "published" for the law of the authors' public code
    Raises ValueError for another one. Source: section 6, arXiv 2512.11784. See: chapter 10.

    >>> setting().prompt_cov[0]
    tensor([1.0000, 0.5000, 0.2500, 0.1250, 0.0625], dtype=torch.float64)
    """
    if law not in LAWS:
        raise ValueError(f"law must be of {', '.join(LAWS)}, got {law!r}.")
    index = torch.arange(5, dtype=torch.float64)
    cov = 0.5 ** (index - index[:, None]).abs()
    return Task(cov, task_var=1 / 5, noise_var=0.1, as_published=law == "published")


def cells(
    lengths: Sequence[int] = LENGTHS, *, seeds: Sequence[int] = (SEED,),
    laws: Sequence[str] = ("intended",), steps: int = STEPS,
) -> list[dict]:  # fmt: skip
    """What is to be trained, each cell a law, a seed and lengths that share a program.

    Longest prompts first. Which lengths share depends on `lengths` alone, so that a grid gives the
    same numbers however many processes run it.
    See: chapter 10.

    >>> [cell["lengths"] for cell in cells()][:3]
    ['1000+900', '800+700', '600+500+400+300+200']
    """
    groups: list[list[int]] = []
    for length in sorted(set(lengths), reverse=True):
        if not groups or sum(groups[-1]) + length > TOGETHER:
            groups.append([])
        groups[-1].append(length)
    return [
        {"law": law, "seed": seed, "steps": steps, "lengths": "+".join(map(str, group))}
        for law in laws
        for seed in seeds
        for group in groups
    ]


def run_cell(cell: dict, checkpoint: Path | None = None) -> dict:
    """Train a cell's runs, from `checkpoint` if it is there, and test them as they go.

    Returns rows (one a length, activation and record) and the trained (U, v) of each. Softmax and
    linear attention share initial weights and prompts; under the published law the prompts only,
    as there. Raises as `Training.run`. Source: section 6, arXiv 2512.11784. See: chapter 10.

    >>> found = run_cell({"law": "intended", "seed": 0, "steps": 1, "lengths": "10"})
    >>> [row["activation"] for row in found["rows"]]
    ['softmax', 'linear']
    """
    task, lengths = setting(cell["law"]), [int(x) for x in cell["lengths"].split("+")]
    shared = cell["law"] == "intended"
    training = Training(task, lengths, seed=cell["seed"], shared_start=shared)
    training.run(cell["steps"], checkpoint=checkpoint)
    rows, models, began = [], [], time.perf_counter()
    for i, length in enumerate(lengths):
        for k, activation in enumerate(training.activations):
            name = {"length": length, "activation": activation}
            rows += [name | row for row in _tested(task, training, k, i, cell["steps"])]
            U, v = (part[k, i, 0].tolist() for part in training.effective())
            models.append(name | {"U": U, "v": v})
    seconds = training.seconds + time.perf_counter() - began
    return {"rows": rows, "models": models, "seconds": seconds}


def _tested(task: Task, training: Training, k: int, i: int, last: int) -> list[dict]:
    history, length, rows = training.history, training.lengths[i], []
    best = torch.linalg.inv(task.prompt_cov)
    for n, step in enumerate(history.steps.tolist()):
        U, v = history.U[n, k, i, 0], history.v[n, k, i, 0]
        if training.activations[k] == "linear":
            mse, std_error = mse_linear(task, U, v, length), 0.0
        else:
            prompts = TESTED * (10 if step == last else 1)
            generator = torch.Generator().manual_seed(training.config["seed"])
            tested = mse_softmax(task, U, v, length, prompts, generator=generator)
            mse, std_error = tested.value, float(tested.std_error)
        rows.append(
            {
                "step": step,
                "loss": float(history.loss[n, k, i, 0]),
                "loss_std_error": float(history.std_error[n, k, i, 0]),
                "mse": float(mse),
                "mse_std_error": std_error,
                "distance": float((product(U, v) - best).norm() / best.norm()),
                "A_norm": float(U[:-1, :-1].norm()),
                "b": float(v[0, -1]),
            }
        )
    return rows

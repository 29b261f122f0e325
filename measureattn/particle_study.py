"""The particle runs that chapter 13 shows and repeats in part: too long to make each time.

`cells` lists them, `run_cell` runs one; `measureattn.sweeps` does so over many processes.
"""

import argparse
from pathlib import Path

import torch

from measureattn.meanfield import SelfAttention, gaussian_flow, interacting, sequential
from measureattn.measures import Empirical, Gaussian, Measure, Mixture
from measureattn.running_laws import FlowLaw, Reservoir, RunningLaw, TiltTable

SEED, STEPS, TIME = 13, 10, 1.0
KINDS = {2: ("interacting", "reservoir", "table", "flow"), 10: ("interacting", "flow")}
SIZES = {2: (400, 1600, 6400), 10: (1600, 6400)}
RUNS = {2: 16, 10: 4}
LARGE, SYSTEMS = 4_000, 8  # particles, and systems of so many, where there is no closed form
BATCH = 200
CAPACITY = 183  # paths: a reservoir as large as a table of 8 x 8 tilts
F64 = dict(dtype=torch.float64)


def setting(dim: int) -> tuple[SelfAttention, Gaussian]:
    """The noisy self-attention of chapter 13 in dimension 2, or a relative in another one.

    Source: ours. See: chapter 13.

    >>> system, start = setting(2)
    >>> start.mean
    tensor([ 1.0000, -0.5000], dtype=torch.float64)
    """
    if dim == 2:
        U = torch.tensor([[-0.5, 0.2], [0.1, -0.4]], **F64)
        mean = torch.tensor([1.0, -0.5], **F64)
        cov = torch.tensor([[1.0, 0.3], [0.3, 0.6]], **F64)
    else:
        index = torch.arange(dim, **F64)
        gaps = index - index[:, None]
        U = 0.1 * gaps.sin() - 0.4 * torch.eye(dim, **F64)
        mean, cov = 0.5 * (-1.0) ** index, 0.3 ** gaps.abs()
    return SelfAttention(U, torch.eye(dim, **F64), noise=0.5), Gaussian(mean, cov)


def rotated() -> tuple[SelfAttention, Gaussian]:
    """The setting in dimension 2 with U turned round and a value matrix that is not the identity.

    Source: ours. See: chapter 13.

    >>> rotated()[0].V[0]
    tensor([ 0.8000, -0.6000], dtype=torch.float64)
    """
    system, start = setting(2)
    return SelfAttention(-system.U, torch.tensor([[0.8, -0.6], [0.5, 0.9]], **F64), 0.5), start


def two_groups() -> tuple[SelfAttention, Mixture]:
    """A start that is not Gaussian: two groups of tokens, at (1.5, 0) and (-1.5, 0).

    Source: ours. See: chapter 13.

    >>> two_groups()[1].cov.diagonal()
    tensor([2.3500, 0.1000], dtype=torch.float64)
    """
    eye, centre = torch.eye(2, **F64), torch.tensor([1.5, 0.0], **F64)
    parts = [Gaussian(sign * centre, 0.1 * eye) for sign in (1, -1)]
    return SelfAttention(0.35 * eye, eye, noise=0.3), Mixture(
        parts, torch.tensor([0.5, 0.5], **F64)
    )


def errors(law: Measure, truth: Gaussian) -> tuple[float, float]:
    """Mean absolute error over the entries of the mean, and over those of the covariance.

    Source: ours. See: chapter 13.

    >>> one = Gaussian(torch.zeros(1), torch.ones(1, 1))
    >>> errors(Gaussian(torch.ones(1), torch.ones(1, 1)), one)
    (1.0, 0.0)
    """
    gaps = law.mean - truth.mean, law.cov - truth.cov
    return tuple(gap.abs().mean().item() for gap in gaps)


def final_law(
    kind: str, n: int, *, dim: int = 2, generator: torch.Generator
) -> tuple[Measure, int]:
    """The law at time 1 of n particles in `setting(dim)`, and how many numbers were kept for it.

    kind  "interacting", "reservoir", "table" or "flow"
    Raises KeyError for another one. Source: ours. See: chapter 13.

    >>> final_law("interacting", 50, generator=torch.Generator().manual_seed(0))[1]
    100
    """
    system, start = setting(dim)
    grid = dict(dt=TIME / STEPS, steps=STEPS, generator=generator)
    if kind == "interacting":
        *_, x = interacting(system, start.sample(n, generator=generator), **grid)
        return Empirical(x), x.numel()
    running: RunningLaw = {
        "reservoir": lambda: Reservoir(CAPACITY, generator=generator),
        "table": lambda: TiltTable(system.U),
        "flow": lambda: FlowLaw(
            dim, STEPS, hidden=(16, 16) if dim == 2 else (32, 32), generator=generator
        ),
    }[kind]()
    sequential(system, start, running, n, batch=BATCH, **grid)
    law = Empirical(running.sample(STEPS, 2**14)) if kind == "flow" else running.law(STEPS)
    return law, running.numbers


def cells() -> list[dict]:
    """Every cell of the study. Source: ours. See: chapter 13.

    >>> cells()[0]
    {'study': 'interacting', 'dim': 2, 'n': 400, 'seed': 13}
    """
    found = [
        {"study": kind, "dim": dim, "n": n, "seed": SEED}
        for dim, kinds in KINDS.items()
        for n in SIZES[dim]
        for kind in kinds
    ]
    return found + [
        {"study": study, "dim": 2, "n": LARGE, "seed": SEED} for study in ("rotated", "two groups")
    ]


def run_cell(cell: dict, checkpoint: Path | None = None) -> dict:
    """The rows of a cell: one a run with its errors, or the moments of large runs.

    Source: ours. See: chapter 13.

    >>> cell = {"study": "two groups", "dim": 2, "n": 100, "seed": 0}
    >>> list(run_cell(cell)["rows"][0])
    ['run', 'time', 'm1', 'm2', 'G11', 'G12', 'G22']
    """
    generator = torch.Generator().manual_seed(cell["seed"] * 10**6 + cell["n"])
    study, n, dim = cell["study"], cell["n"], cell["dim"]
    if study in ("rotated", "two groups"):
        system, start = rotated() if study == "rotated" else two_groups()
        found = [moments(system, start, n, generator=generator) for _ in range(SYSTEMS)]
        return {"rows": [{"run": i} | row for i, table in enumerate(found) for row in table]}
    system, start = setting(dim)
    truth = gaussian_flow(system, start, [TIME])
    rows = []
    for run in range(RUNS[dim]):
        law, numbers = final_law(study, n, dim=dim, generator=generator)
        mean, cov = errors(law, truth)
        rows.append({"run": run, "mean_error": mean, "cov_error": cov, "numbers": numbers})
    return {"rows": rows}


def moments(
    system: SelfAttention, start: Measure, n: int, *, generator: torch.Generator
) -> list[dict]:
    """Mean and covariance of n interacting particles in the plane at the times 0, 1/2 and 1.

    Source: ours. See: chapter 13.

    >>> [row["time"] for row in moments(*two_groups(), 20, generator=torch.Generator())]
    [0.0, 0.5, 1.0]
    """
    x, rows = start.sample(n, generator=generator), []
    for k, state in enumerate(interacting(system, x, TIME / STEPS, STEPS, generator=generator)):
        if k % (STEPS // 2) == 0:
            m, G = (part.tolist() for part in (Empirical(state).mean, Empirical(state).cov))
            row = {"m1": m[0], "m2": m[1], "G11": G[0][0], "G12": G[0][1], "G22": G[1][1]}
            rows.append({"time": k * TIME / STEPS} | row)
    return rows


def add_particles(subparsers) -> None:
    """The subcommand that runs the study. Source: ours. See: chapter 13.

    >>> add_particles(argparse.ArgumentParser().add_subparsers())
    """
    parser = subparsers.add_parser(
        "particles",
        help="run the particle methods of chapter 13",
        description="Run the particle methods of chapter 13 and tabulate their errors. Can be "
        "stopped at any time: the same command goes on.",
    )
    option = parser.add_argument
    option("--out", metavar="FOLDER", type=Path, default=Path("results-particles"),
           help="results, one file a cell (default: %(default)s)")  # fmt: skip
    option("--workers", metavar="N", type=int, help="processes (default: one a core)")
    option("--table", metavar="FILE", type=Path,
           help="a .csv or .parquet (default: table.csv in FOLDER)")  # fmt: skip
    parser.set_defaults(run=run_particles)


def run_particles(args: argparse.Namespace) -> int:
    """Run what is missing, write the table. Source: ours. See: chapter 13.

    >>> run_particles.__name__
    'run_particles'
    """
    from measureattn import sweeps

    path = sweeps.require_table(args.table or args.out / "table.csv")
    sweeps.sweep(
        run_cell, cells(), args.out, workers=args.workers, command="python -m measureattn particles"
    )
    sweeps.write_table(args.out, path)
    print(f"all records: {path}")
    return 0

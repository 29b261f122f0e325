"""The command line: `python -m measureattn` says what there is."""

import argparse
import sys
from pathlib import Path

from measureattn.heads.cli import add_heads
from measureattn.particle_study import add_particles
from measureattn.sweeps import SweepError

GRID = "10 to 90 by 10 and 100 to 1000 by 100"


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, where argparse would repeat the usage."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand. Exit codes: 0, 1 a part failed, 2 wrong input or place, 130 Ctrl-C."""
    parser = _Parser(prog="python -m measureattn", description="Softmax attention on measures.")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    add_experiment(subparsers)
    add_heads(subparsers)
    add_particles(subparsers)
    args = parser.parse_args(arguments)
    if not hasattr(args, "run"):
        parser.print_help()
        return 0
    try:
        return args.run(args)
    except KeyboardInterrupt as stop:
        return _fail(130, stop.args[0] if stop.args else "stopped")
    except OSError as error:
        return _fail(2, ": ".join(str(x) for x in (error.filename, error.strerror) if x))
    except ValueError as error:
        return _fail(2, error)
    except SweepError as error:
        return _fail(1, error)


def add_experiment(subparsers) -> None:
    """The subcommand that trains the paper's grid."""
    parser = subparsers.add_parser(
        "experiment",
        help="train softmax and linear attention over a grid of prompt lengths",
        description="Train softmax and linear attention on in-context regression (section 6 of "
        "arXiv 2512.11784; chapter 10) and tabulate their test errors. Can be stopped at any time: "
        "the same command goes on.",
    )
    option = parser.add_argument
    option("--out", metavar="FOLDER", type=Path, default=Path("results"),
           help="results, one file a group of lengths (default: %(default)s)")  # fmt: skip
    option("--lengths", metavar="L,L,...", type=_numbers(1), help=f"default: {GRID}")
    option("--seeds", metavar="N,N,...", type=_numbers(0), help="default: 327")
    option("--steps", metavar="N", type=_number(1), help="of gradient descent (default: 300000)")
    option("--laws", metavar="LAW,LAW", type=lambda text: text.split(","), default=["intended"],
           help="intended (default), published, or both")  # fmt: skip
    option("--workers", metavar="N", type=_number(1), help="processes (default: one a core)")
    option("--table", metavar="FILE", type=Path,
           help="a .csv or .parquet (default: table.csv in FOLDER)")  # fmt: skip
    parser.set_defaults(run=run_experiment)


def run_experiment(args: argparse.Namespace) -> int:
    """Train what is missing, write the table, print its last records."""
    from measureattn import sweeps
    from measureattn.regression import experiment

    path = sweeps.require_table(args.table or args.out / "table.csv")
    lengths, seeds = args.lengths or experiment.LENGTHS, args.seeds or [experiment.SEED]
    steps = args.steps or experiment.STEPS
    for law in args.laws:
        experiment.setting(law)  # refuses unknown ones
    cells = experiment.cells(lengths, seeds=seeds, laws=args.laws, steps=steps)
    lists = {"lengths": lengths, "seeds": seeds, "laws": args.laws, "steps": [steps]}
    command = "python -m measureattn experiment " + " ".join(
        f"--{name} {','.join(map(str, values))}" for name, values in lists.items()
    )
    code = 0
    try:
        sweeps.sweep(
            experiment.run_cell, cells, args.out, workers=args.workers, command=command
        )  # fmt: skip
    except SweepError as error:  # the table holds what is finished
        code = _fail(1, error)
    rows = sweeps.rows(args.out)
    if rows:
        sweeps.write_table(args.out, path)
        _print_last(rows, cells)
        print(f"\nall records: {path}")
    return code


def _print_last(rows: list[dict], cells: list[dict]) -> None:
    print(f"{'law':9} {'length':>6} {'seed':>5} {'activation':10} {'test mse':>9} {'std error':>9}")
    for row in rows:
        cell = {name: row[name] for name in cells[0]}
        if cell in cells and row["step"] == row["steps"]:
            print(
                f"{row['law']:9} {row['length']:6} {row['seed']:5} {row['activation']:10} "
                f"{row['mse']:9.6f} {row['mse_std_error']:9.6f}"
            )


def _numbers(least: int):
    def parse(text: str) -> list[int]:
        return [_number(least)(part) for part in text.split(",")]

    return parse


def _number(least: int):
    def parse(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {least} on (several: 10,20,30)"
            )
        return int(text)

    return parse


def _fail(code: int, message) -> int:
    print(f"python -m measureattn: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

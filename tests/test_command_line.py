"""The command line: what it prints, what it refuses in one line, its exit codes."""

import csv
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import toy_sweep

from measureattn import particle_study, sweeps
from measureattn.__main__ import main
from measureattn.regression import experiment


def run(*arguments):
    """Exit code, as the shell sees it."""
    try:
        return main([str(word) for word in arguments])
    except SystemExit as end:
        return end.code


@pytest.fixture
def toy(monkeypatch):
    """Cells of no time, on threads of this process."""

    @contextmanager
    def threads(workers):
        with ThreadPoolExecutor(workers) as executor:
            yield executor

    monkeypatch.setattr(sweeps, "_processes", threads)
    monkeypatch.setattr(experiment, "cells", lambda *_, **__: toy_sweep.cells([0, 0]))
    monkeypatch.setattr(experiment, "run_cell", toy_sweep.run_cell)


def test_the_module_alone_prints_the_help():
    answer = subprocess.run(
        [sys.executable, "-m", "measureattn"], capture_output=True, text=True, check=True
    )
    assert "usage: python -m measureattn" in answer.stdout and "experiment" in answer.stdout


def test_help_names_the_options(capsys):
    assert run("experiment", "--help") == 0
    text = capsys.readouterr().out
    for option in ("out", "lengths", "seeds", "steps", "laws", "workers", "table"):
        assert f"--{option}" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train"], "invalid choice: 'train'"),
        (["experiment", "--lengths", "10,ten"], "'ten' is not a whole number from 1 on"),
        (["experiment", "--lengths", "0"], "'0' is not a whole number from 1 on"),
        (["experiment", "--lengths", ""], "'' is not a whole number from 1 on"),
        (["experiment", "--seeds", "-1"], "'-1' is not a whole number from 0 on"),
        (["experiment", "--seeds", "1.5"], "'1.5' is not a whole number from 0 on"),
        (["experiment", "--steps", "0"], "'0' is not a whole number from 1 on"),
        (["experiment", "--workers", "0"], "'0' is not a whole number from 1 on"),
        (["experiment", "--laws", "intended,foreign"], "of intended, published, got 'foreign'"),
        (["experiment", "--table", "rows.txt"], "a .csv or .parquet file, got rows.txt"),
        (["experiment", "--depth", "3"], "unrecognized arguments"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert says in said.err and said.err.count("\n") == 1 and not said.out
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_one_line_and_exit_code_2(toy, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert run("experiment", "--out", tmp_path / "file") == 2
    error = capsys.readouterr().err
    assert f"cannot write to {tmp_path / 'file'}" in error and error.count("\n") == 1


def test_a_damaged_result_is_one_line_and_exit_code_2(toy, tmp_path, capsys):
    assert run("experiment", "--out", tmp_path) == 0
    path = next(tmp_path.glob("toy-*.json"))
    path.write_text("{")
    capsys.readouterr()
    assert run("experiment", "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert path.name in error and error.count("\n") == 1


def test_a_failing_cell_is_exit_code_1_and_the_table_holds_the_rest(
    toy, tmp_path, monkeypatch, capsys
):
    def fail(cell, checkpoint):
        if cell["length"] == 2:
            raise ArithmeticError("training diverged")
        return toy_sweep.run_cell(cell, checkpoint)

    monkeypatch.setattr(experiment, "run_cell", fail)
    assert run("experiment", "--out", tmp_path / "out", "--table", tmp_path / "mine.csv") == 1
    assert "ArithmeticError: training diverged" in capsys.readouterr().err
    with open(tmp_path / "mine.csv", newline="") as file:
        assert {row["length"] for row in csv.DictReader(file)} == {"1"}


def test_it_ends_with_a_short_table_of_what_was_asked(toy, tmp_path, monkeypatch, capsys):
    assert run("experiment", "--out", tmp_path) == 0
    monkeypatch.setattr(experiment, "cells", lambda *_, **__: toy_sweep.cells([0]))
    capsys.readouterr()
    assert run("experiment", "--out", tmp_path) == 0
    head, row, _, where = capsys.readouterr().out.splitlines()
    assert head.split() == ["law", "length", "seed", "activation", "test", "mse", "std", "error"]
    assert row.split()[:4] == ["toy", "1", "1", "softmax"]
    assert where.endswith("table.csv")
    command = json.loads((tmp_path / "table.json").read_text())["cells"][0]["provenance"]["command"]
    assert command.startswith("python -m measureattn experiment --lengths 10,20,30,")
    assert command.endswith("--seeds 327 --laws intended --steps 300000")


def test_a_small_experiment_from_start_to_end(tmp_path):
    arguments = ["--lengths", "5", "--steps", "2", "--workers", "1", "--laws", "published"]
    answer = subprocess.run(
        [sys.executable, "-m", "measureattn", "experiment", "--out", "out", *arguments],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert answer.stderr.startswith("1 of 1: published-327-2-5-")
    assert [line.split()[3] for line in answer.stdout.splitlines()[1:3]] == ["softmax", "linear"]
    with open(tmp_path / "out" / "table.csv", newline="") as file:
        assert {row["step"] for row in csv.DictReader(file)} == {"1", "2"}


def test_a_failed_cell_of_the_particles_is_a_line_and_exit_code_1(
    toy, tmp_path, monkeypatch, capsys
):
    def fail(cell, checkpoint):
        raise ValueError("no flow today")

    monkeypatch.setattr(particle_study, "cells", lambda: [{"study": "flow"}])
    monkeypatch.setattr(particle_study, "run_cell", fail)
    assert run("particles", "--out", tmp_path / "out", "--workers", "1") == 1
    error = capsys.readouterr().err
    assert "no flow today" in error and "Traceback" not in error

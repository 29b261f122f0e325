"""The command `heads`: its files, its one-line errors, its exit codes, and how it is stopped."""

import argparse
import csv
import errno
import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")

import tiny_models

from measureattn.heads import cli

FILES = ["heads.csv", "heads.json", "heads.png"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_models.save("bert", tmp_path_factory.mktemp("bert"))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text(tiny_models.text(400))
    return path


@pytest.fixture
def run(model, text, tmp_path, monkeypatch):
    """The command on the tiny model; options given replace the usual ones."""
    monkeypatch.setattr(cli, "LENGTHS", (8, 32))

    def call(*more, **options):
        options = {"model": model, "text": text, "out": tmp_path / "out"} | options
        words = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        parser = argparse.ArgumentParser()
        cli.add_heads(parser.add_subparsers())
        args = parser.parse_args(["heads", *words, "--window", "20", *map(str, more)])
        return args.run(args)

    return call


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_it_prints_a_table_and_writes_three_files(run, tmp_path, capsys):
    assert run() == 0
    out, err = capsys.readouterr()
    assert err == ""  # the progress bar is for terminals
    assert out.count("\n") == 1 + 12 + 3
    assert "396 tokens in 22 windows" in out
    folder = tmp_path / "out"
    assert names(folder) == FILES
    rows = list(csv.DictReader((folder / "heads.csv").open()))
    facts = json.loads((folder / "heads.json").read_text())
    assert [row["head"] for row in rows] == [f"{i}.{h}" for i in range(3) for h in range(4)]
    assert facts["tokens"] == 396 and facts["window"] == 20 and facts["queries"] == 200
    for row, same in zip(rows, facts["heads"], strict=True):
        assert float(row["share"]) == same["share"] > 0
        assert {"decay_8", "decay_32_std_error"} <= set(same)
    assert (folder / "heads.png").read_bytes().startswith(b"\x89PNG")


def test_options_are_obeyed_and_a_seed_repeats(run, tmp_path, text):
    first = run("--layers", 2, 0, "--queries", "all", "--special", out=tmp_path / "a")
    again = run("--layers", 0, 2, "--queries", "all", "--special", out=tmp_path / "b")
    assert (first, again) == (0, 0)
    one, other = ((tmp_path / x / "heads.json").read_text() for x in "ab")
    assert one == other
    facts = json.loads(one)
    assert [row["head"] for row in facts["heads"]] == [f"{i}.{h}" for i in (0, 2) for h in range(4)]
    assert facts["special_tokens_kept"] and facts["tokens"] == 440
    assert all(row["share_std_error"] == 0 for row in facts["heads"])
    assert run("--max-tokens", 90) == 0
    assert json.loads((tmp_path / "out" / "heads.json").read_text())["tokens"] == 90


def test_what_is_left_out_of_a_decoder_is_said(run, tmp_path, capsys):
    folder = tiny_models.save("llama", tmp_path / "llama")
    assert run(model=folder) == 0
    assert "Left out: the causal mask" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out" / "heads.json").read_text())["left_out"]) == 2


BAD = {
    "no folder": (lambda tmp: dict(model=tmp / "none"), "expected a folder with a model"),
    "no model": (lambda tmp: dict(model=tmp), "holds no model"),
    "no file": (lambda tmp: dict(text=tmp / "none.txt"), "none.txt: No such file"),
    "a folder as text": (lambda tmp: dict(text=tmp), "Is a directory"),
    "an empty file": (lambda tmp: dict(text=write(tmp, b" \n")), "is empty"),
    "a binary file": (lambda tmp: dict(text=write(tmp, b"\x89PNG\xff")), "is no UTF-8 text"),
    "a zero byte": (lambda tmp: dict(text=write(tmp, b"a\0b")), "zero byte at 1"),
    "a short text": (lambda tmp: dict(text=write(tmp, b"w1 w2")), "one window needs 18"),
    "no such layer": (lambda tmp: dict(layers=5), "numbered 0 to 2, got 5"),
    "a file as folder": (lambda tmp: dict(out=write(tmp, b"here")), "File exists"),
    "no tolerance": (lambda tmp: dict(tolerance=0), "--tolerance must be above 0"),
}


def write(folder, content):
    path = folder / "given"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(case, run, tmp_path, capsys):
    change, message = BAD[case]
    assert run(**change(tmp_path)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err and err.count("\n") == 1
    out = tmp_path / "out"
    assert not out.exists() or names(out) == []


def test_damaged_weights_and_other_attention_are_one_line(run, tmp_path, capsys):
    folder = tiny_models.save("bert", tmp_path / "damaged")
    damaged = tiny_models.model("bert")
    with torch.no_grad():
        damaged.encoder.layer[2].output.dense.weight[0, 0] = torch.inf
    damaged.save_pretrained(folder)
    assert run(model=folder) == 2
    assert "layer.2.output.dense.weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_stop_keeps_the_layers_that_are_finished(run, tmp_path, capsys, monkeypatch):
    """Ctrl-C in the third layer: two are in the files, which are whole."""
    measured = []

    def interrupted(*arrays, **options):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(1)
        return measure(*arrays, **options)

    measure = cli.measure_heads
    monkeypatch.setattr(cli, "measure_heads", interrupted)
    assert run() == 130
    assert "stopped after 2 of 3 layers" in capsys.readouterr().err
    assert names(tmp_path / "out") == FILES
    assert len(json.loads((tmp_path / "out" / "heads.json").read_text())["heads"]) == 8
    assert run(out=tmp_path / "nothing") == 130
    assert "before the first layer" in capsys.readouterr().err
    assert names(tmp_path / "nothing") == []


def test_a_failed_write_leaves_the_old_file(run, tmp_path, capsys, monkeypatch):
    run()
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    capsys.readouterr()
    assert run("--seed", "5") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "heads.csv" in line and "make room" in line
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_without_the_extra_it_says_what_to_install(text, tmp_path):
    """In a process where transformers cannot be imported; the package itself can."""
    code = f"""
import sys
sys.modules["transformers"] = None
import argparse, measureattn, measureattn.heads
from measureattn.heads import cli
parser = argparse.ArgumentParser()
cli.add_heads(parser.add_subparsers())
args = ["heads", "--model", {str(tmp_path)!r}, "--text", {str(text)!r}, "--out", "unused"]
args = parser.parse_args(args)
sys.exit(args.run(args))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'measureattn[heads]'" in done.stderr
    assert done.stderr.count("\n") == 1

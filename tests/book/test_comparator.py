"""The comparator of book/conftest.py: what it lets pass, what it must not, alone and in nbval."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

CONFTEST = Path(__file__).parents[2] / "book" / "conftest.py"
spec = importlib.util.spec_from_file_location("book_conftest", CONFTEST)
comparator = importlib.util.module_from_spec(spec)
spec.loader.exec_module(comparator)

ALIKE = [
    ("0.33333", "0.33333999"),
    ("loss 0.5000, error 1.2e-9", "loss 0.49999, error 1.20003e-9"),
    ("tensor([1.0000, 2.0000])", "tensor([1.0001, 1.9999])"),
    ("tensor([1., 2.])", "tensor([1.0000, 2.0000])"),
    ("tensor([[ 0.5000, -1.0000],\n        [ 1.0000,  2.0000]])",
     "tensor([[ 0.5000, -1.0001],\n        [ 1.0000,  2.0000]])"),
    ("(1.0000+2.0000j)", "(1.0000+2.0001j)"),
    ("ratio 1, mean 2.00001", "ratio 0.999998, mean 2"),
    ("0.000", "-0.000"),
    ("nan inf -inf", "nan inf -inf"),
    ("within 1e-12", "within 1e-12"),
    ("1.00000e-400", "1.00001e-400"),
    ("9.99999e-10", "1.00000e-9"),
    ("L=10, D=3, x=0.50000", "L=10, D=3, x=0.50001"),
    ("<object at 0x7f12ab34cd56>", "<object at 0x7f0000000000>"),
    ("/tmp/ipykernel_12/345.py:3: UserWarning", "/var/x/ipykernel_9/8.py:3: UserWarning"),
]
DIFFERENT = [
    ("0.33333", "0.3340"),
    ("1.2e-9", "9.9e-9"),
    ("2e-42", "5e-41"),
    ("1e-400", "5e-400"),
    ("1e400", "5e400"),
    ("0.0", "1e-300"),
    ("1000", "1001"),
    ("100000", "100001"),
    ("counted 100000.", "counted 100001."),
    ("-3", "3"),
    ("1", "1.0002"),
    ("L=10", "L=11"),
    ("-0.5", "0.5"),
    ("x -0.5", "x +0.5"),
    ("1.5-2.5j", "1.5+2.5j"),
    ("inf", "-inf"),
    ("nan", "0.5"),
    ("inf", "1e300"),
    ("0.5", "0.5 0.5"),
    ("0.5 0.5", "0.5"),
    ("loss ", "loss 0.5"),
    ("within 1e-12", "within 1e-11"),
    ("holds 0.5", "fails 0.5"),
    ("0.5 m", "0.5 km"),
    ("a\nb", "a b"),
    ("tensor([1.0000, 2.0000])", "tensor([1.0000, 2.0010])"),
    ("tensor([1.0000, 2.0000])", "tensor([[1.0000, 2.0000]])"),
    ("float32 0.5", "float64 0.5"),
    ("at 0x10", "at 0x11"),
    ("/tmp/ipykernel_12/345.py:3: UserWarning", "/tmp/ipykernel_12/345.py:4: UserWarning"),
]


@pytest.mark.parametrize("want, got", ALIKE)
def test_texts_that_agree_up_to_rounding(want, got):
    assert comparator.difference(want, got) == ""


@pytest.mark.parametrize("want, got", DIFFERENT)
def test_texts_that_differ(want, got):
    assert comparator.difference(want, got)
    assert comparator.difference(got, want)


def text(words, name="stdout"):
    return new_output("stream", name=name, text=words)


def figure(png="aGVsbG8="):
    return new_output("display_data", data={"image/png": png, "text/plain": "<Figure>"})


def result(words):
    return new_output("execute_result", data={"text/plain": words}, execution_count=1)


def error(value):
    return new_output("error", ename="ValueError", evalue=value, traceback=["at 0x7f"])


def complaint(want, got):
    """What the patched nbval method says; empty when the outputs agree."""
    cell = SimpleNamespace()
    agree = comparator.IPyNbCell.compare_outputs(cell, test=got, ref=want)
    assert agree == (not cell.comparison_traceback)
    return "\n".join(cell.comparison_traceback)


@pytest.mark.parametrize("outputs", [
    [], [text("0.5")], [figure()], [text("a"), figure(), result("1.5")], [error("bad 0.5")],
])
def test_same_outputs_agree(outputs):
    assert complaint(outputs, outputs) == ""


def test_pixels_and_tracebacks_are_not_compared():
    assert complaint([figure("aGVsbG8="), text("a")], [figure("d29ybGQ="), text("a")]) == ""


@pytest.mark.parametrize("want, got", [
    ([text("0.5")], []),
    ([], [text("0.5")]),
    ([result("0.5")], [result("0.5"), result("0.5")]),
    ([figure(), text("a")], [text("a")]),
    ([figure(), figure()], [figure()]),
    ([result("<Figure>"), figure()], [result("<Figure>"), result("<Figure>")]),
    ([text("a")], [text("a", "stderr")]),
    ([text("a")], [text("a"), text("a warning", "stderr")]),
    ([result("0.5")], [result("0.6")]),
    ([error("bad 0.5")], [error("bad 0.6")]),
    ([error("bad")], [text("bad")]),
])
def test_missing_extra_or_changed_outputs(want, got):
    assert complaint(want, got)
    assert complaint(got, want)


def test_the_complaint_names_both_sides():
    words = complaint([text("loss 0.33333")], [text("loss 0.3340")])
    assert "stdout: the twin has '0.33333', this run printed '0.3340'" in words


def test_cells_run_here_and_within_a_minute():
    config = SimpleNamespace(option=SimpleNamespace())
    comparator.pytest_configure(config)
    assert config.option == SimpleNamespace(nbval_current_env=True, nbval_cell_timeout=60)
    cell = object.__new__(comparator.IPyNbCell)
    comparator.pytest_itemcollected(cell)
    assert cell.output_timeout == 60


CODE = """print('loss', 1 / 3, 'steps', 10)
print(object())"""


def run_nbval(folder, printed, options=(), cwd=None):
    """nbval on a one-cell notebook whose stored output is `printed`, its output captured."""
    shutil.copy(CONFTEST, folder)
    cell = new_code_cell(CODE, execution_count=1, outputs=[text(printed)])
    # the kernel of someone else's machine: the conftest makes nbval use the present one
    elsewhere = {"kernelspec": {"name": "elsewhere", "display_name": "elsewhere"}}
    notebook = new_notebook(cells=[cell], metadata=elsewhere)
    nbformat.write(notebook, folder / "page.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval", "-p", "no:cacheprovider", *options]
    return subprocess.run([*command, str(folder)], cwd=cwd or folder, capture_output=True,
                          text=True, env=os.environ | {"PYTEST_ADDOPTS": ""})


@pytest.fixture
def folder(tmp_path):
    """A folder with a pytest configuration of its own, so that the project's does not reach it."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "book").mkdir()
    return tmp_path / "book"


def test_nbval_passes_up_to_rounding_from_another_folder(folder):
    inner = run_nbval(folder, "loss 0.33333999 steps 10\n<object object at 0x7fffffffffff>\n",
                      cwd=folder.parent)
    assert inner.returncode == 0 and "1 passed" in inner.stdout, inner.stdout + inner.stderr


@pytest.mark.parametrize("printed, options, fault", [
    ("loss 0.3340 steps 10", (), "the twin has '0.3340'"),
    ("loss 0.33333 steps 11", ("-n", "1"), "the twin has '11', this run printed '10'"),
])
def test_nbval_fails_beyond_it(folder, printed, options, fault):
    inner = run_nbval(folder, printed + "\n<object object at 0x7fffffffffff>\n", options)
    assert inner.returncode == 1 and "1 failed" in inner.stdout, inner.stdout + inner.stderr
    assert fault in inner.stdout

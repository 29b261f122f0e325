"""Faults that nbval and the guards of the twins must find, in a copy of a small book."""

import shutil

import nbformat
import pytest
from small_book import CHAPTER, TWIN, break_at, pytest_in, write_small_book

import guards


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The small book, which nbval and the guards pass."""
    root = write_small_book(tmp_path_factory.mktemp("good"))
    code, output = pytest_in(root, "--nbval", "book")
    assert code == 0 and "2 passed" in output, output
    assert guards.cleared_outputs(root / "book") == []
    assert guards.stale_twins(root / "book") == []
    return root


@pytest.fixture
def book(good, tmp_path):
    """A copy of the good book to break."""
    return shutil.copytree(good, tmp_path / "copy")


def test_a_number_off_by_a_percent(book):
    break_at(book / TWIN, "0.3333333333333333", "0.3366666666666666")
    code, output = pytest_in(book, "--nbval", "book")
    assert code == 1 and "1 failed, 1 passed" in output, output
    assert "the twin has '0.3366666666666666', this run printed '0.3333333333333333'" in output


def test_a_cell_that_raises(book):
    break_at(book / TWIN, "third = 1 / 3", "third = 1 / 0")
    code, output = pytest_in(book, "--nbval", "book")
    assert code == 1 and "ZeroDivisionError" in output, output


def test_cleared_outputs(book):
    notebook = nbformat.read(book / TWIN, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, book / TWIN)
    complaints = guards.cleared_outputs(book / "book")
    assert len(complaints) == 2 and all("02_small.ipynb" in line for line in complaints)


@pytest.mark.parametrize("old, new", [
    ("third = 1 / 3", "third = 2 / 6"),
    ("That was", "This was"),
    ('print("third", third)', ':tags: [hide-input]\n\nprint("third", third)'),
])
def test_a_twin_out_of_step_with_its_source(book, old, new):
    break_at(book / CHAPTER, old, new)
    assert any("02_small.ipynb" in line for line in guards.stale_twins(book / "book"))

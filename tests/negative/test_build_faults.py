"""Faults that the build, the guards of built pages and the browser must find, and two they must
not mind. Each is made in a copy of a small book that passes unbroken."""

import shutil
import warnings

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from small_book import CHAPTER, TWIN, break_at, build, write_small_book

import guards
import pages


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The small book, built; it passes every gate used below."""
    root = write_small_book(tmp_path_factory.mktemp("good"))
    code, output = build(root)
    assert code == 0, output
    assert "pages executed: none" in output
    assert guards.citation_faults(root / "book") == []
    assert guards.dead_links(root / "_build" / "html") == []
    return root


@pytest.fixture
def book(good, tmp_path):
    """A copy of the good book to break."""
    return shutil.copytree(good, tmp_path / "book of one", ignore=shutil.ignore_patterns("_build"))


def test_a_cell_that_raises_stops_the_build(book):
    break_at(book / CHAPTER, "third = 1 / 3", "third = 1 / 0")
    code, output = build(book)
    assert code != 0 and "ZeroDivisionError" in output


def test_an_unknown_citation_key_stops_the_build(book):
    break_at(book / CHAPTER, "{cite}`one`", "{cite}`another`")
    code, output = build(book)
    assert code != 0 and "another" in output
    assert any("another" in line for line in guards.citation_faults(book / "book"))


def test_a_link_to_a_lost_page_stops_the_build(book):
    break_at(book / CHAPTER, "(index.md)", "(lost.md)")
    code, output = build(book)
    assert code != 0 and "lost.md" in output


def test_what_sphinx_does_not_see_is_found_on_the_pages(good, book):
    break_at(book / CHAPTER, "That was", 'It costs $5 <a href="#nowhere">there</a>. That was')
    code, output = build(book)
    assert code == 0, output
    assert any("#nowhere" in line for line in guards.dead_links(book / "_build" / "html"))
    if pages.browser_path() is None:
        reason = "NO BROWSER FOUND: THE PAGE TEST ITSELF WAS NOT TESTED. Install chromium."
        warnings.warn(reason, stacklevel=2)
        pytest.skip(reason)
    assert pages.page_faults(good / "_build" / "html") == []
    faults = pages.page_faults(book / "_build" / "html")
    assert {line.partition(":")[0] for line in faults} == {
        "book/02_small.html at 390 px", "book/02_small.html at 1280 px"}
    assert all("raw markup $" in line for line in faults)


def test_notebooks_of_a_virtual_environment_are_left_alone(book):
    packages = book / ".venv" / "lib" / "python3" / "site-packages"
    packages.mkdir(parents=True)
    bad = new_notebook(cells=[new_code_cell("1 / 0")])
    nbformat.write(bad, packages / "bad.ipynb")
    nbformat.write(bad, book / ".venv" / "bad.ipynb")
    code, output = build(book)
    assert code == 0, output
    assert "pages executed: none" in output


def test_a_page_without_its_twin_executes(book):
    (book / TWIN).unlink()
    code, output = build(book)
    assert code == 0, output
    assert "pages executed: 02_small" in output
    assert "third 0.333" in (book / "_build" / "html" / "book" / "02_small.html").read_text()
    assert any("02_small" in line for line in guards.stale_twins(book / "book"))

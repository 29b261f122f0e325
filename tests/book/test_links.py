"""Every internal link and anchor of the built book leads somewhere; every output is on its page."""

from pathlib import Path

import pytest

import guards

ROOT = Path(__file__).parents[2]
HTML = ROOT / "_build" / "html"


@pytest.fixture(scope="module")
def html():
    assert (HTML / "index.html").exists(), "expected _build/html/index.html: run make book first"
    return HTML


def test_no_dead_links(html):
    assert guards.dead_links(html) == []


def test_every_output_is_on_its_page(html):
    assert guards.missing_outputs(ROOT / "book", html) == []


def test_dead_links_are_found(tmp_path):
    """One page of each fault, among links that are well."""
    (tmp_path / "a b.html").write_text('<p id="here"><a name="old"></a></p>')
    (tmp_path / "index.html").write_text(
        '<a href="a%20b.html#here">ok</a> <a href="a%20b.html#old">ok</a> <a href="#">ok</a>'
        '<a href="https://example.org/x#y">not ours</a> <img src="data:,">'
        '<a href="a%20b.html#gone">1</a> <img src="gone.png?v=1">'
        '<meta http-equiv="Refresh" content="0; url=nowhere.html">'
    )
    assert guards.dead_links(tmp_path) == [
        "index.html: a%20b.html#gone: no such anchor",
        "index.html: gone.png?v=1: no such file",
        "index.html: nowhere.html: no such file",
    ]


def test_missing_outputs_are_found(tmp_path):
    (tmp_path / "index.html").touch()
    twin_count = len(list((ROOT / "book").glob("*.ipynb")))
    assert twin_count > 0
    assert len(guards.missing_outputs(ROOT / "book", tmp_path)) == twin_count

"""The book keeps the rules of tools/guards.py; tests/negative shows that the guards can fail."""

from pathlib import Path

import pytest

import guards
import lint
import twins

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "book"
GUARDS = [
    guards.citation_faults,
    guards.cleared_outputs,
    guards.comment_markers,
    guards.foreign_kernels,
    guards.large_twins,
    guards.missing_alt_texts,
    guards.missing_seeds,
    guards.noisy_outputs,
    guards.repeated_functions,
    guards.stale_twins,
    guards.toc_faults,
    guards.unknown_tags,
]


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.__name__)
def test_book_keeps_the_rule(guard):
    assert guard(BOOK) == []


def test_chapter_code_is_clean():
    assert lint.unclean_cells(BOOK, ROOT / "pyproject.toml") == ""


HEADER = """\
---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Other
  name: other
---

# Bad

{cite}`nobody`

```{code-cell} ipython3
:tags: [nbval-skip]

import os
def twice(): pass
```

```{code-cell} ipython3
def twice(): pass  # NBVAL_SKIP
```
"""


@pytest.fixture
def bad_book(tmp_path):
    """A book whose one chapter breaks nearly every rule, with a twin that hides nothing."""
    book = tmp_path / "book"
    book.mkdir()
    (tmp_path / "_toc.yml").write_text("root: book/index\nchapters: [{file: book/01_gone}]\n")
    (book / "references.bib").write_text("@misc{idle, title = {Never cited}}\n")
    chapter = book / "02_bad.md"
    chapter.write_text(HEADER)
    notebook = twins.read_chapter(chapter)
    first, second = twins.code_cells(notebook)
    png = {"output_type": "display_data", "data": {"image/png": "AAAA"}, "metadata": {}}
    stderr = {"output_type": "stream", "name": "stderr", "text": "x" * twins.LARGEST}
    first.outputs = [twins.nbformat.from_dict(png), twins.nbformat.from_dict(stderr)]
    twins.nbformat.write(notebook, book / "02_bad.ipynb")
    second.source = "changed"
    twins.nbformat.write(notebook, book / "03_leftover.ipynb")
    return book


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        (guards.citation_faults, ["nobody is not in", "idle is never cited"]),
        (guards.cleared_outputs, ["code cell 1 (import os) has not been executed"]),
        (guards.comment_markers, ["holds an NBVAL comment"]),
        (guards.foreign_kernels, ["02_bad.md: expected kernelspec python3, got other"]),
        (guards.large_twins, ["02_bad.ipynb: expected at most 300,000 bytes"]),
        (guards.missing_alt_texts, ["draws without mystnb: image: alt"]),
        (guards.missing_seeds, ["expected the line SEED = book_seed(2)"]),
        (guards.noisy_outputs, ["writes to stderr"]),
        (guards.repeated_functions, ["twice is defined 2 times"]),
        (guards.stale_twins, ["was never executed", "03_leftover.ipynb: no chapter"]),
        (guards.toc_faults, ["names book/01_gone", "book/02_bad.md is missing"]),
        (guards.unknown_tags, ["has the tag nbval-skip"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_guard_complains(bad_book, guard, expected):
    complaints = "\n".join(guard(bad_book))
    assert [text for text in expected if text not in complaints] == []


def test_lint_sees_into_chapters(bad_book):
    found = lint.unclean_cells(bad_book, ROOT / "pyproject.toml")
    assert "F401" in found
    assert "02_bad.ipynb:cell 2" in found


def test_twins_differ_in_source_tags_and_type(tmp_path):
    """A twin in step is passed; each single change is named."""
    chapter = tmp_path / "02_small.md"
    chapter.write_text(HEADER)
    twin = twins.read_chapter(chapter)
    for cell in twins.code_cells(twin):
        cell.execution_count = 1
    path = tmp_path / "02_small.ipynb"
    twins.nbformat.write(twin, path)
    assert twins.stale_twins(tmp_path) == []

    cell = twins.code_cells(twin)[0]
    for part, value in [("source", "import sys"), ("metadata", {"tags": ["hide-cell"]})]:
        kept = cell[part]
        cell[part] = twins.nbformat.from_dict(value)
        twins.nbformat.write(twin, path)
        assert [f"differs in {part}" in line for line in twins.stale_twins(tmp_path)] == [True]
        cell[part] = kept
    path.unlink()
    assert twins.stale_twins(tmp_path) == ["02_small.ipynb: missing; run make notebooks CH=02"]

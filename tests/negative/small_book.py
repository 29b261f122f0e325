"""A book of two pages with this project's machinery, to be broken in one place at a time."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import twins

ROOT = Path(__file__).parents[2]
CHAPTER = "book/02_small.md"
TWIN = "book/02_small.ipynb"

PAGES = {
    "pytest.ini": "[pytest]\n",
    "_toc.yml": """\
format: jb-book
root: book/index
parts:
  - caption: All
    numbered: true
    chapters:
      - file: book/02_small
""",
    "book/references.bib": "@misc{one, author={A. Author}, title={One}, year={2025}}\n",
    "book/index.md": "# Start\n\nGo to [the chapter](02_small.md).\n",
    CHAPTER: """\
---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  name: python3
---

# Chapter

Back to [the start](index.md), after {cite}`one`.

$$
x = 1
$$ (eq-one)

That was {eq}`eq-one`.

```{code-cell} ipython3
third = 1 / 3
```

```{code-cell} ipython3
print("third", third)
```

## Sources

```{bibliography}
```
""",
}


def write_small_book(root):
    """The unbroken book, with its twin."""
    for name, content in PAGES.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copy(ROOT / "_config.yml", root)
    shutil.copy(ROOT / "book" / "conftest.py", root / "book")
    shutil.copytree(ROOT / "tools", root / "tools", ignore=ignore)
    shutil.copytree(ROOT / "book" / "_static", root / "book" / "_static")
    twins.write(root / CHAPTER)
    return root


def break_at(path, old, new):
    """Replace the one place where `old` stands in a file."""
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"expected {old!r} once in {path}, got it {text.count(old)} times"
    path.write_text(text.replace(old, new), encoding="utf-8")


def run(folder, *arguments, **variables):
    """Python with these arguments in `folder`: exit code and output, none of it on our own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    kept.pop("PYTHONPATH", None)
    inner = subprocess.run([sys.executable, *map(str, arguments)], cwd=folder, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           env=kept | {"OMP_NUM_THREADS": "1"} | variables)
    return inner.returncode, inner.stdout


def build(folder):
    """The strict build of the book in this folder."""
    return run(folder, "tools/build.py")


def pytest_in(folder, *arguments, **variables):
    """A run of pytest of its own in this folder."""
    return run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, **variables)

"""Check the style of all Python, the code cells of the chapters included, with ruff."""

import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat

from twins import chapters, read_chapter

RUFF = [sys.executable, "-m", "ruff", "check", "--quiet"]
CONFIG = Path("pyproject.toml")


def unclean_cells(book: Path, config: Path = CONFIG) -> str:
    """What ruff has to say on the chapters' cells, or nothing.

    Ruff knows notebooks (names reach from cell to cell) but no Markdown, so the chapters are
    handed over as notebooks; `cell 3` counts the chapter's code and text cells from the top.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for source in chapters(book):
            names.append(source.with_suffix(".ipynb").name)
            notebook = read_chapter(source)
            notebook.metadata.language_info = {"name": "python"}
            nbformat.write(notebook, Path(folder) / names[-1])
        command = [*RUFF, "--no-cache", "--config", str(config.absolute()), *names]
        answer = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return answer.stdout + answer.stderr if answer.returncode else ""


def main() -> int:
    """Check the files, then the cells; say so when all is well."""
    files = subprocess.run([*RUFF, "."])
    cells = unclean_cells(Path("book"))
    if cells:
        print(f"lint: in the chapters of book/*.md:\n{cells}", file=sys.stderr)
    if files.returncode or cells:
        return 1
    print("lint: clean")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Write and check the executed twin (book/NN_name.ipynb) of each chapter (book/NN_name.md).

python tools/twins.py write [CH ...]    execute the chapters and rewrite their twins (default: all)
python tools/twins.py check             list the twins that are not what their chapters say
"""

import argparse
import base64
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jupytext
import nbformat
from myst_nb.core.read import is_myst_markdown_notebook
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError

BOOK = Path("book")
LARGEST = 300_000  # bytes of a twin: GitHub and readers on the road
CELL_TIMEOUT = 120  # seconds

# One thread, so that sums are taken in one order whatever the number of cores.
FIXED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}


def fixed_environment() -> dict[str, str]:
    """The environment in which chapters run: fixed threads, the chapters' own seeds."""
    kept = {key: value for key, value in os.environ.items() if key != "MEASUREATTN_SEED"}
    return kept | FIXED


def read_chapter(source: Path) -> nbformat.NotebookNode:
    """The chapter as a notebook without outputs."""
    return jupytext.read(source, fmt="md:myst")


def chapters(book: Path) -> list[Path]:
    """The pages of the book that are notebooks with code cells, in order of their names."""
    pages = [path for path in sorted(book.glob("*.md")) if is_notebook(path)]
    return [path for path in pages if code_cells(read_chapter(path))]


def is_notebook(source: Path) -> bool:
    """Whether the page's front matter makes it a MyST notebook."""
    return is_myst_markdown_notebook(source.read_text(encoding="utf-8"))


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The code cells of a notebook, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def first_line(cell: nbformat.NotebookNode) -> str:
    """The first line of a cell, by which messages name it."""
    return next(iter(cell.source.splitlines()), "(empty)")


def execute(source: Path) -> nbformat.NotebookNode:
    """Run the chapter in a fresh kernel; what comes back holds nothing of this run but outputs."""
    notebook = read_chapter(source)
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for index, cell in enumerate(notebook.cells):
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()
        cell.id = f"{index:03d}-{digest[:8]}"
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(source.parent)}},
    )
    try:
        client.execute(env=fixed_environment())
    except (CellControlSignal, DeadKernelError) as error:
        raise ValueError(f"{failed_cell(notebook)} failed: {error}") from error
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def failed_cell(notebook: nbformat.NotebookNode) -> str:
    """Number and first line of the cell at which the execution stopped: the last one begun."""
    begun = [
        f"code cell {number} ({first_line(cell)})"
        for number, cell in enumerate(code_cells(notebook), start=1)
        if cell.execution_count or cell.outputs
    ]
    return begun[-1] if begun else "the first code cell"


def pngs(notebook: nbformat.NotebookNode) -> Iterator[bytes]:
    """The figures of an executed notebook."""
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if image := output.get("data", {}).get("image/png"):
                yield base64.b64decode(image)


def replace(path: Path, content: bytes) -> None:
    """Write a file in one step, so that an interrupted run leaves the old one whole."""
    path.parent.mkdir(exist_ok=True)
    draft = path.with_name(path.name + ".draft")
    draft.write_bytes(content)
    draft.replace(path)


def write(source: Path) -> None:
    """Execute one chapter and write its twin; the landing page's first figure goes to README's."""
    notebook = execute(source)
    content = nbformat.writes(notebook).encode() + b"\n"
    if len(content) > LARGEST:
        raise ValueError(
            f"expected a twin under {LARGEST:,} bytes, got {len(content):,}."
            " Draw fewer points or lower the figures' dpi."
        )
    replace(source.with_suffix(".ipynb"), content)
    if source.stem == "index" and (figure := next(pngs(notebook), None)):
        replace(landing_figure(source.parent), figure)


def landing_figure(book: Path) -> Path:
    """Where the first figure of the landing page lies for the README."""
    return book / "_static" / "landing.png"


def stale_twins(book: Path) -> list[str]:
    """Complaints about twins that are missing, out of step, left over or not executed."""
    sources = chapters(book)
    complaints = [line for source in sources for line in stale_twin(source)]
    expected = {source.with_suffix(".ipynb") for source in sources}
    extra = [path for path in sorted(book.glob("*.ipynb")) if path not in expected]
    complaints += [f"{path.name}: no chapter {path.stem}.md with code; remove it" for path in extra]
    index, figure = book / "index.ipynb", landing_figure(book)
    if index in expected and index.exists():
        drawn = next(pngs(nbformat.read(index, as_version=4)), None)
        if drawn and (not figure.exists() or figure.read_bytes() != drawn):
            complaints.append("_static/landing.png: not the first figure of index.ipynb")
    return complaints


def stale_twin(source: Path) -> list[str]:
    """Complaints about the twin of one chapter."""
    twin = source.with_suffix(".ipynb")
    repair = f"run make notebooks CH={source.stem.split('_')[0]}"
    if not twin.exists():
        return [f"{twin.name}: missing; {repair}"]
    ours, theirs = read_chapter(source).cells, nbformat.read(twin, as_version=4).cells
    if len(ours) != len(theirs):
        return [f"{twin.name}: expected {len(ours)} cells, got {len(theirs)}; {repair}"]
    complaints = []
    for number, (ours_, theirs_) in enumerate(zip(ours, theirs, strict=True), start=1):
        for part in ("cell_type", "source", "metadata"):
            if ours_[part] != theirs_[part]:
                where = f"{twin.name}: cell {number} ({first_line(ours_)})"
                complaints.append(f"{where} differs in {part}; {repair}")
        if theirs_.cell_type == "code" and theirs_.execution_count is None:
            complaints.append(f"{twin.name}: cell {number} was never executed; {repair}")
    return complaints


def chosen(book: Path, names: list[str]) -> list[Path]:
    """The chapters meant by names such as 02, 02_gaussian or index (all for none)."""
    sources = chapters(book)
    if not names:
        return sources
    found = [path for path in sources if {path.stem, path.stem.split("_")[0]} & set(names)]
    if len(found) < len(names):
        known = ", ".join(path.stem for path in sources)
        raise SystemExit(f"twins: expected chapters out of {known}; got {' '.join(names)}")
    return found


def main() -> int:
    """Write or check, and say what was done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["write", "check"])
    parser.add_argument("names", nargs="*", metavar="CH")
    options = parser.parse_args()
    if options.action == "check":
        complaints = stale_twins(BOOK)
        print("\n".join(complaints) or "twins: all in step")
        return 1 if complaints else 0
    failures = 0
    for source in chosen(BOOK, options.names):
        print(f"twins: executing {source}", flush=True)
        try:
            write(source)
        except ValueError as error:
            failures += 1
            print(f"twins: {source} NOT written: {error}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

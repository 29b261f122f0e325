"""What must hold for the book beyond what nbval and Sphinx see.

Each guard takes a folder and returns a list of complaints, each with its repair; empty is well.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import yaml
from pybtex.database import parse_file

from twins import (
    LARGEST,
    chapters,
    code_cells,
    first_line,
    is_notebook,
    read_chapter,
    stale_twins,
)

TAGS = {
    "hide-cell",
    "hide-input",
    "hide-output",
    "nbval-ignore-output",
    "raises-exception",
    "remove-cell",
    "remove-input",
    "remove-output",
}
OUTPUT_HIDING_TAGS = {"remove-cell", "remove-output"}
NUMBERED = re.compile(r"(\d\d)_")
CITATION = re.compile(r"\{(?:cite|footcite)(?::\w+)?\}`([^`]+)`")
REMOTE = {"http", "https", "mailto", "data", "javascript", "blob"}

drifted_twins = stale_twins  # kept beside the code that writes the twins


def twins_of(book: Path) -> Iterator[tuple[str, nbformat.NotebookNode]]:
    """Name and content of each twin there is."""
    for path in sorted(book.glob("*.ipynb")):
        yield path.name, nbformat.read(path, as_version=4)


def named_cells(notebook: nbformat.NotebookNode) -> Iterator[tuple[str, nbformat.NotebookNode]]:
    """The code cells with a name for messages."""
    for number, cell in enumerate(code_cells(notebook), start=1):
        yield f"code cell {number} ({first_line(cell)})", cell


def cleared_outputs(book: Path) -> list[str]:
    """Code cells of twins that were never run, which nbval passes without a word."""
    return [
        f"{name}: {where} has not been executed; run make notebooks"
        for name, notebook in twins_of(book)
        for where, cell in named_cells(notebook)
        if cell.execution_count is None or (cell.outputs == [] and prints(cell))
    ]


def prints(cell: nbformat.NotebookNode) -> bool:
    """Whether the cell calls print at its top level, so that it must have an output."""
    return any(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id in {"print", "check", "display"}
        for node in ast.parse(cell.source).body
    )


def noisy_outputs(book: Path) -> list[str]:
    """Cells that wrote to stderr (warnings) or raised without a tag that says so."""
    complaints = []
    for name, notebook in twins_of(book):
        for where, cell in named_cells(notebook):
            kinds = {output.get("name", output.output_type) for output in cell.outputs}
            if "stderr" in kinds:
                complaints.append(f"{name}: {where} writes to stderr; silence its cause")
            if "error" in kinds and "raises-exception" not in cell.metadata.get("tags", []):
                complaints.append(f"{name}: {where} raised; repair it")
    return complaints


def large_twins(book: Path) -> list[str]:
    """Twins that are too large."""
    return [
        f"{path.name}: expected at most {LARGEST:,} bytes, got {path.stat().st_size:,}"
        for path in sorted(book.glob("*.ipynb"))
        if path.stat().st_size > LARGEST
    ]


def foreign_kernels(book: Path) -> list[str]:
    """Chapters and twins that ask for another kernel than python3, which readers lack."""
    notebooks = [(path.name, read_chapter(path)) for path in chapters(book)]
    complaints = []
    for name, notebook in [*notebooks, *twins_of(book)]:
        kernel = notebook.metadata.get("kernelspec", {}).get("name")
        if kernel != "python3":
            complaints.append(f"{name}: expected kernelspec python3, got {kernel}")
    return complaints


def unknown_tags(book: Path) -> list[str]:
    """Tags nobody acts upon, and nbval-skip, which would leave a cell unverified."""
    notebooks = [(path.name, read_chapter(path)) for path in chapters(book)]
    return [
        f"{name}: {where} has the tag {tag}; allowed: {', '.join(sorted(TAGS))}"
        for name, notebook in [*notebooks, *twins_of(book)]
        for where, cell in named_cells(notebook)
        for tag in cell.metadata.get("tags", [])
        if tag not in TAGS
    ]


def comment_markers(book: Path) -> list[str]:
    """nbval's markers as comments, which the reader would see and the tag guard would not."""
    return [
        f"{path.name}: {where} holds an NBVAL comment; use a tag"
        for path in chapters(book)
        for where, cell in named_cells(read_chapter(path))
        if re.search(r"#\s*(NBVAL_|PYTEST_VALIDATE)", cell.source)
    ]


def missing_alt_texts(book: Path) -> list[str]:
    """Cells that draw a figure and do not say in words what it shows."""
    complaints = []
    for name, notebook in twins_of(book):
        for where, cell in named_cells(notebook):
            drawn = any("image/png" in output.get("data", {}) for output in cell.outputs)
            image = cell.metadata.get("mystnb", {}).get("image", {})
            if drawn and not str(image.get("alt") or "").strip():
                complaints.append(f"{name}: {where} draws without mystnb: image: alt")
    return complaints


def missing_seeds(book: Path) -> list[str]:
    """Numbered chapters whose first code cell does not derive its seed from their number."""
    complaints = []
    for source in sorted(book.glob("*.md")):
        if not (match := NUMBERED.match(source.name)):
            continue
        line = f"SEED = book_seed({int(match[1])})"
        cells = code_cells(read_chapter(source)) if is_notebook(source) else []
        if not cells or line not in cells[0].source.splitlines():
            complaints.append(f"{source.name}: expected the line {line} in the first code cell")
    return complaints


def repeated_functions(book: Path) -> list[str]:
    """Functions and classes that the chapters define twice: they belong in the package."""
    homes = defaultdict(list)
    for source in chapters(book):
        for where, cell in named_cells(read_chapter(source)):
            for node in ast.parse(cell.source).body:  # a class's own methods may repeat
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    homes[node.name].append(f"{source.name}, {where}")
    return [
        f"{name} is defined {len(places)} times: {'; '.join(places)}"
        for name, places in homes.items()
        if len(places) > 1
    ]


def toc_pages(node: dict | list | str) -> Iterator[str]:
    """All files named in a table of contents, without their endings."""
    if isinstance(node, list):
        for item in node:
            yield from toc_pages(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in {"root", "file"}:
                yield value
            else:
                yield from toc_pages(value)


def toc_faults(book: Path) -> list[str]:
    """Pages in the table of contents that do not exist, and pages of the book it leaves out."""
    contents = yaml.safe_load((book.parent / "_toc.yml").read_text(encoding="utf-8"))
    listed = [name.removesuffix(".md") for name in toc_pages(contents)]
    written = {f"{book.name}/{path.stem}" for path in book.glob("*.md")}
    complaints = [f"_toc.yml names {name}, which is not there" for name in set(listed) - written]
    complaints += [f"{name}.md is missing from _toc.yml" for name in written - set(listed)]
    complaints += [f"_toc.yml names {n} twice" for n in set(listed) if listed.count(n) > 1]
    return sorted(complaints)


def citation_faults(book: Path) -> list[str]:
    """Keys cited and not defined, or defined and not cited."""
    defined = set(parse_file(str(book / "references.bib"), "bibtex").entries)
    used = {
        key.strip(): path.name
        for path in sorted(book.glob("*.md"))
        for keys in CITATION.findall(path.read_text(encoding="utf-8"))
        for key in keys.split(",")
    }
    undefined = sorted(set(used) - defined)
    complaints = [f"{used[key]}: {key} is not in references.bib" for key in undefined]
    idle = sorted(defined - set(used))
    return complaints + [f"references.bib: {key} is never cited" for key in idle]


def missing_outputs(book: Path, html: Path) -> list[str]:
    """Pages that show fewer cells with outputs than their twins hold."""
    complaints = []
    for name, notebook in twins_of(book):
        page = html / book.name / f"{Path(name).stem}.html"
        expected = sum(
            bool(cell.outputs) and not OUTPUT_HIDING_TAGS & set(cell.metadata.get("tags", []))
            for cell in code_cells(notebook)
        )
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        shown = len(re.findall(r'class="cell_output docutils container"', text))
        if shown != expected:
            complaints.append(f"{page.name}: expected {expected} cells with output, got {shown}")
    return complaints


class Page(HTMLParser):
    """The anchors of one page and what it points at."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect ids, names and every kind of link."""
        values = {key: value for key, value in attrs if value}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        self.targets |= {values[key] for key in ("href", "src", "data", "poster") if key in values}
        if values.get("http-equiv", "").lower() == "refresh":
            self.targets.add(values["content"].partition("url=")[2])


def dead_links(html: Path) -> list[str]:
    """Links of built pages to files or anchors that are not there; the network is left alone."""
    html = html.resolve()
    pages = {
        path: Page(path.read_text(encoding="utf-8"))
        for path in sorted(html.rglob("*.html"))
        if "_static" not in path.relative_to(html).parts
    }
    complaints = []
    for path, page in pages.items():
        for target in sorted(page.targets):
            parts = urlsplit(target)
            if parts.scheme in REMOTE or parts.netloc:
                continue
            goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            where = f"{path.relative_to(html)}: {target}"
            anchor = unquote(parts.fragment)
            if not goal.is_file():
                complaints.append(f"{where}: no such file")
            elif anchor and goal in pages and anchor not in pages[goal].anchors:
                complaints.append(f"{where}: no such anchor")
    return complaints

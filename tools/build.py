"""Build the book's pages out of the twins' outputs, so that nothing runs that is already verified.

myst-nb, in its cache mode, takes a page's outputs from a jupyter-cache when the code cells are
the ones it holds. The cache is filled from the twins anew for each build, since its key does not
see a change of the package. A page whose twin is missing or out of step simply executes.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import yaml
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from jupyter_cache.cache.main import JupyterCacheBase
from myst_nb.core.read import read_myst_markdown_notebook
from myst_parser.config.main import MdParserConfig

from twins import chapters, code_cells, fixed_environment

BOOK = Path("book")
BUILT = Path("_build")
HTML = BUILT / "html"
BOOK_COMMAND = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()"]


def page_notebook(source: Path, extensions: list[str]) -> nbformat.NotebookNode:
    """The page exactly as myst-nb reads it, since the cache is keyed on that."""
    return read_myst_markdown_notebook(
        source.read_text(encoding="utf-8"),
        config=MdParserConfig(enable_extensions=set(extensions)),
        add_source_map=True,
        path=source,
    )


def with_outputs(page: nbformat.NotebookNode, twin: Path) -> nbformat.NotebookNode | None:
    """The page with its twin's outputs, or None when the twin is not this page, executed."""
    if not twin.exists():
        return None
    executed = nbformat.read(twin, as_version=4)
    ours, theirs = code_cells(page), code_cells(executed)
    if [cell.source for cell in ours] != [cell.source for cell in theirs]:
        return None
    if any(cell.execution_count is None for cell in theirs):
        return None
    for cell, done in zip(ours, theirs, strict=True):
        cell.outputs, cell.execution_count = done.outputs, done.execution_count
    page.metadata["language_info"] = executed.metadata["language_info"]  # names the lexer
    return page


def fill_cache(cache: JupyterCacheBase, book: Path, extensions: list[str]) -> None:
    """Put the outputs of every twin that is in step into the cache."""
    for source in chapters(book):
        page = with_outputs(page_notebook(source, extensions), source.with_suffix(".ipynb"))
        if page is None:
            continue
        bundle = CacheBundleIn(page, str(source.absolute()), data={})
        cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)


def cached_keys(cache: JupyterCacheBase) -> dict[str, str]:
    """The pages in the cache by their keys."""
    return {record.hashkey: Path(record.uri).name for record in cache.list_cache_records()}


def build(arguments: list[str]) -> int:
    """Build from scratch with the given options of jupyter-book; the exit code is its own."""
    config = yaml.safe_load(Path("_config.yml").read_text(encoding="utf-8"))
    extensions = config["sphinx"]["config"]["myst_enable_extensions"]
    # What an earlier build left would keep pages that are gone, or meet a half-made state.
    shutil.rmtree(BUILT, ignore_errors=True)
    cache = get_cache(BUILT / ".jupyter_cache")
    fill_cache(cache, BOOK, extensions)
    seeded = cached_keys(cache)
    command = [*BOOK_COMMAND, "build", ".", *arguments]
    outcome = subprocess.run(command, env=os.environ | fixed_environment())
    executed = sorted(name for key, name in cached_keys(cache).items() if key not in seeded)
    if outcome.returncode:
        print(f"build: FAILED ({outcome.returncode}), see the messages above", file=sys.stderr)
        return outcome.returncode
    print(f"build: pages executed: {', '.join(executed) or 'none'}")
    print(f"build: the book is at {HTML / 'index.html'}")
    return 0


def main() -> int:
    """Build with every warning an error; from the project's top folder only."""
    if not Path("_config.yml").exists():
        print(f"build: expected _config.yml in {Path.cwd()}: run it at the top", file=sys.stderr)
        return 1
    return build(["-W", "-n", "--keep-going"])


if __name__ == "__main__":
    sys.exit(main())

"""The claims ledger: book/claims.yml as a page of the book, and what must hold of its lines.

Each claim of the paper, and each of ours, has one line that names the place where it is stated,
the visible check beside it, and the test of the package that guards it. As a Sphinx extension
this module renders the lines of one part (```{ledger} Part I```); `ledger_complaints` is the
guard that every line points at something that exists.
"""

import ast
import re
from pathlib import Path

import nbformat
import yaml
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

FIELDS = {"id", "part", "statement", "source", "chapter", "anchor", "check", "test", "verdict"}
VERDICTS = ("holds", "holds with a repaired hypothesis", "conjecture", "cited", "not tested")


def claims(book: Path) -> list[dict[str, str]]:
    """The lines of the ledger, in the order of the file."""
    return yaml.safe_load((book / "claims.yml").read_text(encoding="utf-8"))


def ledger_complaints(root: Path) -> list[str]:
    """Lines of the ledger that lack a field or point at nothing."""
    found, seen = [], set()
    for claim in claims(root / "book"):
        name = claim.get("id", "?")
        if missing := FIELDS - claim.keys():
            found.append(f"claim {name}: has no {', '.join(sorted(missing))}; add it")
            continue
        if name in seen:
            found.append(f"claim {name}: the id stands twice; rename one")
        seen.add(name)
        if not claim["verdict"].startswith(VERDICTS):
            found.append(f"claim {name}: the verdict must begin with one of {VERDICTS}")
        found += [f"claim {name}: {problem}" for problem in _dangling(root, claim)]
    return found


def _dangling(root: Path, claim: dict[str, str]) -> list[str]:
    """What the line points at and is not there; a claim that is only cited needs no witness."""
    source = root / "book" / f"{claim['chapter']}.md"
    if not source.exists():
        return [f"there is no chapter {claim['chapter']}"]
    problems = []
    text = source.read_text(encoding="utf-8")
    label = re.escape(claim["anchor"])
    if not re.search(rf"^(:label: {label}|\({label}\)=)$", text, re.MULTILINE):
        problems.append(f"{source.name} has no label {claim['anchor']}")
    if claim["verdict"].startswith(("cited", "not tested")):
        return problems
    if claim["check"] not in _printed(source.with_suffix(".ipynb")):
        problems.append(f"no check of {source.name} prints {claim['check']!r}")
    if not _is_test(root, claim["test"]):
        problems.append(f"there is no test {claim['test']}")
    return problems


def _printed(twin: Path) -> str:
    """All lines that the checks of a chapter printed."""
    if not twin.exists():
        return ""
    cells = nbformat.read(twin, as_version=4).cells
    outputs = (output for cell in cells for output in cell.get("outputs", []))
    lines = "".join(output.get("text", "") for output in outputs).splitlines()
    return "\n".join(line for line in lines if line.startswith("ok: "))


def _is_test(root: Path, name: str) -> bool:
    """Whether tests/file.py::Class::function names a test function that exists."""
    path, *names = name.split("::")
    if not names or not (root / path).exists():
        return False
    body = ast.parse((root / path).read_text(encoding="utf-8")).body
    for part in names:
        named = (n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef))
        match = [n for n in named if n.name == part]
        if not match:
            return False
        body = match[0].body
    return isinstance(match[0], ast.FunctionDef) and names[-1].startswith("test")


class Ledger(SphinxDirective):
    """```{ledger} Part I```: the claims of one part, each linked to theorem, check and test."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        path = Path(self.env.srcdir) / "book"
        self.env.note_dependency(str(path / "claims.yml"))
        lines = []
        for claim in claims(path):
            if claim["part"] == self.arguments[0]:
                lines += _entry(claim)
        return self.parse_text_to_nodes("\n".join(lines)) if lines else []

    def parse_text_to_nodes(self, text: str):
        """Markdown to nodes, through the parser of the page."""
        from docutils import nodes

        box = nodes.container()
        self.state.nested_parse(StringList(text.split("\n"), "claims.yml"), 0, box)
        return box.children


def _entry(claim: dict[str, str]) -> list[str]:
    """One claim as a definition list entry in MyST."""
    role = "ref" if claim["anchor"].startswith("sec-") else "prf:ref"
    witness = f"{{{role}}}`{claim['anchor']}` in {{doc}}`{claim['chapter']}`"
    if "check" in claim and not claim["verdict"].startswith(("cited", "not tested")):
        witness += f"; check `{claim['check']}`; test `{claim['test']}`"
    return [f"**{claim['verdict']}** ({claim['source']})", f": {claim['statement'].strip()}",
            "", f"  {witness}.", ""]


def setup(app):
    """Register the directive."""
    app.add_directive("ledger", Ledger)
    return {"parallel_read_safe": True}

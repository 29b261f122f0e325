"""Every line of the claims ledger points at a statement, a check and a test that exist."""

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from ledger import claims, ledger_complaints

ROOT = Path(__file__).parents[2]


def test_every_pointer_of_the_ledger_holds():
    assert ledger_complaints(ROOT) == []


def test_every_theorem_block_has_a_line():
    """What the book proves or claims in a block is in the ledger."""
    labels = set()
    for chapter in sorted((ROOT / "book").glob("[0-9]*.md")):
        lines = chapter.read_text(encoding="utf-8").splitlines()
        for above, line in pairwise(lines):
            kind = above.lstrip(":").removeprefix("{prf:").split("}")[0]
            if kind in {"theorem", "lemma", "proposition", "corollary", "conjecture"}:
                labels.add(line.removeprefix(":label: "))
    assert labels, "no theorem block found: has the syntax changed?"
    assert labels <= {claim["anchor"] for claim in claims(ROOT / "book")}


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("chapter", "99_nowhere", "no chapter"),
        ("anchor", "lem-nowhere", "no label"),
        ("check", "a line that no check prints", "no check"),
        ("test", "tests/test_gaussian.py::test_nothing", "no test"),
        ("test", "tests/test_nothing.py::test_nothing", "no test"),
        ("verdict", "proved beyond doubt", "verdict"),
    ],
)
def test_a_broken_pointer_is_found(tmp_path, field, value, complaint):
    broken = claims(ROOT / "book")[:1]
    for folder in ("book", "tests"):
        (tmp_path / folder).mkdir()
        for path in (ROOT / folder).glob("*.*"):
            (tmp_path / folder / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "book" / "claims.yml"
    path.write_text(yaml.safe_dump(broken), encoding="utf-8")
    assert ledger_complaints(tmp_path) == []
    path.write_text(yaml.safe_dump([broken[0] | {field: value}]), encoding="utf-8")
    (found,) = ledger_complaints(tmp_path)
    assert complaint in found


def test_a_missing_field_is_named(tmp_path):
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "claims.yml").write_text("- id: half\n", encoding="utf-8")
    (found,) = ledger_complaints(tmp_path)
    assert "statement" in found

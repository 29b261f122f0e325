"""Run every check of the project: lint, the strict build, then the tests and all the chapters.

All three run even when one fails, so that one call shows everything; the exit code tells.
"""

import os
import shutil
import subprocess
import sys

from twins import fixed_environment

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PYTEST = ["-m", "pytest", "tests", "book", "--nbval", "-q", "-rs"]
PYTEST += ["-n", "2", "--dist", "loadfile", "-p", "no:benchmark"]
STEPS = {
    "lint": ["tools/lint.py"],
    "build": ["tools/build.py"],
    "tests": PYTEST,
}


def main() -> int:
    """Run the steps in turn and name those that failed."""
    if not any(shutil.which(name) for name in BROWSERS):
        bar = "!" * 78
        print(f"{bar}\n!! NO BROWSER FOUND: THE PAGES WILL NOT BE TRIED IN ONE.", file=sys.stderr)
        print(f"!! Install {' or '.join(BROWSERS)}. Going on without.\n{bar}", file=sys.stderr)
    failed = []
    for name, arguments in STEPS.items():
        print(f"== {name}", flush=True)
        run = subprocess.run([sys.executable, *arguments], env=os.environ | fixed_environment())
        if run.returncode:
            failed.append(name)
    if failed:
        print(f"make test: FAILED: {', '.join(failed)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A sweep of small cells through the command line, for the tests to stop, kill and restart.

python toy_sweep.py 0.1,0.1,60 --out FOLDER      three cells that take so many seconds
"""

import json
import os
import sys
import time

from measureattn.__main__ import main
from measureattn._files import write_atomically

STEPS = 5


def cells(seconds):
    return [
        {"law": "toy", "seed": 1, "steps": STEPS, "length": length, "seconds": each}
        for length, each in enumerate(seconds, 1)
    ]


def run_cell(cell, checkpoint):
    """A chaotic sequence: a state that is lost, or taken twice, shows in the last digits."""
    if checkpoint.exists():
        state = json.loads(checkpoint.read_bytes())
    else:
        state = {"x": 1 / (cell["length"] + 1.5), "rows": []}
    while len(state["rows"]) < cell["steps"]:
        write_atomically(checkpoint, json.dumps(state).encode())
        time.sleep(cell["seconds"] / cell["steps"])
        state["x"] *= 3.9 * (1 - state["x"])
        row = {"activation": "softmax", "step": len(state["rows"]) + 1, "mse": state["x"]}
        state["rows"].append(row | {"mse_std_error": 0.0})
    return {"rows": state["rows"]}


def die(cell, checkpoint):
    if cell["x"] == 2:
        os._exit(1)
    return {"rows": [cell]}


if __name__ == "__main__":
    from measureattn.regression import experiment  # here alone, for workers to start sooner

    experiment.cells = lambda *_, **__: cells(map(float, sys.argv[1].split(",")))
    experiment.run_cell = run_cell
    sys.exit(main(["experiment", *sys.argv[2:]]))

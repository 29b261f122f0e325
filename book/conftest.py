"""nbval for this book: outputs equal up to rounding, whatever the machine or the folder.

nbval compares outputs as text. Another CPU changes the last digits of a float, so numbers are
compared with a relative tolerance instead, and with no absolute one: the book prints numbers as
small as 1e-62, which any absolute tolerance would equate to zero. All else must be the same.
"""

import re
from collections import defaultdict
from decimal import Decimal
from itertools import zip_longest

from nbval.plugin import IPyNbCell

RTOL = Decimal("1e-4")
SECONDS = 60  # for one cell to run, and for its outputs to arrive

# Digits alone are an integer. `1.` is a float only where tensors print it: before a comma or a
# bracket; elsewhere the dot ends a sentence. nan and inf are text, so they equal themselves only.
NUMBER = re.compile(r"([-+]?(?:\d+(?:\.\d+|\.(?=[],]))?|\.\d+)(?:[eE][-+]?\d+)?)")
VOLATILE = re.compile(r"0x[0-9a-fA-F]{6,}|\S*ipykernel_\d+\S*?\.py")  # addresses, cells' paths


def pytest_configure(config):
    """Run the twins with the Python that runs pytest, and let no cell hang."""
    config.option.nbval_current_env = True
    config.option.nbval_cell_timeout = SECONDS


def pytest_itemcollected(item):
    if isinstance(item, IPyNbCell):
        item.output_timeout = SECONDS


def same_number(want, got):
    """Equal within RTOL; integers are the same. A float may print as `1` on one machine only."""
    if want.lstrip("+-").isdigit() and got.lstrip("+-").isdigit():
        return want == got
    # Decimal, since a float makes 1e-400 zero and 1e400 infinite
    return abs(Decimal(got) - Decimal(want)) <= RTOL * abs(Decimal(want))


def difference(want, got):
    """The first place where two texts differ beyond rounding, in words; empty if there is none."""
    pieces = [NUMBER.split(VOLATILE.sub("(volatile)", text)) for text in (want, got)]
    for i, (a, b) in enumerate(zip_longest(*pieces, fillvalue="")):  # text, number, text, ...
        are_numbers = i % 2 and a and b
        if a != b and not (are_numbers and same_number(a, b)):
            return f"the twin has {a!r}, this run printed {b!r}"
    return ""


def fields(outputs):
    """What a cell showed, as {kind: [texts]}; of a picture only that it is there."""
    shown = defaultdict(list)
    for output in outputs:
        if output["output_type"] == "stream":
            shown[output["name"]].append(output["text"])
        elif output["output_type"] == "error":
            shown["error"].append(f"{output['ename']}: {output['evalue']}")
        else:
            for mime, value in output["data"].items():
                picture = mime in ("image/png", "image/jpeg")
                shown[mime].append("(picture)" if picture else str(value))
    return shown


def compare_outputs(cell, test, ref, skip_compare=None):
    """Take the place of nbval's method of this name; complaints go where nbval prints them."""
    want, got = fields(ref), fields(test)
    cell.comparison_traceback = []
    for kind in sorted(want.keys() | got.keys()):
        if len(want[kind]) != len(got[kind]):
            fault = f"the twin has {len(want[kind])} outputs, this run made {len(got[kind])}"
        else:
            fault = next(filter(None, map(difference, want[kind], got[kind])), "")
        if fault:
            texts = ["--- twin", *want[kind], "--- this run", *got[kind]]
            cell.comparison_traceback += [f"{kind}: {fault}", *texts]
    return not cell.comparison_traceback


IPyNbCell.compare_outputs = compare_outputs

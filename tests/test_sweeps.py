"""Sweeps: what is finished stays and is not computed again, whatever stops them.

MEASUREATTN_KILLS=100 kills a sweep so many times, where five are the rule.
"""

import contextlib
import csv
import errno
import io
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import toy_sweep

from measureattn import sweeps
from measureattn.sweeps import SweepError, rows, sweep, write_table

KILLS = int(os.environ.get("MEASUREATTN_KILLS", "5"))
GRID = [{"x": x} for x in (1, 2, 3, 4)]
PATIENCE, ENDLESS = 120, 1000  # seconds: a test waits so long at most, so a cell's end is not met


class Counted:
    """A cell function that notes its calls; `after` may fail or wait."""

    def __init__(self, after=lambda x: None):
        self.calls, self.after = [], after

    def __call__(self, cell, checkpoint):
        self.calls.append(cell["x"])
        checkpoint.write_bytes(b"state")
        self.after(cell["x"])
        return {"rows": [{"root": cell["x"] ** 0.5, "k": k} for k in range(2)], "extra": [1, 2]}


class Inline(Executor):
    """The least an executor may be: `submit`, at once."""

    def submit(self, function, *args):
        future = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def start():
    """Starts a toy sweep, a process group of its own, the workers' stderr in the same pipe."""
    started = []

    def begin(seconds, folder, workers):
        command = [sys.executable, toy_sweep.__file__, ",".join(map(str, seconds))]
        process = subprocess.Popen(
            [*command, "--out", folder, "--workers", str(workers)], start_new_session=True,
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


def wait_until(happened):
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def finish(process):
    """What the process wrote to stderr, and so did its workers: all of them have ended."""
    return process.communicate(timeout=PATIENCE)[1]


def reference(seconds, folder):
    with ThreadPoolExecutor(8) as executor:
        sweep(toy_sweep.run_cell, toy_sweep.cells(seconds), folder, executor=executor)
    write_table(folder, folder / "table.csv")
    return (folder / "table.csv").read_bytes()


# -- what is finished stays ------------------------------------------------------------------------


def test_a_restart_computes_only_what_is_missing(tmp_path):
    function = Counted()
    sweep(function, GRID[:2], tmp_path, executor=Inline())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    sweep(function, GRID, tmp_path, executor=Inline())
    assert function.calls == [1, 2, 3, 4]
    assert len(before) == 2 and all(p.stat().st_mtime_ns == t for p, t in before.items())
    assert [row["x"] for row in rows(tmp_path)] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert not list(tmp_path.glob("*.npz"))
    sweep(function, GRID, tmp_path, executor=Inline())
    assert len(function.calls) == 4


def test_a_tuple_in_a_cell_is_found_again(tmp_path):
    function = Counted()
    for _ in range(2):
        sweep(function, [{"x": 1, "lengths": (10, 20)}], tmp_path, executor=Inline())
    assert function.calls == [1]


def test_equal_readable_names_are_different_cells(tmp_path):
    sweep(Counted(), [{"x": 1, "s": "a/b"}, {"x": 1, "s": "a:b"}], tmp_path, executor=Inline())
    assert sorted(row["s"] for row in rows(tmp_path)) == ["a/b", "a/b", "a:b", "a:b"]


def test_kill_9_loses_and_doubles_no_row(start, tmp_path):
    """Killed at random moments, restarted to the end: the same table, byte for byte."""
    seconds, folder, draw = [0.08] * (5 + 8 * KILLS), tmp_path / "killed", random.Random(1)
    for _ in range(KILLS):
        finished = set(folder.glob("*.json"))
        process = start(seconds, folder, workers=1)
        wait_until(lambda seen=finished: set(folder.glob("*.json")) - seen)
        time.sleep(draw.uniform(0, 0.15))
        os.killpg(process.pid, signal.SIGKILL)
        finish(process)
        assert process.returncode == -signal.SIGKILL, "it was over before the kill"
    process = start(seconds, folder, workers=1)
    assert "Traceback" not in finish(process)
    assert process.returncode == 0
    assert (folder / "table.csv").read_bytes() == reference(seconds, tmp_path / "whole")
    assert not list(folder.glob("*.npz"))


def test_workers_end_when_their_parent_is_killed(start, tmp_path):
    process = start([ENDLESS, ENDLESS], tmp_path, workers=2)
    wait_until(lambda: len(list(tmp_path.glob("*.npz"))) == 2)
    process.kill()
    finish(process)  # the pipe closes when the last worker has ended


def test_two_sweeps_share_a_folder(start, tmp_path):
    seconds = [0.02] * 40
    both = [start(seconds, tmp_path / "both", workers=1) for _ in range(2)]
    for process in both:
        assert "Traceback" not in finish(process)
        assert process.returncode == 0
    table = (tmp_path / "both" / "table.csv").read_bytes()
    assert table == reference(seconds, tmp_path / "one")
    assert not list((tmp_path / "both").glob(".*.tmp"))


def test_a_cell_that_another_sweep_finished_has_not_failed(tmp_path):
    """It may take the checkpoint away while this one reads it."""

    def beaten(cell, checkpoint):
        sweep(Counted(), [cell], tmp_path, executor=Inline())
        raise FileNotFoundError(checkpoint)

    sweep(beaten, GRID[:1], tmp_path, executor=Inline())
    assert len(rows(tmp_path)) == 2


def test_leftovers_of_killed_sweeps_are_removed(tmp_path):
    sweep(Counted(), GRID, tmp_path, executor=Inline())
    old, new = tmp_path / ".1.json.7-ab.tmp", tmp_path / ".2.json.8-cd.tmp"
    checkpoint = next(tmp_path.glob("1-*.json")).with_suffix(".npz")
    for path in (old, new, checkpoint):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * sweeps.DEAD,) * 2)
    assert len(rows(tmp_path)) == 8
    sweep(Counted(), GRID, tmp_path, executor=Inline())
    assert not old.exists() and new.exists() and not checkpoint.exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace('"rows"', "rows"),
        lambda text: "[1, 2]",
        lambda text: '{"cell": {"x": 2}}',
    ],
    ids=["truncated", "empty", "damaged", "list", "incomplete"],
)
def test_a_damaged_file_is_named_and_only_it_is_computed_anew(spoil, tmp_path):
    function = Counted()
    sweep(function, GRID, tmp_path, executor=Inline())
    (path,) = tmp_path.glob("2-*.json")
    path.write_text(spoil(path.read_text()))
    for act in (lambda: sweep(function, GRID, tmp_path, executor=Inline()), lambda: rows(tmp_path)):
        with pytest.raises(ValueError, match=r"is damaged.*Delete it") as caught:
            act()
        assert path.name in str(caught.value) and "\n" not in str(caught.value)
    path.unlink()
    sweep(function, GRID, tmp_path, executor=Inline())
    assert function.calls == [1, 2, 3, 4, 2]


def test_a_renamed_file_is_not_believed(tmp_path):
    sweep(Counted(), GRID[:2], tmp_path, executor=Inline())
    (one,), (two,) = tmp_path.glob("1-*.json"), tmp_path.glob("2-*.json")
    one.replace(two)
    with pytest.raises(ValueError, match="holds another cell"):
        sweep(Counted(), GRID, tmp_path, executor=Inline())


# -- places that cannot be written -----------------------------------------------------------------


def refuse(code, when=lambda path: True):
    """Stands for os.open or os.replace on a disk that is full or read-only."""

    def call(path, *rest, **options):
        if when(str(rest[0] if rest else path)):
            raise OSError(code, os.strerror(code))

    return call


def test_a_read_only_folder_is_named_before_anything_is_computed(tmp_path, monkeypatch):
    function = Counted()
    if os.geteuid() == 0:  # who may write everywhere
        monkeypatch.setattr(os, "open", refuse(errno.EROFS))
    else:
        tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="cannot write to") as caught:
        sweep(function, GRID, tmp_path, executor=Inline())
    monkeypatch.undo()
    tmp_path.chmod(0o700)
    assert str(tmp_path) in caught.value.strerror and "\n" not in caught.value.strerror
    assert not function.calls and not list(tmp_path.iterdir())


def test_a_full_disk_stops_the_sweep_and_loses_nothing(tmp_path, monkeypatch, thread):
    sweep(Counted(), GRID[:1], tmp_path, executor=Inline())
    whole = {path: path.read_bytes() for path in tmp_path.glob("*.json")}
    function = Counted(after=lambda x: time.sleep(x == 3))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse(errno.ENOSPC))
        with pytest.raises(OSError, match="No space left on device") as caught:
            sweep(function, GRID, tmp_path, executor=thread)
    assert caught.value.errno == errno.ENOSPC and str(tmp_path) in caught.value.strerror
    assert "run the same command again" in caught.value.strerror
    assert function.calls[0] == 2 and 4 not in function.calls, "it went on with what must fail"
    assert {path: path.read_bytes() for path in tmp_path.glob("*.json")} == whole
    assert not list(tmp_path.glob(".*.tmp"))
    sweep(function, GRID, tmp_path, executor=thread)
    assert len(rows(tmp_path)) == 8


def test_a_file_in_the_place_of_the_folder(tmp_path):
    place = tmp_path / "results"
    place.write_text("mine")
    for folder in (place, place / "deeper"):
        with pytest.raises(OSError, match="a file is in its place"):
            sweep(Counted(), GRID, folder, executor=Inline())
    assert place.read_text() == "mine"


# -- cells that fail, sweeps that are stopped ------------------------------------------------------


def test_a_failing_cell_does_not_stop_the_others(tmp_path):
    def odd(x):
        if x % 2 == 0:
            raise ArithmeticError(f"{x} is\neven")

    with pytest.raises(SweepError) as caught:
        sweep(Counted(after=odd), GRID, tmp_path, executor=Inline())
    first, *lines = str(caught.value).splitlines()
    assert first == "2 of 4 cells are not finished:"
    assert [line.split(": ", 1)[1] for line in lines] == [
        "ArithmeticError: 2 is even",
        "ArithmeticError: 4 is even",
    ]
    assert [row["x"] for row in rows(tmp_path)] == [1, 1, 3, 3]
    assert len(list(tmp_path.glob("*.npz"))) == 2, "their checkpoints stay"


def test_what_is_no_result_is_refused(tmp_path):
    with pytest.raises(SweepError, match=r'must return a dict with "rows", got list'):
        sweep(lambda cell, checkpoint: [1], GRID[:1], tmp_path, executor=Inline())
    with pytest.raises(SweepError, match="not JSON serializable"):
        sweep(lambda cell, checkpoint: {"rows": [{1j}]}, GRID[:1], tmp_path, executor=Inline())
    assert not list(tmp_path.iterdir())


def test_a_worker_that_dies_is_reported_in_one_line(tmp_path):
    """The default executor: processes of one thread each, the cells in their order."""
    with pytest.raises(SweepError) as caught:
        sweep(toy_sweep.die, GRID, tmp_path, workers=1)
    message = str(caught.value)
    assert message.startswith("3 of 4") and message.count("\n") == 1 and "worker died" in message
    assert [row["x"] for row in rows(tmp_path)] == [1]
    (found,) = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert found["provenance"]["threads"] == 1


def test_ctrl_c_keeps_what_is_finished(start, tmp_path):
    process = start([0.05, ENDLESS, ENDLESS], tmp_path, workers=2)
    wait_until(lambda: all(list(tmp_path.glob(f"toy-1-5-{n}-*.npz")) for n in (2, 3)))
    line = process.stderr.readline()  # the file is there a little before its line
    assert line.startswith("1 of 3: toy-1-5-1-0.05-") and line.endswith(" finished\n")
    os.killpg(process.pid, signal.SIGINT)
    assert finish(process).splitlines() == [
        "python -m measureattn: stopped: 1 of 3 cells are finished; the same command goes on from "
        "here"
    ]
    assert process.returncode == 130
    assert len(rows(tmp_path)) == toy_sweep.STEPS


def test_ctrl_c_cancels_what_waits_in_any_executor(tmp_path, thread):
    """Here it comes while the second cell computes, sent by that cell."""

    def press(x):
        if x == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(1)

    function = Counted(after=press)
    with pytest.raises(KeyboardInterrupt, match="stopped: 1 of 4 cells are finished"):
        sweep(function, GRID, tmp_path, executor=thread)
    thread.shutdown()
    assert function.calls == [1, 2]


def test_ctrl_c_waits_while_processes_are_started():
    """Also when a thread that does not block the signal takes it."""
    over, reached = threading.Event(), False
    threading.Thread(target=over.wait, daemon=True).start()
    with pytest.raises(KeyboardInterrupt), sweeps._interrupts_wait():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        reached = True
    over.set()
    assert reached


# -- tables ----------------------------------------------------------------------------------------

FLOATS = [0.1, 1 / 3, math.pi * 1e-300, 5e-324, 1.7976931348623157e308, -0.0, 1e16, math.inf]


def test_tables_give_every_bit_back(tmp_path):
    def function(cell, checkpoint):
        return {"rows": [{"value": value} for value in FLOATS]}

    sweep(function, [{"law": 'a,\n"b"', "x": 0.1 + 0.2}], tmp_path, executor=Inline())
    assert [row["value"].hex() for row in rows(tmp_path)] == [value.hex() for value in FLOATS]
    write_table(tmp_path, tmp_path / "table.csv")
    with open(tmp_path / "table.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == ["law", "x", "value"] and table[0]["law"] == 'a,\n"b"'
    assert float(table[0]["x"]).hex() == (0.1 + 0.2).hex()
    assert [float(row["value"]).hex() for row in table] == [value.hex() for value in FLOATS]
    again = (tmp_path / "table.csv").read_bytes()
    write_table(tmp_path, tmp_path / "table.csv")  # table.json is no cell
    assert (tmp_path / "table.csv").read_bytes() == again


def test_rows_come_in_the_order_of_numbers(tmp_path):
    sweep(Counted(), [{"x": x} for x in (100, 9, 10)], tmp_path, executor=Inline())
    assert [row["x"] for row in rows(tmp_path)] == [9, 9, 10, 10, 100, 100]


def test_provenance_says_what_and_not_where(tmp_path):
    def function(cell, checkpoint):
        return {"rows": [{}], "seconds": 7.5, "note": cell["x"]}

    sweep(function, GRID[:2], tmp_path, executor=Inline(), command="python -m this")
    write_table(tmp_path, tmp_path / "table.csv")
    text = (tmp_path / "table.json").read_text()
    behind = json.loads(text)["cells"]
    assert [(one["cell"], one["note"]) for one in behind] == [({"x": 1}, 1), ({"x": 2}, 2)]
    about = behind[0]["provenance"]
    assert about["command"] == "python -m this" and about["seconds"] == 7.5
    assert about["last_call"]["seconds"] < 5 and about["last_call"]["started"].endswith("+00:00")
    for name in ("measureattn", "torch", "numpy", "scipy", "python", "platform", "processor"):
        assert about[name], name
    assert str(tmp_path) not in text and str(Path.home()) not in text
    assert socket.gethostname() not in text


def test_tables_that_cannot_be(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="holds no rows"):
        write_table(tmp_path, tmp_path / "table.csv")
    sweep(Counted(), GRID, tmp_path, executor=Inline())
    with pytest.raises(ValueError, match=r"a \.csv or \.parquet file"):
        write_table(tmp_path, tmp_path / "table.txt")
    monkeypatch.setattr(sweeps.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs pandas and pyarrow: install them"):
        write_table(tmp_path, tmp_path / "table.parquet")
    assert not list(tmp_path.glob("table*"))


def test_parquet_gives_every_bit_back(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    sweep(Counted(), GRID, tmp_path, executor=Inline())
    write_table(tmp_path, tmp_path / "table.parquet")
    table = pandas.read_parquet(tmp_path / "table.parquet").to_dict("records")
    assert table == rows(tmp_path)


# -- progress --------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_with_tqdm_shows_a_bar(tmp_path, monkeypatch):
    pytest.importorskip("tqdm")
    sweep(Counted(), GRID[:1], tmp_path, executor=Inline())
    monkeypatch.setattr(sys, "stderr", Terminal())
    sweep(Counted(), GRID, tmp_path, executor=Inline())
    assert "4/4" in sys.stderr.getvalue() and "finished" not in sys.stderr.getvalue()


def test_without_tqdm_there_is_a_line_a_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sweeps.importlib.util, "find_spec", lambda name: None)
    sweep(Counted(), GRID[:1], tmp_path, executor=Inline())
    with pytest.raises(SweepError):
        sweep(Counted(after=lambda x: 1 / (x - 3)), GRID[:3], tmp_path, executor=Inline())
    lines = sys.stderr.getvalue().splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["1 of 1", "2 of 3", "3 of 3"]
    assert sorted(line.endswith("not finished") for line in lines) == [False, False, True]

"""Grids of computations over any `concurrent.futures.Executor`, one result file a finished cell.

A cell is a flat dict that JSON can hold; a function turns it into rows of a table. Whatever stops
a sweep (Ctrl-C, a crash, a lost machine), the same call goes on with what is missing, and a cell
that left a checkpoint goes on from there. Nothing here knows what is swept.
"""

import contextlib
import csv
import errno
import hashlib
import importlib.util
import io
import json
import multiprocessing
import os
import platform
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import scipy
import torch

import measureattn
from measureattn._files import write_atomically

NO_PLACE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # the folder's fault, not a cell's
DEAD = 3600.0  # seconds; writing takes a few, so a temporary file that old has lost its writer
RESULT = re.compile(r".+-[0-9a-f]{8}\.json")


class SweepError(RuntimeError):
    """Some cells of a sweep failed; the message has a line for each. Source: ours. See: chapter 10.

    >>> raise SweepError("1 of 2 cells failed")
    Traceback (most recent call last):
    measureattn.sweeps.SweepError: 1 of 2 cells failed
    """


def sweep(
    function: Callable[[dict, Path], dict], cells: Sequence[dict], folder: Path | str, *,
    executor: Executor | None = None, workers: int | None = None, command: str = "",
) -> None:  # fmt: skip
    """Compute the cells that `folder` lacks, in their order, each into a file of its own.

    function   (cell, checkpoint) -> {"rows": list of dicts, ...}, importable by name; checkpoint is
               a path where it may keep its state, deleted once the cell is finished. What it
               returns beside the rows is kept too; "seconds" stands for the time of all its calls
    folder     made if need be; with an executor over many machines, a folder that all of them see
    executor   by default `workers` processes (as many as this one may use), one thread each; a
               script that calls this needs `if __name__ == "__main__":`
    command    what to run for the same results, for the record

    Raises SweepError if cells failed, after the others are done; ValueError if a result file is
    damaged; OSError if the folder cannot be written; KeyboardInterrupt, with a count, at Ctrl-C.
    Source: ours. See: chapter 10.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> square = lambda cell, checkpoint: {"rows": [{"y": cell["x"] ** 2}]}
    >>> with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as threads:
    ...     sweep(square, [{"x": 2}, {"x": 3}], folder, executor=threads)
    ...     rows(folder)
    [{'x': 2, 'y': 4}, {'x': 3, 'y': 9}]
    """
    folder = Path(folder)
    grid = {_path(folder, cell): cell for cell in json.loads(json.dumps(list(cells)))}
    missing = {path: cell for path, cell in grid.items() if not _finished(path, cell)}
    _prepare(folder, grid.keys() - missing.keys())
    jobs = [(function, cell, path, command) for path, cell in missing.items()]
    try:
        with _processes(workers) if executor is None else contextlib.nullcontext(executor) as pool:
            failed = _collect(pool, jobs, len(grid))
    except KeyboardInterrupt:
        done = sum(_finished(path, cell) for path, cell in grid.items())
        raise KeyboardInterrupt(
            f"stopped: {done} of {len(grid)} cells are finished; the same command goes on from here"
        ) from None
    # a concurrent sweep may have finished a cell and removed the checkpoint under this one's hands
    left = [path for path in grid if path in failed and not _finished(path, grid[path])]
    failed = {path: failed[path] for path in left}
    for error in failed.values():
        if isinstance(error, OSError) and error.errno in NO_PLACE:
            raise _no_place(folder, error) from error
    if failed:
        lines = dict.fromkeys(_line(path, error) for path, error in failed.items())
        raise SweepError(
            "\n".join([f"{len(failed)} of {len(grid)} cells are not finished:", *lines])
        ) from next(iter(failed.values()))


def rows(folder: Path | str) -> list[dict]:
    """All rows of all finished cells, each behind its cell's keys; by file name, numbers in order.

    Raises ValueError if a result file is damaged. Source: ours. See: chapter 10.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows(folder)
    []
    """
    return _rows(_results(folder))


def write_table(folder: Path | str, path: Path | str) -> None:
    """Write the `rows` of a folder to `path`, and all else about its cells to a .json beside it.

    path   .csv, floats with all their digits, or .parquet, for which pandas and pyarrow are needed

    Raises ValueError if there are no rows, the path is as `require_table` forbids or a result file
    is damaged, OSError if a file cannot be written. Source: ours. See: chapter 10.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_table(folder, "table.csv")  # doctest: +ELLIPSIS, +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    ValueError: ... holds no rows
    """
    path = require_table(path)
    results = _results(folder)
    table = _rows(results)
    if not table:
        raise ValueError(f"{folder} holds no rows. Run the sweep first, or give its folder")
    behind = [{k: v for k, v in found.items() if k != "rows"} for found in results]
    content = _csv(table) if path.suffix == ".csv" else _parquet(table)
    write_atomically(path.with_suffix(".json"), json.dumps({"cells": behind}).encode())
    write_atomically(path, content)


def require_table(path: Path | str) -> Path:
    """The path of a table that `write_table` can write here; raises ValueError for another one.

    Source: ours. See: chapter 10.

    >>> require_table("table.txt")
    Traceback (most recent call last):
    ValueError: a table is a .csv or .parquet file, got table.txt
    """
    path = Path(path)
    if path.suffix not in (".csv", ".parquet"):
        raise ValueError(f"a table is a .csv or .parquet file, got {path}")
    lacking = [name for name in ("pandas", "pyarrow") if not importlib.util.find_spec(name)]
    if path.suffix == ".parquet" and lacking:
        raise ValueError(f"{path} needs {' and '.join(lacking)}: install them, or write .csv")
    return path


# -- files -----------------------------------------------------------------------------------------


def _path(folder: Path, cell: dict) -> Path:
    """The cell's values, as far as a file name holds them, and a hash of all of it."""
    text = json.dumps(cell, sort_keys=True, separators=(",", ":"), allow_nan=False)
    parts = (re.sub(r"[^\w.+-]+", "_", str(value)).strip("_.-") for value in cell.values())
    name = "-".join(parts)[:60] or "cell"
    return folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"


def _read(path: Path) -> dict:
    with contextlib.suppress(ValueError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and {"cell", "rows", "provenance"} <= found.keys():
            return found
    raise ValueError(
        f"{path} is damaged: it was cut off or changed. Delete it and run the same command again; "
        f"only this cell is computed anew"
    )


def _finished(path: Path, cell: dict) -> bool:
    if not path.exists():
        return False
    if _read(path)["cell"] != cell:
        raise ValueError(f"{path} holds another cell. Was it renamed? Move it elsewhere")
    return True


def _results(folder: Path | str) -> list[dict]:
    paths = [path for path in Path(folder).glob("*.json") if RESULT.fullmatch(path.name)]
    natural = {path: re.split(r"(\d+)", path.name) for path in paths}  # text, number, text, ...
    for parts in natural.values():
        parts[1::2] = map(int, parts[1::2])
    return [_read(path) for path in sorted(paths, key=natural.get)]


def _rows(results: list[dict]) -> list[dict]:
    return [found["cell"] | row for found in results for row in found["rows"]]


def _prepare(folder: Path, finished: Iterable[Path]) -> None:
    """Make the folder, see that it can be written, remove what killed sweeps left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _no_place(folder, error) from error
    left = [path.with_suffix(".npz") for path in finished]
    for path in [*left, *folder.glob(".*.tmp")]:
        with contextlib.suppress(OSError):  # a concurrent sweep may do the same
            if path.suffix == ".npz" or time.time() - path.stat().st_mtime > DEAD:
                path.unlink()


def _no_place(folder: Path, error: OSError) -> OSError:
    inside = isinstance(error, FileExistsError | NotADirectoryError)
    reason = "a file is in its place" if inside else os.strerror(error.errno)
    return OSError(
        error.errno,
        f"cannot write to {folder}: {reason}. What is finished stays; make room or choose another "
        f"folder, then run the same command again",
    )


def _csv(table: list[dict]) -> bytes:
    text = io.StringIO(newline="")
    columns = dict.fromkeys(name for row in table for name in row)
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)  # floats by their repr, which reads back as the same bits
    return text.getvalue().encode()


def _parquet(table: list[dict]) -> bytes:
    import pandas

    content = io.BytesIO()
    pandas.DataFrame(table).to_parquet(content)
    return content.getvalue()


# -- processes -------------------------------------------------------------------------------------


def _compute(function: Callable, cell: dict, path: Path, command: str) -> None:
    """Compute one cell, wherever this runs, and leave its file."""
    if _finished(path, cell):  # by a concurrent sweep
        return
    checkpoint = path.with_suffix(".npz")
    started, wall, cpu = datetime.now(UTC), time.perf_counter(), time.thread_time()
    result = function(cell, checkpoint)
    if not isinstance(result, dict) or "rows" not in result:
        raise TypeError(f'the function must return a dict with "rows", got {type(result).__name__}')
    last = {
        "started": started.isoformat(timespec="seconds"),
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.thread_time() - cpu,
    }
    about = {"command": command, "seconds": result.get("seconds", last["seconds"])}
    about |= _surroundings() | {"last_call": last}
    kept = {name: value for name, value in result.items() if name != "seconds"}
    content = json.dumps(kept | {"cell": cell, "provenance": about})
    write_atomically(path, content.encode())
    checkpoint.unlink(missing_ok=True)


def _surroundings() -> dict:
    """What the numbers may depend on; no names of hosts, users or folders."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(x for x in lines if x.startswith("model name")).partition(": ")[2]
    except (OSError, StopIteration):
        processor = platform.processor()
    return {
        "measureattn": measureattn.__version__, "torch": torch.__version__,
        "numpy": np.__version__, "scipy": scipy.__version__, "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}", "processor": processor,
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def _collect(executor: Executor, jobs: list[tuple], total: int) -> dict[Path, BaseException]:
    """Run the jobs; what went wrong, by path. A folder without room stops what has not started."""
    futures, failed = {}, {}
    try:
        with _interrupts_wait():
            for job in jobs:
                try:
                    futures[executor.submit(_compute, *job)] = job[2]
                except BrokenExecutor as error:
                    failed[job[2]] = error
        for future in _progress(futures, total):
            error = None if future.cancelled() else future.exception()
            if error:
                failed[futures[future]] = error
            if isinstance(error, OSError) and error.errno in NO_PLACE:
                _cancel(futures)
    finally:
        _cancel(futures)
    return failed


def _cancel(futures: Iterable[Future]) -> None:
    for future in futures:
        future.cancel()


def _progress(futures: dict[Future, Path], total: int) -> Iterator[Future]:
    """The futures as they end: behind a bar on a terminal that has tqdm, else with a line each."""
    ending, done = as_completed(futures), total - len(futures)
    if sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
        from tqdm import tqdm

        yield from tqdm(ending, total=total, initial=done, unit="cell")
        return
    for n, future in enumerate(ending, done + 1):
        yield future
        state = "not finished" if future.cancelled() or future.exception() else "finished"
        print(f"{n} of {total}: {futures[future].stem} {state}", file=sys.stderr, flush=True)


def _line(path: Path, error: BaseException) -> str:
    if isinstance(error, BrokenExecutor):
        return (
            "  a worker died, perhaps for want of memory; run the same command again, with fewer "
            "workers"
        )
    return f"  {path.stem}: {type(error).__name__}: {' '.join(str(error).split())}"


@contextlib.contextmanager
def _processes(workers: int | None) -> Iterator[Executor]:
    """Worker processes that end at once when this one dies or leaves early."""
    if workers is None:
        here = hasattr(os, "sched_getaffinity")
        workers = len(os.sched_getaffinity(0)) if here else os.cpu_count()
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)  # `ours` is closed at the latest when we die
    executor = ProcessPoolExecutor(workers, context, _start_worker, (theirs,))
    try:
        yield executor
    except BaseException:
        ours.close()
        raise
    finally:
        executor.shutdown(cancel_futures=True)
        ours.close()
        theirs.close()


def _start_worker(parent: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)

    def follow():
        with contextlib.suppress(OSError):
            parent.poll(None)  # until its other end is closed
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Keep Ctrl-C back: processes started meanwhile do not see it even before they are ready."""
    here = threading.current_thread() is threading.main_thread()
    if not (here and hasattr(signal, "pthread_sigmask")):
        yield
        return
    came: list[int] = []  # the mask is this thread's own, and another one may take the signal
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt

"""Timing two ways of doing one thing, in turn, so that a drifting machine treats both alike."""

import statistics
import subprocess
import sys
import time


def paired(benchmark, ours, theirs, rounds=7):
    """Time both in turn after one warm-up each; the benchmark keeps our times and the ratios."""
    ours(), theirs()
    others = []

    def setup():
        start = time.perf_counter()
        theirs()
        others.append(time.perf_counter() - start)

    benchmark.pedantic(ours, setup=setup, rounds=rounds, iterations=1)
    mine = benchmark.stats.stats.data
    ratios = [a / b for a, b in zip(mine, others, strict=True)]
    benchmark.extra_info["theirs_median_s"] = statistics.median(others)
    benchmark.extra_info["ratio_median"] = statistics.median(ratios)
    benchmark.extra_info["ratio_range"] = [min(ratios), max(ratios)]
    return statistics.median(ratios)


def peak_growth(setup: str, work: str) -> int:
    """Bytes by which `work` raises the peak memory of a fresh process after `setup` (Linux).

    From /proc: getrusage's maximum would be inherited from the process that starts this one.
    """
    code = (
        "def peak():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return int(next(x for x in lines if x.startswith('VmHWM')).split()[1])\n"
        f"{setup}\n"
        "before = peak()\n"
        f"{work}\n"
        "print(peak() - before)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(run.stdout) * 1024

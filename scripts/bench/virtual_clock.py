"""Measure how many minutes a step takes in each mode of the trainer, on a virtual clock.

    python -m scripts.bench.virtual_clock [SCHEDULES]

The trainer, its journal and its files are real. A group takes a lognormal time (median 10 minutes, sigma
0.8), an update takes 2 minutes, a batch has 8 groups, and a run has 60 steps. After these runs the script
simulates SCHEDULES random runs (default 1,000). Its exit status is 1 if one of the random runs
trains a token that is older than `max_staleness`, or trains a group twice or never.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from tests.fakes.virtual_time import TURNS, Schedule, lognormal_minutes, simulate

STEPS, BATCH = 60, 8
STREAMED = ("stream_groups=true", "loss_reduction=prompt_mean")
MODES = {
    "synchronous": (),
    "streamed": STREAMED,
    "max_staleness=1": ("max_staleness=1",),
    "max_staleness=1, one batch in flight": ("max_staleness=1", f"max_groups_in_flight={BATCH}"),
    "max_staleness=1, streamed": ("max_staleness=1", *STREAMED),
    "max_staleness=2": ("max_staleness=2",),
    "max_staleness=4": ("max_staleness=4",),
}


def reference_trace() -> Table:
    columns = (
        "mode",
        "min/step",
        "discarded",
        "slowest tenth trained",
        "age mean",
        "age max",
        "masked tokens",
    )
    table = Table(*columns, box=None)
    for name, options in MODES.items():
        with tempfile.TemporaryDirectory() as directory:
            path, minutes = Path(directory) / "run", lognormal_minutes(10, 0.8)
            result = simulate(
                path, *options, minutes=minutes, train_minutes=2, num_steps=STEPS, batch_size=BATCH
            )
        masked = sum(line.get("staleness/masked_tokens", 0) for line in result.metrics) / (
            STEPS * BATCH * TURNS
        )
        ages = (f"{fmean(result.ages):.2f}", f"{max(result.ages)}", f"{masked:.1%}")
        table.add_row(
            name,
            f"{result.minutes_per_step:.1f}",
            f"{result.num_discarded}",
            f"{result.slowest_trained:.0%}",
            *ages,
        )
    return table


def random_schedules(count: int) -> int:
    """Simulate random runs, and print their faults and a summary line. Return the number of faulty runs."""
    started, num_bad, num_groups, num_discarded = time.monotonic(), 0, 0, 0
    for seed in range(count):
        schedule = Schedule.draw(seed)
        with tempfile.TemporaryDirectory() as directory:
            result = schedule.play(Path(directory) / "run")
        faults = schedule.faults(result)
        num_bad += bool(faults)
        num_groups += result.played.total()
        num_discarded += result.num_discarded
        for fault in faults:
            print(f"{schedule}: {fault}")
    print(
        f"{count} random schedules in {time.monotonic() - started:.0f} s: {num_bad} with a fault; "
        f"{num_discarded} of {num_groups} groups had only tokens older than max_staleness"
    )
    return num_bad


if __name__ == "__main__":
    Console(width=120).print(reference_trace())
    sys.exit(1 if random_schedules(int(sys.argv[1]) if len(sys.argv) > 1 else 1000) else 0)

"""Measure the minutes per step, the discarded groups and the staleness of each mode of the trainer, on a
virtual clock.

    python -m scripts.bench.virtual_clock [SCHEDULES]

The trainer, its journal and its files are real; the clock, the trials and the server are simulated. The
script first prints a table with one run of 60 steps for each mode. In these runs, a batch has 8 groups of one
trial, the duration of a trial is lognormal (median 10 minutes, sigma 0.8), and an update takes 2 minutes. A
group counts as discarded if none of its tokens is trained. The script then simulates SCHEDULES (default:
1,000) runs with random parameters. The exit status is 1 if one of the random runs trains a token that is more
than `max_staleness` updates old, or does not train every group exactly once.
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

NUM_STEPS, BATCH_SIZE = 60, 8
STREAMED = ("stream_groups=true", "loss_reduction=prompt_mean")
MODES = {
    "synchronous": (),
    "streamed": STREAMED,
    "max_staleness=1": ("max_staleness=1",),
    "max_staleness=1, one batch in flight": ("max_staleness=1", f"max_groups_in_flight={BATCH_SIZE}"),
    "max_staleness=1, streamed": ("max_staleness=1", *STREAMED),
    "max_staleness=2": ("max_staleness=2",),
    "max_staleness=4": ("max_staleness=4",),
}


def table_of_modes() -> Table:
    """Simulate one run in each mode of MODES, and return a table with one row for each."""
    columns = (
        "mode",
        "minutes/step",
        "discarded groups",
        "slowest tenth of tasks trained",
        "mean staleness",
        "max staleness",
        "masked tokens",
    )
    table = Table(*columns, box=None)
    for name, options in MODES.items():
        with tempfile.TemporaryDirectory() as directory:
            path, minutes = Path(directory) / "run", lognormal_minutes(10, 0.8)
            result = simulate(
                path, *options, minutes=minutes, train_minutes=2, num_steps=NUM_STEPS, batch_size=BATCH_SIZE
            )
        num_tokens = NUM_STEPS * BATCH_SIZE * TURNS  # every group has one trial, and every turn has one token
        num_masked = sum(line.get("staleness/masked_tokens", 0) for line in result.metrics)
        table.add_row(
            name,
            f"{result.minutes_per_step:.1f}",
            f"{result.num_discarded}",
            f"{result.slowest_trained:.0%}",
            f"{fmean(result.ages):.2f}",
            f"{max(result.ages)}",
            f"{num_masked / num_tokens:.1%}",
        )
    return table


def simulate_random_schedules(count: int) -> int:
    """Simulate random runs, and print their faults and a summary line. Return the number of faulty runs."""
    started, num_faulty, num_groups, num_discarded = time.monotonic(), 0, 0, 0
    for seed in range(count):
        schedule = Schedule.draw(seed)
        with tempfile.TemporaryDirectory() as directory:
            result = schedule.run(Path(directory) / "run")
        faults = schedule.faults(result)
        num_faulty += bool(faults)
        num_groups += result.rolled_out.total()
        num_discarded += result.num_discarded
        for fault in faults:
            print(f"{schedule}: {fault}")
    print(
        f"{count} random schedules in {time.monotonic() - started:.0f} s: {num_faulty} with a fault; "
        f"{num_discarded} of {num_groups} groups had only tokens older than max_staleness"
    )
    return num_faulty


if __name__ == "__main__":
    Console(width=150).print(table_of_modes())
    sys.exit(1 if simulate_random_schedules(int(sys.argv[1]) if len(sys.argv) > 1 else 1000) else 0)

"""`FakeRun`: runs the real trainer with a task source and a backend that the test creates."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from src.cli.command_line import parse
from src.cli.console import Display
from src.config import TrainerConfig
from src.loop.connection import Dependencies
from src.loop.run import run
from src.loop.run_result import RunResult
from src.records.journal import JOURNAL, GroupKey
from tests.fakes.run_files import records

OWN_SERVER = ("model_name=m", "backend=skyrl-tx", "skyrl_tx_url=http://h:1")


class FakeRun:
    """Runs the trainer in the directory `path` and collects its terminal output in `text`.

    `make` creates the `Dependencies` each time that the run connects. It is not used if a subclass overrides
    `opened`.
    """

    def __init__(self, path: Path, make: Callable[[TrainerConfig], Dependencies] | None = None) -> None:
        self.path = path
        self.text = io.StringIO()
        self._make = make

    async def go(self, *options: str) -> RunResult:
        """Run the trainer with these options. A later option overrides an earlier one with the same name."""
        config = parse([*OWN_SERVER, f"log_path={self.path}", *options])
        return await run(config, Display(Console(file=self.text, width=160)), connect=self.opened)

    @asynccontextmanager
    async def opened(self, config, events, source):
        assert self._make is not None
        yield self._make(config)

    def lines(self, name: str) -> list[dict[str, Any]]:
        return records(self.path / name)


def untimed(log_path: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step without times. Resumed and uninterrupted runs have equal metrics."""
    lines = records(log_path / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not is_wall_clock(name)} for line in lines]


def is_wall_clock(name: str) -> bool:
    """Return whether a metric measures time."""
    name = name.removeprefix("test/")
    if name.startswith(("time/", "timing/", "throughput/", "generate/trajectory_time_")) or name.endswith(
        "_duration"
    ):
        return True
    return name.startswith(("environment/", "env/")) and name.endswith("_s")


def groups_trained(log_path: Path) -> Counter[GroupKey]:
    """Return how often the final weights of the run were trained on each group."""
    trained: dict[int, Counter[GroupKey]] = {}
    for record in records(log_path / JOURNAL):
        if record["event"] == "started":
            trained = {step: groups for step, groups in trained.items() if step <= record["resumed_from"]}
        elif record["event"] == "trained":
            trained.setdefault(record["step"], Counter()).update(
                (step, task) for step, task in record["groups"]
            )
    return sum(trained.values(), Counter())

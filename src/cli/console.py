"""What a person watching the run reads: a line per event, a table per step, the outcome at the end. Readable when piped."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from src.evaluate.evaluation import MAX_DOMAINS, Evaluation
from src.learning.played_groups import SOLVED
from src.records.metrics_table import ALL_TASKS
from src.rollouts.group_rollout import TimedGroup

logger = logging.getLogger(__name__)

MIN_SIGNAL = (
    0.25  # the share of steps with differing rewards below which, by seed 004, tasks and model do not fit
)

# What a step's table shows of its metrics, in this order; the rest is in metrics.jsonl.
SHOWN = (
    ("reward", "env/all/reward/total", "{:.3f}"),
    ("solved", "env/all/success", "{:.0%}"),
    ("mixed", "env/all/by_group/frac_mixed", "{:.0%}"),  # groups with something to learn from
    ("lost", "trials/ungraded", "{:.0f}"),
    ("turns", "env/all/turns", "{:.1f}"),
    ("tokens", "tokens/sampled", "{:.0f}"),
    ("grad", "optim/grad_norm", "{:.2g}"),
    ("KL", "optim/kl_sample_train_v2", "{:.1e}"),  # between sampler and trainer
    ("play s", "time/rollouts", "{:.1f}"),
    ("learn s", "time/update", "{:.1f}"),
)
FILES = (
    "metrics.jsonl",
    "checkpoints.jsonl",
    "rollouts/",
    "dumped_evals/",
    "jobs/",
    "logs.log",
)  # a run's, those that a reader begins with


class Display:
    """Prints to one terminal or pipe. Counts the groups of the batch being played."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._done = 0
        self._expected = 0

    def say(self, text: str) -> None:
        logger.info("%s", text)
        self._show(escape(text), soft_wrap=True)

    def begin(self, what: str, *, num_groups: int, group_size: int) -> None:
        self._done, self._expected = 0, num_groups
        self.say(f"{what}: {num_groups} task{_s(num_groups)} x {group_size} trial{_s(group_size)}")

    def group(self, finished: TimedGroup) -> None:
        """One line: task, solved, what partial rewards come to, turns, seconds, and what failed."""
        self._done += 1
        group = finished.group
        turns = [len(trajectory.turns) for trajectory in group.trajectories]
        earned = "" if _all_or_nothing(group.rewards) else f"reward {fmean(group.rewards):.2f}, "
        failed = f", {len(group.failures)} ungraded ({group.failures[0].kind})" if group.failures else ""
        mean_turns = f"{sum(turns) / len(turns):.1f} turns, " if turns else ""
        place = f"[{self._done}/{self._expected}]"
        self.say(
            f"  {place} {group.task.id}: {_solved(group.rewards)} solved, {earned}{mean_turns}{finished.duration_s:.1f} s{failed}"
        )

    def step(self, title: str, metrics: Mapping[str, float]) -> None:
        table = _table()
        shown = [(name, pattern.format(metrics[key])) for name, key, pattern in SHOWN if key in metrics]
        for name, _ in shown:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_row(*(value for _, value in shown))
        self.say(title)
        self._show(table)

    def evaluation(self, evaluation: Evaluation, previous: Evaluation | None) -> None:
        """The held-out tasks one by one, the first evaluation beside the latest."""
        table = _table()
        table.add_column("held-out task", no_wrap=True)
        if previous is not None:
            table.add_column(f"step {previous.step}", justify="right")
        table.add_column(f"step {evaluation.step}", justify="right")
        before = {} if previous is None else {group.task.id: group.rewards for group in previous.groups}
        for group in evaluation.groups:
            row = (
                [group.task.id] if previous is None else [group.task.id, _cell(before.get(group.task.id, []))]
            )
            table.add_row(*row, _cell(group.rewards))
        self._show(table)
        floor = evaluation.whole.noop_success
        beside = "" if floor is None else f"; doing nothing: {floor.value:.1%}"
        partial = any(group.task.grading for group in evaluation.groups)
        rewards = [reward for group in evaluation.groups for reward in group.rewards]
        earned = "" if _all_or_nothing(rewards) else f"; mean reward {fmean(rewards):.3f}"
        self.say(
            f"{_success(partial)}: {evaluation.success_rate:.1%} ({evaluation.num_solved}/{evaluation.num_graded}){earned}{beside}"
        )

    def _show(self, what: RenderableType, *, soft_wrap: bool = False) -> None:
        """A terminal that hung up, or a full disk behind `>`, ends no run: its folder has what there was to read."""
        try:
            self._console.print(
                what, emoji=False, highlight=False, soft_wrap=soft_wrap
            )  # a model id may hold :train:
        except OSError as error:
            logger.warning("the output cannot be written any more: %s", error.strerror)
            self._console.quiet = True


class Terminal(Console):
    """Standard output, whose reader may go away before the program does: the `tee` behind a run gets its Ctrl-C too."""

    def on_broken_pipe(self) -> None:
        """Rich would raise SystemExit, which no event loop survives: the run would end without a checkpoint."""
        logger.warning("nobody reads the output any more")
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def terminal() -> Console:
    """Standard output. A pipe has no width to fit, so that nothing in it is cut."""
    return Terminal(highlight=False, width=None if sys.stdout.isatty() else 160)


@dataclass(frozen=True, kw_only=True, slots=True)
class Success:
    """Held-out success rates of a run; None where nothing was held out, or nobody knows what doing nothing solves."""

    before: float | None
    after: float | None
    floor: float | None
    is_partial: bool = False  # only a part of a benchmark's grading counted
    rewards: tuple[float, float] | None = None  # the mean before and after, where a reward may be partial


def outcome(
    success: Success, signals: Sequence[str], *, steps: int, wall_s: float, log_path: Path
) -> Sequence[str]:
    """The run's last lines."""
    lines = [f"done: {steps} step{_s(steps)} in {_duration(wall_s)}"]
    before, after = success.before, success.after
    if before is not None and after is not None:
        beside = "" if success.floor is None else f"; doing nothing: {success.floor:.1%}"
        name = _success(success.is_partial)
        earned = (
            ""
            if success.rewards is None
            else "; mean reward {:.3f} before, {:.3f} after".format(*success.rewards)
        )
        lines.append(
            f"{name}: {before:.1%} before, {after:.1%} after ({100 * (after - before):+.1f} points){earned}{beside}"
        )
    files = [name for name in FILES if (log_path / name).exists()]
    return [*lines, *signals, f"files: {log_path} ({', '.join(files)})"]


def signals(variances: Mapping[str, Sequence[float]]) -> list[str]:
    """A line for all tasks, and one for each domain of a few; of families by the dozen each has had a step or two."""
    domains = {name: values for name, values in variances.items() if name != ALL_TASKS}
    shown = domains if 1 < len(domains) <= MAX_DOMAINS else {}
    return [signal(name, values) for name, values in variances.items() if name == ALL_TASKS or name in shown]


def signal(name: str, variances: Sequence[float]) -> str:
    """What a run's steps had to learn from: 0.25 is two successes of four, one of four is 0.1875.

    >>> signal("retail", [0.1875, 0.0, 0.0, 0.0, 0.0])
    'signal of retail: mean variance per prompt 0.0375, 20% of 5 steps with any; too hard or too easy for this model'
    """
    share, mean = (
        sum(variance > 0 for variance in variances) / len(variances),
        sum(variances) / len(variances),
    )
    verdict = "" if share >= MIN_SIGNAL else "; too hard or too easy for this model"
    return f"signal of {name}: mean variance per prompt {mean:.4f}, {share:.0%} of {len(variances)} steps with any{verdict}"


def _table() -> Table:
    return Table(box=None, padding=(0, 1))


def _success(is_partial: bool) -> str:
    return "held-out success, graded in part" if is_partial else "held-out success"


def _all_or_nothing(rewards: Sequence[float]) -> bool:
    return all(reward in (0, 1) for reward in rewards)


def _cell(rewards: Sequence[float]) -> str:
    return _solved(rewards) if _all_or_nothing(rewards) else f"{_solved(rewards)} ({fmean(rewards):.2f})"


def _solved(rewards: Sequence[float]) -> str:
    return f"{sum(reward >= SOLVED for reward in rewards)}/{len(rewards)}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _s(count: int) -> str:
    return "" if count == 1 else "s"

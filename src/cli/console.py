"""Show the events of a run on a terminal or in a pipe.

Each event is printed as one line. A step and an evaluation also have a table. The first failure of each kind
has a further line.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from src.core.printable import printable
from src.core.trajectory import TrajectoryGroup
from src.evaluate.evaluation import Evaluation, TaskRewards
from src.learning.rollout_groups import SOLVED
from src.loop.outcome import GRADING_ERROR_REASONS, counted, shown_reward, success_name

logger = logging.getLogger(__name__)

PIPE_WIDTH = 160
MAX_CHARACTERS = 2000  # of a message; the middle of a longer message is not shown
ROLE_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}
# The columns of a step's table: heading, metric and formatter. metrics.jsonl has all metrics.
SHOWN = (
    ("reward", "env/all/reward/total", shown_reward),
    ("solved", "env/all/success", "{:.0%}".format),
    ("mixed", "env/all/by_group/frac_mixed", "{:.0%}".format),  # groups with differing rewards
    ("failed", "trials/ungraded", "{:.0f}".format),
    ("turns", "env/all/turns", "{:.1f}".format),
    ("tokens", "tokens/sampled", "{:.0f}".format),
    ("nll", "sft/nll", "{:.4f}".format),
    ("chats", "sft/chats", "{:.0f}".format),
    ("trained tokens", "sft/trained_tokens", "{:.0f}".format),
    ("grad", "optim/grad_norm", "{:.2g}".format),
    ("KL", "optim/kl_sample_train_v2", "{:.1e}".format),  # from the logprobs of sampler and trainer
    ("rollouts", "time/rollouts", "{:.1f}s".format),
    ("update", "time/update", "{:.1f}s".format),
)


class Display:
    """Prints the events of a run. Implements `TrainingEvents`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_finished = 0  # groups since `batch_started`
        self._num_groups = 0
        # The pairs (result, kind) that have been shown. The result is "ungraded trial" or "trial with reward
        # 0", and the kind is a failure kind or a graded-zero reason.
        self._shown_failures: set[tuple[str, str]] = set()

    def say(self, text: str) -> None:
        logger.info("%s", text)
        self._show(Text(printable(text)), soft_wrap=True)

    def batch_started(self, title: str, *, num_groups: int, group_size: int) -> None:
        self._num_finished, self._num_groups = 0, num_groups
        self.say(f"{title}: {counted(num_groups, 'task')} x {counted(group_size, 'trial')}")

    def group_finished(self, group: TrajectoryGroup, *, duration_s: float) -> None:
        self._num_finished += 1
        turns = [len(trajectory.turns) for trajectory in group.trajectories]
        parts = [f"{_solved(group.rewards)} solved"]
        if not _is_all_or_nothing(group.rewards):
            parts.append(f"reward {shown_reward(fmean(group.rewards))}")
        if turns:
            parts.append(f"{fmean(turns):.1f} turns")
        parts.append(f"{duration_s:.1f} s")
        if group.failures:
            parts.append(f"{len(group.failures)} ungraded ({group.failures[0].kind})")
        progress = f"[{self._num_finished}/{self._num_groups}]"
        self.say(f"  {progress} {group.task.id}: {', '.join(parts)}")
        self._show_first_failures(group)

    def _show_first_failures(self, group: TrajectoryGroup) -> None:
        """Print one line for the first failure of each kind, and for the first trial of each graded-zero
        reason in GRADING_ERROR_REASONS.
        """
        failures = [(str(failure.kind), failure.message, "ungraded trial") for failure in group.failures]
        failures += [
            (str(trajectory.zero_reason), trajectory.zero_detail, "trial with reward 0")
            for trajectory in group.trajectories
            if trajectory.zero_reason in GRADING_ERROR_REASONS
        ]
        for kind, message, result in failures:
            if (result, kind) not in self._shown_failures:
                self._shown_failures.add((result, kind))
                first_line = (message.splitlines() or [""])[0]
                self.say(f"  first {result} ({kind}): {group.task.id}: {first_line}; see logs.log")

    def step_finished(self, step: int, *, num_steps: int, metrics: Mapping[str, float]) -> None:
        table = Table(box=None, padding=(0, 1))
        cells = [(name, text_of(metrics[key])) for name, key, text_of in SHOWN if key in metrics]
        for name, _ in cells:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_row(*(value for _, value in cells))
        self.say(f"step {step}/{num_steps}")
        self._show(table)

    def evaluation_finished(self, evaluation: Evaluation, first: TaskRewards | None) -> None:
        """Print a table with a row per held-out task, and the success rate."""
        table = Table(box=None, padding=(0, 1))
        table.add_column("held-out task", no_wrap=True)
        if first is not None:
            table.add_column(f"step {first.step}", justify="right")
        table.add_column(f"step {evaluation.step}", justify="right")
        before = {} if first is None else first.rewards
        for group in evaluation.groups:
            cells = [] if first is None else [_cell(before.get(group.task.id, []))]
            table.add_row(Text(group.task.id), *cells, _cell(group.rewards))
        self._show(table)
        noop = evaluation.whole.noop_success
        noop_part = "" if noop is None else f"; an agent that does nothing: {noop.value:.1%}"
        is_partial = any(group.task.grading for group in evaluation.groups)
        rewards = [reward for group in evaluation.groups for reward in group.rewards]
        reward_part = "" if _is_all_or_nothing(rewards) else f"; mean reward {shown_reward(fmean(rewards))}"
        self.say(
            f"{success_name(is_partial)}: {evaluation.success_rate:.1%} "
            f"({evaluation.num_solved}/{evaluation.num_graded}){reward_part}{noop_part}"
        )

    def _show(self, content: RenderableType, *, soft_wrap: bool = False) -> None:
        """Print `content`.

        Texts that this module does not write itself, such as task ids, must be `Text` objects, because a
        `Console` with default settings parses strings as markup. If the output cannot be written, nothing
        more is printed. The run directory contains the same information.
        """
        try:
            self._console.print(content, highlight=False, soft_wrap=soft_wrap)
        except OSError as error:
            logger.warning("the output cannot be written: %s; nothing more is printed", error.strerror)
            self._console.quiet = True


class Terminal(Console):
    """Standard output. If the reader of a pipe ends first, such as `tee` at Ctrl-C, the program continues."""

    def on_broken_pipe(self) -> None:
        """Print nothing more.

        Rich would raise SystemExit, which would end the event loop before a checkpoint is saved.
        """
        logger.warning("the reader of the output has closed the pipe; nothing more is printed")
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def terminal() -> Console:
    """Return standard output. If it is not a terminal, the width is PIPE_WIDTH, in which the tables fit.

    Markup and emoji codes are not replaced, because a task id may contain `[b]` and a model id `:train:`.
    """
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Terminal(highlight=False, markup=False, emoji=False, width=width)


def message_text(role: str, content: str) -> Text:
    """Return a message of a conversation with its role, without control characters.

    The middle of a message with more than MAX_CHARACTERS characters is left out. The end is shown, because
    the first message of a Harbor trial ends with the instruction. A message that shows the screen of a
    terminal ends with many blank lines, so three or more blank lines in a row are replaced by their number.
    """
    content = re.sub(r"\n(?:[^\S\n]*\n){3,}", _counted_blank_lines, printable(content))
    if (num_hidden := len(content) - MAX_CHARACTERS) > 0:
        half = MAX_CHARACTERS // 2
        content = f"{content[:half]}\n[{num_hidden} characters are not shown]\n{content[-half:]}"
    return Text.assemble((f"{role}: ", f"bold {ROLE_STYLES.get(role, 'white')}"), content)


def _counted_blank_lines(match: re.Match[str]) -> str:
    return f"\n[{match[0].count(chr(10)) - 1} blank lines]\n"


def _is_all_or_nothing(rewards: Sequence[float]) -> bool:
    return all(reward in (0, 1) for reward in rewards)


def _cell(rewards: Sequence[float]) -> str:
    solved = _solved(rewards)
    return solved if _is_all_or_nothing(rewards) else f"{solved} ({shown_reward(fmean(rewards))})"


def _solved(rewards: Sequence[float]) -> str:
    return f"{sum(reward >= SOLVED for reward in rewards)}/{len(rewards)}"

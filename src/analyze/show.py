"""`agent-trainer show RUN [STEP | TASK | TRIAL] [STEP]`: print the rollouts of a run, which may be running.

show RUN            a row per step and evaluation
show RUN 12         the trials of step 12 and of the evaluation after it
show RUN eval_000012   only the trials of the evaluation after step 12
show RUN my-task    the trials of a task in all steps and evaluations
show RUN my-task__4f43e7b3   one trial: conversation, tokens, logprobs, advantage and how it ended
show RUN my-task__4f43e7b3 eval_000012   the trial of this name in evaluation 12

`show RUN TRIAL` without a STEP prints the latest trial of this name, and a line that lists the steps and
evaluations with other trials of this name. Several trials can have one name, because a task that is
not a Harbor task has the same trial names in every evaluation.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NotRequired, TypedDict

from pydantic import TypeAdapter
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from src.cli.console import message_text, terminal
from src.cli.program import run_program
from src.core.errors import ConfigError
from src.core.printable import printable
from src.core.trajectory import Trajectory, TrialFailure, Turn
from src.learning.rollout_groups import SOLVED
from src.records.journal import RolloutKey
from src.records.reading import Count, Finite, Whole, read_lines
from src.records.rollout_store import find_rollouts
from src.records.run_directory import SUPERVISED, read_config

FILE = re.compile(r"(?P<purpose>[\w-]+)_(?P<step>\d+)\.jsonl")  # the names of the files in rollouts/
USAGE = "show RUN [STEP | TASK | TRIAL] [STEP]"


class RolloutLine(TypedDict):
    """The fields of a line of rollouts/ that are shown. A line with `failure` describes an ungraded trial."""

    task: str
    trial: str
    reward: NotRequired[Whole | Finite]
    advantage: NotRequired[Whole | Finite | None]
    turns: NotRequired[Count]
    tokens: NotRequired[Count]
    stop_reason: NotRequired[str]
    zero_reason: NotRequired[str]
    zero_detail: NotRequired[str]
    failure: NotRequired[str]
    message: NotRequired[str]


LINE: TypeAdapter[RolloutLine] = TypeAdapter(RolloutLine)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedTrial:
    """A trial of a step or an evaluation whose trials have all ended."""

    name: str  # the name of its file without suffix, e.g. step_000012
    step: int
    line: RolloutLine

    @property
    def outcome(self) -> str:
        """How the trial ended: its failure, the reason of its reward 0, or its stop reason."""
        line = self.line
        if "failure" in line:
            return f"not graded, {line['failure']}: {_first_line(line.get('message', ''))}"
        if "zero_reason" in line:
            return f"{line['zero_reason']}: {_first_line(line.get('zero_detail', ''))}"
        return line.get("stop_reason", "")


def main(argv: Sequence[str]) -> int:
    return run_program(argv, _run, lambda words: str(__doc__))


def _run(argv: Sequence[str]) -> int:
    if not 1 <= len(argv) <= 3:
        raise ConfigError(f"show takes 1 to 3 arguments, not {len(argv)}; write {USAGE}")
    console = terminal()
    for content in shown(*argv):
        console.print(content)
    return 0


def shown(run: str, selected: str | None = None, step: str | None = None) -> Iterator[RenderableType]:
    """Yield the contents to print.

    `selected` is a step, a task or a trial; None selects the overview. `step` limits the trials. A file name
    such as eval_000012 limits them to one step or evaluation. A number limits them to a step and the
    evaluation after it. None does not limit them.

    Raises ConfigError if there is no such run, step, task or trial.
    """
    directory = Path(run).expanduser().resolve()
    options, trials = read_config(directory), recorded_trials(directory)
    if not trials and SUPERVISED in options:
        raise ConfigError(
            f"{directory.name} is a run of supervised fine-tuning and has no trials; read its metrics.jsonl"
        )
    if selected is None:
        yield overview(trials)
        return
    files = {trial.name for trial in trials if trial.line["trial"] == selected}
    trials = [trial for trial in trials if step is None or _is_in(step, trial.name, trial.step)]
    of_step = [trial for trial in trials if _is_in(selected, trial.name, trial.step)]
    of_task = [trial for trial in trials if trial.line["task"] == selected]
    if of_step or of_task:
        yield trial_table(of_step or of_task)
        return
    rollouts = [(_file_name(key, files), key, result) for key, result in find_rollouts(directory, selected)]
    stored = [
        (name, key, result)
        for name, key, result in rollouts
        if step is None or _is_in(step, name, int(name.rpartition("_")[2]))
    ]
    if not stored:
        where = "" if step is None else f" in {step}"
        raise ConfigError(
            f"{directory.name} has no step, task or trial {selected!r}{where}; {_command(run)} lists its "
            "finished steps"
        )
    name, key, result = stored[-1]
    trained = "" if name == _file_name(key) else f", trained in {name}"
    yield Text(f"{selected}: task {key.task}, {key.purpose} {key.step}, member {key.member}{trained}", "bold")
    if others := [other for other, _, _ in stored[:-1]]:
        yield Text(
            f"trials of this name are also in {', '.join(others)}; to print one of them: "
            f"{_command(run, selected, others[-1])}"
        )
    named = [trial for trial in trials if (trial.line["trial"], trial.name) == (selected, name)]
    yield from rollout(result, named[0] if named else None)


def recorded_trials(directory: Path) -> list[RecordedTrial]:
    """Return the trials of the steps and evaluations whose trials have all ended."""
    trials: list[RecordedTrial] = []
    for path in (directory / "rollouts").glob("*.jsonl"):
        if match := FILE.fullmatch(path.name):
            trials += [
                RecordedTrial(name=path.stem, step=int(match["step"]), line=line)
                for line in read_lines(path, LINE)
            ]
    return sorted(trials, key=lambda trial: (trial.step, trial.name, trial.line["task"]))


def overview(trials: Sequence[RecordedTrial]) -> Table:
    """Return a table with a row per step and evaluation. The column `learned from` counts the trials whose
    advantage is not 0.
    """
    by_name: dict[str, list[RolloutLine]] = {}
    for trial in trials:
        by_name.setdefault(trial.name, []).append(trial.line)
    table = _table("", "tasks", "trials", "reward", "solved", "not graded", "learned from", "tokens")
    for name, lines in by_name.items():
        rewards = [line["reward"] for line in lines if "reward" in line]
        table.add_row(
            name,
            str(len({line["task"] for line in lines})),
            str(len(lines)),
            f"{fmean(rewards):.3f}" if rewards else "",
            f"{sum(reward >= SOLVED for reward in rewards)}/{len(rewards)}",
            str(sum("failure" in line for line in lines) or ""),
            str(sum(bool(line.get("advantage")) for line in lines) or ""),
            str(sum(line.get("tokens", 0) for line in lines)),
        )
    return table


def trial_table(trials: Sequence[RecordedTrial]) -> Table:
    table = _table("", "trial", "reward", "advantage", "turns", "tokens", "outcome")
    for trial in trials:
        line = trial.line
        table.add_row(
            trial.name,
            Text(line["trial"] or line["task"]),
            _number(line.get("reward")),
            _number(line.get("advantage")),
            str(line.get("turns", "")),
            str(line.get("tokens", "")),
            Text(printable(trial.outcome)),
        )
    return table


def rollout(result: Trajectory | TrialFailure, recorded: RecordedTrial | None) -> Iterator[RenderableType]:
    """Yield the contents to print for a trial: how it ended, its conversation, and the tokens and logprobs of
    its turns.

    `recorded` is the line of the trial in rollouts/; None until all trials of the step or evaluation have
    ended.
    """
    if isinstance(result, TrialFailure):
        yield Text(printable(f"not graded, {result.kind}: {result.message}"), "red")
        return
    advantage = None if recorded is None else recorded.line.get("advantage")
    ending = f"reward {result.reward:g}, ended by {result.stop_reason}"
    yield Text(f"{ending}, {'no advantage' if advantage is None else f'advantage {advantage:g}'}")
    if result.bonus:
        yield Text(f"bonus of the judge, in training only: {result.bonus:g}")
    if result.zero_reason is not None:
        yield Text(printable(f"{result.zero_reason}: {result.zero_detail}"), "red")
    if result.metrics:
        yield Text(", ".join(f"{name} {value:g}" for name, value in result.metrics.items()), "dim")
    for message in result.conversation:
        yield message_text(str(message.get("role")), str(message.get("content")))
    for number, turn in enumerate(result.turns, 1):
        yield from turn_lines(number, turn)


def turn_lines(number: int, turn: Turn) -> Iterator[Text]:
    """Yield a line with the token counts of a turn, and a line with each sampled token id and its logprob."""
    logprobs = turn.logprobs
    numbers = f", logprob mean {fmean(logprobs):.3f}, lowest {min(logprobs):.3f}" if logprobs else ""
    yield Text(
        f"turn {number}: {len(turn.prompt_ids)} prompt tokens, {len(turn.completion_ids)} sampled tokens "
        f"({turn.stop_reason}), policy version {turn.policy_version}{numbers}",
        "bold",
    )
    pairs = zip(turn.completion_ids, logprobs, strict=True)
    yield Text("  " + " ".join(f"{token}:{logprob:.3f}" for token, logprob in pairs), "dim")


def _command(*arguments: str) -> str:
    """Return the command `agent-trainer show` with these arguments, quoted for the shell."""
    return shlex.join(["agent-trainer", "show", *arguments])


def _is_in(step: str, name: str, number: int) -> bool:
    """Return whether the argument `step` selects the file `name`, which belongs to step `number`. The
    argument is the number of a step or the name of a file without suffix."""
    return step == name or (step.isdecimal() and int(step) == number)


def _file_name(key: RolloutKey, files: Collection[str] = ()) -> str:
    """Return the name of the rollout's file in rollouts/, without suffix. `files` are the names of the files
    that contain a trial with the name of the rollout.

    If dynamic sampling rolls out further batches for a step (refills), their rollouts are also in the file of
    the step. With `max_staleness`, a rollout may be in the file of a later step, which was trained on it.
    """
    name = f"{'eval' if key.purpose == 'eval' else 'step'}_{key.step:06d}"
    later = sorted(file for file in files if file.startswith("step_") and file > name)
    return later[0] if later and name not in files and key.purpose != "eval" else name


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 1))
    for heading in headings:
        # The first column, without a heading, has names to copy.
        table.add_column(heading, overflow="fold", justify="left", no_wrap=not heading)
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

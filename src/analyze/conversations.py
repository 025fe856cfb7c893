"""The trials of held-out tasks as text: the result and all messages of each trial."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from src.analyze.run_files import AnalyzedRun, DumpedTrial
from src.core.errors import ConfigError
from src.evaluate.failure_patterns import patterns


def conversations(run: AnalyzedRun, task: str) -> list[str]:
    """Return the lines of all trials of `task`, an id or a glob, in the last evaluation.

    Raises ConfigError if the evaluation has no such task.
    """
    if run.last_step is None:
        raise ConfigError(
            f"{run.name} has no dumped evaluation, so there are no conversations of task={task}; remove "
            "task=, or give a run with dump_eval_results=true"
        )
    trials = run.evaluations[run.last_step]
    chosen = [trial for trial in trials if fnmatchcase(trial.task, task)]
    if not chosen:
        task_ids = ", ".join(sorted({trial.task for trial in trials})) or "none"
        raise ConfigError(f"task={task} is not in step {run.last_step} of {run.name}; its tasks: {task_ids}")
    return [line for trial in chosen for line in (*trial_lines(trial, run), "")]


def trial_lines(trial: DumpedTrial, run: AnalyzedRun) -> list[str]:
    """Return the lines of a trial: a heading with the result of the trial, and its messages."""
    trajectory = trial.trajectory
    labels = ", ".join(str(pattern).replace("_", " ") for pattern in sorted(patterns(trajectory)))
    result = f"reward {trial.reward:g}, {trial.num_turns} turns, {trajectory.stop_reason}"
    lines = [f"### {trial.task}, step {run.last_step}: {result}{f' ({labels})' if labels else ''}"]
    if trajectory.trial_name:
        lines.append(f"trial {trajectory.trial_name}")
    if not trajectory.conversation:
        lines.append("the dump has no conversation")
    for message in trajectory.conversation:
        lines += ["", *message_lines(message)]
    return lines


def message_lines(message: Mapping[str, Any]) -> list[str]:
    """Return the lines of a message. A tool call has the form `-> name({"argument": ...})`."""
    name = f" {message['name']}" if message.get("name") else ""
    lines = [f"[{message['role']}{name}]", *str(message.get("content") or "").splitlines()]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return lines + [
        f"-> {call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls
    ]

"""The files that the analysis reads: the dumped evaluations, the metrics and the configuration of a run.

The dumps may also come from SkyRL, whose dumps have fewer fields. A directory has one of these layouts:

    RUN/dumped_evals/global_step_<N>_evals/<environment>.jsonl   RUN is a run directory or an `export_path`
    DIRECTORY/global_step_<N>/<environment>.jsonl                DIRECTORY is a local copy of the dumps that
                                                                 SkyRL or this trainer (with `upload_url`)
                                                                 has written to an object store
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from pydantic import TypeAdapter

from src.core.errors import ConfigError
from src.core.trajectory import StopReason, Trajectory, ZeroReason
from src.records.dumps import AGGREGATED
from src.records.reading import Count, Finite, Whole, read_lines
from src.records.run_directory import CONFIG_FILE, METRICS_FILE, read_config

ANSWER_MARK = "<|im_start|>assistant"
STEP_DIRECTORY = re.compile(r"global_step_(\d+)(?:_evals)?")


class DumpLine(TypedDict):
    """The fields of a dumped trial that are read. Only the score is in every dump."""

    score: Whole | Finite | list[Whole | Finite]
    stop_reason: NotRequired[str | None]
    env_extras: NotRequired[dict[str, Any] | None]
    conversation: NotRequired[list[dict[str, Any]] | None]
    conversation_history: NotRequired[list[dict[str, Any]] | None]
    turns: NotRequired[Count | None]
    input_prompt: NotRequired[str]
    output_response: NotRequired[str]


LINE: TypeAdapter[Any] = TypeAdapter(DumpLine)


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpedTrial:
    """One trial of an evaluation."""

    environment: str  # the data source of the task: its domain or task type
    task: str
    num_turns: int
    num_tool_calls: float
    trajectory: Trajectory  # without turns and `tool_fields`; its `conversation` contains the tool calls

    @property
    def reward(self) -> float:
        return self.trajectory.reward


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalyzedRun:
    """A run, as read from its files."""

    name: str
    options: Mapping[str, Any]  # config.json; empty if there is none
    metrics_file: Path | None  # None: the directory has dumps only
    evaluations: Mapping[int, Sequence[DumpedTrial]]  # step -> trials; at most two evaluations are read

    @property
    def last_step(self) -> int | None:
        return max(self.evaluations, default=None)


def read_run(directory: str, *, first_step: int | None = None, last_step: int | None = None) -> AnalyzedRun:
    """Read a run and two of its evaluations, by default the first and the last.

    Raises ConfigError if the directory has neither dumped evaluations nor metrics, or if `first_step` or
    `last_step` is a step without a dumped evaluation.
    """
    path = Path(directory).expanduser().resolve()
    options = read_config(path) if (path / CONFIG_FILE).is_file() else {}
    exported = Path(options["export_path"]).expanduser() if options.get("export_path") else path
    metrics_file = path / METRICS_FILE if (path / METRICS_FILE).is_file() else None
    directories = {
        int(match[1]): child
        for parent in (exported / "dumped_evals", exported)
        for child in (parent.iterdir() if parent.is_dir() else ())
        if (match := STEP_DIRECTORY.fullmatch(child.name))
    }
    if not directories and metrics_file is None:
        raise ConfigError(
            f"{path} has neither dumped_evals/ nor {METRICS_FILE}; give the directory of a run with held-out "
            "tasks and dump_eval_results=true"
        )
    for option, step in (("first_step", first_step), ("last_step", last_step)):
        if step is not None and step not in directories:
            steps_with_dump = ", ".join(map(str, sorted(directories))) or "none"
            raise ConfigError(
                f"{option}={step} has no dumped evaluation in {path.name}; steps with a dumped evaluation: "
                f"{steps_with_dump}"
            )
    steps = set[int]()
    if directories:
        steps.add(min(directories) if first_step is None else first_step)
        steps.add(max(directories) if last_step is None else last_step)
    evaluations = {step: read_evaluation(directories[step]) for step in sorted(steps)}
    return AnalyzedRun(name=path.name, options=options, evaluations=evaluations, metrics_file=metrics_file)


def read_evaluation(directory: Path) -> list[DumpedTrial]:
    trials: list[DumpedTrial] = []
    for path in sorted(directory.glob("*.jsonl")):
        if path.name != AGGREGATED:
            trials += read_lines(path, LINE, lambda line, name=path.stem: dumped_trial(line, name))
    return trials


def dumped_trial(line: DumpLine, environment: str) -> DumpedTrial:
    extras = line.get("env_extras") or {}
    messages = line.get("conversation") or line.get("conversation_history") or []
    response, turns, score = line.get("output_response", ""), line.get("turns"), line["score"]
    # In dumps without task keys, the prompt identifies the task.
    task = str(extras.get("task_key") or line.get("input_prompt", ""))
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    metrics = {name: float(value) for name, value in extras.items() if isinstance(value, int | float)}
    metrics.setdefault("tool_calls", float(len(calls) or response.count('"name":')))
    trajectory = Trajectory(
        task_id=task,
        turns=[],
        reward=float(sum(score) if isinstance(score, list) else score),
        stop_reason=_member(StopReason, line.get("stop_reason")) or StopReason.STOP,
        trial_name=str(extras.get("trial", "")),
        metrics=metrics,
        conversation=list(messages),
        zero_reason=_member(ZeroReason, extras.get("zero_reason")),
    )
    if turns is None:
        answers = sum(message.get("role") == "assistant" for message in messages)
        turns = answers or response.count(ANSWER_MARK) + 1  # the mark of the first answer is in the prompt
    return DumpedTrial(
        environment=environment,
        task=task,
        num_turns=turns,
        num_tool_calls=metrics["tool_calls"],
        trajectory=trajectory,
    )


def _member[Kind: (StopReason, ZeroReason)](kind: type[Kind], value: object) -> Kind | None:
    return kind(value) if value in list(kind) else None

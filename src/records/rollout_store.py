"""Finished rollouts with their exact tokens and logprobs, one line each in finished/<purpose>_<step>.jsonl.

A prompt that continues an earlier turn is stored as the tokens that follow that turn. Each token of a chain
(turns in which each prompt continues the previous turn) is therefore stored once. A prompt with a rewritten
history is stored as the tokens after the prefix that it shares with the previous prompt. The first three
lines below show which tokens are stored. In the file, the token ids and logprobs of each turn are packed, as
in the last line:

    prompt [1, 2], completion [3]      ->  {"prompt_ids": [1, 2]}
    next prompt [1, 2, 3, 4]           ->  {"after": 0, "prompt_ids": [4]}
    next prompt rewritten to [1, 2, 8] ->  {"shared": 2, "prompt_ids": [8]}
    [1, 2]  ->  "<i4:" and the base64 of the compressed array
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from pydantic import TypeAdapter

from src.core.token_ids import TokenIds
from src.core.trajectory import FailureKind, StopReason, Trajectory, TrialFailure, Turn, ZeroReason
from src.learning.datums import extends
from src.records.atomic_io import append_record, remove, replace_text, truncate_torn_line
from src.records.journal import Journal, RolloutKey
from src.records.reading import Count, Finite, Whole, read_lines

LINE_FIELDS = ("member", "seed")  # fields of a trajectory that are stored as fields of its line
PACKED = ("prompt_ids", "completion_ids", "logprobs")  # fields of a turn that are stored packed
MAX_BYTES = 2**30  # the maximum size of an unpacked array
PACKINGS = ("<i4", "<i8", "<f4", "<f8")


class TurnFields(TypedDict):
    prompt_ids: str
    completion_ids: str
    logprobs: str
    stop_reason: StopReason
    policy_version: Whole
    after: NotRequired[Count]  # index of the earlier turn that the prompt continues
    shared: NotRequired[Count]  # number of tokens that the prompt shares with the previous prompt


class TrajectoryFields(TypedDict):
    """A trajectory on disk. Metrics may be NaN or infinite."""

    task_id: str
    turns: list[TurnFields]
    reward: Whole | Finite
    stop_reason: StopReason
    trial_name: str
    metrics: dict[str, Whole | float]
    turn_rewards: list[Whole | Finite]
    conversation: list[dict[str, Any]]
    bonus: Whole | Finite
    zero_reason: NotRequired[ZeroReason | None]
    tool_fields: NotRequired[dict[str, dict[str, Any]]]
    zero_detail: NotRequired[str]


class FailureFields(TypedDict):
    task_id: str
    kind: FailureKind
    message: str
    trial_name: str


class FinishedLine(TypedDict):
    task: str
    member: Count
    seed: Whole
    attempts: Count
    result: TrajectoryFields | FailureFields


LINE: TypeAdapter[Any] = TypeAdapter(FinishedLine)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRollout:
    """The result of the last attempt of a rollout, its seed and the number of attempts."""

    result: Trajectory | TrialFailure
    seed: int
    attempts: int  # attempts that ended because the run was interrupted are not counted


class FinishedRollouts:
    """The finished rollouts of one run. A resumed run does not repeat the rollouts that `load` returns."""

    def __init__(self, log_path: Path, journal: Journal) -> None:
        self.journal = journal
        self._log_path = log_path
        self._directory = log_path / "finished"
        for path in self._directory.glob("*.jsonl"):
            truncate_torn_line(path)

    def load(self, purpose: str, step: int) -> dict[RolloutKey, FinishedRollout]:
        """Return the final rollouts of a step or evaluation.

        A failure is final only if its step or evaluation has used it.
        """
        rollouts = read_rollouts(self._path(purpose, step), purpose, step)
        return {
            key: rollout
            for key, rollout in rollouts.items()
            if isinstance(rollout.result, Trajectory) or self.journal.is_settled(key)
        }

    def add(self, key: RolloutKey, rollout: FinishedRollout) -> None:
        """Write a rollout, and then the event `finished` in the journal."""
        record = {"task": key.task, "member": key.member, "seed": rollout.seed, "attempts": rollout.attempts}
        append_record(self._path(key.purpose, key.step), record | {"result": encoded(rollout.result)})
        self.journal.finished(
            key, "graded" if isinstance(rollout.result, Trajectory) else rollout.result.kind
        )

    def job_directory(self, purpose: str, step: int) -> Path:
        """Return the directory of all trials of a step or evaluation. The directory may not exist.

        The files of trials that `load` does not return are removed from it.
        """
        directory = self._log_path / "jobs" / f"{purpose}_{step:06d}"
        if paths := [*directory.glob("*")]:
            finished = {rollout.result.trial_name for rollout in self.load(purpose, step).values()}
            for path in paths:
                if path.name not in finished:
                    remove(path)
        return directory

    def _path(self, purpose: str, step: int) -> Path:
        return self._directory / f"{purpose}_{step:06d}.jsonl"


def read_rollouts(path: Path, purpose: str, step: int) -> dict[RolloutKey, FinishedRollout]:
    """Return the last result of each rollout in a file of `finished/`."""

    def rollout_of(record: dict[str, Any]) -> tuple[RolloutKey, FinishedRollout]:
        key = RolloutKey(purpose=purpose, step=step, task=record["task"], member=record["member"])
        seed, result = record["seed"], decoded(record["result"])
        if isinstance(result, Trajectory):
            result = replace(result, member=key.member, seed=seed)
        return key, FinishedRollout(result=result, seed=seed, attempts=record["attempts"])

    return dict(read_lines(path, LINE, rollout_of))


def find_rollouts(log_path: Path, trial_name: str) -> list[tuple[RolloutKey, Trajectory | TrialFailure]]:
    """Return the rollouts whose trial is named `trial_name`, in the order in which they were run.

    Several rollouts can have this name, because the trials of a task, except for Harbor tasks, have the same
    names in all evaluations of a run. The evaluation of a step is run after the step's training rollouts.
    """
    results: list[tuple[RolloutKey, Trajectory | TrialFailure]] = []
    written_name = json.dumps(trial_name).encode()
    for path, purpose, step in _stored_files(log_path):
        if written_name in path.read_bytes():
            rollouts = read_rollouts(path, purpose, step)
            results += [
                (key, rollout.result)
                for key, rollout in rollouts.items()
                if rollout.result.trial_name == trial_name
            ]
    return sorted(results, key=lambda item: (item[0].step, item[0].purpose == "eval"))


def discard_rollouts(
    log_path: Path, is_discarded: Callable[[str, Mapping[str, Any]], bool], *, after: int, evals_from: int
) -> int:
    """Remove the rollouts of steps after step `after`, and of evaluations from step `evals_from`, for which
    `is_discarded(purpose, record)` is true. Return their number.
    """
    num_discarded = 0
    for path, purpose, step in _stored_files(log_path):
        if step < (evals_from if purpose == "eval" else after + 1):
            continue
        records = list(read_lines(path, LINE))
        kept = [
            line
            for line, record in zip(path.read_text().splitlines(keepends=True), records, strict=False)
            if not is_discarded(purpose, record)
        ]
        if len(kept) < len(records):
            replace_text(path, "".join(kept))
            num_discarded += len(records) - len(kept)
    return num_discarded


def any_graded(log_path: Path) -> bool:
    return any(
        "turns" in record["result"]
        for path in (log_path / "finished").glob("*.jsonl")
        for record in read_lines(path, LINE)
    )


def graded_rewards(log_path: Path, purpose: str, step: int) -> dict[str, list[float]]:
    """Return, for each task, the rewards of its graded rollouts in a step or evaluation."""
    path = log_path / "finished" / f"{purpose}_{step:06d}.jsonl"
    results = {(record["task"], record["member"]): record["result"] for record in read_lines(path, LINE)}
    rewards: dict[str, list[float]] = {}
    for (task, _), result in results.items():
        if "reward" in result:
            rewards.setdefault(task, []).append(result["reward"])
    return rewards


def trained_trajectories(log_path: Path) -> list[Trajectory]:
    """Return the graded rollouts of the run's training steps, without those of its evaluations."""
    return [
        rollout.result
        for path, purpose, step in _stored_files(log_path)
        if purpose != "eval"
        for rollout in read_rollouts(path, purpose, step).values()
        if isinstance(rollout.result, Trajectory)
    ]


def _stored_files(log_path: Path) -> Iterator[tuple[Path, str, int]]:
    """Yield the files of `finished/` in the order of their names, with purpose and step."""
    for path in sorted((log_path / "finished").glob("*_*.jsonl")):
        purpose, _, step = path.stem.rpartition("_")
        if step.isdecimal():
            yield path, purpose, int(step)


def encoded(result: Trajectory | TrialFailure) -> dict[str, object]:
    """Return the record of a result, without the member and the seed, which are fields of the line."""
    names = [field.name for field in fields(result) if field.name not in LINE_FIELDS]
    values: dict[str, Any] = {name: getattr(result, name) for name in names}
    if isinstance(result, Trajectory):
        values["turns"] = _encoded_turns(result.turns)
        values["metrics"] = dict(result.metrics)
        values["tool_fields"] = dict(result.tool_fields)
    return values


def decoded(values: Mapping[str, Any]) -> Trajectory | TrialFailure:
    """Invert `encoded`. Raises one of `reading.DAMAGED` for values that `encoded` does not write."""
    if "kind" in values:
        return TrialFailure(**{**values, "kind": FailureKind(values["kind"])})
    converted: dict[str, Any] = {
        "stop_reason": StopReason(values["stop_reason"]),
        "tool_fields": {int(index): message for index, message in values.get("tool_fields", {}).items()},
        "turns": _decoded_turns(values["turns"]),
    }
    if reason := values.get("zero_reason"):
        converted["zero_reason"] = ZeroReason(reason)
    return Trajectory(**(dict(values) | converted))


def packed(numbers: Sequence[float]) -> str:
    """Compress numbers without loss, in 32 bits per number if that is exact.

    >>> unpacked(packed([1, 2])), unpacked(packed([-0.5])), unpacked(packed([0.1]))
    ([1, 2], [-0.5], [0.1])
    """
    exact = np.array(numbers, dtype="<i8" if all(isinstance(number, int) for number in numbers) else "<f8")
    small = exact.astype("<i4" if exact.dtype.kind == "i" else "<f4")
    chosen = (
        small
        if np.array_equal(small.astype(exact.dtype), exact, equal_nan=exact.dtype.kind == "f")
        else exact
    )
    return f"{chosen.dtype.str}:{base64.b64encode(zlib.compress(chosen.tobytes())).decode()}"


def unpacked(text: str) -> list[Any]:
    """Invert `packed`. Raises one of `reading.DAMAGED` for text that `packed` does not write."""
    kind, _, content = text.partition(":")
    inflater = zlib.decompressobj()
    raw = inflater.decompress(base64.b64decode(content), MAX_BYTES)
    if kind not in PACKINGS or not inflater.eof:
        raise ValueError("not a packed array")
    return np.frombuffer(raw, dtype=kind).tolist()


def _encoded_turns(turns: Sequence[Turn]) -> list[dict[str, object]]:
    encoded_turns = []
    for number, turn in enumerate(turns):
        values: dict[str, Any] = {field.name: getattr(turn, field.name) for field in fields(turn)}
        after = next((i for i in reversed(range(number)) if extends(turn, turns[i])), None)
        if after is not None:
            values |= {
                "after": after,
                "prompt_ids": turn.prompt_ids[
                    len(turns[after].prompt_ids) + len(turns[after].completion_ids) :
                ],
            }
        elif number:
            shared = num_shared(turn.prompt_ids, turns[number - 1].prompt_ids)
            values |= {"shared": shared, "prompt_ids": turn.prompt_ids[shared:]}
        encoded_turns.append(values | {name: packed(values[name]) for name in PACKED})
    return encoded_turns


def num_shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix.

    >>> num_shared([1, 2, 3], [1, 2, 4, 5])
    2
    """
    length = min(len(ids), len(others))
    differ = np.array(ids[:length]) != np.array(others[:length])
    return int(differ.argmax()) if differ.any() else length


def _decoded_turns(values: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Invert `_encoded_turns`. Raises one of `reading.DAMAGED` for values that it does not write."""
    turns: list[Turn] = []
    for value in values:
        changed: dict[str, Any] = {
            name: unpacked(item) if name in PACKED else item
            for name, item in value.items()
            if name not in ("after", "shared")
        }
        if "after" in value:
            if value["after"] >= len(turns):
                raise ValueError("the field `after` of a turn does not name an earlier turn")
            earlier = turns[value["after"]]
            changed["prompt_ids"] = TokenIds.wrap(earlier.prompt_ids).extended(
                [*earlier.completion_ids, *changed["prompt_ids"]]
            )
        else:
            shared = turns[-1].prompt_ids[: value["shared"]] if "shared" in value else []
            changed["prompt_ids"] = TokenIds([*shared, *changed["prompt_ids"]])
        if len(changed["logprobs"]) != len(changed["completion_ids"]) or not all(
            isinstance(token, int) for token in changed["completion_ids"]
        ):
            raise ValueError("a turn does not have integer tokens with one logprob per token")
        changed["stop_reason"] = StopReason(value["stop_reason"])
        turns.append(Turn(**changed))
    return turns

"""Finished rollouts on disk, with the exact tokens and log-probabilities: finished/<purpose>_<step>.jsonl, one line per rollout.

A prompt is written as what it adds to the turn it continues, so that a rollout of n tokens takes n numbers, or, where a history was
rewritten, to what it shares with the prompt before it. Numbers are packed:

    prompt [1, 2], completion [3]; prompt [1, 2, 3, 4], completion [5]  ->  {"prompt_ids": [1, 2]}, {"after": 0, "prompt_ids": [4]}
    prompt [1, 2, 3, 4], then a history rewritten to [1, 2, 8]         ->  ..., {"shared": 2, "prompt_ids": [8]}
    [1, 2]  ->  "<i4:" and the base64 of the compressed array
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from pydantic import TypeAdapter

from src.core.token_ids import TokenIds
from src.core.trajectory import FailureKind, StopReason, Trajectory, TrialFailure, Turn, ZeroReason
from src.learning.datums import extends
from src.records.atomic_io import append_record, mend, remove
from src.records.journal import Journal, RolloutKey
from src.records.reading import Count, Finite, Whole, read_lines, same

PACKED = ("prompt_ids", "completion_ids", "logprobs")  # of a turn
LARGEST = 2**30  # bytes of a packed array; more is no rollout
PACKINGS = ("<i4", "<i8", "<f4", "<f8")


class TurnFields(TypedDict):
    """A turn on disk."""

    prompt_ids: str
    completion_ids: str
    logprobs: str
    stop_reason: StopReason
    policy_version: Whole
    after: NotRequired[Count]
    shared: NotRequired[Count]


class TrajectoryFields(TypedDict):
    """A trajectory on disk. Metrics may hold what is no number."""

    task_id: str
    turns: list[TurnFields]
    reward: Whole | Finite
    stop_reason: StopReason
    trial_name: str
    metrics: dict[str, Whole | float]
    turn_rewards: list[Whole | Finite]
    conversation: list[dict[str, Any]]
    bonus: Whole | Finite


class FailureFields(TypedDict):
    """A failure on disk."""

    task_id: str
    kind: FailureKind
    message: str
    trial_name: str


class FinishedLine(TypedDict):
    """One rollout."""

    task: str
    member: Count
    seed: Whole
    attempts: Count
    result: TrajectoryFields | FailureFields


LINE: TypeAdapter[Any] = TypeAdapter(FinishedLine)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRollout:
    """The last result of a rollout, and what it took."""

    result: Trajectory | TrialFailure
    seed: int
    attempts: int


class FinishedRollouts:
    """The rollouts of one run that need not be played again."""

    def __init__(self, log_path: Path, journal: Journal) -> None:
        self.journal = journal
        self._log_path = log_path
        self._directory = log_path / "finished"
        for path in self._directory.glob("*.jsonl"):
            mend(path)

    def load(self, purpose: str, step: int) -> dict[RolloutKey, FinishedRollout]:
        """What is on disk of a step or evaluation. A failure stands only where it was already reckoned with."""
        found: dict[RolloutKey, FinishedRollout] = {}

        def rollout_of(record: dict[str, Any]) -> tuple[RolloutKey, FinishedRollout]:
            place = RolloutKey(purpose=purpose, step=step, task=record["task"], member=record["member"])
            return place, FinishedRollout(
                result=decoded(record["result"]), seed=record["seed"], attempts=record["attempts"]
            )

        found.update(read_lines(self._path(purpose, step), LINE, rollout_of))
        return {
            place: rollout
            for place, rollout in found.items()
            if isinstance(rollout.result, Trajectory) or self.journal.is_settled(place)
        }

    def add(self, place: RolloutKey, rollout: FinishedRollout) -> None:
        """On disk before the journal says so."""
        record = {
            "task": place.task,
            "member": place.member,
            "seed": rollout.seed,
            "attempts": rollout.attempts,
        }
        append_record(self._path(place.purpose, place.step), record | {"result": encoded(rollout.result)})
        self.journal.finished(
            place, "graded" if isinstance(rollout.result, Trajectory) else rollout.result.kind
        )

    def job_directory(self, purpose: str, step: int) -> Path:
        """For the trials of a step or evaluation, less what an earlier process left half done in it. Who writes there makes it."""
        directory = self._log_path / "jobs" / f"{purpose}_{step:06d}"
        if left := [*directory.glob("*")]:
            finished = {rollout.result.trial_name for rollout in self.load(purpose, step).values()}
            for path in left:
                if path.name not in finished:
                    remove(path)
        return directory

    def _path(self, purpose: str, step: int) -> Path:
        return self._directory / f"{purpose}_{step:06d}.jsonl"


def any_graded(log_path: Path) -> bool:
    """Whether anything would be lost with the folder."""
    return any(
        "turns" in record["result"]
        for path in (log_path / "finished").glob("*.jsonl")
        for record in read_lines(path, LINE, same)
    )


def encoded(result: Trajectory | TrialFailure) -> dict[str, object]:
    values: dict[str, Any] = {field.name: getattr(result, field.name) for field in fields(result)}
    if isinstance(result, Trajectory):
        values["turns"] = _encoded_turns(result.turns)
        values["metrics"] = dict(result.metrics)
    return values


def decoded(values: Mapping[str, Any]) -> Trajectory | TrialFailure:
    if "kind" in values:
        return TrialFailure(**{**values, "kind": FailureKind(values["kind"])})
    reasons: dict[str, StopReason | ZeroReason] = {"stop_reason": StopReason(values["stop_reason"])}
    if reason := values.get("zero_reason"):
        reasons["zero_reason"] = ZeroReason(reason)
    return Trajectory(**{**values, "turns": _decoded_turns(values["turns"]), **reasons})


def packed(numbers: Sequence[float]) -> str:
    """In as few bytes as lose nothing: log-probabilities in single precision where that is what they are.

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
    kind, _, content = text.partition(":")
    inflater = zlib.decompressobj()
    raw = inflater.decompress(base64.b64decode(content), LARGEST)
    if kind not in PACKINGS or not inflater.eof:
        raise ValueError("is no packed array")
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
    """With how many tokens both begin.

    >>> num_shared([1, 2, 3], [1, 2, 4, 5])
    2
    """
    length = min(len(ids), len(others))
    differ = np.array(ids[:length]) != np.array(others[:length])
    return int(differ.argmax()) if differ.any() else length


def _decoded_turns(values: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """ValueError, and others that `reading` attributes to the line, for what `_encoded_turns` has not written."""
    turns: list[Turn] = []
    for value in values:
        changed = {
            name: unpacked(item) if name in PACKED else item
            for name, item in value.items()
            if name not in ("after", "shared")
        }
        if "after" in value:
            if value["after"] >= len(turns):
                raise ValueError("a turn continues one that does not stand before it")
            earlier = turns[value["after"]]
            changed["prompt_ids"] = TokenIds.wrap(earlier.prompt_ids).extended(
                [*earlier.completion_ids, *changed["prompt_ids"]]
            )
        else:
            shared = turns[-1].prompt_ids[: value["shared"]] if "shared" in value else []
            changed["prompt_ids"] = TokenIds([*shared, *changed["prompt_ids"]])
        if len(changed["logprobs"]) != len(changed["completion_ids"]) or not all(
            isinstance(t, int) for t in changed["completion_ids"]
        ):
            raise ValueError("a turn has other than one log-probability for each token")
        turns.append(Turn(**{**changed, "stop_reason": StopReason(value["stop_reason"])}))
    return turns

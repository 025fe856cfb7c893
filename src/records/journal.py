"""journal.jsonl: what a run did, in order and for ever. Whatever a process forgets when it dies, its successor reads here.

    {"event": "started", "resumed_from": 0, ...}                  one per process
    {"event": "admitted", "purpose": "step", "step": 1, "task": "a", "member": 0, "attempt": 1, "policy_version": 0, "seed": 77}
    {"event": "finished", ... "outcome": "graded"}                its tokens are on disk before this line is
    {"event": "begun", "step": 1, "groups": [[1, "a"], [1, "b"]]} what the step is to learn from; each group by its GroupKey
    {"event": "trained", "step": 1, "groups": [[1, "a"]], ...}    the weights have seen these of them
    {"event": "checkpointed", "step": 1, "state_path": "tinker://..."}
    {"event": "ended", "state": "done"}

Weights that were trained and not checkpointed die with the server's session. `started` therefore voids every earlier `trained` of a step
after `resumed_from`: those steps are trained again, from the rollouts on disk. Within what is left each group is trained once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from src.core.errors import ConfigError
from src.records.atomic_io import append_record, mend
from src.records.reading import JournalLine, read_lines, same

JOURNAL = "journal.jsonl"
LINE: TypeAdapter[Any] = TypeAdapter(JournalLine)


class RunState(StrEnum):
    """How a process ended. One that says nothing was killed."""

    DONE = "done"
    INTERRUPTED = "interrupted"  # Ctrl-C, SIGTERM
    SERVER_LOST = "server_lost"
    STORAGE = "storage"  # the run's files could not be written
    TOO_MANY_FAILURES = "too_many_failures"  # of trials that could not be graded
    FAILED = "failed"


GroupKey = tuple[int, str]  # the step whose batch holds the task, and the task's id


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutKey:
    """Which rollout of a run: member `member` of the group of `task`."""

    purpose: str  # "step" | "eval"
    step: int
    task: str
    member: int


class Journal:
    """Appends to the journal of one run, and knows what it says."""

    def __init__(self, log_path: Path) -> None:
        """Reads what earlier processes left."""
        self._path = log_path / JOURNAL
        mend(self._path)
        self._attempts: Counter[RolloutKey] = Counter()  # at rollouts that are not graded
        self._settled: set[tuple[str, int | None]] = set()
        self.progress = 0  # what was done for the first time and never needs to be done again
        self._groups: dict[int, list[GroupKey]] = {}
        self._learned_in: dict[GroupKey, int] = {}
        for record in read_lines(self._path, LINE, same):
            self._recall(record)

    def started(self, *, resumed_from: int) -> None:
        self._write("started", resumed_from=resumed_from)

    def begun(self, step: int, groups: Sequence[GroupKey]) -> None:
        """ConfigError when the step had other groups before: the run on disk and this one are not the same."""
        before = self._groups.get(step)
        if before is not None and before != list(groups):
            was, now = (", ".join(task for _, task in keys) for keys in (before, groups))
            raise ConfigError(
                f"step {step} of this run was to train on {was}, and now on {now}: tasks_dir has changed; "
                "put its tasks back, or give another log_path"
            )
        if before is None:
            self._note(step, groups)
            self._write("begun", step=step, groups=list(groups))

    def is_taken(self, group: GroupKey) -> bool:
        """Whether a step learns from the group, or has."""
        return group in self._learned_in

    def groups_of(self, step: int) -> list[GroupKey] | None:
        """What the step learns from, once that is settled."""
        return self._groups.get(step)

    def admitted(self, place: RolloutKey, *, policy_version: int, seed: int) -> int:
        """The number of this attempt, counted over every process of the run."""
        self._attempts[place] += 1
        self._write(
            "admitted",
            **asdict(place),
            attempt=self._attempts[place],
            policy_version=policy_version,
            seed=seed,
            sync=False,
        )
        return self._attempts[place]

    def finished(self, place: RolloutKey, outcome: str) -> None:
        """`outcome` is "graded" or why it could not be."""
        self._write("finished", **asdict(place), attempt=self._attempts[place], outcome=outcome, sync=False)
        self._note_end(place, outcome)

    def trained(self, step: int, *, groups: Sequence[GroupKey], state: Mapping[str, object]) -> None:
        """`state` is what the steps to come need to know of those gone by."""
        self.progress += ("step", step) not in self._settled
        self._settled.add(("step", step))
        self._write(
            "trained", step=step, groups=list(dict.fromkeys(groups)), state=dict(state)
        )  # a group may stand in for another

    def evaluated(self, step: int) -> None:
        self._settled.add(("eval", step))
        self._write("evaluated", step=step)

    def checkpointed(self, step: int, state_path: str) -> None:
        self._write("checkpointed", step=step, state_path=state_path)

    def quarantined(self, step: int, task: str, cause: str) -> None:
        self._write("quarantined", step=step, task=task, cause=cause)

    def ended(self, state: RunState, cause: str = "") -> None:
        self._write("ended", state=state, cause=cause)

    def is_settled(self, place: RolloutKey) -> bool:
        """Whether the result of a rollout was used. Then it stands as it is, a failure too."""
        if place.purpose == "step":
            return ("step", self._learned_in.get((place.step, place.task))) in self._settled
        return ("eval" if place.purpose == "eval" else "step", place.step) in self._settled

    def is_evaluated(self, step: int) -> bool:
        return ("eval", step) in self._settled

    def states_until(self, step: int) -> list[Mapping[str, Any]]:
        """What was said after each step up to this one, in order. Read again: it may be much, and is needed when a run is taken up."""
        past = (
            record
            for record in (read_lines(self._path, LINE, same) if step else ())
            if record["event"] == "trained"
        )
        found = {record["step"]: record["state"] for record in past if record["step"] <= step}
        return [found[number] for number in sorted(found)]

    def _recall(self, record: Mapping[str, Any]) -> None:
        match record["event"]:
            case "admitted":
                self._attempts[_place(record)] += 1
            case "finished":
                self._note_end(_place(record), record["outcome"])
            case "begun":
                self._note(record["step"], [(step, task) for step, task in record["groups"]])
            case "trained" | "evaluated" as event:
                self._settled.add(("step" if event == "trained" else "eval", record["step"]))

    def _note_end(self, place: RolloutKey, outcome: str) -> None:
        """What is graded is not played again."""
        if outcome == "graded":
            self.progress += 1
            del self._attempts[place]

    def _note(self, step: int, groups: Sequence[GroupKey]) -> None:
        self._groups[step] = list(groups)
        self._learned_in |= dict.fromkeys(groups, step)

    def _write(self, event: str, *, sync: bool = True, **fields: object) -> None:
        append_record(self._path, {"event": event, "at": round(time.time(), 3), **fields}, sync=sync)


def _place(record: Mapping[str, Any]) -> RolloutKey:
    return RolloutKey(**{name: record[name] for name in RolloutKey.__dataclass_fields__})

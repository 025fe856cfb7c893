"""journal.jsonl: the events of a run, in order. The file is append-only, and a resumed run reads it.

A trial is one execution of a task, and the trials of a task in one step form a group. A rollout is one trial
of a group with its exact tokens. A trial may have several attempts, because it is repeated after an
infrastructure failure.

    {"event": "started", "resumed_from": 0, ...}
        A process of the run has started, or has connected to the server again after a loss of the server.
    {"event": "rollout_started", "purpose": "step", "step": 1, "task": "a", "member": 0, "attempt": 1, ...}
        An attempt has started.
    {"event": "finished", ... "outcome": "graded"}
        A rollout has ended. Its tokens are already in the rollout store (`rollout_store`).
    {"event": "batch_fixed", "step": 1, "groups": [[1, "a"], [1, "b"]]}
        The step has these groups (GroupKeys).
    {"event": "quarantined", "step": 1, "task": "b", "cause": "sandbox"}
        Later steps leave out the task, because its trials kept failing.
    {"event": "trained", "step": 1, "groups": [[1, "a"]], ...}
        The step has trained on these groups.
    {"event": "evaluated", "step": 1}
        The evaluation after the step has ended.
    {"event": "checkpointed", "step": 1, "state_path": "tinker://..."}
        A checkpoint was saved after the step.
    {"event": "discarded", "after": 1}
        See `Journal.discarded`.
    {"event": "ended", "state": "done"}
        A process of the run has ended.

Weights that were trained and not saved are lost with the server's session. `started` therefore invalidates
every earlier `trained` of a step after `resumed_from`. These steps are trained again, from the rollouts on
disk. Among the `trained` events that remain valid, each group occurs once.
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
from src.records.atomic_io import append_record, truncate_torn_line
from src.records.reading import JournalLine, read_lines

JOURNAL = "journal.jsonl"
LINE: TypeAdapter[Any] = TypeAdapter(JournalLine)


class RunState(StrEnum):
    """How a process ended.

    A process without the event `ended` still runs, was killed or could not write the event.
    """

    DONE = "done"
    INTERRUPTED = "interrupted"  # Ctrl-C, SIGTERM
    SERVER_LOST = "server_lost"
    STORAGE = "storage"  # the run's files could not be written
    TOO_MANY_FAILURES = "too_many_failures"  # too many trials could not be graded
    NOTHING_TRAINED = "nothing_trained"  # the last step was reached, and no step changed the weights
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How a process of a run ended."""

    state: RunState
    cause: str  # the message of the error; empty if there was none


GroupKey = tuple[int, str]  # the step for which the task is scheduled, and the id of the task


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutKey:
    """Identifies a rollout of a run. `member` is the index of its trial in the group of `task`."""

    purpose: str  # "step", "eval" or "refill-<n>": the nth further batch of dynamic sampling
    step: int
    task: str
    member: int


class Journal:
    """The journal of one run. It appends events and derives the state of the run from them."""

    def __init__(self, log_path: Path) -> None:
        """Read the events of earlier processes. Raises ConfigError for a damaged line."""
        self._path = log_path / JOURNAL
        truncate_torn_line(self._path)
        self._attempts: Counter[RolloutKey] = Counter()  # number of attempts of each ungraded rollout
        # ("step", n) or ("eval", n) for each step and each evaluation whose rollouts were used.
        self._settled: set[tuple[str, int | None]] = set()
        # Increases by 1 with each graded rollout and with each step that is trained for the first time.
        # Callers compare two values to find out whether the run has made progress.
        self.progress = 0
        self._groups: dict[int, list[GroupKey]] = {}
        self._learned_in: dict[GroupKey, int] = {}  # the step whose batch contains the group
        for record in read_lines(self._path, LINE):
            self._apply(record)

    def started(self, *, resumed_from: int) -> None:
        self._write("started", resumed_from=resumed_from)

    def discarded(self, *, after: int) -> None:
        """Record that the rollouts with a policy version above `after` were discarded. The policy version is
        the number of steps that had been trained when the weights of the rollout were saved.

        The run is resumed from the checkpoint of step `after` with a changed option or task, which gives the
        later steps other weights than those that sampled the discarded rollouts. The batch of step
        `after` + 1 stays valid, because it is sampled from weights up to step `after`. The batches of later
        steps are forgotten, because the choice of their tasks may depend on the discarded rollouts. The
        rollouts of steps and evaluations after step `after` count as not used (`is_settled`), until these
        steps are trained again or these evaluations are run again.
        """
        self._forget(after)
        self._write("discarded", after=after)

    def batch_fixed(self, step: int, groups: Sequence[GroupKey]) -> None:
        """Record the groups of a step.

        Raises ConfigError if the step had other groups in an earlier process.
        """
        before = self._groups.get(step)
        if before is not None and before != list(groups):
            old_tasks, new_tasks = (", ".join(task for _, task in keys) for keys in (before, groups))
            raise ConfigError(
                f"step {step} of this run has the tasks {old_tasks} in the journal, and {new_tasks} in the "
                "present schedule: the data, or the options that select from it, have changed; restore them, "
                "or give another log_path"
            )
        if before is None:
            self._fix(step, groups)
            self._write("batch_fixed", step=step, groups=list(groups))

    def is_taken(self, group: GroupKey) -> bool:
        """Return whether the group belongs to the batch of a step."""
        return group in self._learned_in

    def groups_of(self, step: int) -> list[GroupKey] | None:
        """Return the groups of a step; None before `batch_fixed`."""
        return self._groups.get(step)

    def rollout_started(self, key: RolloutKey, *, policy_version: int, seed: int) -> int:
        """Record an attempt and return its number, counted over all processes of the run."""
        self._attempts[key] += 1
        attempt = self._attempts[key]
        self._write(
            "rollout_started",
            **asdict(key),
            attempt=attempt,
            policy_version=policy_version,
            seed=seed,
            sync=False,
        )
        return attempt

    def finished(self, key: RolloutKey, outcome: str) -> None:
        """Record the end of a rollout. `outcome` is "graded" or the kind of the failure."""
        self._write("finished", **asdict(key), attempt=self._attempts[key], outcome=outcome, sync=False)
        self._note_end(key, outcome)

    def trained(self, step: int, *, groups: Sequence[GroupKey], state: Mapping[str, object]) -> None:
        """Record that a step was trained.

        `state` is `BatchCollector.state()`. Supervised fine-tuning passes {}.
        """
        self.progress += ("step", step) not in self._settled
        self._settled.add(("step", step))
        distinct = list(dict.fromkeys(groups))  # dynamic sampling may repeat a group
        self._write("trained", step=step, groups=distinct, state=dict(state))

    def evaluated(self, step: int) -> None:
        self._settled.add(("eval", step))
        self._write("evaluated", step=step)

    def checkpointed(self, step: int, state_path: str) -> None:
        self._write("checkpointed", step=step, state_path=state_path)

    def quarantined(self, step: int, task: str, cause: str) -> None:
        self._write("quarantined", step=step, task=task, cause=cause)

    def ended(self, state: RunState, cause: str = "") -> None:
        self._write("ended", state=state, cause=cause)

    def is_settled(self, key: RolloutKey) -> bool:
        """Return whether the result of a rollout was used.

        A used result is final, even if it is a failure.
        """
        if key.purpose == "step":
            return ("step", self._learned_in.get((key.step, key.task))) in self._settled
        return ("eval" if key.purpose == "eval" else "step", key.step) in self._settled

    def is_evaluated(self, step: int) -> bool:
        return ("eval", step) in self._settled

    def first_evaluation(self, *, until: int) -> int | None:
        """Return the step of the run's first evaluation; None if there is none up to the step `until`."""
        steps = [step for kind, step in self._settled if kind == "eval" and step is not None]
        return min((step for step in steps if step <= until), default=None)

    def states_until(self, step: int) -> list[Mapping[str, Any]]:
        """Return the states of all steps up to `step`, in order.

        The states may be large, so they are not kept in memory but read from the file.
        """
        states = {
            record["step"]: record["state"]
            for record in (read_lines(self._path, LINE) if step else ())
            if record["event"] == "trained" and record["step"] <= step
        }
        return [states[number] for number in sorted(states)]

    def _apply(self, record: Mapping[str, Any]) -> None:
        match record["event"]:  # earlier releases wrote "admitted" and "begun"
            case "rollout_started" | "admitted":
                self._attempts[_key(record)] += 1
            case "finished":
                self._note_end(_key(record), record["outcome"])
            case "batch_fixed" | "begun":
                self._fix(record["step"], [(step, task) for step, task in record["groups"]])
            case "trained" | "evaluated" as event:
                self._settled.add(("step" if event == "trained" else "eval", record["step"]))
            case "discarded":
                self._forget(record["after"])
            case _:  # the other events change nothing that is kept in memory
                pass

    def _note_end(self, key: RolloutKey, outcome: str) -> None:
        if outcome == "graded":  # such a rollout is not run again
            self.progress += 1
            del self._attempts[key]

    def _fix(self, step: int, groups: Sequence[GroupKey]) -> None:
        self._groups[step] = list(groups)
        self._learned_in |= dict.fromkeys(groups, step)

    def _forget(self, after: int) -> None:
        self._settled = {item for item in self._settled if item[1] is None or item[1] <= after}
        self._groups = {step: groups for step, groups in self._groups.items() if step <= after + 1}
        self._learned_in = {group: step for group, step in self._learned_in.items() if step <= after + 1}

    def _write(self, event: str, *, sync: bool = True, **fields: object) -> None:
        append_record(self._path, {"event": event, "at": round(time.time(), 3), **fields}, sync=sync)


def last_end(log_path: Path) -> End | None:
    """Return how the last process of the run ended.

    None: the process still runs, was killed or could not write its end, or no process has started. Raises
    ConfigError for a damaged line.
    """
    end = None
    for event in read_lines(log_path / JOURNAL, LINE, _end_or_event):
        if isinstance(event, End):
            end = event
        elif event == "started":
            end = None
    return end


def _end_or_event(record: Mapping[str, Any]) -> End | str:
    if record["event"] != "ended":
        return record["event"]
    return End(state=RunState(record["state"]), cause=record.get("cause", ""))


def _key(record: Mapping[str, Any]) -> RolloutKey:
    return RolloutKey(**{name: record[name] for name in RolloutKey.__dataclass_fields__})

"""Tests the batch of each step and the records of finished groups, with and without max_staleness."""

import asyncio
import gc
import io
from collections import Counter, defaultdict
from typing import Any

import pytest
from rich.console import Console

from src.cli.console import Display
from src.core.errors import ConfigError, ServerLost, StorageError, TooManyFailuresError, TrainerError
from src.policy.options import WatchdogOptions
from src.records.journal import Journal
from src.records.rollout_store import FinishedRollout, FinishedRollouts
from src.rollouts.batch_collector import BatchCollector, StepBatch
from src.rollouts.group_rollout import Rollouts
from src.rollouts.options import GroupOptions, RolloutOptions
from src.rollouts.pipeline import Batch
from src.rollouts.watchdog import Watchdog
from tests.fakes.policy import UnusedPolicy
from tests.fakes.run_files import records
from tests.fakes.trials import FakeTasks, failure, task, trajectory

TRIALS = 3  # trials per group


def batch(step: int, names: str) -> Batch:
    return Batch(step=step, epoch=0, tasks=[task(name) for name in names])


class Bench:
    """A batch collector with its files in `path`.

    All trials of `failing` tasks fail. In a group of a `mixed` task, only the first trial has the reward 1.
    All other graded trials have the reward 0.
    A trial of a `held` task waits until `release[task]` is set.
    """

    def __init__(self, path, names="abcdef", *, failing="", mixed="", held=(), steps_done=0, **changes):
        self.path, self.failing, self.mixed = path, failing, mixed
        self.release = {name: asyncio.Event() for name in held}
        self.source = FakeTasks(train=[task(name) for name in names], run_trial=self._run_trial)
        self.trial_started: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.reported: list[str] = []
        self.missing: list[str] = []
        self.journal = Journal(path)
        finished = FinishedRollouts(path, self.journal)
        rollout_options = RolloutOptions(
            n_parallel_envs=99, trial_timeout_s=None, trial_attempts=2, retry_wait_s=0, seed=0
        )
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        options = {"quarantine_after": 1, "max_failure_rate": 1.0, "batch_size": 2, "exploration_floor": 1e-9}
        self.groups = BatchCollector(
            GroupOptions(
                group_size=TRIALS, temperature=1.0, dynamic_sampling_max_batches=5, **(options | changes)
            ),
            source=self.source,
            rollouts=Rollouts(self.source, rollout_options, finished),
            finished=finished,
            watchdog=Watchdog(WatchdogOptions(heartbeat_timeout_s=60, request_timeout_s=60), self.lost),
            events=Display(Console(file=io.StringIO())),
            steps_done=steps_done,
        )
        self.groups.update_ended(UnusedPolicy(steps_done))

    async def _run_trial(self, trial, policy):
        directory = trial.directory / f"{trial.task.id}-{trial.member}"
        directory.mkdir(parents=True, exist_ok=True)
        self.trial_started[trial.task.id].set()
        if trial.task.id in self.release:
            await self.release[trial.task.id].wait()
        if not directory.exists():
            self.missing.append(directory.name)
        if trial.task.id in self.failing:
            return failure(trial.task.id)
        return trajectory(
            trial.task.id, float(trial.task.id in self.mixed and trial.member == 0), name=directory.name
        )

    async def collect(self, step: int, names: str) -> StepBatch:
        return await asyncio.wait_for(
            self.groups.collect(batch(step, names), lambda group: self.reported.append(group.task.id)), 10
        )

    def end_step(self, step: int) -> None:
        self.journal.trained(step, groups=self.journal.groups_of(step) or [], state=self.groups.state())

    def rolled_out(self, *, directory: str = "") -> str:
        """Return the sorted ids of the tasks that have a trial in a directory whose name contains
        `directory`."""
        return "".join(
            sorted({trial.task.id for trial in self.source.made if directory in trial.directory.name})
        )


async def test_a_quarantined_task_stays_excluded_after_a_restart(tmp_path):
    bench = Bench(tmp_path, failing="a")
    first = await bench.collect(1, "ab")
    assert [group.task.id for group in first.rolled_out] == ["a", "b"]
    names = ("tasks/quarantined", "groups/quarantined", "trials/retries")
    assert [first.metrics[name] for name in names] == [1, 0, TRIALS]
    bench.end_step(1)
    for again in (bench, Bench(tmp_path, failing="a", steps_done=1)):
        again.source.made.clear()
        second = await again.collect(2, "ac")
        assert again.rolled_out() in ("c", "")  # In the second iteration, c is loaded from disk.
        assert [group.task.id for group in second.to_learn] == ["c"] and [
            second.metrics[name] for name in names
        ] == [1, 1, 0]
    assert bench.journal.groups_of(2) == [(2, "a"), (2, "c")], "groups must follow the order of the schedule"
    assert bench.source.ended == ["step_000001", "step_000002"]
    assert [
        line["task"] for line in records(tmp_path / "journal.jsonl") if line["event"] == "quarantined"
    ] == ["a"]


async def test_a_single_failed_group_does_not_quarantine_a_task(tmp_path):
    bench = Bench(tmp_path, failing="a", quarantine_after=2)
    assert [(await bench.collect(step, "ab")).metrics["tasks/quarantined"] for step in (1, 2)] == [0, 1]


async def test_a_batch_without_a_graded_trial_stops_the_run(tmp_path):
    bench = Bench(tmp_path, failing="abc")
    assert not (await bench.collect(1, "a")).rolled_out[0].trajectories
    with pytest.raises(TooManyFailuresError, match="none of the 6 trials of step 2"):
        await bench.collect(2, "bc")


async def test_too_many_failures_or_no_task_left_stop_the_run(tmp_path):
    with pytest.raises(TooManyFailuresError, match=r"9 of the last 12 trials could not be graded"):
        await Bench(tmp_path / "a", failing="abc", max_failure_rate=0.7).collect(1, "abcd")
    bench = Bench(tmp_path / "b", "ab", failing="ab")
    await bench.collect(1, "a")
    with pytest.raises(TooManyFailuresError, match="every training task is quarantined"):
        await bench.collect(2, "b")


async def test_a_resumed_run_without_unquarantined_tasks_stops(tmp_path):
    """The resumed run has only the quarantined task a, because the user removed task b."""
    bench = Bench(tmp_path, "ab", failing="a")
    await bench.collect(1, "ab")
    bench.end_step(1)
    resumed = Bench(tmp_path, "a", steps_done=1)
    with pytest.raises(TooManyFailuresError, match="every training task is quarantined; resume the run with"):
        await resumed.collect(2, "a")


async def test_the_curriculum_continues_after_a_restart(tmp_path):
    """The journal records the tasks that the curriculum chose, not those of the schedule.

    The curriculum does not choose a quarantined task again.
    """
    bench, chosen = Bench(tmp_path, failing="a", mixed="ef", task_sampling="thompson"), []
    for step in range(1, 9):
        step_batch = await bench.collect(step, "ab")
        bench.end_step(step)
        chosen.append([group.task.id for group in step_batch.rolled_out])
        assert bench.journal.groups_of(step) == [(step, name) for name in chosen[-1]] and len(chosen[-1]) == 2
    assert sum("a" in names for names in chosen) == 1 and len({*map(frozenset, chosen)}) > 4
    state = bench.groups.state()
    curriculum: Any = state["curriculum"]
    assert curriculum["num_groups"] == 16 and set(curriculum["evidence"]) == {*chosen[-1]}
    again = Bench(tmp_path, failing="a", mixed="ef", task_sampling="thompson", steps_done=8)
    assert (await again.collect(9, "ab")).metrics == (await bench.collect(9, "ab")).metrics
    assert again.groups.state() == bench.groups.state() != state and again.journal.groups_of(
        9
    ) == bench.journal.groups_of(9)
    assert "curriculum" not in Bench(tmp_path / "uniform").groups.state()


async def test_thompson_refills_prefer_tasks_not_yet_rolled_out(tmp_path):
    for step in range(1, 9):
        bench = Bench(tmp_path, mixed="ef", task_sampling="thompson", dynamic_sampling="filter")
        step_batch = await bench.collect(step, "ab")
        assert sorted(group.task.id for group in step_batch.to_learn) == ["e", "f"]
        counts = Counter(trial.task.id for trial in bench.source.made)
        assert set(counts.values()) == {TRIALS}, "no task is rolled out twice while other tasks are left"
        assert len(step_batch.rolled_out) == len(counts)
        num_batches = int(step_batch.metrics["dynamic_sampling/batches"])
        purposes = ["step", *(f"refill-{number}" for number in range(1, num_batches))]
        assert {trial.directory.name for trial in bench.source.made} == {
            f"{purpose}_{step:06d}" for purpose in purposes
        }
    few = Bench(tmp_path / "few", "ab", task_sampling="thompson", dynamic_sampling="filter")
    with pytest.raises(TrainerError, match="5 batches had no differing rewards"):
        await few.collect(1, "ab")
    assert len(few.source.made) == 5 * 2 * TRIALS, (
        "if no other tasks are left, the same tasks are rolled out again"
    )


async def test_uniform_refills_are_whole_shuffled_batches(tmp_path):
    bench = Bench(tmp_path / "none", dynamic_sampling="filter")
    with pytest.raises(TrainerError, match="5 batches had no differing rewards"):
        await bench.collect(1, "ab")
    refills = [bench.rolled_out(directory=f"refill-{number}_") for number in range(1, 5)]
    assert {len(names) for names in refills} == {2} and len(set(refills)) > 1
    bench = Bench(tmp_path / "one", mixed="a", dynamic_sampling="filter")
    await bench.collect(1, "ab")
    assert len(bench.rolled_out(directory="refill-1_")) == 2, (
        "a refill is a whole batch, even if one group is missing"
    )


async def test_a_lost_server_ends_the_wait_for_groups(tmp_path):
    bench = Bench(tmp_path, held="ab", max_staleness=1)
    async with bench.groups.running([batch(1, "ab")], UnusedPolicy(0)):
        collecting = asyncio.ensure_future(bench.collect(1, "ab"))
        await asyncio.sleep(0)
        bench.lost.set_result("gone")
        with pytest.raises(ServerLost, match="rolling out step 1: gone"):
            await collecting


async def test_a_restarted_run_takes_the_same_groups(tmp_path):
    batches = [batch(1, "ab"), batch(2, "cd"), batch(3, "ef")]
    bench = Bench(tmp_path, held="a", failing="c", max_staleness=1, quarantine_after=0)
    async with bench.groups.running(batches, UnusedPolicy(0)):
        first = await bench.collect(1, "ab")
        groups = [(group.step, group.task.id) for group in first.to_learn]
        assert bench.reported == [name for _, name in groups] and "a" not in bench.reported
        assert (
            first.metrics["trials/retries"] == TRIALS * bench.reported.count("c")
            and first.metrics["groups/quarantined"] == 0
        )
        assert bench.journal.groups_of(1) == groups and {step for step, _ in groups} == {1, 2}
        assert bench.source.ended == ["step_000001", "step_000002"]
    again = Bench(tmp_path, failing="c", max_staleness=1, quarantine_after=0)
    async with again.groups.running(batches, UnusedPolicy(0)):
        await again.collect(1, "ab")
        assert sorted(again.reported) == sorted(bench.reported) and "b" not in again.rolled_out()
        again.groups.update_begins()
        again.groups.update_ended(UnusedPolicy(1))
        second = await again.collect(2, "cd")
        assert not {group.task.id for group in second.to_learn} & set(bench.reported)
    again.source.train = again.source.train[2:]
    with pytest.raises(
        ConfigError, match="the journal of this run has the tasks b, which the environment does not have"
    ):
        await again.collect(1, "ab")


async def test_an_error_ends_all_groups_that_are_rolled_out_again(tmp_path, monkeypatch):
    first = Bench(tmp_path, max_staleness=1)
    first.journal.batch_fixed(1, [(1, "a"), (1, "b")])
    bench = Bench(tmp_path, held="b", max_staleness=1)

    def fail(rollouts, key, rollout):
        raise StorageError("full")

    monkeypatch.setattr(FinishedRollouts, "add", fail)
    before = asyncio.all_tasks()
    with pytest.raises(StorageError, match="full"):
        await bench.collect(1, "ab")
    assert asyncio.all_tasks() == before


async def test_loaded_rollouts_are_freed_after_their_step(tmp_path):
    first = Bench(tmp_path, max_staleness=1)
    async with first.groups.running(batches := [batch(1, "ab"), batch(2, "cd")], UnusedPolicy(0)):
        await first.collect(1, "ab")
    again = Bench(tmp_path, max_staleness=1)
    async with again.groups.running(batches, UnusedPolicy(0)):
        assert (await again.collect(1, "ab")).rolled_out
        gc.collect()
        assert not any(isinstance(item, FinishedRollout) for item in gc.get_objects())


async def test_groups_of_quarantined_tasks_are_counted_per_step(tmp_path):
    bench, names = (
        Bench(tmp_path, failing="a", max_staleness=1, max_groups_in_flight=1, batch_size=1),
        ("ab", "cd", "ab"),
    )
    batches = [batch(step, task_names) for step, task_names in enumerate(names, start=1)]
    quarantined = []
    async with bench.groups.running(batches, UnusedPolicy(0)):
        for step, task_names in enumerate(names, start=1):
            metrics = (await bench.collect(step, task_names)).metrics
            quarantined.append(
                (metrics["tasks/quarantined"], metrics["groups/quarantined"], metrics["trials/retries"])
            )
            bench.groups.update_begins()
            bench.groups.update_ended(UnusedPolicy(step))
    assert quarantined == [(1, 0, TRIALS), (1, 0, 0), (1, 1, 0)]
    assert (
        "a" in bench.rolled_out(directory="step_000001") and bench.rolled_out(directory="step_000003") == "b"
    )


async def test_a_group_keeps_the_directories_of_other_groups(tmp_path):
    bench = Bench(tmp_path, held="b", max_staleness=1, max_groups_in_flight=2)
    async with bench.groups.running([batch(1, "abc")], UnusedPolicy(0)):
        collecting = asyncio.ensure_future(bench.collect(1, "abc"))
        await asyncio.wait_for(bench.trial_started["c"].wait(), 10)
        bench.release["b"].set()
        await collecting
    assert not bench.missing and len(bench.reported) == 3

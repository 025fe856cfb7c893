import asyncio

import pytest

from src.core.trajectory import TrajectoryGroup
from src.rollouts.group_rollout import TimedGroup
from src.rollouts.options import PipelineOptions, ScheduleOptions
from src.rollouts.pipeline import Pipeline, Scheduled, epoch_order, schedule
from tests.fakes.trials import task
from tests.fakes.virtual_time import Schedule, lognormal_minutes, simulate

TASKS = [task(name) for name in "abcde"]


def names(tasks):
    return "".join(item.id for item in tasks)


def batches(**changes):
    options = {"batch_size": 2, "n_epochs": 2, "max_steps": None, "seed": 0}
    return schedule(TASKS, ScheduleOptions(**(options | changes)))


def test_every_epoch_has_every_task_once_and_epochs_never_mix():
    plan = batches()
    assert [(batch.step, batch.epoch, len(batch.tasks)) for batch in plan] == [
        (1, 0, 2),
        (2, 0, 2),
        (3, 0, 1),
        (4, 1, 2),
        (5, 1, 2),
        (6, 1, 1),
    ]
    for epoch in (0, 1):
        assert sorted(
            names([item for batch in plan if batch.epoch == epoch for item in batch.tasks])
        ) == list("abcde")


def test_max_steps_cuts_the_schedule_after_that_step():
    assert batches(max_steps=4) == batches()[:4]
    assert batches(max_steps=100) == batches()


def test_the_order_depends_only_on_ids_seed_and_epoch():
    assert epoch_order(TASKS[::-1], seed=1, epoch=2) == epoch_order(TASKS, seed=1, epoch=2)
    assert (
        len({names(epoch_order(TASKS, seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)})
        > 5
    )


class Stage:
    """A pipeline whose groups run until `end`. `under_way` has the names of the running groups."""

    def __init__(self, names, *, left_out=(), **changes):
        options = {"max_staleness": 1, "max_groups_in_flight": None, "stream_groups": False, "batch_size": 2}
        self.rollouts = {}
        self.pipeline = Pipeline(
            [Scheduled(step=1 + index // 2, task=task(name)) for index, name in enumerate(names)],
            self._roll_out,
            PipelineOptions(**(options | changes)),
            is_left_out=lambda task: task.id in left_out,
        )

    async def _roll_out(self, scheduled):
        self.rollouts[scheduled.task.id] = asyncio.get_running_loop().create_future()
        await self.rollouts[scheduled.task.id]
        group = TrajectoryGroup(task=scheduled.task, trajectories=[], step=scheduled.step)
        return TimedGroup(group=group, duration_s=0.0)

    async def end(self, *names):
        for name in names:
            self.rollouts[name].set_result(None)
            await settle()

    async def taken(self, step):
        finished = await asyncio.wait_for(self.pipeline.take(step), 60)
        await settle()
        return finished and finished.group.task.id

    @property
    def under_way(self):
        return "".join(name for name, future in self.rollouts.items() if not future.done())


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def started(stage, step=1):
    """Start to take a group of the step, and let the pipeline start its groups. Return the waiting task."""
    taking = asyncio.ensure_future(stage.taken(step))
    await settle()
    return taking


async def test_a_step_takes_the_groups_that_end_first():
    stage = Stage("abcdef")
    async with stage.pipeline:
        first = await started(stage)
        assert stage.under_way == "abcd"  # two batches
        await stage.end("c")
        assert await first == "c"
        await stage.end("b")
        assert await stage.taken(1) == "b"
        stage.pipeline.update_begins()
        stage.pipeline.update_ended()
        await settle()
        assert "a" in stage.under_way
        await stage.end("d", "a")
        assert [await stage.taken(2), await stage.taken(2)] == ["d", "a"]
    assert all(future.cancelled() or future.done() for future in stage.rollouts.values())
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_groups_that_end_during_an_update_are_bounded():
    stage = Stage("abcdefgh", max_groups_in_flight=8)
    async with stage.pipeline:
        stage.pipeline.update_begins()  # before any group has ended
        taking = await started(stage)
        await stage.end("a", "b")
        assert [await taking, await stage.taken(1)] == ["a", "b"]
        assert stage.under_way == "cd"
        await stage.end("c", "d")
        # No further group starts: if it ended during this update, c and d would be trained in the next
        # update and this group in the one after it.
        assert stage.under_way == ""
        assert [await stage.taken(2), await stage.taken(2)] == ["c", "d"]
        assert stage.under_way == ""
        stage.pipeline.update_ended()
        await settle()
        assert stage.under_way == "ef"


async def test_groups_in_flight_are_limited():
    stage = Stage("abcd", max_groups_in_flight=2)
    async with stage.pipeline:
        taking = await started(stage)
        assert stage.under_way == "ab"
        await stage.end("a")
        assert stage.under_way == "bc" and await taking == "a"


@pytest.mark.parametrize(
    ("max_staleness", "stream_groups", "uses_pipeline"),
    [(0, False, False), (0, True, True), (1, False, True)],
)
def test_staleness_or_streaming_uses_the_pipeline(max_staleness, stream_groups, uses_pipeline):
    settings = PipelineOptions(
        max_staleness=max_staleness, max_groups_in_flight=None, stream_groups=stream_groups, batch_size=2
    )
    assert settings.uses_pipeline == uses_pipeline


async def test_on_policy_training_rolls_out_no_group_ahead():
    stage = Stage("abcd", max_staleness=0, stream_groups=True)
    async with stage.pipeline:
        taking = await started(stage)
        assert stage.under_way == "ab"
        await stage.end("b", "a")
        assert [await taking, await stage.taken(1)] == ["b", "a"]
        assert await stage.taken(1) is None
        taking = await started(stage, step=2)
        assert stage.under_way == "cd"
        await stage.end("c", "d")
        assert await taking == "c"


async def test_quarantined_tasks_are_skipped_and_the_schedule_ends():
    stage = Stage("abc", left_out="ab")
    async with stage.pipeline:
        taking = await started(stage)
        await stage.end("c")
        assert await taking == "c"
        assert await stage.taken(1) is None


async def test_an_error_reaches_the_waiting_step_and_stops_new_groups():
    stage = Stage("abc", max_groups_in_flight=2)
    async with stage.pipeline:
        waiting = asyncio.ensure_future(stage.pipeline.take(1))
        await settle()
        stage.rollouts["a"].set_exception(KeyError("oops"))
        with pytest.raises(KeyError):
            await waiting
        assert stage.under_way == "b"


async def test_a_cancelled_rollout_ends_the_waiting_step():
    stage = Stage("abc", max_groups_in_flight=2)
    async with stage.pipeline:
        waiting = asyncio.ensure_future(stage.pipeline.take(1))
        await settle()
        stage.rollouts["a"].cancel()
        await settle()
        assert waiting.cancelled() and stage.under_way == "b"


async def test_a_group_that_ends_during_the_exit_starts_no_other():
    ending, names = asyncio.Event(), []

    async def roll_out(scheduled):
        names.append(scheduled.task.id)
        await asyncio.sleep(0)
        ending.set()  # the block below continues before the pipeline learns that the group has ended
        group = TrajectoryGroup(task=scheduled.task, trajectories=[], step=scheduled.step)
        return TimedGroup(group=group, duration_s=0.0)

    scheduled = [Scheduled(step=1, task=task(name)) for name in "abc"]
    options = PipelineOptions(batch_size=2, max_staleness=1, max_groups_in_flight=2)
    pipeline = Pipeline(scheduled, roll_out, options, is_left_out=lambda task: False)
    with pytest.raises(KeyError):
        async with pipeline:
            pipeline.update_begins()
            pipeline.update_ended()  # starts the first groups
            await ending.wait()
            raise KeyError("oops")
    await settle()
    assert names == ["a", "b"]


REFERENCE = {
    "minutes": lognormal_minutes(10, 0.8),
    "train_minutes": 2,
    "num_steps": 15,
    "batch_size": 8,
    "turns": 10,
}


def test_rolling_out_ahead_is_three_times_as_fast(tmp_path):
    synchronous = simulate(tmp_path / "sync", **REFERENCE)
    ahead = simulate(tmp_path / "ahead", "max_staleness=1", **REFERENCE)
    assert ahead.minutes_per_step < synchronous.minutes_per_step / 3
    assert ahead.num_discarded == 0 and ahead.slowest_trained == 1
    assert set(ahead.trained.values()) == {1} and ahead.trained == synchronous.trained
    assert max(ahead.ages) == 1 and max(synchronous.ages) == 0
    masked = sum(line.get("staleness/masked_tokens", 0) for line in ahead.metrics)
    assert masked + len(ahead.ages) == 15 * 8 * 10, "every token is trained or counted as masked"


@pytest.mark.parametrize("seed", range(2000, 2020))
def test_no_token_beyond_the_staleness_bound_is_trained(tmp_path, seed):
    schedule = Schedule.draw(seed)
    assert schedule.faults(schedule.run(tmp_path / "run")) == []

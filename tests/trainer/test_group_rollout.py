import asyncio

import pytest

from src.core.errors import BackendError, TrainerError
from src.core.trajectory import FailureKind, TrajectoryGroup
from src.records.journal import Journal
from src.records.rollout_store import FinishedRollouts
from src.rollouts.group_rollout import RolloutPlan, Rollouts, back_off, require_some_graded, trial_seed
from src.rollouts.options import RolloutOptions
from tests.fakes.policy import UnusedPolicy
from tests.fakes.run_files import records
from tests.fakes.trials import FakeTasks, failure, task, trajectory

A, B = task("a"), task("b")
POLICY = UnusedPolicy(7)


def plan(tmp_path, **changes):
    options = {"step": 3, "purpose": "step", "group_size": 2, "temperature": 0.7, "directory": tmp_path}
    return RolloutPlan(**(options | changes))


async def run_groups(
    tmp_path,
    run_trial,
    *,
    tasks=(A, B),
    parallel=8,
    deadline=None,
    wait=0.0,
    seed=0,
    source_class=FakeTasks,
    **changes,
):
    source = source_class(train=tasks, run_trial=run_trial)
    reported = []
    settings = RolloutOptions(
        n_parallel_envs=parallel,
        trial_timeout_s=deadline,
        trial_attempts=2,
        retry_wait_s=wait,
        seed=seed,
    )
    rollouts = Rollouts(source, settings, FinishedRollouts(tmp_path, Journal(tmp_path)))
    timed = await rollouts.groups(tasks, POLICY, plan(tmp_path, **changes), reported.append)
    groups = [item.group for item in timed]
    return groups, source.made, reported


async def succeed(trial, policy):
    return trajectory(trial.task.id, 1.0)


@pytest.mark.seed_behaviour(79)
async def test_groups_keep_the_order_of_the_tasks_and_every_member(tmp_path):
    async def slow_a(trial, policy):
        await asyncio.sleep(0.02 if trial.task is A else 0)
        return await succeed(trial, policy)

    groups, made, reported = await run_groups(tmp_path, slow_a)
    assert [(group.task.id, group.rewards) for group in groups] == [("a", [1, 1]), ("b", [1, 1])]
    assert [finished.group.task.id for finished in reported] == ["b", "a"]
    assert all(trial.directory == tmp_path and trial.temperature == 0.7 for trial in made)
    assert [(trial.task.id, trial.member) for trial in made] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    rollout_started = [
        line for line in records(tmp_path / "journal.jsonl") if line["event"] == "rollout_started"
    ]
    assert [line["policy_version"] for line in rollout_started] == [7] * 4


async def test_rollouts_on_disk_are_reused_for_the_same_seed(tmp_path):
    await run_groups(tmp_path, succeed)
    groups, made, reported = await run_groups(tmp_path, succeed)
    assert (
        not made
        and [group.rewards for group in groups] == [[1, 1], [1, 1]]
        and [finished.duration_s for finished in reported] == [0, 0]
    )
    _, made, _ = await run_groups(tmp_path, succeed, seed=1)
    assert len(made) == 4


@pytest.mark.seed_behaviour(147)
async def test_trajectories_have_their_member_and_seed(tmp_path):
    [group, _], made, _ = await run_groups(tmp_path, succeed)
    seeds = {(trial.task.id, trial.member): trial.seed for trial in made}
    named = [(trajectory.member, trajectory.seed) for trajectory in group.trajectories]
    assert named == [(member, seeds[group.task.id, member]) for member in (0, 1)]
    [again, _], _, _ = await run_groups(tmp_path, succeed)
    assert again.trajectories == group.trajectories  # from disk


async def test_the_duration_of_a_group_is_from_first_start_to_last_end(tmp_path):
    async def slow(trial, policy):
        await asyncio.sleep(0.02)
        return await succeed(trial, policy)

    _, _, [finished] = await run_groups(tmp_path, slow, tasks=(A,), parallel=1)
    assert finished.duration_s >= 0.03


@pytest.mark.seed_behaviour(83)
async def test_concurrent_trials_stay_within_the_limit(tmp_path):
    running = max_running = 0

    async def count(trial, policy):
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        await asyncio.sleep(0.001)
        running -= 1
        return await succeed(trial, policy)

    await run_groups(tmp_path, count, parallel=3, group_size=5)
    assert max_running == 3


@pytest.mark.parametrize(
    ("kind", "tries"),
    [
        (FailureKind.SANDBOX, 2),
        (FailureKind.BACKEND, 2),
        (FailureKind.VERIFIER, 2),
        (FailureKind.ENV_SERVER, 2),
        (FailureKind.AGENT, 1),
        (FailureKind.HARBOR, 1),
    ],
)
async def test_infrastructure_failures_are_retried_with_the_same_seed(tmp_path, kind, tries):
    async def fail_a(trial, policy):
        return failure("a", kind) if trial.task is A else await succeed(trial, policy)

    groups, made, reported = await run_groups(tmp_path, fail_a, group_size=1)
    seeds_of_a = [trial.seed for trial in made if trial.task is A]
    assert len(seeds_of_a) == tries and len(set(seeds_of_a)) == 1
    assert {finished.group.task.id: finished.num_retries for finished in reported} == {"a": tries - 1, "b": 0}
    assert [failed.kind for failed in groups[0].failures] == [kind]


def test_the_wait_before_a_retry_doubles_and_has_jitter():
    assert [back_off(2.0, attempts, seed=0) for attempts in (1, 2, 3, 9)] == [2, 4, 8, 60]
    assert [back_off(2.0, 1, seed) for seed in (500, 999)] == [2.5, 2.999]
    assert [back_off(wait_s, 5000, seed=0) for wait_s in (0.0, 2.0)] == [0, 60]


async def test_a_lost_trial_is_retried_after_a_wait(tmp_path):
    loop = asyncio.get_running_loop()
    times = []

    async def fail(trial, policy):
        times.append(loop.time())
        return failure("a")

    await run_groups(tmp_path, fail, tasks=(A,), group_size=1, wait=0.02)
    assert times[1] - times[0] >= 0.019


async def test_a_backend_error_is_an_infrastructure_failure(tmp_path):
    async def lose(trial, policy):
        raise BackendError("gone")

    [group], made, _ = await run_groups(tmp_path, lose, tasks=(A,), group_size=1)
    assert [(failed.kind, failed.message) for failed in group.failures] == [
        (FailureKind.BACKEND, "gone")
    ] and len(made) == 2


async def test_a_retried_trial_can_succeed(tmp_path):
    lost = []

    async def fail_first(trial, policy):
        if not lost:
            lost.append(trial)
            return failure("a")
        return await succeed(trial, policy)

    [group], _, _ = await run_groups(tmp_path, fail_first, tasks=(A,))
    assert group.rewards == [1, 1] and not group.failures


async def test_a_trial_past_its_deadline_is_cancelled_and_counted(tmp_path):
    cancelled_trials = []

    async def hang(trial, policy):
        if trial.task is B:
            return await succeed(trial, policy)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.02)  # stopping a sandbox takes time
            cancelled_trials.append(trial)

    groups, _, _ = await run_groups(tmp_path, hang, deadline=0.01, group_size=1)
    assert groups[0].failures[0].kind is FailureKind.TIMEOUT
    assert groups[0].failures[0].message == "not finished after 0.01 s"
    assert len(cancelled_trials) == 1


async def test_an_exception_is_a_failure_of_its_trial_alone(tmp_path):
    async def break_a(trial, policy):
        if trial.task is A:
            raise KeyError("oops")
        return await succeed(trial, policy)

    groups, _, _ = await run_groups(tmp_path, break_a, group_size=1)
    [failed] = groups[0].failures
    assert failed.kind == FailureKind.HARBOR
    assert failed.message.startswith("KeyError: 'oops' (tests/trainer/test_group_rollout.py:")
    assert groups[1].rewards == [1]


async def test_an_exception_when_a_trial_is_created_is_its_failure(tmp_path):
    class BrokenTasks(FakeTasks):
        def trial(self, task, **options):
            if task is A:
                raise KeyError("oops")
            return super().trial(task, **options)

    groups, _, _ = await run_groups(tmp_path, succeed, group_size=1, source_class=BrokenTasks)
    assert [failure.kind for failure in groups[0].failures] == [FailureKind.HARBOR]
    assert groups[1].rewards == [1]


async def test_without_a_graded_trial_the_most_frequent_cause_is_named(tmp_path):
    async def fail(trial, policy):
        return (
            failure("a", FailureKind.AGENT, "odd")
            if trial.task is A
            else failure("b", FailureKind.SANDBOX, "no tmux")
        )

    groups, _, _ = await run_groups(tmp_path, fail, tasks=(A, B, B), group_size=1, purpose="eval")
    jobs = tmp_path / "jobs" / "eval_000003"
    with pytest.raises(
        TrainerError,
        match=r"none of the 3 trials of evaluation 3 could be graded; 2 failed by sandbox, e.g. no tmux",
    ) as error:
        require_some_graded(groups, plan(tmp_path, purpose="eval", directory=jobs))
    assert str(error.value).endswith(f"; see {tmp_path / 'logs.log'}")  # these trials have no files
    jobs.mkdir(parents=True)
    with pytest.raises(TrainerError, match=f"; see {jobs}$"):
        require_some_graded(groups, plan(tmp_path, purpose="eval", directory=jobs))
    require_some_graded([], plan(tmp_path))
    graded = TrajectoryGroup(task=A, trajectories=[trajectory("a", 1.0)])
    require_some_graded([graded, *groups], plan(tmp_path))


async def test_cancelling_cancels_every_trial(tmp_path):
    cancelled_trials = []
    started = asyncio.Event()

    async def hang(trial, policy):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled_trials.append(trial)

    running = asyncio.ensure_future(run_groups(tmp_path, hang))
    await asyncio.wait_for(started.wait(), 5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(cancelled_trials) == 4


def test_seeds_differ_by_place_and_repeat_between_evaluations(tmp_path):
    seed = trial_seed(0, plan(tmp_path), "a", 0)
    assert seed == trial_seed(0, plan(tmp_path), "a", 0) and 0 <= seed < 2**31
    others = [
        trial_seed(1, plan(tmp_path), "a", 0),
        trial_seed(0, plan(tmp_path, step=4), "a", 0),
        trial_seed(0, plan(tmp_path), "b", 0),
        trial_seed(0, plan(tmp_path), "a", 1),
        trial_seed(0, plan(tmp_path, purpose="refill-1"), "a", 0),
        trial_seed(0, plan(tmp_path, purpose="eval"), "a", 0),
    ]
    assert len({seed, *others}) == 7
    assert trial_seed(0, plan(tmp_path, purpose="eval", step=9), "a", 0) == others[-1]


class NoopSource(FakeTasks):
    """A source whose no-op trial solves task a and fails for task b."""

    measured: list[str]
    num_running = 0

    async def noop_reward(self, task):
        self.measured.append(task.id)
        self.num_running += 1
        assert self.num_running == 1, "more trials at once than n_parallel_envs"
        await asyncio.sleep(0)
        self.num_running -= 1
        if task is B:
            raise OSError("gone")
        return 1.0


async def test_the_noop_reward_is_measured_once_and_may_be_unknown(tmp_path, caplog):
    source = NoopSource(train=(A, B))
    source.measured = []
    settings = RolloutOptions(
        n_parallel_envs=1, trial_timeout_s=None, trial_attempts=1, retry_wait_s=0, seed=0
    )
    rollouts = Rollouts(source, settings, FinishedRollouts(tmp_path, Journal(tmp_path)))
    assert await rollouts.noop_rewards([A, B]) == await rollouts.noop_rewards([A, B]) == {"a": 1.0}
    assert (
        source.measured == ["a", "b"]
        and "b: the reward of an agent that does nothing could not be measured: OSError: gone" in caplog.text
    )


@pytest.mark.parametrize("is_run_cancelled", [False, True])
async def test_a_noop_trial_that_cancels_itself_is_not_measured(tmp_path, is_run_cancelled):
    started = asyncio.Event()

    async def noop_reward(task):
        started.set()
        if is_run_cancelled:
            await asyncio.Event().wait()
        raise asyncio.CancelledError

    source = FakeTasks(train=(A,))
    source.noop_reward = noop_reward
    settings = RolloutOptions(
        n_parallel_envs=1, trial_timeout_s=None, trial_attempts=1, retry_wait_s=0, seed=0
    )
    rollouts = Rollouts(source, settings, FinishedRollouts(tmp_path, Journal(tmp_path)))
    measuring = asyncio.create_task(rollouts.noop_rewards([A]))
    await started.wait()
    if is_run_cancelled:
        measuring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await measuring
    else:
        assert await measuring == {}


async def test_a_trial_that_cancels_itself_fails_alone(tmp_path):
    async def cancelled(trial, policy):
        if trial.task is A:
            raise asyncio.CancelledError
        return await succeed(trial, policy)

    (a, b), _, _ = await run_groups(tmp_path, cancelled)
    assert [failure.kind for failure in a.failures] == [FailureKind.HARBOR] * 2 and b.rewards == [1, 1]

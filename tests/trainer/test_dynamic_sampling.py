import random
from dataclasses import replace
from functools import partial

import pytest

from src.core.errors import TrainerError
from src.core.trajectory import TrajectoryGroup
from src.learning import dynamic_sampling
from src.learning.dynamic_sampling import (
    EMPTY,
    is_good,
    refill,
    replace_bad_groups,
    sample_groups,
    sampling_metrics,
)
from src.learning.options import DynamicSamplingOptions, FilterOptions
from tests.fakes.trials import failure, task, trajectory

add_batch = partial(dynamic_sampling.add_batch, min_group_size=1)


def settings(kind, *, limit=30, ratio=0.3):
    return DynamicSamplingOptions(
        dynamic_sampling=kind,
        dynamic_sampling_max_batches=limit,
        dynamic_sampling_min_replace_ratio=ratio,
        seed=0,
    )


def group(name, *rewards):
    failures = [] if rewards else [failure()]
    return TrajectoryGroup(
        task=task(name), trajectories=[trajectory(name, reward) for reward in rewards], failures=failures
    )


def good(*names):
    return [group(name, 1, 0) for name in names]


def bad(*names):
    return [group(name, 0, 0) for name in names]


def names(groups):
    return [item.task.id for item in groups]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [((1, 0), True), ((1, 1), False), ((0.3, 0.3000001), False), ((1,), True), ((), False)],
)
def test_a_good_group_has_differing_rewards_or_a_single_one(rewards, expected):
    assert is_good(group("a", *rewards), 1) is expected


def test_a_single_reward_beside_failures_is_bad():
    assert not is_good(replace(group("a", 1), failures=[failure()]), 1)


def test_filter_collects_over_batches_and_drops_surplus_groups():
    first = add_batch(EMPTY, [*good("a"), *bad("b")], settings("filter"), step=1, num_groups=2)
    assert not first.is_complete and names(first.kept) == ["a"]
    second = add_batch(first, good("c", "d"), settings("filter"), step=1, num_groups=2)
    assert second.is_complete and names(second.kept) == ["a", "c"]
    metrics = sampling_metrics(second, settings("filter"))
    assert (
        metrics["dynamic_sampling/batches"],
        metrics["dynamic_sampling/bad_groups"],
        metrics["dynamic_sampling/surplus_groups"],
    ) == (2, 1, 1)


def test_replace_substitutes_good_groups_for_bad_ones():
    state = add_batch(
        EMPTY, [*bad("x"), *good("a", "b"), *bad("y")], settings("replace"), step=1, num_groups=4
    )
    assert state.is_complete and state.num_copies == 2
    # No good group is copied twice.
    assert names(state.kept)[1:3] == ["a", "b"] and {names(state.kept)[0], names(state.kept)[3]} == {"a", "b"}


def test_replace_repeats_good_groups_if_there_are_too_few():
    kept = replace_bad_groups([*good("a"), *bad("x", "y")], random.Random(0), 1)
    assert names(kept) == ["a", "a", "a"]


def test_replace_needs_strictly_more_than_the_ratio():
    batch = [*good("a", "b", "c"), *bad(*"tuvwxyz")]
    assert not add_batch(EMPTY, batch, settings("replace", ratio=0.3), step=1, num_groups=10).is_complete
    assert add_batch(EMPTY, batch, settings("replace", ratio=0.29), step=1, num_groups=10).is_complete


@pytest.mark.parametrize("mode", ["off", "filter", "replace"])
def test_a_step_without_tasks_is_complete(mode):
    state = add_batch(EMPTY, [], settings(mode), step=1, num_groups=0)
    assert state.is_complete and state.kept == []


def test_too_many_batches_stop_the_run_with_a_reason():
    state = add_batch(EMPTY, bad("a"), settings("filter", limit=2), step=7, num_groups=1)
    with pytest.raises(TrainerError, match="step 7: 2 groups of 2 batches had no differing rewards"):
        add_batch(state, bad("b"), settings("filter", limit=2), step=7, num_groups=1)
    unlimited = state
    for _ in range(50):
        unlimited = add_batch(unlimited, bad("b"), settings("filter", limit=0), step=7, num_groups=1)


def test_dynamic_sampling_off_keeps_all_groups():
    groups = [*good("a"), *bad("b")]
    assert add_batch(EMPTY, groups, settings("off"), step=1, num_groups=2).kept == groups


def test_a_refill_depends_only_on_seed_step_and_index():
    tasks = list(range(20))
    assert refill(tasks, 4, seed=0, step=1, refill_index=1) == refill(
        tasks, 4, seed=0, step=1, refill_index=1
    )
    assert refill(tasks, 4, seed=0, step=1, refill_index=1) != refill(
        tasks, 4, seed=0, step=1, refill_index=2
    )


async def test_refills_receive_the_state_after_each_batch():
    batches = {0: [*good("a"), *bad("b")], 1: bad("c"), 2: good("d")}
    requests = []

    async def run_tasks(tasks, index):
        return batches[index]

    def refills(state, num_groups):
        requests.append((state.num_batches, num_groups - len(state.kept), names(state.rolled_out)))
        return [task("x")]

    filters = FilterOptions(
        remove_constant_reward_groups=False,
        min_group_size=1,
        failed_trial_reward=None,
        apply_overlong_filtering="off",
    )
    state = await sample_groups(
        run_tasks, [task("a"), task("b")], refills, settings("filter"), filters, step=1
    )
    assert requests == [(1, 1, ["a", "b"]), (2, 1, ["a", "b", "c"])]
    assert names(state.kept) == ["a", "d"]


@pytest.mark.parametrize(("mode", "kept"), [("filter", ["a", "c"]), ("replace", ["a", "a"])])
async def test_a_group_below_min_group_size_takes_no_place(mode, kept):
    small = replace(group("b", 1, 0), failures=[failure()])
    batches = {0: [group("a", 1, 0, 0), small], 1: [group("c", 1, 1, 0)]}

    async def run_tasks(tasks, index):
        return batches[index]

    filters = FilterOptions(
        remove_constant_reward_groups=False,
        min_group_size=3,
        failed_trial_reward=None,
        apply_overlong_filtering="off",
    )
    tasks = [task("a"), task("b")]
    state = await sample_groups(run_tasks, tasks, lambda *_: [task("c")], settings(mode), filters, step=1)
    assert names(state.kept) == kept and state.num_bad == 1


async def test_reward_rules_are_applied_before_dynamic_sampling():
    groups = [group("a", 1), replace(group("b", 0), failures=[failure()])]

    async def run_tasks(tasks, index):
        return groups

    filters = FilterOptions(
        remove_constant_reward_groups=False,
        min_group_size=1,
        failed_trial_reward=0,
        apply_overlong_filtering="off",
    )
    state = await sample_groups(run_tasks, [task("a")], lambda *_: [], settings("filter"), filters, step=1)
    # The failure of b has the reward 0, so both rewards of b are 0.
    assert (names(state.kept), state.num_bad) == (["a"], 1)
    assert state.rolled_out == groups

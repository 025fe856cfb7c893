from collections import Counter

import pytest

from src.filters import DropReason
from src.metrics import batch_metrics, family, group_metrics, held_out_metrics
from src.trajectory import FailureKind, StopReason, TrajectoryGroup
from tests.fakes.trials import failure, task, trajectory, turn


def group(name, *rewards, failures=()):
    return TrajectoryGroup(task=task(name), trajectories=[trajectory(name, reward) for reward in rewards], failures=list(failures))


FOUR = [group("a", 1, 0, 0, 0), group("b", 0, 0, 0, 0), group("c", 1, 1, 1, 1), group("d", 0.5, -0.5, 0, 0)]


def test_reward_metrics_have_the_values_of_skyrl_in_fleets_definitions():
    metrics = group_metrics(FOUR, group_size=4)
    assert metrics["reward/avg_pass_at_4"] == 0.75
    assert metrics["reward/variance_per_prompt"] == 0.078125
    assert metrics["reward/signal_ratio"] == 0.5
    assert metrics["reward/mean_positive_reward"] == pytest.approx(0.9166667)
    assert metrics["env/all/reward/total"] == metrics["reward/avg_raw_reward"] == pytest.approx(0.3125)


@pytest.mark.parametrize(("rewards", "variance"), [((1, 0, 0, 0), 0.1875), ((1, 1, 0, 0), 0.25), ((1,), 0.0)])
def test_variance_is_largest_when_half_succeed(rewards, variance):
    assert group_metrics([group("a", *rewards)], group_size=4)["reward/variance_per_prompt"] == variance


def test_shares_of_groups_add_up():
    metrics = group_metrics(FOUR, group_size=4)
    shares = [metrics[f"env/all/by_group/frac_{kind}"] for kind in ("mixed", "all_good", "all_bad")]
    assert shares == [0.5, 0.25, 0.25]


def test_failures_are_counted_by_kind_and_touch_no_reward():
    metrics = group_metrics([group("a", 1, 0, failures=[failure(kind=FailureKind.SANDBOX)] * 2)], group_size=4)
    assert (metrics["trials/failed/sandbox"], metrics["trials/failed/agent"]) == (2, 0)
    assert (metrics["trials/total"], metrics["trials/graded"], metrics["trials/ungraded"]) == (4, 2, 2)
    assert metrics["env/all/reward/total"] == 0.5


def test_a_batch_of_failures_has_counts_and_no_rewards():
    metrics = group_metrics([group("a", failures=[failure()])], group_size=1)
    assert metrics["trials/total"] == 1
    assert not any(name.startswith(("reward/", "env/")) for name in metrics)


def test_lengths_and_endings():
    long = trajectory("a", 1, [turn([1], [2, 3], version=4), turn([1, 2, 3, 4], [5, 6], version=5)])
    short = trajectory("a", 0, [turn([1], [2, 3], version=4)], stop=StopReason.LENGTH)
    metrics = group_metrics([TrajectoryGroup(task=task("a"), trajectories=[long, short])], group_size=2)
    assert metrics["env/all/turns"] == 1.5
    assert (metrics["tokens/sampled"], metrics["tokens/context_max"]) == (6, 6)
    assert (metrics["generate/min_num_tokens"], metrics["generate/max_num_tokens"], metrics["generate/avg_num_tokens"]) == (2, 4, 3)
    assert metrics["env/all/stop_reason/length"] == 0.5
    assert (metrics["sampling_client/step_min"], metrics["sampling_client/step_max"]) == (4, 5)


def test_drops_are_counted_even_when_nothing_is_left():
    metrics = batch_metrics([], Counter({DropReason.CONSTANT_REWARD: 3}))
    assert metrics["groups/dropped/constant_reward"] == 3
    assert metrics["tokens/trained"] == 0


def test_held_out_rewards_by_family_where_there_are_families():
    metrics = held_out_metrics([group("copy-01", 1), group("copy-02", 0), group("move-01", 1)], group_size=1)
    assert metrics["test/env/all/reward/total"] == pytest.approx(2 / 3)
    assert (metrics["test/env/copy/reward/total"], metrics["test/env/move/reward/total"]) == (0.5, 1)
    lone = held_out_metrics([group("copy-01", 1), group("move-01", 1)], group_size=1)
    assert "test/env/copy/reward/total" not in lone


@pytest.mark.parametrize(("task_id", "name"), [("count-lines-03", "count-lines"), ("org/copy_7", "copy"), ("hello", "hello"), ("42", "42")])
def test_a_family_is_an_id_without_its_number(task_id, name):
    assert family(task_id) == name

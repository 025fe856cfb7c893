from collections import Counter
from dataclasses import replace

import pytest

from src.core.trajectory import FailureKind, StopReason, TrajectoryGroup, ZeroReason
from src.learning.examples import Example
from src.learning.filters import DropReason
from src.learning.metrics import batch_metrics, group_metrics, held_out_metrics, token_metrics
from src.learning.rollout_groups import num_response_tokens, task_type
from tests.fakes.trials import failure, task, trajectory, turn


def group(name, *rewards, failures=()):
    return TrajectoryGroup(
        task=task(name),
        trajectories=[trajectory(name, reward) for reward in rewards],
        failures=list(failures),
    )


FOUR_GROUPS = [
    group("a", 1, 0, 0, 0),
    group("b", 0, 0, 0, 0),
    group("c", 1, 1, 1, 1),
    group("d", 0.5, -0.5, 0, 0),
]


@pytest.mark.seed_behaviour(143)
def test_reward_metrics_have_skyrls_values():
    metrics = group_metrics(FOUR_GROUPS, group_size=4)
    assert metrics["reward/avg_pass_at_4"] == 0.75
    assert metrics["reward/variance_per_prompt"] == 0.078125
    assert metrics["reward/signal_ratio"] == 0.5
    assert metrics["reward/mean_positive_reward"] == pytest.approx(0.9166667)
    assert metrics["env/all/reward/total"] == pytest.approx(0.3125)
    assert metrics["reward/mean_clipped_at_zero"] == 0.34375  # SkyRL's mean_positive_reward
    assert metrics["reward/zero_reward_rate"] == 9 / 16


def test_a_pass_is_a_positive_sum_of_rewards():
    token_rewards = [[1, 0], [0, 1], [0, 0]]  # SkyRL's pass rate for these rewards is 0.3333
    groups = [group(str(index), sum(rewards)) for index, rewards in enumerate(token_rewards)]
    assert group_metrics(groups, group_size=1)["reward/avg_pass_at_1"] == pytest.approx(0.6667, abs=5e-5)


def test_every_task_type_has_signal_metrics():
    metrics = group_metrics(
        [group("copy-01", 1, 0), group("org/copy-02", 0, 0), group("move-01", 1, 1)], group_size=2
    )
    names = {name.removeprefix("reward/copy/") for name in metrics if name.startswith("reward/copy/")}
    assert names == {"pass_at_2", "variance_per_prompt", "signal_ratio", "mean_positive_reward"}
    assert (metrics["reward/copy/pass_at_2"], metrics["reward/copy/variance_per_prompt"]) == (0.5, 0.125)
    assert (metrics["reward/copy/signal_ratio"], metrics["reward/move/signal_ratio"]) == (0.5, 0)
    assert not any(name.startswith("reward/a/") for name in group_metrics(FOUR_GROUPS, group_size=4))


def test_response_lengths_have_skyrls_values():
    metrics = token_metrics([2, 4, 1], [1.0, 0.0, -1.0])
    assert (metrics["generate/min_num_tokens"], metrics["generate/max_num_tokens"]) == (1, 4)
    assert metrics["generate/avg_num_tokens"] == pytest.approx(2.3333333)
    assert metrics["generate/std_num_tokens"] == pytest.approx(1.2472191)
    assert (metrics["generate/avg_tokens_non_zero_rewards"], metrics["generate/avg_tokens_zero_rewards"]) == (
        2,
        4,
    )


def test_assistant_tokens_have_skyrls_values():
    # SkyRL's masks are [1,1], [1,0,1,1] and [0]. The last mask belongs to SkyRL's minimal output, which is
    # one end-of-sequence token. Here, the third trajectory has no token.
    members = [
        trajectory("a", 1.0, [turn([1], [2, 3])]),
        trajectory("a", 0.0, [turn([1], [2]), turn([1, 2, 9], [3, 4])]),
        trajectory("a", -1.0, [], stop=StopReason.CONTEXT_LENGTH),
    ]
    metrics = group_metrics([TrajectoryGroup(task=task("a"), trajectories=members)], group_size=3)
    assert metrics["generate/avg_assistant_tokens"] == pytest.approx(1.6666667)
    assert (metrics["generate/min_assistant_tokens"], metrics["generate/max_assistant_tokens"]) == (0, 3)
    assert metrics["generate/tokens_per_turn_mean"] == pytest.approx(1.6666667)
    assert metrics["generate/tokens_per_turn_max"] == 2
    # SkyRL's values are 1 and 4.
    assert (metrics["generate/min_num_tokens"], metrics["generate/max_num_tokens"]) == (0, 4)
    assert metrics["generate/batch_num_seq"] == 3


@pytest.mark.seed_behaviour(67)
def test_an_empty_batch_gives_six_zeros_and_a_warning(caplog):
    metrics = token_metrics([], [])
    names = [
        "min_num_tokens",
        "max_num_tokens",
        "avg_num_tokens",
        "std_num_tokens",
        "avg_tokens_non_zero_rewards",
        "avg_tokens_zero_rewards",
    ]
    assert metrics == {f"generate/{name}": 0.0 for name in names}
    assert "no trajectory to measure" in caplog.text


def test_response_tokens_after_a_rewritten_history_are_added():
    turns = [turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6]), turn([1, 9, 9, 9], [7, 8])]
    assert num_response_tokens(trajectory(turns=turns)) == (2 + 1 + 1) + 2


def test_failed_starts_and_timeouts_are_counted():
    timed_out = trajectory("a", 0, [turn([1], [2])], stop=StopReason.TIMEOUT)
    failures = [failure(kind=FailureKind.ENV_INIT_FAILED), failure(kind=FailureKind.TIMEOUT)]
    metrics = group_metrics(
        [TrajectoryGroup(task=task("a"), trajectories=[timed_out], failures=failures)], group_size=3
    )
    assert (metrics["trials/failed/env_init_failed"], metrics["generate/trajectory_timeouts"]) == (1, 2)
    assert (metrics["trials/total"], metrics["trials/graded"], metrics["trials/ungraded"]) == (3, 1, 2)
    assert metrics["env/all/stop_reason/timeout"] == 1


def test_batch_metrics_describe_the_input_of_the_update():
    def example(advantage, reward, too_long=0):
        return Example(
            trajectory=trajectory(reward=reward), advantage=advantage, sequences=[], num_too_long=too_long
        )

    metrics = batch_metrics([[example(0.5, 1.0), example(-1.5, 0.0, too_long=1)]], Counter())
    assert (metrics["advantage/mean"], metrics["advantage/abs_mean"]) == (-0.5, 1.0)
    assert (metrics["loss/avg_final_rewards"], metrics["batch/truncated_overlong"]) == (0.5, 1)


@pytest.mark.parametrize(("rewards", "variance"), [((1, 0, 0, 0), 0.1875), ((1, 1, 0, 0), 0.25), ((1,), 0.0)])
@pytest.mark.seed_behaviour(151)
def test_variance_is_largest_when_half_succeed(rewards, variance):
    assert group_metrics([group("a", *rewards)], group_size=4)["reward/variance_per_prompt"] == variance


def test_shares_of_mixed_and_constant_groups_add_up_to_1():
    metrics = group_metrics(FOUR_GROUPS, group_size=4)
    shares = [metrics[f"env/all/by_group/frac_{kind}"] for kind in ("mixed", "all_good", "all_bad")]
    assert shares == [0.5, 0.25, 0.25]


def test_rewards_that_differ_by_rounding_give_no_signal():
    groups = [group("a", 0.1, 0.1, 0.1), group("b", 0.3, 0.1 + 0.2), group("c", 1, 0)]
    metrics = group_metrics(groups, group_size=3)
    assert metrics["reward/signal_ratio"] == metrics["env/all/by_group/frac_mixed"] == 1 / 3
    assert metrics["reward/variance_per_prompt"] == 0.25 / 3
    assert metrics["env/all/by_group/frac_all_bad"] == 2 / 3


def test_graded_zeros_are_counted_by_reason():
    graded_zero = replace(trajectory("a", 0.0), zero_reason=ZeroReason.VERIFIER_TIMEOUT)
    metrics = group_metrics(
        [replace(group("a", 1), trajectories=[graded_zero, trajectory("a", 1.0)])], group_size=2
    )
    counts = {reason: metrics[f"trials/graded_zero/{reason}"] for reason in ZeroReason}
    assert counts == {reason: float(reason is ZeroReason.VERIFIER_TIMEOUT) for reason in ZeroReason}
    assert (metrics["trials/graded"], metrics["env/all/reward/total"]) == (2, 0.5)


def test_failures_are_counted_by_kind_and_change_no_reward():
    metrics = group_metrics(
        [group("a", 1, 0, failures=[failure(kind=FailureKind.SANDBOX)] * 2)], group_size=4
    )
    assert (metrics["trials/failed/sandbox"], metrics["trials/failed/agent"]) == (2, 0)
    assert (metrics["trials/total"], metrics["trials/graded"], metrics["trials/ungraded"]) == (4, 2, 2)
    assert metrics["env/all/reward/total"] == 0.5


def test_a_batch_of_failures_has_counts_and_no_rewards():
    metrics = group_metrics([group("a", failures=[failure()])], group_size=1)
    assert metrics["trials/total"] == 1
    assert not any(name.startswith(("reward/", "env/")) for name in metrics)


def test_lengths_and_stop_reasons_are_measured():
    long = trajectory("a", 1, [turn([1], [2, 3], version=4), turn([1, 2, 3, 4], [5, 6], version=5)])
    short = trajectory("a", 0, [turn([1], [2, 3], version=4)], stop=StopReason.LENGTH)
    metrics = group_metrics([TrajectoryGroup(task=task("a"), trajectories=[long, short])], group_size=2)
    assert metrics["env/all/turns"] == 1.5
    assert (metrics["tokens/sampled"], metrics["tokens/context_max"]) == (6, 6)
    # The response of `long` includes the observed token between its two completions.
    assert (
        metrics["generate/min_num_tokens"],
        metrics["generate/max_num_tokens"],
        metrics["generate/avg_num_tokens"],
    ) == (2, 5, 3.5)
    assert metrics["env/all/stop_reason/length"] == 0.5
    assert (metrics["sampling_client/step_min"], metrics["sampling_client/step_max"]) == (4, 5)


def test_dropped_groups_are_counted_in_an_empty_batch():
    metrics = batch_metrics([], Counter({DropReason.CONSTANT_REWARD: 3}))
    assert metrics["groups/dropped/constant_reward"] == 3
    assert metrics["tokens/trained"] == 0


def test_types_of_held_out_tasks_have_reward_metrics():
    metrics = held_out_metrics([group("copy-01", 1), group("copy-02", 0), group("move-01", 1)], group_size=1)
    assert metrics["test/env/all/reward/total"] == pytest.approx(2 / 3)
    assert (metrics["test/env/copy/reward/total"], metrics["test/env/move/reward/total"]) == (0.5, 1)
    single_task_metrics = held_out_metrics([group("copy-01", 1), group("move-01", 1)], group_size=1)
    assert "test/env/copy/reward/total" not in single_task_metrics


@pytest.mark.parametrize(
    ("task_id", "name"),
    [("count-lines-03", "count-lines"), ("org/copy_7", "copy"), ("hello", "hello"), ("42", "42")],
)
def test_a_task_type_is_an_id_without_its_number(task_id, name):
    assert task_type(task_id) == name


def test_environment_metrics_are_reduced_by_their_names():
    members = [
        replace(
            trajectory(turns=[turn([1], [2])]),
            metrics={"calls": count, "score_max": count, "parse_failures": 0},
        )
        for count in (1, 3)
    ]
    metrics = group_metrics([TrajectoryGroup(task=task("a"), trajectories=members)], group_size=2)
    assert (metrics["environment/calls"], metrics["environment/score_max"]) == (4, 3)
    assert (metrics["env/all/calls"], metrics["env/all/score_max"]) == (2, 2)
    assert metrics["reward/parse_failure_rate"] == 0
    one_failure = replace(members[0], metrics={"parse_failures": 1.0}, turns=[turn([1], [2])] * 3)
    metrics = group_metrics([TrajectoryGroup(task=task("a"), trajectories=[one_failure])], group_size=1)
    assert metrics["reward/parse_failure_rate"] == 1 / 3


def test_an_environment_metric_does_not_replace_the_success_rate():
    metrics = {"success": 0.25, "turns": 9.0, "reward/total": 7.0}
    member = replace(trajectory(turns=[turn([1], [2])], reward=1.0), metrics=metrics)
    groups = [TrajectoryGroup(task=task("a"), trajectories=[member])]
    values = held_out_metrics(groups, group_size=1)
    measured = [values[f"test/env/all/{name}"] for name in ("success", "turns", "reward/total")]
    assert measured == [1.0, 1.0, 1.0] and values["test/environment/success"] == 0.25


def test_a_domain_called_all_does_not_replace_the_success_rate():
    groups = [
        TrajectoryGroup(task=replace(task(name), domain=name), trajectories=[trajectory(name, reward)])
        for name, reward in (("all", 1.0), ("other", 0.0))
    ]
    values = held_out_metrics(groups, group_size=1)
    assert (values["test/env/all/success"], values["test/env/all_/success"]) == (0.5, 1.0)

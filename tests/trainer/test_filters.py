import logging
from dataclasses import replace

import pytest

from src.core.log_setup import set_log_levels
from src.core.trajectory import StopReason, TrajectoryGroup
from src.learning.filters import DropReason, apply_reward_rules, is_trainable, keep_groups, zeroed_metrics
from src.learning.options import FilterOptions
from tests.fakes.trials import failure, task, trajectory, turn


def settings(**changes):
    options = {
        "remove_constant_reward_groups": False,
        "min_group_size": 1,
        "failed_trial_reward": None,
        "apply_overlong_filtering": "off",
    }
    return FilterOptions(**(options | changes))


def group(*rewards, failures=0):
    return TrajectoryGroup(
        task=task("a"),
        trajectories=[trajectory(reward=reward) for reward in rewards],
        failures=[failure()] * failures,
    )


def test_constant_groups_stay_unless_the_filter_is_on():
    groups = [group(1, 1), group(1, 0), group(0, 0)]
    assert keep_groups(groups, settings()) == (groups, {})
    kept, dropped = keep_groups(groups, settings(remove_constant_reward_groups=True))
    assert kept == [groups[1]]
    assert dropped == {DropReason.CONSTANT_REWARD: 2}


def test_rounding_differences_are_constant_rewards():
    kept, dropped = keep_groups(
        [group(0.6667, 0.66670001), group(1)], settings(remove_constant_reward_groups=True)
    )
    assert kept == [group(1)]
    assert dropped == {DropReason.CONSTANT_REWARD: 1}


@pytest.mark.parametrize(
    ("stop", "reward"),
    [
        ("stop", 1),
        ("session_closed", 1),
        ("length", 0),
        ("context_length", 0),
        ("max_turns", 0),
        ("timeout", 0),
        ("failed", 0),
    ],
)
def test_zero_reward_on_non_stop_does_not_mask_the_trajectory(stop, reward):
    # This is case L10 of docs/skyrl-semantics.md.
    turns = [turn([1], [2])]
    before = TrajectoryGroup(
        task=task("a"), trajectories=[trajectory(reward=1, turns=turns, stop=StopReason(stop))]
    )
    [after] = apply_reward_rules([before], settings(zero_reward_on_non_stop=True))
    assert after.rewards == [reward] and after.trajectories[0].turns == turns
    assert is_trainable(after.trajectories[0], settings())
    assert before.rewards == [1]  # metrics use the raw reward


@pytest.mark.seed_behaviour(49, 53, 55, 56)
def test_one_answer_over_the_threshold_zeroes_the_reward(caplog):
    def saying(*lengths):
        # Each completion also contains the end-of-turn token.
        return trajectory(reward=1, turns=[turn([1], [2] * (length + 1)) for length in lengths])

    members = [saying(1000, 1000, 1000), saying(5, 2049), saying(2048)]
    with caplog.at_level(logging.INFO):
        [after] = apply_reward_rules(
            [TrajectoryGroup(task=task("a"), trajectories=members)],
            settings(zero_reward_on_length_threshold=True),
        )
    assert after.rewards == [1, 0, 1]
    assert (
        "Length filtering (individual response): Set 1/3 responses to zero reward (>2048 tokens)"
        in caplog.text
    )
    assert [member.turns for member in after.trajectories] == [member.turns for member in members]
    assert apply_reward_rules([after], settings())[0] is after


@pytest.mark.seed_behaviour(48)
def test_the_length_rule_is_off_by_default_with_a_2048_limit():
    long = TrajectoryGroup(
        task=task("a"), trajectories=[trajectory(reward=1, turns=[turn([1], [2] * 9_999)])]
    )
    assert apply_reward_rules([long], settings())[0].rewards == [1]
    assert settings().max_assistant_response_tokens == 2048


@pytest.mark.seed_behaviour(52)
def test_long_messages_of_tools_and_users_keep_the_reward():
    turns = [turn([1] * 9, [2]), turn([1] * 9 + [2] + [3] * 9, [4])]  # 9 tokens of the user, then 9 of a tool
    messages = [{"role": "user", "content": "u" * 9}, {"role": "assistant", "content": "a"}]
    messages += [{"role": "tool", "content": "t" * 9}, {"role": "assistant", "content": "b"}]
    result = replace(trajectory(reward=1, turns=turns), conversation=messages)
    rules = settings(zero_reward_on_length_threshold=True, max_assistant_response_tokens=4)
    [after] = apply_reward_rules([TrajectoryGroup(task=task("a"), trajectories=[result])], rules)
    assert after.rewards == [1]


def test_a_group_without_a_grade_is_dropped_and_counted():
    assert keep_groups([group(failures=3)], settings()) == ([], {DropReason.UNGRADED: 1})


def test_a_group_that_failures_made_too_small_is_dropped():
    assert keep_groups([group(1, 0, failures=2)], settings(min_group_size=3)) == (
        [],
        {DropReason.TOO_SMALL: 1},
    )


def test_failures_leave_the_group_or_get_a_reward():
    [kept], _ = keep_groups([group(1, failures=2)], settings())
    assert kept.rewards == [1]
    [rewarded] = apply_reward_rules([group(1, failures=2)], settings(failed_trial_reward=0))
    assert rewarded.rewards == [1, 0, 0]
    assert [member.turns for member in rewarded.trajectories[1:]] == [[], []]


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        (StopReason.STOP, True),
        (StopReason.SESSION_CLOSED, True),
        (StopReason.LENGTH, False),
        (StopReason.CONTEXT_LENGTH, False),
        (StopReason.MAX_TURNS, False),
        (StopReason.AGENT_TIMEOUT, False),
    ],
)
def test_overlong_filtering_masks_trials_that_a_limit_ended(stop, kept):
    assert is_trainable(trajectory(stop=stop), settings(apply_overlong_filtering="stop_reason")) is kept
    assert is_trainable(trajectory(stop=stop), settings())


def test_the_eos_rule_uses_only_the_end_of_the_last_answer():
    eos = settings(apply_overlong_filtering="eos")
    ended, cut = turn([1], [2]), replace(turn([1], [2]), stop_reason=StopReason.LENGTH)
    # This is case L9 of docs/skyrl-semantics.md.
    assert is_trainable(trajectory(turns=[cut, ended], stop=StopReason.CONTEXT_LENGTH), eos)
    assert not is_trainable(trajectory(turns=[ended, cut], stop=StopReason.MAX_TURNS), eos)
    assert not is_trainable(trajectory(turns=[]), eos)


@pytest.mark.seed_behaviour(47, 50)
def test_zeroed_rewards_are_counted_by_rule():
    long = trajectory(reward=1, turns=[turn([1], [2] * 9)])
    cut = trajectory(reward=1, turns=[turn([1], [2])], stop=StopReason.MAX_TURNS)
    # A prompt is not a response, so its length has no effect.
    long_prompt = trajectory(reward=1, turns=[turn([1] * 9, [2])])
    members = [long, cut, replace(cut, reward=0.0), long_prompt]
    groups = [TrajectoryGroup(task=task("a"), trajectories=members)]
    both = settings(
        zero_reward_on_non_stop=True, zero_reward_on_length_threshold=True, max_assistant_response_tokens=4
    )
    assert zeroed_metrics(groups, both) == {"reward/zeroed_by_non_stop": 1, "reward/zeroed_by_length": 1}
    assert set(zeroed_metrics(groups, settings()).values()) == {0}
    # Both rules apply to this answer, and only the first one counts it. Reward plus bonus is above 0, so the
    # answer counts as set to 0.
    long_and_cut = replace(long, stop_reason=StopReason.LENGTH, reward=0.0, bonus=0.5)
    group = TrajectoryGroup(task=task("a"), trajectories=[long_and_cut])
    assert zeroed_metrics([group], both) == {"reward/zeroed_by_non_stop": 1, "reward/zeroed_by_length": 0}


@pytest.mark.seed_behaviour(54)
def test_debug_length_filtering_logs_every_decision(monkeypatch, caplog):
    filtering = logging.getLogger("src.learning.filters")
    monkeypatch.setattr(filtering, "level", filtering.level)
    monkeypatch.setenv("DEBUG_LENGTH_FILTERING", "1")
    set_log_levels()
    answers = TrajectoryGroup(task=task("a"), trajectories=[trajectory("a", 1, [turn([1], [2] * 9)])])
    apply_reward_rules(
        [answers], settings(zero_reward_on_length_threshold=True, max_assistant_response_tokens=4)
    )
    assert "a: the longest answer has 8 tokens, 4 are allowed" in caplog.text


def test_a_judges_bonus_is_part_of_the_training_reward():
    members = [replace(trajectory(reward=1), bonus=0.5), trajectory(reward=0)]
    [group] = apply_reward_rules([TrajectoryGroup(task=task("a"), trajectories=members)], settings())
    assert group.rewards == [1.5, 0.0] and members[0].reward == 1


def test_filters_apply_no_reward_rules():
    cut = trajectory(reward=1, turns=[turn([1], [2])], stop=StopReason.MAX_TURNS)
    groups = [TrajectoryGroup(task=task("a"), trajectories=[cut], failures=[failure()])]
    assert keep_groups(groups, settings(zero_reward_on_non_stop=True, failed_trial_reward=0)) == (groups, {})

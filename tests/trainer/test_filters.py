import pytest

from src.filters import DropReason, FilterSettings, keep_groups, trains
from src.trajectory import StopReason, TrajectoryGroup
from tests.fakes.trials import failure, task, trajectory


def settings(**changes):
    options = {
        "remove_constant_reward_groups": False,
        "min_group_size": 1,
        "failed_trial_reward": None,
        "apply_overlong_filtering": "off",
    }
    return FilterSettings(**(options | changes))


def group(*rewards, failures=0):
    return TrajectoryGroup(task=task("a"), trajectories=[trajectory(reward=reward) for reward in rewards], failures=[failure()] * failures)


def test_constant_groups_stay_unless_they_are_to_go():
    groups = [group(1, 1), group(1, 0), group(0, 0)]
    assert keep_groups(groups, settings()) == (groups, {})
    kept, dropped = keep_groups(groups, settings(remove_constant_reward_groups=True))
    assert kept == [groups[1]]
    assert dropped == {DropReason.CONSTANT_REWARD: 2}


def test_a_group_without_a_grade_is_dropped_and_counted():
    assert keep_groups([group(failures=3)], settings()) == ([], {DropReason.UNGRADED: 1})


def test_a_group_that_failures_made_too_small_is_dropped():
    assert keep_groups([group(1, 0, failures=2)], settings(min_group_size=3)) == ([], {DropReason.TOO_SMALL: 1})


def test_failures_leave_the_group_or_count_as_the_reward_asked_for():
    [kept], _ = keep_groups([group(1, failures=2)], settings())
    assert kept.rewards == [1]
    [rewarded], _ = keep_groups([group(1, failures=2)], settings(failed_trial_reward=0))
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
def test_overlong_filtering_masks_what_a_limit_ended(stop, kept):
    assert trains(trajectory(stop=stop), settings(apply_overlong_filtering="stop_reason")) is kept
    assert trains(trajectory(stop=stop), settings())

from dataclasses import asdict

from src.core.trajectory import FailureKind, TrajectoryGroup
from src.rollouts.options import FaultOptions
from src.rollouts.task_quarantine import FaultState, diagnosis, from_record
from tests.fakes.trials import failure, task, trajectory

SETTINGS = FaultOptions(quarantine_after=2, max_failure_rate=0.5)


def group(name, *, graded=0, failed=0, kind=FailureKind.SANDBOX):
    return TrajectoryGroup(
        task=task(name),
        trajectories=[trajectory(name)] * graded,
        failures=[failure(name, kind, "no tmux\ndetails")] * failed,
    )


def test_groups_in_a_row_without_a_grade_quarantine_a_task():
    after_one = FaultState().after([group("a", failed=2), group("b", failed=1, graded=1)], SETTINGS)
    assert after_one.strikes == {"a": 1} and not after_one.quarantined
    assert after_one.after([group("a", graded=1, failed=1)], SETTINGS).strikes == {}
    after_two = after_one.after([group("a", failed=2, kind=FailureKind.VERIFIER)], SETTINGS)
    assert after_two.quarantined == {"a": "verifier"}
    assert not after_one.after(
        [group("a", failed=2)], FaultOptions(quarantine_after=0, max_failure_rate=1)
    ).quarantined


def test_failures_of_the_agent_quarantine_no_task():
    state = FaultState()
    for _ in range(3):
        state = state.after([group("a", failed=2, kind=FailureKind.AGENT)], SETTINGS)
    assert not state.quarantined and not state.strikes


def test_the_failure_rate_needs_four_groups_and_drops_old_ones():
    bad, good = group("a", failed=4), group("b", graded=4)
    assert not FaultState().after([bad, bad, bad], SETTINGS).has_too_many_failures(SETTINGS)
    # A failure rate equal to max_failure_rate is allowed.
    assert not FaultState().after([bad, bad, good, good], SETTINGS).has_too_many_failures(SETTINGS)
    too_many = FaultState().after([good, bad, bad, bad], SETTINGS)
    assert too_many.has_too_many_failures(SETTINGS)
    assert not too_many.after([good, good], SETTINGS).has_too_many_failures(SETTINGS)
    assert (
        not FaultState()
        .after([bad] * 4, SETTINGS)
        .has_too_many_failures(FaultOptions(quarantine_after=0, max_failure_rate=1))
    )


def test_the_diagnosis_names_the_causes_with_an_example():
    groups = [
        group("a", failed=3),
        group("b", failed=2, kind=FailureKind.VERIFIER),
        group("c", failed=1),
        group("d", graded=1),
    ]
    assert diagnosis(FaultState().after(groups, SETTINGS), groups, SETTINGS) == (
        "6 of the last 7 trials could not be graded, more than max_failure_rate=0.5: "
        "4 by sandbox, 2 by verifier; e.g. no tmux; "
        "fix the cause and resume"
    )


def test_a_later_graded_group_of_a_batch_prevents_quarantine():
    failed, graded = group("a", failed=2), group("a", graded=1)
    once = FaultOptions(quarantine_after=1, max_failure_rate=0.5)
    assert not FaultState().after([failed, graded], once).quarantined
    state = FaultState().after([graded, failed], once)
    assert state.quarantined == {"a": "sandbox"} and state.strikes == {"a": 1}


def test_the_state_is_restored_from_its_record():
    state = (
        FaultState()
        .after([group("a", failed=2), group("b", graded=1)], SETTINGS)
        .after([group("a", failed=1)], SETTINGS)
    )
    assert from_record(asdict(state)) == FaultState(
        strikes={"a": 2}, quarantined={"a": "sandbox"}, recent=list(state.recent)
    )
    assert from_record({}) == FaultState(recent=[])

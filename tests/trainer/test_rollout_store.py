import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from src.core.trajectory import FailureKind, StopReason, Trajectory, ZeroReason
from src.records.journal import Journal, RolloutKey
from src.records.rollout_store import (
    FinishedRollout,
    FinishedRollouts,
    any_graded,
    decoded,
    encoded,
    packed,
    unpacked,
)
from tests.fakes.trials import failure, trajectory, turn

STEP = RolloutKey(purpose="step", step=1, task="a", member=2)


def graded():
    result = trajectory("a", 1.0, [turn([1], [2])])
    return FinishedRollout(result=replace(result, member=STEP.member, seed=5), seed=5, attempts=1)


def conversation(rng):
    """Draw turns that mostly extend one another, with rewritten histories and side conversations."""
    turns, context = [], [1, 2]
    for version in range(rng.randrange(1, 6)):
        if context and rng.random() < 0.2:
            context = context[: rng.randrange(len(context))]
        if rng.random() < 0.3:
            context = [rng.randrange(9) for _ in range(3)]
        completion = [rng.randrange(9) for _ in range(rng.randrange(1, 4))]
        turns.append(turn(list(context), completion, logprob=-rng.random(), version=version))
        context = [*context, *completion, *(rng.randrange(9) for _ in range(rng.randrange(3)))]
    return turns


def test_every_token_and_logprob_is_restored_exactly():
    for seed in range(200):
        turns = conversation(random.Random(seed))
        result = Trajectory(
            task_id="a",
            turns=turns,
            reward=1 / 3,
            stop_reason=StopReason.MAX_TURNS,
            trial_name="t",
            metrics={"b": 0.1, "a": 2.0},
        )
        restored = decoded(json.loads(json.dumps(encoded(result))))
        assert restored == result and isinstance(restored, Trajectory)
        assert list(restored.metrics) == ["b", "a"] and restored.stop_reason is StopReason.MAX_TURNS
    lost = failure("a", FailureKind.VERIFIER)
    assert decoded(json.loads(json.dumps(encoded(lost)))) == lost
    graded_zero = Trajectory(
        task_id="a", turns=[], reward=0.0, stop_reason=StopReason.STOP, zero_reason=ZeroReason.NO_REWARD
    )
    assert decoded(json.loads(json.dumps(encoded(graded_zero)))) == graded_zero


def test_a_stored_rollout_keeps_its_reason_calls_member_and_seed(tmp_path):
    result = Trajectory(
        task_id="a",
        turns=[],
        reward=0.0,
        stop_reason=StopReason.STOP,
        zero_reason=ZeroReason.NO_REWARD,
        conversation=[{"role": "assistant", "content": "x"}],
        tool_fields={0: {"content": "", "tool_calls": [{"id": "call_1"}]}},
        member=2,
        seed=7,
    )
    FinishedRollouts(tmp_path, Journal(tmp_path)).add(
        STEP, FinishedRollout(result=result, seed=7, attempts=1)
    )
    loaded = FinishedRollouts(tmp_path, Journal(tmp_path)).load("step", 1)
    assert loaded[STEP].result == result


@pytest.mark.parametrize(("num_kept", "factor"), [(100, 6), (50, 7)], ids=["growing", "without its thinking"])
def test_a_conversation_is_written_compactly(num_kept, factor):
    rng = random.Random(0)
    turns, context = [], []
    for _ in range(50):
        context += [rng.randrange(150_000) for _ in range(300)]
        completion = [rng.randrange(150_000) for _ in range(100)]
        turns.append(turn(list(context), completion, logprob=float(np.float32(-rng.random()))))
        context += completion[-num_kept:]
    result = Trajectory(task_id="a", turns=turns, reward=0.0, stop_reason=StopReason.STOP)
    text = json.dumps(encoded(result))
    assert len(text) < factor * len(context) and decoded(json.loads(text)) == result


def test_numbers_are_packed_without_loss():
    single = [float(np.float32(-0.1)), -0.0, 0.0, -0.5]
    for numbers in ([], [1, 2**31 - 1], [2**31], single, [0.1, -0.5], [float("-inf")]):
        assert unpacked(packed(numbers)) == numbers
    assert packed(single).startswith("<f4:") and packed([0.1]).startswith("<f8:")
    assert math.isnan(unpacked(packed([math.nan]))[0])


def test_failures_are_final_once_their_step_was_trained(tmp_path):
    journal = Journal(tmp_path)
    finished = FinishedRollouts(tmp_path, journal)
    finished.add(STEP, FinishedRollout(result=failure("a"), seed=5, attempts=3))
    assert finished.load("step", 1) == {} and finished.load("eval", 1) == {} and not any_graded(tmp_path)
    journal.batch_fixed(1, [(STEP.step, STEP.task)])
    journal.trained(1, groups=[], state={})
    assert finished.load("step", 1)[STEP].attempts == 3


def test_a_torn_line_is_no_finished_rollout(tmp_path):
    rollout = graded()
    FinishedRollouts(tmp_path, Journal(tmp_path)).add(STEP, rollout)
    path = tmp_path / "finished" / "step_000001.jsonl"
    path.write_text(path.read_text()[:-20])
    again = FinishedRollouts(tmp_path, Journal(tmp_path))
    assert again.load("step", 1) == {}
    again.add(STEP, rollout)
    assert again.load("step", 1) == {STEP: rollout} and any_graded(tmp_path)


@pytest.mark.seed_behaviour(23)
def test_the_reward_of_a_trial_is_on_disk_as_soon_as_it_ends(tmp_path):
    rollout = graded()
    FinishedRollouts(tmp_path, Journal(tmp_path)).add(STEP, rollout)
    [file] = (tmp_path / "finished").glob("*.jsonl")
    assert isinstance(rollout.result, Trajectory)
    assert json.loads(file.read_text())["result"]["reward"] == rollout.result.reward
    assert not (tmp_path / "rollouts").exists()


def test_a_rollout_is_written_before_its_journal_line(tmp_path, monkeypatch):
    journal, loaded = Journal(tmp_path), []
    finished = FinishedRollouts(tmp_path, journal)
    monkeypatch.setattr(journal, "finished", lambda place, outcome: loaded.append(finished.load("step", 1)))
    rollout = graded()
    finished.add(STEP, rollout)
    assert loaded == [{STEP: rollout}]


def test_job_directory_keeps_only_directories_of_finished_trials(tmp_path):
    finished = FinishedRollouts(tmp_path, Journal(tmp_path))
    result = Trajectory(
        task_id="a", turns=[turn([1], [2])], reward=1.0, stop_reason=StopReason.STOP, trial_name="whole"
    )
    finished.add(STEP, FinishedRollout(result=result, seed=5, attempts=1))
    for name in ("whole", "half"):
        (tmp_path / "jobs" / "step_000001" / name).mkdir(parents=True)
    assert [directory.name for directory in finished.job_directory("step", 1).iterdir()] == ["whole"]


def test_any_json_of_an_agent_can_be_stored_and_read_again(tmp_path):
    nested = json.loads("[" * 300 + "]" * 300)
    call = {"function": {"name": "f", "arguments": {"text": "\ud83d", "nested": nested}}}
    result = replace(trajectory("a", 1.0, [turn([1], [2])]), tool_fields={0: {"tool_calls": [call]}})
    finished = FinishedRollouts(tmp_path, Journal(tmp_path))
    finished.add(STEP, FinishedRollout(result=result, seed=5, attempts=1))
    restored = finished.load("step", 1)[STEP].result
    assert isinstance(restored, Trajectory) and restored.turns == result.turns
    assert json.dumps(restored.tool_fields[0]).startswith(
        '{"tool_calls": [{"function": {"name": "f", "arguments": {"text": "?", "nested": [[['
    )

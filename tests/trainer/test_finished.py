import json
import random

from src.finished import FinishedRollout, FinishedRollouts, any_graded, decoded, encoded
from src.journal import Journal, Place
from src.trajectory import FailureKind, StopReason, Trajectory
from tests.fakes.trials import failure, turn

STEP = Place(purpose="step", step=1, task="a", member=2)


def conversation(draw):
    """Turns that mostly extend one another, as a rewritten history and a side conversation would leave them."""
    turns, context = [], [1, 2]
    for version in range(draw.randrange(1, 6)):
        if draw.random() < 0.3:
            context = [draw.randrange(9) for _ in range(3)]
        completion = [draw.randrange(9) for _ in range(draw.randrange(1, 4))]
        turns.append(turn(list(context), completion, logprob=-draw.random(), version=version))
        context = [*context, *completion, *(draw.randrange(9) for _ in range(draw.randrange(3)))]
    return turns


def test_every_token_and_logprob_comes_back_as_it_was():
    for seed in range(200):
        turns = conversation(random.Random(seed))
        played = Trajectory(
            task_id="a", turns=turns, reward=1 / 3, stop_reason=StopReason.MAX_TURNS, trial_name="t", metrics={"b": 0.1, "a": 2.0}
        )
        back = decoded(json.loads(json.dumps(encoded(played))))
        assert back == played and isinstance(back, Trajectory)
        assert list(back.metrics) == ["b", "a"] and back.stop_reason is StopReason.MAX_TURNS
    lost = failure("a", FailureKind.VERIFIER)
    assert decoded(json.loads(json.dumps(encoded(lost)))) == lost


def test_a_growing_conversation_is_written_once():
    turns = [turn(list(range(length)), [length]) for length in range(10, 500)]
    played = Trajectory(task_id="a", turns=turns, reward=0.0, stop_reason=StopReason.STOP)
    assert sum(len(values["prompt_ids"]) for values in encoded(played)["turns"]) == 10
    assert decoded(encoded(played)) == played


def test_failures_stand_only_once_their_step_was_trained(tmp_path):
    journal = Journal(tmp_path)
    finished = FinishedRollouts(tmp_path, journal)
    finished.add(STEP, FinishedRollout(result=failure("a"), seed=5, attempts=3))
    assert finished.load("step", 1) == {} and finished.load("eval", 1) == {} and not any_graded(tmp_path)
    journal.trained(1, tasks=[], state={})
    assert finished.load("step", 1)[STEP].attempts == 3


def test_a_rollout_torn_by_a_crash_is_not_finished_and_does_not_spoil_the_next(tmp_path):
    rollout = FinishedRollout(
        result=Trajectory(task_id="a", turns=[turn([1], [2])], reward=1.0, stop_reason=StopReason.STOP), seed=5, attempts=1
    )
    FinishedRollouts(tmp_path, Journal(tmp_path)).add(STEP, rollout)
    path = tmp_path / "finished" / "step_000001.jsonl"
    path.write_text(path.read_text()[:-20])
    again = FinishedRollouts(tmp_path, Journal(tmp_path))
    assert again.load("step", 1) == {}
    again.add(STEP, rollout)
    assert again.load("step", 1) == {STEP: rollout} and any_graded(tmp_path)

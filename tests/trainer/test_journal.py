import os

import pytest

from src.core.errors import ConfigError
from src.records.journal import JOURNAL, Journal, RolloutKey, RunState
from tests.fakes.run import groups_trained
from tests.fakes.run_files import records

KEY = RolloutKey(purpose="step", step=1, task="a", member=0)


@pytest.mark.seed_behaviour(35)
def test_a_new_journal_restores_the_state_of_its_predecessor(tmp_path):
    first = Journal(tmp_path)
    first.started(resumed_from=0)
    assert first.rollout_started(KEY, policy_version=0, seed=7) == 1
    assert first.rollout_started(KEY, policy_version=0, seed=7) == 2
    first.finished(KEY, "sandbox")
    assert Journal(tmp_path).rollout_started(KEY, policy_version=0, seed=7) == 3
    first.finished(KEY, "graded")
    first.batch_fixed(1, [(1, "a")])
    assert not first.is_settled(KEY)
    first.trained(1, groups=[(1, "a")], state={"strikes": {"b": 1}})
    first.evaluated(0)
    second = Journal(tmp_path)
    assert second.is_settled(KEY) and second.is_evaluated(0) and not second.is_evaluated(1)
    assert second.states_until(1) == [{"strikes": {"b": 1}}] and second.states_until(0) == []
    # In `first`, `progress` counts the graded rollout and step 1. In `second`, which reads both from the
    # file, `progress` counts only the rollout, even after step 1 is trained again.
    assert first.progress == 2 and second.progress == 1
    second.trained(1, groups=[(1, "a")], state={})
    assert second.progress == 1
    second.ended(RunState.DONE)
    rollout_started = records(tmp_path / JOURNAL)[1]
    del rollout_started["at"]
    place = {"purpose": "step", "step": 1, "task": "a", "member": 0}
    assert rollout_started == {
        "event": "rollout_started",
        **place,
        "attempt": 1,
        "policy_version": 0,
        "seed": 7,
    }
    assert records(tmp_path / JOURNAL)[-1]["state"] == "done"


def test_steps_after_the_resumed_checkpoint_are_not_trained(tmp_path):
    journal = Journal(tmp_path)
    journal.started(resumed_from=0)
    for step in (1, 2, 3):
        journal.trained(step, groups=[(step, "a"), (step, "b")], state={})
    journal.started(resumed_from=1)
    assert sorted(groups_trained(tmp_path)) == [(1, "a"), (1, "b")]
    journal.trained(2, groups=[(2, "a")], state={})
    assert groups_trained(tmp_path) == {(1, "a"): 1, (1, "b"): 1, (2, "a"): 1}
    journal.trained(2, groups=[(2, "a")], state={})
    assert groups_trained(tmp_path)[2, "a"] == 2


def test_a_run_whose_tasks_have_changed_is_refused(tmp_path):
    Journal(tmp_path).batch_fixed(3, [(3, "a"), (3, "b")])
    again = Journal(tmp_path)
    again.batch_fixed(3, [(3, "a"), (3, "b")])
    with pytest.raises(
        ConfigError, match="step 3 of this run has the tasks a, b in the journal, and a, c in the present"
    ):
        again.batch_fixed(3, [(3, "a"), (3, "c")])
    with pytest.raises(ConfigError, match="has the tasks a, b in the journal, and b, a in the present"):
        again.batch_fixed(3, [(3, "b"), (3, "a")])
    assert sum(record["event"] == "batch_fixed" for record in records(tmp_path / JOURNAL)) == 1


def test_a_result_is_settled_by_the_step_that_used_it(tmp_path):
    journal, late = Journal(tmp_path), RolloutKey(purpose="step", step=1, task="late", member=0)
    journal.batch_fixed(1, [(1, "a")])
    journal.batch_fixed(2, [(1, "late")])
    journal.trained(1, groups=[(1, "a")], state={})
    assert journal.is_settled(KEY) and not journal.is_settled(late)
    journal.trained(2, groups=[(1, "late")], state={})
    assert journal.is_settled(late)
    evaluated = RolloutKey(purpose="eval", step=2, task="a", member=0)
    assert not journal.is_settled(evaluated)
    journal.evaluated(2)
    assert journal.is_settled(evaluated)


def test_a_copied_group_counts_as_trained_once(tmp_path):
    Journal(tmp_path).trained(1, groups=[(1, "a"), (1, "b"), (1, "a")], state={})
    assert groups_trained(tmp_path) == {(1, "a"): 1, (1, "b"): 1}


def test_a_line_torn_by_a_crash_does_not_damage_the_next(tmp_path):
    Journal(tmp_path).evaluated(1)
    path = tmp_path / JOURNAL
    path.write_text(path.read_text() + '{"event": "trai')
    Journal(tmp_path).evaluated(2)
    assert [record["step"] for record in records(path)] == [1, 2]


def test_only_rollout_events_are_not_synced_to_disk(tmp_path, monkeypatch):
    journal, synced, fsync = Journal(tmp_path), [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(fsync(descriptor)))
    journal.rollout_started(KEY, policy_version=0, seed=7)
    journal.finished(KEY, "graded")
    assert not synced
    journal.batch_fixed(1, [(1, "a")])
    journal.trained(1, groups=[(1, "a")], state={})
    journal.checkpointed(1, "tinker://a/weights/1")
    assert len(synced) == 3

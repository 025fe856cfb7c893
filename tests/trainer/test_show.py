"""Tests `agent-trainer show`: the steps, trials and single rollouts of a run."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from src.analyze import show
from src.core.errors import ConfigError
from src.core.trajectory import FailureKind, TrajectoryGroup, ZeroReason
from src.records.journal import Journal, RolloutKey
from src.records.rollout_log import record_groups
from src.records.rollout_store import FinishedRollout, FinishedRollouts
from tests.fakes.trials import failure, task, trajectory, turn


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two trials of task `a` and a failure of task `b` in step 1, and an evaluation of `a`."""
    (tmp_path / "config.json").write_text("{}")
    solved = replace(
        trajectory("a", 1.0, [turn([1, 2], [7, 8], logprob=-0.25)]),
        trial_name="a__1",
        conversation=[{"role": "user", "content": "Say [hello]."}],
    )
    faulty = replace(
        trajectory("a", 0.0, [turn([1], [9])]),
        trial_name="a__2",
        zero_reason=ZeroReason.ENV_ERROR,
        zero_detail="KeyError: 'board' (my_env.py:7 in step)",
    )
    lost = replace(failure("b", FailureKind.VERIFIER), message="no [reward]\nmore", trial_name="b__1")
    groups = [
        TrajectoryGroup(task=task("a"), trajectories=[solved, faulty]),
        TrajectoryGroup(task=task("b"), trajectories=[], failures=[lost]),
    ]
    rollouts = FinishedRollouts(tmp_path, Journal(tmp_path))
    for member, result in enumerate((solved, faulty, lost)):
        key = RolloutKey(purpose="step", step=1, task=result.task_id, member=member)
        rollouts.add(key, FinishedRollout(result=result, seed=3, attempts=1))
    renamed = [replace(result, trial_name=f"a__e{member}") for member, result in enumerate((solved, faulty))]
    evaluated = TrajectoryGroup(task=task("a"), trajectories=renamed)
    record_groups(tmp_path / "rollouts" / "step_000001.jsonl", groups, {("a", "a__1"): 0.5})
    record_groups(tmp_path / "rollouts" / "eval_000001.jsonl", [evaluated], {})
    return tmp_path


def printed(*arguments: object, width: int = 150) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    for content in show.shown(*map(str, arguments)):
        console.print(content)
    return console.export_text()


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_run_is_shown_with_a_row_per_step_and_evaluation(run: Path):
    assert rows(printed(run))[1:] == [
        ["eval_000001", "1", "2", "0.500", "1/2", "3"],
        ["step_000001", "2", "3", "0.500", "1/2", "1", "1", "3"],
    ]


def test_names_are_whole_on_a_narrow_terminal(run: Path):
    assert "eval_000001" in printed(run, width=40) and "step_000001" in printed(run, width=40)


@pytest.mark.parametrize(
    ("selection", "names"),
    [("1", ["a__e0", "a__e1", "a__1", "a__2", "b__1"]), ("eval_000001", ["a__e0", "a__e1"]), ("b", ["b__1"])],
)
def test_steps_and_tasks_select_trials(run: Path, selection, names):
    assert [row[1] for row in rows(printed(run, selection))[1:]] == names


def test_each_trial_has_its_advantage_and_outcome(run: Path):
    solved, faulty, lost = printed(run, "step_000001").splitlines()[1:]
    assert solved.split()[2:] == ["1", "0.5", "1", "2", "stop"]
    assert faulty.rstrip().endswith("env_error: KeyError: 'board' (my_env.py:7 in step)")
    assert lost.rstrip().endswith("not graded, verifier: no [reward]")


def test_a_trial_shows_its_conversation_tokens_and_logprobs(run: Path):
    text = printed(run, "a__1")
    assert "a__1: task a, step 1, member 0" in text and "reward 1, ended by stop, advantage 0.5" in text
    assert "user: Say [hello]." in text
    assert "turn 1: 2 prompt tokens, 2 sampled tokens (stop)" in text and "logprob mean -0.250" in text
    assert "7:-0.250 8:-0.250" in text
    assert "not graded, verifier: no [reward]\nmore" in printed(run, "b__1")


def test_a_trial_of_each_evaluation_can_be_shown(run: Path):
    rollouts = FinishedRollouts(run, Journal(run))
    for step, reward in ((0, 0.25), (3, 0.75)):
        result = replace(trajectory("a", reward, [turn([1], [7])]), trial_name="a__e")
        key = RolloutKey(purpose="eval", step=step, task="a", member=0)
        rollouts.add(key, FinishedRollout(result=result, seed=3, attempts=1))
        record_groups(
            run / "rollouts" / f"eval_{step:06d}.jsonl",
            [TrajectoryGroup(task=task("a"), trajectories=[result])],
            {("a", "a__e"): float(step)},
        )
    latest = printed(run, "a__e")
    assert "a__e: task a, eval 3, member 0" in latest and "reward 0.75" in latest and "advantage 3" in latest
    advice = f"also in eval_000000; to print one of them: agent-trainer show {run} a__e eval_000000"
    assert f"trials of this name are {advice}" in " ".join(latest.split())
    assert "advantage 0.5" in printed(run, "a__1", "step_000001")
    for selection in ("eval_000000", "0"):
        first = printed(run, "a__e", selection)
        assert "reward 0.25" in first and "advantage 0" in first and "trials of this name" not in first
    assert [row[:2] for row in rows(printed(run, "a", "eval_000003"))[1:]] == [["eval_000003", "a__e"]]


def test_a_trial_that_a_later_step_trained_on_has_its_advantage(run: Path):
    late = replace(trajectory("a", 1.0, [turn([1], [7])]), trial_name="a__late")
    key = RolloutKey(purpose="step", step=3, task="a", member=0)
    FinishedRollouts(run, Journal(run)).add(key, FinishedRollout(result=late, seed=3, attempts=1))
    group = TrajectoryGroup(task=task("a"), trajectories=[late])
    record_groups(run / "rollouts" / "step_000004.jsonl", [group], {("a", "a__late"): 0.25})
    for arguments in ((run, "a__late"), (run, "a__late", 4)):
        text = printed(*arguments)
        assert "task a, step 3, member 0, trained in step_000004" in text and "advantage 0.25" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "c"], "has no step, task or trial 'c'; agent-trainer show"),
        (["RUN/none"], "has no config.json; give the directory of a run"),
        (["RUN", "a__1", "eval_000001"], "has no step, task or trial 'a__1' in eval_000001; agent-trainer"),
        (["RUN/sft"], "sft is a run of supervised fine-tuning and has no trials; read its metrics.jsonl"),
        ([], "show takes 1 to 3 arguments, not 0; write show RUN"),
    ],
)
def test_a_mistake_gives_a_one_line_error(run: Path, capsys: pytest.CaptureFixture[str], arguments, message):
    (run / "sft").mkdir()
    (run / "sft" / "config.json").write_text('{"train_on": "all_tokens"}')
    assert show.main([argument.replace("RUN", str(run)) for argument in arguments]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1


def test_a_failure_with_an_unpaired_surrogate_is_shown(run: Path):
    lost = replace(failure("c"), message="no file a\udcff", trial_name="c__1")
    group = TrajectoryGroup(task=task("c"), trajectories=[], failures=[lost])
    record_groups(run / "rollouts" / "step_000002.jsonl", [group], {})
    assert "no file a?" in printed(run, "c")


def test_names_and_messages_are_not_parsed_as_markup(run: Path):
    lost = replace(failure("x[/red]"), message="KeyError: \x1b[2J':smile:'", trial_name="x[/red]__1")
    group = TrajectoryGroup(task=task("x[/red]"), trajectories=[], failures=[lost])
    record_groups(run / "rollouts" / "step_000002.jsonl", [group], {})
    (line,) = printed(run, "x[/red]").splitlines()[1:]
    assert "x[/red]__1" in line and line.rstrip().endswith("KeyError: [2J':smile:'")


def test_a_trial_with_any_name_can_be_shown(run: Path):
    name = 'zähle-"x"__4f43e7b3'
    key = RolloutKey(purpose="step", step=1, task="zähle", member=0)
    result = replace(trajectory("zähle", 0.25, [turn([1], [7])]), trial_name=name)
    FinishedRollouts(run, Journal(run)).add(key, FinishedRollout(result=result, seed=3, attempts=1))
    assert "reward 0.25" in printed(run, name)


def test_a_suggested_command_is_quoted_for_the_shell(run: Path):
    directory = run.rename(run.with_name("my run"))
    with pytest.raises(
        ConfigError, match=re.escape(f"agent-trainer show '{directory}' lists its finished steps")
    ):
        printed(directory, "c")

import errno
import io
import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from src.cli.console import Display, message_text
from src.core.trajectory import FailureKind, TrajectoryGroup, ZeroReason
from src.evaluate.evaluation import Evaluation, section_of
from src.loop.outcome import Success, last_lines, resume_command, success_lines, training_signal_lines
from src.records.rollout_log import record_groups
from src.rollouts.options import ScheduleOptions
from tests.fakes.trials import failure, task, trajectory, turn


def shown(show, *, width=80):
    """Return the lines that `show` prints on a display of this width."""
    text = io.StringIO()
    show(Display(Console(file=text, width=width)))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def group(name, *rewards, failures=()):
    members = [
        trajectory(name, reward, [turn([1], [2, 3])], name=f"{name}__{index}")
        for index, reward in enumerate(rewards)
    ]
    return TrajectoryGroup(task=task(name), trajectories=members, failures=list(failures))


def evaluation(step, *groups, noop_rewards=None):
    noop_rewards = noop_rewards or {}
    return Evaluation(
        step=step,
        groups=list(groups),
        metrics={},
        whole=section_of(groups, noop_rewards, group_size=2),
        domains={},
        noop_rewards=noop_rewards,
    )


def outcome(success, signal_lines, **run):
    lines = [*success_lines(success), *signal_lines]
    return last_lines(lines, steps_before=0, options=ScheduleOptions(), **run)


def test_a_group_is_shown_in_one_line():
    def show(display):
        display.batch_started("step 1", num_groups=2, group_size=3)
        display.group_finished(
            group("copy-01", 1, 0, failures=[failure(kind=FailureKind.VERIFIER)]), duration_s=2.345
        )
        display.group_finished(group("a[b]", failures=[failure()] * 3), duration_s=1)

    assert shown(show) == [
        "step 1: 2 tasks x 3 trials",
        "  [1/2] copy-01: 1/2 solved, 1.0 turns, 2.3 s, 1 ungraded (verifier)",
        "  first ungraded trial (verifier): copy-01: no tmux; see logs.log",
        "  [2/2] a[b]: 0/0 solved, 1.0 s, 3 ungraded (sandbox)",
        "  first ungraded trial (sandbox): a[b]: no tmux; see logs.log",
    ]


def test_the_first_failure_of_each_kind_is_shown_once():
    detail = "ZeroDivisionError: division by zero (my_env.py:7 in step)"
    faulty = replace(trajectory("a"), zero_reason=ZeroReason.ENV_ERROR, zero_detail=detail)
    groups = [TrajectoryGroup(task=task("a"), trajectories=[faulty, faulty]), group("b", 1)]

    def show(display):
        for shown_group in (*groups, *groups):
            display.group_finished(shown_group, duration_s=1)

    lines = [line for line in shown(show, width=200) if "first" in line]
    assert lines == [f"  first trial with reward 0 (env_error): a: {detail}; see logs.log"]


def test_a_failure_and_a_reward_0_of_one_name_are_both_shown():
    faulty = replace(trajectory("a"), zero_reason=ZeroReason.ENV_ERROR, zero_detail="no disk")
    lost = group("b", failures=[failure(kind=FailureKind.ENV_ERROR)])

    def show(display):
        for shown_group in (TrajectoryGroup(task=task("a"), trajectories=[faulty]), lost):
            display.group_finished(shown_group, duration_s=1)

    lines = [line for line in shown(show, width=200) if "first" in line]
    assert [line.split(" (")[0] for line in lines] == [
        "  first trial with reward 0",
        "  first ungraded trial",
    ]


def test_partial_rewards_are_shown_if_nothing_is_solved():
    first, later = evaluation(0, group("walk", 0.25, 0.0)), evaluation(4, group("walk", 0.5, 0.75))
    lines = [
        line.split() for line in shown(lambda display: display.evaluation_finished(later, first.task_rewards))
    ]
    assert lines[1:] == [
        ["walk", "0/2", "(0.125)", "0/2", "(0.625)"],
        ["held-out", "success:", "0.0%", "(0/2);", "mean", "reward", "0.625"],
    ]
    (line,) = shown(lambda display: display.group_finished(group("walk", 0.5, 0.75), duration_s=1))
    assert line.endswith("walk: 0/2 solved, reward 0.625, 1.0 turns, 1.0 s")


def test_small_rewards_are_shown_with_three_digits(tmp_path):
    small = group("pick", *[0.0] * 15, 0.016)
    lines = shown(lambda display: display.evaluation_finished(evaluation(0, small), None))
    assert lines[1].split() == ["pick", "0/16", "(0.001)"] and lines[2].endswith("; mean reward 0.001")
    (line,) = shown(lambda display: display.group_finished(small, duration_s=1))
    assert line.endswith("pick: 0/16 solved, reward 0.001, 1.0 turns, 1.0 s")
    rates = Success(before=0.0, after=0.0, noop_success=None, rewards=(0.000125, 0.001))
    assert outcome(rates, [], steps=1, wall_s=1, log_path=tmp_path)[1].endswith(
        "; mean reward 0.000125 before, 0.001 after"
    )
    metrics = {"env/all/reward/total": 0.00125}
    lines = shown(lambda display: display.step_finished(1, num_steps=1, metrics=metrics))
    assert lines[-1].split() == ["0.00125"]


def test_a_step_is_a_table_that_fits_eighty_columns():
    metrics = {
        "env/all/reward/total": 0.25,
        "env/all/success": 0.25,
        "env/all/by_group/frac_mixed": 1.0,
        "trials/ungraded": 0.0,
        "env/all/turns": 12.5,
        "tokens/sampled": 123456.0,
        "optim/grad_norm": 0.0123,
        "optim/kl_sample_train_v2": 1.5e-7,
        "time/rollouts": 1234.5,
        "time/update": 123.4,
    }
    title, head, row = shown(lambda display: display.step_finished(3, num_steps=9, metrics=metrics))
    assert title == "step 3/9"
    assert head.split() == [
        "reward",
        "solved",
        "mixed",
        "failed",
        "turns",
        "tokens",
        "grad",
        "KL",
        "rollouts",
        "update",
    ]
    assert row.split() == [
        "0.25",
        "25%",
        "100%",
        "0",
        "12.5",
        "123456",
        "0.012",
        "1.5e-07",
        "1234.5s",
        "123.4s",
    ]


def test_a_step_without_an_update_omits_its_columns():
    _, head, _ = shown(
        lambda display: display.step_finished(1, num_steps=1, metrics={"env/all/reward/total": 0.0})
    )
    assert head.split() == ["reward"]


@pytest.mark.seed_behaviour(34)
def test_an_evaluation_is_shown_beside_the_first_one():
    first = evaluation(0, group("copy-01", 0, 0), group("move-01", 1, 0))
    later = evaluation(4, group("copy-01", 1, 1), group("move-01", 1, 0))
    lines = [
        line.split() for line in shown(lambda display: display.evaluation_finished(later, first.task_rewards))
    ]
    assert lines[0] == ["held-out", "task", "step", "0", "step", "4"]
    assert lines[1:3] == [["copy-01", "0/2", "2/2"], ["move-01", "1/2", "1/2"]]
    assert lines[3] == ["held-out", "success:", "75.0%", "(3/4)"]
    summary = shown(
        lambda display: display.evaluation_finished(
            evaluation(4, group("copy-01", 1, 1), noop_rewards={"copy-01": 1.0}), None
        )
    )[-1]
    assert summary == "held-out success: 100.0% (2/2); an agent that does nothing: 100.0%"
    graded = group("copy-01", 1, 1)
    partial = replace(graded, task=replace(graded.task, grading="env"))
    assert (
        shown(lambda display: display.evaluation_finished(evaluation(4, partial), None))[-1]
        == "held-out success, graded in part: 100.0% (2/2)"
    )


@pytest.mark.parametrize("name", ["a[b]", "x[/red]", "q:smile:"])
def test_a_task_id_is_not_parsed_as_markup(name):
    lines = shown(lambda display: display.evaluation_finished(evaluation(0, group(name, 1)), None))
    assert lines[1].split() == [name, "1/1"]


def test_the_outcome_compares_success_and_names_the_files(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "jobs").mkdir()
    rates = Success(before=0.25, after=0.5, noop_success=None)
    lines = outcome(rates, [], steps=1, wall_s=125.4, log_path=tmp_path)
    assert lines[:2] == [
        "done: 1 step in 2 min 5 s",
        "held-out success: 25.0% before, 50.0% after (+25.0 points)",
    ]
    assert lines[2] == f"files: {tmp_path} (metrics.jsonl, jobs/)"
    assert outcome(replace(rates, noop_success=0.1), ["a"], steps=1, wall_s=1, log_path=tmp_path)[1:3] == [
        f"{lines[1]}; an agent that does nothing: 10.0%",
        "a",
    ]
    earned = outcome(replace(rates, rewards=(0.3, 0.75)), [], steps=1, wall_s=1, log_path=tmp_path)[1]
    assert earned == f"{lines[1]}; mean reward 0.3 before, 0.75 after"
    partial = replace(rates, is_partial=True)
    assert outcome(partial, [], steps=1, wall_s=1, log_path=tmp_path)[1].startswith(
        "held-out success, graded in part: 25.0% before"
    )
    assert (
        len(
            outcome(
                Success(before=None, after=None, noop_success=None), [], steps=3, wall_s=9, log_path=tmp_path
            )
        )
        == 2
    )


def test_the_resume_command_is_a_program_of_this_environment(monkeypatch):
    environment = Path(sys.prefix)
    monkeypatch.setattr(sys, "executable", str(environment / "bin" / "python"))
    monkeypatch.setattr(Path, "cwd", lambda: environment.parent)
    command = resume_command(Path("/runs/my run"))
    assert command == f"{environment.name}/bin/agent-trainer resume '/runs/my run'"
    monkeypatch.setattr(Path, "cwd", lambda: Path("/elsewhere"))
    assert resume_command(Path("/runs/a")) == f"{environment}/bin/agent-trainer resume /runs/a"


def test_every_trial_is_a_line_with_its_advantage_or_failure(tmp_path):
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    record_groups(
        path, [group("copy-01", 1.0, failures=[failure("copy-01")])], {("copy-01", "copy-01__0"): 0.5}
    )
    graded, failed = [json.loads(line) for line in path.read_text().splitlines()]
    assert graded == {
        "task": "copy-01",
        "trial": "copy-01__0",
        "reward": 1.0,
        "stop_reason": "stop",
        "advantage": 0.5,
        "turns": 1,
        "tokens": 2,
        "metrics": {},
    }
    assert failed == {"task": "copy-01", "trial": "f", "failure": "sandbox", "message": "no tmux"}


def test_a_metric_of_nan_is_written_as_null(tmp_path):
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    measured = [
        replace(member, metrics={"loss": float("nan"), "steps": 2.0})
        for member in group("copy-01", 1.0).trajectories
    ]
    record_groups(path, [replace(group("copy-01", 1.0), trajectories=measured)], {})
    assert '"metrics": {"loss": null, "steps": 2.0}' in path.read_text()


def test_signal_has_a_line_per_domain_if_there_are_few():
    few = {"airline": [0.0], "all tasks": [0.1], "retail": [0.2]}
    assert [line.split(":")[0] for line in training_signal_lines(few)] == [
        "training signal of airline",
        "training signal of all tasks",
        "training signal of retail",
    ]
    for others in (["retail"], [f"task-type-{number}" for number in range(6)]):
        lines = training_signal_lines({"all tasks": [0.1], **{name: [0.1] for name in others}})
        assert [line.split(":")[0] for line in lines] == ["training signal of all tasks"]


def test_a_run_continues_when_its_output_pipe_is_closed():
    script = """
        import os, sys
        from src.cli.console import Display, terminal
        reader, writer = os.pipe()
        os.dup2(writer, 1), os.close(writer), os.close(reader)
        display = Display(terminal())
        display.say("step 1"), display.say("step 2")
        print("went on", file=sys.stderr)
    """
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "went on")


def test_a_run_survives_a_closed_terminal():
    class HungUp(io.StringIO):
        def write(self, text, /):
            raise OSError(errno.EIO, "Input/output error")

    display = Display(Console(file=HungUp()))
    display.say("step 1")
    display.say("step 2")


def test_a_long_message_shows_its_beginning_and_its_end():
    text = message_text("user", "a" * 1500 + "b" * 1000).plain
    assert text == "user: " + "a" * 1000 + "\n[500 characters are not shown]\n" + "b" * 1000


def test_blank_lines_of_a_terminal_screen_are_counted():
    assert message_text("user", "$ ls" + "\n" * 5 + "done").plain == "user: $ ls\n[4 blank lines]\ndone"
    assert message_text("user", "one\n\n\ntwo").plain == "user: one\n\n\ntwo"

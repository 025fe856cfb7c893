"""Tests `python -m src.envs.validate` on task directories, and its options."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from src.envs.validate import main as validate
from tests.fakes.harbor_trials import TASKS, in_sandbox, variant

pytestmark = in_sandbox


def test_a_task_that_is_solved_by_doing_nothing_is_unsound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("hello-file", "count-lines"):
        shutil.copytree(TASKS / name, tmp_path / name)
    always_1 = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"
    (tmp_path / "hello-file" / "tests" / "test.sh").write_text(always_1)
    assert validate([f"tasks_dir={tmp_path}", "environment_type=sandbox"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok   count-lines: oracle 1.0, nop 0.0, graded fresh",
        "BAD  hello-file: the solution got 1.0, doing nothing got 1.0 instead of 0; "
        "logs_dir=DIR keeps the output of the verifier",
        f"grading methods recorded in {tmp_path / 'grading.json'}",
        "tasks in sandbox: 1 sound, 1 unsound",
    ]


def test_a_separate_verifier_environment_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = 'artifacts = ["/app/hello.txt"]\n[verifier]\nenvironment_mode = "separate"\n'
    task = variant(tmp_path, task_toml=settings)
    (task / "tests" / "Dockerfile").write_text("FROM debian\nRUN mkdir /app\nCOPY . /tests\n")
    assert validate([f"tasks_dir={task}", "environment_type=sandbox"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "ok   variant: oracle 1.0, nop 0.0, graded in a separate verifier environment"
    )


def test_a_separate_verifier_that_lacks_a_file_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = variant(tmp_path, task_toml='[verifier]\nenvironment_mode = "separate"\n')
    (task / "tests" / "Dockerfile").write_text("FROM debian\nRUN mkdir /app\nCOPY . /tests\n")
    assert validate([f"tasks_dir={task}", "environment_type=sandbox"]) == 1
    assert (
        "; the verifier's environment has only the files that `artifacts` in task.toml names; "
        in capsys.readouterr().out.splitlines()[0]
    )


def test_a_solution_without_the_full_score_is_reported_with_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(TASKS / "hello-file", tmp_path / "tasks" / "hello-file")
    always_0 = "#!/bin/bash\necho the file is missing; echo 0 > /logs/verifier/reward.txt\n"
    (tmp_path / "tasks" / "hello-file" / "tests" / "test.sh").write_text(always_0)
    logs = tmp_path / "logs"
    assert validate([f"tasks_dir={tmp_path / 'tasks'}", "environment_type=sandbox", f"logs_dir={logs}"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == (
        "BAD  hello-file: the solution got 0.0 instead of 1 (the verifier printed last: the file is "
        "missing), doing nothing got 0.0; "
        f"{logs} has the output of the verifier"
    )
    outputs = [path.read_text() for path in logs.glob("*/verifier/test-stdout.txt")]
    assert any("the file is missing" in output for output in outputs)


def test_a_missing_reward_is_reported_once_with_its_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(TASKS / "hello-file", tmp_path / "hello-file")
    (tmp_path / "hello-file" / "tests" / "test.sh").write_text("#!/bin/bash\nif true; then\n")
    assert validate([f"tasks_dir={tmp_path}", "environment_type=sandbox"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == (
        "BAD  hello-file: the solution and doing nothing got no reward (RewardFileNotFoundError: No reward "
        "file found at /logs/verifier/reward.txt or /logs/verifier/reward.json; the verifier printed last: "
        "/tests/test.sh: line 3: syntax error: unexpected end of file); "
        "logs_dir=DIR keeps the output of the verifier"
    )


def test_a_solution_that_fails_is_reported_with_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(TASKS / "hello-file", tmp_path / "hello-file")
    (tmp_path / "hello-file" / "solution" / "solve.sh").write_text("#!/bin/bash\ncat nofile\n")
    assert validate([f"tasks_dir={tmp_path}", "environment_type=sandbox"]) == 1
    error = "(solution/solve.sh ended with status 1: cat: nofile: No such file or directory"
    assert error in capsys.readouterr().out.splitlines()[0]


def test_a_record_that_cannot_be_written_is_reported_after_the_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(TASKS / "hello-file", tmp_path / "hello-file")
    (tmp_path / ".grading.json.new").mkdir()  # the temporary file of the record
    assert validate([f"tasks_dir={tmp_path}", "environment_type=sandbox"]) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "tasks in sandbox: 1 sound, 0 unsound"
    assert printed.err == (
        f"validate: cannot write {tmp_path / 'grading.json'}: Is a directory; make the directory writable, "
        "or validate and train on a copy of it\n"
    )


def test_a_missing_directory_gives_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validate([f"tasks_dir={tmp_path / 'none'}", "environment_type=sandbox"]) == 2
    assert capsys.readouterr().err.startswith("validate: tasks_dir ")


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("environment_kwargs=cpus", "environment_kwargs takes key=value"),
        ("n_parallel_envs=0", "n_parallel_envs must be at least 1, not 0"),
    ],
)
def test_an_invalid_option_gives_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, line: str
):
    assert validate([f"tasks_dir={tmp_path}", option]) == 2
    assert capsys.readouterr().err.startswith(f"validate: {line}")

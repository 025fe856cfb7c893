"""Tests the grading method of each task: the records of `validate`, the option `grading`, and the scores."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from harbor.models.task.config import TaskConfig

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.envs.harbor.environment import import_harbor, new_run_label, trial_environment
from src.envs.harbor.grading_method import (
    RECORD_NAME,
    GradingMethod,
    GradingMode,
    grading_methods,
    parse_grading_option,
    recorded_method,
    write_records,
)
from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.envs.validate import main as validate

REASON = why_no_sandbox()
in_sandbox = pytest.mark.skipif(REASON is not None, reason=f"no sandbox here: {REASON}")

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "tests" / "tasks"
QUICKSTART = ROOT / "datasets" / "quickstart" / "heldout"
IN_PLACE = GradingMethod(mode=GradingMode.IN_PLACE)

SERVER = "http.server.HTTPServer(('127.0.0.1', 8099), http.server.SimpleHTTPRequestHandler)"
START_SERVICE = f"import http.server; {SERVER}.serve_forever()"
REQUEST = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8099/', timeout=5)"


def hello(directory: Path, *, test: str | None = None, solution: str | None = None) -> Task:
    shutil.copytree(TASKS / "hello-file", directory)
    if test is not None:
        (directory / "tests" / "test.sh").write_text(
            f"#!/bin/bash\nif {test}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
        )
    if solution is not None:
        (directory / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{solution}\n")
    return Task(id=directory.name, path=directory)


def methods_of(
    *tasks: Task, selected: GradingMethod | None = None, kind: str = "sandbox"
) -> dict[Path, GradingMethod]:
    configs = {
        task.path: TaskConfig.model_validate_toml((task.path / "task.toml").read_text()) for task in tasks
    }
    return grading_methods(tasks, configs, selected=selected, environment_type=kind)


IN_PLACE_WITH_PROCESSES = GradingMethod(mode=GradingMode.IN_PLACE, keep_processes=True)


def test_a_task_without_a_record_has_no_recorded_method(tmp_path: Path) -> None:
    assert recorded_method(hello(tmp_path / "task"), "sandbox") is None


def test_records_are_written_beside_the_tasks(tmp_path: Path) -> None:
    path = write_records(tmp_path, "sandbox", {hello(tmp_path / "task"): IN_PLACE})
    assert path == tmp_path / RECORD_NAME


def test_each_environment_type_has_its_own_record(tmp_path: Path) -> None:
    task = hello(tmp_path / "task")
    write_records(tmp_path, "sandbox", {task: IN_PLACE_WITH_PROCESSES})
    write_records(tmp_path, "docker", {task: GradingMethod()})
    assert {kind: recorded_method(task, kind) for kind in ("sandbox", "docker", "modal")} == {
        "sandbox": replace(IN_PLACE_WITH_PROCESSES, is_recorded=True),
        "docker": GradingMethod(is_recorded=True),
        "modal": None,
    }


def test_the_record_of_a_changed_task_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = hello(tmp_path / "task")
    write_records(tmp_path, "sandbox", {task: IN_PLACE})
    (task.path / "tests" / "test.sh").write_text("another")
    with caplog.at_level(logging.WARNING):
        assert recorded_method(task, "sandbox") is None
    assert "the task has changed since it was recorded" in caplog.text


def test_a_single_task_directory_contains_its_record(tmp_path: Path) -> None:
    task = hello(tmp_path / "task")
    write_records(task.path, "sandbox", {task: IN_PLACE})
    assert recorded_method(task, "sandbox") == replace(IN_PLACE, is_recorded=True)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"task": {"checksum": "CHECKSUM", "sandbox": {"grading": "somehow", "keep_processes": false}}}',
    ],
)
def test_a_record_that_cannot_be_read_gives_a_one_line_error(tmp_path: Path, text: str) -> None:
    task = hello(tmp_path / "task")
    path = write_records(tmp_path, "docker", {task: IN_PLACE})
    path.write_text(text.replace("CHECKSUM", json.loads(path.read_text())["task"]["checksum"]))
    with pytest.raises(ConfigError, match="validate again"):
        recorded_method(task, "sandbox")


@pytest.mark.parametrize(
    ("selected", "mode"),
    [(None, GradingMode.IN_PLACE), (GradingMethod(), GradingMode.FRESH)],
)
def test_the_option_overrides_records(
    tmp_path: Path, selected: GradingMethod | None, mode: GradingMode
) -> None:
    task = hello(tmp_path / "task")
    write_records(tmp_path, "sandbox", {task: IN_PLACE})
    assert methods_of(task, selected=selected)[task.path].mode is mode


def test_the_number_of_tasks_of_each_mode_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = hello(tmp_path / "task")
    write_records(tmp_path, "sandbox", {task: IN_PLACE})
    with caplog.at_level(logging.INFO):
        methods_of(task)
    source = "records of src.envs.validate; tasks without a record: fresh"
    assert caplog.messages == [f"grading: 0 tasks in a fresh environment, 1 in place ({source})"]


def test_tasks_with_a_separate_verifier_are_counted_separately(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = [hello(tmp_path / "task"), hello(tmp_path / "separate")]
    (tasks[1].path / "task.toml").write_text('[verifier]\nenvironment_mode = "separate"\n')
    with caplog.at_level(logging.INFO):
        methods_of(*tasks)
    counts = "1 tasks in a fresh environment, 0 in place, 1 in a separate verifier environment ("
    assert caplog.messages[0].startswith(f"grading: {counts}")


@pytest.mark.parametrize(("kind", "compose"), [("daytona", False), ("docker", True)])
def test_tasks_that_cannot_be_graded_fresh_count_as_in_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, compose: bool
) -> None:
    task = hello(tmp_path / "task")
    if compose:
        (task.path / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with caplog.at_level(logging.INFO):
        methods_of(task, kind=kind)
    assert "grading: 0 tasks in a fresh environment, 1 in place" in caplog.text


@pytest.mark.parametrize(
    ("environment_kwargs", "method"),
    [
        ({}, None),
        ({"grading": "recorded"}, None),
        ({"grading": "fresh"}, GradingMethod()),
        ({"grading": "in_place"}, IN_PLACE),
        ({"keep_processes": "true"}, IN_PLACE_WITH_PROCESSES),
        ({"grading": "in_place", "keep_processes": "true"}, IN_PLACE_WITH_PROCESSES),
    ],
)
def test_the_option_is_parsed(environment_kwargs: dict[str, str], method: GradingMethod | None) -> None:
    assert parse_grading_option({"memory_mb": "1", **environment_kwargs}) == (
        {"memory_mb": "1"},
        method,
    )


@pytest.mark.parametrize(
    ("environment_kwargs", "message"),
    [
        ({"grading": "well"}, "none of fresh, in_place, recorded"),
        ({"keep_processes": "some"}, "neither true nor false"),
        ({"grading": "fresh", "keep_processes": "true"}, "needs grading=in_place"),
    ],
)
def test_an_invalid_option_is_refused(environment_kwargs: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_grading_option(environment_kwargs)


@in_sandbox
def test_validate_records_which_tasks_are_graded_in_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hello(tmp_path / "files")
    hello(
        tmp_path / "program",
        test="own-tool",
        solution="printf '#!/bin/sh\\n' > /usr/local/bin/own-tool; chmod +x /usr/local/bin/own-tool",
    )
    hello(
        tmp_path / "service",
        test=f'python3 -c "{REQUEST}"',
        solution=f'setsid python3 -c "{START_SERVICE}" >/dev/null 2>&1 & sleep 1',
    )
    assert validate([f"tasks_dir={tmp_path}", "environment_type=sandbox"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok   files: oracle 1.0, nop 0.0, graded fresh",
        "ok   program: oracle 1.0, nop 0.0, graded in place",
        "ok   service: oracle 1.0, nop 0.0, graded in place with the agent's processes",
        f"grading methods recorded in {tmp_path / RECORD_NAME}",
        "tasks in sandbox: 3 sound, 0 unsound",
    ]
    records = json.loads((tmp_path / RECORD_NAME).read_text())
    assert {name: record["sandbox"] for name, record in records.items()} == {
        "files": {"grading": "fresh", "keep_processes": False},
        "program": {"grading": "in_place", "keep_processes": False},
        "service": {"grading": "in_place", "keep_processes": True},
    }


async def rewards(
    task_dir: Path, directory: Path, environment: dict[str, object], method: GradingMethod | None
) -> object:
    """Return the rewards of the task's solution, by Harbor's verifier if `method` is None, else by ours."""
    from harbor.models.trial.config import (
        AgentConfig,
        EnvironmentConfig,
        TaskConfig,
        TrialConfig,
        VerifierConfig,
    )
    from harbor.trial.trial import Trial

    from src.envs.harbor.grading import graded

    verifier = (
        VerifierConfig()
        if method is None
        else VerifierConfig(import_path="src.envs.harbor.verifier:TrainingVerifier")
    )
    config = TrialConfig(
        task=TaskConfig(path=task_dir),
        trials_dir=directory,
        agent=AgentConfig(name="oracle"),
        environment=EnvironmentConfig.model_validate(environment),
        verifier=verifier,
    )
    trial = await Trial.create(config)
    if method is None:
        result = await trial.run()
    else:
        async with graded(trial, method):
            result = await trial.run()
    assert result.verifier_result is not None, result.exception_info
    return result.verifier_result.rewards


@in_sandbox
@pytest.mark.parametrize(
    "directory",
    [*sorted(TASKS.iterdir()), *sorted(QUICKSTART.iterdir())[::3]],
    ids=lambda directory: directory.name,
)
async def test_a_solution_has_the_score_that_harbor_gives_it(tmp_path: Path, directory: Path) -> None:
    import_harbor()
    environment = trial_environment("sandbox", {}, run_label=new_run_label())
    harbor_rewards = await rewards(directory, tmp_path, environment, None)
    assert harbor_rewards == {"reward": 1.0}
    assert await rewards(directory, tmp_path, environment, GradingMethod()) == harbor_rewards
    assert await rewards(directory, tmp_path, environment, IN_PLACE) == harbor_rewards

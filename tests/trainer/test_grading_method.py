"""How each task is graded: records of validate, options, and scores that stay Harbor's own."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.envs.harbor.environment import load_harbor, new_run_label, trial_environment
from src.envs.harbor.grading_choice import (
    RECORD_NAME,
    Choice,
    GradingOption,
    Way,
    recorded_choice,
    take_option,
    tell_choices,
    write_records,
)
from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.envs.validate import main as validate

REASON = why_no_sandbox()
in_sandbox = pytest.mark.skipif(REASON is not None, reason=f"no sandbox here: {REASON}")

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "tests" / "tasks"
QUICKSTART = ROOT / "datasets" / "quickstart" / "heldout"
IN_PLACE = Choice(way=Way.IN_PLACE)

SERVICE = "import http.server; http.server.HTTPServer(('127.0.0.1', 8099), http.server.SimpleHTTPRequestHandler).serve_forever()"
ASKS = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8099/', timeout=5)"


def hello(folder: Path, *, test: str | None = None, solution: str | None = None) -> Task:
    shutil.copytree(TASKS / "hello-file", folder)
    if test is not None:
        (folder / "tests" / "test.sh").write_text(
            f"#!/bin/bash\nif {test}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
        )
    if solution is not None:
        (folder / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{solution}\n")
    return Task(id=folder.name, path=folder)


def test_a_record_holds_for_its_task_and_its_kind_of_environment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = hello(tmp_path / "task")
    assert recorded_choice(task, "sandbox") is None
    keeping = Choice(way=Way.IN_PLACE, keep_processes=True)
    assert write_records(tmp_path, "sandbox", {task: keeping}) == tmp_path / RECORD_NAME
    write_records(tmp_path, "docker", {task: Choice()})
    found = {kind: recorded_choice(task, kind) for kind in ("sandbox", "docker", "modal")}
    assert found == {
        "sandbox": Choice(way=Way.IN_PLACE, keep_processes=True, is_recorded=True),
        "docker": Choice(is_recorded=True),
        "modal": None,
    }
    (task.path / "tests" / "test.sh").write_text("another")
    with caplog.at_level(logging.WARNING):
        assert recorded_choice(task, "sandbox") is None
    assert "the task has changed since it was recorded" in caplog.text


def test_a_single_task_folder_keeps_its_record_within(tmp_path: Path) -> None:
    task = hello(tmp_path / "task")
    write_records(task.path, "sandbox", {task: IN_PLACE})
    assert recorded_choice(task, "sandbox") == Choice(way=Way.IN_PLACE, is_recorded=True)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"task": {"checksum": "CHECKSUM", "sandbox": {"grading": "somehow", "keep_processes": false}}}',
    ],
)
def test_a_record_that_cannot_be_read_is_one_line(tmp_path: Path, text: str) -> None:
    task = hello(tmp_path / "task")
    path = write_records(tmp_path, "docker", {task: IN_PLACE})
    path.write_text(text.replace("CHECKSUM", json.loads(path.read_text())["task"]["checksum"]))
    with pytest.raises(ConfigError, match="validate again"):
        recorded_choice(task, "sandbox")


def test_the_option_overrides_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = hello(tmp_path / "task")
    write_records(tmp_path, "sandbox", {task: IN_PLACE})
    assert take_option({"memory_mb": "1", "grading": "fresh"}) == (
        {"memory_mb": "1"},
        GradingOption(choice=Choice()),
    )
    with caplog.at_level(logging.INFO):
        assert tell_choices([task], GradingOption(), "sandbox")[task.path].way is Way.IN_PLACE
        assert tell_choices([task], GradingOption(choice=Choice()), "sandbox")[task.path].way is Way.FRESH
    assert (
        "grading: 0 tasks in a fresh environment, 1 in place (records of validate; without one: fresh)"
        in caplog.messages
    )
    for given, message in (
        ({"grading": "well"}, "none of fresh, in_place, recorded"),
        ({"keep_processes": "some"}, "neither true nor false"),
        ({"grading": "fresh", "keep_processes": "true"}, "needs grading=in_place"),
    ):
        with pytest.raises(ConfigError, match=message):
            take_option(given)


@in_sandbox
def test_validate_records_which_tasks_need_what_the_agent_left(
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
        test=f'python3 -c "{ASKS}"',
        solution=f'setsid python3 -c "{SERVICE}" >/dev/null 2>&1 & sleep 1',
    )
    assert validate([f"tasks_dir={tmp_path}", "environment_type=sandbox"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok   files: oracle 1.0, nop 0.0, graded fresh",
        "ok   program: oracle 1.0, nop 0.0, graded in place",
        "ok   service: oracle 1.0, nop 0.0, graded in place with its processes",
        f"how each task is graded: {tmp_path / RECORD_NAME}",
        "3 tasks in sandbox: 3 sound, 0 unsound",
    ]
    records = json.loads((tmp_path / RECORD_NAME).read_text())
    assert {name: record["sandbox"] for name, record in records.items()} == {
        "files": {"grading": "fresh", "keep_processes": False},
        "program": {"grading": "in_place", "keep_processes": False},
        "service": {"grading": "in_place", "keep_processes": True},
    }


async def rewards(
    folder: Path, directory: Path, environment: dict[str, object], choice: Choice | None
) -> object:
    """Of the task's own solution: by Harbor's own verifier in the agent's environment, or as `choice` says."""
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
        if choice is None
        else VerifierConfig(import_path="src.envs.harbor.verifier:TrainingVerifier")
    )
    config = TrialConfig(
        task=TaskConfig(path=folder),
        trials_dir=directory,
        agent=AgentConfig(name="oracle"),
        environment=EnvironmentConfig.model_validate(environment),
        verifier=verifier,
    )
    trial = await Trial.create(config)
    if choice is None:
        result = await trial.run()
    else:
        async with graded(trial, choice):
            result = await trial.run()
    assert result.verifier_result is not None, result.exception_info
    return result.verifier_result.rewards


@in_sandbox
@pytest.mark.parametrize(
    "folder", [*sorted(TASKS.iterdir()), *sorted(QUICKSTART.iterdir())[::3]], ids=lambda folder: folder.name
)
async def test_a_solution_has_the_score_that_harbor_gives_it(tmp_path: Path, folder: Path) -> None:
    load_harbor()
    environment = trial_environment("sandbox", {}, run_label=new_run_label(), n_parallel=1)
    harbors = await rewards(folder, tmp_path, environment, None)
    assert harbors == {"reward": 1.0}
    assert await rewards(folder, tmp_path, environment, Choice()) == harbors
    assert await rewards(folder, tmp_path, environment, IN_PLACE) == harbors

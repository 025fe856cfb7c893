"""Tests refusals, log lines and `validate` for tasks that an environment does not support."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from harbor.environments.docker.docker import DockerEnvironment
from harbor.models.task.config import TaskConfig

from src.config import TrainerConfig
from src.core.errors import ConfigError
from src.envs.harbor.environment import HarborTasks, open_harbor, trial_environment
from src.envs.harbor.task_directories import check_for, verifier_needs
from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.envs.sandbox.dockerfile import is_installed
from src.envs.validate import main as validate
from tests.fakes.tokenizer import byte_chat

REASON = why_no_sandbox()
needs_sandbox = pytest.mark.skipif(REASON is not None, reason=f"no sandbox here: {REASON}")
HELLO = Path(__file__).resolve().parents[1] / "tasks" / "hello-file"
REWARD = "echo 1 > /logs/verifier/reward.txt"


def task(
    tmp_path: Path,
    name: str,
    *,
    test: str = REWARD,
    network: str | None = "no-network",
    solution: bool = True,
) -> Path:
    directory = tmp_path / name
    shutil.copytree(HELLO, directory)
    (directory / "tests" / "test.sh").write_text(f"#!/bin/bash\n{test}\n")
    (directory / "task.toml").write_text(f'[environment]\nnetwork_mode = "{network}"\n' if network else "")
    if not solution:
        shutil.rmtree(directory / "solution")
    return directory


def source(tasks_dir: Path, **options: object) -> HarborTasks:
    defaults = {"environment_type": "sandbox", "eval_split": 0.0}
    return open_harbor(
        TrainerConfig(model_name="org/model", tasks_dir=str(tasks_dir), **{**defaults, **options}),
        byte_chat(),
    )


@needs_sandbox
def test_verifiers_that_lack_the_internet_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two"):
        task(tmp_path, name, test=f"curl -LsSf https://example.org/install.sh | sh\n{REWARD}")
    task(tmp_path, "three")
    with caplog.at_level(logging.WARNING):
        assert len(source(tmp_path).train) == 3
    (line,) = [record.getMessage() for record in caplog.records if "test.sh" in record.getMessage()]
    assert "`curl`" in line and "one, two" in line and "three" not in line


@needs_sandbox
def test_an_image_that_the_sandbox_replaces_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, image in (("one", "python:3.12-slim"), ("two", "debian:bookworm-slim AS base"), ("three", "a")):
        (task(tmp_path, name) / "environment" / "Dockerfile").write_text(f"FROM {image}\nWORKDIR /app\n")
    with caplog.at_level(logging.WARNING):
        assert len(source(tmp_path).train) == 3
    lines = [record.getMessage() for record in caplog.records if "image" in record.getMessage()]
    warning = (
        "the sandbox uses the programs of this machine in place of the image {}; "
        "environment_type=docker uses the image (1 of 3 tasks: {})"
    )
    assert lines == [warning.format("python:3.12-slim", "one"), warning.format("a", "three")]


@needs_sandbox
def test_tasks_that_request_a_missing_network_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("sandbox.task_requirements", "harbor.task_directories"):
        monkeypatch.setattr(f"src.envs.{module}.why_no_network", lambda: "it needs the package slirp4netns")
    task(tmp_path / "default", "a", network=None)
    task(tmp_path / "default", "b", network=None)
    with caplog.at_level(logging.WARNING):
        assert len(source(tmp_path / "default").train) == 2
    (line,) = [record.getMessage() for record in caplog.records if "slirp4netns" in record.getMessage()]
    assert "a, b" in line
    task(tmp_path / "asking", "c", network="public")
    with pytest.raises(
        ConfigError,
        match=r"c: the task or network=true requires a public network.*slirp4netns.*environment_type=docker",
    ):
        source(tmp_path / "asking")
    with pytest.raises(ConfigError, match="the task or network=true requires a public network"):
        source(tmp_path / "default", environment_kwargs=["network=true"])


@pytest.mark.parametrize("environment_type", ["sandbox"])
@needs_sandbox
def test_multi_step_and_windows_tasks_are_refused(tmp_path: Path, environment_type: str) -> None:
    steps = tmp_path / "steps"
    (steps / "steps" / "first").mkdir(parents=True)
    (steps / "task.toml").write_text('[[steps]]\nname = "first"\n')
    with pytest.raises(ConfigError, match=r"steps: a task with \[\[steps\]\].*harbor run"):
        source(steps, environment_type=environment_type)
    windows = task(tmp_path, "windows")
    (windows / "task.toml").write_text('[environment]\nos = "windows"\n')
    (windows / "tests" / "test.sh").rename(windows / "tests" / "test.bat")
    with pytest.raises(ConfigError, match=r"os = windows, but trials run on Linux only; .*Windows host"):
        source(windows, environment_type=environment_type)


@needs_sandbox
def test_validate_does_not_fail_a_task_without_a_solution(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graded = (
        "[ -f /app/hello.txt ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    )
    task(tmp_path / "tasks", "no-solution", test=graded, solution=False)
    task(tmp_path / "tasks", "sound", test=graded)
    assert validate([f"tasks_dir={tmp_path / 'tasks'}", "environment_type=sandbox"]) == 0
    first, second, *_, total = capsys.readouterr().out.splitlines()
    assert first.startswith("--   no-solution: nop 0.0; no solution/solve.sh")
    assert second.startswith("ok   sound: oracle 1.0, nop 0.0")
    assert total == "tasks in sandbox: 1 sound, 0 unsound, 1 without solution"
    task(tmp_path / "tasks", "given-away", solution=False)
    assert validate([f"tasks_dir={tmp_path / 'tasks'}", "environment_type=sandbox"]) == 1
    assert capsys.readouterr().out.splitlines()[0].startswith("BAD  given-away:")


@needs_sandbox
def test_validate_reports_a_verifier_that_lacks_the_internet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = task(
        tmp_path / "tasks",
        "offline",
        test="uvx no-such-program-x /tests; echo $((1 - ($? > 0))) > /logs/verifier/reward.txt",
    )
    assert verifier_needs(directory, lambda package: True) == "uvx"
    assert validate([f"tasks_dir={tmp_path / 'tasks'}", "environment_type=sandbox"]) == 1
    output = capsys.readouterr()
    assert output.out.splitlines()[0].startswith("BAD  offline: the solution got 0.0 instead of 1 (")
    assert "tests/test.sh needs the internet for `uvx` and has no network" in output.err


@needs_sandbox
def test_the_advice_names_the_dockerfile_of_the_verifier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, separate = (task(tmp_path, name, test="curl -L https://example.org | sh") for name in ("a", "b"))
    (separate / "tests" / "Dockerfile").write_text("FROM debian\n")
    (separate / "task.toml").write_text(
        '[environment]\nnetwork_mode = "no-network"\n[verifier]\nenvironment_mode = "separate"\n'
        '[verifier.environment]\nnetwork_mode = "no-network"\n'
    )
    for directory, place in ((own, "environment"), (separate, "tests")):
        caplog.clear()
        source(directory)
        assert f"add commands to {place}/Dockerfile that install" in caplog.text


def test_packages_of_this_machine_are_not_those_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DockerEnvironment, "_egress_control_kernel_support", lambda *_: True)
    directory = task(tmp_path, "a", test="apt-get install -y bash")
    assert verifier_needs(directory, is_installed) is None
    config = TaskConfig.model_validate({"environment": {"network_mode": "no-network"}})
    (warning,) = check_for("docker", {"type": "docker"})(directory, config)
    assert "needs the internet for `apt-get install bash`" in warning


@pytest.mark.parametrize(
    ("name", "is_valid"),
    [("c++", False), ("\u65e5\u672c", False), ("a_-b", False), ("a b--c__d.e", True), ("end-", True)],
)
def test_docker_refuses_names_that_no_image_can_have(tmp_path: Path, name: str, is_valid: bool) -> None:
    config = TaskConfig.model_validate({"environment": {"network_mode": "public"}})
    check = check_for("docker", trial_environment("docker", {}, run_label="run-test"))
    if is_valid:
        assert check(task(tmp_path, name), config) == []
    else:
        with pytest.raises(ConfigError, match=r"Docker cannot build an image with the name .*__check; use"):
            check(task(tmp_path, name), config)

"""Tests the one-line errors for task directories that cannot be loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from src.core.errors import ConfigError
from tests.fakes.harbor_trials import HELLO, harbor_tasks, in_sandbox, variant

pytestmark = in_sandbox


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda directory: (directory / "task.toml").unlink(), "no task.toml"),
        (lambda directory: (directory / "instruction.md").unlink(), "no instruction.md"),
        (lambda directory: (directory / "instruction.md").write_text(" \n"), "instruction.md is empty"),
        (lambda directory: (directory / "task.toml").write_text("[agent\n"), "task.toml: "),
        (
            lambda directory: (directory / "task.toml").write_text('[agent]\ntimeout_sec = "soon"\n'),
            "task.toml: agent.timeout_sec: ",
        ),
        (
            lambda directory: (directory / "tests" / "test.sh").unlink(),
            "no tests/test.sh; a task without a verifier cannot be graded",
        ),
        (
            lambda directory: shutil.rmtree(directory / "environment"),
            "no Dockerfile and no [environment].docker_image",
        ),
        (
            lambda directory: (directory / "environment" / "Dockerfile").write_text(
                "FROM a\nRUN pip install x\n"
            ),
            "Dockerfile:2: the sandbox cannot",
        ),
        (
            lambda directory: (directory / "environment" / "docker-compose.yaml").write_text("{}"),
            "the sandbox cannot run several services",
        ),
        (
            lambda directory: (directory / "task.toml").write_text('[agent]\nuser = "alice"\n'),
            "the sandbox has only root",
        ),
        (lambda directory: (directory / "task.toml").write_text("[environment]\ngpus = 1\n"), "no GPU"),
        (
            lambda directory: (directory / "task.toml").write_text(
                '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.org"]\n'
            ),
            "no allow list",
        ),
        (
            lambda directory: (directory / "task.toml").write_text(
                '[[environment.mcp_servers]]\nname = "search"\nurl = "http://a/mcp"\n'
                'transport = "streamable-http"\nheaders = { X-Team = "b" }\n'
            ),
            "the MCP server 'search' has headers, which Terminus-2 does not send",
        ),
        (
            lambda directory: (directory / "task.toml").write_text(
                '[verifier.environment]\ndocker_image = "debian:12-slim"\n'
            ),
            "the tests are in the image debian:12-slim of the verifier, which the sandbox cannot run",
        ),
        *(
            (
                lambda directory, section=section: (directory / "task.toml").write_text(
                    f'[{section}]\nA = "${{NOT_SET_EITHER:-b}}"\nKEY = "${{NOT_SET_ANYWHERE}}"\n'
                ),
                f"task.toml: [{section}] needs the environment variable NOT_SET_ANYWHERE, which is not set",
            )
            for section in ("environment.env", "verifier.env", "verifier.environment.env")
        ),
        (
            lambda directory: (directory / "tests" / "test.sh").write_bytes(b"#!/bin/bash\r\ntrue\r\n"),
            "tests/test.sh: the lines end as on Windows, so Linux cannot run the file",
        ),
        (
            lambda directory: (directory / "trajectory.json").write_text("{}"),
            "trajectory.json: Terminus-2 cannot begin with an earlier trajectory",
        ),
        (
            lambda directory: (directory / "tests" / ".harborignore").write_text("*.sh\n"),
            "Required task input is excluded by .harborignore: tests/test.sh",
        ),
    ],
)
def test_a_broken_task_directory_gives_a_one_line_error(tmp_path: Path, change: object, message: str) -> None:
    directory = variant(tmp_path)
    change(directory)  # type: ignore[operator]
    with pytest.raises(ConfigError) as error:
        harbor_tasks(directory.parent)
    assert message in str(error.value) and str(directory) in str(error.value)
    assert "\n" not in str(error.value)


def test_each_broken_directory_has_an_error_line(tmp_path: Path) -> None:
    for name in ("a", "b", "good"):
        shutil.copytree(HELLO, tmp_path / name)
    (tmp_path / "a" / "task.toml").unlink()
    (tmp_path / "b" / "instruction.md").unlink()
    with pytest.raises(ConfigError) as error:
        harbor_tasks(tmp_path)
    lines = str(error.value).splitlines()
    assert lines[0].startswith(str(tmp_path / "a")) and lines[1].startswith(str(tmp_path / "b"))
    assert lines[2] == "2 of 3 task directories cannot be run; fix or remove them"


@pytest.mark.parametrize("directory", [".", "hello"])
def test_a_task_of_terminal_bench_1_can_be_converted(tmp_path: Path, directory: str) -> None:
    (tmp_path / "hello" / "tests").mkdir(parents=True)
    (tmp_path / "hello" / "task.yaml").write_text("instruction: write hello\n")
    with pytest.raises(
        ConfigError, match=r"^\S+/hello: a task in the format of Terminal-Bench 1; convert it"
    ):
        harbor_tasks(tmp_path / directory)


def test_directories_with_the_same_error_share_a_line(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        shutil.copytree(HELLO, tmp_path / name)
        (tmp_path / name / "task.toml").unlink()
    with pytest.raises(ConfigError) as error:
        harbor_tasks(tmp_path)
    line, count = str(error.value).splitlines()
    assert line.startswith(f"{tmp_path / 'a'}: no task.toml") and line.endswith("(and 2 more)")
    assert count.startswith("3 of 3 task directories")

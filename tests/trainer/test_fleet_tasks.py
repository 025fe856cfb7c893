"""Tests files of Fleet tasks: the fields of a task, and one-line errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from src.core.errors import ConfigError
from src.envs.fleet.tasks import read_tasks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fleet" / "tasks.jsonl"
ROW = {
    "task_key": "a-1",
    "env_key": "shop",
    "env_version": "v1",
    "task_modality": "tool_use",
    "prompt": "Do it.",
    "verifier_code": "def verify(env): return 1.0",
}


def written(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.seed_behaviour(140)
def test_a_row_becomes_a_task(tmp_path: Path):
    [task] = read_tasks(written(tmp_path, ROW | {"stock": 3}))
    assert (task.id, task.domain, task.instruction) == ("a-1", "shop", "Do it.")
    assert task.row == ROW | {"stock": 3, "verifier_function": "verify"}


def test_version_and_modality_may_be_left_out(tmp_path: Path):
    row = {name: value for name, value in ROW.items() if name not in ("env_version", "task_modality")}
    [task] = read_tasks(written(tmp_path, "", row))
    assert (task.row["env_version"], task.row["task_modality"]) == ("", "tool_use")


def test_the_example_has_two_environments():
    assert [(task.id, task.domain) for task in read_tasks(EXAMPLE)] == [
        ("shop-restock", "shop"),
        ("shop-count", "shop"),
        ("depot-new-item", "depot"),
        ("depot-total", "depot"),
    ]


@pytest.mark.parametrize(
    ("code", "function"),
    [
        ("def check(env, final_answer): return 1", "check"),
        ("async def verify(env): return 1\ndef helper(): pass", "verify"),
        ('PATTERN = "\\d"\ndef verify(env): return 1', "verify"),
    ],
)
def test_the_verifier_is_found(tmp_path: Path, code: str, function: str):
    [task] = read_tasks(written(tmp_path, ROW | {"verifier_code": code}))
    assert task.row["verifier_function"] == function


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ("[1]", "the line is a JSON list, not an object; correct it"),
        (ROW | {"task_key": 3}, "task_key is missing or not a text; add it"),
        (ROW | {"env_key": " "}, "env_key is missing or not a text; add it"),
        (ROW | {"env_key": "a/b"}, "env_key='a/b' must begin with a letter or digit"),
        (ROW | {"env_version": 2}, "env_version=2 must begin with a letter or digit"),
        ({name: value for name, value in ROW.items() if name != "prompt"}, "prompt is missing"),
        (ROW | {"task_modality": "video"}, "task_modality='video' is not one of tool_use, computer_use"),
        (ROW | {"task_modality": []}, "task_modality=.* is not one of tool_use, computer_use"),
        (
            ROW | {"task_modality": "computer_use"},
            "task_modality=computer_use returns images, but the agent can read text only; remove the task",
        ),
        (ROW | {"verifier_code": "def verify(env:"}, "verifier_code cannot be parsed: .*line 1"),
        (ROW | {"verifier_code": "x = '\0'"}, "verifier_code cannot be parsed"),
        (ROW | {"verifier_code": "x = 1"}, "defines 0 functions and none is called verify; define"),
        (ROW | {"verifier_code": "def a(): 1\ndef b(): 1"}, "defines 2 functions and none is called verify"),
    ],
)
def test_a_mistake_gives_a_one_line_error_with_its_place(tmp_path: Path, row: object, message: str):
    path = written(tmp_path, ROW, row)
    with pytest.raises(ConfigError, match=f"tasks.jsonl:2: .*{message}") as refused:
        read_tasks(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "tasks.jsonl cannot be read"), (b"\xff", "the line is not UTF-8"), (b"\n", "contains no task")],
)
def test_a_file_without_tasks_gives_a_one_line_error(tmp_path: Path, content: bytes | None, message: str):
    if content is not None:
        (tmp_path / "tasks.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as refused:
        read_tasks(tmp_path / "tasks.jsonl")
    assert "\n" not in str(refused.value)

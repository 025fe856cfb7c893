"""Tests that relative paths of ./run_skyrl_tx.sh are relative to the directory from which it is called."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts import run_skyrl_tx
from scripts.caller_paths import CALLER_DIR, with_absolute_paths
from scripts.run_skyrl_tx import new_server_directory
from src.cli.command_line import parse
from src.cli.saved_options import SERVER_FILE, server_directory_of
from src.records.private_directory import make_private

ROOT = Path(__file__).resolve().parents[2]


def test_existing_inputs_and_all_outputs_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CALLER_DIR, str(tmp_path))
    (tmp_path / "a.jsonl").touch()
    given = ["data=a.jsonl,b.jsonl", "model_name=Qwen/Qwen3-4B", "log_path=runs/one", "env=a.jsonl", "seed=1"]
    unchanged = ["export_path=none", "logs_dir=~/runs", "tasks_dir=", "data="]
    assert with_absolute_paths([*given, *unchanged], ROOT) == [
        f"data={tmp_path}/a.jsonl,b.jsonl",
        "model_name=Qwen/Qwen3-4B",
        f"log_path={tmp_path}/runs/one",
        "env=a.jsonl",
        "seed=1",
        *unchanged,
    ]


def test_named_files_and_directories_to_compare_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CALLER_DIR, str(tmp_path))
    (tmp_path / "a.jsonl").touch()
    for name in ("old", "base"):
        (tmp_path / name).mkdir()
    given = [
        "test_data=val=a.jsonl,b.jsonl",
        "compare_with=old",
        "environment_kwargs=system=a.jsonl,domain=old",
    ]
    assert with_absolute_paths([*given, "compare_with=base"], ROOT) == [
        f"test_data=val={tmp_path}/a.jsonl,b.jsonl",
        f"compare_with={tmp_path}/old",
        f"environment_kwargs=system={tmp_path}/a.jsonl,domain=old",
        "compare_with=base",
    ]


def test_entries_with_commas_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CALLER_DIR, str(tmp_path))
    (tmp_path / "a,b.jsonl").touch()
    given = ["data=['a,b.jsonl', 'c.jsonl']", "eval_tasks=[ab]*,c"]
    assert with_absolute_paths(given, ROOT) == [f"data=['{tmp_path}/a,b.jsonl', 'c.jsonl']", given[1]]


def test_a_comma_does_not_split_a_single_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CALLER_DIR, str(tmp_path))
    (tmp_path / "a,b").mkdir()
    assert with_absolute_paths(["tasks_dir=a,b"], ROOT) == [f"tasks_dir={tmp_path}/a,b"]


def test_the_directory_of_a_server_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    config = parse(["backend=skyrl-tx", "skyrl_tx_url=http://h:1", "model_name=m", "tasks_dir=t"])
    for log_path in ("~/runs/a", str(tmp_path / "link")):
        directory = new_server_directory({"log_path": log_path}, config)
        make_private(directory)
        (directory / SERVER_FILE).write_text("[]")
        assert server_directory_of(log_path) == directory


def test_paths_in_a_configuration_file_are_those_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CALLER_DIR, str(tmp_path))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "mine.yaml").write_text("{tasks_dir: tasks, model_name: m, trainer.export_path: dumps}")
    passed: list[dict[str, str]] = []
    monkeypatch.setattr(run_skyrl_tx, "full_recipe", lambda options: passed.append(options) or 0)
    assert run_skyrl_tx.main(["config=mine.yaml"]) == 0
    expected = {"tasks_dir": f"{tmp_path}/tasks", "model_name": "m", "export_path": f"{tmp_path}/dumps"}
    assert passed == [expected]


def test_paths_are_unchanged_in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CALLER_DIR, str(ROOT))
    assert with_absolute_paths(["log_path=runs/one"], ROOT) == ["log_path=runs/one"]


def test_the_script_reads_a_file_of_the_calling_directory(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("no_such_option: 1\n")
    process = subprocess.run(
        [ROOT / "run_skyrl_tx.sh", "config=mine.yaml", "quickstart=terminal"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode != 0
    assert "no_such_option" in process.stdout + process.stderr

"""Tests that a resume with damaged run files works or ends with a one-line error.

The error for a line that is not a record, or for a value of a wrong type, names the file and the line.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from src.core.errors import ConfigError, NothingTrainedError, StorageError
from src.loop.connection import Dependencies
from tests.fakes.backend import BanditBackend
from tests.fakes.run import FakeRun
from tests.fakes.trials import FakeTasks, say_a_token, task

OPTIONS = (
    *(
        "tasks_dir=t",
        "temperature=1",
        "learning_rate=0.1",
        "behavior_if_log_dir_exists=resume",
        "eval_before_train=true",
    ),
    *(
        "batch_size=2",
        "group_size=2",
        "n_epochs=2",
        "save_every=1",
        "eval_every=2",
        "eval_group_size=1",
        "kl_penalty_coef=0",
    ),
    *("task_sampling=thompson", "max_failure_rate=1", "dump_eval_results=false"),
)
RUN_FILES = (
    "journal.jsonl",
    "checkpoints.jsonl",
    "metrics.jsonl",
    "config.json",
    "finished/step_000002.jsonl",
)
REPLACEMENT_VALUES: list[Any] = [
    *(
        "seven",
        "",
        None,
        True,
        [],
        {},
        -1,
        0,
        2**53,
        2**70,
        10**400,
        1.5,
        -0.0,
        1e308,
        float("nan"),
        float("inf"),
        [[]],
        {"a": {"b": 1}},
    ),
    *("<i4:", "<i4:AAAA", "|O:eJwDAAAAAAE=", "<f8:eJwDAAAAAAE=", "\x00\ud800"),
]
INVALID_LINES = [
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b"{" * 5,
    b'{"step": ' + b"9" * 5000 + b"}",
    b"null",
    b"[]",
    b"\x00" * 50,
    b'{"a": 1e999}',
]


class BanditRun(FakeRun):
    """A run on `BanditBackend`, a fake whose policy has four logits.

    A resume accepts any checkpoint and starts with new weights.
    """

    def __init__(self, path: Path) -> None:
        source = FakeTasks(
            train=[task(f"say-{n}") for n in range(4)],
            eval=[task("held-0"), task("held-1")],
            run_trial=say_a_token,
        )
        super().__init__(path, lambda config: Dependencies(source=source, backend=BanditBackend()))


@pytest.fixture(scope="module")
def interrupted_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run that ended after two of four steps.

    The checkpoint of the second step is removed, so a resume trains this step again on the stored rollouts.
    """
    path = tmp_path_factory.mktemp("half") / "run"
    with suppress(NothingTrainedError):  # raised if all trials of every group have the same reward
        asyncio.run(BanditRun(path).go(*OPTIONS, "max_steps=2"))
    first, _ = (path / "checkpoints.jsonl").read_text().splitlines(keepends=True)
    (path / "checkpoints.jsonl").write_text(first)
    assert all((path / name).is_file() for name in RUN_FILES)
    return path


def resume_error(interrupted_run: Path, tmp_path: Path, name: str, change: Any) -> str:
    """Resume a copy of the run with a changed file. Return the error message, or "" if the resume works."""
    copy = tmp_path / "run"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(interrupted_run, copy)
    (copy / name).write_bytes(change((copy / name).read_bytes()))
    try:
        with suppress(NothingTrainedError):
            asyncio.run(BanditRun(copy).go(*OPTIONS))
    except (ConfigError, StorageError) as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return str(error)
    return ""


@st.composite
def changed_values(draw: st.DrawFn) -> Any:
    """Draw a function that replaces or removes one value of one line of a file, at most five levels deep.

    A file that consists of one JSON value, such as config.json, is handled as one line.
    """
    line_number, path, replacement = (
        draw(st.integers(0, 40)),
        draw(st.lists(st.integers(0, 12), min_size=1, max_size=5)),
        draw(st.sampled_from(REPLACEMENT_VALUES)),
    )
    is_removed = draw(st.booleans())

    def change(content: bytes) -> bytes:
        lines = (
            content.splitlines(keepends=True)
            if b"\n{" in content[:-1] and not content.startswith(b"{\n")
            else [content]
        )
        line_index = line_number % len(lines)
        value = json.loads(lines[line_index])
        parent = value
        for number, index in enumerate(path):
            keys = [*parent] if isinstance(parent, dict) else [*range(len(parent))]
            if not keys:
                break
            key = keys[index % len(keys)]
            if number == len(path) - 1 or not isinstance(parent[key], dict | list) or not parent[key]:
                if is_removed:
                    del parent[key]
                else:
                    parent[key] = replacement
                break
            parent = parent[key]
        lines[line_index] = json.dumps(value).encode() + b"\n"
        return b"".join(lines)

    return change


def overwritten_bytes(fraction: float, replacement: bytes) -> Any:
    """Return a function that overwrites bytes of a file with `replacement`, starting at `fraction` of its
    length.
    """

    def change(content: bytes) -> bytes:
        start = int(fraction * len(content))
        return content[:start] + replacement + content[start + len(replacement) :]

    return change


PROPERTY_SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@PROPERTY_SETTINGS
@given(name=st.sampled_from(RUN_FILES), change=changed_values())
def test_a_changed_value_works_or_gives_a_one_line_error(
    interrupted_run: Path, tmp_path: Path, name: str, change: Any
) -> None:
    resume_error(interrupted_run, tmp_path, name, change)


@PROPERTY_SETTINGS
@given(
    name=st.sampled_from(RUN_FILES), fraction=st.floats(0, 1), replacement=st.binary(min_size=1, max_size=20)
)
def test_changed_bytes_work_or_give_a_one_line_error(
    interrupted_run: Path, tmp_path: Path, name: str, fraction: float, replacement: bytes
) -> None:
    resume_error(interrupted_run, tmp_path, name, overwritten_bytes(fraction, replacement))


@pytest.mark.parametrize("invalid_line", INVALID_LINES, ids=lambda invalid_line: repr(invalid_line[:12]))
@pytest.mark.parametrize("name", RUN_FILES)
def test_an_error_names_a_line_that_is_not_a_record(
    interrupted_run: Path, tmp_path: Path, name: str, invalid_line: bytes
) -> None:
    error = resume_error(interrupted_run, tmp_path, name, lambda content: invalid_line + b"\n" + content)
    where = name if name == "config.json" else f"{name}, line 1: "
    assert where in error and "restore the file from a copy" in error


@pytest.mark.parametrize("name", [name for name in RUN_FILES if name != "config.json"])
def test_an_incomplete_last_line_is_skipped(interrupted_run: Path, tmp_path: Path, name: str) -> None:
    assert (
        resume_error(interrupted_run, tmp_path, name, lambda content: content + content.splitlines()[-1][:-3])
        == ""
    )


def test_a_value_of_a_wrong_type_is_named_with_line_and_field(interrupted_run: Path, tmp_path: Path) -> None:
    def change(content: bytes) -> bytes:
        first, *rest = content.splitlines(keepends=True)
        return b"".join([json.dumps(json.loads(first) | {"resumed_from": "seven"}).encode() + b"\n", *rest])

    error = resume_error(interrupted_run, tmp_path, "journal.jsonl", change)
    assert "journal.jsonl, line 1: started.resumed_from: Input should be a valid integer" in error

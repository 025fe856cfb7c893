"""Tests the warnings about keys of task.toml that Harbor ignores."""

from __future__ import annotations

import tomllib

import pytest
from harbor.models.task.config import TaskConfig

from src.envs.harbor.task_keys import ignored_keys


@pytest.mark.parametrize(
    ("text", "warnings"),
    [
        ("[agent]\ntimeout_sec = 9", []),
        (
            "[agent]\ntimeout_seconds = 9",
            ["Harbor ignores agent.timeout_seconds in task.toml; did you mean agent.timeout_sec?"],
        ),
        (
            "[agents]\ntimeout_sec = 9",
            ["Harbor ignores agents in task.toml; did you mean agent?"],
        ),
        (
            "[verifier.environment]\nimage = 'a'",
            ["Harbor ignores verifier.environment.image in task.toml"],
        ),
        ("[metadata]\nanything = 1\n[environment.env]\nNAME = 'value'", []),
        ("version = '1.0'\n[environment]\nmemory = '1G'\nstorage = '1G'", []),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_keys_that_harbor_ignores_are_named(text: str, warnings: list[str]):
    config = TaskConfig.model_validate_toml(text)
    assert ignored_keys(tomllib.loads(text), config) == warnings

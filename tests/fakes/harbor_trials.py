"""Real Harbor trials in sandboxes, with a policy that answers from a script."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from src.config import TrainerConfig
from src.core.trajectory import Trajectory, TrialFailure
from src.envs.harbor.environment import HarborTasks, open_harbor
from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.envs.sandbox.sandbox_directory import sandbox_directory
from tests.fakes.scripted_policy import ScriptedPolicy, solving
from tests.fakes.tokenizer import byte_chat

REASON = why_no_sandbox()
in_sandbox = pytest.mark.skipif(REASON is not None, reason=f"no sandbox here: {REASON}")

TASKS = Path(__file__).resolve().parents[1] / "tasks"
HELLO = TASKS / "hello-file"
SOLUTION = solving("echo hello > /app/hello.txt")


def harbor_tasks(tasks_dir: Path = HELLO, **options: object) -> HarborTasks:
    defaults = {"environment_type": "sandbox", "max_turns": 8, "enable_summarize": False, "eval_split": 0.0}
    return open_harbor(
        TrainerConfig(model_name="org/model", tasks_dir=str(tasks_dir), **{**defaults, **options}),
        byte_chat(),
    )


def remaining_files(tasks: HarborTasks) -> set[str]:
    """Return the names of the files in the sandbox directory."""
    return {path.name for path in sandbox_directory(tasks.run_label).iterdir()}


async def run_trial(
    tmp_path: Path,
    script: Sequence[str | BaseException] | Mapping[str, Sequence[str | BaseException]],
    tasks: HarborTasks | None = None,
) -> tuple[Trajectory | TrialFailure, ScriptedPolicy]:
    """Run one trial of the first task. Only the lock and shared files may remain in the sandbox directory."""
    tasks = tasks or harbor_tasks()
    policy = ScriptedPolicy(byte_chat(), script if isinstance(script, Mapping) else {"": script})
    trial = tasks.trial(tasks.train[0], directory=tmp_path / "jobs", seed=1, temperature=1.0)
    outcome = await trial.run(policy)
    assert remaining_files(tasks) <= {"lock", "skeleton", "labels.yaml"}
    return outcome, policy


def variant(
    tmp_path: Path, *, test: str | None = None, task_toml: str | None = None, dockerfile: str | None = None
) -> Path:
    """Copy the task `hello-file`, replace the given files, and return the directory. `test` is shell code."""
    directory = tmp_path / "tasks" / "variant"
    shutil.copytree(HELLO, directory)
    if test is not None:
        (directory / "tests" / "test.sh").write_text(f"#!/bin/bash\n{test}\n")
    if task_toml is not None:
        (directory / "task.toml").write_text(task_toml)
    if dockerfile is not None:
        (directory / "environment" / "Dockerfile").write_text(dockerfile)
    return directory

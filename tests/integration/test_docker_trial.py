"""Tests of a complete trial and of the removal of containers on a real Docker engine.

The tests are skipped if trials cannot run on Docker on this machine or if the image `BASE_IMAGE` is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from src.config import TrainerConfig
from src.core.trajectory import StopReason, Trajectory, Turn
from src.envs.harbor.environment import open_harbor
from src.envs.sandbox.docker import OWNER_LABEL, RUN_LABEL, remove_ended, why_no_engine
from src.envs.sandbox.sandbox_directory import live_run_labels, sandbox_directory
from src.policy.sampling_policy import SampleRequest
from tests.fakes.scripted_policy import ScriptedPolicy, answer, solving
from tests.fakes.tokenizer import byte_chat

BASE_IMAGE = "debian:bookworm-slim"
HELLO_TASK = Path(__file__).resolve().parents[1] / "tasks" / "hello-file"


def missing_requirement() -> str | None:
    """Return why the tests cannot run on this machine, or None."""
    if reason := why_no_engine():
        return reason
    present = subprocess.run(["docker", "image", "inspect", BASE_IMAGE], capture_output=True, check=False)
    return None if present.returncode == 0 else f"the image {BASE_IMAGE} is missing"


REASON = missing_requirement()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"trials cannot run on Docker: {REASON}")


def containers_of(label: str) -> list[str]:
    """Return the ids of the containers of the run `label`."""
    command = ["docker", "ps", "--all", "--quiet", "--filter", f"label={RUN_LABEL}={label}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


async def test_a_trial_on_docker_is_graded_and_leaves_no_container(tmp_path: Path) -> None:
    directory = tmp_path / "hello-docker"
    shutil.copytree(HELLO_TASK, directory)
    # This task.toml omits the no-network mode, because Harbor needs images from a registry for that mode.
    (directory / "task.toml").write_text("[agent]\ntimeout_sec = 300\n")
    options = {"environment_type": "auto", "max_turns": 6, "enable_summarize": False, "eval_split": 0.0}
    tasks = open_harbor(
        TrainerConfig(model_name="org/model", tasks_dir=str(directory), **options), byte_chat()
    )
    label = tasks.run_label
    assert tasks.environment_type == "docker"
    assert label in live_run_labels()
    container_ids: list[list[str]] = []  # the containers of the run at each sampling call

    class RecordingPolicy(ScriptedPolicy):
        async def sample(self, request: SampleRequest) -> Turn:
            container_ids.append(containers_of(label))
            remove_ended(keep=live_run_labels())  # Another trainer makes this call when it starts.
            return await super().sample(request)

    script = [
        answer("rm -rf /tmp/*; cat /proc/1/comm; echo hello > /app/hello.txt", duration=1.0),
        *solving("true")[1:],
    ]
    policy = RecordingPolicy(byte_chat(), {"": script})
    outcome = await tasks.trial(tasks.train[0], directory=tmp_path / "jobs", seed=1, temperature=1.0).run(
        policy
    )
    assert isinstance(outcome, Trajectory), outcome
    assert (outcome.reward, outcome.stop_reason, len(outcome.turns)) == (1.0, StopReason.STOP, 3)
    assert [len(ids) for ids in container_ids] == [1, 1, 1]
    assert containers_of(label) == []


def test_only_containers_of_ended_runs_are_removed() -> None:
    def start(label: str) -> str:
        labels = ["--label", f"{RUN_LABEL}={label}", "--label", f"{OWNER_LABEL}={os.getuid()}"]
        command = ["docker", "run", "--detach", "--network", "none", *labels, BASE_IMAGE, "sleep", "300"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    ended, active = f"test-ended-{os.getpid()}", f"test-active-{os.getpid()}"
    sandbox_directory(active)
    containers = {label: start(label) for label in (ended, active)}
    try:
        remove_ended(keep=live_run_labels())
        assert containers_of(ended) == [] and len(containers_of(active)) == 1
    finally:
        subprocess.run(["docker", "rm", "--force", *containers.values()], capture_output=True, check=False)

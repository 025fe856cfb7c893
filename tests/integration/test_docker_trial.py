"""One whole trial on a real Docker engine. Where none answers this skips and says so."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from src.config import TrainerConfig
from src.core.trajectory import StopReason, Trajectory, Turn
from src.envs.harbor.environment import open_harbor
from src.envs.sandbox.docker import OWNER_LABEL, RUN_LABEL, remove_dead, why_no_engine
from src.envs.sandbox.run_directory import living_labels, run_directory
from src.policy.sampling_policy import SampleRequest
from tests.fakes.scripted_policy import ScriptedPolicy, answer, solving
from tests.fakes.tokenizer import byte_chat

BASE_IMAGE = "debian:bookworm-slim"
HELLO = Path(__file__).resolve().parents[1] / "tasks" / "hello-file"


def why_not() -> str | None:
    if reason := why_no_engine():
        return reason
    present = subprocess.run(["docker", "image", "inspect", BASE_IMAGE], capture_output=True, check=False)
    return None if present.returncode == 0 else f"the image {BASE_IMAGE} is not there"


REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no trial on Docker: {REASON}")


def labelled(label: str) -> list[str]:
    command = ["docker", "ps", "--all", "--quiet", "--filter", f"label={RUN_LABEL}={label}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


async def test_a_trial_on_docker_is_graded_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "hello-docker"
    shutil.copytree(HELLO, folder)
    (folder / "task.toml").write_text(
        "[agent]\ntimeout_sec = 300\n"
    )  # no-network would need an image from a registry
    options = {"environment_type": "auto", "max_turns": 6, "enable_summarize": False, "eval_split": 0.0}
    tasks = open_harbor(TrainerConfig(model_name="org/model", tasks_dir=str(folder), **options), byte_chat())
    label = tasks.settings.run_label
    assert tasks.environment_type == "docker"
    assert label in living_labels()
    seen: list[list[str]] = []

    class Watching(ScriptedPolicy):
        async def sample(self, request: SampleRequest) -> Turn:
            seen.append(labelled(label))
            remove_dead(keep=living_labels())  # as another trainer does at its start
            return await super().sample(request)

    script = [
        answer("rm -rf /tmp/*; cat /proc/1/comm; echo hello > /app/hello.txt", duration=1.0),
        *solving("true")[1:],
    ]
    policy = Watching(byte_chat(), {"": script})
    outcome = await tasks.trial(tasks.train[0], directory=tmp_path / "jobs", seed=1, temperature=1.0).run(
        policy
    )
    assert isinstance(outcome, Trajectory), outcome
    assert (outcome.reward, outcome.stop_reason, len(outcome.turns)) == (1.0, StopReason.STOP, 3)
    assert [len(containers) for containers in seen] == [1, 1, 1]
    assert labelled(label) == []


def test_only_containers_of_dead_runs_are_removed() -> None:
    def start(label: str) -> str:
        labels = ["--label", f"{RUN_LABEL}={label}", "--label", f"{OWNER_LABEL}={os.getuid()}"]
        command = ["docker", "run", "--detach", "--network", "none", *labels, BASE_IMAGE, "sleep", "300"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    dead, alive = f"test-dead-{os.getpid()}", f"test-alive-{os.getpid()}"
    run_directory(alive)
    containers = {label: start(label) for label in (dead, alive)}
    try:
        remove_dead(keep=living_labels())
        assert labelled(dead) == [] and len(labelled(alive)) == 1
    finally:
        subprocess.run(["docker", "rm", "--force", *containers.values()], capture_output=True, check=False)

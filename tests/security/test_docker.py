"""Tests of the containers of trials, and of the clean-up of Docker objects, with a real Docker engine.

Downloads from a container follow no links. Downloads and the output of commands are limited. A clean-up
removes the containers, networks and volumes of ended runs, and no other objects.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from docker.errors import NotFound
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.config import ServiceVolumeConfig
from harbor.models.trial.paths import TrialPaths

from src.core.errors import SandboxError
from src.core.event_loop import LagMeter
from src.envs.cleanup import main as cleanup
from src.envs.sandbox import docker
from src.envs.sandbox.containers import MAX_OUTPUT_BYTES, ContainerEnvironment
from src.envs.sandbox.docker import (
    OWNER_LABEL,
    PROCESS_LABEL,
    PROJECT_LABEL,
    RUN_LABEL,
    engine,
    process_name,
    remove_ended,
    run_labels,
    why_no_engine,
)
from src.envs.sandbox.file_copy import MAX_FILES, NOTE_FILE
from src.envs.sandbox.resource_limits import SandboxLimits
from src.envs.sandbox.sandbox_directory import live_run_labels

BASE_IMAGE = "debian:bookworm-slim"
ROOT = Path(__file__).resolve().parents[2]
COMPOSE = f"""
services:
  main:
    networks: [default, inner]
    volumes: ["data:/data"]
  database:
    image: {BASE_IMAGE}
    command: ["sleep", "infinity"]
    networks: [inner]
networks:
  inner:
    internal: true
volumes:
  data: {{}}
"""


@pytest.fixture(autouse=True)
def separate_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the objects of each test a separate owner, so that no other test and no trainer removes them."""
    owner = f"test-{secrets.token_hex(4)}"
    monkeypatch.setattr(docker, "owner", lambda: owner)


def missing_requirement() -> str | None:
    """Return why the tests cannot run on this machine, or None."""
    if reason := why_no_engine():
        return reason
    with engine(timeout_s=20) as client:
        try:
            client.images.get(BASE_IMAGE)
        except NotFound:
            return f"the image {BASE_IMAGE} is missing"
    return None


REASON = missing_requirement()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"containers cannot run on this machine: {REASON}")


def create_environment(
    tmp_path: Path, name: str, *, label: str, compose: str | None = None
) -> ContainerEnvironment:
    directory = tmp_path / "environment"
    directory.mkdir(exist_ok=True)
    if compose:
        (directory / "docker-compose.yaml").write_text(compose)
    paths = TrialPaths(trial_dir=tmp_path / "trial")
    paths.mkdir()
    mounts: list[ServiceVolumeConfig] = [
        {"type": "bind", "source": str(path), "target": f"/logs/{target}"}
        for path, target in ((paths.agent_dir, "agent"), (paths.verifier_dir, "verifier"))
    ]
    return ContainerEnvironment(
        environment_dir=directory,
        environment_name="task",
        session_id=name,
        trial_paths=paths,
        task_env_config=EnvironmentConfig(docker_image=BASE_IMAGE),
        mounts=mounts,
        run_label=label,
    )


@asynccontextmanager
async def environment(tmp_path: Path) -> AsyncIterator[ContainerEnvironment]:
    container = create_environment(
        tmp_path, f"test-{secrets.token_hex(4)}", label=f"test-docker-{os.getpid()}"
    )
    try:
        await container.start(force_build=False)
        yield container
    finally:
        await container.stop(delete=True)


def paths_below(directory: Path) -> list[Path]:
    return [
        Path(parent, name)
        for parent, directories, files in os.walk(directory)
        for name in (*directories, *files)
    ]


def objects_of_project(project: str) -> set[str]:
    """Return the names of the containers, networks and volumes of a compose project."""
    filters: dict[str, str | list[str] | bool] = {"label": f"{PROJECT_LABEL}={project}"}
    with engine(timeout_s=20) as client:
        objects = [
            *client.containers.list(all=True, filters=filters),
            *client.networks.list(filters=filters),
            *client.volumes.list(filters=filters),
        ]
        return {str(project_object.name) for project_object in objects}


async def test_container_downloads_are_limited_and_follow_no_links(
    tmp_path: Path,
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret of the host")
    async with environment(tmp_path) as container:
        agent_command = (
            f"cd /logs/agent && seq 1 20000 | xargs touch && ln -s {secret} link && mkfifo pipe && "
            "truncate -s 10G sparse && echo ok > 0"
        )
        assert (await container.exec(agent_command)).return_code == 0
        assert paths_below(tmp_path / "trial" / "agent") == []  # No host directory is mounted.
        verifier_command = (
            f"cd /logs/verifier && head -c 200M /dev/zero > aaa && ln -s {secret} reward.json && echo 1 > "
            "reward.txt"
        )
        assert (await container.exec(verifier_command)).return_code == 0
        num_iterations = 0

        async def count_iterations() -> None:
            nonlocal num_iterations
            while True:
                num_iterations += 1
                await asyncio.sleep(0.001)

        counting = asyncio.create_task(count_iterations())
        async with LagMeter() as lag_meter:
            await container.download_dir("/logs/agent", tmp_path / "trial" / "agent")
            await container.download_dir("/logs/verifier", tmp_path / "trial" / "verifier")
            longest_lag_s = lag_meter.take()
        counting.cancel()
        assert num_iterations > 20 and longest_lag_s < 5, (num_iterations, longest_lag_s)
        with pytest.raises(SandboxError, match="cannot download"):
            await container.download_file("/logs/agent/sparse", tmp_path / "trial" / "sparse")
        with pytest.raises(SandboxError, match="cannot download"):
            await container.download_file("/logs/agent/link", tmp_path / "trial" / "link")
        (tmp_path / "trial" / "verifier" / "host.txt").write_text("file of Harbor")
        await container.upload_dir(tmp_path / "trial" / "verifier", "/logs/verifier")
        assert (
            await container.exec("cd /logs/verifier && ls && stat -c %s aaa")
        ).stdout == "aaa\nhost.txt\nreward.json\nreward.txt\n209715200\n"
        with pytest.raises(SandboxError, match="cannot download /nowhere"):
            await container.download_dir("/nowhere", tmp_path / "trial" / "nowhere")
    local_files = paths_below(tmp_path / "trial")
    assert (tmp_path / "trial" / "verifier" / "reward.txt").read_text() == "1\n"
    assert len(local_files) <= MAX_FILES and sum(path.lstat().st_size for path in local_files) < 40 * 2**20
    assert not any(path.is_symlink() or path.is_fifo() for path in local_files)
    note = (tmp_path / "trial" / NOTE_FILE).read_text()
    assert "/logs/agent: at most" in note and "/logs/verifier: at most" in note


async def attributes_of_services(directory: Path, compose: str) -> list[dict[str, Any]]:
    """Start the services of a compose file, stop them, and return the attributes of their containers."""
    name = f"test-{secrets.token_hex(4)}"
    compose_environment = create_environment(
        directory, name, label=f"test-docker-{os.getpid()}", compose=compose
    )
    try:
        await compose_environment.start(force_build=False)
        with engine(timeout_s=20) as client:
            containers = client.containers.list(filters={"label": f"{PROJECT_LABEL}={name}"})
            return [container.attrs for container in containers]
    finally:
        await compose_environment.stop(delete=True)


async def test_every_service_has_a_stop_timeout_of_0_seconds(tmp_path: Path) -> None:
    attributes = await attributes_of_services(tmp_path, COMPOSE)
    assert [container["Config"]["StopTimeout"] for container in attributes] == [0, 0]


async def test_the_number_of_processes_of_a_service_is_limited(tmp_path: Path) -> None:
    compose = COMPOSE.replace("    command:", "    pids_limit: 77\n    command:")
    attributes = await attributes_of_services(tmp_path, compose)
    limits = {container["HostConfig"]["PidsLimit"] for container in attributes}
    assert limits == {SandboxLimits().processes, 77}


async def test_the_output_of_a_command_is_cut_at_the_limit(tmp_path: Path) -> None:
    async with environment(tmp_path) as container:
        result = await container.exec("head -c 50M /dev/zero | tr '\\0' x; exit 3")
        assert (len(result.stdout or ""), result.return_code) == (MAX_OUTPUT_BYTES, 3)


async def test_a_command_that_exceeds_its_timeout_raises_an_error(tmp_path: Path) -> None:
    async with environment(tmp_path) as container:
        with pytest.raises(RuntimeError, match="timed out"):
            await container.exec("sleep 60", timeout_sec=1)


TRAINER = """
import asyncio, sys
from pathlib import Path
from src.envs.sandbox import docker
from tests.security.test_docker import COMPOSE, create_environment

async def main(directory, name, owner):
    docker.owner = lambda: owner
    container = create_environment(Path(directory), name, label=f"test-killed-{name}", compose=COMPOSE)
    await container.start(force_build=False)
    await container.exec("echo x > /data/x")
    print("started", flush=True)
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_cleanup_removes_the_objects_of_a_killed_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"killed-{secrets.token_hex(4)}"
    # All trainers of a user have their locks in the same directory, whatever their TMPDIR is.
    other_tmpdir = tmp_path / "elsewhere"
    other_tmpdir.mkdir()
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path), name, docker.owner()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(other_tmpdir)},
    )
    try:
        with objects_of_another_project() as removed_foreign_objects:
            assert trainer.stdout is not None and trainer.stdout.readline() == b"started\n"
            objects_before = objects_of_project(name)
            assert {
                f"{name}-main-1",
                f"{name}-database-1",
                f"{name}_default",
                f"{name}_inner",
                f"{name}_data",
            } <= objects_before
            cleanup()
            assert objects_of_project(name) == objects_before, (
                "the clean-up removed objects of a live run with another TMPDIR"
            )
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
            capsys.readouterr()
            assert cleanup() == 0
            output = capsys.readouterr().out
            assert objects_of_project(name) == set()
            assert all(f" {object_name}\n" in output for object_name in objects_before), output
            cleanup()
            output = capsys.readouterr().out
            assert not any(object_name in output for object_name in objects_before), output
            assert removed_foreign_objects() == set()
    finally:
        trainer.kill()
        trainer.wait()
        assert trainer.stdout is not None
        trainer.stdout.close()


@contextmanager
def objects_of_another_project() -> Iterator[Callable[[], set[str]]]:
    """Create a container, a network and a volume of another project. Yield a function that returns the names
    of the objects that no longer exist.
    """
    project = f"foreign-{secrets.token_hex(4)}"
    labels = {PROJECT_LABEL: project}
    names = {f"{project}-{kind}" for kind in ("network", "volume", "container")}
    with engine(timeout_s=60) as client:
        network = client.networks.create(f"{project}-network", labels=labels)
        volume = client.volumes.create(f"{project}-volume", labels=labels)
        container = client.containers.create(
            BASE_IMAGE, ["true"], name=f"{project}-container", network=network.name, labels=labels
        )
        try:
            yield lambda: names - objects_of_project(project)
        finally:
            container.remove(force=True)
            network.remove()
            volume.remove()


def labels_of_ended_run(run: str) -> dict[str, str]:
    """Return the labels of Docker objects of a run with the label `run`, whose trainer has ended."""
    ended = subprocess.Popen(["true"])
    name = process_name(ended.pid)
    ended.wait()
    return {RUN_LABEL: run, OWNER_LABEL: docker.owner(), PROCESS_LABEL: name}


def test_concurrent_cleanups_remove_all_objects() -> None:
    projects = [f"same-time-{secrets.token_hex(4)}" for _ in range(6)]
    with engine(timeout_s=60) as client:
        for project in projects:
            labels = {PROJECT_LABEL: project, **labels_of_ended_run(project)}
            client.containers.run(
                BASE_IMAGE, ["sleep", "60"], detach=True, name=f"{project}-main", labels=labels
            )
    with ThreadPoolExecutor() as executor:
        reports = list(executor.map(lambda _: remove_ended(keep=live_run_labels()), range(4)))
    assert [line for report in reports for line in report.failed] == []
    removed = {line for report in reports for line in report.removed}
    assert removed == {f"container {project}-main" for project in projects}
    assert not any(objects_of_project(project) for project in projects)


def test_a_cleanup_removes_a_project_without_containers() -> None:
    project = f"early-{secrets.token_hex(4)}"
    with engine(timeout_s=60) as client:
        client.networks.create(
            f"{project}_default", labels={PROJECT_LABEL: project, **labels_of_ended_run(project)}
        )
        client.volumes.create(f"{project}_unlabelled", labels={PROJECT_LABEL: project})
    report = remove_ended(keep=live_run_labels())
    assert {f"network {project}_default", f"volume {project}_unlabelled"} <= set(report.removed)
    assert objects_of_project(project) == set()


def test_objects_that_cannot_be_removed_are_reported() -> None:
    project = f"busy-{secrets.token_hex(4)}"
    with engine(timeout_s=60) as client:
        network = client.networks.create(
            f"{project}_default", labels={PROJECT_LABEL: project, **labels_of_ended_run(project)}
        )
        foreign_container = client.containers.run(
            BASE_IMAGE, ["sleep", "60"], detach=True, network=network.name
        )
        try:
            report = remove_ended(keep=live_run_labels())
            assert not any(project in line for line in report.removed)
            (line,) = [line for line in report.failed if project in line]
            assert "active endpoints" in line
        finally:
            foreign_container.remove(force=True)
            network.remove()


def test_a_cleanup_keeps_runs_that_may_not_have_ended() -> None:
    remote_run, live_run = (f"{name}-{secrets.token_hex(4)}" for name in ("remote", "live"))
    with engine(timeout_s=60) as client:
        networks = [
            client.networks.create(
                remote_run, labels={**run_labels(remote_run), PROCESS_LABEL: "another-host:1:1"}
            ),
            client.networks.create(live_run, labels=run_labels(live_run)),
        ]
        try:
            report = remove_ended(keep=live_run_labels())
            for network in networks:
                network.reload()
            assert [line for line in report.skipped if remote_run in line] == [
                f"network {remote_run}: its trainer ran on the host another-host"
            ]
            assert not any(live_run in line for line in (*report.removed, *report.failed, *report.skipped))
        finally:
            for network in networks:
                network.remove()

"""What we ask of a Docker engine ourselves: whether it answers, and to remove what dead runs left there.

Every container, network and volume of a trial is labelled when it is made, with the run, its user and the process that runs it. A run is
dead when nobody holds its lock and its process is gone; what belongs to a compose project of a dead run is removed with the project.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
from docker.context import ContextAPI
from docker.errors import APIError, DockerException, NotFound

RUN_LABEL = "agent-trainer.run"
OWNER_LABEL = "agent-trainer.owner"
PROCESS_LABEL = "agent-trainer.process"
PROJECT_LABEL = "com.docker.compose.project"
ANSWER_TIMEOUT_S = 20
REMOVE_TIMEOUT_S = 120
KINDS = ("container", "network", "volume", "image")  # in this order: what is in use cannot be removed
ADDRESS_POOLS = 25  # Docker's default pools hold about 31 networks, and each trial has one


@dataclass(kw_only=True, slots=True)
class CleanupReport:
    """What a clean-up did, one line each."""

    removed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # with the reason
    left_alone: list[str] = field(
        default_factory=list
    )  # of runs that may be alive where nobody here can see it


@contextmanager
def engine(*, timeout_s: int) -> Iterator[docker.DockerClient]:
    """A connection to the engine that the docker command would use. DockerException when there is none."""
    if os.environ.get("DOCKER_HOST"):
        client = docker.from_env(timeout=timeout_s)
    else:
        context = ContextAPI.get_current_context()
        client = docker.DockerClient(base_url=context.Host, tls=context.TLSConfig or False, timeout=timeout_s)
    try:
        yield client
    finally:
        client.close()


def why_no_engine() -> str | None:
    """Why trials cannot run on Docker here; None when they can. The engine is asked itself; compose is a part of the command."""
    try:
        with engine(timeout_s=ANSWER_TIMEOUT_S) as client:
            client.ping()
    except (DockerException, OSError) as error:
        return f"no engine answers ({' '.join(str(error).split())[:200]})"
    if shutil.which("docker") is None:
        return "there is no docker command"
    try:
        answer = subprocess.run(
            ["docker", "compose", "version"], capture_output=True, timeout=ANSWER_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "`docker compose` does not answer"
    return None if answer.returncode == 0 else "no `docker compose`"


def run_labels(run_label: str) -> dict[str, str]:
    """What marks everything of a run in the engine."""
    return {RUN_LABEL: run_label, OWNER_LABEL: str(os.getuid()), PROCESS_LABEL: process_name(os.getpid())}


def process_name(pid: int) -> str:
    """A name that no other process of this machine ever has: a number is given again, but not at the same moment."""
    return f"{socket.gethostname()}:{pid}:{_start_time(pid) or 0}"


def remove_dead(*, keep: Iterable[str]) -> CleanupReport:
    """Remove what this user's dead runs left in the engine. The runs in `keep`, and those whose process lives, are left alone."""
    kept = set(keep)
    cleaned = CleanupReport()
    with engine(timeout_s=REMOVE_TIMEOUT_S) as client:
        dead: list[_DockerObject] = []
        living_projects: set[str] = set()
        for item in _list_objects(client, f"{OWNER_LABEL}={os.getuid()}"):
            process = item.labels.get(PROCESS_LABEL)
            if item.labels.get(RUN_LABEL) in kept or (process is not None and _is_running(process)):
                living_projects.add(item.labels.get(PROJECT_LABEL, ""))
            elif process is not None and _is_on_other_host(process):
                living_projects.add(item.labels.get(PROJECT_LABEL, ""))
                cleaned.left_alone.append(
                    f"{item.name}: its trainer ran on the host {process.partition(':')[0]}"
                )
            else:
                dead.append(item)
        living_projects.discard("")  # of what was made without compose
        projects = {
            item.labels[PROJECT_LABEL] for item in dead if PROJECT_LABEL in item.labels
        } - living_projects
        for project in sorted(projects):
            dead += _list_objects(client, f"{PROJECT_LABEL}={project}")
            dead += _built_images(client, project)
        unique = {
            (item.kind, item.id): item
            for item in dead
            if item.labels.get(PROJECT_LABEL, "") not in living_projects
        }
        for item in sorted(unique.values(), key=lambda item: KINDS.index(item.kind)):
            _remove(item, cleaned)
    return cleaned


@dataclass(frozen=True, kw_only=True, slots=True)
class _DockerObject:
    kind: str
    id: str
    name: str
    labels: dict[str, str]
    remove: Callable[[], object]
    reload: Callable[[], object]  # raises NotFound once it is gone


def _list_objects(client: docker.DockerClient, label: str) -> list[_DockerObject]:
    """The containers, networks and volumes with a label."""
    filters: dict[str, str | list[str] | bool] = {"label": label}
    found = [
        _DockerObject(
            kind="container",
            id=str(one.id),
            name=f"container {one.name}",
            labels=one.labels,
            remove=lambda one=one: one.remove(force=True, v=True),
            reload=one.reload,
        )
        for one in client.containers.list(all=True, filters=filters, ignore_removed=True)
    ]
    for one in client.networks.list(filters=filters):
        labels = one.attrs.get("Labels") or {}
        found.append(
            _DockerObject(
                kind="network",
                id=str(one.id),
                name=f"network {one.name}",
                labels=labels,
                remove=one.remove,
                reload=one.reload,
            )
        )
    for one in client.volumes.list(filters=filters):
        labels = one.attrs.get("Labels") or {}
        found.append(
            _DockerObject(
                kind="volume",
                id=str(one.id),
                name=f"volume {one.name}",
                labels=labels,
                remove=one.remove,
                reload=one.reload,
            )
        )
    return found


def _built_images(client: docker.DockerClient, project: str) -> list[_DockerObject]:
    """The images that compose built for the services of one project. A task's own image has a name of its own and serves other trials."""
    found = []
    for image in client.images.list(filters={"label": f"{PROJECT_LABEL}={project}"}):
        for tag in image.tags:
            if tag.startswith((f"{project}-", f"{project}_")):
                remove, reload = _image_calls(client, tag)
                found.append(
                    _DockerObject(
                        kind="image",
                        id=tag,
                        name=f"image {tag}",
                        labels={PROJECT_LABEL: project},
                        remove=remove,
                        reload=reload,
                    )
                )
    return found


def _image_calls(client: docker.DockerClient, tag: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    return lambda: client.images.remove(tag), lambda: client.images.get(tag)


def _remove(item: _DockerObject, cleaned: CleanupReport) -> None:
    """Remove it and look whether it is gone; what somebody else removed meanwhile is not reported."""
    reason = "the engine says nothing"
    try:
        item.remove()
    except NotFound:
        return
    except (APIError, DockerException, OSError) as error:
        reason = " ".join(str(getattr(error, "explanation", None) or error).split())[:200]
    try:
        item.reload()
    except NotFound:
        cleaned.removed.append(item.name)
    except (DockerException, OSError) as error:
        cleaned.failed.append(f"{item.name}: {error}")
    else:
        cleaned.failed.append(f"{item.name}: {reason}")


def _is_on_other_host(process: str) -> bool:
    return process.partition(":")[0] != socket.gethostname()


def _is_running(process: str) -> bool:
    """Whether the process of that name lives on this machine."""
    host, _, rest = process.partition(":")
    pid, _, started = rest.partition(":")
    return host == socket.gethostname() and pid.isdigit() and started == str(_start_time(int(pid)) or "gone")


def _start_time(pid: int) -> int | None:
    """When a process began, in the kernel's ticks; None for one that is gone."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])

"""Check whether a Docker engine answers, and remove the objects of ended runs from it.

Every container, network and volume of a trial is created with labels for its run, its user and the process of
its trainer. A run has ended if nobody holds the lock of its directory (`sandbox_directory`) and its process
does not exist. The clean-up removes the objects of ended runs, all other containers, networks and volumes of
the same compose projects, and the images that compose built for these projects. It keeps the objects of runs
on other hosts, because it cannot check whether these runs have ended.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path

import docker
from docker.errors import APIError, DockerException, NotFound

RUN_LABEL = "agent-trainer.run"
OWNER_LABEL = "agent-trainer.owner"
PROCESS_LABEL = "agent-trainer.process"
PROJECT_LABEL = "com.docker.compose.project"
ANSWER_TIMEOUT_S = 20
REMOVE_TIMEOUT_S = 120
OTHER_REMOVAL_TIMEOUT_S = 30.0  # for a removal that another process has started
KINDS = ("container", "network", "volume", "image")
"""The order of removal. The engine refuses to remove an object that another one uses."""
MAX_TRIAL_NETWORKS = 25
"""The number of concurrent trials above which a run warns that Docker may have too few networks. A trial has
one network, unless the compose file of its task declares more, and Docker's default address pools suffice for
about 31 networks."""


@dataclass(kw_only=True, slots=True)
class CleanupReport:
    """The result of a clean-up. Each element describes one Docker object or one sandbox directory."""

    removed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # objects that could not be removed, with the reason
    skipped: list[str] = field(default_factory=list)  # objects of runs on other hosts


def engine(*, timeout_s: int) -> AbstractContextManager[docker.DockerClient]:
    """Connect to the engine that the docker command would use, which may be that of a Docker context.

    Raises DockerException if this engine does not answer. The context manager closes the connection.
    """
    return closing(docker.from_env(timeout=timeout_s))


def why_no_engine() -> str | None:
    """Return the reason why this machine cannot run trials on Docker, or None if it can."""
    try:
        with engine(timeout_s=ANSWER_TIMEOUT_S) as client:
            client.ping()
    except (DockerException, OSError) as error:
        return f"no Docker engine answers ({' '.join(str(error).split())[:200]})"
    if shutil.which("docker") is None:
        return "the docker command is not installed"
    try:
        answer = subprocess.run(
            ["docker", "compose", "version"], capture_output=True, timeout=ANSWER_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"`docker compose` did not answer within {ANSWER_TIMEOUT_S} s"
    return None if answer.returncode == 0 else "the docker command has no `compose`"


def run_labels(run_label: str) -> dict[str, str]:
    """Return the labels that every Docker object of a run of this process has."""
    return {RUN_LABEL: run_label, OWNER_LABEL: owner(), PROCESS_LABEL: process_name(os.getpid())}


def owner() -> str:
    """Return the user id of this process, which is the value of OWNER_LABEL."""
    return str(os.getuid())


def process_name(pid: int) -> str:
    """Return a name of a process: its host, pid and start time, which is 0 if the process has ended.

    The start time distinguishes the process from later processes with the same pid.
    """
    return f"{socket.gethostname()}:{pid}:{_start_time(pid) or 0}"


def remove_ended(*, keep: Iterable[str]) -> CleanupReport:
    """Remove the objects of ended runs of this user from the engine.

    Keeps the objects of runs whose label is in `keep`, of runs whose process exists, and of runs on other
    hosts.
    """
    kept_labels = set(keep)
    report = CleanupReport()
    with engine(timeout_s=REMOVE_TIMEOUT_S) as client:
        ended: list[_DockerObject] = []
        kept_projects: set[str] = set()
        for item in _list_objects(client, f"{OWNER_LABEL}={owner()}"):
            process = item.labels.get(PROCESS_LABEL, "")
            host = process.partition(":")[0]
            if item.labels.get(RUN_LABEL) in kept_labels or _is_running(process):
                kept_projects.add(item.project)
            elif process and host != socket.gethostname():
                kept_projects.add(item.project)
                report.skipped.append(f"{item.name}: its trainer ran on the host {host}")
            else:
                ended.append(item)
        kept_projects.discard("")
        for project in sorted({item.project for item in ended} - kept_projects - {""}):
            ended += _list_objects(client, f"{PROJECT_LABEL}={project}")
            ended += _built_images(client, project)
        unique = {(item.kind, item.id): item for item in ended if item.project not in kept_projects}
        for item in sorted(unique.values(), key=lambda item: KINDS.index(item.kind)):
            _remove(item, report)
    return report


@dataclass(frozen=True, kw_only=True, slots=True)
class _DockerObject:
    kind: str  # one of KINDS
    id: str  # the engine's id, or for an image its tag
    name: str  # with the kind, for reports: "container NAME"
    labels: dict[str, str]
    remove: Callable[[], object]
    reload: Callable[[], object]  # raises NotFound after the removal

    @property
    def project(self) -> str:
        """The compose project, or an empty text if compose did not create the object."""
        return self.labels.get(PROJECT_LABEL, "")


def _list_objects(client: docker.DockerClient, label: str) -> list[_DockerObject]:
    """Return the containers, networks and volumes with a label."""
    filters: dict[str, str | list[str] | bool] = {"label": label}
    objects = [
        _DockerObject(
            kind="container",
            id=str(handle.id),
            name=f"container {handle.name}",
            labels=handle.labels,
            remove=lambda handle=handle: handle.remove(force=True, v=True),
            reload=handle.reload,
        )
        for handle in client.containers.list(all=True, filters=filters, ignore_removed=True)
    ]
    for kind, collection in (("network", client.networks), ("volume", client.volumes)):
        objects += [
            _DockerObject(
                kind=kind,
                id=str(handle.id),
                name=f"{kind} {handle.name}",
                labels=handle.attrs.get("Labels") or {},
                remove=handle.remove,
                reload=handle.reload,
            )
            for handle in collection.list(filters=filters)
        ]
    return objects


def _built_images(client: docker.DockerClient, project: str) -> list[_DockerObject]:
    """Return the images that compose built for the services of a project, without the image of the task."""
    return [
        _DockerObject(
            kind="image",
            id=tag,
            name=f"image {tag}",
            labels={PROJECT_LABEL: project},
            remove=lambda tag=tag: client.images.remove(tag),
            reload=lambda tag=tag: client.images.get(tag),
        )
        for image in client.images.list(filters={"label": f"{PROJECT_LABEL}={project}"})
        for tag in image.tags
        if tag.startswith((f"{project}-", f"{project}_"))
    ]


def _remove(item: _DockerObject, report: CleanupReport) -> None:
    """Remove an object, check that it does not exist afterwards, and add the result to `report`.

    An object that did not exist before the call is not reported. If another process is removing the object,
    wait for up to OTHER_REMOVAL_TIMEOUT_S.
    """
    reason = "the engine reported no error, but the object still exists"
    try:
        item.remove()
    except NotFound:
        return
    except (APIError, DockerException, OSError) as error:
        reason = " ".join(str(getattr(error, "explanation", None) or error).split())[:200]
    try:
        until = time.monotonic() + (OTHER_REMOVAL_TIMEOUT_S if "already in progress" in reason else 0)
        item.reload()
        while time.monotonic() < until:
            time.sleep(0.1)
            item.reload()
    except NotFound:
        report.removed.append(item.name)
    except (DockerException, OSError) as error:
        report.failed.append(f"{item.name}: {error}")
    else:
        report.failed.append(f"{item.name}: {reason}")


def _is_running(process: str) -> bool:
    """Return whether the process to which `process_name` gave this name exists on this machine."""
    host, _, rest = process.partition(":")
    pid, _, started = rest.partition(":")
    return host == socket.gethostname() and pid.isdigit() and started == str(_start_time(int(pid)) or "gone")


def _start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or None if it has ended."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])

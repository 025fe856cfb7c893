"""An agent's files in a Docker container: what it changed, taken by the engine itself and laid down in a fresh container of the image."""

from __future__ import annotations

import asyncio
import contextlib
import re
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import PurePosixPath
from typing import IO, Any

import docker
from docker.errors import APIError, DockerException, NotFound
from harbor.environments.base import BaseEnvironment
from requests.exceptions import RequestException

from src.core.errors import AgentFault, SandboxError, boundary
from src.core.trajectory import ZeroReason
from src.envs.harbor.carried_files import (
    MAX_BYTES,
    MODULE_DIRECTORIES,
    CarryRules,
    Changes,
    CleanArchive,
    Entry,
    check_bounds,
)

ENGINE_TIMEOUT_S = 120
MODIFIED, ADDED, REMOVED = 0, 1, 2  # of a container's difference to its image


class DockerFiles:
    """The files of one agent in the main container of its compose project. Nothing runs in that container to take them."""

    def __init__(self, environment: BaseEnvironment) -> None:
        self._environment = environment
        self._project = compose_project(environment.session_id)
        self._mounts: tuple[str, ...] = ()

    async def remember(self) -> None:
        """The image is what the container is compared with."""

    async def freeze(self) -> None:
        """End the container with everything in it; its files stay."""
        with boundary(SandboxError, "ending the agent's container"):
            await asyncio.to_thread(self._kill)

    async def take(self, archive: IO[bytes]) -> Changes:
        with boundary(SandboxError, "taking the agent's files"):
            return await asyncio.to_thread(self._take, archive)

    async def place(self, fresh: BaseEnvironment, archive: IO[bytes], changes: Changes) -> None:
        with boundary(SandboxError, "laying down the agent's files"):
            await asyncio.to_thread(self._place, fresh, archive, changes)

    @cached_property
    def _client(self) -> Any:
        return docker.from_env(timeout=ENGINE_TIMEOUT_S)

    def _container(self, project: str) -> Any:
        labels = [f"com.docker.compose.project={project}", "com.docker.compose.service=main"]
        found = self._client.containers.list(all=True, filters={"label": labels})
        if not found:
            raise SandboxError(f"there is no container of the compose project {project}")
        return found[0]

    def _kill(self) -> None:
        container = self._container(self._project)
        try:
            container.kill()
        except APIError as error:
            if error.status_code != 409:  # it has ended already
                raise
        container.wait(timeout=ENGINE_TIMEOUT_S)

    def _take(self, archive: IO[bytes]) -> Changes:
        container = self._container(self._project)
        variables = dict(item.split("=", 1) for item in container.attrs["Config"]["Env"] or [] if "=" in item)
        self._mounts = tuple(mount["Destination"] for mount in container.attrs["Mounts"])
        difference = {item["Path"]: item["Kind"] for item in container.diff() or []}
        modules = [
            path
            for path, kind in difference.items()
            if kind == MODIFIED and path.endswith(MODULE_DIRECTORIES)
        ]
        modules += [
            str(parent)
            for path in difference
            for parent in PurePosixPath(path).parents
            if parent.name in MODULE_DIRECTORIES and difference.get(str(parent), MODIFIED) == MODIFIED
        ]
        rules = CarryRules(variables, set(modules))
        removed = [
            path
            for path, kind in difference.items()
            if kind == REMOVED and rules.removes(path) and self._is_inside(path)
        ]
        anything = Entry(kind="d", mode=0, size=0)
        wanted = {
            path: kind for path, kind in difference.items() if kind != REMOVED and rules.takes(path, anything)
        }
        wanted = {path: kind for path, kind in wanted.items() if self._is_inside(path)}
        check_bounds(len(wanted), 0)
        clean = CleanArchive(archive, rules, Changes())
        taken_whole: set[str] = set()
        for path in sorted(wanted):
            if any(str(parent) in taken_whole for parent in PurePosixPath(path).parents):
                continue
            if self._add(clean, container, path, is_new=wanted[path] == ADDED):
                taken_whole.add(path)
        clean.close()
        return Changes(taken=dict.fromkeys(wanted, anything) if clean.num_members else {}, removed=removed)

    def _is_inside(self, path: str) -> bool:
        """Whether it lies in the container itself, and not in a directory of the host that every container of the trial shares."""
        return not any(
            path == mount or path.startswith(f"{mount}/") or mount.startswith(f"{path}/")
            for mount in self._mounts
        )

    def _add(self, clean: CleanArchive, container: Any, path: str, *, is_new: bool) -> bool:
        """Whether everything below `path` was added with it."""
        try:
            stream, _ = container.get_archive(path)
        except NotFound:
            return False
        place = str(PurePosixPath(path).parent)
        # An engine that still writes an archive cannot remove the container.
        with contextlib.closing(stream), tempfile.TemporaryFile() as packed:
            size = 0
            for chunk in stream:
                packed.write(chunk)
                size += len(chunk)
                if size > 2 * MAX_BYTES:
                    raise AgentFault(
                        ZeroReason.FILES_TOO_LARGE, f"{path} has more than {2 * MAX_BYTES} bytes"
                    )
                if not is_new and _begins_with_directory(packed):
                    break
            if not is_new and _begins_with_directory(packed):
                clean.add(_first_member(packed), place)
                return False
            packed.seek(0)
            clean.add(packed, place)
        return is_new

    def _place(self, fresh: BaseEnvironment, archive: IO[bytes], changes: Changes) -> None:
        container = self._container(compose_project(fresh.session_id))
        for batch in _batches(changes.removed):
            container.exec_run(["rm", "-rf", "--", *batch], user="root")
        if changes.taken:
            archive.seek(0)
            try:
                container.put_archive("/", archive)
            except APIError as error:
                if error.is_server_error() and _is_full(error):
                    raise
                raise AgentFault(
                    ZeroReason.FILES_UNREADABLE,
                    f"the agent's files cannot be laid down again: {error.explanation}",
                ) from error


def compose_project(session_id: str) -> str:
    """The name that Harbor gives to a trial's compose project."""
    name = session_id.lower()
    return re.sub(r"[^a-z0-9_-]", "-", name if re.match(r"[a-z0-9]", name) else f"0{name}")


def why_no_files(environment: BaseEnvironment) -> str | None:
    """Why a container's files cannot be taken to a fresh one; None when they can."""
    if (environment.environment_dir / "docker-compose.yaml").is_file():
        return "its compose project has services of its own"
    try:
        docker.from_env(timeout=ENGINE_TIMEOUT_S).ping()
    except (DockerException, RequestException) as error:
        return f"the docker SDK does not reach the engine ({error})"
    return None


def _begins_with_directory(packed: IO[bytes]) -> bool:
    packed.seek(0)
    header = packed.read(tarfile.BLOCKSIZE)
    packed.seek(0, 2)
    return len(header) == tarfile.BLOCKSIZE and header[156:157] == tarfile.DIRTYPE


def _first_member(packed: IO[bytes]) -> IO[bytes]:
    """An archive of the directory alone."""
    packed.truncate(tarfile.BLOCKSIZE)
    packed.seek(0, 2)
    packed.write(bytes(2 * tarfile.BLOCKSIZE))
    packed.seek(0)
    return packed


def _is_full(error: APIError) -> bool:
    return "no space left" in str(error.explanation).lower()


def _batches(paths: Sequence[str], size: int = 500) -> Iterator[list[str]]:

    for start in range(0, len(paths), size):
        yield list(paths[start : start + size])

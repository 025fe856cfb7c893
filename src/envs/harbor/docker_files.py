"""The files that an agent changed in a Docker container.

The Docker engine lists and exports the files, and unpacks them in a fresh container of the same image.

This file is long because the choice of the requests, the export and the unpacking concern one archive.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import PurePosixPath
from typing import IO, Any

from docker.errors import APIError, NotFound
from harbor.constants import MAIN_SERVICE_NAME
from harbor.environments.base import BaseEnvironment

from src.core.errors import AgentFault, SandboxError, boundary
from src.core.trajectory import ZeroReason
from src.envs.harbor.carried_files import (
    ACCOUNTS,
    INTERPRETERS,
    MAX_BYTES,
    MAX_LISTING_BYTES,
    MAX_MEMBERS,
    MODULE_DIRECTORIES,
    ArchiveSize,
    CarryRules,
    FileChanges,
    FileEntry,
    FilteredArchive,
    check_limits,
    is_below,
    is_same_or_below,
)
from src.envs.harbor.search_paths import complete_output, linked_tools, search_paths
from src.envs.sandbox.containers import find_container
from src.envs.sandbox.docker import engine

ENGINE_TIMEOUT_S = 120
MAX_REQUESTS = 50  # for more changed paths, an archive of their directory is exported
MAX_DIRECTORY_BYTES = 2**28  # the size of the largest such archive
MAX_EXPORT_REQUESTS = 5000  # the number of requests of one export; a request takes up to 0.1 s
MAX_HEADER_BYTES = 2**16  # of the first member of an archive, with its extended headers
GO_MODE_DIRECTORY = 1 << 31  # os.ModeDir of Go, in the status of a path
MAX_PREFIXES = 200  # the number of prefixes that are searched for Python interpreters
MAX_ARGUMENTS = 500  # paths in one command line
READ_LINKER_SETTINGS = "cat /etc/ld.so.conf /etc/ld.so.conf.d/*.conf 2>/dev/null"  # directories of libraries
# Matches paths that `CarryRules` can exclude if `bin` of the same prefix (group 1) has a Python interpreter.
FILE_OF_PROGRAMS = re.compile(
    r"(.*)/(?:bin/.|pyvenv\.cfg$|condabin|etc/(?:conda|profile\.d)|lib(?:64)?/(?:python3|[^/]*\.so))",
    re.DOTALL,
)
MODULE_DIRECTORY = re.compile(rf"/(?:{'|'.join(MODULE_DIRECTORIES)})(?=/|$)")
MODIFIED, ADDED, REMOVED = 0, 1, 2  # the engine's numbers for the differences of a container from its image


@dataclass(kw_only=True, slots=True)
class _Export:
    """Adds the changed paths of a container to an archive."""

    container: Any
    filtered: FilteredArchive
    trees: set[str]  # new paths; the export of such a path includes everything below it
    # The maximum number of bytes that the engine sends for `add`, including files that are not carried over.
    limit: int
    num_bytes: int = 0
    num_requests: int = 0

    def add_paths(self, directory: str, paths: Sequence[str]) -> None:
        """Add `paths`. Each of them is `directory` or a path below it.

        A request takes tens of milliseconds. If there are more than MAX_REQUESTS paths, they are therefore
        taken from one archive of `directory`. If that archive is too large or `directory` is `/`, they are
        taken from archives of its subdirectories.
        """
        is_small = len(paths) <= MAX_REQUESTS
        if not is_small and self._add_directory(directory, paths):
            return
        groups: dict[str, list[str]] = {}
        prefix = directory.rstrip("/") + "/"
        for path in paths:
            child = path if is_small or path == directory else prefix + path[len(prefix) :].partition("/")[0]
            groups.setdefault(child, []).append(path)
        for child, below in groups.items():
            if below == [child]:
                self.add(child, is_new=child in self.trees)
            else:
                self.add_paths(child, below)

    def _add_directory(self, directory: str, paths: Sequence[str]) -> bool:
        """Add `paths` from one archive of `directory`, which also contains the unchanged files. Return False
        if this archive is too large, or if `directory` is `/` or does not exist.
        """
        if directory == "/" or (answer := self._archive(directory)) is None:
            return False
        chunks, _ = answer
        with contextlib.closing(chunks), tempfile.TemporaryFile() as packed:
            for chunk in chunks:
                packed.write(chunk)
                if packed.tell() > MAX_DIRECTORY_BYTES:
                    return False
            exact = set(paths)
            self.filtered.add(
                packed,
                str(PurePosixPath(directory).parent),
                keep=lambda path: path in exact or is_below(path, self.trees),
            )
        return True

    def add(self, path: str, *, is_new: bool) -> None:
        """Add `path`, without the contents of a directory that the image already has."""
        if (answer := self._archive(path)) is None:
            return
        chunks, status = answer
        is_old_directory = not is_new and bool(status["mode"] & GO_MODE_DIRECTORY)
        # An open stream would prevent the engine from removing the container, so the stream is always closed.
        with contextlib.closing(chunks), tempfile.TemporaryFile() as packed:
            for chunk in chunks:
                packed.write(chunk)
                self.num_bytes += len(chunk)
                if self.num_bytes > self.limit:
                    raise AgentFault(
                        ZeroReason.FILES_TOO_LARGE,
                        f"{path} and other files that the agent changed have more than {self.limit} bytes",
                    )
                if is_old_directory and packed.tell() >= MAX_HEADER_BYTES:
                    break
            max_members = 1 if is_old_directory else None
            self.filtered.add(packed, str(PurePosixPath(path).parent), max_members=max_members)

    def _archive(self, path: str) -> Any:
        """Return a stream of the archive of `path` and the status of `path`, or None if the path does not
        exist. Raises AgentFault after MAX_EXPORT_REQUESTS requests.
        """
        self.num_requests += 1
        if self.num_requests > MAX_EXPORT_REQUESTS:
            raise AgentFault(
                ZeroReason.FILES_TOO_LARGE,
                f"the files that the agent changed need more than {MAX_EXPORT_REQUESTS} requests",
            )
        try:
            return self.container.get_archive(path)
        except NotFound:
            return None


class DockerFiles:
    """The files of one agent in the main container of the trial's compose project. Implements `AgentFiles`.

    The export runs no program of that container.
    """

    def __init__(self, environment: BaseEnvironment, verifier_variables: Mapping[str, str]) -> None:
        self._environment = environment
        self._verifier_variables = verifier_variables
        self._variables: Mapping[str, str] = {}
        self._tools: Sequence[str] = ()
        self._accounts = b""
        self._baseline = ArchiveSize()

    async def snapshot(self) -> None:
        """Record the search paths, and the size of the volumes of the image, which are exported completely.
        The engine compares the other files of the container with its image.
        """
        environment = self._environment

        async def output_of(script: str) -> bytes:
            return await asyncio.to_thread(_in_container, environment, _output_of, script)

        with boundary(SandboxError, "reading the search paths and the accounts of the container"):
            self._accounts = await complete_output(f"cat {ACCOUNTS}", output_of)
            variables = await asyncio.to_thread(_in_container, environment, _variables)
            if workdir := environment.task_env_config.workdir:
                variables["PWD"] = workdir
            lines = (
                (await complete_output(READ_LINKER_SETTINGS, output_of))
                .decode("utf-8", "surrogateescape")
                .split("\n")
            )
            libraries = {"LD_LIBRARY_PATH": ":".join(line.strip() for line in lines)}
            self._variables = await search_paths(
                self._accounts, output_of, variables, self._verifier_variables, libraries
            )
            self._tools = await linked_tools(self._variables.get("PATH", ""), output_of)
            await asyncio.to_thread(_in_container, environment, self._measure_volumes)

    async def freeze(self) -> None:
        """Kill the container with all its processes. Its files remain."""
        with boundary(SandboxError, "ending the agent's container"):
            await asyncio.to_thread(_in_container, self._environment, _kill)

    async def export(self, archive: IO[bytes]) -> FileChanges:
        with boundary(SandboxError, "exporting the agent's files"):
            changes, _ = await asyncio.to_thread(_in_container, self._environment, self._export, archive)
            return changes

    async def unpack(self, fresh: BaseEnvironment, archive: IO[bytes], changes: FileChanges) -> None:
        with boundary(SandboxError, "unpacking the agent's files"):
            await asyncio.to_thread(_in_container, fresh, _unpack, archive, changes)

    def _measure_volumes(self, container: Any) -> None:
        """Record the size of the first archive. Raises SandboxError if it exceeds the limits."""
        if not (volumes := _volumes(container)):
            return
        with open(os.devnull, "wb") as archive:
            try:
                _, self._baseline = self._export(container, archive)
            except AgentFault as fault:
                raise SandboxError(
                    f"the volumes {' '.join(volumes)} of the image are too large to be copied to a fresh "
                    f"container ({MAX_BYTES / 2**30:g} GiB, {MAX_MEMBERS} files): remove VOLUME from the "
                    "Dockerfile, or set environment_kwargs=grading=in_place"
                ) from fault

    def _export(self, container: Any, archive: IO[bytes]) -> tuple[FileChanges, ArchiveSize]:
        mounts = [mount["Destination"] for mount in container.attrs["Mounts"]]
        difference = _difference(container)
        modules = {path[: match.end()] for path in difference for match in MODULE_DIRECTORY.finditer(path)}
        modules = {path for path in modules if difference.get(path, MODIFIED) == MODIFIED}
        rules = CarryRules(
            self._variables, modules, _interpreter_directories(container, difference), self._tools
        )
        removed = [
            path
            for path, kind in difference.items()
            if kind == REMOVED and rules.removes(path) and _is_outside(path, mounts)
        ]
        # The engine reports no types, modes or sizes. `FilteredArchive` checks them for each member.
        any_entry = FileEntry(kind="d", mode=0, size=0)
        changed = {
            path: kind
            for path, kind in difference.items()
            if kind != REMOVED and rules.carries(path, any_entry) and _is_outside(path, mounts)
        }
        # The difference does not contain the volumes of the image (VOLUME), so they are exported completely.
        volumes = _volumes(container)
        changed |= {path: ADDED for path in volumes if rules.carries(path, any_entry)}
        check_limits(len(changed), 0)
        filtered = FilteredArchive(
            archive, rules, FileChanges(), accounts=self._accounts, baseline=self._baseline
        )
        limit = 2 * MAX_BYTES + self._baseline.bytes
        export = _Export(container=container, filtered=filtered, trees=set(), limit=limit)
        paths: list[str] = []
        for path in sorted(changed):
            if not is_below(path, export.trees):
                paths.append(path)
                if changed[path] == ADDED:
                    export.trees.add(path)
        export.add_paths("/", paths)
        filtered.close()
        carried = dict.fromkeys(changed, any_entry) if filtered.size.members else {}
        emptied = [path for path in volumes if path in carried and rules.removes(path)]
        return FileChanges(carried=carried, removed=removed, emptied=emptied), filtered.size


def _in_container[Result](
    environment: BaseEnvironment, function: Callable[..., Result], *args: object
) -> Result:
    """Call `function` with the main container of the environment. This function blocks its thread."""
    with engine(timeout_s=ENGINE_TIMEOUT_S) as client:
        return function(find_container(client, environment.session_id, MAIN_SERVICE_NAME), *args)


def _volumes(container: Any) -> list[str]:
    return [mount["Destination"] for mount in container.attrs["Mounts"] if mount["Type"] == "volume"]


def _is_outside(path: str, mounts: Sequence[str]) -> bool:
    """Return whether `path` is outside all mounts and contains no mount."""
    return not any(is_same_or_below(path, mount) or is_same_or_below(mount, path) for mount in mounts)


def _variables(container: Any) -> dict[str, str]:
    """Return the environment variables of the image, and its working directory as PWD."""
    config = container.attrs["Config"]
    variables = dict(item.split("=", 1) for item in config["Env"] or [] if "=" in item)
    return {**variables, "PWD": config.get("WorkingDir") or "/"}


def _output_of(container: Any, script: str) -> bytes:
    return container.exec_run(["sh", "-c", script], user="root", stderr=False).output


def _difference(container: Any) -> dict[str, int]:
    """Return the paths at which the container differs from its image, with MODIFIED, ADDED or REMOVED.

    Raises AgentFault if the list exceeds MAX_LISTING_BYTES. `container.diff` would hold a list of any length
    in memory.
    """
    api = container.client.api
    url = f"{api.base_url}/v{api.api_version}/containers/{container.id}/changes"
    listing = bytearray()
    with api.get(url, stream=True, timeout=api.timeout) as response:
        response.raise_for_status()
        for chunk in response.iter_content(2**16):
            listing += chunk
            if len(listing) > MAX_LISTING_BYTES:
                raise AgentFault(
                    ZeroReason.FILES_TOO_LARGE,
                    f"the list of the files that the agent changed exceeds {MAX_LISTING_BYTES} bytes",
                )
    return {item["Path"]: item["Kind"] for item in json.loads(listing) or []}


def _interpreter_directories(container: Any, difference: Mapping[str, int]) -> list[str]:
    """Return the directories named `bin` that contain a Python interpreter of the image, for all prefixes
    below which the agent changed a path that matches FILE_OF_PROGRAMS. If there are more than MAX_PREFIXES
    prefixes, return the directories `bin` of all of them, because the check of a prefix needs requests.
    """
    prefixes = {match[1] for path in difference if (match := FILE_OF_PROGRAMS.match(path))}
    in_image = [
        prefix
        for prefix in sorted(prefixes)
        if ADDED not in (difference.get(prefix), difference.get(f"{prefix}/bin"))
    ]
    return [
        f"{prefix}/bin"
        for prefix in in_image
        if len(in_image) > MAX_PREFIXES
        or any(_is_in_image(container, difference, f"{prefix}{name}") for name in INTERPRETERS)
    ]


def _is_in_image(container: Any, difference: Mapping[str, int], path: str) -> bool:
    if path in difference:
        return difference[path] != ADDED
    try:
        stream, _ = container.get_archive(path)
    except NotFound:
        return False
    next(stream, b"")  # `close` has no effect on a stream that was not read
    stream.close()
    return True


def _kill(container: Any) -> None:
    try:
        container.kill()
    except APIError as error:
        if error.status_code != 409:  # 409: the container is not running.
            raise
    container.wait(timeout=ENGINE_TIMEOUT_S)


def _unpack(container: Any, archive: IO[bytes], changes: FileChanges) -> None:
    commands = [["rm", "-rf", "--", *batch] for batch in batched(changes.removed, MAX_ARGUMENTS)]
    if changes.emptied:
        commands.append(["find", *changes.emptied, "-mindepth", "1", "-delete"])
    for command in commands:
        result = container.exec_run(command, user="root")
        if result.exit_code != 0:
            reason = result.output.decode("utf-8", "replace").strip()[-200:]
            raise AgentFault(
                ZeroReason.FILES_UNREADABLE,
                f"the agent's deletions cannot be repeated in a fresh container: {reason}",
            )
    if changes.carried:
        archive.seek(0)
        try:
            container.put_archive("/", archive)
        except APIError as error:
            if error.is_server_error() and "no space left" in str(error.explanation).lower():
                raise
            raise AgentFault(
                ZeroReason.FILES_UNREADABLE, f"the agent's files cannot be unpacked: {error.explanation}"
            ) from error

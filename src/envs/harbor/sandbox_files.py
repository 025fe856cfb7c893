"""Export the files that an agent changed in its sandbox, and unpack them in a fresh sandbox."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO

from src.core.errors import AgentFault, SandboxError
from src.core.trajectory import ZeroReason
from src.envs.harbor.carried_files import (
    ACCOUNTS,
    LISTING_FORMAT,
    MAX_BYTES,
    MAX_LISTING_BYTES,
    CarryRules,
    FileChanges,
    FileEntry,
    FilteredArchive,
    changes_between,
    interpreter_directories,
    module_directories,
    parse_listing,
)
from src.envs.harbor.search_paths import complete_output, linked_tools, search_paths
from src.envs.sandbox.environment import SandboxEnvironment, write_archive
from src.envs.sandbox.file_copy import write_untrusted_file

TRANSFER_TIMEOUT_S = 300
# The agent can write to the file systems of these three directories. The host's files below /usr are on other
# file systems, so -xdev excludes them.
LIST = (
    "find / /usr/local /dev/shm -xdev \\( -path /.sandbox -o -path /tests -o -path /logs/verifier \\) "
    f"-prune -o -printf '{LISTING_FORMAT}' {{unlock}} 2>/dev/null | head -c {MAX_LISTING_BYTES}"
)
# Makes a directory of the agent readable after it was listed and before its files are listed.
UNLOCK = "-type d ! -perm -u=rx -exec chmod u+rx {} \\;"
# Root has no capabilities in the sandbox, so it needs read permission for each file. `FilteredArchive`
# restores the modes of the listing, which was made before the chmod.
PACK = (
    "cd /; xargs -0 -r chmod -f u+r < {unreadable}; "
    "tar --no-recursion --null -T {names} -cf - 2>/dev/null | head -c {limit}"
)
UNPACK = (
    "cd / || exit 1; xargs -0 -r chmod -f u+rwx -- < {unlocked}; "
    "xargs -0 -r rm -rf -- < {removed} || exit 1; "
    "[ ! -s {archive} ] || tar --no-same-owner -xpf {archive} -C /"
)


class SandboxFiles:
    """The files of one agent in its sandbox. Implements `AgentFiles`."""

    def __init__(self, environment: SandboxEnvironment, verifier_variables: Mapping[str, str]) -> None:
        self._environment = environment
        self._verifier_variables = verifier_variables
        self._before: Mapping[str, FileEntry] = {}
        self._variables: Mapping[str, str] = {}
        self._tools: Sequence[str] = ()
        self._accounts = b""

    async def snapshot(self) -> None:
        self._before = await self._list()
        self._accounts = await complete_output(f"cat {ACCOUNTS}", self._output_of)
        self._variables = await search_paths(
            self._accounts,
            self._output_of,
            self._environment.environment_variables,
            self._verifier_variables,
        )
        self._tools = await linked_tools(self._variables.get("PATH", ""), self._output_of)

    async def freeze(self) -> None:
        """Kill the agent's processes. From now on, directories that Harbor uploads are not copied into the
        sandbox. `export` adds them to its archive.
        """
        await self._environment.kill_processes()
        if self._environment.held_uploads is None:
            self._environment.held_uploads = []

    async def export(self, archive: IO[bytes]) -> FileChanges:
        after = await self._list(unlock=UNLOCK)
        rules = await asyncio.to_thread(
            CarryRules,
            self._variables,
            module_directories(self._before),
            interpreter_directories(self._before),
            self._tools,
        )
        changes = await asyncio.to_thread(changes_between, self._before, after, rules)
        uploads = self._environment.held_uploads or []
        if not changes.carried and not uploads:
            return changes
        filtered = FilteredArchive(archive, rules, changes, accounts=self._accounts)
        with tempfile.TemporaryFile() as packed:
            if changes.carried:
                await self._pack(changes, packed)
                await asyncio.to_thread(filtered.add, packed)
        if uploads:  # They come last, so they replace files of the same name.
            with tempfile.NamedTemporaryFile() as packed:
                await asyncio.to_thread(write_archive, Path(packed.name), uploads)
                await asyncio.to_thread(filtered.add, packed)
        filtered.close()
        return changes

    async def unpack(self, fresh: SandboxEnvironment, archive: IO[bytes], changes: FileChanges) -> None:
        if not archive.seek(0, os.SEEK_END) and not changes.removed:
            return
        with (
            fresh.staged_file() as (host_path, inside_path),
            fresh.staged_file() as (removed_path, removed),
            fresh.staged_file() as (unlocked_path, unlocked),
        ):
            await asyncio.to_thread(write_untrusted_file, archive, host_path)
            removed_path.write_bytes(_null_terminated(changes.removed))
            unlocked_path.write_bytes(_null_terminated(changes.unlocked))
            script = UNPACK.format(unlocked=unlocked, removed=removed, archive=inside_path)
            completed = await fresh.run_script(script, timeout_s=TRANSFER_TIMEOUT_S)
        if completed.status != 0:
            reason = completed.stderr.decode("utf-8", "replace").strip()[-200:]
            raise AgentFault(
                ZeroReason.FILES_UNREADABLE,
                f"the agent's files cannot be unpacked in a fresh sandbox: {reason}",
            )

    async def _output_of(self, script: str) -> bytes:
        return (await self._environment.run_script(script, timeout_s=TRANSFER_TIMEOUT_S)).stdout

    async def _list(self, *, unlock: str = "") -> Mapping[str, FileEntry]:
        with tempfile.TemporaryFile() as listing:
            script = LIST.format(unlock=unlock)
            await self._environment.run_script(script, timeout_s=TRANSFER_TIMEOUT_S, stdout=listing)
            listing.seek(0)
            return await asyncio.to_thread(lambda: parse_listing(listing.read()))

    async def _pack(self, changes: FileChanges, packed: BinaryIO) -> None:
        unreadable_files = [
            path for path, entry in changes.carried.items() if entry.kind == "f" and not entry.mode & 0o400
        ]
        environment = self._environment
        with (
            environment.staged_file() as (names_path, names),
            environment.staged_file() as (unreadable_path, unreadable),
        ):
            names_path.write_bytes(_null_terminated(f".{path}" for path in changes.carried))
            unreadable_path.write_bytes(_null_terminated(unreadable_files))
            # `changes_between` has checked the size of the contents. Names and headers add to this size.
            limit = MAX_BYTES + 8 * MAX_LISTING_BYTES
            script = PACK.format(names=names, unreadable=unreadable, limit=limit)
            completed = await environment.run_script(script, timeout_s=TRANSFER_TIMEOUT_S, stdout=packed)
        if completed.status != 0:
            raise SandboxError(f"the agent's files cannot be packed (status {completed.status})")


def _null_terminated(paths: Iterable[str]) -> bytes:
    return b"".join(path.encode("utf-8", "surrogateescape") + b"\0" for path in paths)

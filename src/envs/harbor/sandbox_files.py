"""An agent's files in a bubblewrap sandbox: what it changed, taken out of its sandbox and laid down in a fresh one."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO

from src.core.errors import AgentFault, SandboxError
from src.core.trajectory import ZeroReason
from src.envs.harbor.carried_files import (
    LISTING_FORMAT,
    MAX_BYTES,
    MAX_LISTING_BYTES,
    Changes,
    CleanArchive,
    Entry,
    carry_rules,
    changes_between,
    module_directories,
    parse_listing,
)
from src.envs.sandbox.environment import SandboxEnvironment, write_archive

TRANSFER_TIMEOUT_S = 300
# The root and the two other file systems that the agent can write to; the host's files below /usr are on others.
LIST = (
    f"find / /usr/local /dev/shm -xdev \\( -path /.sandbox -o -path /tests -o -path /logs/verifier \\) -prune "
    f"-o -printf '{LISTING_FORMAT}' 2>/dev/null | head -c {MAX_LISTING_BYTES}"
)
# Root has no capabilities in the sandbox, so it cannot read a file without the permission. The archive has the modes of the listing.
PACK = "cd /; xargs -0 -r chmod -f u+r < {unreadable}; tar --no-recursion --null -T {names} -cf - 2>/dev/null | head -c {limit}"
PLACE = "cd / || exit 1; xargs -0 -r rm -rf -- < {removed} || exit 1; [ ! -s {archive} ] || tar --no-same-owner -xpf {archive} -C /"


class SandboxFiles:
    """The files of one agent; `remember` before it acts, `take` afterwards."""

    def __init__(self, environment: SandboxEnvironment) -> None:
        self._environment = environment
        self._before: Mapping[str, Entry] = {}
        self._rules = carry_rules(environment.environment_variables)

    async def remember(self) -> None:
        self._before = await self._listed()
        self._rules = carry_rules(self._environment.environment_variables, module_directories(self._before))

    async def freeze(self) -> None:
        """From here on the agent changes nothing any more."""
        await self._environment.kill_processes()
        if self._environment.held_uploads is None:
            self._environment.hold_uploads()

    async def take(self, archive: IO[bytes]) -> Changes:
        """Writes the changed files to `archive`. AgentFault where the agent made that impossible."""
        after = await self._listed()
        changes = await asyncio.to_thread(changes_between, self._before, after, self._rules)
        uploads = self._environment.held_uploads or []
        if not changes.taken and not uploads:
            return changes
        with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as packed:
            if changes.taken:
                await self._pack(changes, packed)
            await asyncio.to_thread(
                self._clean, packed, archive, changes, uploads, Path(scratch) / "uploads.tar"
            )
        return changes

    async def place(self, fresh: SandboxEnvironment, archive: IO[bytes], changes: Changes) -> None:
        """Lays the files down in another sandbox of the same task."""
        if not archive.seek(0, os.SEEK_END) and not changes.removed:
            return
        with fresh.staged_file() as (host_path, inside), fresh.staged_file() as (removed_path, removed):
            archive.seek(0)
            await asyncio.to_thread(_copy, archive, host_path)
            removed_path.write_bytes(_names(changes.removed))
            done = await fresh.run_script(
                PLACE.format(removed=removed, archive=inside), timeout_s=TRANSFER_TIMEOUT_S
            )
        if done.status != 0:
            reason = done.stderr.decode("utf-8", "replace").strip()[-200:]
            raise AgentFault(
                ZeroReason.FILES_UNREADABLE,
                f"the agent's files cannot be laid down in a fresh sandbox: {reason}",
            )

    def _clean(
        self,
        packed: IO[bytes],
        archive: IO[bytes],
        changes: Changes,
        uploads: Sequence[tuple[Path, str]],
        scratch: Path,
    ) -> None:
        """The uploads come last, so that they replace the agent's files of the same name."""
        clean = CleanArchive(archive, self._rules, changes)
        if changes.taken:
            packed.seek(0)
            clean.add(packed)
        if uploads:
            write_archive(scratch, uploads)
            with scratch.open("rb") as file:
                clean.add(file)
        clean.close()

    async def _listed(self) -> Mapping[str, Entry]:
        with tempfile.TemporaryFile() as listing:
            await self._environment.run_script(LIST, timeout_s=TRANSFER_TIMEOUT_S, stdout=listing)
            listing.seek(0)
            return await asyncio.to_thread(lambda: parse_listing(listing.read()))

    async def _pack(self, changes: Changes, packed: BinaryIO) -> None:
        unreadable = [
            path for path, entry in changes.taken.items() if entry.kind == "f" and not entry.mode & 0o400
        ]
        environment = self._environment
        with (
            environment.staged_file() as (names_path, names),
            environment.staged_file() as (unreadable_path, closed),
        ):
            names_path.write_bytes(_names(f".{path}" for path in changes.taken))
            unreadable_path.write_bytes(_names(unreadable))
            # Names and headers take room beside the contents, whose size is bounded already.
            script = PACK.format(names=names, unreadable=closed, limit=MAX_BYTES + 8 * MAX_LISTING_BYTES)
            done = await environment.run_script(script, timeout_s=TRANSFER_TIMEOUT_S, stdout=packed)
        if done.status != 0:
            raise SandboxError(f"the agent's files cannot be packed (status {done.status})")


def _names(paths: Iterable[str]) -> bytes:
    return b"".join(path.encode("utf-8", "surrogateescape") + b"\0" for path in paths)


def _copy(archive: IO[bytes], target: Path) -> None:
    with target.open("xb") as file:
        shutil.copyfileobj(archive, file)

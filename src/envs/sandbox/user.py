"""The unprivileged user of a sandbox.

A trainer that runs as root gives each sandbox a uid of its own, so that an escape from the sandbox's namespaces is not root, and that
limits by user and the checks between processes hold between sandboxes. The uids come from a range that no distribution and no tool
assigns, and a lock on one byte of a shared file for each uid keeps two trainers apart. The kernel drops it with the process.
An ordinary user has only one uid, which its sandboxes then have.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

from src.core.errors import SandboxError

PREFERRED_UIDS = range(1_900_000_000, 1_900_060_000)
# For a container whose user namespace ends at 65535; systemd documents this range as unused.
SMALL_UIDS = range(60_578, 61_184)
LOCKS_NAME = ".uids"


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxUser:
    """`uid` is None where the sandbox has the uid of the trainer. `lock` is the descriptor that keeps the uid taken."""

    uid: int | None
    lock: int | None

    def prefix(self) -> list[str]:
        """The command line that makes the following command run as this user."""
        if self.uid is None:
            return []
        program = shutil.which("setpriv", path="/usr/bin:/bin")
        if program is None:
            raise SandboxError(
                "a trainer that runs as root needs setpriv for its sandboxes: install the package util-linux"
            )
        uid = str(self.uid)
        return [
            program,
            "--reuid",
            uid,
            "--regid",
            uid,
            "--clear-groups",
            "--inh-caps=-all",
            "--no-new-privs",
            "--",
        ]

    def admit(self, path: Path | str, mode: int) -> None:
        """Give this user the rights that `mode` gives to the group. The owner of a host file is always the trainer."""
        if self.uid is None:
            os.chmod(path, mode & 0o700)
        else:
            os.chown(path, -1, self.uid)
            os.chmod(path, mode)

    def release(self) -> None:
        if self.lock is not None:
            os.close(self.lock)


def claim_user(directory: Path) -> SandboxUser:
    """A uid for one sandbox, taken until it is released; the locks lie in `directory`."""
    if os.geteuid() != 0:
        return SandboxUser(uid=None, lock=None)
    uids = available_uids(Path("/proc/self/uid_map").read_text())
    if uids is None:
        return SandboxUser(uid=None, lock=None)
    descriptor = os.open(directory / LOCKS_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    start = int.from_bytes(os.urandom(4)) % len(uids)
    for position in range(len(uids)):
        uid = uids[(start + position) % len(uids)]
        try:  # an open file description lock: it belongs to the descriptor, not to the process
            fcntl.fcntl(
                descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, uid, 1, 0)
            )
        except BlockingIOError:
            continue
        return SandboxUser(uid=uid, lock=descriptor)
    os.close(descriptor)
    raise SandboxError(f"all {len(uids)} uids for sandboxes are taken on this machine")


def available_uids(uid_map: str) -> range | None:
    """The range to choose from. None: the trainer is the only user of a user namespace, that is, an ordinary user outside of it."""
    entries = [tuple(map(int, line.split())) for line in uid_map.splitlines()]
    for uids in (PREFERRED_UIDS, SMALL_UIDS):
        if any(inside <= uids.start and uids.stop <= inside + count for inside, _, count in entries):
            return uids
    if [count for _, _, count in entries] == [1]:
        return None
    raise SandboxError(
        "the sandbox needs the uids 60578 to 61183 in a container's user namespace; use environment_type=docker"
    )

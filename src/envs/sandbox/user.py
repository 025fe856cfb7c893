"""The unprivileged user of a sandbox.

A trainer that runs as root gives each sandbox its own uid. A process that escapes from its namespaces is
therefore not root. The kernel's limits per user apply to each sandbox separately. A process of one sandbox
has no permissions for the processes of another sandbox. No distribution and no tool assigns these uids
(`PREFERRED_UIDS` or `SMALL_UIDS`). Two trainers do not use the same uid, because the trainer locks one byte
of a shared file for each uid. The kernel releases the lock when the trainer ends. If the trainer does not run
as root, or if its user namespace maps one uid only, its sandboxes run as the user of the trainer.
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
# Used in a container whose user namespace ends at 65535. systemd documents this range as unused.
SMALL_UIDS = range(60_578, 61_184)
LOCKS_NAME = ".uids"


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxUser:
    """The user of one sandbox. `uid` is None if the sandbox runs as the user of the trainer. `lock` is the
    descriptor that reserves the uid; None: no uid is reserved.
    """

    uid: int | None = None
    lock: int | None = None

    def prefix(self) -> list[str]:
        """Return the beginning of a command line: a command that is appended to it runs as this user."""
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

    def grant_access(self, path: Path | str, mode: int) -> None:
        """Set the group of `path` to the group of this user, and the permissions to `mode`. The trainer stays
        the owner. If this user is the user of the trainer, set only the owner's permissions of `mode`.
        """
        if self.uid is None:
            os.chmod(path, mode & 0o700)
        else:
            os.chown(path, -1, self.uid)
            os.chmod(path, mode)

    def release(self) -> None:
        if self.lock is not None:
            os.close(self.lock)


def claim_user(directory: Path) -> SandboxUser:
    """Reserve a uid for one sandbox until `release` is called. The lock file is in `directory`.

    Return the trainer's own user if the trainer is not root or its user namespace maps one uid only. Raises
    SandboxError if all uids are in use or the namespace does not map them.
    """
    uids = available_uids(Path("/proc/self/uid_map").read_text()) if os.geteuid() == 0 else None
    if uids is None:
        return SandboxUser()
    descriptor = os.open(directory / LOCKS_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    start = int.from_bytes(os.urandom(4)) % len(uids)
    for position in range(len(uids)):
        uid = uids[(start + position) % len(uids)]
        # An open file description lock belongs to the descriptor and not to the process, so two sandboxes of
        # one trainer cannot lock the same uid.
        try:
            fcntl.fcntl(
                descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, uid, 1, 0)
            )
        except BlockingIOError:
            continue
        return SandboxUser(uid=uid, lock=descriptor)
    os.close(descriptor)
    raise SandboxError(
        f"all {len(uids)} uids for sandboxes are in use on this machine; run fewer trials at a time"
    )


def available_uids(uid_map: str) -> range | None:
    """Return the uids for sandboxes, or None if the user namespace maps one uid only. Raises SandboxError if
    the namespace maps neither range of uids completely.
    """
    entries = [tuple(map(int, line.split())) for line in uid_map.splitlines()]
    for uids in (PREFERRED_UIDS, SMALL_UIDS):
        if any(inside <= uids.start and uids.stop <= inside + count for inside, _, count in entries):
            return uids
    if [count for _, _, count in entries] == [1]:
        return None
    raise SandboxError(
        "the sandbox needs the uids 60578 to 61183, which the user namespace of this container does not "
        "map; use environment_type=docker"
    )

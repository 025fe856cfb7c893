"""How much one sandbox may use, and the control groups that hold it to that as a whole.

A control group counts all processes of a sandbox together, and the files in its memory file systems too. Where the trainer may create one
(cgroup v2: as root, or below a cgroup delegated by systemd; cgroup v1: as root), it bounds memory and processes. Elsewhere only the limits
of single processes and of the sandbox's user hold; `limits_enforced_by` says which.

Each sandbox's directory lists its cgroups, so that they can be removed after the death of the trainer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

OPEN_FILES = 4096
SHARED_MEMORY_MB = 64  # /dev/shm, as in Docker
CONTROLLERS = ("memory", "pids")
CGROUP_PREFIX = "agent-trainer"
RECORD_NAME = "cgroups"
# $1...: files to write the own process id to; the command follows after --.
JOIN = 'while [ "$1" != -- ]; do echo 0 >"$1" || exit 1; shift; done; shift; exec "$@"'


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """What one sandbox may use. None means not limited."""

    processes: int | None = 2048
    memory_mb: int | None = (
        8192  # of all processes and files, which are in memory; without a cgroup: the data of one process
    )
    storage_mb: int = 4096  # of all files, and of any one

    @property
    def tmpfs_sizes_mb(self) -> dict[str, int]:
        """The sizes of the memory file systems. With a memory limit they leave a quarter of it to processes: a full disk must be an
        error of the process that writes, not the end of another one."""
        most = (
            self.storage_mb
            if self.memory_mb is None
            else max(4, min(self.storage_mb, self.memory_mb * 3 // 4))
        )
        shared, local = min(SHARED_MEMORY_MB, most // 8), most // 4
        return {"/": most - shared - local, "/usr/local": local, "/dev/shm": shared}

    def rlimits(self) -> dict[int, int]:
        """The resource limits (`resource.RLIMIT_*`) of every process; RLIMIT_NPROC counts the processes of the user."""
        limits = {resource.RLIMIT_FSIZE: self.storage_mb * 2**20, resource.RLIMIT_NOFILE: OPEN_FILES}
        if self.processes is not None:
            limits[resource.RLIMIT_NPROC] = self.processes
        if self.memory_mb is not None:
            limits[resource.RLIMIT_DATA] = self.memory_mb * 2**20
        return limits


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupParents:
    """Where the cgroups of sandboxes can be created: one directory in cgroup v2, one for each controller in v1."""

    version: int
    directories: tuple[Path, ...]

    def create(self, name: str, limits: SandboxLimits, *, record: Path) -> list[Path]:
        """Create a sandbox's cgroups and list them in `record` before that. OSError where the kernel refuses."""
        groups = [directory / f"{CGROUP_PREFIX}-{name}" for directory in self.directories]
        record.write_text("".join(f"{group}\n" for group in groups))
        for group in groups:
            group.mkdir()
            for file, value in self._values(limits):
                if (group / file).exists():
                    (group / file).write_text(str(value))
        return groups

    def _values(self, limits: SandboxLimits) -> list[tuple[str, int]]:
        values = []
        if limits.processes is not None:
            values.append(("pids.max", limits.processes))
        if limits.memory_mb is not None:
            memory = limits.memory_mb * 2**20
            if self.version == 2:
                values += [("memory.max", memory), ("memory.swap.max", 0)]
            else:
                values += [("memory.limit_in_bytes", memory), ("memory.memsw.limit_in_bytes", memory)]
        return values


def limits_enforced_by() -> str:
    """What holds a sandbox to its limits on this machine, as one clause."""
    parents = cgroup_parents()
    if parents is None:
        return (
            "limits by process and by user only, because no cgroup can be created here: "
            "memory is not bounded over the processes of a sandbox together"
        )
    return f"cgroup v{parents.version}, which bounds memory and processes of a sandbox as a whole"


@cache
def cgroup_parents() -> CgroupParents | None:
    """Where this process may create cgroups, found by trying; None where it may not. Logs the answer once."""
    found = None
    for parents in possible_parents(
        Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
    ):
        if _works(parents):
            found = parents
            break
    if found is None:
        logger.warning(
            "sandboxes: no cgroup can be created here, so limits hold by process and by user, not for a sandbox as a whole"
        )
    else:
        logger.info(
            "sandboxes: limits are enforced by cgroup v%d in %s",
            found.version,
            " and ".join(map(str, found.directories)),
        )
    return found


def join_prefix(groups: Sequence[Path]) -> list[str]:
    """The command line that runs the following command in these cgroups."""
    if not groups:
        return []
    return ["/bin/sh", "-c", JOIN, "sh", *(str(group / "cgroup.procs") for group in groups), "--"]


def remove_cgroups(record: Path) -> bool:
    """Remove the cgroups that a sandbox's record lists; False while one of them still has processes."""
    try:
        lines = record.read_text().splitlines()
    except FileNotFoundError:
        return True
    for line in lines:
        group = Path(line)
        if not group.name.startswith(CGROUP_PREFIX):
            continue
        try:
            group.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return False
    record.unlink(missing_ok=True)
    return True


def possible_parents(mountinfo: str, own: str) -> Iterator[CgroupParents]:
    """v2 first: the nearest ancestors of this process's cgroup. Then the own cgroups of v1, which may have children beside processes."""
    mounts: dict[str, tuple[str, Path]] = {}  # controller, or "" for v2: root of the mount, mount point
    for line in mountinfo.splitlines():
        fields, _, after = line.partition(" - ")
        _, _, _, root, point, *_ = fields.split()
        kind, _, options = after.split()
        if kind == "cgroup2":
            mounts.setdefault("", (root, Path(point)))
        elif kind == "cgroup":
            for option in options.split(","):
                mounts.setdefault(option, (root, Path(point)))
    paths: dict[str, str] = {}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update({controller: path for controller in controllers.split(",")})

    def place(controller: str) -> Path | None:
        if controller not in mounts or controller not in paths:
            return None
        root, point = mounts[controller]
        below = paths[controller].removeprefix(root if root != "/" else "")
        return point / below.lstrip("/") if ".." not in below.split("/") else None

    unified = place("")
    if unified is not None:
        point = mounts[""][1]
        ancestors = [
            directory for directory in (unified, *unified.parents) if directory.is_relative_to(point)
        ]
        for directory in ancestors:
            if _can_have_children(directory):
                yield CgroupParents(version=2, directories=(directory,))
    single = [place(controller) for controller in CONTROLLERS]
    if all(single):
        yield CgroupParents(
            version=1, directories=tuple(directory for directory in single if directory is not None)
        )


def _can_have_children(directory: Path) -> bool:
    """Whether memory and pids can be controlled below this cgroup v2; enables them where it has no processes of its own."""
    with contextlib.suppress(OSError):
        if not os.access(directory, os.W_OK) or not os.access(directory / "cgroup.procs", os.W_OK):
            return False
        if set(CONTROLLERS) <= set((directory / "cgroup.subtree_control").read_text().split()):
            return True
        if not set(CONTROLLERS) <= set((directory / "cgroup.controllers").read_text().split()):
            return False
        is_root = not (directory / "cgroup.type").exists()
        if is_root or not (directory / "cgroup.procs").read_text():
            (directory / "cgroup.subtree_control").write_text(
                " ".join(f"+{controller}" for controller in CONTROLLERS)
            )
            return True
    return False


def _works(parents: CgroupParents) -> bool:
    """Whether a process can join a cgroup there."""
    name = f"{CGROUP_PREFIX}-probe-{os.getpid()}-{secrets.token_hex(4)}"
    groups = [directory / name for directory in parents.directories]
    try:
        for group in groups:
            group.mkdir()
        joined = subprocess.run(
            [*join_prefix(groups), "/bin/true"], capture_output=True, timeout=10, check=False
        )
        return joined.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        for group in groups:
            with contextlib.suppress(OSError):
                group.rmdir()


def cgroup_name(directory: Path) -> str:
    """The name of a sandbox's cgroups: its run and its own directory."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{directory.parent.name}-{directory.name}")

"""The resource limits of a sandbox and the control groups that enforce them.

A control group (cgroup) limits the number of processes of a sandbox and their total memory, which includes
the files in the sandbox's tmpfs file systems. The trainer can create control groups if it is root and the
cgroup file system is writable. With cgroup v2, a trainer that is not root can create them below a cgroup that
systemd delegated to its user. Otherwise, memory is limited per process and the number of processes per user.
`cgroup_parents` logs which limits apply.

A file in the directory of each sandbox lists the sandbox's cgroups, so that a later run can remove them if
the trainer was killed.
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
# The arguments are cgroup.procs files, `--`, and the command. The shell joins the cgroups and then replaces
# itself by the command.
JOIN = 'while [ "$1" != -- ]; do echo 0 >"$1" || exit 1; shift; done; shift; exec "$@"'


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """The resource limits of one sandbox."""

    processes: int = 2048
    # With a cgroup, this is the limit for all processes and files together. Without a cgroup, it is the limit
    # for the private data of each process, and the limit for each anonymous shared mapping.
    memory_mb: int = 8192
    storage_mb: int = 4096  # for all files together, and for each file

    @property
    def tmpfs_sizes_mb(self) -> dict[str, int]:
        """The size of each tmpfs in MiB. Together they use at most three quarters of the memory limit, so
        files alone cannot reach that limit. If a file system is full, only the process that writes to it gets
        an error.
        """
        total = max(4, min(self.storage_mb, self.memory_mb * 3 // 4))
        shared, local = min(SHARED_MEMORY_MB, total // 8), total // 4
        return {"/": total - shared - local, "/usr/local": local, "/dev/shm": shared}

    def rlimits(self) -> dict[int, int]:
        """Return the limits of each process by `resource.RLIMIT_*`. RLIMIT_NPROC is a limit per user."""
        return {
            resource.RLIMIT_FSIZE: self.storage_mb * 2**20,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_NPROC: self.processes,
            resource.RLIMIT_DATA: self.memory_mb * 2**20,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupParents:
    """The parents of sandbox cgroups: one directory for cgroup v2, or one directory per controller for v1."""

    version: int
    directories: tuple[Path, ...]

    def create(self, sandbox: Path, limits: SandboxLimits) -> list[Path]:
        """Create the cgroups of the sandbox with the directory `sandbox`, set their limits and return their
        paths. The paths are written to the directory first. Raises OSError if one of these steps fails.
        """
        name = re.sub(r"[^A-Za-z0-9._-]", "_", f"{sandbox.parent.name}-{sandbox.name}")
        groups = [directory / f"{CGROUP_PREFIX}-{name}" for directory in self.directories]
        (sandbox / RECORD_NAME).write_text("".join(f"{group}\n" for group in groups))
        for group in groups:
            group.mkdir()
            for file, value in self._values(limits):
                if (group / file).exists():
                    (group / file).write_text(str(value))
        return groups

    def _values(self, limits: SandboxLimits) -> list[tuple[str, int]]:
        memory = limits.memory_mb * 2**20
        if self.version == 2:
            memory_values = [("memory.max", memory), ("memory.swap.max", 0)]
        else:
            memory_values = [("memory.limit_in_bytes", memory), ("memory.memsw.limit_in_bytes", memory)]
        return [("pids.max", limits.processes), *memory_values]


@cache
def cgroup_parents() -> CgroupParents | None:
    """Try to create cgroups. Return the parents below which this process can create them, or None. Logs the
    result once."""
    candidates = possible_parents(
        Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
    )
    usable = next(filter(_works, candidates), None)
    if usable is None:
        logger.warning(
            "sandboxes: cannot create cgroups, so limits apply per process and per user, not to a sandbox "
            "as a whole"
        )
    else:
        logger.info(
            "sandboxes: cgroup v%d in %s enforces the limits",
            usable.version,
            " and ".join(map(str, usable.directories)),
        )
    return usable


def join_prefix(groups: Sequence[Path]) -> list[str]:
    """Return the arguments that must precede a command, so that it runs in these cgroups."""
    if not groups:
        return []
    return ["/bin/sh", "-c", JOIN, "sh", *(str(group / "cgroup.procs") for group in groups), "--"]


def remove_cgroups(sandbox: Path) -> bool:
    """Remove the cgroups of the sandbox with the directory `sandbox`. Return False if one of them cannot be
    removed, for example because it still has processes.
    """
    record = sandbox / RECORD_NAME
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


def possible_parents(mountinfo: str, own_cgroups: str) -> Iterator[CgroupParents]:
    """Yield candidates for the parents: first those of v2, which are this process's cgroup and its ancestors,
    nearest first, if their children can limit memory and processes; then this process's own cgroups of v1.

    `mountinfo` and `own_cgroups` are the contents of /proc/self/mountinfo and /proc/self/cgroup.
    """
    mounts: dict[str, tuple[str, Path]] = {}  # controller ("" for v2) -> root of the mount, mount point
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
    for line in own_cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update({controller: path for controller in controllers.split(",")})

    def own_cgroup(controller: str) -> Path | None:
        if controller not in mounts or controller not in paths:
            return None
        root, point = mounts[controller]
        below = paths[controller].removeprefix(root if root != "/" else "")
        return point / below.lstrip("/") if ".." not in below.split("/") else None

    unified = own_cgroup("")
    if unified is not None:
        point = mounts[""][1]
        for directory in (unified, *unified.parents):
            if directory.is_relative_to(point) and _can_have_children(directory):
                yield CgroupParents(version=2, directories=(directory,))
    single = tuple(filter(None, map(own_cgroup, CONTROLLERS)))
    if len(single) == len(CONTROLLERS):
        yield CgroupParents(version=1, directories=single)


def _can_have_children(directory: Path) -> bool:
    """Return whether children of this v2 cgroup can limit memory and pids. Enables both controllers for the
    children if the cgroup has no processes or is the root cgroup.
    """
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
    """Return whether a process can join a new cgroup below these parents."""
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

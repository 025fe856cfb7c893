"""Prepare the start of a sandbox on the host: its user, directory, control groups, seccomp filter and command
line.

The root of a sandbox is a tmpfs of limited size, with the host's /usr bound read-only. The other visible
directories of the host are those of `USERLAND` and `HOST_SETTINGS`, /proc/sys, the `skeleton` (the initial
files, which the sandboxes of a run share), and the `requests` (the scripts and FIFOs of the commands in the
sandbox). They are also read-only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import stat
from functools import cache
from pathlib import Path

from src.core.errors import SandboxError
from src.envs.sandbox.exec_server import CONTROL, exec_server_command
from src.envs.sandbox.network import name_servers, namespace_prefix, why_no_network
from src.envs.sandbox.resource_limits import (
    SandboxLimits,
    cgroup_parents,
    join_prefix,
    remove_cgroups,
)
from src.envs.sandbox.sandbox_directory import remove_tree
from src.envs.sandbox.system_calls import seccomp_filter
from src.envs.sandbox.user import SandboxUser, claim_user

logger = logging.getLogger(__name__)

CGROUP_WAITS_S = (0.02, 0.1, 0.5, 2.0)
BASE_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LANG": "C.UTF-8",
}
# Directories of the host that are bound if they exist. On a merged /usr, they are bound in place of symbolic
# links, because `rm -rf /` by an agent would remove the links, and programs would not start without them.
USERLAND = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
HOST_SETTINGS = ("alternatives", "ssl/certs", "perl", "terminfo")  # in /etc
# The directories of a Debian image. /app is not among them, because `RUN mkdir /app` in a Dockerfile must
# succeed.
# fmt: off
PRIVATE_DIRECTORIES = (
    "etc", "home", "media", "mnt", "opt", "root", "run", "srv", "usr/local", "var/lib", "var/log",
)
# fmt: on
SHARED_DIRECTORIES = ("run/lock", "tmp", "var/tmp")  # with the mode 1777; not shared between sandboxes
# Entries of /proc, besides the processes, that are harmless to read. All other entries are masked unless
# their mode already denies access to an unprivileged user. Among the masked entries are those that Docker
# masks (keys, acpi, ...), iomem, cmdline, and entries that later kernels add.
# fmt: off
VISIBLE_IN_PROC = (
    "buddyinfo", "cgroups", "config.gz", "consoles", "cpuinfo", "crypto", "devices", "diskstats", "dma",
    "driver", "execdomains", "filesystems", "loadavg", "meminfo", "misc", "mounts", "net", "partitions",
    "pressure", "self", "softirqs", "stat", "swaps", "sys", "sysvipc", "thread-self", "tty", "uptime",
    "version", "vmstat", "zoneinfo",
)
# fmt: on


class Launch:
    """The host resources of one sandbox, and the command line that starts it."""

    def __init__(
        self, directory: Path, *, skeleton: Path, hostname: str, has_network: bool, limits: SandboxLimits
    ) -> None:
        if has_network and (reason := why_no_network()):
            raise SandboxError(reason)
        self.directory = directory
        self.requests = directory / "requests"
        self.seccomp = -1
        self.user = SandboxUser()
        try:
            directory.mkdir(parents=True, mode=0o700)
            self.user = claim_user(directory.parent.parent)
            self.user.grant_access(directory, 0o710)
            self.requests.mkdir(mode=0o700)
            self.user.grant_access(self.requests, 0o310)  # the sandbox can open its files but not list them
            resolver = self._write_resolver() if has_network else None
            self.seccomp = as_descriptor(seccomp_filter(max_shared_mapping=limits.memory_mb * 2**20))
            parents = cgroup_parents()
            groups = [] if parents is None else parents.create(directory, limits)
            self.command = [
                *join_prefix(groups),
                *self.user.prefix(),
                *(namespace_prefix() if has_network else []),
                *bubblewrap_command(
                    requests=self.requests,
                    skeleton=skeleton,
                    hostname=hostname,
                    resolver=resolver,
                    limits=limits,
                    seccomp=self.seccomp,
                ),
            ]
        except BaseException as error:
            self.clean_up()
            if not isinstance(error, OSError):
                raise
            raise SandboxError(f"cannot prepare a sandbox in {directory}: {error}") from error

    def clean_up(self) -> bool:
        """Remove the files and cgroups from the host and release the user. While a cgroup has processes, keep
        the files and the user and return False.
        """
        if self.seccomp >= 0:
            os.close(self.seccomp)
            self.seccomp = -1
        if not remove_cgroups(self.directory):
            return False
        self.user.release()
        self.user = SandboxUser()
        if self.directory.exists():
            remove_tree(self.directory)
        return True

    async def clean_up_when_empty(self) -> None:
        """Call `clean_up` until the sandbox has no process, for up to sum(CGROUP_WAITS_S) seconds."""
        for wait_s in CGROUP_WAITS_S:
            if self.clean_up():
                return
            await asyncio.sleep(wait_s)
        if not self.clean_up():
            logger.warning(
                "%s: processes of a stopped sandbox have not ended yet; its files are removed when this run "
                "ends, or by a later run",
                self.directory,
            )

    def _write_resolver(self) -> Path:
        path = self.directory / "resolv.conf"
        path.write_text("".join(f"nameserver {server}\n" for server in name_servers()))
        self.user.grant_access(path, 0o640)
        return path


def bubblewrap_command(
    *,
    requests: Path,
    skeleton: Path,
    hostname: str,
    resolver: Path | None,
    limits: SandboxLimits,
    seccomp: int,
) -> list[str]:
    """Return the command line of bubblewrap. Later mounts cover earlier ones.

    `resolver` is the resolv.conf of a sandbox with a network, or None without a network. With a network,
    bubblewrap keeps the network namespace that the command of `namespace_prefix` created.
    """
    sizes = {place: str(size_mb * 2**20) for place, size_mb in limits.tmpfs_sizes_mb.items()}
    if (program := shutil.which("bwrap", path="/usr/bin:/bin")) is None:
        raise SandboxError(
            "the sandbox needs the program bwrap: install the package bubblewrap, or use "
            "environment_type=docker"
        )
    command = [program, "--unshare-all", "--unshare-user", "--disable-userns"]
    command += ["--die-with-parent", "--as-pid-1", "--new-session", "--cap-drop", "ALL"]
    command += ["--uid", "0", "--gid", "0", "--hostname", hostname, "--clearenv", "--seccomp", str(seccomp)]
    for name, value in BASE_ENVIRONMENT.items():
        command += ["--setenv", name, value]
    command += ["--size", sizes["/"], "--tmpfs", "/", "--ro-bind", "/usr", "/usr"]
    for name in USERLAND:
        if Path("/", name).exists():
            command += ["--ro-bind", str(Path("/", name).resolve()), f"/{name}"]
    command += ["--size", sizes["/usr/local"], "--tmpfs", "/usr/local"]
    command += ["--proc", "/proc", *_proc_masks(), "--dev", "/dev"]
    # The tmpfs of --dev could grow to half of the machine's memory, so it becomes read-only.
    command += ["--perms", "1777", "--size", sizes["/dev/shm"], "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    for name in PRIVATE_DIRECTORIES:
        command += ["--dir", f"/{name}"]
    for name in SHARED_DIRECTORIES:
        command += ["--perms", "1777", "--dir", f"/{name}"]
    for name in HOST_SETTINGS:
        command += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    if resolver is not None:
        command += ["--share-net", "--ro-bind", str(resolver), "/etc/resolv.conf"]
    command += ["--ro-bind", str(skeleton), f"{CONTROL}/skeleton"]
    command += ["--ro-bind", str(requests), f"{CONTROL}/requests"]
    return [*command, "--chdir", "/", "--", *exec_server_command(limits.rlimits())]


@cache
def _proc_masks() -> tuple[str, ...]:
    """Return options that mount /proc/sys read-only and mask entries of /proc. Processes, entries in
    VISIBLE_IN_PROC and entries that an unprivileged user cannot read are not masked.
    """
    masks = ["--ro-bind", "/proc/sys", "/proc/sys"]
    for entry in sorted(Path("/proc").iterdir()):
        if entry.name.isdigit() or entry.name in VISIBLE_IN_PROC or entry.is_symlink():
            continue
        status = entry.stat()
        if status.st_uid == 0 and not status.st_mode & stat.S_IRWXO:
            continue
        if stat.S_ISDIR(status.st_mode):
            masks += ["--perms", "555", "--size", "4096", "--tmpfs", str(entry), "--remount-ro", str(entry)]
        else:
            masks += ["--dev-bind", "/dev/null", str(entry)]
    return tuple(masks)


def as_descriptor(content: bytes) -> int:
    """Return a descriptor from which a child process can read `content`."""
    descriptor = os.memfd_create("seccomp")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor

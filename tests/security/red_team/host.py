"""Checks that attacks have not changed the host: snapshots of its state, and the contents of trial
directories.

Other programs change the host at the same time. The checks therefore report only what belongs to the attacks:

- a process that descends from this process, or whose command line or environment contains the word of a trial
- a file in a watched directory whose name contains the word of a trial
- a control group whose name contains the word of a trial or the label of the run
- a Docker object whose description contains the label of the run or the prefix of the task names

Snapshots omit kernel settings that change without an attack.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
VOLATILE_SETTINGS = re.compile(
    r"/proc/sys/(fs/(dentry-state|inode-nr|inode-state|file-nr|aio-nr|quota/)|kernel/(random/|ns_last_pid|pty/nr|perf_event_max_sample_rate)"
    r"|vm/stat_refresh|net/netfilter/nf_conntrack_count|net/[^/]+/(conf|neigh)/(?!all/|default/)|sunrpc|net/ipv4/route/flush)"
)
CONFIGURATION_FILES = (
    *(
        "/etc/passwd",
        "/etc/group",
        "/etc/shadow",
        "/etc/hosts",
        "/etc/profile",
        "/etc/environment",
        "/etc/bash.bashrc",
        "/etc/crontab",
    ),
    *(
        "/etc/ld.so.preload",
        "/etc/ld.so.conf",
        "/etc/sudoers",
        "/root/.bashrc",
        "/root/.profile",
        "/root/.ssh/authorized_keys",
    ),
)
WATCHED_DIRECTORIES = (
    "/",
    "/tmp",
    "/var/tmp",
    "/dev/shm",
    "/run",
    "/etc",
    "/etc/cron.d",
    "/etc/profile.d",
    "/usr",
    "/usr/bin",
    "/usr/local/bin",
    "/home",
)
MAX_MEMBERS = 10_500  # 10,000 of the agent plus those of Harbor
MAX_BYTES = 80 * 2**20  # 64 MiB of the agent plus the files of Harbor


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state of the host. Each field maps names to states. `settings` contains /proc/sys, and
    `shared_memory` contains the System V objects.
    """

    settings: dict[str, str]
    files: dict[str, str]
    mounts: dict[str, str]
    interfaces: dict[str, str]
    shared_memory: dict[str, str]

    @classmethod
    def take(cls, sentinels: list[Path]) -> Snapshot:
        return cls(
            settings=dict(_settings()),
            files={str(path): _identity(path) for path in [*map(Path, CONFIGURATION_FILES), *sentinels]},
            mounts=dict(_mounts()),
            interfaces={
                name: ""
                for name in os.listdir("/sys/class/net")
                if not name.startswith(("veth", "br-", "docker"))
            },
            shared_memory={name: Path("/proc/sysvipc", name).read_text() for name in ("shm", "sem", "msg")},
        )

    def changes(self, later: Snapshot) -> list[str]:
        """Return one line for each difference."""
        differences = []
        for kind in self.__slots__:
            before, after = getattr(self, kind), getattr(later, kind)
            for name in sorted(before.keys() | after.keys()):
                if before.get(name) != after.get(name):
                    differences.append(f"host {kind.replace('_', ' ')}: {name} changed")
        return differences


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants, so that `descendants` finds them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> dict[int, str]:
    """Return the running descendants of this process as a map from pid to command line."""
    parents, names = {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, parent = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[:2]
                command = (
                    Path("/proc", entry, "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
            except OSError:
                continue
            if state not in "ZX":
                parents[int(entry)], names[int(entry)] = int(parent), command
    pids = {os.getpid()}
    while children := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= children
    return {pid: names[pid] for pid in pids - {os.getpid()}}


def marked_processes(word: str) -> list[str]:
    """Return one line for each process of the host whose command line or environment contains `word`. This
    process, its parent and its descendants are excluded.
    """
    excluded_pids, remaining = {os.getpid(), os.getppid(), *descendants()}, []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in excluded_pids:
            for name in ("cmdline", "environ"):
                try:
                    if word.encode() in Path("/proc", entry, name).read_bytes():
                        remaining.append(f"process {entry} was left on the host")
                        break
                except OSError:
                    continue
    return remaining


def marked_files(word: str) -> list[str]:
    """Return one line for each entry of a watched directory of the host whose name contains `word`."""
    remaining = []
    for directory in WATCHED_DIRECTORIES:
        try:
            remaining += [
                f"{directory}/{name} was left on the host" for name in os.listdir(directory) if word in name
            ]
        except OSError:
            continue
    return remaining


def marked_cgroups(word: str) -> list[str]:
    """Return one line for each control group whose name contains `word`."""
    return [
        f"the control group {path} was left"
        for path, _, _ in os.walk("/sys/fs/cgroup")
        if word in os.path.basename(path)
    ]


def marked_docker_objects(word: str) -> list[str]:
    """Return one line for each Docker container, network or volume whose description contains `word`."""
    remaining = []
    for kind, listing in (
        ("container", ["ps", "--all"]),
        ("network", ["network", "ls"]),
        ("volume", ["volume", "ls"]),
    ):
        listing_process = subprocess.run(
            ["docker", *listing, "--format", "{{json .}}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        remaining += [
            f"a Docker {kind} was left" for line in listing_process.stdout.splitlines() if word in line
        ]
    return remaining


def faults_of_directory(directory: Path) -> list[str]:
    """Return up to five violations in a trial's directory: exceeded size limits, setuid and setgid files, and
    entries other than regular files and directories.
    """
    command = ["find", "-P", str(directory), "-mindepth", "1", "-printf", "%y %m %s %k %P\\0"]
    process = subprocess.run(command, capture_output=True, timeout=120, check=False)
    members = total = 0
    faults = []
    for record in process.stdout.split(b"\0")[:-1]:
        kind, mode, size, blocks, name = record.decode(errors="replace").split(" ", 4)
        members, total = members + 1, total + max(int(size), int(blocks) * 1024)
        if kind not in "fd":
            faults.append(f"the trial's directory contains {name[:60]!r}, which is not a regular file")
        elif kind == "f" and int(mode, 8) & 0o6000:
            faults.append(f"the trial's directory contains {name[:60]!r} with mode {mode}")
    if members > MAX_MEMBERS:
        faults.append(f"the trial's directory contains {members} entries")
    if total > MAX_BYTES:
        faults.append(f"the trial's directory contains {total / 2**20:.0f} MiB")
    return faults[:5]


def remove(directory: Path) -> None:
    """Remove a directory of any depth."""
    subprocess.run(["chmod", "-R", "u+rwX", str(directory)], capture_output=True, check=False)
    subprocess.run(["rm", "-rf", str(directory)], capture_output=True, check=False)


def _settings() -> list[tuple[str, str]]:
    settings = []
    for directory, _, names in os.walk("/proc/sys"):
        for name in names:
            path = f"{directory}/{name}"
            if not VOLATILE_SETTINGS.match(path):
                try:
                    with open(path, "rb") as file:
                        settings.append((path, file.read(4096).decode(errors="replace")))
                except OSError:
                    continue
    return settings


def _identity(path: Path) -> str:
    try:
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if os.access(path, os.R_OK) else ""
    except OSError as error:
        return type(error).__name__
    return f"{status.st_mode:o} {status.st_uid} {status.st_ino} {status.st_mtime_ns} {content}"


def _mounts() -> list[tuple[str, str]]:
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [
        (fields[4], fields[5])
        for fields in lines
        if "/docker/" not in fields[4] and not fields[4].startswith("/run/docker")
    ]

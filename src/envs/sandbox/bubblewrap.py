"""A sandbox process: bubblewrap around an exec server that is pid 1 of its own namespaces.

    host                                            sandbox (user, mount, pid, ipc, uts, cgroup and network namespace of its own)
    run(script) -> writes N.sh and two FIFOs,   ->  pid 1 (`exec_server`) starts N.sh in its own process group
                   sends "run N TOKEN"
                <- stdout and stderr through the FIFOs, "exit N STATUS" from pid 1

The requests directory is bound read-only (writing into a FIFO needs no writable mount), so the sandbox has no host file to fill, plant
links in or delete. Pid 1 cannot be killed from inside. It ends when its stdin closes, bubblewrap is told to die with the trainer, and the
kernel kills every process of a pid namespace with its pid 1: nothing survives the trainer, `kill -9` included. ("With the trainer" is, to
the kernel, with the thread that started the sandbox: start sandboxes from the event loop's thread, never from a passing one.)

The root is a tmpfs of limited size; the host's /usr is there read-only, nothing else of the host is. The sandbox's root is an unprivileged
user of the host (`sandbox_user`), without capabilities, and system calls that no task needs are refused (`system_calls`). Limits are those
of `resource_limits`; CPU time is not limited. It is not a boundary against an attacker with a kernel exploit.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

from src.core.errors import SandboxError
from src.envs.sandbox.exec_request import Request
from src.envs.sandbox.exec_server import CONTROL, INTERPRETER, PathKind, exec_server_command
from src.envs.sandbox.network import NAMESPACE_LINE, Network, name_servers, namespace_prefix, why_no_network
from src.envs.sandbox.resource_limits import (
    RECORD_NAME,
    Limits,
    cgroup_name,
    cgroup_parents,
    join_prefix,
    remove_cgroups,
)
from src.envs.sandbox.run_directory import remove_tree, temporary_run_directory
from src.envs.sandbox.system_calls import seccomp_filter
from src.envs.sandbox.user import SandboxUser, claim_user

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30
STOP_TIMEOUT_S = 5
KILL_TIMEOUT_S = 5
KILL_ALL_TIMEOUT_S = 30
CGROUP_WAITS_S = (0.02, 0.1, 0.5, 2.0)
BASE_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LANG": "C.UTF-8",
}
PROGRAMS = "/usr/sbin:/usr/bin:/sbin:/bin"
# Bound from the host where present. Symlinks of a merged /usr become binds, so that an agent's `rm -rf /` leaves a working userland.
USERLAND = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
HOST_SETTINGS = ("alternatives", "ssl/certs", "perl", "terminfo")
# What a Debian image has, and no more: a Dockerfile's `RUN mkdir /app` must work.
PRIVATE_DIRECTORIES = (
    "etc",
    "home",
    "media",
    "mnt",
    "opt",
    "root",
    "run",
    "srv",
    "usr/local",
    "var/lib",
    "var/log",
)
SHARED_DIRECTORIES = ("run/lock", "tmp", "var/tmp")
# What is harmless to read in /proc besides the processes. Everything else there describes or controls the host and is masked, unless its
# mode closes it to an unprivileged user already: what Docker masks (keys, acpi, ...), iomem, cmdline, and whatever a later kernel adds.
VISIBLE_IN_PROC = (
    *(
        "buddyinfo",
        "cgroups",
        "config.gz",
        "consoles",
        "cpuinfo",
        "crypto",
        "devices",
        "diskstats",
        "dma",
        "driver",
        "execdomains",
    ),
    *(
        "filesystems",
        "loadavg",
        "meminfo",
        "misc",
        "mounts",
        "net",
        "partitions",
        "pressure",
        "self",
        "softirqs",
        "stat",
        "swaps",
    ),
    *("sys", "sysvipc", "thread-self", "tty", "uptime", "version", "vmstat", "zoneinfo"),
)


class CommandTimeout(SandboxError):
    """A command ran past its limit; it and its process group were killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    status: int
    stdout: bytes
    stderr: bytes


class Bubblewrap:
    """One running sandbox. Start it with `Bubblewrap.start`, stop it with `stop`."""

    def __init__(self, process: asyncio.subprocess.Process, launch: Launch) -> None:
        self._process = process
        self._launch = launch
        self._network: Network | None = None
        self._numbers = itertools.count(1)
        self._pending: dict[int, Request | asyncio.Future[int]] = {}
        self._handed_in: set[Path] = set()  # files that the sandbox's user may not be able to read yet
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, directory: Path, *, skeleton: Path, hostname: str, share_network: bool, limits: Limits
    ) -> Bubblewrap:
        """Start a sandbox whose host files lie in `directory`, a new directory in a run's; SandboxError when the machine cannot.

        With `share_network` it has the public network, but neither the network namespace nor the loopback addresses of the host.
        """
        launch = Launch(
            directory, skeleton=skeleton, hostname=hostname, has_network=share_network, limits=limits
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *launch.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(launch.seccomp,),
                process_group=0,  # a Ctrl-C at the terminal is the trainer's to handle
                cwd="/",
                env={"PATH": PROGRAMS},  # nothing of the trainer's environment: it may hold keys
            )
        except BaseException:
            launch.clean_up()
            raise
        sandbox = cls(process, launch)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await sandbox._become_ready(has_network=share_network)
        except TimeoutError as error:
            await sandbox.stop()
            raise SandboxError(
                f"a sandbox did not start within {START_TIMEOUT_S} s; the machine is overloaded"
            ) from error
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None and self._watcher is not None and not self._watcher.done()

    async def run(
        self,
        script: str,
        *,
        timeout_s: float | None = None,
        stdout: BinaryIO | None = None,
        shell: str = "bash",
    ) -> Completed:
        """Run a script with a shell of /usr/bin inside; its stdout goes to the file `stdout` when given.

        Raises CommandTimeout past `timeout_s`, SandboxError when the sandbox is gone. Output past 16 MiB (of a file: 1 GiB) is dropped.
        """
        if not self.is_alive:
            raise SandboxError("the sandbox is gone")
        with self._asked(script, stdout, shell) as request:
            try:
                async with asyncio.timeout(timeout_s):
                    status = await request.done
            except TimeoutError as error:
                self._send(f"kill {request.number}")
                await asyncio.wait({request.done}, timeout=KILL_TIMEOUT_S)
                raise CommandTimeout(f"Command timed out after {timeout_s:g} seconds") from error
            except asyncio.CancelledError:
                self._send(f"kill {request.number}")
                raise
        return Completed(status=status, stdout=bytes(request.stdout.data), stderr=bytes(request.stderr.data))

    async def kill_processes(self) -> None:
        """Kill everything inside but pid 1, and wait until it is gone."""
        try:
            await self._request("killall")
        except TimeoutError as error:
            raise SandboxError(
                f"the processes of a sandbox did not end within {KILL_ALL_TIMEOUT_S} s"
            ) from error

    async def kind_of(self, path: str) -> PathKind:
        """What is at an absolute path inside. Starts no process."""
        try:
            return PathKind(await self._request("stat", path.encode("utf-8", "surrogateescape").hex()))
        except TimeoutError as error:
            raise SandboxError(f"the sandbox did not answer within {KILL_ALL_TIMEOUT_S} s") from error

    async def _request(self, verb: str, *arguments: str) -> int:
        """Send pid 1 a request that it serves itself; its status. Raises TimeoutError."""
        if not self.is_alive:
            raise SandboxError("the sandbox is gone")
        number = next(self._numbers)
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pending[number] = done
        try:
            self._send(" ".join([verb, str(number), *arguments]))
            async with asyncio.timeout(KILL_ALL_TIMEOUT_S):
                return await done
        finally:
            del self._pending[number]

    async def stop(self) -> None:
        """End the sandbox with everything in it and remove its host files. Safe to call twice."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        ended = self._watcher or asyncio.create_task(self._drain())
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.shield(ended)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await ended
        if self._network is not None:
            await self._network.close()
        await self._launch.clean_up_when_empty()

    def put(self, name: str) -> tuple[Path, str]:
        """A place for a file: its path on the host and, read-only, inside. A command that starts after it was written can read it."""
        path = self._launch.requests / name
        self._handed_in.add(path)
        return path, f"{CONTROL}/requests/{name}"

    async def _become_ready(self, *, has_network: bool) -> None:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if has_network and line == NAMESPACE_LINE:
            self._network = await Network.connect(self._process.pid, self._launch.user)
            self._send("go")
            line = await self._process.stdout.readline()
        if line != b"ready\n":
            assert self._process.stderr is not None
            raise SandboxError(
                f"{_why_not_started(await self._process.stderr.read())}; environment_type=docker does without"
            )
        self._watcher = asyncio.create_task(self._watch())

    @contextlib.contextmanager
    def _asked(self, script: str, stdout: BinaryIO | None, shell: str) -> Iterator[Request]:
        """A command on its way, as long as the block lasts; `_watch` fails it when the sandbox dies."""
        for path in list(self._handed_in):
            if path.exists():
                self._launch.user.admit(path, 0o640)
                self._handed_in.discard(path)
        request = Request(self._launch.requests, next(self._numbers), script, stdout, self._launch.user)
        self._pending[request.number] = request
        try:
            self._send(f"run {request.number} {request.token} {shell}")
            yield request
        finally:
            del self._pending[request.number]
            request.close()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(line.encode() + b"\n")

    async def _drain(self) -> None:
        """Wait for the end of a sandbox that did not start."""
        await self._process.communicate()

    async def _watch(self) -> None:
        """Hand out the answers of pid 1, and fail what still waits for one when the sandbox dies by itself."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            verb, number, rest = line.decode().rstrip("\n").split(" ", 2)
            match verb, self._pending.get(int(number)):
                case "exit", Request() as request:
                    request.finish(int(rest))
                case "failed", Request() as request:
                    request.refuse(rest)
                case _, asyncio.Future() as waiting if not waiting.done():
                    waiting.set_result(int(rest))
                case _:
                    pass  # nobody waits for this command any more
        await self._process.wait()
        death = SandboxError(
            f"the sandbox stopped answering after commands ran in it (status {self._process.returncode})"
        )
        for waiting in self._pending.values():
            if isinstance(waiting, Request):
                waiting.fail(death)
            elif not waiting.done():
                waiting.set_exception(death)


class Launch:
    """What one sandbox needs on the host: a user, a directory, cgroups, a seccomp filter, and the command line that starts it."""

    def __init__(
        self, directory: Path, *, skeleton: Path, hostname: str, has_network: bool, limits: Limits
    ) -> None:
        if has_network and (reason := why_no_network()):
            raise SandboxError(reason)
        self.directory = directory
        self.requests = directory / "requests"
        self.seccomp = -1
        self.user = SandboxUser(uid=None, lock=None)
        try:
            directory.mkdir(parents=True, mode=0o700)
            self.user = claim_user(directory.parent.parent)
            self.user.admit(directory, 0o710)
            self.requests.mkdir(mode=0o700)
            self.user.admit(self.requests, 0o310)  # its names cannot be listed
            resolver = self._write_resolver() if has_network else None
            most = None if limits.memory_mb is None else limits.memory_mb * 2**20
            self.seccomp = _as_descriptor(seccomp_filter(max_shared_mapping=most))
            parents = cgroup_parents()
            record = directory / RECORD_NAME
            groups = [] if parents is None else parents.create(cgroup_name(directory), limits, record=record)
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
        except OSError as error:
            self.clean_up()
            raise SandboxError(f"cannot prepare a sandbox in {directory}: {error}") from error
        except BaseException:
            self.clean_up()
            raise

    def clean_up(self) -> bool:
        """Remove what lies on the host; False while the cgroups still have processes."""
        if self.seccomp >= 0:
            os.close(self.seccomp)
            self.seccomp = -1
        if not remove_cgroups(self.directory / RECORD_NAME):
            return False
        self.user.release()
        self.user = SandboxUser(uid=None, lock=None)
        if self.directory.exists():
            remove_tree(self.directory)
        return True

    async def clean_up_when_empty(self) -> None:
        """A sandbox that had to be killed ends a moment after its bubblewrap. What is left after that goes with the next sweep."""
        for wait_s in CGROUP_WAITS_S:
            if self.clean_up():
                return
            await asyncio.sleep(wait_s)
        logger.warning(
            "%s: processes of a stopped sandbox still end; its files are removed when the next run starts",
            self.directory,
        )

    def _write_resolver(self) -> Path:
        path = self.directory / "resolv.conf"
        path.write_text("".join(f"nameserver {server}\n" for server in name_servers()))
        self.user.admit(path, 0o640)
        return path


def bubblewrap_command(
    *, requests: Path, skeleton: Path, hostname: str, resolver: Path | None, limits: Limits, seccomp: int
) -> list[str]:
    """The command line of bubblewrap. The order of the mounts matters: later ones lie on top of earlier ones.

    `resolver` is the resolv.conf of a sandbox whose network namespace exists already.
    """
    sizes = {place: str(size_mb * 2**20) for place, size_mb in limits.storage_shares_mb.items()}
    command = [
        _program("bwrap", "bubblewrap"),
        *(
            "--unshare-all",
            "--unshare-user",
            "--disable-userns",
            "--die-with-parent",
            "--as-pid-1",
            "--new-session",
        ),
        *(
            "--cap-drop",
            "ALL",
            "--uid",
            "0",
            "--gid",
            "0",
            "--hostname",
            hostname,
            "--clearenv",
            "--seccomp",
            str(seccomp),
        ),
    ]
    for name, value in BASE_ENVIRONMENT.items():
        command += ["--setenv", name, value]
    command += ["--size", sizes["/"], "--tmpfs", "/", "--ro-bind", "/usr", "/usr"]
    for name in USERLAND:
        if Path("/", name).exists():
            command += ["--ro-bind", str(Path("/", name).resolve()), f"/{name}"]
    command += [
        "--size",
        sizes["/usr/local"],
        "--tmpfs",
        "/usr/local",
        "--proc",
        "/proc",
        *_proc_masks(),
        "--dev",
        "/dev",
    ]
    # The tmpfs of --dev has no size but half of the machine's memory.
    command += ["--perms", "1777", "--size", sizes["/dev/shm"], "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    for name in PRIVATE_DIRECTORIES:
        command += ["--dir", f"/{name}"]
    for name in SHARED_DIRECTORIES:
        command += ["--perms", "1777", "--dir", f"/{name}"]
    for name in HOST_SETTINGS:
        command += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    if resolver is not None:
        command += ["--share-net", "--ro-bind", str(resolver), "/etc/resolv.conf"]
    command += [
        "--ro-bind",
        str(skeleton),
        f"{CONTROL}/skeleton",
        "--ro-bind",
        str(requests),
        f"{CONTROL}/requests",
    ]
    return [*command, "--chdir", "/", "--", *exec_server_command(limits.of_one_process())]


@cache
def _proc_masks() -> tuple[str, ...]:
    """Mounts over what an unprivileged user could read in /proc of the host; /proc/sys is read-only."""
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


def why_no_sandbox() -> str | None:
    """Why no sandbox can run here; None when one just did."""
    if missing := missing_programs():
        return f"it needs the packages {' '.join(missing)}"
    try:
        with temporary_run_directory() as run:
            skeleton = run / "skeleton"
            skeleton.mkdir(mode=0o755)
            launch = Launch(
                run / "probe", skeleton=skeleton, hostname="probe", has_network=False, limits=Limits()
            )
            try:
                probe = subprocess.run(
                    launch.command,
                    input=b"",
                    capture_output=True,
                    timeout=START_TIMEOUT_S,
                    check=False,
                    pass_fds=(launch.seccomp,),
                    cwd="/",
                    env={"PATH": PROGRAMS},
                )
            finally:
                launch.clean_up()
    except subprocess.TimeoutExpired:
        return f"bubblewrap does not start within {START_TIMEOUT_S} s"
    except SandboxError as error:
        return str(error)
    return None if probe.stdout == b"ready\n" else _why_not_started(probe.stderr)


def missing_programs() -> list[str]:
    """The packages that the sandbox needs and this machine lacks."""
    programs = {
        "bwrap": "bubblewrap",
        "bash": "bash",
        Path(INTERPRETER).name: "perl-base",
        "tar": "tar",
        "tmux": "tmux",
    }
    if os.geteuid() == 0:
        programs["setpriv"] = "util-linux"
    return [
        package
        for program, package in programs.items()
        if shutil.which(program, path="/usr/bin:/bin") is None
    ]


def _why_not_started(errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    return (
        f"bubblewrap could not start a sandbox here ({lines[-1] if lines else 'no message'}); "
        "this needs user namespaces for unprivileged users"
    )


def _program(name: str, package: str) -> str:
    program = shutil.which(name, path="/usr/bin:/bin")
    if program is None:
        raise SandboxError(
            f"the sandbox needs {name}: install the package {package}, or use environment_type=docker"
        )
    return program


def _as_descriptor(content: bytes) -> int:
    """A descriptor from which a child process reads this content."""
    descriptor = os.memfd_create("seccomp")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor

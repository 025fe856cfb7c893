"""A sandbox process: bubblewrap around a small exec server that is pid 1 of its own namespaces.

    host                                            sandbox (user, mount, pid, ipc, uts, cgroup and usually net namespace)
    run(script) -> writes N.sh and three FIFOs  ->  pid 1 reads "run N", starts N.sh in its own process group
                <- stdout, stderr, exit status  <-  through the FIFOs

The requests directory is bound read-only (writing into a FIFO needs no writable mount), so the sandbox has no host file to fill, plant
links in or delete. Pid 1 cannot be killed from inside. It ends when its stdin closes, bubblewrap is told to die with the trainer, and the
kernel kills every process of a pid namespace with its pid 1: nothing survives the trainer, `kill -9` included. ("With the trainer" is, to
the kernel, with the thread that started the sandbox: start sandboxes from the event loop's thread, never from a passing one.)

The root is a tmpfs of limited size; the host's /usr is there read-only, nothing else of the host is. Limits are per process (address space
in use, size of one file, and for an ordinary user the number of processes); CPU time and the sum over processes are not limited. This keeps
honest mistakes of an agent away from the host. It is not a boundary against an attacker with a kernel exploit.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from src.envs.request import Request
from src.envs.run_directory import remove_tree
from src.errors import SandboxError

CONTROL = "/.sandbox"
START_TIMEOUT_S = 30
STOP_TIMEOUT_S = 5
KILL_TIMEOUT_S = 5
KILLED_STATUS = 137
BASE_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LANG": "C.UTF-8",
}
# Bound from the host where present. Symlinks of a merged /usr become binds, so that an agent's `rm -rf /` leaves a working userland.
USERLAND = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
HOST_SETTINGS = ("alternatives", "ssl/certs", "perl", "terminfo")
# What a Debian image has, and no more: a Dockerfile's `RUN mkdir /app` must work.
PRIVATE_DIRECTORIES = ("etc", "home", "media", "mnt", "opt", "root", "run", "srv", "usr/local", "var/lib", "var/log")
SHARED_DIRECTORIES = ("run/lock", "tmp", "var/tmp")

# Signals meant for an ordinary process must not reach pid 1's default actions; ':' handlers are not inherited by what it starts.
EXEC_SERVER = """
set -m
trap : HUP INT QUIT TERM USR1 USR2 ALRM
cp -RP /.sandbox/skeleton/. / || exit 1
{limits}
declare -A groups
printf 'ready\\n'
exec >/dev/null 2>&1
while :; do
    read -r verb number; status=$?
    ((status > 128)) && continue
    ((status)) && exit 0
    request=/.sandbox/requests/$number
    case $verb in
    run)
        (
            exec 9>"$request.status"
            bash "$request.sh" 9>&- >"$request.stdout" 2>"$request.stderr"
            printf '%s' "$?" >&9
        ) </dev/null &
        groups[$number]=$!
        ;;
    kill) kill -KILL -- "-${{groups[$number]}}" ;;
    killall) kill -KILL -- -1 ;;
    esac
done
"""


class CommandTimeout(SandboxError):
    """A command ran past its limit; it and its process group were killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one sandbox may use. None means not limited."""

    processes: int | None = 4096  # of an ordinary user; the kernel exempts the host's root
    memory_mb: int | None = None  # data of one process
    storage_mb: int = 4096  # the whole root tmpfs, and any one file


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    status: int
    stdout: bytes
    stderr: bytes


class Bubblewrap:
    """One running sandbox. Start it with `Bubblewrap.start`, stop it with `stop`."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path) -> None:
        self._process = process
        self._directory = directory
        self._requests = directory / "requests"
        self._numbers = itertools.count(1)
        self._pending: set[Request] = set()
        self._watcher = asyncio.create_task(self._watch())

    @classmethod
    async def start(cls, directory: Path, *, skeleton: Path, hostname: str, share_network: bool, limits: Limits) -> Bubblewrap:
        """Start a sandbox whose host files lie in `directory`; SandboxError when the machine cannot."""
        requests = directory / "requests"
        requests.mkdir(parents=True, mode=0o700)
        command = bubblewrap_command(requests=requests, skeleton=skeleton, hostname=hostname, share_network=share_network, limits=limits)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            process_group=0,  # a Ctrl-C at the terminal is the trainer's to handle
        )
        sandbox = cls(process, directory)
        assert process.stdout is not None and process.stderr is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                if await process.stdout.readline() != b"ready\n":
                    reason = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
                    raise SandboxError(
                        f"bubblewrap could not start a sandbox here ({reason[-1] if reason else 'no message'}); "
                        "this needs user namespaces; environment_type=docker does without"
                    )
        except TimeoutError as error:
            await sandbox.stop()
            raise SandboxError(f"a sandbox did not start within {START_TIMEOUT_S} s; the machine is overloaded") from error
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None and not self._watcher.done()

    async def run(self, script: str, *, timeout_s: float | None = None, stdout: BinaryIO | None = None) -> Completed:
        """Run a bash script inside; its stdout goes to the file `stdout` when given.

        Raises CommandTimeout past `timeout_s`, SandboxError when the sandbox is gone. Output past 16 MiB is dropped.
        """
        if not self.is_alive:
            raise SandboxError("the sandbox is gone")
        with self._asked(script, stdout) as request:
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
        if status is None:
            await self._confirm_alive()
            status = KILLED_STATUS
        return Completed(status=status, stdout=bytes(request.stdout.data), stderr=bytes(request.stderr.data))

    async def kill_processes(self) -> None:
        """Kill everything inside but pid 1."""
        self._send("killall")
        await self.run(":", timeout_s=KILL_TIMEOUT_S)

    async def stop(self) -> None:
        """End the sandbox with everything in it and remove its host files. Safe to call twice."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.shield(self._watcher)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._watcher
        if self._directory.exists():
            remove_tree(self._directory)

    async def _confirm_alive(self) -> None:
        """A command vanished without a status: either it alone was killed from inside, or the sandbox is dying with it."""
        if not self.is_alive:  # `_watch` has been: it would not see the probe
            raise self._death()
        try:
            with self._asked(":") as probe:
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    await probe.done
        except TimeoutError as error:
            raise SandboxError("the sandbox no longer answers") from error

    @contextlib.contextmanager
    def _asked(self, script: str, stdout: BinaryIO | None = None) -> Iterator[Request]:
        """A command on its way, as long as the block lasts; `_watch` fails it when the sandbox dies."""
        request = Request(self._requests, next(self._numbers), script, stdout)
        self._pending.add(request)
        try:
            self._send(f"run {request.number}")
            yield request
        finally:
            self._pending.discard(request)
            request.close()

    def put(self, name: str) -> tuple[Path, str]:
        """A place for a file to hand in: its path on the host and, read-only, inside."""
        return self._requests / name, f"{CONTROL}/requests/{name}"

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(line.encode() + b"\n")

    async def _watch(self) -> None:
        """Fail what waits for an answer when the sandbox dies by itself."""
        await self._process.wait()
        for request in self._pending:
            request.fail(self._death())

    def _death(self) -> SandboxError:
        return SandboxError(f"the sandbox died (status {self._process.returncode})")


def bubblewrap_command(*, requests: Path, skeleton: Path, hostname: str, share_network: bool, limits: Limits) -> list[str]:
    """The whole command line. The order of the mounts matters: later ones lie on top of earlier ones."""
    command = [
        _bubblewrap(),
        *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--as-pid-1", "--new-session"),
        *("--cap-drop", "ALL", "--uid", "0", "--gid", "0", "--hostname", hostname, "--clearenv"),
    ]
    for name, value in BASE_ENVIRONMENT.items():
        command += ["--setenv", name, value]
    command += ["--size", str(limits.storage_mb * 2**20), "--tmpfs", "/", "--ro-bind", "/usr", "/usr"]
    for name in USERLAND:
        if Path("/", name).exists():
            command += ["--ro-bind", str(Path("/", name).resolve()), f"/{name}"]
    command += ["--size", str(limits.storage_mb * 2**20), "--tmpfs", "/usr/local", "--proc", "/proc", "--dev", "/dev"]
    # The tmpfs of --dev has no size but half of the machine's memory.
    command += ["--perms", "1777", "--size", str(limits.storage_mb * 2**20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    for name in PRIVATE_DIRECTORIES:
        command += ["--dir", f"/{name}"]
    for name in SHARED_DIRECTORIES:
        command += ["--perms", "1777", "--dir", f"/{name}"]
    for name in HOST_SETTINGS:
        command += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    if share_network:
        command += ["--share-net", "--ro-bind-try", str(Path("/etc/resolv.conf").resolve()), "/etc/resolv.conf"]
    command += ["--ro-bind", str(skeleton), f"{CONTROL}/skeleton", "--ro-bind", str(requests), f"{CONTROL}/requests"]
    ulimits = ["ulimit -c 0", f"ulimit -f {limits.storage_mb * 1024}"]
    if limits.processes is not None:
        ulimits.append(f"ulimit -u {limits.processes}")
    if limits.memory_mb is not None:
        ulimits.append(f"ulimit -d {limits.memory_mb * 1024}")
    return [*command, "--chdir", "/", "--", "/usr/bin/bash", "--norc", "-c", EXEC_SERVER.format(limits="\n".join(ulimits))]


def why_no_sandbox() -> str | None:
    """Why no sandbox can run here; None when one just did."""
    if missing := missing_programs():
        return f"it needs the packages {' '.join(missing)}"
    with tempfile.TemporaryDirectory() as place:
        requests, skeleton = Path(place, "requests"), Path(place, "skeleton")
        requests.mkdir()
        skeleton.mkdir()
        command = bubblewrap_command(requests=requests, skeleton=skeleton, hostname="probe", share_network=False, limits=Limits())
        try:
            probe = subprocess.run(command, input=b"", capture_output=True, timeout=START_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"bubblewrap does not start within {START_TIMEOUT_S} s"
    if probe.stdout == b"ready\n":
        return None
    reason = probe.stderr.decode(errors="replace").strip().splitlines()
    return f"bubblewrap cannot start ({reason[-1] if reason else 'no message'}); it needs user namespaces"


def why_no_network() -> str | None:
    """Why no sandbox can have a network here; None when one can."""
    return None


def missing_programs() -> list[str]:
    """What the sandbox needs and this machine lacks."""
    programs = {"bwrap": "bubblewrap", "bash": "bash", "tar": "tar", "tmux": "tmux"}
    return [package for program, package in programs.items() if shutil.which(program, path="/usr/bin:/bin") is None]


def _bubblewrap() -> str:
    program = shutil.which("bwrap", path="/usr/bin:/bin")
    if program is None:
        raise SandboxError("the sandbox needs bubblewrap: install the package bubblewrap, or use environment_type=docker")
    return program

"""A running sandbox: bubblewrap around an exec server, which is pid 1 of the sandbox's own namespaces.

    host                                            sandbox, with its own namespaces
    run(script) -> writes N.sh and two FIFOs,   ->  pid 1 (`exec_server`) starts N.sh in a process group
                   sends "run N TOKEN SHELL"
                <- stdout and stderr through the FIFOs, "exit N STATUS" from pid 1

The directory of these files is bound read-only; writing to a FIFO needs no writable mount. The sandbox
therefore cannot fill a file of the host, replace it by a link, or delete it. Pid 1 ends when its stdin
closes, and the option --die-with-parent of bubblewrap makes the kernel kill pid 1 when the trainer ends. The
kernel kills every process of a pid namespace together with its pid 1, so no process survives the trainer,
even after `kill -9`. The kernel also kills pid 1 if only the thread that started bubblewrap ends and the
trainer continues. Therefore start sandboxes from the thread of the event loop, never from a worker thread.

Root inside the sandbox is an unprivileged user of the host (`user`) without capabilities. The seccomp filter
(`system_calls`) refuses the system calls that no task needs. `resource_limits` bounds memory, storage and
processes; CPU time is not limited. A sandbox does not protect against an attacker with a kernel exploit.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from src.core.errors import SandboxError
from src.envs.sandbox.exec_request import Answer, CommandResult, ExecRequest
from src.envs.sandbox.exec_server import CONTROL, INTERPRETER, PathKind
from src.envs.sandbox.launch import Launch
from src.envs.sandbox.network import NAMESPACE_LINE, PROGRAMS, SlirpNetwork
from src.envs.sandbox.resource_limits import SandboxLimits
from src.envs.sandbox.sandbox_directory import temporary_sandbox_directory

START_TIMEOUT_S = 30
STOP_TIMEOUT_S = 5
KILL_TIMEOUT_S = 5
REQUEST_TIMEOUT_S = 30

type Shell = Literal["bash", "sh"]


class CommandTimeout(SandboxError):
    """A command exceeded its time limit. Its process group was killed."""


class Bubblewrap:
    """A running sandbox. `Bubblewrap.start` starts it and `stop` ends it."""

    def __init__(self, process: asyncio.subprocess.Process, launch: Launch) -> None:
        self._process = process
        self._launch = launch
        self._network: SlirpNetwork | None = None
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Answer]] = {}  # the number of a request -> its answer
        self._staged: set[Path] = set()  # files to which the sandbox's user has not been given access yet
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, directory: Path, *, skeleton: Path, hostname: str, share_network: bool, limits: SandboxLimits
    ) -> Bubblewrap:
        """Start a sandbox. `directory`, which must not exist yet, is created for the sandbox's files on the
        host. The parent of `directory` must come from `temporary_sandbox_directory`. `skeleton` contains the
        initial files of the sandbox's root, which pid 1 copies there.

        With `share_network`, the sandbox reaches the public network, but neither the network namespace nor
        the loopback addresses of the host. Raises SandboxError if the sandbox does not start.
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
                process_group=0,  # Ctrl-C at the terminal must reach the trainer only
                cwd="/",
                env={"PATH": PROGRAMS},  # the trainer's environment may contain API keys
            )
        except BaseException:
            launch.clean_up()
            raise
        sandbox = cls(process, launch)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await sandbox._wait_until_ready(has_network=share_network)
        except BaseException as error:
            await sandbox.stop()
            if not isinstance(error, TimeoutError):
                raise
            raise SandboxError(
                f"a sandbox did not start within {START_TIMEOUT_S} s; lower n_parallel_envs if the machine "
                "is overloaded"
            ) from error
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
        shell: Shell = "bash",
    ) -> CommandResult:
        """Run a script in the sandbox with a shell of /usr/bin and return its result. With `stdout`, the
        standard output goes to that file.

        Output is dropped after 16 MiB per stream, or after 1 GiB when it goes to a file. Raises
        CommandTimeout after `timeout_s` seconds (None: no limit), and SandboxError if the sandbox has ended
        or the host cannot store the script or the output.
        """
        if not self.is_alive:
            raise SandboxError("the sandbox has ended")
        with self._start_request(script, stdout, shell) as request:
            try:
                async with asyncio.timeout(timeout_s):
                    return await request.result()
            except TimeoutError as error:
                self._send(f"kill {request.number}")
                await asyncio.wait({request.answer}, timeout=KILL_TIMEOUT_S)
                raise CommandTimeout(f"Command timed out after {timeout_s:g} seconds") from error
            except asyncio.CancelledError:
                self._send(f"kill {request.number}")
                raise

    async def kill_processes(self) -> None:
        """Kill all processes in the sandbox except pid 1 and wait until they have ended."""
        try:
            await self._request("killall")
        except TimeoutError as error:
            raise SandboxError(
                f"the processes of a sandbox did not end within {REQUEST_TIMEOUT_S} s"
            ) from error

    async def path_kind(self, path: str) -> PathKind:
        """Return the kind of file at an absolute path in the sandbox. Pid 1 answers without a new process."""
        try:
            return PathKind(await self._request("stat", path.encode("utf-8", "surrogateescape").hex()))
        except TimeoutError as error:
            raise SandboxError(f"the sandbox did not answer within {REQUEST_TIMEOUT_S} s") from error

    async def _request(self, verb: str, *arguments: str) -> int:
        """Send a request that pid 1 answers without running a script. Return the status in its answer.

        Raises TimeoutError after REQUEST_TIMEOUT_S seconds, and SandboxError if the sandbox has ended.
        """
        if not self.is_alive:
            raise SandboxError("the sandbox has ended")
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            self._send(" ".join([verb, str(number), *arguments]))
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                _, status = await answer
                return int(status)
        finally:
            del self._pending[number]

    async def stop(self) -> None:
        """End all processes of the sandbox and remove its host files. Safe to call twice."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        # A sandbox that did not start has no watcher.
        ended: asyncio.Task[Any] = self._watcher or asyncio.create_task(self._process.communicate())
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

    @contextlib.contextmanager
    def staged_file(self) -> Generator[tuple[Path, str]]:
        """Yield the host path of a new file, which the caller writes, and its read-only path in the sandbox.
        Commands that start after the file was written can read it. The file is removed afterwards.
        """
        path = self._launch.requests / f"{next(self._numbers)}.in"
        self._staged.add(path)
        try:
            yield path, f"{CONTROL}/requests/{path.name}"
        finally:
            path.unlink(missing_ok=True)
            self._staged.discard(path)

    async def _wait_until_ready(self, *, has_network: bool) -> None:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if has_network and line == NAMESPACE_LINE:
            self._network = await SlirpNetwork.connect(self._process.pid, self._launch.user)
            self._send("go")
            line = await self._process.stdout.readline()
        if line != b"ready\n":
            assert self._process.stderr is not None
            raise SandboxError(
                f"{_start_failure(await self._process.stderr.read())}; allow user namespaces, or use "
                "environment_type=docker"
            )
        self._watcher = asyncio.create_task(self._watch())

    @contextlib.contextmanager
    def _start_request(self, script: str, stdout: BinaryIO | None, shell: Shell) -> Generator[ExecRequest]:
        """Yield a command that has been sent to the sandbox. `_watch` sets its answer."""
        for path in list(self._staged):
            if path.exists():
                self._launch.user.grant_access(path, 0o640)
                self._staged.discard(path)
        request = ExecRequest(self._launch.requests, next(self._numbers), script, stdout, self._launch.user)
        self._pending[request.number] = request.answer
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

    async def _watch(self) -> None:
        """Dispatch the answers of pid 1 until the sandbox ends. Then fail the requests without an answer."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            verb, number, argument = line.decode().rstrip("\n").split(" ", 2)
            answer = self._pending.get(int(number))
            if answer is not None and not answer.done():  # else the request was cancelled or has timed out
                answer.set_result((verb, argument))
        await self._process.wait()
        error = SandboxError(
            f"the sandbox ended before it answered (exit status {self._process.returncode} of bubblewrap)"
        )
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(error)


def why_no_sandbox() -> str | None:
    """Start a sandbox to test the machine. Return why it did not start, or None if it did."""
    if missing := missing_packages():
        return f"these packages are not installed: {' '.join(missing)}"
    try:
        with temporary_sandbox_directory() as run:
            skeleton = run / "skeleton"
            skeleton.mkdir(mode=0o755)
            launch = Launch(
                run / "probe", skeleton=skeleton, hostname="probe", has_network=False, limits=SandboxLimits()
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
        return f"bubblewrap did not start within {START_TIMEOUT_S} s"
    except SandboxError as error:
        return str(error)
    return None if probe.stdout == b"ready\n" else _start_failure(probe.stderr)


def missing_packages() -> list[str]:
    """Return the Debian packages that the sandbox needs and that are not installed."""
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


def _start_failure(errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    return (
        f"bubblewrap could not start a sandbox here ({lines[-1] if lines else 'no message'}); "
        "this needs user namespaces for unprivileged users"
    )

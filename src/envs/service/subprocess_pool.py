"""A pool of worker processes. The workers of tau2-bench run episodes. The workers of `env=data` compare
answers with reference answers.

Requests and replies are JSON lines, and every request has a deadline. A worker answers one request at a time.

A worker can run many episodes. A worker that exits, hangs or sends an invalid reply is killed and replaced.
Its episodes are then replayed on another worker, which must give identical replies. An episode fails if its
new requests end more than `MAX_LOSSES` workers, or if the replays of its requests end more than `MAX_LOSSES`.

The errors distinguish a failure that a request caused (`RequestFailed`), for which an agent can be
responsible, from a failure of the pool (every other SandboxError), which must not become a reward.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from src.core.errors import ConfigError, SandboxError

logger = logging.getLogger(__name__)

GRACE_S = 5.0  # added to the time limit that the worker itself enforces
START_TIMEOUT_S = 180.0
MAX_LINE_BYTES = 1 << 27
MAX_LOSSES = 1

WorkerReply = Mapping[str, Any]


class RequestFailed(SandboxError):
    """A request failed: the worker replied with an error, or was lost (`WorkerLost`)."""


class WorkerLost(RequestFailed):
    """A worker exited or sent an invalid reply while it ran a request."""


class WorkerTimeout(WorkerLost):
    """A worker did not finish a request before its deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    command: Sequence[str]
    environment: Mapping[str, str]  # environment variables, in addition to those of the trainer
    num_workers: int
    step_timeout_s: float  # the time limit of one request


class Worker:
    """One worker process. Requests are answered in the order of the `ask` calls."""

    def __init__(self, process: asyncio.subprocess.Process, stderr: IO[bytes]) -> None:
        self.is_lost = False
        self._process = process
        self._stderr = stderr
        self._lock = asyncio.Lock()
        self._num_requests = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, request: Mapping[str, object], *, timeout_s: float) -> WorkerReply | None:
        """Return the reply, or None if `is_lost` was set before the request was sent.

        Raises WorkerLost if the worker exits, sends an invalid reply or misses the deadline during this
        request, or if it has exited since the previous request. Raises another SandboxError if `kill` is
        called during this request, for example because the pool is closed.
        """
        # The reply must be read even if the caller is cancelled. Otherwise the next request would read it.
        return await asyncio.shield(asyncio.create_task(self._exchange(request, timeout_s=timeout_s)))

    async def wait_until_ready(self) -> None:
        """Wait for the worker's first reply, which has the id 0.

        Raises ConfigError with the worker's message if the reply is an error, and SandboxError if the worker
        exits or sends no valid reply.
        """
        try:
            reply = await self._reply(0, timeout_s=START_TIMEOUT_S)
        except WorkerLost as error:
            raise SandboxError(f"a worker did not start: {error}") from error
        if "error" in reply:
            raise ConfigError(str(reply["error"]))

    async def kill(self) -> None:
        self.is_lost = True
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        self._stderr.close()

    async def _exchange(self, request: Mapping[str, object], *, timeout_s: float) -> WorkerReply | None:
        async with self._lock:
            if self.is_lost:
                return None
            self._num_requests += 1
            record = {"id": self._num_requests, "timeout_s": timeout_s, **request}
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(record).encode() + b"\n")
            return await self._reply(self._num_requests, timeout_s=timeout_s)

    async def _reply(self, number: int, *, timeout_s: float) -> WorkerReply:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                line = await self._process.stdout.readline()
        except (TimeoutError, ValueError) as error:  # ValueError: the line is too long
            await self.kill()
            if isinstance(error, ValueError):
                raise WorkerLost(f"a worker sent a reply of more than {MAX_LINE_BYTES} bytes") from error
            raise WorkerTimeout(f"a worker did not answer within {timeout_s:g} s") from error
        if not line:
            raise await self._exit_error(timeout_s)
        try:
            reply = json.loads(line)
            if reply["id"] == number:
                return reply
        except (ValueError, KeyError, TypeError):
            pass
        await self.kill()
        raise WorkerLost(f"a worker sent an invalid reply: {line[:200]!r}")

    async def _exit_error(self, timeout_s: float) -> SandboxError:
        status = await self._process.wait()
        if self.is_lost:  # `kill` was called; it closes `_stderr`, so no output can be quoted
            return SandboxError("a worker was stopped before it replied")
        self._stderr.seek(0)
        last_line = self._stderr.read().decode(errors="replace").strip().rpartition("\n")[2][:300]
        await self.kill()
        if status == -signal.SIGALRM:
            return WorkerTimeout(f"a worker did not answer within {timeout_s:g} s")
        return WorkerLost(f"a worker exited with status {status}: {last_line or 'no output'}")


class WorkerSession:
    """The requests and replies of one episode, which are kept to replay them on another worker."""

    def __init__(self, pool: WorkerPool, close_request: Mapping[str, object]) -> None:
        self._pool = pool
        self._close_request = close_request
        self._slot: int | None = None  # None before the first request
        self._worker: Worker | None = None
        self._exchanges: list[tuple[Mapping[str, object], WorkerReply]] = []
        self._num_losses = self._num_replay_losses = 0

    async def ask(self, request: Mapping[str, object]) -> WorkerReply:
        """Return the reply to a request.

        Raises WorkerLost if the new requests of this episode have ended more than `MAX_LOSSES` workers,
        RequestFailed if the worker replies with an error, another SandboxError if no worker can continue this
        episode, and the errors of `start_worker`.
        """
        while True:
            worker = await self._restored()
            if worker is None:
                continue
            try:
                reply = await worker.ask(request, timeout_s=self._pool.settings.step_timeout_s)
            except WorkerLost as error:
                self._num_losses += 1
                if self._num_losses > MAX_LOSSES:
                    raise
                logger.warning("%s; its episodes continue on another worker", error)
                continue
            if reply is None:
                continue
            if "error" in reply:
                raise RequestFailed(f"the worker's operation {request.get('op')} failed: {reply['error']}")
            self._exchanges.append((request, reply))
            return reply

    async def close(self) -> None:
        """Send the close request to the worker. A closed session must not be used again."""
        if self._slot is not None:
            self._pool.release(self._slot)
        if self._worker is not None:
            with suppress(SandboxError):
                await self._worker.ask(self._close_request, timeout_s=self._pool.settings.step_timeout_s)

    async def _restored(self) -> Worker | None:
        """Return a worker with the state of this episode, or None if the worker is lost in the replay."""
        if self._worker is not None and not self._worker.is_lost:
            return self._worker
        if self._slot is None:
            self._slot = self._pool.reserve()
        self._worker = worker = await self._pool.worker(self._slot)
        for request, reply in self._exchanges:
            try:
                replayed = await worker.ask(request, timeout_s=self._pool.settings.step_timeout_s)
            except WorkerLost as error:
                self._num_replay_losses += 1
                if self._num_replay_losses > MAX_LOSSES:
                    raise SandboxError(
                        "an episode cannot continue on another worker: the replay of "
                        f"{request.get('op')} failed: {error}"
                    ) from error
                return None
            if replayed is None:
                return None
            if {**replayed, "id": 0} != {**reply, "id": 0}:
                raise SandboxError(
                    "an episode cannot continue on another worker: the reply of that worker to "
                    f"{request.get('op')} is different"
                )
        return worker


class WorkerPool:
    """A pool of up to `num_workers` workers, which are started on demand.

    A new session is assigned to the slot with the fewest sessions. Each slot has one worker, and a new worker
    takes the slot of a lost one. `contextlib.aclosing` closes a pool.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self._workers: list[Worker | None] = [None] * settings.num_workers
        self._starting = [asyncio.Lock() for _ in self._workers]
        self._num_sessions = [0] * settings.num_workers
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if worker is not None and not worker.is_lost]

    def session(self, *, close_request: Mapping[str, object]) -> WorkerSession:
        """Open the session of one episode. `close` of the session sends `close_request` to its worker."""
        return WorkerSession(self, close_request)

    def reserve(self) -> int:
        """Return the slot with the fewest sessions for a new session, which then calls `release`."""
        slot = self._num_sessions.index(min(self._num_sessions))
        self._num_sessions[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        self._num_sessions[slot] -= 1

    async def worker(self, slot: int) -> Worker:
        """Return the worker of a slot, after starting it if it is not running. Raises SandboxError if the
        pool is closed, and the errors of `start_worker`."""
        async with self._starting[slot]:
            worker = self._workers[slot]
            if worker is None or worker.is_lost:
                self._require_open()
                worker = self._workers[slot] = await start_worker(self.settings)
                if self._is_closed:  # `aclose` did not see the new worker
                    await worker.kill()
            self._require_open()
            return worker

    async def aclose(self) -> None:
        """End all workers. No worker is started afterwards."""
        self._is_closed = True
        for worker in self._workers:
            if worker is not None and not worker.is_lost:
                await worker.kill()

    def _require_open(self) -> None:
        if self._is_closed:
            raise SandboxError("the workers of this environment have ended")


async def start_worker(settings: WorkerSettings) -> Worker:
    """Start a worker and wait until it is ready.

    Raises ConfigError if the command cannot be run, and the errors of `Worker.wait_until_ready`.
    """
    stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the worker is killed
    try:
        process = await asyncio.create_subprocess_exec(
            *settings.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **settings.environment},
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C must reach only the trainer, which ends the workers
        )
    except OSError as error:
        stderr.close()
        raise ConfigError(
            f"{settings.command[0]} cannot be run ({error.strerror}); check the command"
        ) from error
    worker = Worker(process, stderr)
    try:
        await worker.wait_until_ready()
    except BaseException:  # also if the call is cancelled
        await worker.kill()
        raise
    return worker

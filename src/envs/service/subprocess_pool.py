"""Programs that play episodes in processes of their own: a request per line, a reply per line, and a deadline for each.

A worker plays many episodes and answers one request at a time. One that dies, hangs or answers nonsense is killed and another takes its
place. Its episodes go on there: what was said is said again, and has to be answered the same way. An episode whose own request the worker
died of gets that once; then it has failed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

from src.core.errors import ConfigError, SandboxError

logger = logging.getLogger(__name__)

GRACE_S = 5.0  # beyond the deadline that a worker keeps itself
START_TIMEOUT_S = 180.0
MAX_LINE_BYTES = 1 << 27
MAX_LOSSES = 1  # workers an episode may lose to its own requests and still go on

Reply = Mapping[str, Any]


class WorkerLost(SandboxError):
    """A worker died, or answered nonsense."""


class WorkerTimeout(WorkerLost):
    """A worker was still at work on one request after its deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    command: Sequence[str]
    environment: Mapping[str, str]  # beside this process's own
    num_workers: int
    step_timeout_s: float  # of one request


class Worker:
    """One process. `ask` is fair: requests are answered in the order they came."""

    def __init__(self, process: asyncio.subprocess.Process, stderr: IO[bytes]) -> None:
        self.num_sessions = 0
        self.is_lost = False
        self._process = process
        self._stderr = stderr
        self._turn = asyncio.Lock()
        self._num_requests = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, request: Mapping[str, object], *, timeout_s: float) -> Reply | None:
        """The reply; None when the worker was lost before the request had its turn. WorkerLost when it was lost to this one."""
        return await asyncio.shield(
            asyncio.create_task(self._exchange(request, timeout_s=timeout_s))
        )  # a cancelled caller's reply is read too

    async def read_greeting(self) -> None:
        """ConfigError with the worker's own words when it cannot start."""
        reply = await self._reply(0, timeout_s=START_TIMEOUT_S)
        if "error" in reply:
            await self.kill()
            raise ConfigError(str(reply["error"]))

    async def kill(self) -> None:
        self.is_lost = True
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        self._stderr.close()

    async def _exchange(self, request: Mapping[str, object], *, timeout_s: float) -> Reply | None:
        async with self._turn:
            if self.is_lost:
                return None
            self._num_requests += 1
            record = {"id": self._num_requests, "timeout_s": timeout_s, **request}
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(record).encode() + b"\n")
            return await self._reply(self._num_requests, timeout_s=timeout_s)

    async def _reply(self, number: int, *, timeout_s: float) -> Reply:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                line = await self._process.stdout.readline()
        except (TimeoutError, ValueError) as error:  # ValueError: a line without end
            await self.kill()
            if isinstance(error, ValueError):
                raise WorkerLost(f"a worker's reply was longer than {MAX_LINE_BYTES} bytes") from error
            raise WorkerTimeout(f"a worker did not answer within {timeout_s:g} s") from error
        if not line:
            raise await self._post_mortem(timeout_s)
        try:
            reply = json.loads(line)
            if reply["id"] == number:
                return reply
        except (ValueError, KeyError, TypeError):
            pass
        await self.kill()
        raise WorkerLost(f"a worker answered nonsense: {line[:200]!r}")

    async def _post_mortem(self, timeout_s: float) -> WorkerLost:
        status = await self._process.wait()
        self._stderr.seek(0)
        last_words = self._stderr.read().decode(errors="replace").strip().rpartition("\n")[2][:300]
        await self.kill()
        if status == -signal.SIGALRM:
            return WorkerTimeout(f"a worker was still at work after {timeout_s:g} s")
        return WorkerLost(f"a worker ended with status {status}: {last_words or 'it said nothing'}")


class Session:
    """One episode's talk with a worker. What was asked is kept, for another worker."""

    def __init__(self, pool: WorkerPool, farewell: Mapping[str, object]) -> None:
        self._pool = pool
        self._farewell = farewell
        self._worker: Worker | None = None
        self._said: list[tuple[Mapping[str, object], Reply]] = []
        self._num_losses = 0

    async def ask(self, request: Mapping[str, object]) -> Reply:
        """WorkerLost when a second worker was lost to this episode; SandboxError when the worker cannot do what is asked."""
        while True:
            try:
                worker = await self._restored()
                reply = (
                    await worker.ask(request, timeout_s=self._pool.settings.step_timeout_s)
                    if worker
                    else None
                )
            except WorkerLost as error:
                self._num_losses += 1
                if self._num_losses > MAX_LOSSES:
                    raise
                logger.warning("%s; its episodes go on in another one", error)
                continue
            if reply is None:
                continue
            if "error" in reply:
                raise SandboxError(f"a worker could not {request.get('op')}: {reply['error']}")
            self._said.append((request, reply))
            return reply

    async def close(self) -> None:
        """The worker may forget the episode. Once closed, a session is not used again."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.num_sessions -= 1
        with suppress(WorkerLost):
            await worker.ask(self._farewell, timeout_s=self._pool.settings.step_timeout_s)

    async def _restored(self) -> Worker | None:
        """A worker that knows all that was said; None when it was lost, to others, while it was told."""
        if self._worker is not None and not self._worker.is_lost:
            return self._worker
        if self._worker is not None:
            self._worker.num_sessions -= 1
        self._worker = worker = await self._pool.worker()
        worker.num_sessions += 1
        for request, reply in self._said:
            again = await worker.ask(request, timeout_s=self._pool.settings.step_timeout_s)
            if again is None:
                return None
            if {**again, "id": 0} != {**reply, "id": 0}:
                raise SandboxError(
                    f"an episode cannot go on in another worker: {request.get('op')} was answered differently there"
                )
        return worker


class WorkerPool:
    """Up to `num_workers` workers, started as they are needed; a session goes to the one with the fewest."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self._slots: list[Worker | None] = [None] * settings.num_workers
        self._starting = [asyncio.Lock() for _ in self._slots]
        self._waiting = [0] * settings.num_workers

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._slots if worker is not None and not worker.is_lost]

    def session(self, *, farewell: Mapping[str, object]) -> Session:
        """An episode's own, to be closed; `farewell` is the request that makes a worker forget it."""
        return Session(self, farewell)

    async def worker(self) -> Worker:
        """The least busy one, new where its place is empty."""
        number = min(range(len(self._slots)), key=self._load)
        self._waiting[number] += 1
        try:
            async with self._starting[number]:
                worker = self._slots[number]
                if worker is None or worker.is_lost:
                    worker = self._slots[number] = await start_worker(self.settings)
                return worker
        finally:
            self._waiting[number] -= 1

    async def close(self) -> None:
        for worker in self._slots:
            if worker is not None and not worker.is_lost:
                await worker.kill()

    def _load(self, number: int) -> int:
        worker = self._slots[number]
        return self._waiting[number] + (0 if worker is None or worker.is_lost else worker.num_sessions)


@asynccontextmanager
async def worker_pool(settings: WorkerSettings) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(settings)
    try:
        yield pool
    finally:
        await pool.close()


async def start_worker(settings: WorkerSettings) -> Worker:
    """One that has said it is ready. ConfigError where it cannot be run at all."""
    stderr = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the worker
    try:
        process = await asyncio.create_subprocess_exec(
            *settings.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **settings.environment},
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is for the trainer, which ends them itself
        )
    except OSError as error:
        stderr.close()
        raise ConfigError(f"{settings.command[0]} cannot be run ({error.strerror})") from error
    worker = Worker(process, stderr)
    await worker.read_greeting()
    return worker

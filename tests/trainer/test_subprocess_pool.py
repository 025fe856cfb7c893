"""Tests the pool of worker processes with a worker that fails on request."""

import asyncio
import os
import signal
import sys
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from src.core.errors import ConfigError, SandboxError
from src.envs.service import subprocess_pool
from src.envs.service.subprocess_pool import (
    RequestFailed,
    WorkerLost,
    WorkerPool,
    WorkerSession,
    WorkerSettings,
    WorkerTimeout,
)

FAKE_WORKER = Path(__file__).parent.parent / "fakes" / "fake_worker.py"


@asynccontextmanager
async def pool_of(num_workers: int = 1, *, arguments: tuple[str, ...] = ()):
    command = [sys.executable, str(FAKE_WORKER), *arguments]
    settings = WorkerSettings(command=command, environment={}, num_workers=num_workers, step_timeout_s=20.0)
    async with aclosing(WorkerPool(settings)) as pool:
        yield pool


class Counter:
    """An episode of the fake worker that adds numbers to a total."""

    def __init__(self, pool: WorkerPool, name: str) -> None:
        self.name = name
        self.session: WorkerSession = pool.session(close_request={"op": "forget", "episode": name})

    async def ask(self, op: str, **arguments: object) -> dict:
        return dict(await self.session.ask({"op": op, "episode": self.name, **arguments}))

    async def add(self, n: int) -> int:
        return (await self.ask("add", n=n))["total"]


async def test_episodes_share_a_worker_and_get_their_own_replies():
    async with pool_of() as pool:
        one, two = Counter(pool, "one"), Counter(pool, "two")
        assert await asyncio.gather(one.add(1), two.add(10), one.add(2), two.add(20)) == [1, 10, 3, 30]
        assert len(pool.pids) == 1


async def test_a_session_uses_the_least_loaded_worker_until_it_closes():
    async with pool_of(2) as pool:
        counters = [Counter(pool, str(number)) for number in range(4)]
        pids = [(await counter.ask("add", n=0, pid=True))["pid"] for counter in counters]
        assert sorted(pids.count(pid) for pid in set(pids)) == [2, 2]
        await counters[0].session.close()
        newest = Counter(pool, "newest")
        assert (await newest.ask("add", n=0, pid=True))["pid"] == pids[0]
        assert (await newest.ask("known"))["episodes"] == sorted(
            ["newest", *(str(n) for n in (1, 2, 3) if pids[n] == pids[0])]
        )


@pytest.mark.parametrize("how", ["alarm", "die", "nonsense"])
async def test_an_episode_is_replayed_on_another_worker(how: str, tmp_path: Path):
    async with pool_of() as pool:
        one, other = Counter(pool, "one"), Counter(pool, "other")
        assert (await one.add(5), await other.add(7)) == (5, 7)
        first = pool.pids
        assert (await one.ask("once", how=how, flag=str(tmp_path / "flag")))["total"] == 5
        assert (await one.add(1), await other.add(1)) == (6, 8)
        assert pool.pids != first


async def test_the_parent_kills_a_hung_worker(monkeypatch: pytest.MonkeyPatch):
    async with pool_of() as pool:
        counter = Counter(pool, "one")
        await counter.add(1)
        [pid] = pool.pids
        monkeypatch.setattr(subprocess_pool, "GRACE_S", 0.3)
        pool.settings = replace(pool.settings, step_timeout_s=0.3)
        with pytest.raises(WorkerTimeout, match=r"did not answer within 0\.3 s"):
            await counter.ask("hang")
        assert not pool.pids
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("alarm", WorkerTimeout, "a worker did not answer within 20 s"),
        ("die", WorkerLost, "exited with status 3: MemoryError: out of it"),
        ("nonsense", WorkerLost, "sent an invalid reply: b'INFO: not a reply"),
    ],
)
async def test_a_request_that_loses_a_second_worker_fails_alone(how: str, error: type, message: str):
    async with pool_of() as pool:
        failing, other = Counter(pool, "failing"), Counter(pool, "other")
        await asyncio.gather(failing.add(1), other.add(3))
        with pytest.raises(error, match=message):
            await failing.ask(how)
        assert await other.add(4) == 7


async def test_episodes_are_restored_after_each_lost_worker():
    async with pool_of() as pool:
        other = Counter(pool, "other")
        assert await other.add(1) == 1
        for number in range(3):
            with pytest.raises(WorkerLost):
                await Counter(pool, f"failing-{number}").ask("die")
        assert await other.add(1) == 2


async def test_no_episode_is_lost_when_workers_are_killed_from_outside():
    async with pool_of(3) as pool:

        async def run_episode(number: int) -> int:
            counter, total = Counter(pool, str(number)), 0
            for step in range(20):
                total = await counter.add(step)
                await asyncio.sleep(0.002)
            await counter.session.close()
            return total

        await asyncio.gather(*(Counter(pool, f"first-{number}").add(0) for number in range(3)))
        running = [asyncio.create_task(run_episode(number)) for number in range(24)]
        for pid in pool.pids:
            await asyncio.sleep(0.02)
            os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*running) == [190] * 24


async def test_a_cancelled_request_does_not_disturb_other_episodes():
    async with pool_of() as pool:
        one, two = Counter(pool, "one"), Counter(pool, "two")
        await one.add(1)
        pending = asyncio.create_task(one.add(2))
        await asyncio.sleep(0)
        pending.cancel()
        assert await two.add(5) == 5
        assert await one.add(0) == 3


async def test_an_operation_error_fails_only_its_episode():
    async with pool_of() as pool:
        counter = Counter(pool, "one")
        with pytest.raises(SandboxError, match="operation fly failed: ValueError: no such thing as fly"):
            await counter.ask("fly")
        assert await counter.add(1) == 1


async def test_a_different_reply_in_a_replay_is_a_failure():
    async with pool_of() as pool:
        counter = Counter(pool, "one")
        await counter.ask("add", n=1, pid=True)
        os.kill(pool.pids[0], signal.SIGKILL)
        with pytest.raises(SandboxError, match="the reply of that worker to add is different"):
            await counter.add(1)
            await counter.add(1)


async def test_a_closed_pool_starts_no_worker():
    async with pool_of() as pool:
        counter = Counter(pool, "one")
        await counter.add(1)
    with pytest.raises(SandboxError, match="the workers of this environment have ended"):
        await counter.add(1)
    assert not pool.pids


async def test_a_worker_that_starts_while_its_pool_closes_ends():
    async with pool_of() as pool:
        asking = asyncio.create_task(Counter(pool, "one").add(1))
        await asyncio.sleep(0)
    with pytest.raises(SandboxError, match="the workers of this environment have ended"):
        await asking
    assert not pool.pids


async def test_a_start_error_of_a_worker_is_reported():
    async with pool_of(arguments=("refuse",)) as pool:
        with pytest.raises(ConfigError, match="wrong tau2"):
            await Counter(pool, "one").add(1)
    settings = WorkerSettings(command=["/nowhere/python"], environment={}, num_workers=1, step_timeout_s=1)
    async with aclosing(WorkerPool(settings)) as pool:
        with pytest.raises(ConfigError, match="/nowhere/python cannot be run"):
            await Counter(pool, "one").add(1)


async def test_a_worker_that_does_not_start_is_no_failed_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subprocess_pool, "START_TIMEOUT_S", 0.1)
    monkeypatch.setattr(subprocess_pool, "GRACE_S", 0.1)
    async with pool_of(arguments=("hang",)) as pool:
        with pytest.raises(SandboxError, match="a worker did not start: a worker did not answer") as error:
            await Counter(pool, "one").add(1)
    assert not isinstance(error.value, RequestFailed)


async def test_a_replay_that_ends_workers_is_no_failed_request(tmp_path: Path):
    async with pool_of() as pool:
        counter, flag = Counter(pool, "one"), tmp_path / "flag"
        await counter.ask("die_if", flag=str(flag))
        flag.touch()
        os.kill(pool.pids[0], signal.SIGKILL)
        with pytest.raises(
            SandboxError, match="cannot continue on another worker: the replay of die_if failed: a wor"
        ) as error:
            await counter.add(1)
            await counter.add(1)
    assert not isinstance(error.value, RequestFailed)


async def test_a_cancelled_start_ends_the_worker(monkeypatch: pytest.MonkeyPatch):
    processes: list[asyncio.subprocess.Process] = []
    is_started = asyncio.Event()
    create = asyncio.create_subprocess_exec

    async def record(*command: str, **options: Any) -> asyncio.subprocess.Process:
        processes.append(await create(*command, **options))
        is_started.set()
        return processes[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", record)
    async with pool_of(arguments=("hang",)) as pool:
        start = asyncio.create_task(pool.worker(pool.reserve()))
        await is_started.wait()
        await asyncio.sleep(0)  # the pool now waits for the worker's first reply
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
    assert processes[0].returncode == -signal.SIGKILL


async def test_closing_the_pool_ends_all_workers():
    async with pool_of(2) as pool:
        await asyncio.gather(Counter(pool, "a").add(1), Counter(pool, "b").add(1))
        pids = pool.pids
        assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_closing_the_pool_fails_a_pending_request():
    async with pool_of() as pool:
        counter = Counter(pool, "one")
        await counter.add(1)
        pending = asyncio.create_task(counter.ask("hang"))
        for _ in range(2):  # the second iteration sends the request
            await asyncio.sleep(0)
        await pool.aclose()
        with pytest.raises(SandboxError, match="a worker was stopped before it replied") as error:
            await pending
        assert not isinstance(error.value, RequestFailed)
        assert not pool.pids

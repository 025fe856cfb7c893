"""Stops the server during a run of the real trainer and SDK. The server has a fake engine."""

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from skyrl_tx_server.http.http_handler import StartupState
from src.core.errors import ServerLost
from src.loop.connection import Dependencies
from src.policy.backend import connect
from src.policy.sampling_policy import SampleRequest
from tests.fakes.run import FakeRun, groups_trained, untimed
from tests.fakes.server import fake_context, reserved_port, serving
from tests.fakes.trials import FakeTasks, task, trajectory

pytestmark = pytest.mark.official_sdk


@pytest.fixture(autouse=True)
def quick_and_quiet(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("src.rollouts.watchdog.CHECK_PERIOD_S", 0.05)
    monkeypatch.setattr("src.policy.backend.CLOSE_TIMEOUT_S", 0.5)
    monkeypatch.setattr("src.loop.connection.RECONNECT_PERIOD_S", 0.1)
    caplog.set_level(logging.CRITICAL)


@pytest.fixture
def port():
    with reserved_port() as port:
        yield port


class Bench(FakeRun):
    """A run of the real trainer and SDK. The test can stop the server and start it again.

    The new server has the same address and disk.
    """

    def __init__(self, path, port):
        super().__init__(path / "run")
        self.on_trial: Callable[[Any, Any], Awaitable[None]] | None = None
        self._port = port
        self._checkpoints = path / "checkpoints"
        self._server = contextlib.ExitStack()
        self.source = FakeTasks(
            train=[task(f"t{number}") for number in range(8)],
            eval=[task("held-1")],
            run_trial=self._run_trial,
        )

    def start(self):
        self.url = self._server.enter_context(
            serving(StartupState(state=fake_context(self._checkpoints)), port=self._port)
        )

    def stop(self):
        self._server.close()

    async def go(self, *options):
        defaults = [
            "model_name=local/fake",
            "tasks_dir=t",
            f"skyrl_tx_url={self.url}",
            "batch_size=2",
            "group_size=2",
            "lora_rank=4",
        ]
        defaults += [
            "max_tokens=4",
            "context_limit=64",
            "enable_summarize=false",
            "save_every=2",
            "retry_wait_s=0.05",
        ]
        await super().go(*defaults, "heartbeat_timeout_s=0.5", *options)

    @asynccontextmanager
    async def opened(self, config, events, source):
        async with connect(config) as endpoint:
            yield Dependencies(source=self.source, backend=await endpoint.open_training(config))

    async def _run_trial(self, trial, policy):
        turn = await policy.sample(
            SampleRequest(prompt_ids=[1, trial.seed % 50], max_tokens=2, temperature=1.0, seed=trial.seed)
        )
        if self.on_trial is not None:
            await self.on_trial(trial, policy)
        return trajectory(trial.task.id, float(trial.seed % 2), [turn], name=f"{trial.task.id}-{trial.seed}")


@pytest.mark.parametrize(
    ("waits", "message"),
    [
        (True, "server lost or request failed: rolling out step 4: the server at http://"),
        # The message depends on which part of the trainer notices the loss first.
        (
            False,
            "server lost or request failed: training(: no model session-| step 4: the server at http://)",
        ),
    ],
    ids=["while a trial waits", "when training goes on"],
)
async def test_a_run_continues_when_its_server_restarts(tmp_path, port, waits, message):
    unbroken, bench = Bench(tmp_path / "a", port), Bench(tmp_path / "b", port)
    unbroken.start()
    await unbroken.go()
    unbroken.stop()
    sampled = []

    async def restart_in_step_four(trial, policy):
        if policy.version == 3 and trial.task.id.startswith("t"):
            sampled.append(trial)
            if len(sampled) == 4:  # all requests of the step
                await asyncio.to_thread(bench.stop)
                bench.start()
                if waits:
                    await asyncio.Event().wait()

    bench.on_trial = restart_in_step_four
    bench.start()
    await asyncio.wait_for(bench.go("heartbeat_timeout_s=30"), 300)
    bench.stop()
    assert len(sampled) >= 4
    assert json.dumps(untimed(bench.path)) == json.dumps(untimed(unbroken.path))
    assert set(groups_trained(bench.path).values()) == {1}
    journal = bench.lines("journal.jsonl")
    assert [line["resumed_from"] for line in journal if line["event"] == "started"] == [0, 2]
    assert [line["step"] for line in journal if line["event"] == "trained"] == [1, 2, 3, 3, 4]
    assert journal[-1]["event"] == "ended" and journal[-1]["state"] == "done"
    again = journal[[line.get("resumed_from") for line in journal].index(2) :]
    assert not [line for line in again if line["event"] == "rollout_started" and line["step"] == 3], (
        "step 3 was on disk"
    )
    output = bench.text.getvalue()
    assert re.search(message, output) and "was restarted" in output and "resuming after step 2" in output


async def test_a_server_that_stays_unreachable_ends_the_run(tmp_path, port):
    bench = Bench(tmp_path, port)

    async def stop_the_server(trial, policy):
        if policy.version == 1:
            await asyncio.to_thread(bench.stop)
            # The SDK alone would retry for minutes.
            await policy.sample(SampleRequest(prompt_ids=[1, 2], max_tokens=2, temperature=1.0, seed=1))

    bench.on_trial = stop_the_server
    bench.start()
    with pytest.raises(
        ServerLost,
        match=r"no server answers at .*; the server did not return within reconnect_timeout_s=0.5; "
        "start it again and resume",
    ) as error:
        await asyncio.wait_for(bench.go("reconnect_timeout_s=0.5"), 120)
    assert "\n" not in str(error.value)
    assert bench.lines("journal.jsonl")[-1]["state"] == "server_lost"
    assert len(asyncio.all_tasks()) == 1


async def test_waiting_for_the_server_can_be_disabled(tmp_path, port):
    bench = Bench(tmp_path, port)

    async def stop_the_server(trial, policy):
        if policy.version == 1:
            await asyncio.to_thread(bench.stop)
            await asyncio.Event().wait()

    bench.on_trial = stop_the_server
    bench.start()
    with pytest.raises(
        ServerLost,
        match=r"rolling out step 2: the server has passed no health check for heartbeat_timeout_s=0\.5 .*"
        "start the server again and resume",
    ):
        await asyncio.wait_for(bench.go("reconnect_timeout_s=0"), 120)
    assert "waiting up to" not in bench.text.getvalue()

"""Tests env=openenv with a fake client, and with a real server if the package is installed."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from dataclasses import dataclass

import pytest

from src.cli.command_line import parse
from src.core.errors import ConfigError
from src.core.length_limits import LengthLimits
from src.core.trajectory import FailureKind, Trajectory, TrialFailure
from src.envs.message_env import EpisodeSettings, run_episode
from src.envs.openenv_client import OpenEnv, observation_text, open_openenv
from tests.fakes.policy import FakePolicy
from tests.fakes.tokenizer import byte_chat

BASE = ["model_name=m", "backend=skyrl-tx", "skyrl_tx_url=http://h:1", "env=openenv"]
LIMITS = LengthLimits(
    max_input_length=500, max_generate_length=50, max_sequence_length=600, context_limit=600
)


@dataclass
class Result:
    observation: object
    reward: float | None = None
    done: bool = False


class Client:
    """A client whose environment counts down from its seed."""

    def __init__(self) -> None:
        self.actions: list[object] = []
        self.num_closed = 0
        self.left = 0

    async def reset(self, **options: object) -> Result:
        self.left = int(str(options["seed"]))
        return Result({"text": f"{self.left} left"})

    async def step(self, action: object) -> Result:
        self.actions.append(action)
        self.left -= 1
        return Result({"text": f"{self.left} left"}, reward=None if self.left else 1.0, done=self.left == 0)

    async def close(self) -> None:
        self.num_closed += 1


class FullClient(Client):
    """A client of a server that refuses the first `refusals` sessions with the error of OpenEnv 0.10."""

    def __init__(self, *, refusals: int) -> None:
        super().__init__()
        self.refusals = refusals

    async def reset(self, **options: object) -> Result:
        if self.num_closed < self.refusals:
            raise RuntimeError(
                "Server error: Server at capacity: 1/1 sessions active. (code: CAPACITY_REACHED)"
            )
        return await super().reset(**options)


async def outcome_of(client: Client, *, field: str = "text"):
    async def connect() -> Client:
        return client

    env = OpenEnv(
        connect,
        to_action=lambda answer: {"said": answer},
        to_text=lambda observation: observation_text(observation, field=field),
        reset_options={"seed": 2},
    )
    settings = EpisodeSettings(temperature=1.0, seed=0)
    return await run_episode(
        env, FakePolicy(byte_chat(), ["a", "b"]), byte_chat(), LIMITS, settings, task_id="t"
    )


async def test_answers_become_actions():
    client = Client()
    await outcome_of(client)
    assert client.actions == [{"said": "a"}, {"said": "b"}]


async def test_observations_become_messages():
    trajectory = await outcome_of(Client())
    assert isinstance(trajectory, Trajectory)
    contents = [message["content"] for message in trajectory.conversation]
    assert contents == ["2 left", "a", "1 left", "b", "0 left"]


async def test_a_trajectory_has_the_rewards_of_the_server():
    trajectory = await outcome_of(Client())
    assert isinstance(trajectory, Trajectory)
    assert (trajectory.reward, trajectory.turn_rewards) == (1, [0, 1])


@pytest.mark.parametrize("field", ["text", "speech"])
async def test_the_session_is_closed_once(field):
    client = Client()
    await outcome_of(client, field=field)
    assert client.num_closed == 1


async def test_a_missing_field_of_an_observation_is_a_failure():
    failure = await outcome_of(Client(), field="speech")
    assert isinstance(failure, TrialFailure) and failure.kind == FailureKind.ENV_INIT_FAILED
    assert "the observation has no field speech; it has text" in failure.message


async def test_a_trial_waits_for_a_free_session(monkeypatch):
    monkeypatch.setattr("src.envs.openenv_client.CAPACITY_RETRY_S", 0)
    client = FullClient(refusals=2)
    trajectory = await outcome_of(client)
    assert isinstance(trajectory, Trajectory) and trajectory.reward == 1
    assert client.num_closed == 3  # two refused sessions and the one of the trial


async def test_a_waiting_trial_logs_one_line(monkeypatch, caplog):
    monkeypatch.setattr("src.envs.openenv_client.CAPACITY_RETRY_S", 0)
    with caplog.at_level(logging.INFO):
        await outcome_of(FullClient(refusals=3))
    (line,) = caplog.messages
    assert "set n_parallel_envs to the server's max_concurrent_envs" in line


class ConnectionClosed(Exception):
    """An exception like those of the package websockets."""

    __module__ = "websockets.exceptions"


@pytest.mark.parametrize(
    "error", [ConnectionClosed("no close frame"), ConnectionResetError("no close frame")]
)
@pytest.mark.parametrize("method", ["reset", "step"])
async def test_a_lost_connection_is_a_failure_of_the_server(monkeypatch, method, error):
    async def lost(*_: object, **options: object) -> Result:
        raise error

    client = Client()
    monkeypatch.setattr(client, method, lost)
    failure = await outcome_of(client)
    assert isinstance(failure, TrialFailure) and failure.kind == FailureKind.ENV_SERVER
    assert failure.message == "the connection to the OpenEnv server failed: no close frame"
    assert client.num_closed == 1


async def test_the_wait_for_a_free_session_has_a_timeout(monkeypatch):
    monkeypatch.setattr("src.envs.openenv_client.CAPACITY_TIMEOUT_S", -1)
    failure = await outcome_of(FullClient(refusals=2))
    assert isinstance(failure, TrialFailure) and "Server at capacity: 1/1" in failure.message


def test_an_observation_can_be_shown_as_json():
    assert observation_text({"a": 1}, field="") == '{"a": 1}'


def test_a_missing_package_gives_a_one_line_error_with_the_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(
        ConfigError, match=r"env=openenv needs the openenv package .*; run scripts/setup.sh openenv"
    ):
        open_openenv(parse([*BASE, "environment_kwargs=url=http://h"]), byte_chat())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("environment_kwargs=tasks=3", "needs environment_kwargs=url="),
        ("environment_kwargs=url=http://h,tasks=0", "tasks=0 is not a positive number of tasks"),
        ("environment_kwargs=url=http://h,tasks=²", "tasks=² is not a positive number of tasks"),
        ("environment_kwargs=url=http://h,speed=2", "no option speed"),
    ],
)
def test_an_invalid_option_gives_a_one_line_error(option, message):
    with pytest.raises(ConfigError, match=message):
        open_openenv(parse([*BASE, option]), byte_chat())


@pytest.mark.seed_behaviour(140)
def test_tasks_of_a_real_server_are_run(tmp_path):
    pytest.importorskip("openenv")
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app  # pyright: ignore[reportMissingImports]
    from openenv.core.env_server.interfaces import Environment  # pyright: ignore[reportMissingImports]
    from openenv.core.env_server.types import Action, State, StepResult  # pyright: ignore[reportMissingImports]

    class Say(Action):
        message: str

    class Heard(StepResult):
        heard: str = ""

    class Parrot(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self.expected, self.steps = "", 0

        def reset(self, seed=None, episode_id=None, **options):
            self.expected, self.steps = f"word {seed}", 0
            return Heard(heard=f"say {self.expected}", done=False)

        def step(self, action, timeout_s=None, **options):
            self.steps += 1
            return Heard(
                heard=action.message, reward=float(action.message == self.expected), done=self.steps == 2
            )

        @property
        def state(self):
            return State(step_count=self.steps)

    server = uvicorn.Server(
        uvicorn.Config(
            create_fastapi_app(Parrot, Say, Heard, max_concurrent_envs=8),
            host="127.0.0.1",
            port=0,
            log_config=None,  # the default would close the log handlers of other libraries
            log_level="error",
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        config = parse([*BASE, f"environment_kwargs=url=http://127.0.0.1:{port},tasks=10,observation=heard"])
        source = open_openenv(config, byte_chat())
        task = next(task for task in source.train if task.row["seed"] == 3)

        async def run_trials():
            trials = [source.trial(task, directory=tmp_path, seed=seed, temperature=1.0) for seed in range(4)]
            return await asyncio.gather(
                *(trial.run(FakePolicy(byte_chat(), ["no", "word 3"])) for trial in trials)
            )

        for result in asyncio.run(run_trials()):
            assert isinstance(result, Trajectory) and result.reward == 1 and result.turn_rewards == [0, 1]
            assert result.conversation[0]["content"] == "say word 3"
    finally:
        server.should_exit = True
        thread.join(10)

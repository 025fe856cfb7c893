"""env=openenv: environments behind an OpenEnv server (PyPI `openenv`), played in messages through the package's own client.

    environment_kwargs=url=http://localhost:8000,tasks=64,action=message,observation=echoed_message

A task is a seed that the server is reset with. An answer is the action's one field, an observation's one field is what the agent reads;
an environment with richer actions is an `OpenEnv` with functions of its own (docs/environments.md).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.envs.base import TaskSource
from src.envs.episodes import EnvSpec, episodes
from src.envs.message_env import ResetResult, StepResult
from src.envs.options import EnvironmentSettings
from src.policy.chat import Chat, Message

logger = logging.getLogger(__name__)

DEFAULT_TASKS = 64
IS_FULL = "CAPACITY_REACHED"  # the code of a server that plays as many sessions as it may
PLACE_WAIT_S = 1.0  # no event says that a place is free: others may hold them too
PLACE_TIMEOUT_S = 1800.0


class Result(Protocol):
    """OpenEnv's StepResult."""

    observation: object
    reward: float | None
    done: bool


class Client(Protocol):
    """What is needed of OpenEnv's EnvClient, whose methods are awaitable where an event loop runs."""

    def reset(self, **options: object) -> Awaitable[Result]: ...

    def step(self, action: object) -> Awaitable[Result]: ...

    def close(self) -> Awaitable[None]: ...


class OpenEnv:
    """One session with an OpenEnv server. Implements `MessageEnv`."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Client]],
        *,
        to_action: Callable[[str], object],
        to_text: Callable[[object], str],
        reset_options: Mapping[str, object],
    ) -> None:
        """`to_action` makes the server's action of an answer, `to_text` what the agent reads of its observation."""
        self._connect = connect
        self._to_action = to_action
        self._to_text = to_text
        self._reset_options = reset_options
        self._client: Client | None = None

    async def start(self) -> ResetResult:
        """Waits while the server has no place for another session; RuntimeError when none becomes free."""
        deadline = time.monotonic() + PLACE_TIMEOUT_S
        while True:
            self._client = await self._connect()
            try:
                result = await self._client.reset(**self._reset_options)
            except RuntimeError as error:  # what the client makes of a server's refusal
                if IS_FULL not in str(error) or time.monotonic() > deadline:
                    raise
                logger.info(
                    "%s; set n_parallel_envs to the max_concurrent_envs that the server is started with",
                    error,
                )
            else:
                return ResetResult(messages=[self._message(result)])
            client, self._client = self._client, None
            await client.close()
            await asyncio.sleep(PLACE_WAIT_S)

    async def step(self, answer: str) -> StepResult:
        assert self._client is not None
        action = self._to_action(answer)
        try:
            result = await self._client.step(action)
        except Exception as error:
            if type(error).__module__.startswith("websockets"):  # its errors are no ConnectionErrors
                raise ConnectionError(f"the OpenEnv server: {error}") from error
            raise
        return StepResult(
            messages=[self._message(result)], reward=float(result.reward or 0.0), is_done=result.done
        )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _message(self, result: Result) -> Message:
        return {"role": "user", "content": self._to_text(result.observation)}


def field_of(observation: object, *, field: str) -> str:
    """One field of an observation, or all of it as JSON where no field is named."""
    if not field:
        return json.dumps(observation)
    if not isinstance(observation, Mapping) or field not in observation:
        has = ", ".join(observation) if isinstance(observation, Mapping) else type(observation).__name__
        raise KeyError(f"the observation has no field {field}; it has {has}")
    return str(observation[field])


def open_openenv(config: EnvironmentSettings, chat: Chat) -> TaskSource:
    """ConfigError where the package or an option is missing."""
    options = config.environment_options
    url, action, field = (
        options.pop("url", ""),
        options.pop("action", "message"),
        options.pop("observation", ""),
    )
    number = options.pop("tasks", str(DEFAULT_TASKS))
    if not url.startswith(("http://", "https://")):
        raise ConfigError("env=openenv needs environment_kwargs=url=http://host:port of an OpenEnv server")
    if not number.isdigit() or int(number) < 1:
        raise ConfigError(f"environment_kwargs tasks={number} is no number of tasks")
    if options:
        raise ConfigError(f"environment_kwargs: env=openenv has no option {next(iter(options))}; drop it")
    try:
        from openenv.core.generic_client import GenericEnvClient  # pyright: ignore[reportMissingImports] an optional package
    except ImportError as error:
        raise ConfigError(
            f"env=openenv needs the openenv package ({error}); run scripts/setup.sh openenv"
        ) from error

    async def connect() -> Client:
        return await GenericEnvClient(base_url=url).connect()

    def make(task: Task, seed: int) -> OpenEnv:
        to_text = partial(field_of, field=field)
        return OpenEnv(
            connect,
            to_action=lambda answer: {action: answer},
            to_text=to_text,
            reset_options={"seed": task.row["seed"]},
        )

    tasks = [
        Task(id=f"openenv-{seed:04d}", path=Path(url), instruction=url, row={"seed": seed})
        for seed in range(int(number))
    ]
    return episodes(config, chat, EnvSpec(tasks=tasks, make=make))

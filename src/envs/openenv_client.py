"""env=openenv: environments behind an OpenEnv server. The agent exchanges messages with such an environment
through the client of the package `openenv`.

    environment_kwargs=url=http://localhost:8000,tasks=64,action=message,observation=echoed_message

A task is a seed with which the server is reset. An answer becomes one field of the action. The agent reads
one field of the observation or, by default, the whole observation as JSON. For an environment whose actions
have another form, write a factory that gives `OpenEnv` your own `to_action` and `to_text`
(docs/environments.md).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from src.core.errors import ConfigError, EnvServerError
from src.core.trajectory import Task
from src.envs.base import TaskSource
from src.envs.episodes import EnvSpec, episodes
from src.envs.message_env import ResetResult, StepResult
from src.envs.options import EnvironmentOptions
from src.policy.chat import Chat, Message

logger = logging.getLogger(__name__)

DEFAULT_NUM_TASKS = 64
CAPACITY_ERROR_CODE = "CAPACITY_REACHED"  # the error message of a server without free sessions contains it
CAPACITY_RETRY_S = 1.0  # The server sends no event when a session ends, so the client polls.
CAPACITY_TIMEOUT_S = 1800.0


class OpenEnvResult(Protocol):
    """The result type of the package `openenv`."""

    observation: object
    reward: float | None
    done: bool


class OpenEnvClient(Protocol):
    """The methods of the package's EnvClient that `OpenEnv` calls. If they are called in an event loop, they
    return awaitables.
    """

    def reset(self, **options: object) -> Awaitable[OpenEnvResult]: ...

    def step(self, action: object) -> Awaitable[OpenEnvResult]: ...

    def close(self) -> Awaitable[None]: ...


class OpenEnv:
    """One session of an OpenEnv server. Implements `MessageEnv`."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[OpenEnvClient]],
        *,
        to_action: Callable[[str], object],
        to_text: Callable[[object], str],
        reset_options: Mapping[str, object],
    ) -> None:
        """`connect` opens a connection to the server. `to_action` converts an answer to an action, and
        `to_text` converts an observation to the text of a message. `reset_options` are the keyword arguments
        of the client's `reset`.
        """
        self._connect = connect
        self._to_action = to_action
        self._to_text = to_text
        self._reset_options = reset_options
        self._client: OpenEnvClient | None = None

    async def start(self) -> ResetResult:
        """Open a session. If the server has its maximum number of sessions, wait until one ends.

        Raises EnvServerError if there is no connection. Raises RuntimeError if no session has ended after
        CAPACITY_TIMEOUT_S seconds, and for every other error that the server reports.
        """
        deadline = time.monotonic() + CAPACITY_TIMEOUT_S
        has_waited = False
        while True:
            try:
                with _server_errors():
                    self._client = await self._connect()
                    result = await self._client.reset(**self._reset_options)
            except RuntimeError as error:  # The client raises RuntimeError for every server error.
                if CAPACITY_ERROR_CODE not in str(error) or time.monotonic() > deadline:
                    raise
                if not has_waited:
                    logger.info(
                        "%s; set n_parallel_envs to the server's max_concurrent_envs to avoid this wait",
                        error,
                    )
                has_waited = True
            else:
                return ResetResult(messages=[self._message(result)])
            if self._client is not None:
                client, self._client = self._client, None
                await client.close()
            await asyncio.sleep(CAPACITY_RETRY_S)

    async def step(self, answer: str) -> StepResult:
        """Send an answer. Raises EnvServerError if the connection is lost, and the errors of the server."""
        assert self._client is not None
        action = self._to_action(answer)
        with _server_errors():
            result = await self._client.step(action)
        return StepResult(
            messages=[self._message(result)], reward=float(result.reward or 0.0), is_done=result.done
        )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _message(self, result: OpenEnvResult) -> Message:
        return {"role": "user", "content": self._to_text(result.observation)}


@contextmanager
def _server_errors() -> Generator[None]:
    """Convert the exception of a lost or failed connection to EnvServerError. The run repeats an attempt of a
    trial that fails with EnvServerError. Exceptions of the package websockets are recognized by their module,
    because they do not inherit from ConnectionError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ConnectionError) or type(error).__module__.startswith("websockets"):
            raise EnvServerError(f"the connection to the OpenEnv server failed: {error}") from error
        raise


def observation_text(observation: object, *, field: str) -> str:
    """Return one field of an observation, or the whole observation as JSON if `field` is empty."""
    if not field:
        return json.dumps(observation)
    if not isinstance(observation, Mapping) or field not in observation:
        fields = ", ".join(observation) if isinstance(observation, Mapping) else type(observation).__name__
        raise KeyError(f"the observation has no field {field}; it has {fields}")
    return str(observation[field])


def open_openenv(config: EnvironmentOptions, chat: Chat) -> TaskSource:
    """Return the task source of env=openenv. Raises ConfigError if the package is missing or an option is
    invalid.
    """
    options = config.environment_options
    url = options.pop("url", "")
    action_field = options.pop("action", "message")
    observation_field = options.pop("observation", "")
    num_tasks = options.pop("tasks", str(DEFAULT_NUM_TASKS))
    if not url.startswith(("http://", "https://")):
        raise ConfigError("env=openenv needs environment_kwargs=url=http://host:port of an OpenEnv server")
    if not num_tasks.isdecimal() or int(num_tasks) < 1:
        raise ConfigError(
            f"environment_kwargs tasks={num_tasks} is not a positive number of tasks; write tasks=NUMBER"
        )
    if options:
        raise ConfigError(
            f"environment_kwargs: env=openenv has no option {next(iter(options))}; remove the option"
        )
    try:
        from openenv.core.generic_client import GenericEnvClient  # pyright: ignore[reportMissingImports] an optional package
    except ImportError as error:
        raise ConfigError(
            f"env=openenv needs the openenv package ({error}); run scripts/setup.sh openenv"
        ) from error

    async def connect() -> OpenEnvClient:
        return await GenericEnvClient(base_url=url).connect()

    def make(task: Task, seed: int) -> OpenEnv:
        return OpenEnv(
            connect,
            to_action=lambda answer: {action_field: answer},
            to_text=partial(observation_text, field=observation_field),
            reset_options={"seed": task.row["seed"]},
        )

    tasks = [
        Task(id=f"openenv-{seed:04d}", path=Path(url), instruction=url, row={"seed": seed})
        for seed in range(int(num_tasks))
    ]
    return episodes(config, chat, EnvSpec(tasks=tasks, make=make))

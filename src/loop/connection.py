"""The connection of a run to its server: open it, and open it again after the server was lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Self

import chz

from src.config import LoopOptions, TrainerConfig
from src.core.errors import BackendError, ServerLost
from src.envs.base import TaskSource
from src.envs.registry import check_environment, open_task_source
from src.policy.backend import Backend, base_url, connect
from src.policy.chat import load_chat
from src.policy.options import AdapterOptions
from src.records.journal import Journal
from src.records.run_directory import RunDirectory
from src.rollouts.run_events import RunEvents
from src.rollouts.watchdog import watching

RECONNECT_PERIOD_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Dependencies[Source]:
    """The source of the data and the backend that a run uses."""

    source: Source
    backend: Backend
    update_scale: float = 1.0  # factor of the learning rate, from the function `update_scale`


# The last argument is a source that is already open; None: the function opens the source.
type Connect[Config, Source] = Callable[
    [Config, RunEvents, Source | None], AbstractAsyncContextManager[Dependencies[Source]]
]


@asynccontextmanager
async def open_dependencies(
    config: TrainerConfig, events: RunEvents, source: TaskSource | None = None
) -> AsyncGenerator[Dependencies[TaskSource]]:
    """Open the Tinker endpoint, and the tasks of the environment if `source` is None."""
    # Mistakes in the options and task files are reported before the server is contacted.
    await asyncio.to_thread(check_environment, config)
    events.say(f"server: {base_url(config)}")
    async with connect(config) as endpoint:
        if source is None:
            chat = await asyncio.to_thread(load_chat, config.tokenizer or config.model_name)
            events.say(
                f"model: {config.model_name}, LoRA rank {config.lora_rank}, context {config.context_limit}"
            )
            source = await asyncio.to_thread(open_task_source, config, chat)
        async with watching(endpoint.check, config) as watchdog:
            backend = await watchdog.answer(endpoint.open_training(config), "opening the training client")
        scale = update_scale(config, backend.lora_alpha, events)
        yield Dependencies(source=source, backend=backend, update_scale=scale)


def update_scale(config: AdapterOptions, server_alpha: float, events: RunEvents) -> float:
    """Return the factor of the learning rate: lora_alpha / server_alpha, or 1 without `lora_alpha`.

    An adapter changes the model's weights in proportion to its alpha. This factor has approximately the
    effect of `lora_alpha` (see `Learner`).
    """
    if config.lora_alpha is None or config.lora_alpha == server_alpha:
        return 1.0
    scale = config.lora_alpha / server_alpha
    events.say(
        f"lora_alpha={config.lora_alpha:g}: the server gives the adapter the alpha {server_alpha:g}, so "
        f"learning_rate is multiplied by {scale:g} and weight_decay is divided by {scale:g}"
    )
    return scale


class Connector[Config: LoopOptions, Source]:
    """Opens the dependencies of one run, and opens them again after the server was lost.

    At the end of its `async with` block, it closes the dependencies, except for the source.
    """

    def __init__(self, config: Config, events: RunEvents, connect: Connect[Config, Source]) -> None:
        self._config = config
        self._events = events
        self._connect = connect
        self._stack = AsyncExitStack()  # closes the dependencies that are open

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.__aexit__(*error)  # pyright: ignore[reportArgumentType]

    async def open(self, directory: RunDirectory, source: Source | None = None) -> Dependencies[Source]:
        """Open the dependencies. If the directory has a checkpoint, load its weights and optimizer state."""
        config = self._config
        if directory.checkpoint is not None:
            state_path = directory.checkpoint.state_path
            config = chz.replace(config, load_checkpoint_path=state_path, load_optimizer=True)
        return await self._stack.enter_async_context(self._connect(config, self._events, source))

    async def reopen(self, directory: RunDirectory, source: Source) -> Dependencies[Source]:
        """Wait until the server answers again and open the dependencies.

        Raises ServerLost after `reconnect_timeout_s`.
        """
        limit_s = self._config.reconnect_timeout_s
        self._events.say(f"waiting up to {limit_s:g} s for the server to return")
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return await self.open(directory, source)
            except BackendError as error:
                if time.monotonic() > deadline:
                    raise ServerLost(
                        f"{error}; the server did not return within reconnect_timeout_s={limit_s:g}; start "
                        "it again and resume the run"
                    ) from error
            await asyncio.sleep(min(RECONNECT_PERIOD_S, limit_s / 4))

    async def run_with_reconnect(
        self,
        train: Callable[[Dependencies[Source], RunDirectory], Awaitable[None]],
        dependencies: Dependencies[Source],
        directory: RunDirectory,
        journal: Journal,
    ) -> None:
        """Run the training, and then close the dependencies. After each loss of the server, call `train`
        again from the last checkpoint.

        If the run has made no progress since the previous loss of the server, raises the BackendError of this
        loss. A graded trial and a step that is trained for the first time count as progress. If
        `reconnect_timeout_s` is 0, raises ServerLost when the server is lost for the first time.
        """
        progress = -1
        while True:
            try:
                async with self._stack:
                    await train(dependencies, directory)
                return
            except BackendError as error:
                if self._config.reconnect_timeout_s == 0:
                    raise ServerLost(f"{error}; start the server again and resume the run") from error
                if journal.progress <= progress:
                    raise
                progress = journal.progress
                self._events.say(f"server lost or request failed: {error}")
            directory = directory.at_last_checkpoint()
            dependencies = await self.reopen(directory, dependencies.source)

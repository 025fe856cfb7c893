"""Message environments as a task source: every trial is one `run_episode`, so whatever a run does with trials works for them.

An environment of one's own is a function that `env=my_package.countdown:open_countdown` names:

    def open_countdown(config: TrainerConfig, chat: Chat) -> TaskSource:
        return episodes(config, chat, Domain(tasks=[...], make=lambda task, seed: CountdownEnv(task.row)))
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from src.core.errors import ConfigError
from src.core.length_limits import LengthLimits
from src.core.trajectory import FailureKind, Task, Trajectory, TrialFailure
from src.envs.base import Trial
from src.envs.message_env import EpisodeSettings, MessageEnv, run_episode
from src.envs.options import EnvironmentSettings
from src.envs.splits import hold_out, require_unique_ids
from src.policy.chat import Chat
from src.policy.sampling_policy import Policy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSpec:
    """A kind of problem: its tasks, and the environment of one attempt at one of them."""

    tasks: Sequence[Task]
    make: Callable[
        [Task, int], MessageEnv
    ]  # the int is a seed, the same for each step's nth attempt at a task: a customer stays who it is
    held_out: Sequence[
        Task
    ] = ()  # the test split that the problem comes with; without one, eval_split and eval_tasks choose among `tasks`
    do_nothing: Callable[[MessageEnv], Awaitable[float]] | None = (
        None  # plays it as an agent that does nothing, for its reward
    )
    close: Callable[[], Awaitable[None]] | None = (
        None  # what its environments share is freed by it; None: they share nothing
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeTrial:
    """One episode, used once."""

    task: Task
    env: Callable[[], MessageEnv]
    chat: Chat
    limits: LengthLimits
    settings: EpisodeSettings

    async def run(self, policy: Policy) -> Trajectory | TrialFailure:
        name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', self.task.id)}__{self.settings.seed:08x}"
        try:
            env = self.env()
        except (Exception, SystemExit) as error:  # the border of a trial: as if its `start` had failed
            logger.warning("%s: no environment could be made", self.task.id, exc_info=True)
            message = f"{type(error).__name__}: {error}"
            return TrialFailure(
                task_id=self.task.id, kind=FailureKind.ENV_INIT_FAILED, message=message, trial_name=name
            )
        return await run_episode(
            env, policy, self.chat, self.limits, self.settings, task_id=self.task.id, trial_name=name
        )


class EpisodeTasks:
    """The tasks of a domain, split and ready to be tried. Implements `TaskSource`."""

    def __init__(self, domain: EnvSpec, chat: Chat, limits: LengthLimits, settings: EpisodeSettings) -> None:
        """`settings` but for temperature and seed, which are each trial's own."""
        self.train = domain.tasks
        self.eval = domain.held_out
        self._domain = domain
        self._chat = chat
        self._limits = limits
        self._settings = settings

    def trial(self, task: Task, *, directory: Path, seed: int, temperature: float, member: int = 0) -> Trial:
        """An episode leaves no files in `directory`."""
        settings = replace(self._settings, seed=seed, temperature=temperature)
        env_seed = environment_seed(self._settings.seed, task.id, member)
        return EpisodeTrial(
            task=task,
            env=lambda: self._domain.make(task, env_seed),
            chat=self._chat,
            limits=self._limits,
            settings=settings,
        )

    async def floor(self, task: Task) -> float | None:
        """As the first member of a group would meet it."""
        if self._domain.do_nothing is None:
            return None
        return await self._domain.do_nothing(
            self._domain.make(task, environment_seed(self._settings.seed, task.id, 0))
        )

    async def close(self) -> None:
        if self._domain.close is not None:
            await self._domain.close()

    def batch_ended(self, directory: Path) -> None:
        """There is nothing to sum up beside rollouts/."""

    def text(self, token_ids: Sequence[int], clean: bool) -> str:
        return self._chat.tokenizer.decode(
            list(token_ids), skip_special_tokens=clean, clean_up_tokenization_spaces=False
        )


def episodes(config: EnvironmentSettings, chat: Chat, domain: EnvSpec) -> EpisodeTasks:
    """A domain as a run's options want it. ConfigError where two tasks share an id, or for held-out tasks that are none."""
    require_unique_ids([*domain.tasks, *domain.held_out])
    train, held_out = split(
        domain, patterns=config.eval_tasks or (), fraction=config.eval_split, seed=config.seed
    )
    settings = EpisodeSettings(
        temperature=config.temperature,
        seed=config.seed,
        max_turns=config.max_turns,
        use_native_tool_calling=config.use_native_tool_calling,
        step_wise=config.step_wise_trajectories,
    )
    return EpisodeTasks(replace(domain, tasks=train, held_out=held_out), chat, config.length_limits, settings)


def environment_seed(run_seed: int, task_id: str, member: int) -> int:
    """A 31-bit seed that a task's nth attempt has in every step and every evaluation."""
    return (
        int.from_bytes(
            hashlib.sha256(f"{run_seed}/environment/{task_id}/{member}".encode()).digest()[:4], "big"
        )
        >> 1
    )


def split(
    domain: EnvSpec, *, patterns: Sequence[str], fraction: float, seed: int
) -> tuple[Sequence[Task], Sequence[Task]]:
    """(training, held out). Of a test split that the domain comes with, `patterns` choose, and no training task is ever held out."""
    if not domain.held_out:
        return hold_out(domain.tasks, patterns=patterns, fraction=fraction, seed=seed)
    if not patterns:
        return domain.tasks, domain.held_out
    _, chosen = hold_out([*domain.tasks, *domain.held_out], patterns=patterns, fraction=0.0, seed=seed)
    trained = {task.id for task in domain.tasks}
    if wrong := [task.id for task in chosen if task.id in trained]:
        raise ConfigError(
            f"eval_tasks: {wrong[0]} is a training task of this environment; name tasks of its test split"
        )
    return domain.tasks, chosen

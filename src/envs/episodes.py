"""The task source of message environments. Each trial of its tasks is one call of `run_episode`.

The following function is an example of a factory. `env=my_package.countdown:open_countdown` selects it.

    def open_countdown(config: EnvironmentOptions, chat: Chat) -> TaskSource:
        return episodes(config, chat, EnvSpec(tasks=[...], make=lambda task, seed: CountdownEnv(task.row)))
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from src.core.errors import ConfigError
from src.core.exception_origin import described
from src.core.length_limits import LengthLimits
from src.core.options import is_default
from src.core.trajectory import FailureKind, Task, Trajectory, TrialFailure
from src.envs.base import Trial
from src.envs.message_env import EpisodeSettings, MessageEnv, run_episode
from src.envs.options import EnvironmentOptions
from src.envs.splits import hold_out, require_unique_ids
from src.policy.chat import Chat
from src.policy.sampling_policy import Policy

logger = logging.getLogger(__name__)

TASK_FILES = ("train_data", "test_data", "tasks_dir")  # options that name files of tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSpec:
    """Declares a message environment: its tasks and the function that makes the environment of a trial."""

    tasks: Sequence[Task]
    # Makes the environment of one trial from the task and a seed. The nth trial of a task has the same seed
    # in every step. For example, its user simulator then behaves in the same way in every step.
    make: Callable[[Task, int], MessageEnv]
    # The test split of the benchmark, of which `eval_tasks` can select a part. Empty: `eval_tasks` or
    # `eval_split` selects held-out tasks from `tasks`.
    held_out: Sequence[Task] = ()
    # Runs the environment with an agent that does nothing, closes the environment, and returns the reward.
    # None: the reward of such an agent cannot be measured.
    noop_reward: Callable[[MessageEnv], Awaitable[float]] | None = None
    # The options of TASK_FILES that the factory reads. A run that sets another one of TASK_FILES is refused.
    reads: Collection[str] = ()
    # Frees the resources that the environments share. None: they share no resources.
    close: Callable[[], Awaitable[None]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeTrial:
    """A trial that runs one episode. Implements `Trial`."""

    task: Task
    env: Callable[[], MessageEnv]
    chat: Chat
    limits: LengthLimits
    settings: EpisodeSettings

    async def run(self, policy: Policy) -> Trajectory | TrialFailure:
        name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', self.task.id)}__{self.settings.seed:08x}"
        try:
            env = self.env()
        except (Exception, SystemExit) as error:  # A trial reports every error as a TrialFailure.
            logger.warning("%s: the environment could not be made", self.task.id, exc_info=True)
            return TrialFailure(
                task_id=self.task.id,
                kind=FailureKind.ENV_INIT_FAILED,
                message=described(error),
                trial_name=name,
            )
        return await run_episode(
            env, policy, self.chat, self.limits, self.settings, task_id=self.task.id, trial_name=name
        )


class EpisodeTasks:
    """The tasks of an `EnvSpec`, after the split. Implements `TaskSource`."""

    def __init__(self, spec: EnvSpec, chat: Chat, limits: LengthLimits, settings: EpisodeSettings) -> None:
        """`settings.seed` is the seed of the run, from which the seeds of the environments are derived. A
        trial uses the seed and the temperature that are passed to `trial`."""
        self.train = spec.tasks
        self.eval = spec.held_out
        self._spec = spec
        self._chat = chat
        self._limits = limits
        self._settings = settings

    def trial(self, task: Task, *, directory: Path, seed: int, temperature: float, member: int = 0) -> Trial:
        """Create a trial. It writes no files below `directory`."""
        env_seed = environment_seed(self._settings.seed, task.id, member)
        return EpisodeTrial(
            task=task,
            env=lambda: self._spec.make(task, env_seed),
            chat=self._chat,
            limits=self._limits,
            settings=replace(self._settings, seed=seed, temperature=temperature),
        )

    async def noop_reward(self, task: Task) -> float | None:
        """Return the reward of doing nothing in the environment of the group's first trial (`member` 0)."""
        if self._spec.noop_reward is None:
            return None
        env = self._spec.make(task, environment_seed(self._settings.seed, task.id, 0))
        return await self._spec.noop_reward(env)

    async def close(self) -> None:
        if self._spec.close is not None:
            await self._spec.close()

    def batch_ended(self, directory: Path) -> None:
        """Do nothing, because the rollout store already contains the batch's trials."""

    def text(self, token_ids: Sequence[int], clean: bool) -> str:
        return self._chat.tokenizer.decode(
            list(token_ids), skip_special_tokens=clean, clean_up_tokenization_spaces=False
        )


def episodes(config: EnvironmentOptions, chat: Chat, spec: EnvSpec) -> EpisodeTasks:
    """Return the task source of `spec` with the options of the run.

    Raises the errors of `split`.
    """
    train, held_out = split(spec, config)
    settings = EpisodeSettings(
        temperature=config.temperature,
        seed=config.seed,
        max_turns=config.max_turns,
        use_native_tool_calling=config.use_native_tool_calling,
        step_wise=config.step_wise_trajectories,
    )
    return EpisodeTasks(replace(spec, tasks=train, held_out=held_out), chat, config.length_limits, settings)


def environment_seed(run_seed: int, task_id: str, member: int) -> int:
    """Return the 31-bit environment seed of trial number `member` of a task. The seed is the same in every
    step and evaluation of a run."""
    digest = hashlib.sha256(f"{run_seed}/environment/{task_id}/{member}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def split(spec: EnvSpec, config: EnvironmentOptions) -> tuple[Sequence[Task], Sequence[Task]]:
    """Return (training tasks, held-out tasks).

    Without a test split, the result is that of `hold_out`. With a test split, all of `spec.tasks` are
    training tasks and `eval_split` is ignored. The held-out tasks are the tasks of the test split that match
    `eval_tasks`, or the whole test split if `eval_tasks` is not set.

    Raises ConfigError if an option of TASK_FILES is set that is not in `spec.reads`, if two tasks share an
    id, or if `eval_tasks` matches a training task. Also raises the errors of `hold_out`.
    """
    for name in TASK_FILES:
        if name not in spec.reads and not is_default(config, name):
            raise ConfigError(
                f"env={config.env} does not read {name}; remove it, or, if the factory reads it, add "
                f'reads=["{name}"] to its EnvSpec'
            )
    require_unique_ids([*spec.tasks, *spec.held_out])
    patterns, seed = config.eval_tasks or (), config.seed
    if not spec.held_out:
        return hold_out(spec.tasks, patterns=patterns, fraction=config.eval_split, seed=seed)
    if not patterns:
        return spec.tasks, spec.held_out
    _, selected = hold_out([*spec.tasks, *spec.held_out], patterns=patterns, fraction=0.0, seed=seed)
    train_ids = {task.id for task in spec.tasks}
    if in_training := [task.id for task in selected if task.id in train_ids]:
        raise ConfigError(
            f"eval_tasks: {in_training[0]} is a training task of this environment; "
            "name tasks of its test split"
        )
    return spec.tasks, selected

"""env=harbor: the task source that loads Harbor task directories, and the configuration of the environments
in which their trials run.

Importing Harbor takes seconds, so this module does not import it at the top. Functions that need Harbor call
`import_harbor`.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.envs.base import Trial
from src.envs.cleanup import clean
from src.envs.harbor.environment_fields import environment_options
from src.envs.harbor.grading_method import GradingMethod, grading_methods, parse_grading_option
from src.envs.harbor.trial_directory import JobsQuota
from src.envs.options import EnvironmentOptions
from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.envs.sandbox.docker import MAX_TRIAL_NETWORKS, why_no_engine
from src.envs.sandbox.dockerfile import USE_DOCKER, USE_SANDBOX
from src.envs.sandbox.sandbox_directory import sandbox_directory
from src.envs.splits import hold_out, require_unique_ids
from src.policy.chat import Chat

if TYPE_CHECKING:
    from harbor.models.task.config import TaskConfig

logger = logging.getLogger(__name__)

OWN_ENVIRONMENTS = {
    "sandbox": "src.envs.sandbox.environment:SandboxEnvironment",
    "docker": "src.envs.sandbox.containers:ContainerEnvironment",
}
"""`environment_type` -> import path of the class of this project that runs the environment."""


def new_run_label() -> str:
    """Return a label for the objects that a run creates outside the run directory: sandbox directories,
    containers, networks and volumes.
    """
    return f"run-{os.getpid()}-{secrets.token_hex(4)}"


def open_harbor(config: EnvironmentOptions, chat: Chat) -> HarborTasks:
    """Return the task source of env=harbor. Raises the errors of `HarborTasks`."""
    return HarborTasks(config, chat)


def check_harbor(settings: EnvironmentOptions) -> None:
    """Raise ConfigError, with one line per reason, for invalid tasks, for tasks that the selected environment
    cannot run on this machine, and for a split that is not possible.
    """
    import_harbor()
    split_tasks(settings, check_directories_of(settings, run_label=new_run_label()))


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedDirectories:
    """Loaded task directories, and the environments of their trials."""

    environment_type: str
    environment: dict[str, object]  # fields of Harbor's EnvironmentConfig
    grading: GradingMethod | None  # of all tasks; None: `grading_methods` looks up that of each task
    tasks: dict[Path, list[Task]]  # directory -> its tasks
    configs: dict[Path, TaskConfig]  # directory of a task -> its task.toml
    notes: list[str]  # warnings about the tasks and about the choice of the environment


def check_directories(
    directories: Sequence[Path],
    *,
    environment_type: str,
    environment_kwargs: Mapping[str, str],
    run_label: str,
) -> CheckedDirectories:
    """Load the tasks of `directories` and check that the environment can run them.

    If `auto` selects Docker and Docker cannot run the tasks, the sandbox is used if it accepts the tasks. For
    example, `network_mode = "no-network"` needs kernel features on Docker that this machine can lack. Raises
    ConfigError with one line per reason.
    """
    from src.envs.harbor import task_directories

    resolved_type = resolve_environment_type(environment_type)
    environment_kwargs, grading = parse_grading_option(environment_kwargs)

    def checked_for(chosen_type: str) -> CheckedDirectories:
        environment = trial_environment(chosen_type, environment_kwargs, run_label=run_label)
        check = task_directories.check_for(chosen_type, environment)
        loaded = {directory: task_directories.load_tasks(directory, check=check) for directory in directories}
        return CheckedDirectories(
            environment_type=chosen_type,
            environment=environment,
            grading=grading,
            tasks={directory: result.tasks for directory, result in loaded.items()},
            configs={path: config for result in loaded.values() for path, config in result.configs.items()},
            notes=[warning for result in loaded.values() for warning in result.warnings],
        )

    try:
        return checked_for(resolved_type)
    except ConfigError as error:
        if environment_type != "auto" or resolved_type == "sandbox" or why_no_sandbox():
            raise
        try:
            checked = checked_for("sandbox")
        except ConfigError as sandbox_error:
            docker_reasons, sandbox_reasons = str(error), str(sandbox_error)
            if docker_reasons == sandbox_reasons:
                raise
            raise ConfigError(
                f"Docker cannot run these tasks:\n{docker_reasons.replace(f'; {USE_SANDBOX}', '')}\n"
                f"The sandbox cannot run these tasks:\n{sandbox_reasons.replace(f'; {USE_DOCKER}', '')}"
            ) from None
        reason = str(error).splitlines()[0].replace(f"; {USE_SANDBOX}", "")
        note = f"trials run in the sandbox, because Docker cannot run {reason}"
        return replace(checked, notes=[note, *checked.notes])


def check_directories_of(settings: EnvironmentOptions, *, run_label: str) -> CheckedDirectories:
    """Load and check `tasks_dir` and the directories among `eval_tasks`."""
    assert settings.tasks_dir is not None
    paths = [Path(name).expanduser() for name in (settings.tasks_dir, *(settings.eval_tasks or ()))]
    return check_directories(
        [paths[0], *filter(Path.is_dir, paths[1:])],
        environment_type=settings.environment_type,
        environment_kwargs=settings.environment_options,
        run_label=run_label,
    )


def split_tasks(settings: EnvironmentOptions, checked: CheckedDirectories) -> tuple[list[Task], list[Task]]:
    """Return the training tasks and the held-out tasks.

    Raises ConfigError if no training task is left, if a pattern of `eval_tasks` matches no task, or if two
    tasks share an id.
    """
    tasks = next(iter(checked.tasks.values()))
    eval_tasks = settings.eval_tasks or ()
    eval_paths = {Path(name).expanduser() for name in eval_tasks}  # one of them can be tasks_dir
    held_out_directories = [item for item in checked.tasks.items() if item[0] in eval_paths]
    patterns = [name for name in eval_tasks if not Path(name).expanduser().is_dir()]
    fraction = 0.0 if eval_tasks else settings.eval_split
    train, held_out = hold_out(tasks, patterns=patterns, fraction=fraction, seed=settings.seed)
    used_ids = {task.id for task in tasks}
    for directory, directory_tasks in held_out_directories:
        held_out += [
            replace(task, id=f"{directory.name}/{task.id}") if task.id in used_ids else task
            for task in directory_tasks
        ]
    # A directory of held-out tasks can be inside tasks_dir, so its tasks are removed from the training tasks.
    held_out_paths = {task.path for task in held_out}
    train = [task for task in train if task.path not in held_out_paths]
    require_unique_ids([*train, *held_out])
    if not train:
        raise ConfigError("all tasks are held out and none is left to train on; name fewer eval_tasks")
    return train, held_out


class HarborTasks:
    """The tasks of a directory, after the checks and the split. Implements `TaskSource`."""

    def __init__(self, settings: EnvironmentOptions, chat: Chat) -> None:
        """Load and check the tasks without starting the environment of a trial.

        Raises ConfigError with one line per reason.
        """
        import_harbor()
        from src.envs.harbor.task_directories import early_deadline

        self.settings = settings
        self.run_label = new_run_label()
        checked = check_directories_of(settings, run_label=self.run_label)
        self.environment_type = checked.environment_type
        self._environment = checked.environment
        self.train: Sequence[Task]
        self.eval: Sequence[Task]
        self.train, self.eval = split_tasks(settings, checked)
        self._chat = chat
        self._quota = JobsQuota(limit=int(settings.jobs_quota_gb * 2**30))
        for line in checked.notes:
            logger.warning("%s", line)
        tasks = [*self.train, *self.eval]
        if warning := early_deadline(tasks, checked.configs, settings):
            logger.warning("%s", warning)
        prepare_machine(self.environment_type, run_label=self.run_label, n_parallel=settings.n_parallel_envs)
        self._check_first_prompts()
        self._grading = grading_methods(
            tasks, checked.configs, selected=checked.grading, environment_type=self.environment_type
        )
        for line in clean().failed:
            logger.warning("could not remove an object of an ended run: %s", line)

    def _check_first_prompts(self) -> None:
        from src.envs.harbor.agent import first_prompt

        limits = self.settings.length_limits
        for task in (*self.train, *self.eval):
            tokens = len(self._chat.render([{"role": "user", "content": first_prompt(task.instruction)}]))
            if limits.max_new_tokens(tokens) == 0:
                name, limit = "context_limit", limits.context_limit
                if tokens < limit:
                    name, limit = "max_input_length", limits.max_input_length
                raise ConfigError(
                    f"{task.path}: the first prompt has at least {tokens} tokens, "
                    f"so {name}={limit} leaves no tokens for an answer; raise {name}"
                )

    def trial(self, task: Task, *, directory: Path, seed: int, temperature: float, member: int = 0) -> Trial:
        """Create a trial of `task` that writes its files to `directory/<trial name>/`, for `harbor view`."""
        from src.envs.harbor.trial import HarborTrial

        return HarborTrial(
            task=task,
            settings=self.settings,
            chat=self._chat,
            environment=self._environment,
            quota=self._quota,
            grading=self._grading[task.path],
            directory=directory,
            seed=seed,
            temperature=temperature,
        )

    async def close(self) -> None:
        """Do nothing: trials share no resources."""

    async def noop_reward(self, task: Task) -> float | None:
        """Return None: the reward of doing nothing is not measured. `src.envs.validate` checks that it is 0
        for each task."""
        return None

    def batch_ended(self, directory: Path) -> None:
        """Write the files that make `directory` a Harbor job."""
        from src.envs.harbor.job import write_job

        write_job(directory, n_parallel_envs=self.settings.n_parallel_envs)

    def text(self, token_ids: Sequence[int], clean: bool) -> str:
        return self._chat.tokenizer.decode(
            list(token_ids), skip_special_tokens=clean, clean_up_tokenization_spaces=False
        )


@cache
def import_harbor() -> None:
    """Import Harbor without downloads, telemetry or log output.

    All modules are imported at once, because a later import would block the event loop of running trials.
    """
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # Otherwise litellm downloads a price list.
    os.environ.setdefault("HARBOR_TELEMETRY", "0")
    import src.envs.harbor.agent  # pyright: ignore[reportUnusedImport]
    import src.envs.harbor.trial  # noqa: F401 # pyright: ignore[reportUnusedImport]

    harbor_logger = logging.getLogger("harbor")
    harbor_logger.addHandler(logging.NullHandler())
    harbor_logger.propagate = False  # Harbor also writes a trial.log for each trial.
    logging.getLogger("LiteLLM").setLevel(logging.ERROR)


def resolve_environment_type(name: str) -> str:
    """Return the environment type. `auto` becomes docker if this machine can run trials on Docker, else
    sandbox.

    Raises ConfigError if this machine cannot run environments of that type.
    """
    import_harbor()
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.environment_type import EnvironmentType

    if name == "auto":
        name = "sandbox" if why_no_engine() else "docker"
    if name == "sandbox":
        if reason := why_no_sandbox():
            raise ConfigError(
                f"environment_type=sandbox: {reason}; fix the cause, or use environment_type=docker"
            )
    elif name == "docker":
        if reason := why_no_engine():
            raise ConfigError(
                f"environment_type=docker: {reason}; start Docker, or use environment_type=sandbox"
            )
    else:
        types = sorted(kind.value for kind in EnvironmentType)
        if name not in types:
            raise ConfigError(f"environment_type={name} is none of auto, sandbox, {', '.join(types)}")
        try:
            EnvironmentFactory.run_preflight(EnvironmentType(name))
        except (SystemExit, Exception) as error:
            raise ConfigError(f"environment_type={name}: {' '.join(str(error).split())}") from error
    return name


def trial_environment(
    environment_type: str, environment_kwargs: Mapping[str, str], *, run_label: str
) -> dict[str, object]:
    """Return the fields of Harbor's EnvironmentConfig for the trials of a run."""
    options = environment_options(environment_kwargs)
    if (import_path := OWN_ENVIRONMENTS.get(environment_type)) is None:
        options["type"] = environment_type
    else:
        options["import_path"] = import_path
        kwargs = options["kwargs"]
        assert isinstance(kwargs, dict)
        kwargs["run_label"] = run_label
    # The default directory of tmux is /tmp, so an agent that runs `rm -rf /tmp/*` would lose its terminal.
    # All users can write to /var/tmp.
    options["env"] = {"TMUX_TMPDIR": "/var/tmp"}
    return options


def prepare_machine(environment_type: str, *, run_label: str, n_parallel: int) -> None:
    """Create the host directory of the run if environments of this type need one. Log a warning if Docker's
    default address pools may be too small for `n_parallel` trials."""
    if environment_type in OWN_ENVIRONMENTS:
        sandbox_directory(run_label)
    if environment_type == "docker" and n_parallel > MAX_TRIAL_NETWORKS:
        logger.warning(
            "n_parallel_envs=%d: Docker's default address pools suffice for about %d trials at a time; "
            "enlarge default-address-pools in daemon.json",
            n_parallel,
            MAX_TRIAL_NETWORKS,
        )

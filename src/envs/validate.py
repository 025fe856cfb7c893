"""`python -m src.envs.validate tasks_dir=DIR`: is every task solvable, and not solved already, and how is it to be graded?

Each task is played twice without a model: by its own solution, which must score 1, and by nobody, which must score 0. A task that fails
either way teaches nothing or something wrong. Of a task without a solution only the second is known: it counts neither as sound nor as
unsound. Prints one line per task; exit status 1 when a task is unsound, 2 when nothing could run.

The solution is graded in a fresh environment and in place. Where both scores agree, the task is graded in a fresh environment from then
on, else in place; `grading.json` in tasks_dir records it for the trainer. `environment_kwargs=grading=...` tries and records one way only.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import chz

from src.cli.command_line import help_for, parse_as, print_help
from src.core.errors import INTERRUPTED, TrainerError, VerifierError
from src.core.options import pairs
from src.core.trajectory import Task
from src.envs.harbor.environment import (
    load_harbor,
    new_run_label,
    resolve_environment_type,
    trial_environment,
)
from src.envs.harbor.grading_choice import Choice, Way, take_option, write_records
from src.envs.harbor.verifier_reward import score

FRESH, IN_PLACE = Choice(), Choice(way=Way.IN_PLACE)
KEEPING = Choice(way=Way.IN_PLACE, keep_processes=True)
TRIAL_TIMEOUT_S = 1800.0
SOLUTION = "solution/solve.sh"


@chz.chz
class ValidateConfig:
    tasks_dir: str = chz.field(doc="Folder of Harbor task folders")
    environment_type: str = chz.field(default="auto", doc="auto, docker, sandbox or one of Harbor's own")
    environment_kwargs: list[str] | None = chz.field(
        default=None, doc="Settings of the environment as key=value,..."
    )
    n_parallel_envs: int = chz.field(default=4, doc="Trials running at once")
    logs_dir: str | None = chz.field(default=None, doc="Where to keep the trials' files; None: nowhere")

    @chz.validate
    def _can_be_honoured(self) -> None:
        pairs(self.environment_kwargs, option="environment_kwargs")
        if self.n_parallel_envs < 1:
            raise ValueError(
                f"n_parallel_envs={self.n_parallel_envs}: at least one trial must be allowed to run"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a task's solution and what doing nothing scored; a string says why there is no score. `grading` says how they were graded."""

    task: Task
    oracle: float | str | None  # None: the task has no solution
    nop: float | str
    grading: Choice = FRESH

    @property
    def is_sound(self) -> bool:
        return self.oracle == 1.0 and self.nop == 0.0

    @property
    def is_unsound(self) -> bool:
        return self.nop != 0.0 or self.oracle not in (1.0, None)

    def line(self) -> str:
        if self.oracle is None and not self.is_unsound:
            return f"--   {self.task.id}: nop {self.nop}; no {SOLUTION}, so nobody knows whether it can be solved"
        scores = f"oracle {f'none (no {SOLUTION})' if self.oracle is None else self.oracle}, nop {self.nop}"
        return f"{'ok  ' if self.is_sound else 'BAD '} {self.task.id}: {scores}, graded {self.grading.name}{self._reason()}"

    def _reason(self) -> str:
        from src.envs.harbor.task_folders import verifier_needs

        needed = None if self.oracle == 1.0 else verifier_needs(self.task.path)
        return f" (tests/test.sh needs the internet for `{needed}`)" if needed else ""


async def validate(
    tasks: Sequence[Task],
    *,
    environment: Mapping[str, object],
    n_parallel: int,
    directory: Path,
    tell: Callable[[Verdict], None],
    choice: Choice | None = None,
) -> list[Verdict]:
    """Play every task with its solution and with nothing; each verdict is told when it and those before it are known.

    `choice` is how all of them are graded; without it each task's own way is found out.
    """
    turns = asyncio.Semaphore(n_parallel)

    async def play(task: Task, agent: str, choice: Choice) -> float | str | None:
        async with turns:
            return await _play(task, agent, choice, environment=environment, directory=directory)

    async def verdict(task: Task) -> Verdict:
        """A task without a solution is graded in a fresh environment: nothing tells whether another way would be better."""
        first = choice or FRESH
        oracle, nop, *others = await asyncio.gather(
            play(task, "oracle", first),
            play(task, "nop", first),
            *([] if choice else [play(task, "oracle", KEEPING)]),
        )
        assert nop is not None
        if not others or others[0] == oracle or not isinstance(others[0], float):
            return Verdict(task=task, oracle=oracle, nop=nop, grading=first)
        killing = await play(task, "oracle", IN_PLACE)
        found = IN_PLACE if killing == others[0] else KEEPING
        nop = await play(task, "nop", found)
        assert nop is not None
        return Verdict(task=task, oracle=others[0], nop=nop, grading=found)

    async with asyncio.TaskGroup() as group:
        verdicts = []
        for coming in [group.create_task(verdict(task)) for task in tasks]:
            verdicts.append(await coming)
            tell(verdicts[-1])
    return verdicts


async def _play(
    task: Task, agent: str, choice: Choice, *, environment: Mapping[str, object], directory: Path
) -> float | str | None:
    from harbor.models.trial.config import (
        AgentConfig,
        EnvironmentConfig,
        TaskConfig,
        TrialConfig,
        VerifierConfig,
    )
    from harbor.trial.trial import Trial

    from src.envs.harbor.grading import graded
    from src.envs.harbor.trial import finish_within, what_happened

    if agent == "oracle" and not (task.path / SOLUTION).is_file():
        return None
    config = TrialConfig(
        task=TaskConfig(path=task.path),
        trials_dir=directory,
        agent=AgentConfig(name=agent),
        environment=EnvironmentConfig.model_validate(dict(environment)),
        verifier=VerifierConfig(import_path="src.envs.harbor.verifier:TrainingVerifier"),
    )
    try:
        trial = await Trial.create(config)
        async with graded(trial, choice):
            result = await finish_within(trial.run(), TRIAL_TIMEOUT_S)
        return score(result.verifier_result.rewards if result.verifier_result else None)
    except TimeoutError:
        return f"not done within {TRIAL_TIMEOUT_S:g} s"
    except VerifierError as error:
        return what_happened(result) or str(error)
    except Exception as error:  # a trial is a border: one task that cannot be tried must not hide the others
        return f"{type(error).__name__}: {error}"


def run(config: ValidateConfig) -> int:
    load_harbor()
    from src.envs.harbor.task_folders import check_for, load_tasks

    kind = resolve_environment_type(config.environment_type)
    given, option = take_option(pairs(config.environment_kwargs, option="environment_kwargs"))
    environment = trial_environment(kind, given, run_label=new_run_label(), n_parallel=config.n_parallel_envs)
    tasks = load_tasks(Path(config.tasks_dir), check=check_for(kind, environment))
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(config.logs_dir or scratch).expanduser()
        verdicts = asyncio.run(
            validate(
                tasks,
                environment=environment,
                n_parallel=config.n_parallel_envs,
                directory=directory,
                choice=option.choice,
                tell=lambda verdict: print(verdict.line(), flush=True),
            )
        )
    known = {
        verdict.task: verdict.grading
        for verdict in verdicts
        if isinstance(verdict.oracle, float) and isinstance(verdict.nop, float)
    }
    print(f"how each task is graded: {write_records(Path(config.tasks_dir).expanduser(), kind, known)}")
    sound, unsound = (
        sum(verdict.is_sound for verdict in verdicts),
        sum(verdict.is_unsound for verdict in verdicts),
    )
    unknown = len(verdicts) - sound - unsound
    print(
        f"{len(verdicts)} tasks in {kind}: {sound} sound, {unsound} unsound"
        + (f", {unknown} without solution" if unknown else "")
    )
    return 1 if unsound else 0


def main(argv: Sequence[str]) -> int:
    if any(argument in ("--help", "-h", "help") for argument in argv):
        print_help(help_for(ValidateConfig, title=["python -m src.envs.validate key=value ..."]))
        return 0
    try:
        return run(parse_as(ValidateConfig, argv))
    except KeyboardInterrupt:
        return INTERRUPTED
    except TrainerError as error:
        print(f"validate: {error}", file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

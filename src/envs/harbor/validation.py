"""Validation of Harbor tasks without a model, and the choice of the grading method of each task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harbor.models.task.config import TaskConfig as TaskSettings
from harbor.models.task.verifier_mode import VerifierEnvironmentMode, resolve_task_verifier_mode
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig
from harbor.models.trial.result import TrialResult
from harbor.trial.trial import Trial

from src.core.errors import VerifierError
from src.core.trajectory import Task
from src.envs.harbor.grading import graded
from src.envs.harbor.grading_method import GradingMethod, GradingMode
from src.envs.harbor.trial_result import describe_exception, run_with_deadline
from src.envs.harbor.verifier_reward import verifier_reward

FRESH, IN_PLACE = GradingMethod(), GradingMethod(mode=GradingMode.IN_PLACE)
IN_PLACE_WITH_PROCESSES = GradingMethod(mode=GradingMode.IN_PLACE, keep_processes=True)
TRIAL_TIMEOUT_S = 1800.0
SOLUTION = "solution/solve.sh"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskValidation:
    """The rewards of two agents of Harbor: `oracle` runs the task's solution, and `nop` does nothing. A
    string is the reason for a missing reward.
    """

    task: Task
    oracle: float | str | None  # None: the task has no solution
    nop: float | str
    grading: GradingMethod = FRESH
    is_separate: bool = False  # the task has a separate verifier environment, so `grading` has no effect

    @property
    def is_sound(self) -> bool:
        return self.oracle == 1.0 and self.nop == 0.0

    @property
    def is_unsound(self) -> bool:
        """Whether a check failed. A task without a solution is neither sound nor unsound if nop is 0."""
        return self.nop != 0.0 or self.oracle not in (1.0, None)

    @property
    def has_rewards(self) -> bool:
        return isinstance(self.oracle, float) and isinstance(self.nop, float)

    def line(self, *, logs_dir: str | None = None) -> str:
        """Return this task's line of the report. `logs_dir` is the directory of the trials; None: the
        directory is not kept.
        """
        if self.oracle is None and not self.is_unsound:
            return (
                f"--   {self.task.id}: nop {self.nop}; no {SOLUTION}, so it is unknown whether the task is "
                "solvable"
            )
        if self.is_sound:
            method = "in a separate verifier environment" if self.is_separate else self.grading.name
            return f"ok   {self.task.id}: oracle {self.oracle}, nop {self.nop}, graded {method}"
        oracle = f"there is no {SOLUTION}" if self.oracle is None else _result("the solution", self.oracle, 1)
        results = [oracle, _result("doing nothing", self.nop, 0)]
        advice = "logs_dir=DIR keeps" if logs_dir is None else f"{logs_dir} has"
        return f"BAD  {self.task.id}: {', '.join(results)}; {advice} the output of the verifier"


def _result(agent: str, result: float | str, expected: int) -> str:
    """Return a phrase with the reward of `agent`, or with the reason for a missing reward."""
    if isinstance(result, str):
        return f"{agent} got no reward ({result})"
    return f"{agent} got {result}" + ("" if result == expected else f" instead of {expected}")


async def validate(
    tasks: Sequence[Task],
    configs: Mapping[Path, TaskSettings],
    *,
    environment: Mapping[str, object],
    n_parallel: int,
    directory: Path,
    report: Callable[[TaskValidation], None],
    method: GradingMethod | None = None,
) -> list[TaskValidation]:
    """Run each task with its solution and with an agent that does nothing.

    `report` receives the results in the order of the tasks, each as soon as it and all earlier results are
    known. `configs` maps the directory of a task to its task.toml. All tasks are graded with `method`. If
    `method` is None, the grading method of each task depends on the rewards of its solution.
    """
    slots = asyncio.Semaphore(n_parallel)

    async def run_task(task: Task, agent: str, method: GradingMethod) -> float | str | None:
        async with slots:
            return await _run_task(task, agent, method, environment=environment, directory=directory)

    async def validate_task(task: Task) -> TaskValidation:
        """Validate one task. If `method` is None, a task is graded FRESH unless grading in place gives its
        solution another reward. In place, the processes are kept only if the reward depends on them."""
        first = method or FRESH
        is_separate = resolve_task_verifier_mode(configs[task.path]) is VerifierEnvironmentMode.SEPARATE
        oracle, nop, *in_place = await asyncio.gather(
            run_task(task, "oracle", first),
            run_task(task, "nop", first),
            *([] if method or is_separate else [run_task(task, "oracle", IN_PLACE_WITH_PROCESSES)]),
        )
        assert nop is not None
        if not in_place or in_place[0] == oracle or not isinstance(in_place[0], float):
            return TaskValidation(task=task, oracle=oracle, nop=nop, grading=first, is_separate=is_separate)
        without_processes = await run_task(task, "oracle", IN_PLACE)
        grading = IN_PLACE if without_processes == in_place[0] else IN_PLACE_WITH_PROCESSES
        nop = await run_task(task, "nop", grading)
        assert nop is not None
        return TaskValidation(task=task, oracle=in_place[0], nop=nop, grading=grading)

    async with asyncio.TaskGroup() as group:
        results = []
        for pending in [group.create_task(validate_task(task)) for task in tasks]:
            results.append(await pending)
            report(results[-1])
    return results


async def _run_task(
    task: Task, agent: str, method: GradingMethod, *, environment: Mapping[str, object], directory: Path
) -> float | str | None:
    """Run a task with one of Harbor's agents. Return its reward, or the reason for a missing reward. Return
    None if the agent is the oracle and the task has no solution."""
    if agent == "oracle" and not (task.path / SOLUTION).is_file():
        return None
    config = TrialConfig(
        task=TaskConfig(path=task.path),
        trials_dir=directory,
        agent=AgentConfig(name=agent),
        environment=EnvironmentConfig.model_validate(dict(environment)),
        verifier=VerifierConfig(import_path="src.envs.harbor.verifier:TrainingVerifier"),
    )
    result: TrialResult | None = None
    try:
        trial = await Trial.create(config)
        async with graded(trial, method):
            result = await run_with_deadline(trial.run(), TRIAL_TIMEOUT_S)
        return verifier_reward(result.verifier_result.rewards if result and result.verifier_result else None)
    except TimeoutError:
        return f"the trial did not end within {TRIAL_TIMEOUT_S:g} s"
    except VerifierError as error:
        return (result and describe_exception(result)) or str(error)
    except Exception as error:  # The other tasks are validated even if this one cannot be run.
        return f"{type(error).__name__}: {error}"

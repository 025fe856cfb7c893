"""Validation of Harbor tasks without a model, and the choice of the grading method of each task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harbor.models.task.config import TaskConfig as TaskSettings
from harbor.models.task.verifier_mode import VerifierEnvironmentMode, resolve_task_verifier_mode
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig
from harbor.models.trial.paths import TrialPaths
from harbor.models.trial.result import TrialResult
from harbor.trial.trial import Trial

from src.core.errors import VerifierError
from src.core.printable import printable
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
class AgentResult:
    """The result of a trial of one of Harbor's agents."""

    reward: float | None  # None: the trial has no reward
    details: str = ""  # why there is no reward, how the solution failed, or what the verifier printed last

    def phrase(self, agent: str, expected: int) -> str:
        """Return a phrase with the reward of `agent` and, if it is not `expected`, with the details."""
        if self.reward == expected:
            return f"{agent} got {self.reward}"
        got = "no reward" if self.reward is None else f"{self.reward} instead of {expected}"
        return f"{agent} got {got}" + (f" ({self.details})" if self.details else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskValidation:
    """The results of two agents of Harbor: `oracle` runs the task's solution, and `nop` does nothing."""

    task: Task
    oracle: AgentResult | None  # None: the task has no solution
    nop: AgentResult
    grading: GradingMethod = FRESH
    is_separate: bool = False  # the task has a separate verifier environment, so `grading` has no effect

    @property
    def is_sound(self) -> bool:
        return self.oracle is not None and self.oracle.reward == 1 and self.nop.reward == 0

    @property
    def is_unsound(self) -> bool:
        """Whether a check failed. A task without a solution is neither sound nor unsound if nop is 0."""
        return self.nop.reward != 0 or (self.oracle is not None and self.oracle.reward != 1)

    @property
    def has_rewards(self) -> bool:
        return self.oracle is not None and self.oracle.reward is not None and self.nop.reward is not None

    def line(self, *, logs_dir: str | None = None) -> str:
        """Return the line of the report. `logs_dir` has the trials; None: the directory is not kept."""
        if self.oracle is None and not self.is_unsound:
            return (
                f"--   {self.task.id}: nop {self.nop.reward}; no {SOLUTION}, so it is unknown whether the "
                "task is solvable"
            )
        if self.is_sound:
            rewards = f"oracle {self.oracle and self.oracle.reward}, nop {self.nop.reward}"
            method = "in a separate verifier environment" if self.is_separate else self.grading.name
            return f"ok   {self.task.id}: {rewards}, graded {method}"
        if self.oracle == self.nop and self.nop.reward is None:
            results = self.nop.phrase("the solution and doing nothing", 0)
        else:
            oracle = (
                f"there is no {SOLUTION}" if self.oracle is None else self.oracle.phrase("the solution", 1)
            )
            results = f"{oracle}, {self.nop.phrase('doing nothing', 0)}"
        if self.is_separate and self.oracle is not None and self.oracle.reward != 1:
            results += "; the verifier's environment has only the files that `artifacts` in task.toml names"
        advice = "logs_dir=DIR keeps" if logs_dir is None else f"{logs_dir} has"
        return f"BAD  {self.task.id}: {results}; {advice} the output of the verifier"


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

    async def run_task(task: Task, agent: str, method: GradingMethod) -> AgentResult | None:
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
        with_processes = in_place[0] if in_place else None
        if with_processes is None or with_processes.reward in (None, oracle and oracle.reward):
            return TaskValidation(task=task, oracle=oracle, nop=nop, grading=first, is_separate=is_separate)
        without = await run_task(task, "oracle", IN_PLACE)
        is_independent = without is not None and without.reward == with_processes.reward
        grading = IN_PLACE if is_independent else IN_PLACE_WITH_PROCESSES
        nop = await run_task(task, "nop", grading)
        assert nop is not None
        return TaskValidation(task=task, oracle=with_processes, nop=nop, grading=grading)

    async with asyncio.TaskGroup() as group:
        results = []
        for pending in [group.create_task(validate_task(task)) for task in tasks]:
            results.append(await pending)
            report(results[-1])
    return results


async def _run_task(
    task: Task, agent: str, method: GradingMethod, *, environment: Mapping[str, object], directory: Path
) -> AgentResult | None:
    """Run a task with one of Harbor's agents. Return None if the oracle has no solution to run."""
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
    paths: TrialPaths | None = None
    try:
        trial = await Trial.create(config)
        paths = trial.paths
        async with graded(trial, method):
            result = await run_with_deadline(trial.run(), TRIAL_TIMEOUT_S)
        reward = verifier_reward(
            result.verifier_result.rewards if result and result.verifier_result else None
        )
        return AgentResult(reward=reward, details=_details(result and describe_exception(result), paths))
    except TimeoutError:
        return AgentResult(reward=None, details=f"the trial did not end within {TRIAL_TIMEOUT_S:g} s")
    except VerifierError as error:
        reason = (result and describe_exception(result)) or str(error)
        return AgentResult(reward=None, details=_details(reason, paths))
    except Exception as error:  # The other tasks are validated even if this one cannot be run.
        return AgentResult(reward=None, details=f"{type(error).__name__}: {error}")


def _details(reason: str | None, paths: TrialPaths | None) -> str:
    """Return the reason (None or empty: there is none), with paths as the verifier sees them, and the last
    lines that a failed solution and the verifier printed."""
    reason = reason or ""
    if paths is None:
        return reason
    parts = [reason.replace(str(paths.verifier_dir), "/logs/verifier")]
    if status := _last_line(paths.agent_dir / "exit-code.txt"):
        parts.append(f"{SOLUTION} ended with status {status}: {_last_line(paths.agent_dir / 'oracle.txt')}")
    if line := _last_line(paths.test_stdout_path):
        parts.append(f"the verifier printed last: {line}")
    return "; ".join(filter(None, parts))


def _last_line(path: Path) -> str:
    """Return the last line of a file that is not blank, at most 200 characters of it, or an empty string. A
    container may have written the file, so only a regular file is read."""
    if path.is_symlink() or not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2**16))
        lines = file.read().decode(errors="replace").split("\n")
    return next((printable(line).strip()[:200] for line in reversed(lines) if line.strip()), "")

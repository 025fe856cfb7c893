"""The grading of a trial, in a fresh environment or in the agent's environment.

This file is long because all steps of the grading share the state of one class.

A fresh environment receives the agent's files but not its processes. If a task has a separate verifier
environment, Harbor starts that environment and the verifier runs there.

The following steps grade a trial in a fresh environment:

    agent starts   The search paths of the agent's environment are recorded. If this environment is a sandbox,
                   its files are listed.
    agent ends     If the agent's environment is a sandbox, its processes are killed, unless the task has
                   `[[verifier.collect]]` commands, which may need them. A fresh environment of the same task
                   starts.
    verification   If the agent's environment is a container, the container is killed. If it is a sandbox, its
                   remaining processes are killed. The files that the agent changed are unpacked in the fresh
                   environment, in which the verifier then runs.

An error after the agent has acted is attributed to the agent, with the reward 0, unless an error also occurs
without the agent or this cannot be determined. A fresh environment without the agent's files is started to
determine this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Protocol

from harbor.environments.base import BaseEnvironment
from harbor.models.task.verifier_mode import VerifierEnvironmentMode, resolve_task_verifier_mode
from harbor.models.trial.paths import EnvironmentPaths, TrialPaths
from harbor.trial.hooks import TrialEvent, TrialHookEvent
from harbor.trial.trial import Trial
from harbor.utils.env import resolve_env_vars
from harbor.verifier.verifier import Verifier

from src.core.errors import AgentFault, SandboxError
from src.core.trajectory import ZeroReason
from src.envs.harbor.carried_files import ACCOUNTS, PROBE_FILE, FileChanges, probe_changes
from src.envs.harbor.docker_files import DockerFiles
from src.envs.harbor.fresh_environment import fresh_environment
from src.envs.harbor.grading_method import GradingMethod, GradingMode, can_be_fresh
from src.envs.harbor.in_place import clean_in_place
from src.envs.harbor.sandbox_files import SandboxFiles
from src.envs.harbor.search_paths import search_variables
from src.envs.harbor.trial_result import require_graded_end
from src.envs.harbor.verifier_reward import verifier_reward
from src.envs.sandbox.containers import ContainerEnvironment
from src.envs.sandbox.environment import SandboxEnvironment
from src.envs.sandbox.sandbox_directory import remove_path

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 180.0
PROBE_TIMEOUT_S = 30
VERIFIER_REASONS = (
    ZeroReason.VERIFIER_TIMEOUT,
    ZeroReason.NO_REWARD,
    ZeroReason.UNREADABLE_REWARD,
    ZeroReason.VERIFIER_ERROR,
)
# If the disk of the temporary files has fewer free bytes, `Grading.attribute` returns None.
MIN_FREE_BYTES = 64 * 2**20


class AgentFiles(Protocol):
    """The files that an agent changed in its environment."""

    async def snapshot(self) -> None:
        """Record the search paths of the environment and, for a sandbox, its files, before the agent acts."""
        ...

    async def freeze(self) -> None:
        """End the agent's processes, so that its files no longer change."""
        ...

    async def export(self, archive: IO[bytes]) -> FileChanges:
        """Write to `archive` the changed files that the fresh environment receives. Raises AgentFault if the
        files exceed the limits or cannot be read, and SandboxError if the environment or the engine fails.
        """
        ...

    async def unpack(self, fresh: Any, archive: IO[bytes], changes: FileChanges) -> None:
        """Apply the changes to another environment of the same task. Raises AgentFault if that environment
        does not accept the changes, and SandboxError if that environment or the engine fails.
        """
        ...


class Grading:
    """The grading of one trial.

    `environment` is the agent's environment. If the trial is graded in a fresh environment, `environment`
    becomes that environment when verification starts.
    """

    def __init__(self, trial: Trial, method: GradingMethod) -> None:
        self.environment: BaseEnvironment = trial.agent_environment
        self.fault: AgentFault | None = None
        self.extra_s = 0.0  # seconds of grading, without the time of the verifier
        self.agent_ended_at: float | None = None  # by the monotonic clock
        self._trial = trial
        self._method = method
        self._files = self._agent_files()
        self._fresh: asyncio.Task[BaseEnvironment] | None = None
        self._started: list[BaseEnvironment] = []
        self._cannot_start = False  # whether no fresh environment could be started
        self._agent_started_at = time.time()
        trial.add_hook(TrialEvent.AGENT_START, self._agent_starts)
        trial.add_hook(TrialEvent.AGENT_END, self._agent_ended)
        trial.add_hook(TrialEvent.VERIFICATION_START, self._verification_starts)

    @property
    def is_fresh(self) -> bool:
        return self._files is not None

    async def attribute(self, reason: ZeroReason) -> ZeroReason | None:
        """Return the graded-zero reason of an error (the reason for the reward 0). Return None if an error
        also occurs without the agent, if this cannot be determined, or if the disk of the host is full
        (MIN_FREE_BYTES).

        If `fault` is set, its reason replaces `reason`.
        """
        if self.fault is not None:
            reason = self.fault.reason
        if shutil.disk_usage(tempfile.gettempdir()).free < MIN_FREE_BYTES:
            return None
        run_verifier = self.fault is None and reason in VERIFIER_REASONS
        # A separate verifier environment is not started again. Only a record of `validate` shows that the
        # verifier works in such an environment without the agent.
        if self._cannot_start or (run_verifier and self._is_separate and not self._method.is_recorded):
            return None
        return reason if await self._works_without_agent(run_verifier=run_verifier) else None

    async def close(self) -> None:
        """Stop the environments that were started for this grading."""
        if self._fresh is not None:
            self._fresh.cancel()
            await asyncio.wait({self._fresh}, timeout=STOP_TIMEOUT_S)
        for environment in self._started:
            await _stop(environment)
        self._started.clear()

    def _agent_files(self) -> AgentFiles | None:
        """Return the agent's files, or None if the trial is not graded in a fresh environment."""
        environment = self._trial.agent_environment
        if self._is_separate or self._method.mode is GradingMode.IN_PLACE:
            return None
        verifier_variables = resolve_env_vars(search_variables(self._trial.task.config.verifier.env))
        if isinstance(environment, SandboxEnvironment):
            return SandboxFiles(environment, verifier_variables)
        environment_type = str(getattr(environment.type(), "value", environment.type()))
        if can_be_fresh(environment.environment_dir, environment_type):
            return DockerFiles(environment, verifier_variables)
        return None

    @property
    def _is_separate(self) -> bool:
        """Whether the task has a separate verifier environment, which Harbor starts."""
        return resolve_task_verifier_mode(self._trial.task.config) is VerifierEnvironmentMode.SEPARATE

    async def _agent_starts(self, _: TrialHookEvent) -> None:
        if self._files is not None:
            started = time.monotonic()
            await self._files.snapshot()
            self.extra_s += time.monotonic() - started
        self._agent_started_at = time.time()

    async def _agent_ended(self, _: TrialHookEvent) -> None:
        """Stop a sandbox that does not respond. Start the fresh environment while the logs are collected.

        If the trial is graded in a fresh sandbox, the processes of the agent's sandbox are killed here, or
        later if the task has `[[verifier.collect]]` commands, which may need the processes. The result of
        the kill request, or of a command without effect, shows whether the sandbox responds.
        """
        environment = self._trial.agent_environment
        self.agent_ended_at = time.monotonic()
        if isinstance(environment, SandboxEnvironment):
            try:
                if self._files is not None and not self._trial.task.config.verifier.collect:
                    await self._files.freeze()
                else:
                    await environment.run_script(":", timeout_s=PROBE_TIMEOUT_S)
            except SandboxError as error:
                self.fault = AgentFault(
                    ZeroReason.SANDBOX_BROKEN, f"the agent's sandbox does not respond: {error}"
                )
                await environment.stop(delete=True)
                return
        if self._files is not None and self._fresh is None:
            self._fresh = asyncio.create_task(self._start("grading", self._trial.paths))

    async def _verification_starts(self, _: TrialHookEvent) -> None:
        started = time.monotonic()
        if self.fault is not None:
            raise self.fault
        require_graded_end(self._trial.result)
        try:
            if self._files is not None:
                await self._carry_over(self._files)
            elif not self._is_separate:
                await clean_in_place(
                    self._trial.agent_environment, self._method, since=self._agent_started_at
                )
        except AgentFault as fault:
            self.fault = fault
            raise
        self.extra_s += time.monotonic() - started

    async def _carry_over(self, files: AgentFiles) -> None:
        """Copy the agent's changes to the fresh environment."""
        assert self._fresh is not None
        with tempfile.TemporaryFile() as archive:
            try:
                await files.freeze()
                changes = await files.export(archive)
            except SandboxError as error:
                raise AgentFault(
                    ZeroReason.SANDBOX_BROKEN, f"the agent's files cannot be exported: {error}"
                ) from error
            # Every file in this directory must come from the verifier of the fresh environment.
            for path in self._trial.paths.verifier_dir.iterdir():
                remove_path(path)
            fresh = await self._await_fresh(self._fresh)
            if isinstance(fresh, ContainerEnvironment) and ACCOUNTS in changes.carried:
                await fresh.keep_home(self._trial.task.config.verifier.user)
            await files.unpack(fresh, archive, changes)
        self.environment = fresh

    async def _await_fresh(self, starting: asyncio.Task[BaseEnvironment]) -> BaseEnvironment:
        """Return the fresh environment. If it did not start, perhaps because of the agent, start another."""
        try:
            return await starting
        except Exception as error:
            logger.warning(
                "%s: a fresh environment did not start (%s); starting another one",
                self._trial.task.name,
                error,
            )
        try:
            return await self._start("grading-again", self._trial.paths)
        except Exception:
            self._cannot_start = True
            raise

    async def _start(self, role: str, paths: TrialPaths) -> BaseEnvironment:
        """Start a fresh environment of the task. `close` stops it."""
        trial = self._trial
        environment = fresh_environment(trial, role, paths)
        self._started.append(environment)
        try:
            async with asyncio.timeout(trial.environment_build_timeout_sec):
                await environment.start(force_build=False)
                await environment.run_healthcheck()
        except TimeoutError as error:
            raise SandboxError(
                f"a fresh environment did not start within {trial.environment_build_timeout_sec:g} s"
            ) from error
        return environment

    async def _works_without_agent(self, *, run_verifier: bool) -> bool:
        """Return whether a fresh environment starts, runs a command and, if the trial is graded in a fresh
        environment, removes a path and accepts a file.

        With `run_verifier`, the verifier must also give a reward there, unless the task has a separate
        verifier environment.
        """
        trial = self._trial
        with tempfile.TemporaryDirectory() as scratch:
            paths = TrialPaths(trial_dir=Path(scratch) / trial.config.trial_name)
            paths.mkdir()
            try:
                environment = await self._start("probe", paths)
                if (await environment.exec("true", timeout_sec=PROBE_TIMEOUT_S)).return_code != 0:
                    return False
                if self._files is not None:
                    with tempfile.TemporaryFile() as archive:
                        changes = replace(probe_changes(archive), removed=(PROBE_FILE,))
                        await self._files.unpack(environment, archive, changes)
                if run_verifier and not self._is_separate:
                    await self._verify_without_agent(environment, paths)
            except Exception as error:  # Any error here occurs without the agent.
                logger.warning(
                    "%s: the task cannot be graded without the agent either: %s: %s",
                    trial.task.name,
                    type(error).__name__,
                    error,
                )
                return False
            finally:
                for environment in self._started:
                    if environment.trial_paths is paths:
                        await _stop(environment)
        return True

    async def _verify_without_agent(self, environment: BaseEnvironment, paths: TrialPaths) -> None:
        trial = self._trial
        verifier = Verifier(
            task=trial.task,
            trial_paths=paths,
            environment=environment,
            override_env=trial.config.verifier.env or None,
            logger=trial.logger,
        )
        async with asyncio.timeout(trial.verifier_timeout_sec):
            with environment.with_default_user(trial.task.config.verifier.user):
                await environment.empty_dirs([EnvironmentPaths.for_os(environment.os).verifier_dir])
                result = await verifier.verify()
        verifier_reward(result.rewards)


_gradings: dict[int, Grading] = {}  # by the `id()` of the agent's environment


def grading_of(environment: BaseEnvironment) -> Grading | None:
    """Return the grading of the running trial whose agent has this environment. Return None if this is not
    the environment of an agent, for example if it is a separate verifier environment.
    """
    return _gradings.get(id(environment))


@contextlib.asynccontextmanager
async def graded(trial: Trial, method: GradingMethod) -> AsyncGenerator[Grading]:
    """Provide the grading of a trial while the block runs. `grading_of` returns it to the verifier."""
    grading = Grading(trial, method)
    key = id(trial.agent_environment)
    _gradings[key] = grading
    try:
        yield grading
    finally:
        del _gradings[key]
        await asyncio.shield(asyncio.ensure_future(grading.close()))


async def _stop(environment: BaseEnvironment) -> None:
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await environment.stop(delete=True)
    except Exception as error:
        logger.warning(
            "%s: an environment for grading did not stop: %s: %s",
            environment.session_id,
            type(error).__name__,
            error,
        )

"""Where a trial is graded: in a fresh environment with the agent's files alone, or in place; and who is to blame where grading fails.

    agent starts       its environment's files are remembered
    agent ends         its processes end in a sandbox; a fresh environment of the same task starts
    verification       its processes end in a container; what it changed is laid down in the fresh environment; the verifier runs there

Whatever goes wrong after the agent has acted counts as the agent's doing, with the reward 0, unless the same goes wrong without the agent.
That is tried at once, in one more fresh environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any, Protocol

from harbor.constants import MAIN_SERVICE_NAME
from harbor.environments.base import BaseEnvironment
from harbor.environments.factory import EnvironmentFactory
from harbor.models.task.verifier_mode import VerifierEnvironmentMode, resolve_task_verifier_mode
from harbor.models.trial.config import ServiceVolumeBind, ServiceVolumeConfig
from harbor.models.trial.paths import EnvironmentPaths, TrialPaths
from harbor.models.verifier.result import VerifierResult
from harbor.trial.hooks import TrialEvent, TrialHookEvent
from harbor.trial.network_policy import resolve_trial_network_plan
from harbor.trial.trial import Trial
from harbor.verifier.verifier import Verifier

from src.core.errors import AgentFault, SandboxError
from src.core.trajectory import ZeroReason
from src.envs.harbor.carried_files import STARTUP, Changes, one_empty_file
from src.envs.harbor.docker_files import DockerFiles, why_no_files
from src.envs.harbor.grading_choice import Choice, Way
from src.envs.harbor.sandbox_files import SandboxFiles
from src.envs.harbor.verifier_reward import score
from src.envs.sandbox.environment import SandboxEnvironment

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 30
VERIFIER_REASONS = (
    ZeroReason.VERIFIER_TIMEOUT,
    ZeroReason.NO_REWARD,
    ZeroReason.UNREADABLE_REWARD,
    ZeroReason.VERIFIER_ERROR,
)
MIN_FREE_BYTES = 64 * 2**20  # with less room the host's disk counts as full


class AgentFiles(Protocol):
    """What an agent changed in its environment."""

    async def remember(self) -> None: ...

    async def freeze(self) -> None: ...

    async def take(self, archive: IO[bytes]) -> Changes: ...

    async def place(self, fresh: Any, archive: IO[bytes], changes: Changes) -> None: ...


class Grading:
    """The grading of one trial. `environment` is where its verifier runs, once verification has begun."""

    def __init__(self, trial: Trial, choice: Choice) -> None:
        self.environment: BaseEnvironment = trial.agent_environment
        self.fault: AgentFault | None = None
        self.extra_s = 0.0  # what grading took beside the verifier
        self._trial = trial
        self._choice = choice
        self._files = self._agent_files()
        self._fresh: asyncio.Task[BaseEnvironment] | None = None
        self._started: list[BaseEnvironment] = []
        self._is_broken = False  # no fresh environment could be started
        self._acted_at = time.time()
        self.agent_ended_at: float | None = None  # by the monotonic clock
        trial.add_hook(TrialEvent.AGENT_START, self._agent_starts)
        trial.add_hook(TrialEvent.AGENT_END, self._agent_ended)
        trial.add_hook(TrialEvent.VERIFICATION_START, self._verification_starts)

    @property
    def is_fresh(self) -> bool:
        return self._files is not None

    async def blame(self, reason: ZeroReason) -> ZeroReason | None:
        """The reason, where the agent's doing is what went wrong; None where it goes wrong without an agent too."""
        if self.fault is not None:
            reason = self.fault.reason
        if shutil.disk_usage(tempfile.gettempdir()).free < MIN_FREE_BYTES:
            return None
        verifies = self.fault is None and reason in VERIFIER_REASONS
        if self._is_broken or (verifies and self._is_separate and not self._choice.is_recorded):
            return None
        return reason if await self._works_untouched(verifies=verifies) else None

    async def close(self) -> None:
        """Ends every environment that was started for this grading."""
        if self._fresh is not None:
            self._fresh.cancel()
            await asyncio.wait({self._fresh}, timeout=STOP_TIMEOUT_S)
        for environment in self._started:
            await _stopped(environment)
        self._started.clear()

    def _agent_files(self) -> AgentFiles | None:
        """None where the trial is graded in place."""
        environment = self._trial.agent_environment
        if self._is_separate or self._choice.way is Way.IN_PLACE:
            return None
        if isinstance(environment, SandboxEnvironment):
            return SandboxFiles(environment)
        if (
            str(getattr(environment.type(), "value", environment.type())) == "docker"
            and why_no_files(environment) is None
        ):
            return DockerFiles(environment)
        return None

    @property
    def _is_separate(self) -> bool:
        """The task has a verifier's environment of its own, which is Harbor's to make."""
        return resolve_task_verifier_mode(self._trial.task.config) is VerifierEnvironmentMode.SEPARATE

    async def _agent_starts(self, _: TrialHookEvent) -> None:
        if self._files is not None:
            started = time.monotonic()
            await self._files.remember()
            self.extra_s += time.monotonic() - started
        self._acted_at = time.time()

    async def _agent_ended(self, _: TrialHookEvent) -> None:
        """Stop a sandbox that does not answer. Start the fresh one while the agent's logs are collected.

        The processes of a sandbox that is graded elsewhere end here, so that collecting its logs needs no further check.
        """
        environment = self._trial.agent_environment
        self.agent_ended_at = time.monotonic()
        if isinstance(environment, SandboxEnvironment):
            try:
                if self._files is not None:
                    await self._files.freeze()
                else:
                    await environment.run_script(":", timeout_s=PROBE_TIMEOUT_S)
            except SandboxError as error:
                self.fault = AgentFault(
                    ZeroReason.SANDBOX_BROKEN, f"the agent's sandbox does not answer: {error}"
                )
                await environment.stop(delete=True)
                return
        if self._files is not None and self._fresh is None:
            self._fresh = asyncio.create_task(self._start("grading", self._trial.paths))

    async def _verification_starts(self, _: TrialHookEvent) -> None:
        started = time.monotonic()
        if self.fault is not None:
            raise self.fault
        try:
            if self._files is not None:
                await self._move(self._files)
            elif not self._is_separate:
                await clean_in_place(self._trial.agent_environment, self._choice, since=self._acted_at)
        except AgentFault as fault:
            self.fault = fault
            raise
        self.extra_s += time.monotonic() - started

    async def _move(self, files: AgentFiles) -> None:
        """The agent's files into the fresh environment, with nobody left who could change them on the way."""
        assert self._fresh is not None
        with tempfile.TemporaryFile() as archive:
            try:
                await files.freeze()
                changes = await files.take(archive)
            except SandboxError as error:
                raise AgentFault(
                    ZeroReason.SANDBOX_BROKEN, f"the agent's files cannot be taken: {error}"
                ) from error
            _empty(
                self._trial.paths.verifier_dir
            )  # a container's directory on the host; nobody writes to it any more
            fresh = await self._fresh_started(self._fresh)
            await files.place(fresh, archive, changes)
        self.environment = fresh

    async def _fresh_started(self, starting: asyncio.Task[BaseEnvironment]) -> BaseEnvironment:
        """One failure may be the agent's, whose processes took all there was when the start began; a second one is not."""
        try:
            return await starting
        except Exception as error:
            logger.warning(
                "%s: a fresh environment did not start: %s; trying again", self._trial.task.name, error
            )
        try:
            return await self._start("grading-again", self._trial.paths)
        except Exception:
            self._is_broken = True
            raise

    async def _start(self, role: str, paths: TrialPaths) -> BaseEnvironment:
        """A fresh environment of the task. It ends with `close`."""
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

    async def _works_untouched(self, *, verifies: bool) -> bool:
        """Whether a fresh environment starts and takes a file, and with `verifies` the verifier gives a reward there."""
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
                        await self._files.place(environment, archive, one_empty_file(archive))
                if verifies and not self._is_separate:
                    await self._verify_untouched(environment, paths)
            except Exception as error:  # whatever it is, it happens without the agent
                logger.warning(
                    "%s: the task cannot be graded without an agent either: %s: %s",
                    trial.task.name,
                    type(error).__name__,
                    error,
                )
                return False
            finally:
                for environment in self._started:
                    if environment.trial_paths is paths:
                        await _stopped(environment)
        return True

    async def _verify_untouched(self, environment: BaseEnvironment, paths: TrialPaths) -> VerifierResult:
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
        score(result.rewards)
        return result


_gradings: dict[int, Grading] = {}  # by the agent's environment


def grading_of(environment: BaseEnvironment) -> Grading | None:
    return _gradings.get(id(environment))


@contextlib.asynccontextmanager
async def graded(trial: Trial, choice: Choice) -> AsyncIterator[Grading]:
    """While a trial runs: its grading, which the verifier finds by the agent's environment."""
    grading = Grading(trial, choice)
    key = id(trial.agent_environment)
    _gradings[key] = grading
    try:
        yield grading
    finally:
        del _gradings[key]
        await asyncio.shield(asyncio.ensure_future(grading.close()))


def fresh_environment(trial: Trial, role: str, paths: TrialPaths) -> BaseEnvironment:
    """A second environment of a trial's task, as Harbor makes the agent's, with the network that the verifier is to have."""
    agent_environment = trial.agent_environment
    plan = resolve_trial_network_plan(
        trial.task.config,
        trial.config.agent,
        trial.config.environment,
        None,
        verifier_mode=VerifierEnvironmentMode.SHARED,
    )
    return EnvironmentFactory.create_environment_from_config(
        config=trial.config.environment,
        environment_dir=trial.task.paths.environment_dir,
        environment_name=trial.task.short_name,
        session_id=f"{trial.config.trial_name}__{role}",
        trial_paths=paths,
        task_env_config=trial.task.config.environment.model_copy(deep=True),
        logger=trial.logger,
        mounts=_log_mounts(paths, EnvironmentPaths.for_os(agent_environment.os)),
        network_policy=plan.verifier_phase,
    )


def _log_mounts(paths: TrialPaths, inside: EnvironmentPaths) -> list[ServiceVolumeConfig]:
    artifacts = paths.host_artifact_path(MAIN_SERVICE_NAME, inside.artifacts_dir.as_posix())
    artifacts.mkdir(parents=True, exist_ok=True)
    pairs = (
        (paths.verifier_dir, inside.verifier_dir),
        (paths.agent_dir, inside.agent_dir),
        (artifacts, inside.artifacts_dir),
    )
    return [
        ServiceVolumeConfig(
            type="bind",
            source=str(host.resolve().absolute()),
            target=str(place),
            bind=ServiceVolumeBind(selinux="z"),
        )
        for host, place in pairs
    ]


# Programs of `PATH` that stand before a system's program of the same name, and start-up files, if they changed since the agent started.
CLEAN = """
PATH=/usr/sbin:/usr/bin:/sbin:/bin
unset BASH_ENV ENV LD_PRELOAD LD_LIBRARY_PATH LD_AUDIT PYTHONPATH PYTHONSTARTUP PYTHONHOME
[ -e /etc/ld.so.preload ] && : > /etc/ld.so.preload && rm -f /etc/ld.so.preload
find {startup} -xdev -newerct @{since} ! -type d -exec rm -f -- {{}} + 2>/dev/null
find /usr/local /opt -xdev \\( -name 'sitecustomize*' -o -name 'usercustomize*' -o -name '*.pth' \\) -newerct @{since} \\
    -exec rm -rf -- {{}} + 2>/dev/null
for program in $(find /usr/local/sbin /usr/local/bin -newerct @{since} ! -type d -printf '%f\\n' 2>/dev/null); do
    for place in /usr/sbin /usr/bin /sbin /bin; do
        if [ -e "$place/$program" ]; then rm -f -- "/usr/local/sbin/$program" "/usr/local/bin/$program"; fi
    done
done
true
"""
CLEAN_TIMEOUT_S = 120


async def clean_in_place(environment: BaseEnvironment, choice: Choice, *, since: float) -> None:
    """Take out of an agent's own environment what a verifier would load without being told to. It cannot find everything."""
    if isinstance(environment, SandboxEnvironment) and not choice.keep_processes:
        await environment.kill_processes()
    startup = " ".join(path.replace("/.*", "/.[!.]*") for path in STARTUP)
    script = CLEAN.format(startup=startup, since=f"{since:.3f}")
    await environment.exec(script, user="root", timeout_sec=CLEAN_TIMEOUT_S)


def _empty(directory: Path) -> None:
    """Remove what a container left in a directory that it shared with the host, following no link."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


async def _stopped(environment: BaseEnvironment) -> None:
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await environment.stop(delete=True)
    except Exception as error:
        logger.warning("an environment for grading did not stop: %s: %s", type(error).__name__, error)

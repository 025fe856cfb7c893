"""Harbor's verifier with two additions: nothing the agent left behind takes part in grading, and a machine it broke is graded 0."""

from __future__ import annotations

from typing import override

from harbor.models.task.verifier_mode import VerifierEnvironmentMode, resolve_task_verifier_mode
from harbor.models.trial.paths import EnvironmentPaths
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.verifier import DownloadVerifierDirError, RewardFileEmptyError, RewardFileNotFoundError, Verifier

from src.envs.sandbox import SandboxEnvironment

PROBE_TIMEOUT_S = 20


class TrainingVerifier(Verifier):
    """Grades in a clean corner of the agent's sandbox, or in the sandbox of its own that a task asks for."""

    @override
    async def verify(self) -> VerifierResult:
        """Grade. Before that the agent's processes end (sandbox only), and reward files and tests it may have planted are removed.

        A missing reward is an error, unless the sandbox answers but can no longer run `true`: then the agent broke it, and that scores 0.
        """
        if resolve_task_verifier_mode(self.task.config) is VerifierEnvironmentMode.SHARED:
            await self._clear_the_ground()
        try:
            return await super().verify()
        except (RewardFileNotFoundError, RewardFileEmptyError, DownloadVerifierDirError):
            probe = await self.environment.exec("true", timeout_sec=PROBE_TIMEOUT_S)
            if probe.return_code == 0:
                raise
            self.logger.warning("the agent left a machine that cannot run any command (status %d): reward 0", probe.return_code)
            return VerifierResult(rewards={"reward": 0.0})

    async def _clear_the_ground(self) -> None:
        paths = EnvironmentPaths.for_os(self.environment.os)
        if isinstance(self.environment, SandboxEnvironment) and not self.environment.keep_processes:
            await self.environment.kill_processes()
        await self.environment.empty_dirs([paths.verifier_dir])
        await self.environment.empty_dirs([paths.tests_dir], chmod=False)
        for stale in (self.trial_paths.reward_json_path, self.trial_paths.reward_text_path):
            stale.unlink(missing_ok=True)

"""Harbor's verifier, run where `grading` says, in a place where nothing that the agent left takes part unasked."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any, override

from harbor.environments.base import BaseEnvironment
from harbor.models.trial.paths import EnvironmentPaths
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.verifier import Verifier
from pydantic import ValidationError

from src.core.errors import AgentFault
from src.core.trajectory import ZeroReason
from src.envs.harbor.grading import grading_of
from src.envs.sandbox.environment import SandboxEnvironment

MAX_REWARD_BYTES = 2**20


class TrainingVerifier(Verifier):
    """Grades in the environment that the trial's grading has prepared, or in the one of its own that a task asks for."""

    @override
    async def verify(self) -> VerifierResult:
        """Grade. Reward files and tests that were there before are removed. Whoever runs the trial decides what an error is worth."""
        if (grading := grading_of(self.environment)) is not None:
            user = self.environment.default_user
            self.environment = grading.environment
            with self.environment.with_default_user(user):
                if not (
                    grading.is_fresh and isinstance(self.environment, SandboxEnvironment)
                ):  # a fresh sandbox has nothing to remove
                    await self._clear_the_ground(self.environment)
                return await self._verified()
        return await self._verified()

    async def _verified(self) -> VerifierResult:
        try:
            return await super().verify()
        except ValidationError as error:  # a reward file that is no mapping of names to numbers
            raise AgentFault(
                ZeroReason.UNREADABLE_REWARD,
                f"the verifier's rewards cannot be read: {error.error_count()} errors",
            ) from error

    @override
    def _parse_reward_text(self) -> dict[str, Any]:
        require_plain(self.trial_paths.reward_text_path)
        return super()._parse_reward_text()

    @override
    def _parse_reward_json(self) -> dict[str, Any]:
        require_plain(self.trial_paths.reward_json_path)
        return super()._parse_reward_json()

    async def _clear_the_ground(self, environment: BaseEnvironment) -> None:
        paths = EnvironmentPaths.for_os(environment.os)
        await environment.empty_dirs([paths.verifier_dir])
        await environment.empty_dirs([paths.tests_dir], chmod=False)
        for stale in (self.trial_paths.reward_json_path, self.trial_paths.reward_text_path):
            if stale.is_symlink() or not stale.is_dir():
                stale.unlink(missing_ok=True)


def require_plain(path: Path) -> None:
    """AgentFault for a reward file that is no plain file of a reasonable size: it may lie in a directory that a container writes to."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise AgentFault(ZeroReason.UNREADABLE_REWARD, f"{path.name} is no plain file")
    if status.st_size > MAX_REWARD_BYTES:
        raise AgentFault(ZeroReason.UNREADABLE_REWARD, f"{path.name} has {status.st_size} bytes")

"""Harbor's verifier, run in the environment that `Grading` has prepared."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any, override

from harbor.environments.base import BaseEnvironment
from harbor.models.task.verifier_mode import resolve_verifier_environment_definition
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
    """The verifier of all trials. If a task has a separate verifier environment, the verifier runs in that
    environment, as in Harbor. If that environment has an image of its own, the image contains the tests.
    """

    @override
    async def verify(self) -> VerifierResult:
        """Empty the directories of the verifier and of the tests, remove old reward files, then grade.

        Nothing is removed if the verifier runs in a fresh sandbox or in a separate verifier environment.
        `HarborTrial` decides whether an error is a failure or a reward of 0.
        """
        if (grading := grading_of(self.environment)) is not None:
            user = self.environment.default_user
            self.environment = grading.environment
            with self.environment.with_default_user(user):
                # A fresh sandbox contains no such files.
                if not (grading.is_fresh and isinstance(self.environment, SandboxEnvironment)):
                    await self._remove_old_files(self.environment)
                return await self._verify()
        definition = resolve_verifier_environment_definition(self.task.config, self.task.paths)
        # Harbor passes the argument `skip_tests_upload` only to its own `Verifier`.
        self._skip_tests_upload = definition is not None and definition.bundled_tests
        return await self._verify()

    async def _verify(self) -> VerifierResult:
        try:
            return await super().verify()
        except ValidationError as error:  # The reward file is not a mapping of names to numbers.
            raise AgentFault(
                ZeroReason.UNREADABLE_REWARD,
                f"the verifier's reward file does not map names to numbers: {error.errors()[0]['msg']}",
            ) from error

    @override
    def _parse_reward_text(self) -> dict[str, Any]:
        check_reward_file(self.trial_paths.reward_text_path)
        return super()._parse_reward_text()

    @override
    def _parse_reward_json(self) -> dict[str, Any]:
        check_reward_file(self.trial_paths.reward_json_path)
        return super()._parse_reward_json()

    async def _remove_old_files(self, environment: BaseEnvironment) -> None:
        paths = EnvironmentPaths.for_os(environment.os)
        await environment.empty_dirs([paths.verifier_dir])
        await environment.empty_dirs([paths.tests_dir], chmod=False)
        for path in (self.trial_paths.reward_json_path, self.trial_paths.reward_text_path):
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)


def check_reward_file(path: Path) -> None:
    """Raise AgentFault if a reward file is not a regular file or is too large. The file cannot be trusted,
    because a container may have written it.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise AgentFault(ZeroReason.UNREADABLE_REWARD, f"{path.name} is not a regular file")
    if status.st_size > MAX_REWARD_BYTES:
        raise AgentFault(
            ZeroReason.UNREADABLE_REWARD,
            f"{path.name} has {status.st_size} bytes; at most {MAX_REWARD_BYTES} are read",
        )

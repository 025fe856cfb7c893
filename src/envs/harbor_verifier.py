"""Harbor's verifier with two additions: nothing the agent left behind takes part in grading, and a machine it broke is graded 0."""

from __future__ import annotations

from typing import override

from harbor.models.task.verifier_mode import VerifierEnvironmentMode, resolve_task_verifier_mode
from harbor.models.trial.paths import EnvironmentPaths
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.verifier import AddTestsDirError, DownloadVerifierDirError, RewardFileEmptyError, RewardFileNotFoundError, Verifier

from src.envs.sandbox import SandboxEnvironment, is_the_machines

PROBE_TIMEOUT_S = 20
SOUND = "sound"
# What grading needs of a machine: commands that run, a place for the tests and for the reward, and room there.
PROBE = f"""for place in {{places}}; do
    mkdir -p $place && head -c 65536 /dev/zero > $place/.probe && rm $place/.probe || exit 1
done; echo {SOUND}"""


class TrainingVerifier(Verifier):
    """Grades in a clean corner of the agent's sandbox, or in the sandbox of its own that a task asks for."""

    @override
    async def verify(self) -> VerifierResult:
        """Grade. Before that the agent's processes end (sandbox only), and reward files and tests it may have planted are removed.

        A missing reward is an error, unless the machine answers but can no longer run `true`: then the agent broke it, and that scores 0.
        So does a sandbox, whose files are the agent's alone, in which nothing can be laid down any more: a full disk, a file for `/tests`.
        """
        if resolve_task_verifier_mode(self.task.config) is VerifierEnvironmentMode.SHARED:
            await self._clear_the_ground()
        try:
            return await super().verify()
        except (AddTestsDirError, RewardFileNotFoundError, RewardFileEmptyError, DownloadVerifierDirError) as error:
            if await self._is_sound(error):
                raise
            self.logger.warning("the agent left a machine in which nothing can be graded: reward 0")
            return VerifierResult(rewards={"reward": 0.0})

    async def _is_sound(self, error: Exception) -> bool:
        """Whether a failure to grade is not the agent's doing. A container's disk may be full because its host's is."""
        if not isinstance(self.environment, SandboxEnvironment):
            status = (await self.environment.exec("true", timeout_sec=PROBE_TIMEOUT_S)).return_code
            return isinstance(error, AddTestsDirError) or status == 0 or not is_the_machines(status, self.environment)
        paths = EnvironmentPaths.for_os(self.environment.os)
        places = " ".join(str(path) for path in (paths.tests_dir, paths.verifier_dir))
        probe = await self.environment.exec(PROBE.format(places=places), timeout_sec=PROBE_TIMEOUT_S)
        return probe.return_code == 0 and (probe.stdout or "").strip() == SOUND

    async def _clear_the_ground(self) -> None:
        paths = EnvironmentPaths.for_os(self.environment.os)
        if isinstance(self.environment, SandboxEnvironment) and not self.environment.keep_processes:
            await self.environment.kill_processes()
        await self.environment.empty_dirs([paths.verifier_dir])
        await self.environment.empty_dirs([paths.tests_dir], chmod=False)
        for stale in (self.trial_paths.reward_json_path, self.trial_paths.reward_text_path):
            stale.unlink(missing_ok=True)

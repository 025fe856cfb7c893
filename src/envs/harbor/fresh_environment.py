"""A fresh environment of a trial's task, created from the same configuration as the agent's environment.

It has the network policy of the verifier. Its only mounts are Harbor's mounts for logs and artifacts.
`SandboxEnvironment` and `ContainerEnvironment` replace these mounts by directories or volumes of their own.
"""

from __future__ import annotations

from harbor.constants import MAIN_SERVICE_NAME
from harbor.environments.base import BaseEnvironment
from harbor.environments.factory import EnvironmentFactory
from harbor.models.trial.config import ServiceVolumeBind, ServiceVolumeConfig
from harbor.models.trial.paths import EnvironmentPaths, TrialPaths
from harbor.trial.network_policy import resolve_verifier_phase_policy
from harbor.trial.trial import Trial


def fresh_environment(trial: Trial, role: str, paths: TrialPaths) -> BaseEnvironment:
    """Return a fresh environment of the trial's task. The caller starts it.

    `role` is the suffix of the session id of the environment. Harbor's mounts name the verifier, agent and
    artifacts directories of `paths`.
    """
    config = trial.task.config
    return EnvironmentFactory.create_environment_from_config(
        config=trial.config.environment,
        environment_dir=trial.task.paths.environment_dir,
        environment_name=trial.task.short_name,
        session_id=f"{trial.config.trial_name}__{role}",
        trial_paths=paths,
        task_env_config=config.environment.model_copy(deep=True),
        logger=trial.logger,
        mounts=_log_mounts(paths, EnvironmentPaths.for_os(trial.agent_environment.os)),
        network_policy=resolve_verifier_phase_policy(config, baseline=config.environment.resolve_baseline()),
    )


def _log_mounts(paths: TrialPaths, environment_paths: EnvironmentPaths) -> list[ServiceVolumeConfig]:
    """Return the mounts of three directories of `paths`. The targets of the mounts are below /logs in the
    environment. Create the artifacts directory of `paths`.
    """
    artifacts = paths.host_artifact_path(MAIN_SERVICE_NAME, environment_paths.artifacts_dir.as_posix())
    artifacts.mkdir(parents=True, exist_ok=True)
    mounts = (
        (paths.verifier_dir, environment_paths.verifier_dir),
        (paths.agent_dir, environment_paths.agent_dir),
        (artifacts, environment_paths.artifacts_dir),
    )
    return [
        ServiceVolumeConfig(
            type="bind",
            source=str(source.resolve().absolute()),
            target=str(target),
            bind=ServiceVolumeBind(selinux="z"),
        )
        for source, target in mounts
    ]

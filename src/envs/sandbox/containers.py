"""Harbor's Docker environment without bind mounts of the trial's directory, and with labels on all objects
that it creates.

Harbor can mount directories of the trial's directory into the container. An agent could then fill the host's
disk, create links there and leave files that only root can remove. Here `/logs` is part of the container. If
the task has a compose file, whose services may share `/logs`, each log directory is a volume of the trial's
compose project. A thread downloads the files of `/logs` through the Docker engine. The limits of `file_copy`
on sizes and numbers of files apply, as for a bubblewrap sandbox. Every service, network and volume is created
with the labels of the run, so that a clean-up finds the objects that a killed trainer left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, override

import docker
import yaml
from docker.errors import DockerException, NotFound
from harbor.constants import MAIN_SERVICE_NAME
from harbor.environments.base import ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.environments.docker.compose_env import legacy_log_mount_env_vars
from harbor.environments.docker.docker import (
    DockerEnvironment,
    _sanitize_docker_compose_project_name,  # pyright: ignore[reportPrivateUsage]
)

from src.core.errors import ConfigError, SandboxError
from src.envs.sandbox.docker import PROJECT_LABEL, engine, run_labels
from src.envs.sandbox.file_copy import (
    COLLECT_TIMEOUT_S,
    REWARD_FILES,
    ChunkReader,
    DownloadBudget,
    TrialDownloads,
    decode_output,
    unpack,
    unpack_file,
)
from src.envs.sandbox.resource_limits import SandboxLimits
from src.envs.sandbox.sandbox_directory import sandbox_directory

SERVICE_LABEL = "com.docker.compose.service"
VERIFIER_DIRECTORY = "/logs/verifier"
IMAGE_NAME = re.compile(r"[a-z0-9]+(?:(?:_{1,2}|-+)[a-z0-9]+)*")
"""The project names that compose can use as names of images."""
MAX_OUTPUT_BYTES = 16 * 2**20  # for the output of one command


class ContainerEnvironment(DockerEnvironment):
    """A Harbor Docker environment of the run `run_label`."""

    def __init__(self, *args: Any, run_label: str, **kwargs: Any) -> None:
        self._run_label = run_label
        self._override_file: Path | None = None
        super().__init__(*args, **kwargs)
        project = _sanitize_docker_compose_project_name(self.session_id)
        if self.task_env_config.docker_image is None and not IMAGE_NAME.fullmatch(project):
            raise ConfigError(
                f"Docker cannot build an image with the name {project}; use letters and digits, and single "
                "separators between them, in the name of the task directory"
            )
        self._downloads = TrialDownloads(self.trial_paths.trial_dir)
        directory = self.trial_paths.trial_dir.resolve()
        binds = [
            mount
            for mount in self._mounts
            if mount["type"] == "bind" and Path(str(mount.get("source"))).is_relative_to(directory)
        ]
        self._log_directories = [str(mount["target"]) for mount in binds]
        self._mounts = [mount for mount in self._mounts if mount not in binds]
        self._shared_logs = binds if self._environment_docker_compose_path.exists() else []
        self._mounts += [_as_volume(mount) for mount in self._shared_logs]
        # Harbor 0.26 writes `_host_mounts` to the compose file; earlier versions write `_mounts`.
        self._host_mounts = self._mounts

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return super().capabilities.model_copy(update={"mounted": False})

    @property
    @override
    def _docker_compose_paths(self) -> list[Path]:
        return [
            *super()._docker_compose_paths,
            *([self._override_file] if self._override_file is not None else []),
        ]

    @override
    def _compose_infra_env_vars(self) -> dict[str, str]:
        # The compose file of a task may use variables of Harbor to mount the log directories in other
        # places. Here the values of these variables are names of volumes.
        volumes: Any = [
            {**mount, "source": _volume_name(str(mount["target"]))} for mount in self._shared_logs
        ]
        return super()._compose_infra_env_vars() | legacy_log_mount_env_vars(volumes, host_value="source")

    @override
    async def start(self, force_build: bool) -> None:
        path = sandbox_directory(self._run_label) / f"{self.session_id}.compose.json"
        path.write_text(json.dumps(self._overrides()))  # JSON is YAML
        self._override_file = path
        await super().start(force_build)

    @override
    async def stop(self, delete: bool) -> None:
        try:
            await super().stop(delete)
        finally:
            if self._override_file is not None:
                self._override_file.unlink(missing_ok=True)
                self._override_file = None

    async def keep_home(self, user: str | int | None) -> None:
        """Set HOME of all later commands to the home directory that `user` has now. Otherwise the engine
        takes HOME from /etc/passwd, which an agent can change.
        """
        completed = await self.exec("printenv HOME", user=user)
        if completed.return_code == 0:
            self._persistent_env = {"HOME": (completed.stdout or "").strip(), **self._persistent_env}

    @override
    def _mount_targets(self, *, writable_only: bool = False) -> list[str]:
        """Return the directories that Harbor creates in the container and makes writable."""
        return list(
            dict.fromkeys([*super()._mount_targets(writable_only=writable_only), *self._log_directories])
        )

    @override
    async def prepare_logs_for_host(self) -> None:
        """Do nothing. Harbor changes the owner of bind-mounted log files, and there are none here."""

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Upload a directory without the files that were downloaded from the container: the container still
        has the originals, and a download may be truncated.
        """
        if not await asyncio.to_thread(self._downloads.has_downloads_below, Path(source_dir)):
            await super().upload_dir(source_dir, target_dir)
            return
        with tempfile.TemporaryDirectory() as directory:
            await asyncio.to_thread(self._stage, Path(source_dir), Path(directory))
            await super().upload_dir(directory, target_dir)

    def _stage(self, source: Path, directory: Path) -> None:
        for path, target in self._downloads.host_files(source, str(directory)):
            if path.is_file():
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self.service_download_file(source_path, target_path)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self.service_download_dir(source_dir, target_dir)

    @override
    async def service_download_file(
        self, source_path: str, target_path: Path | str, *, service: str | None = None
    ) -> None:
        await asyncio.to_thread(
            self._collect_file, str(source_path), Path(target_path), service or MAIN_SERVICE_NAME
        )

    @override
    async def service_download_dir(
        self, source_dir: str, target_dir: Path | str, *, service: str | None = None
    ) -> None:
        await asyncio.to_thread(
            self._collect, str(source_dir), Path(target_dir), service or MAIN_SERVICE_NAME
        )

    def _overrides(self) -> dict[str, object]:
        """Return a compose file that labels all objects that compose creates for this trial.

        It limits the processes of each service for which the task sets no such limit. Otherwise an agent
        could use up the process ids of the host.

        It also makes compose kill the services at the end. Otherwise compose would wait 10 s for the
        container of the agent, whose main process `sleep` ignores SIGTERM. All results have been downloaded
        by then.
        """
        labels = {"labels": run_labels(self._run_label)}
        service = labels | {"stop_grace_period": "0s", "pids_limit": SandboxLimits().processes}
        sections: dict[str, dict[str, Any]] = {
            "services": {MAIN_SERVICE_NAME: dict(service)},
            "networks": {"default": labels},
            "volumes": {_volume_name(str(mount["target"])): labels for mount in self._shared_logs},
        }
        if self._enable_egress_control:
            sections["services"][self._EGRESS_CONTROL_SERVICE_NAME] = service
        defaults = {"services": service, "networks": labels, "volumes": labels}
        for path in self._user_compose_paths():
            document = yaml.safe_load(path.read_text())
            for section, overrides in sections.items():
                definitions = document.get(section) if isinstance(document, dict) else None
                for name, definition in (definitions if isinstance(definitions, dict) else {}).items():
                    if isinstance(definition, dict) and definition.get("external"):
                        overrides.pop(name, None)  # compose does not create external objects
                    else:
                        override = overrides.setdefault(name, dict(defaults[section]))
                        if section == "services" and _limits_processes(definition):
                            override.pop("pids_limit", None)
        return {section: overrides for section, overrides in sections.items() if overrides}

    def _collect(self, source: str, target: Path, service: str) -> None:
        """Download a directory, within the limits of the trial. This method blocks its thread."""
        directory = source.rstrip("/")
        with (
            engine(timeout_s=int(COLLECT_TIMEOUT_S)) as client,
            self._downloads.download(source) as budget,
        ):
            container = find_container(client, self.session_id, service)
            for name in REWARD_FILES if directory == VERIFIER_DIRECTORY else ():
                self._unpack(container, f"{directory}/{name}", target, budget, optional=True)
            self._unpack(container, f"{directory}/.", target, budget)

    def _unpack(
        self, container: Any, path: str, target: Path, budget: DownloadBudget, *, optional: bool = False
    ) -> None:
        try:
            chunks, _ = container.get_archive(path)
        except NotFound as error:
            if optional:
                return
            raise SandboxError(f"cannot download {path}: it does not exist in the container") from error
        except DockerException as error:
            raise SandboxError(f"cannot download {path}: {error}") from error
        reader = ChunkReader(chunks, budget.archive_bytes + tarfile.RECORDSIZE)
        if not unpack(reader, target, budget, self._downloads.downloaded) or reader.was_cut:
            budget.is_whole = False

    def _collect_file(self, source: str, target: Path, service: str) -> None:
        """Download a regular file, within the limits of the trial. This method blocks its thread."""
        with (
            engine(timeout_s=int(COLLECT_TIMEOUT_S)) as client,
            self._downloads.download(source) as budget,
        ):
            try:
                chunks, _ = find_container(client, self.session_id, service).get_archive(source)
            except DockerException as error:
                raise SandboxError(
                    f"cannot download {source}: {' '.join(str(error).split())[:200]}"
                ) from error
            try:
                unpack_file(ChunkReader(chunks, budget.archive_bytes + tarfile.RECORDSIZE), target, budget)
            except SandboxError:
                budget.is_whole = False
                raise

    @staticmethod
    @override
    async def _collect_buffered_output(
        process: asyncio.subprocess.Process, *, timeout_sec: int | None, stdin_data: bytes | None = None
    ) -> ExecResult:
        """Return the output of a command, cut after `MAX_OUTPUT_BYTES`."""
        kept = bytearray()

        async def write() -> None:
            if stdin_data is not None and process.stdin is not None:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    process.stdin.write(stdin_data)
                    await process.stdin.drain()
                process.stdin.close()

        async def read() -> None:
            assert process.stdout is not None
            while chunk := await process.stdout.read(2**16):
                kept.extend(chunk[: MAX_OUTPUT_BYTES - len(kept)])
            await process.wait()

        try:
            async with asyncio.timeout(timeout_sec or None):
                await asyncio.gather(write(), read())
        except TimeoutError:
            await DockerEnvironment._terminate_process(process)
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from None
        return ExecResult(
            stdout=await decode_output(bytes(kept)) or None, stderr=None, return_code=process.returncode or 0
        )


def find_container(client: docker.DockerClient, session_id: str, service: str) -> Any:
    """Return the container of a service of a trial. Raises SandboxError if there is none."""
    project = _sanitize_docker_compose_project_name(session_id)
    labels = [f"{PROJECT_LABEL}={project}", f"{SERVICE_LABEL}={service}"]
    containers = client.containers.list(all=True, filters={"label": labels})
    if not containers:
        raise SandboxError(f"the service {service} of {session_id} has no container")
    return containers[0]


def _limits_processes(definition: object) -> bool:
    """Return whether the definition of a compose service limits the number of its processes."""
    limits = definition
    for key in ("deploy", "resources", "limits"):
        limits = limits.get(key) if isinstance(limits, Mapping) else None
    return any(
        isinstance(options, Mapping) and name in options
        for options, name in ((definition, "pids_limit"), (limits, "pids"))
    )


def _volume_name(target: str) -> str:
    return "trial" + str(PurePosixPath(target)).replace("/", "-")


def _as_volume(mount: Any) -> Any:
    return {"type": "volume", "source": _volume_name(str(mount["target"])), "target": mount["target"]}

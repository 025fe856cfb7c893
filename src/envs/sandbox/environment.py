"""A Harbor environment that needs no container engine. Each trial has a bubblewrap sandbox.

`SandboxEnvironment` implements Harbor's interface (exec, uploads and downloads) on top of `Bubblewrap`.
Differences from Docker:
- The image is the host's /usr, read-only. The image that FROM names is not fetched. `apt-get install`
  succeeds for packages that the host has.
- A public network, which is Harbor's default, reaches the internet, but neither the loopback addresses of the
  host nor link-local addresses. If this machine cannot provide a public network, a task that explicitly
  requests one is refused, and so is every task with `network=True`. Other tasks then run without a network.
- The only user is root, without capabilities. It owns all files that the task and the agent create.

This file is long because Harbor's abstract class is implemented by one class.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, override

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities

from src.core.errors import SandboxError
from src.envs.sandbox.bubblewrap import Bubblewrap, CommandResult, CommandTimeout, missing_packages
from src.envs.sandbox.dockerfile import USE_DOCKER, BuildPlan, Copy, MakeDirectory, Run
from src.envs.sandbox.exec_server import PathKind
from src.envs.sandbox.file_copy import (
    COLLECT_TIMEOUT_S,
    REWARD_FILES,
    BoundedFile,
    TrialDownloads,
    decode_output,
    unpack,
    write_untrusted_file,
)
from src.envs.sandbox.launch import BASE_ENVIRONMENT
from src.envs.sandbox.network import PROGRAMS, why_no_network
from src.envs.sandbox.resource_limits import SandboxLimits
from src.envs.sandbox.rootfs import build_rootfs
from src.envs.sandbox.sandbox_directory import sandbox_directory
from src.envs.sandbox.task_requirements import NetworkAccess, network_access, read_build_plan

# Exit statuses of shells and container runtimes if a command cannot be executed or does not exist.
COMMAND_UNAVAILABLE = (126, 127)
MAKE_READABLE_TIMEOUT_S = 20
CANNOT_MAKE_DIRECTORIES = 3  # exit status of the upload script
ROOT_USERS = (None, "root", "0", 0, "root:root", "0:0")

_instances = itertools.count(1)


class SandboxEnvironment(BaseEnvironment):
    """A Harbor environment in a bubblewrap sandbox.

    Options besides Harbor's: `run_label` names the run. The files of the sandbox on the host are in
    `sandbox_directory(run_label)`. `network=True` gives the sandbox the public network even if task.toml
    turns the network off.
    """

    def __init__(self, *args: Any, run_label: str, network: bool = False, **kwargs: Any) -> None:
        self._run_label = run_label
        self._has_network_option = network
        self._sandbox: Bubblewrap | None = None
        self._plan = BuildPlan(environment={})
        # Host files and their paths in the sandbox. If this is a list, `upload_dir` only appends to it.
        self.held_uploads: list[tuple[Path, str]] | None = None
        super().__init__(*args, **kwargs)
        self._downloads = TrialDownloads(self.trial_paths.trial_dir)

    @staticmethod
    @override
    def type() -> str:
        return "sandbox"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities | None:
        # The sandbox does not limit CPU time, so task.toml may have any number of CPUs, also a fraction.
        return EnvironmentResourceCapabilities(memory_limit=True, fractional_cpus=True)

    @classmethod
    @override
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        if missing := missing_packages():
            raise SandboxError(f"the sandbox needs these packages; install them: {' '.join(missing)}")

    @override
    def _validate_definition(self) -> None:
        self._plan = read_build_plan(self.environment_dir, self.task_env_config)

    @override
    async def start(self, force_build: bool) -> None:
        network = network_access(self.task_env_config, has_network_option=self._has_network_option)
        if network is NetworkAccess.REFUSED:
            raise SandboxError(f"no public network for the sandbox: {why_no_network()}; {USE_DOCKER}")
        run = sandbox_directory(self._run_label)
        name = re.sub(r"[^A-Za-z0-9._-]", "_", self.session_id)[:64]
        self._sandbox = await Bubblewrap.start(
            run / f"{next(_instances)}-{name}",
            skeleton=build_rootfs(run),
            hostname="sandbox",
            share_network=network is NetworkAccess.PUBLIC,
            limits=self._limits(),
        )
        await self._build()
        await self._upload_environment_dir_after_start()

    async def _build(self) -> None:
        """Run the steps of the build plan.

        Every command starts a shell, so directories are collected and created together: by the upload of the
        next `Copy`, or by a separate command before a `Copy` with `is_one_file`, before a `Run` and after the
        last step. The `workdir` of task.toml is created last, because a `RUN mkdir` of it must succeed.
        """
        directories = self._mount_targets()
        for step in self._plan.steps:
            match step:
                case MakeDirectory(path=path):
                    directories.append(path)
                case Copy():
                    files = list(step.files)
                    if step.is_one_file:
                        await self._make_directories(directories)
                        directories = []
                        ((source, target),) = files
                        files = [(source, await self._file_path(target, source.name))]
                    await self._upload(
                        files, f"Dockerfile line {step.line}", mode=step.mode, directories=directories
                    )
                    directories = []
                case Run():
                    await self._make_directories(directories)
                    directories = []
                    await self._run_build_step(step)
        await self._make_directories(directories)
        if workdir := self.task_env_config.workdir:
            await self._upload([], "the sandbox", directories=[workdir], directory_mode=None)

    @override
    async def stop(self, delete: bool) -> None:
        if self._sandbox is not None:
            await self._sandbox.stop()

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        user = self._resolve_user(user)
        if user not in ROOT_USERS:
            raise SandboxError(f"the sandbox has no user {user!r}, only root; {USE_DOCKER}")
        environment = {**self._plan.environment, **(self._merge_env(env) or {})}
        script = command_script(command, cwd=cwd or self._workdir, environment=environment)
        completed = await self._bubblewrap.run(script, timeout_s=timeout_sec)
        stdout, stderr = [await decode_output(output) for output in (completed.stdout, completed.stderr)]
        if callback := self._output_callback():
            if stdout:
                await callback(stdout, "stdout")
            if stderr:
                await callback(stderr, "stderr")
        return ExecResult(stdout=stdout, stderr=stderr, return_code=completed.status)

    @property
    def environment_variables(self) -> Mapping[str, str]:
        """The environment variables of every command of the task. PWD is its working directory."""
        environment = {**BASE_ENVIRONMENT, **self._plan.environment, **(self._merge_env(None) or {})}
        return {**environment, "PWD": self._workdir}

    async def kill_processes(self) -> None:
        """Kill all processes in the sandbox except its pid 1."""
        await self._bubblewrap.kill_processes()

    async def run_script(
        self, script: str, *, timeout_s: float, stdout: BinaryIO | None = None
    ) -> CommandResult:
        """Run a script of the trainer in sh. Its PATH has no directory to which the agent can write, and the
        environment variables of the task are not set.
        """
        return await self._bubblewrap.run(
            f"export PATH={PROGRAMS}\n{script}",
            timeout_s=timeout_s,
            stdout=stdout,
            shell="sh",
        )

    @override
    async def is_dir(self, path: str, user: str | int | None = None) -> bool:
        if not path.startswith("/"):
            return await super().is_dir(path, user)
        return await self._bubblewrap.path_kind(path) in (PathKind.EMPTY_DIRECTORY, PathKind.DIRECTORY)

    def staged_file(self) -> AbstractContextManager[tuple[Path, str]]:
        return self._bubblewrap.staged_file()

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = str(target_path)
        name = Path(source_path).name
        path = f"{target}{name}" if target.endswith("/") else await self._file_path(target, name)
        await self._upload([(Path(source_path), path)], path)

    async def _file_path(self, target: str, name: str) -> str:
        """Return `target`, or `target`/`name` if `target` is a directory, as for `cp`."""
        return f"{target}/{name}" if await self.is_dir(target) else target

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        target = str(target_dir)
        files = await asyncio.to_thread(self._downloads.host_files, Path(source_dir), target)
        if self.held_uploads is not None:
            self.held_uploads += files
            return
        await self._upload(files, target, directories=[target], directory_mode=None)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        source = shlex.quote(str(source_path))
        with self._downloads.download(str(source_path)) as budget, BoundedFile(budget.size) as received:
            is_whole = await self._download(
                f"test -f {source} && /usr/bin/head -c {budget.size + 1} -- {source}",
                str(source_path),
                received,
            )
            if not is_whole or budget.files <= 0:
                budget.is_whole = False
                reason = (
                    "the limit on the number of files that are downloaded from an environment is reached; "
                    "download fewer files"
                    if budget.files <= 0
                    else "it exceeds the limit on the bytes that are downloaded from an environment, or "
                    f"takes more than {COLLECT_TIMEOUT_S:g} s"
                )
                raise SandboxError(f"cannot download {source_path}: {reason}")
            budget.files -= 1
            budget.size -= received.tell()
            await asyncio.to_thread(write_untrusted_file, received, Path(target_path))

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self.download_dir_with_exclusions(source_dir=source_dir, target_dir=target_dir, exclude=[])

    @override
    async def download_dir_with_exclusions(
        self, *, source_dir: str, target_dir: Path | str, exclude: list[str]
    ) -> None:
        if await self._bubblewrap.path_kind(str(source_dir)) is PathKind.EMPTY_DIRECTORY:
            os.makedirs(target_dir, exist_ok=True)
            return
        patterns = " ".join(f"--exclude={shlex.quote(pattern)}" for pattern in exclude)
        source = shlex.quote(str(source_dir))
        # Root has no capabilities in the sandbox, so tar would leave out files without read permission.
        script = f"""/usr/bin/timeout {MAKE_READABLE_TIMEOUT_S} /usr/bin/find -H {source} \\
                -type d ! -perm -u=rx -exec /usr/bin/chmod -fR u+rX {{}} \\; -o \\
                -type f ! -perm -u=r -exec /usr/bin/chmod -f u+r {{}} +
            cd -- {source} || exit 1
            set --
            for file in {" ".join(REWARD_FILES)}; do
                [ -f "$file" ] && [ ! -L "$file" ] && set -- "$@" "./$file"
            done
            /usr/bin/tar {patterns} --hard-dereference -cf - -- "$@" . |"""
        with self._downloads.download(str(source_dir)) as budget:
            limit = budget.archive_bytes
            with BoundedFile(limit) as received:
                command = f"{script} /usr/bin/head -c {limit + 1}"
                is_whole = await self._download(command, str(source_dir), received)
                if received.tell() == 0:
                    raise SandboxError(f"cannot download {source_dir}: tar returned no data")
                received.seek(0)
                is_whole &= await asyncio.to_thread(
                    unpack, received, Path(target_dir), budget, self._downloads.downloaded
                )
            budget.is_whole = is_whole

    async def _download(self, script: str, source: str, received: BoundedFile) -> bool:
        """Write the output of a script to `received` and return whether the output is complete. The output is
        incomplete if the script times out or if the output exceeds the limit. The agent can cause both, for
        example with large files and with a library in /etc/ld.so.preload.
        """
        try:
            completed = await self._bubblewrap.run(
                script, timeout_s=COLLECT_TIMEOUT_S, stdout=received, shell="sh"
            )
        except CommandTimeout:
            return False
        if completed.status != 0:
            raise SandboxError(
                f"cannot download {source}: {_last_line(completed.stderr) or 'there is no such regular file'}"
            )
        return not received.was_cut

    @property
    def _bubblewrap(self) -> Bubblewrap:
        if self._sandbox is None:
            raise SandboxError("the sandbox was not started")
        return self._sandbox

    @property
    def _workdir(self) -> str:
        return self.task_env_config.workdir or self._plan.workdir

    def _limits(self) -> SandboxLimits:
        defaults = SandboxLimits()
        return SandboxLimits(
            memory_mb=self._effective_memory_mb or defaults.memory_mb,
            storage_mb=self._effective_storage_mb or defaults.storage_mb,
        )

    async def _make_directories(self, directories: Sequence[str]) -> None:
        await self._upload([], "the sandbox", directories=directories)

    async def _run_build_step(self, step: Run) -> None:
        script = command_script(step.script, cwd=step.workdir, environment=step.environment)
        completed = await self._bubblewrap.run(script, shell=step.shell)
        if completed.status != 0:
            reason = (
                _last_line(completed.stderr) or _last_line(completed.stdout) or f"status {completed.status}"
            )
            raise SandboxError(
                f"Dockerfile line {step.line}: RUN failed in the sandbox ({reason}); {USE_DOCKER}"
            )

    async def _upload(
        self,
        files: Sequence[tuple[Path, str]],
        target: str,
        *,
        mode: int | None = None,
        directories: Sequence[str] = (),
        directory_mode: int | None = 0o777,
    ) -> None:
        """Create `directories` and copy host files to absolute paths in the sandbox. The error message of a
        failed copy begins with `target`.

        Regular files get the mode `mode`; None: they keep their modes. If `directory_mode` is None, the modes
        of `directories` are not changed.
        """
        if not files and not directories:
            return
        commands = []
        quoted = " ".join(map(shlex.quote, dict.fromkeys(directories)))
        if directories:
            chmod = f" && chmod {directory_mode:o} {quoted}" if directory_mode is not None else ""
            commands.append(f"{{ mkdir -p {quoted}{chmod}; }} || exit {CANNOT_MAKE_DIRECTORIES}")
        with self.staged_file() as (host_path, inside_path):
            if files:
                await asyncio.to_thread(write_archive, host_path, files, mode)
                commands.append(f"tar -C / --no-same-owner --overwrite -xf {inside_path}")
            completed = await self._bubblewrap.run("\n".join(commands), shell="sh")
        if completed.status == CANNOT_MAKE_DIRECTORIES and directories:
            raise SandboxError(
                f"cannot create {quoted} in the sandbox: {_last_line(completed.stderr)}; {USE_DOCKER}"
            )
        if completed.status != 0:
            raise SandboxError(
                f"{target}: cannot copy files into the sandbox: {_last_line(completed.stderr)}"
            )


def environment_works(status: int, environment: BaseEnvironment) -> bool:
    """Return whether the environment still runs commands, given the exit status of the command `true` in it.

    The agent may have removed `true` or the shell, which gives a status of COMMAND_UNAVAILABLE.
    `docker compose exec` exits with 1 if the container or the daemon has ended. A `SandboxEnvironment` that
    has ended raises SandboxError and returns no status, so every status shows that it works.
    """
    return isinstance(environment, SandboxEnvironment) or status in (0, *COMMAND_UNAVAILABLE)


def command_script(command: str, *, cwd: str, environment: Mapping[str, str]) -> str:
    """Return a shell script that runs `command` in `cwd` with `environment`, without the variables whose
    names a shell cannot export. The script runs in / if the agent removed `cwd`, so that verifiers still run.
    """
    quoted = shlex.quote(cwd)
    lines = [f"cd -- {quoted} 2>/dev/null || cd /"]
    lines += [
        f"export {name}={shlex.quote(value)}"
        for name, value in environment.items()
        if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
    ]
    return "\n".join([*lines, command]) + "\n"


def write_archive(host_path: Path, files: Sequence[tuple[Path, str]], mode: int | None = None) -> None:
    """Write a tar archive to `host_path`. `files` contains host files and their absolute paths in the
    sandbox. The members belong to root. Regular files get the mode `mode`; None: they keep their modes. This
    function blocks its thread.
    """
    with tarfile.open(host_path, "w", format=tarfile.PAX_FORMAT) as archive:
        for source, path in files:
            archive.add(
                source,
                arcname=path.lstrip("/"),
                recursive=False,
                filter=lambda member: _as_root(member, mode),
            )


def _as_root(member: tarfile.TarInfo, mode: int | None) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    if mode is not None and member.isreg():
        member.mode = mode
    return member


def _last_line(output: bytes) -> str:
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""

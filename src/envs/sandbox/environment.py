"""Harbor's environment without a container engine: one bubblewrap sandbox per trial.

It keeps Harbor's contract (exec with cwd, environment, timeout; uploads and downloads) on top of `Bubblewrap`. Differences from Docker:
- The image is the host's own userland, read-only; FROM names nothing that is fetched. `apt-get install` of what is there succeeds.
- A public network, which is also Harbor's default, leads to the internet alone. Where this machine cannot provide one, tasks that do not
  ask for it by name run without network, and the others are refused.
- There is one user, root, without capabilities; it owns everything the task and the agent make.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shlex
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, override

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.models.task.config import EnvironmentConfig, NetworkMode

from src.core.errors import ConfigError, SandboxError
from src.envs.sandbox.bubblewrap import (
    BASE_ENVIRONMENT,
    Bubblewrap,
    CommandTimeout,
    Completed,
    missing_programs,
)
from src.envs.sandbox.dockerfile import USE_DOCKER, Copy, MakeDirectory, Recipe, Run, parse_dockerfile
from src.envs.sandbox.exec_server import PathKind
from src.envs.sandbox.file_copy import (
    COLLECT_TIMEOUT_S,
    REWARD_FILES,
    BoundedFile,
    Collection,
    decoded,
    write_untrusted_file,
)
from src.envs.sandbox.network import why_no_network
from src.envs.sandbox.resource_limits import Limits
from src.envs.sandbox.rootfs import build_rootfs
from src.envs.sandbox.run_directory import run_directory

DEBIAN_LIKE = re.compile(
    r"^(?:docker\.io/)?(?:library/)?(?:debian|ubuntu|buildpack-deps)(?::[\w.-]+)?(?:@sha256:[0-9a-f]+)?$"
)
CANNOT_RUN = (
    126,
    127,
)  # the status of a command that is not there any more, from a shell and from a container's runtime
CANNOT_MAKE_DIRECTORIES = 3  # a status of our own scripts
ROOT_USERS = (None, "root", "0", 0, "root:root", "0:0")

_instances = itertools.count(1)


class SandboxEnvironment(BaseEnvironment):
    """A Harbor environment in a bubblewrap sandbox.

    Options besides Harbor's: `run_label` (whose run directory holds the host files), `network` (public, whatever the task says).
    """

    def __init__(self, *args: Any, run_label: str, network: bool = False, **kwargs: Any) -> None:
        self._run_label = run_label
        self._network_given = network
        self._sandbox: Bubblewrap | None = None
        self._recipe = Recipe(environment={})
        self.held_uploads: list[tuple[Path, str]] | None = None  # host files and their paths inside
        super().__init__(*args, **kwargs)
        self._collection = Collection(self.trial_paths.trial_dir)

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
        return EnvironmentResourceCapabilities(memory_limit=True)

    @classmethod
    @override
    def preflight(cls) -> None:
        if missing := missing_programs():
            raise SandboxError(f"the sandbox needs these packages on this machine: {' '.join(missing)}")

    @override
    def _validate_definition(self) -> None:
        self._recipe = read_recipe(self.environment_dir, self.task_env_config)

    @property
    def shares_network(self) -> bool:
        network = network_of(self.task_env_config, given=self._network_given)
        if network is Network.REFUSED:
            raise SandboxError(f"no public network for the sandbox: {why_no_network()}; {USE_DOCKER}")
        return network is Network.PUBLIC

    @property
    def is_alive(self) -> bool:
        return self._sandbox is not None and self._sandbox.is_alive

    @override
    async def start(self, force_build: bool) -> None:
        run = run_directory(self._run_label)
        name = re.sub(r"[^A-Za-z0-9._-]", "_", self.session_id)[:64]
        self._sandbox = await Bubblewrap.start(
            run / f"{next(_instances)}-{name}",
            skeleton=build_rootfs(run),
            hostname="sandbox",
            share_network=self.shares_network,
            limits=self._limits(),
        )
        await self._build()
        await self._upload_environment_dir_after_start()

    async def _build(self) -> None:
        """The steps of the recipe. Every command starts a shell, so directories are made by the command of the next step."""
        directories = [*self._mount_targets(), self._workdir]
        for step in self._recipe.steps:
            match step:
                case MakeDirectory(path=path):
                    directories.append(path)
                case Copy():
                    await self._unpack(
                        list(step.files),
                        f"Dockerfile line {step.line}",
                        mode=step.mode,
                        directories=directories,
                    )
                    directories = []
                case Run():
                    await self._make_directories(directories)
                    directories = []
                    await self._build_step(step)
        await self._make_directories(directories)

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
        environment = {**self._recipe.environment, **(self._merge_env(env) or {})}
        script = command_script(command, cwd=cwd or self._workdir, environment=environment)
        completed = await self._running.run(script, timeout_s=timeout_sec)
        stdout, stderr = [await decoded(output) for output in (completed.stdout, completed.stderr)]
        if callback := self._output_callback():
            if stdout:
                await callback(stdout, "stdout")
            if stderr:
                await callback(stderr, "stderr")
        return ExecResult(stdout=stdout, stderr=stderr, return_code=completed.status)

    @property
    def environment_variables(self) -> Mapping[str, str]:
        """What every command of the task sees."""
        return {**BASE_ENVIRONMENT, **self._recipe.environment, **(self._merge_env(None) or {})}

    async def kill_processes(self) -> None:
        """End everything the agent left running."""
        await self._running.kill_processes()

    async def run_script(self, script: str, *, timeout_s: float, stdout: BinaryIO | None = None) -> Completed:
        """Run a script that is not the task's own, with the system's programs and none of the task's environment variables."""
        return await self._running.run(
            f"export PATH=/usr/sbin:/usr/bin:/sbin:/bin\n{script}",
            timeout_s=timeout_s,
            stdout=stdout,
            shell="sh",
        )

    def hold_uploads(self) -> None:
        """From here on `upload_dir` changes nothing inside, and `held_uploads` lists the files."""
        self.held_uploads = []

    @override
    async def is_dir(self, path: str, user: str | int | None = None) -> bool:
        if not path.startswith("/"):
            return await super().is_dir(path, user)
        return await self._running.kind_of(path) in (PathKind.EMPTY_DIRECTORY, PathKind.DIRECTORY)

    @contextmanager
    def handed_in(self) -> Iterator[tuple[Path, str]]:
        """A place for a file to hand in while the block lasts: its path on the host and, read-only, inside."""
        host_path, inside_path = self._running.put(f"{next(_instances)}.in")
        try:
            yield host_path, inside_path
        finally:
            host_path.unlink(missing_ok=True)

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = str(target_path)
        name = Path(source_path).name
        place = f"{target.rstrip('/')}/{name}" if target.endswith("/") else target
        await self._unpack([(Path(source_path), place)], place, directory_wins=name)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        target = str(target_dir)
        files = await asyncio.to_thread(self._collection.made_here, Path(source_dir), target)
        if self.held_uploads is not None:
            self.held_uploads += files
            return
        await self._unpack(files, target, directories=[target], directory_mode=None)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        source = shlex.quote(str(source_path))
        given = self._collection.allowance(str(source_path))
        left = replace(given)
        with BoundedFile(given.size) as received:
            is_whole = await self._receive(
                f"test -f {source} && /usr/bin/head -c {given.size + 1} -- {source}",
                str(source_path),
                received,
            )
            if not is_whole or given.files <= 0:
                self._collection.take(str(source_path), given, given, is_whole=False)
                raise SandboxError(
                    f"cannot download {source_path}: it is larger than what may be collected of one trial"
                )
            left.files -= 1
            left.size -= received.tell()
            self._collection.take(str(source_path), given, left, is_whole=True)
            await asyncio.to_thread(write_untrusted_file, received, Path(target_path))

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._download_dir(source_dir, target_dir)

    @override
    async def download_dir_with_exclusions(
        self, *, source_dir: str, target_dir: Path | str, exclude: list[str]
    ) -> None:
        await self._download_dir(source_dir, target_dir, exclude=exclude)

    async def _download_dir(
        self, source_dir: str, target_dir: Path | str, *, exclude: Sequence[str] = ()
    ) -> None:
        if await self._running.kind_of(str(source_dir)) is PathKind.EMPTY_DIRECTORY:
            os.makedirs(target_dir, exist_ok=True)
            return
        given = self._collection.allowance(str(source_dir))
        left = replace(given)
        patterns = " ".join(f"--exclude={shlex.quote(pattern)}" for pattern in exclude)
        script = f"""cd -- {shlex.quote(str(source_dir))} || exit 1
            set --
            for file in {" ".join(REWARD_FILES)}; do [ -f "$file" ] && [ ! -L "$file" ] && set -- "$@" "./$file"; done
            /usr/bin/tar {patterns} --hard-dereference -cf - -- "$@" . | /usr/bin/head -c {given.archive_bytes + 1}"""
        with BoundedFile(given.archive_bytes) as received:
            is_whole = await self._receive(script, str(source_dir), received)
            if received.tell() == 0:
                raise SandboxError(f"cannot download {source_dir}: no such directory")
            received.seek(0)
            is_whole &= await asyncio.to_thread(self._collection.unpack, received, Path(target_dir), left)
        self._collection.take(str(source_dir), given, left, is_whole=is_whole)

    async def _receive(self, script: str, source: str, received: BoundedFile) -> bool:
        """The output of a command goes to `received`; whether all of it is there. The agent may have replaced the programs."""
        try:
            completed = await self._running.run(
                script, timeout_s=COLLECT_TIMEOUT_S, stdout=received, shell="sh"
            )
        except CommandTimeout:
            return False
        if completed.status != 0:
            raise SandboxError(f"cannot download {source}: {_last_line(completed.stderr) or 'not there'}")
        return not received.was_cut

    @property
    def _running(self) -> Bubblewrap:
        if self._sandbox is None:
            raise SandboxError("the sandbox was not started")
        return self._sandbox

    @property
    def _workdir(self) -> str:
        return self.task_env_config.workdir or self._recipe.workdir

    def _limits(self) -> Limits:
        defaults = Limits()
        return Limits(
            memory_mb=self._effective_memory_mb or defaults.memory_mb,
            storage_mb=self._effective_storage_mb or defaults.storage_mb,
        )

    async def _make_directories(self, directories: Sequence[str]) -> None:
        await self._unpack([], "the sandbox", directories=directories)

    async def _build_step(self, step: Run) -> None:
        script = command_script(step.script, cwd=step.workdir, environment=step.environment)
        completed = await self._running.run(script)
        if completed.status != 0:
            reason = (
                _last_line(completed.stderr) or _last_line(completed.stdout) or f"status {completed.status}"
            )
            raise SandboxError(
                f"Dockerfile line {step.line}: RUN failed in the sandbox ({reason}); {USE_DOCKER}"
            )

    async def _unpack(
        self,
        files: Sequence[tuple[Path, str]],
        what: str,
        *,
        mode: int | None = None,
        directory_wins: str | None = None,
        directories: Sequence[str] = (),
        directory_mode: int | None = 0o777,
    ) -> None:
        """Make `directories` and copy host files to absolute paths inside. With `directory_wins`, a single file goes into `what` if that
        is a directory."""
        if not files and not directories:
            return
        commands = []
        quoted = " ".join(map(shlex.quote, dict.fromkeys(directories)))
        if directories:
            chmod = f" && chmod {directory_mode:o} {quoted}" if directory_mode is not None else ""
            commands.append(f"{{ mkdir -p {quoted}{chmod}; }} || exit {CANNOT_MAKE_DIRECTORIES}")
        host_path, inside_path = self._running.put(f"{next(_instances)}.tar")
        try:
            if files:
                await asyncio.to_thread(write_archive, host_path, files, mode)
                commands.append(_unpacking(inside_path, what, directory_wins))
            completed = await self._running.run("\n".join(commands), shell="sh")
        finally:
            host_path.unlink(missing_ok=True)
        if completed.status == CANNOT_MAKE_DIRECTORIES and directories:
            raise SandboxError(
                f"cannot make {quoted} in the sandbox: {_last_line(completed.stderr)}; {USE_DOCKER}"
            )
        if completed.status != 0:
            raise SandboxError(f"cannot upload to {what}: {_last_line(completed.stderr)}")


def _unpacking(archive: str, what: str, directory_wins: str | None) -> str:
    script = f"tar -C / --no-same-owner --overwrite -xf {archive}"
    if directory_wins is None:
        return script
    place, name = shlex.quote(what), shlex.quote(directory_wins)
    return f'if [ -d {place} ]; then tar -xOf {archive} > {place}/{name}; else mkdir -p "$(dirname {place})" && {script}; fi'


def is_infrastructure_failure(status: int, environment: BaseEnvironment) -> bool:
    """Whether the status of `true` came from the machine itself. `docker compose exec` also ends with 1 where the container or the daemon
    is gone; our own sandbox raises SandboxError then."""
    return isinstance(environment, SandboxEnvironment) or status in (0, *CANNOT_RUN)


class Network(StrEnum):
    """What network a task's sandbox has."""

    PUBLIC = "public"
    OFF = "off"  # the task asks for none
    LACKING = "lacking"  # Harbor's default is public, this machine has none to give, and the task does not ask for it by name
    REFUSED = "refused"  # as before, and the task or the user does ask for it


def network_of(config: EnvironmentConfig, *, given: bool) -> Network:
    """The network of a task, as its task.toml says, or `network=true` where that is `given`."""
    if (config.network_mode != NetworkMode.PUBLIC or config.allow_internet is False) and not given:
        return Network.OFF
    if why_no_network() is None:
        return Network.PUBLIC
    # Harbor turns allow_internet into network_mode, and sets the old field to None in every configuration.
    is_asked_for = given or "network_mode" in config.model_fields_set or config.allow_internet is True
    return Network.REFUSED if is_asked_for else Network.LACKING


def read_recipe(environment_dir: Path, config: EnvironmentConfig) -> Recipe:
    """What to build for a task. ConfigError when the sandbox cannot stand in for its image."""
    if (environment_dir / "docker-compose.yaml").exists():
        raise ConfigError(
            f"{environment_dir}/docker-compose.yaml: the sandbox cannot run several services; {USE_DOCKER}"
        )
    dockerfile = environment_dir / "Dockerfile"
    if dockerfile.is_file():
        return parse_dockerfile(dockerfile)
    if config.docker_image is None:
        raise ConfigError(
            f"{environment_dir}: no Dockerfile and no [environment].docker_image; add one of them"
        )
    if not DEBIAN_LIKE.match(config.docker_image):
        raise ConfigError(
            f"{environment_dir.parent}: the sandbox cannot stand in for the image {config.docker_image}; {USE_DOCKER}"
        )
    return Recipe(environment={})


def command_script(command: str, *, cwd: str, environment: Mapping[str, str]) -> str:
    """A bash script that runs `command` there, with that environment. A directory the agent removed must not disable the verifier."""
    quoted = shlex.quote(cwd)
    lines = [f"cd -- {quoted} 2>/dev/null || cd /"]
    lines += [
        f"export {name}={shlex.quote(value)}"
        for name, value in environment.items()
        if re.fullmatch(r"[A-Za-z_]\w*", name)
    ]
    return "\n".join([*lines, command]) + "\n"


def write_archive(host_path: Path, files: Sequence[tuple[Path, str]], mode: int | None = None) -> None:
    """A tar archive of host files at absolute paths inside, all of them root's."""
    with tarfile.open(host_path, "w", format=tarfile.PAX_FORMAT) as archive:
        for source, place in files:
            archive.add(
                source,
                arcname=place.lstrip("/"),
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

"""Tests which files of a container are exported, and the removal of files, with fake containers."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from docker.errors import NotFound

from src.core.errors import AgentFault, SandboxError
from src.core.trajectory import ZeroReason
from src.envs.harbor import carried_files
from src.envs.harbor.carried_files import FileChanges
from src.envs.harbor.docker_files import ADDED, GO_MODE_DIRECTORY, MODIFIED, DockerFiles

FORMATS = {"pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}


def client_of(changes: Sequence[tuple[str, int | None]]) -> SimpleNamespace:
    """Return a Docker client whose engine reports these changes of a container."""
    listing = [{"Path": path, "Kind": kind} for path, kind in changes if kind is not None]

    def get(url: str, *, stream: bool, timeout: int) -> contextlib.nullcontext[SimpleNamespace]:
        assert (url, stream) == ("engine/v1.41/containers/c/changes", True)
        data = json.dumps(listing or None).encode()
        response = SimpleNamespace(raise_for_status=lambda: None, iter_content=lambda size: iter([data]))
        return contextlib.nullcontext(response)

    return SimpleNamespace(api=SimpleNamespace(base_url="engine", api_version="1.41", timeout=1, get=get))


class FakeContainer:
    """A container whose engine reports the directory `path` of the image as modified.

    The directory contains one unchanged file.
    """

    def __init__(self, path: str, *, tar_format: int, headers: Mapping[str, str], chunk_size: int) -> None:
        self.id, self.client = "c", client_of([(path, MODIFIED)])
        self.attrs = {"Config": {"Env": []}, "Mounts": []}
        self._path = path
        self._tar_format = tar_format
        self._headers = headers
        self._chunk_size = chunk_size

    def get_archive(self, path: str) -> tuple[Iterator[bytes], dict[str, object]]:
        assert path == self._path
        name = path.rpartition("/")[2]
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=self._tar_format) as archive:
            directory = tarfile.TarInfo(name)
            directory.type, directory.mode = tarfile.DIRTYPE, 0o755
            directory.pax_headers = dict(self._headers)
            archive.addfile(directory)
            unchanged = tarfile.TarInfo(f"{name}/unchanged")
            unchanged.size = 2000
            archive.addfile(unchanged, io.BytesIO(bytes(2000)))
        data = packed.getvalue()
        chunks = (data[start : start + self._chunk_size] for start in range(0, len(data), self._chunk_size))
        return chunks, {"mode": GO_MODE_DIRECTORY | 0o755}


async def export(
    monkeypatch: pytest.MonkeyPatch, container: object
) -> tuple[FileChanges, list[tarfile.TarInfo]]:
    """Return the changes that `DockerFiles` exports from the container, and the members of the archive."""
    monkeypatch.setattr("src.envs.harbor.docker_files.engine", lambda timeout_s: contextlib.nullcontext(None))
    monkeypatch.setattr("src.envs.harbor.docker_files.find_container", lambda *arguments: container)
    exported = io.BytesIO()
    changes = await DockerFiles(cast(Any, SimpleNamespace(session_id="s")), {}).export(exported)
    exported.seek(0)
    with tarfile.open(fileobj=exported) as archive:
        return changes, archive.getmembers()


@pytest.mark.parametrize("chunk_size", [100, 512, 2**20])
@pytest.mark.parametrize("tar_format", FORMATS)
@pytest.mark.parametrize(
    ("name", "headers"),
    [("plain", {}), ("größe", {}), ("n" * 120, {}), ("dated", {"mtime": "1.5"})],
    ids=["plain", "non-ascii", "long", "dated"],
)
async def test_a_modified_directory_is_exported_without_its_files(
    monkeypatch: pytest.MonkeyPatch, name: str, headers: Mapping[str, str], tar_format: str, chunk_size: int
) -> None:
    container = FakeContainer(
        f"/app/{name}", tar_format=FORMATS[tar_format], headers=headers, chunk_size=chunk_size
    )
    changes, members = await export(monkeypatch, container)
    assert [(member.name, member.isdir(), member.mode) for member in members] == [
        (f"app/{name}", True, 0o755)
    ]
    assert list(changes.carried) == [f"/app/{name}"]


class TreeContainer:
    """A container with the files and directories in `kinds`: path -> ADDED, MODIFIED or None (unchanged).

    A file has 600 bytes. A file whose path contains `link` is a hard link to /app/unchanged in archives of a
    directory above it.
    """

    def __init__(self, kinds: Mapping[str, int | None]) -> None:
        self.attrs = {"Config": {"Env": []}, "Mounts": []}
        self.id = "c"
        self.exec_error = b""  # the output of each command, in place of running it
        self.requests: list[str] = []
        self._kinds = kinds

    def exec_run(self, command: list[str], *, user: str, stderr: bool) -> SimpleNamespace:
        """Run a script that reads search paths on this machine."""
        if self.exec_error:
            return SimpleNamespace(output=self.exec_error)
        return SimpleNamespace(output=subprocess.run(command, capture_output=True).stdout)

    @property
    def client(self) -> SimpleNamespace:
        return client_of(list(self._kinds.items()))

    def get_archive(self, path: str) -> tuple[Iterator[bytes], dict[str, object]]:
        self.requests.append(path)
        if path not in self._kinds:
            raise NotFound(path)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for file in sorted(self._kinds):
                if file != path and not file.startswith(f"{path}/"):
                    continue
                member = tarfile.TarInfo(file.removeprefix(path.rpartition("/")[0]).lstrip("/"))
                if any(other.startswith(f"{file}/") for other in self._kinds):
                    member.type, member.mode = tarfile.DIRTYPE, 0o755
                elif "link" in file and file != path:
                    member.type, member.linkname = tarfile.LNKTYPE, "app/unchanged"
                else:
                    member.size = 600
                archive.addfile(member, io.BytesIO(bytes(member.size)))
        is_directory = any(other.startswith(f"{path}/") for other in self._kinds)
        return (data for data in [packed.getvalue()]), {"mode": GO_MODE_DIRECTORY if is_directory else 0}


@pytest.mark.parametrize("is_large", [False, True])
async def test_many_files_of_a_directory_need_few_requests(
    monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    changed = {"/app/tree": ADDED, "/app/tree/a": ADDED, "/app/z-link": ADDED, "/app/old": MODIFIED}
    changed |= {f"/app/sub/{number}": ADDED for number in range(60)} | {
        "/app": MODIFIED,
        "/app/sub": MODIFIED,
    }
    unchanged = dict.fromkeys(["/app/unchanged", "/app/sub/x", *(f"/app/x{number}" for number in range(20))])
    container = TreeContainer({**changed, **unchanged})
    if is_large:
        monkeypatch.setattr("src.envs.harbor.docker_files.MAX_DIRECTORY_BYTES", 110_000)
    _, members = await export(monkeypatch, container)
    assert sorted(f"/{member.name}" for member in members) == sorted(changed)
    assert container.requests == (
        ["/app", "/app", "/app/old", "/app/sub", "/app/tree", "/app/z-link"] if is_large else ["/app"]
    )


async def test_programs_beside_a_python_of_the_image_are_not_exported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = dict.fromkeys(["/opt/venv", "/opt/venv/bin/python3", "/app/unchanged"])
    programs = {"/opt/venv/bin/activate": MODIFIED, "/opt/venv/lib/libz.so.1": ADDED}
    own = {"/app/venv": ADDED, "/app/venv/bin/python3": ADDED, "/app/venv/bin/activate": ADDED}
    other = {"/opt/tool": MODIFIED, "/opt/tool/bin/activate": MODIFIED}
    container = TreeContainer({**image, **programs, **own, **other})
    _, members = await export(monkeypatch, container)
    assert sorted(f"/{member.name}" for member in members) == sorted([*own, *other])


async def test_modules_of_the_image_are_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The export must not take minutes, although each file has about 1900 parent directories."""
    deep = f"/app/lib/site-packages/{'a/' * 1900}"
    image = {"/app": MODIFIED, "/app/lib": MODIFIED, "/app/lib/site-packages": MODIFIED}
    own = {path: ADDED for path in ("/app/new", "/app/new/site-packages", "/app/new/site-packages/a.py")}
    container = TreeContainer({**image, **own, **{f"{deep}{number}": ADDED for number in range(400)}})
    started = time.monotonic()
    _, members = await export(monkeypatch, container)
    assert time.monotonic() - started < 15
    assert sorted(f"/{member.name}" for member in members) == ["/app", "/app/lib", *own]


async def test_many_prefixes_of_programs_need_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {f"/app/{number}/pyvenv.cfg": ADDED for number in range(201)} | {"/app": MODIFIED}
    container = TreeContainer(kinds)
    _, members = await export(monkeypatch, container)
    assert (container.requests, [member.name for member in members]) == (["/app"], ["app"])


async def test_too_many_requests_of_an_export_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("src.envs.harbor.docker_files.MAX_EXPORT_REQUESTS", 3)
    paths = [f"/app/file-{number}" for number in range(4)]
    await export(monkeypatch, TreeContainer(dict.fromkeys(paths[:3], ADDED)))
    with pytest.raises(AgentFault, match="need more than 3 requests") as error:
        await export(monkeypatch, TreeContainer(dict.fromkeys(paths, ADDED)))
    assert error.value.reason is ZeroReason.FILES_TOO_LARGE


async def test_a_long_list_of_changed_files_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("src.envs.harbor.docker_files.MAX_LISTING_BYTES", 1000)
    with pytest.raises(AgentFault, match="the list of the files") as error:
        await export(monkeypatch, TreeContainer({f"/app/{'x' * 1000}": ADDED}))
    assert error.value.reason is ZeroReason.FILES_TOO_LARGE


async def test_a_volume_of_the_image_is_exported_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/data": None, "/data/old": None, "/data/.hidden": None, "/root": None, "/root/a": None}
    container = TreeContainer(files)
    container.attrs["Mounts"] = [
        {"Type": "volume", "Destination": "/data"},
        {"Type": "volume", "Destination": "/root"},
        {"Type": "bind", "Destination": "/mnt"},
    ]
    changes, members = await export(monkeypatch, container)
    assert sorted(f"/{member.name}" for member in members) == sorted(files)
    # /root is not emptied, because this would delete hidden files of the image, which are not carried over.
    assert changes.emptied == ["/data"]
    commands = await commands_of_unpack(monkeypatch, FileChanges(emptied=changes.emptied))
    assert commands == [("root", ["find", "/data", "-mindepth", "1", "-delete"])]


async def test_the_contents_of_volumes_do_not_count_as_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the volumes of the image alone exceed a limit, the trial fails before the agent acts."""
    files: dict[str, int | None] = dict.fromkeys(["/data", "/data/a", "/data/b"])
    container = TreeContainer(files)
    container.attrs["Mounts"] = [{"Type": "volume", "Destination": "/data"}]
    monkeypatch.setattr("src.envs.harbor.docker_files.engine", lambda timeout_s: contextlib.nullcontext(None))
    monkeypatch.setattr("src.envs.harbor.docker_files.find_container", lambda *arguments: container)
    environment = SimpleNamespace(session_id="s", task_env_config=SimpleNamespace(workdir=None))
    docker_files = DockerFiles(cast(Any, environment), {})
    monkeypatch.setattr(carried_files, "MAX_MEMBERS", 3)
    await docker_files.snapshot()
    files |= dict.fromkeys(["/data/c", "/data/d", "/data/e"])
    await docker_files.export(io.BytesIO())
    files["/data/f"] = None
    with pytest.raises(AgentFault, match="at most 3 are graded"):
        await docker_files.export(io.BytesIO())
    with pytest.raises(SandboxError, match="the volumes /data of the image are too large"):
        await docker_files.snapshot()


async def test_files_that_are_not_carried_over_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    # The limit of an export is 2 * MAX_BYTES. Each of the archives, one for each file, has 10,240 bytes.
    monkeypatch.setattr("src.envs.harbor.docker_files.MAX_BYTES", 16_000)
    paths = [f"/app/link-{number}" for number in range(4)]
    await export(monkeypatch, TreeContainer(dict.fromkeys(paths[:3], ADDED)))
    with pytest.raises(
        AgentFault, match="link-3 and other files that the agent changed have more than 32000"
    ):
        await export(monkeypatch, TreeContainer(dict.fromkeys(paths, ADDED)))


async def commands_of_unpack(
    monkeypatch: pytest.MonkeyPatch, changes: FileChanges, exit_code: int = 0, output: bytes = b""
) -> list[object]:
    """Apply changes to a fresh container, and return the commands that are run in it.

    Each command ends with this exit code and output.
    """
    commands: list[object] = []

    def run(command: list[str], *, user: str) -> SimpleNamespace:
        commands.append((user, command))
        return SimpleNamespace(exit_code=exit_code, output=output)

    container = SimpleNamespace(exec_run=run)
    monkeypatch.setattr("src.envs.harbor.docker_files.engine", lambda timeout_s: contextlib.nullcontext(None))
    monkeypatch.setattr("src.envs.harbor.docker_files.find_container", lambda *arguments: container)
    fresh = cast(Any, SimpleNamespace(session_id="s"))
    await DockerFiles(fresh, {}).unpack(fresh, io.BytesIO(), changes)
    return commands


@pytest.mark.parametrize("output", [b"\0", b"OCI runtime exec failed: context deadline exceeded"])
async def test_search_paths_that_were_not_read_completely_are_an_error(
    output: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = TreeContainer({})
    container.exec_error = output
    monkeypatch.setattr("src.envs.harbor.docker_files.engine", lambda timeout_s: contextlib.nullcontext(None))
    monkeypatch.setattr("src.envs.harbor.docker_files.find_container", lambda *arguments: container)
    environment = cast(Any, SimpleNamespace(session_id="s", task_env_config=SimpleNamespace(workdir=None)))
    with pytest.raises(SandboxError, match="not be read completely"):
        await DockerFiles(environment, {}).snapshot()


async def test_removed_files_are_removed_in_a_fresh_container(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = await commands_of_unpack(monkeypatch, FileChanges(removed=["/app/old"]))
    assert commands == [("root", ["rm", "-rf", "--", "/app/old"])]


async def test_a_failed_removal_in_a_container_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "rm: cannot remove '/app/old': Operation not permitted"
    with pytest.raises(AgentFault, match=message) as error:
        await commands_of_unpack(monkeypatch, FileChanges(removed=["/app/old"]), 1, f"{message}\n".encode())
    assert error.value.reason is ZeroReason.FILES_UNREADABLE

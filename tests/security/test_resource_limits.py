"""Memory, processes and files of a sandbox are limited, also for root."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from src.envs.sandbox import launch
from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.envs.sandbox.resource_limits import (
    CgroupParents,
    SandboxLimits,
    cgroup_parents,
    possible_parents,
    remove_cgroups,
)
from src.envs.sandbox.sandbox_directory import remove_ended_runs
from tests.security.sandboxes import PYTHON, sandbox

REASON = why_no_sandbox()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no sandbox here: {REASON}")
needs_python = pytest.mark.skipif(
    not Path(PYTHON).exists(), reason=f"the attack is a Python program, and {PYTHON} is missing"
)
needs_cgroup = pytest.mark.skipif(cgroup_parents() is None, reason="no cgroup can be created here")


@needs_python
async def test_processes_are_limited() -> None:
    script = """
import os, time
count = 0
try:
    while count < 400:
        if os.fork() == 0:
            time.sleep(1000)
        count += 1
except OSError:
    pass
print(count < 100)
"""
    async with sandbox(limits=SandboxLimits(processes=100)) as bubblewrap:
        assert (await bubblewrap.run(f"{PYTHON} - <<'E'\n{script}\nE")).stdout == b"True\n"
        await bubblewrap.kill_processes()
        assert (await bubblewrap.run("echo on")).stdout == b"on\n"


async def test_a_command_over_the_process_limit_has_status_126() -> None:
    async with sandbox(limits=SandboxLimits(processes=3)) as bubblewrap:
        commands = [asyncio.create_task(bubblewrap.run("exec sleep 1000")) for _ in range(4)]
        finished, waiting = await asyncio.wait(commands, return_when=asyncio.FIRST_COMPLETED)
        refused = finished.pop().result()
        assert refused.status == 126 and refused.stderr.startswith(b"cannot start a command: ")
        assert waiting
        await bubblewrap.kill_processes()
        assert {(await command).status for command in commands} == {126, 137}


@needs_python
@pytest.mark.parametrize("kind", ["MAP_SHARED", "MAP_PRIVATE"])
async def test_one_mapping_cannot_exceed_the_memory_limit(kind: str) -> None:
    script = f"""
import mmap
memory = mmap.mmap(-1, 900 << 20, flags=mmap.{kind} | mmap.MAP_ANONYMOUS)
for page in range(0, 900 << 20, 4096):
    memory[page] = 1
print("wrote 900 MiB")
"""
    async with sandbox(limits=SandboxLimits(memory_mb=512)) as bubblewrap:
        result = await bubblewrap.run(f"{PYTHON} - <<'E'\n{script}\nE")
        assert result.status != 0 and result.stdout == b""
        assert (await bubblewrap.run("echo on")).stdout == b"on\n"


@needs_python
@needs_cgroup
@pytest.mark.parametrize("kind", ["MAP_SHARED", "MAP_PRIVATE"])
async def test_all_processes_together_cannot_exceed_the_memory_limit(kind: str) -> None:
    script = f"""
import mmap, os, signal
children = []
for _ in range(6):
    read, write = os.pipe()
    children.append(os.fork())
    if children[-1] == 0:
        memory = mmap.mmap(-1, 64 << 20, flags=mmap.{kind} | mmap.MAP_ANONYMOUS)
        for page in range(0, 64 << 20, 4096):
            memory[page] = 1
        os.write(write, b"1")
        signal.pause()
    os.close(write)
    os.read(read, 1)
    os.close(read)
print(sum(os.waitpid(child, os.WNOHANG)[0] == 0 for child in children))
"""
    async with sandbox(limits=SandboxLimits(memory_mb=192, storage_mb=64)) as bubblewrap:
        result = await bubblewrap.run(f"{PYTHON} - <<'E'\n{script}\nE")
        assert result.status == 137 or int(result.stdout) < 4, (
            "more than three children with 64 MiB each are alive"
        )
        assert (await bubblewrap.run("echo on")).stdout == b"on\n"


@needs_cgroup
async def test_a_full_file_system_does_not_end_the_sandbox() -> None:
    async with sandbox(limits=SandboxLimits(memory_mb=256, storage_mb=4096)) as bubblewrap:
        fill_script = "for directory in /tmp /usr/local /dev/shm; do "
        fill_script += "head -c 2000000000 /dev/zero >$directory/big; echo $?; done"
        assert (await bubblewrap.run(fill_script)).stdout == b"1\n1\n1\n"
        assert (await bubblewrap.run("rm /tmp/big /usr/local/big /dev/shm/big; echo on")).stdout == b"on\n"


def test_the_file_systems_of_a_sandbox_share_its_storage() -> None:
    assert sum(SandboxLimits(memory_mb=8192, storage_mb=1024).tmpfs_sizes_mb.values()) == 1024
    assert sum(SandboxLimits(memory_mb=512, storage_mb=4096).tmpfs_sizes_mb.values()) == 384


async def test_the_oom_killer_prefers_commands_to_the_exec_server() -> None:
    async with sandbox() as bubblewrap:
        assert (
            await bubblewrap.run("cat /proc/self/oom_score_adj /proc/1/oom_score_adj")
        ).stdout == b"500\n0\n"


async def test_open_files_and_core_files_are_limited() -> None:
    async with sandbox() as bubblewrap:
        assert (await bubblewrap.run("ulimit -Hn; ulimit -Hc")).stdout == b"4096\n0\n"
        assert (await bubblewrap.run("ulimit -n 100000")).status != 0


@needs_cgroup
async def test_the_cgroups_of_a_sandbox_are_removed_with_it() -> None:
    parents = cgroup_parents()
    assert parents is not None

    def cgroups() -> set[Path]:
        return {
            cgroup
            for parent in parents.directories
            for cgroup in parent.glob(f"agent-trainer-security-{os.getpid()}-*")
        }

    async with sandbox():
        assert len(cgroups()) == len(parents.directories)
    assert cgroups() == set()


async def test_files_are_removed_after_the_last_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch, "CGROUP_WAITS_S", (0.0, 0.0))
    directory = tmp_path / "run" / "sandbox"
    prepared = launch.Launch(
        directory, skeleton=tmp_path, hostname="h", has_network=False, limits=SandboxLimits()
    )
    attempts = iter([False, False])
    monkeypatch.setattr(
        launch, "remove_cgroups", lambda sandbox: next(attempts, True) and remove_cgroups(sandbox)
    )
    await prepared.clean_up_when_empty()
    assert not directory.exists()
    assert "have not ended yet" not in caplog.text


@needs_cgroup
def test_the_next_run_removes_the_cgroups_of_an_ended_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the root that the user's trainers share, a trainer that starts now could remove the directory first.
    monkeypatch.setattr("src.envs.sandbox.sandbox_directory.root_directory", lambda: tmp_path)
    parents = cgroup_parents()
    assert parents is not None
    ended_run = tmp_path / f"ended-{os.getpid()}"
    sandbox_directory = ended_run / "1-trial"
    sandbox_directory.mkdir(parents=True)
    cgroups = parents.create(sandbox_directory, SandboxLimits())
    assert all(cgroup.is_dir() for cgroup in cgroups)
    remove_ended_runs()
    assert not any(cgroup.exists() for cgroup in cgroups)
    assert not ended_run.exists()


def test_cgroup_v2_limits_memory_swap_and_processes(tmp_path: Path) -> None:
    parent = tmp_path / "delegated"
    cgroup = parent / "agent-trainer-run-1"
    parents = CgroupParents(version=2, directories=(parent,))
    cgroup.mkdir(parents=True)
    sandbox_directory = tmp_path / "run" / "1"
    sandbox_directory.mkdir(parents=True)
    with pytest.raises(FileExistsError):  # a cgroup with this name exists
        parents.create(sandbox_directory, SandboxLimits())
    for file in ("memory.max", "memory.swap.max", "pids.max"):
        (cgroup / file).touch()

    class ExistingDirectory(type(cgroup)):  # the kernel creates the files with the directory
        def mkdir(self, *args: object, **kwargs: object) -> None:
            pass

    parents = CgroupParents(version=2, directories=(ExistingDirectory(parent),))
    parents.create(sandbox_directory, SandboxLimits(processes=7, memory_mb=3))
    written = {path.name: path.read_text() for path in cgroup.iterdir()}
    assert written == {"memory.max": str(3 * 2**20), "memory.swap.max": "0", "pids.max": "7"}
    assert remove_cgroups(sandbox_directory) is False, "a cgroup that cannot be removed stays recorded"
    assert (sandbox_directory / "cgroups").exists()


def cgroup_v2(directory: Path, *, enabled: str, processes: str = "") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in (
        ("cgroup.procs", processes),
        ("cgroup.controllers", "cpu memory pids"),
        ("cgroup.subtree_control", enabled),
        ("cgroup.type", "domain"),
    ):
        (directory / file).write_text(text)
    return directory


def test_cgroup_v2_is_preferred_to_v1(tmp_path: Path) -> None:
    """The trainer's cgroup has processes, and therefore cannot have children with controllers. The cgroups of
    sandboxes are siblings of the trainer's cgroup.
    """
    mount_point = cgroup_v2(tmp_path / "unified", enabled="")
    (mount_point / "cgroup.type").unlink()  # as in the root of the hierarchy
    slice_ = cgroup_v2(mount_point / "user.slice" / "app.slice", enabled="memory pids")
    cgroup_v2(slice_ / "trainer.scope", enabled="", processes="1\n")
    for controller in ("memory", "pids"):
        (tmp_path / controller / "job").mkdir(parents=True)
    mountinfo = (
        f"30 20 0:25 / {mount_point} rw - cgroup2 cgroup2 rw\n"
        f"31 20 0:26 / {tmp_path}/memory rw - cgroup cgroup rw,memory\n"
        f"32 20 0:27 / {tmp_path}/pids rw - cgroup cgroup rw,pids\n"
    )
    memberships = "8:pids:/job\n4:memory:/job\n0::/user.slice/app.slice/trainer.scope\n"
    first, *_, last = possible_parents(mountinfo, memberships)
    assert first == CgroupParents(version=2, directories=(slice_,))
    assert last == CgroupParents(
        version=1, directories=(tmp_path / "memory" / "job", tmp_path / "pids" / "job")
    )
    assert list(possible_parents("", "0::/\n")) == []

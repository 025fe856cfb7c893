"""Downloads of an agent's files stay within the limits, do not block the event loop and do not change the
reward.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import tarfile
import time
from pathlib import Path

import pytest

from src.config import TrainerConfig
from src.core.event_loop import LagMeter
from src.core.trajectory import Trajectory
from src.envs.harbor import trial_directory
from src.envs.harbor.environment import HarborTasks, open_harbor
from src.envs.harbor.trial_directory import JobsQuota, apply_limits
from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.envs.sandbox.file_copy import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_FILES,
    NOTE_FILE,
    BoundedFile,
    ChunkReader,
    DownloadBudget,
    unpack,
)
from tests.fakes.scripted_policy import ScriptedPolicy, answer, solving
from tests.fakes.tokenizer import byte_chat
from tests.security.sandboxes import environment

REASON = why_no_sandbox()
needs_sandbox = pytest.mark.skipif(REASON is not None, reason=f"no sandbox here: {REASON}")

HELLO = Path(__file__).resolve().parents[1] / "tasks" / "hello-file"
# This limit exceeds the lag that other processes cause, and is below the lag of unpacking 20,000 files on the
# event loop.
MAX_LAG_S = 5.0


def everything_below(directory: Path) -> list[Path]:
    return [
        Path(parent, name)
        for parent, directories, files in os.walk(directory)
        for name in (*directories, *files)
    ]


def size_of(directory: Path) -> int:
    """Return the disk space of all entries in bytes."""
    return sum(path.lstat().st_blocks * 512 for path in everything_below(directory))


def archive(*members: tuple[str, bytes | tarfile.TarInfo | None]) -> io.BytesIO:
    """Return a tar file. The content of a member is bytes for a file, None for a directory, or a TarInfo."""
    archive_file = io.BytesIO()
    with tarfile.open(fileobj=archive_file, mode="w") as tar:
        for name, content in members:
            member = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            if content is None:
                member.type = tarfile.DIRTYPE
            data = content if isinstance(content, bytes) else b""
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    archive_file.seek(0)
    return archive_file


def link(name: str, target: str) -> tuple[str, tarfile.TarInfo]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return name, member


def test_an_archive_is_unpacked_within_its_budget(tmp_path: Path) -> None:
    files = [(f"f{number}", b"x" * 10) for number in range(100)]
    budget = DownloadBudget(files=30, size=1000)
    assert not unpack(archive(*files), tmp_path / "few", budget)
    assert len(everything_below(tmp_path / "few")) == 30 and budget == DownloadBudget(files=0, size=700)
    assert not unpack(archive(*files), tmp_path / "small", DownloadBudget(files=1000, size=55))
    assert sum(path.stat().st_size for path in everything_below(tmp_path / "small")) == 55
    assert (tmp_path / "small" / "f5.cut").is_file() and not (tmp_path / "small" / "f5").exists()
    assert unpack(archive(*files), tmp_path / "all", DownloadBudget())
    assert len(everything_below(tmp_path / "all")) == 100


def test_a_full_host_is_an_error_and_no_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, mode: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("reward.txt"))
    archive.seek(0)
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left"):
        unpack(archive, tmp_path, DownloadBudget())


def test_a_reward_file_is_complete_or_absent(tmp_path: Path) -> None:
    assert unpack(
        archive(("./reward.json", b'{"reward": 1}')), tmp_path / "a", DownloadBudget(files=1, size=0)
    )
    assert (tmp_path / "a" / "reward.json").read_bytes() == b'{"reward": 1}'
    cut = io.BytesIO(archive(("./reward.txt", b"0.125" * 200)).getvalue()[:700])
    assert not unpack(cut, tmp_path / "b", DownloadBudget())
    assert not (tmp_path / "b" / "reward.txt").exists()


def test_unpacking_omits_links_deep_outside_and_existing_paths(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "trajectory.json").write_text("Harbor's own")
    deep = "/".join("d" * (MAX_DEPTH + 1))
    unpack(
        archive(
            link("out", "/etc"),
            ("out/planted", b"x"),
            ("../outside", b"x"),
            (deep, b"x"),
            ("trajectory.json", b"x"),
            ("good", b"x"),
        ),
        target,
        DownloadBudget(),
    )
    assert not any(path.is_symlink() for path in everything_below(target))
    assert not (tmp_path / "outside").exists() and not (target / deep).exists()
    assert (target / "trajectory.json").read_text() == "Harbor's own"
    assert (target / "good").read_bytes() == b"x"


@pytest.mark.parametrize("cut", [100, 513, 1025])
def test_a_broken_archive_counts_as_incomplete(tmp_path: Path, cut: int) -> None:
    complete = archive(("a", b"x" * 600), ("b", b"y" * 600)).getvalue()
    assert not unpack(io.BytesIO(complete[:cut]), tmp_path / "broken", DownloadBudget())


def test_an_endless_stream_ends_at_the_limit() -> None:
    def endless() -> object:
        while True:
            yield b"\0" * 2**16

    reader = ChunkReader(iter(endless()), 2**20)  # type: ignore[call-overload]
    assert sum(len(piece) for piece in iter(lambda: reader.read(2**16), b"")) == 2**20
    assert reader.was_cut
    with BoundedFile(1000) as file:
        for _ in range(100):
            file.write(b"x" * 300)
        assert (file.tell(), file.was_cut) == (1000, True)


def block(seconds: float) -> None:
    """Block the event loop. Ruff reports `time.sleep` if it is written in a coroutine."""
    time.sleep(seconds)


async def test_event_loop_lag_is_measured_and_reset() -> None:
    async with LagMeter(period_s=0.01) as lag_meter:
        block(0.3)
        assert lag_meter.take() >= 0.2
        block(0.3)
        await asyncio.sleep(0.02)  # the timer measures the lag
        assert lag_meter.take() >= 0.2
        assert lag_meter.take() < 0.2


@needs_sandbox
async def test_a_download_of_20000_files_lets_other_trials_continue(tmp_path: Path) -> None:
    num_iterations = 0

    async def count_iterations() -> None:
        nonlocal num_iterations
        while True:
            num_iterations += 1
            await asyncio.sleep(0.001)

    async with environment(tmp_path, network_mode="no-network") as sandbox_environment:
        await sandbox_environment.exec(
            "mkdir -p /logs/agent && cd /logs/agent && seq 1 20000 | xargs touch && echo last > zzz"
        )
        counting = asyncio.create_task(count_iterations())
        async with LagMeter() as lag_meter:
            await sandbox_environment.download_dir("/logs/agent", tmp_path / "trial" / "agent")
            await sandbox_environment.upload_dir(tmp_path / "trial" / "agent", "/logs/again")
            longest_lag_s = lag_meter.take()
        counting.cancel()
        assert num_iterations > 20 and longest_lag_s < MAX_LAG_S, (num_iterations, longest_lag_s)
    print(f"{num_iterations} iterations, longest lag {longest_lag_s:.3f} s")
    assert len(everything_below(tmp_path / "trial" / "agent")) <= MAX_FILES
    assert "/logs/agent: at most" in (tmp_path / "trial" / NOTE_FILE).read_text()


@needs_sandbox
async def test_sparse_files_and_deep_directories_stay_within_limits(tmp_path: Path) -> None:
    async with environment(tmp_path, network_mode="no-network") as sandbox_environment:
        setup_command = "mkdir -p /logs/agent && cd /logs/agent && truncate -s 3G sparse && echo ok > a && "
        setup_command += "for i in $(seq 1 300); do mkdir d && cd d; done && echo deep > file"
        assert (await sandbox_environment.exec(setup_command)).return_code == 0
        for number in range(6):
            await sandbox_environment.download_dir("/logs/agent", tmp_path / "trial" / str(number))
        with pytest.raises(RuntimeError, match="exceeds the limit on the bytes"):
            await sandbox_environment.download_file("/logs/agent/sparse", tmp_path / "trial" / "sparse")
    assert size_of(tmp_path / "trial") <= MAX_BYTES + 2**20
    assert (
        max(len(path.relative_to(tmp_path / "trial").parts) for path in everything_below(tmp_path / "trial"))
        <= MAX_DEPTH + 1
    )


@needs_sandbox
async def test_a_used_up_number_of_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("src.envs.sandbox.file_copy.MAX_FILES", 0)
    async with environment(tmp_path, network_mode="no-network") as sandbox_environment:
        await sandbox_environment.exec("echo x > /app/a")
        with pytest.raises(
            RuntimeError, match="cannot download /app/a: the limit on the number of files that are downloaded"
        ):
            await sandbox_environment.download_file("/app/a", tmp_path / "trial" / "a")


@needs_sandbox
async def test_an_upload_omits_files_that_were_downloaded(tmp_path: Path) -> None:
    async with environment(tmp_path, network_mode="no-network") as sandbox_environment:
        await sandbox_environment.exec(
            "mkdir -p /logs/agent && cd /logs/agent && head -c 40M /dev/zero > big && echo own > small && "
            "chmod 640 small"
        )
        await sandbox_environment.download_dir("/logs/agent", tmp_path / "trial" / "agent")
        (tmp_path / "trial" / "agent" / "trajectory.json").write_text("Harbor's own")
        await sandbox_environment.upload_dir(tmp_path / "trial" / "agent", "/logs/agent")
        result = await sandbox_environment.exec(
            "cd /logs/agent && ls && stat -c '%s %a' big small && cat trajectory.json"
        )
        assert result.stdout == "big\nsmall\ntrajectory.json\n41943040 644\n4 640\nHarbor's own"


@needs_sandbox
async def test_a_reward_is_downloaded_among_many_other_files(tmp_path: Path) -> None:
    async with environment(tmp_path, network_mode="no-network") as sandbox_environment:
        await sandbox_environment.exec(
            "mkdir -p /logs/verifier && cd /logs/verifier && head -c 200M /dev/zero > aaa && seq 1 5000 | "
            "xargs touch"
        )
        await sandbox_environment.exec("echo 1 > /logs/verifier/reward.txt")
        await sandbox_environment.download_dir("/logs/verifier", tmp_path / "trial" / "verifier")
    assert (tmp_path / "trial" / "verifier" / "reward.txt").read_text() == "1\n"


def open_tasks(**options: object) -> HarborTasks:
    defaults = {"environment_type": "sandbox", "max_turns": 8, "enable_summarize": False, "eval_split": 0.0}
    return open_harbor(
        TrainerConfig(model_name="org/model", tasks_dir=str(HELLO), **{**defaults, **options}), byte_chat()
    )


async def run_trial(tasks: HarborTasks, directory: Path, *commands: str, duration: float = 0.3) -> Trajectory:
    policy = ScriptedPolicy(byte_chat(), {"": [answer(*commands, duration=duration), *solving("true")[1:]]})
    outcome = await tasks.trial(tasks.train[0], directory=directory, seed=1, temperature=1.0).run(policy)
    assert isinstance(outcome, Trajectory), outcome
    return outcome


@needs_sandbox
async def test_an_agent_with_too_many_files_is_graded(tmp_path: Path) -> None:
    agent_command = (
        "cd /logs/agent && seq 1 20000 | xargs touch && head -c 100M /dev/zero > big; mkdir -p "
        "/logs/artifacts; cp big /logs/artifacts"
    )
    outcome = await run_trial(
        open_tasks(),
        tmp_path / "jobs" / "step_000001",
        "echo hello > /app/hello.txt",
        agent_command,
        duration=3.0,
    )
    assert outcome.reward == 1.0
    assert outcome.metrics["files_left_out"] == 1.0
    (directory,) = (tmp_path / "jobs" / "step_000001").iterdir()
    assert (
        len(everything_below(directory)) <= MAX_FILES and size_of(directory) <= MAX_BYTES + 4096 * MAX_FILES
    )
    assert (directory / "result.json").is_file() and "the rest was omitted" in (
        directory / NOTE_FILE
    ).read_text()


@needs_sandbox
async def test_trials_over_the_quota_of_a_run_keep_their_results(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = open_tasks(jobs_quota_gb=2 / 1024)
    commands = ("echo hello > /app/hello.txt", "head -c 1500000 /dev/urandom > /logs/agent/noise")
    outcomes = [await run_trial(tasks, tmp_path / "jobs" / "step_000001", *commands) for _ in range(3)]
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0, 1.0]
    assert [outcome.metrics["essential_files_only"] for outcome in outcomes] == [0.0, 1.0, 1.0]
    directories = {path.parent.parent.name: path for path in (tmp_path / "jobs").rglob("noise")}
    assert list(directories) == [outcomes[0].trial_name]
    for outcome in outcomes:
        assert (tmp_path / "jobs" / "step_000001" / outcome.trial_name / "result.json").is_file()
    assert sum("jobs_quota_gb" in record.getMessage() for record in caplog.records) == 1


def test_applying_limits_to_a_directory_follows_no_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    directory = tmp_path / "jobs" / "trial"
    (directory / "agent" / "deep").mkdir(parents=True)
    (directory / "agent" / "link").symlink_to(outside)
    (directory / "verifier").symlink_to(outside)
    os.mkfifo(directory / "agent" / "pipe")
    for number in range(50):
        (directory / "agent" / "deep" / f"{number}").touch()
    (directory / "result.json").write_text("{}")
    with (directory / "agent" / "sparse").open("wb") as file:
        file.truncate(2**33)
    assert not apply_limits(directory, max_files=20, max_bytes=2**20).is_complete
    remaining = everything_below(directory)
    assert len(remaining) <= 21 and (directory / "result.json").is_file()
    assert (
        not any(path.is_symlink() or path.is_fifo() for path in remaining)
        and not (directory / "agent" / "sparse").exists()
    )
    assert (outside / "kept").read_text() == "x"


def test_applying_limits_removes_files_with_paths_that_are_too_long(tmp_path: Path) -> None:
    directory = tmp_path / "trial"
    (directory / "agent").mkdir(parents=True)
    (directory / "agent" / "log").write_text("x")
    handle = os.open(directory / "agent", os.O_RDONLY)
    for _ in range(18):
        os.mkdir("d" * 250, dir_fd=handle)
        child = os.open("d" * 250, os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = child
    os.close(handle)
    assert not apply_limits(directory).is_complete
    assert (directory / "agent" / "log").is_file()
    longest = max(len(str(path)) for path in everything_below(directory))
    assert longest < 4096


def test_a_file_that_disappears_keeps_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent").mkdir()
    for name in ("gone", "kept"):
        (tmp_path / "agent" / name).write_text("x")
    list_entries = trial_directory._entries

    def entries(directory: Path) -> list[tuple[os.DirEntry[str], int]]:
        listed = [*list_entries(directory)]
        (directory / "agent" / "gone").unlink()
        return listed

    monkeypatch.setattr(trial_directory, "_entries", entries)
    assert apply_limits(tmp_path).is_complete and (tmp_path / "agent" / "kept").is_file()


def test_a_quota_counts_the_files_of_earlier_processes(tmp_path: Path) -> None:
    old, new = (tmp_path / "jobs" / "step_1" / name for name in ("old", "new"))
    for directory in (old, new):
        (directory / "agent").mkdir(parents=True)
        (directory / "agent" / "log").write_bytes(b"x" * 600)
        (directory / "result.json").write_text("{}")
    directory_state = JobsQuota(limit=1000).enforce(new)
    assert (
        directory_state.is_essential_only and not (new / "agent").exists() and (new / "result.json").is_file()
    )
    assert (old / "agent" / "log").is_file()


def test_a_quota_counts_a_trial_that_is_running_once(tmp_path: Path) -> None:
    first, second, third = (tmp_path / "jobs" / "step_1" / name for name in ("first", "second", "third"))
    for directory in (first, second):
        (directory / "agent").mkdir(parents=True)
        (directory / "agent" / "log").write_bytes(b"x" * 2**20)
    quota = JobsQuota(limit=5 * 2**19)  # 2.5 times the size of a trial
    # The trial of `second` is running. `enforce(first)` also measures its directory.
    assert not quota.enforce(first).is_essential_only
    assert not quota.enforce(second).is_essential_only
    (third / "agent").mkdir(parents=True)
    (third / "agent" / "log").write_bytes(b"x" * 2**20)
    assert quota.enforce(third).is_essential_only


def test_a_quota_ignores_files_that_cannot_be_measured(tmp_path: Path) -> None:
    ended, deep = (tmp_path / "jobs" / "step_1" / name for name in ("ended", "deep"))
    ended.mkdir(parents=True)
    (ended / "link").symlink_to("/etc")
    while len(str(deep)) + 200 < 4090:
        deep = deep / ("d" * 199)
    deep.mkdir(parents=True)
    directory = os.open(deep, os.O_RDONLY)
    os.mkdir("x" * 255, dir_fd=directory)  # The kernel accepts no absolute path to this directory.
    os.close(directory)
    assert not JobsQuota(limit=10**9).enforce(ended).is_complete
    assert not (ended / "link").is_symlink()

"""Tests real sandboxes: commands, processes, isolation and limits."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path

import pytest

from src.core.errors import SandboxError
from src.envs.sandbox.bubblewrap import Bubblewrap, CommandTimeout, why_no_sandbox
from src.envs.sandbox.resource_limits import SandboxLimits
from src.envs.sandbox.sandbox_directory import remove_ended_runs, root_directory, sandbox_directory
from tests.security.sandboxes import LABEL, sandbox

REASON = why_no_sandbox()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no sandbox here: {REASON}")
ROOT = Path(__file__).resolve().parents[2]


async def until_none(running: Bubblewrap, pattern: str) -> None:
    """Wait until no process of the sandbox matches the pattern. A killed process needs a moment to end."""
    assert (await running.run(f"while pgrep -f '{pattern}' >/dev/null; do :; done", timeout_s=60)).status == 0


def processes_with(marker: str) -> list[str]:
    """Return the command lines that contain the marker, of all processes except this one."""
    command_lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in line:
                command_lines.append(line.decode(errors="replace"))
    return command_lines


def open_files() -> set[str]:
    """Return the targets of this process's file descriptors.

    The numbers of the descriptors are not compared, because threads reuse them.
    """
    targets = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            targets.add(os.readlink(f"/proc/self/fd/{number}"))
    return targets


async def seconds(work: Awaitable[object]) -> float:
    started = time.monotonic()
    await work
    return time.monotonic() - started


def mounts() -> set[str]:
    return set(Path("/proc/self/mounts").read_text().splitlines())


async def test_exec_returns_status_stdout_and_stderr() -> None:
    async with sandbox() as running:
        done = await running.run("echo out; echo err >&2; exit 7")
    assert (done.status, done.stdout, done.stderr) == (7, b"out\n", b"err\n")


async def test_a_timeout_kills_the_command_but_not_the_sandbox() -> None:
    marker = f"31536{secrets.randbelow(10**6)}"
    async with sandbox() as running:
        with pytest.raises(CommandTimeout):
            await running.run(f"sleep {marker} & sleep {marker}; echo never", timeout_s=0.3)
        await until_none(running, f"sleep {marker}")


async def test_background_processes_stay_until_they_are_killed() -> None:
    async with sandbox() as running:
        await running.run("setsid sleep 1000 >/dev/null 2>&1 & sleep 1001 >/dev/null 2>&1 &")
        assert (await running.run("until [ $(pgrep -cx sleep) = 2 ]; do :; done", timeout_s=60)).status == 0
        await running.kill_processes()
        await until_none(running, "^sleep")


async def test_large_output_arrives_whole() -> None:
    async with sandbox() as running:
        done = await running.run("head -c 5000000 /dev/zero | tr '\\0' x")
    assert done.stdout == b"x" * 5_000_000


async def test_pid_1_ignores_signals_and_reports_killed_commands() -> None:
    async with sandbox() as running:
        assert (
            await running.run(
                "for s in HUP INT TERM KILL STOP SEGV PIPE CHLD USR1; do kill -$s 1; done; echo ok"
            )
        ).stdout == b"ok\n"
        assert (await running.run("kill -KILL $$; echo still")).status == 137
        assert (await running.run("sleep 1000 & kill -KILL -- -1; wait; echo alone")).stdout == b"alone\n"
        assert (await running.run("echo on")).stdout == b"on\n"


async def test_nothing_of_the_host_is_visible(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    async with sandbox() as running:
        for hidden in (secret, ROOT, Path(sys.executable), root_directory()):
            assert (await running.run(f"test -e '{hidden}'")).status == 1, hidden
        assert (await running.run("ls -A /home /root /tmp /mnt /srv /opt")).stdout.split() == [
            *(b"/home:", b"/mnt:", b"/opt:", b"/root:", b"/srv:", b"/tmp:")
        ]
        assert (
            await running.run("hostname; cat /etc/hostname; ls /etc | grep -c -e shadow -e ssh")
        ).stdout == b"sandbox\nsandbox\n0\n"
        pids = (await running.run("cat /proc/[0-9]*/comm | sort -u")).stdout.split()
        assert set(pids) <= {b"bash", b"cat", b"perl", b"sort"}
        assert (await running.run("echo x > /usr/bin/x")).status != 0
        assert (await running.run("unshare -Ur true")).status != 0
        assert (await running.run("grep CapEff /proc/self/status")).stdout.split() == [
            b"CapEff:",
            b"0000000000000000",
        ]
        assert (
            await running.run(
                "env | grep -v -e ^PATH= -e ^HOME= -e ^USER= -e ^LANG= -e ^PWD= -e ^SHLVL= -e ^_="
            )
        ).stdout == b""


async def test_without_a_network_only_a_private_loopback_exists() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with sandbox() as running:
            assert (await running.run(f"exec 3<>/dev/tcp/127.0.0.1/{listener.getsockname()[1]}")).status != 0
            assert (await running.run("cat /proc/net/dev | grep -c :")).stdout == b"1\n"


async def test_processes_cannot_exceed_the_limits() -> None:
    async with sandbox(limits=SandboxLimits(memory_mb=256, storage_mb=64)) as running:
        grow = "x=$(head -c 400000000 /dev/zero | tr '\\0' x); echo ${#x}"
        assert (await running.run(grow)).stdout != b"400000000\n"
        assert (await running.run("head -c 100000000 /dev/zero > /tmp/big")).status != 0
        assert (
            await running.run("for i in 1 2 3; do head -c 30000000 /dev/zero > /tmp/$i || exit 1; done")
        ).status != 0
        assert (await running.run("rm /tmp/*; echo ok")).stdout == b"ok\n"


async def test_a_tmux_pane_keeps_100000_lines_of_output() -> None:
    async with sandbox() as running:
        await running.run(
            "tmux new-session -d -x 80 -y 24 -s t 'bash --login'; tmux set-option -g history-limit 10000000"
        )
        shown = await running.run("tmux display -p -t t '#{history_limit}'")
    assert shown.stdout == b"100000\n"


async def test_sandboxes_start_fast_and_leave_no_resources() -> None:
    async with sandbox():
        # The first sandbox of a run takes longer, because it also writes the initial files of all sandboxes.
        pass
    before, plain_s, start_s, exec_s = open_files(), list[float](), list[float](), list[float]()
    for _ in range(4):
        started = time.monotonic()
        async with sandbox() as running:
            start_s.append(time.monotonic() - started)
            for _ in range(5):
                exec_s.append(await seconds(running.run("true")))
                plain_s.append(await seconds(asyncio.to_thread(subprocess.run, ["bash", "-c", "true"])))
            with pytest.raises(CommandTimeout):
                await running.run("sleep 60", timeout_s=0.05)
    # The limits are 10 times the durations on an idle machine, where a plain command takes 3 ms. If a plain
    # command takes more than 10 ms, the limits grow in proportion.
    slowdown = max(1.0, min(plain_s) / 0.01)
    assert min(start_s) < 1.5 * slowdown and min(exec_s) < 0.15 * slowdown
    await asyncio.sleep(0)
    assert open_files() <= before
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert {path.name for path in sandbox_directory(LABEL).iterdir()} == {"lock", "skeleton"}


async def test_commands_end_when_cancelled_or_when_the_sandbox_dies() -> None:
    async with sandbox() as running:
        waiting = asyncio.create_task(running.run("sleep 60"))
        await running.run("true")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until_none(running, "^sleep")
        waiting = asyncio.create_task(running.run("sleep 60"))
        await running.run("true")
        running._process.kill()
        with pytest.raises(SandboxError, match="the sandbox ended before it answered"):
            await waiting
        with pytest.raises(SandboxError, match="has ended"):
            await running.run("true")
        with pytest.raises(SandboxError, match="has ended"):
            await running.kill_processes()


CHILD = """
import asyncio, sys
from src.envs.sandbox.bubblewrap import Bubblewrap
from src.envs.sandbox.resource_limits import SandboxLimits
from src.envs.sandbox.sandbox_directory import sandbox_directory
from src.envs.sandbox.rootfs import build_rootfs

async def main(label, marker):
    run = sandbox_directory(label)
    boxes = [
        await Bubblewrap.start(
            run / str(i),
            skeleton=build_rootfs(run),
            hostname="sandbox",
            share_network=False,
            limits=SandboxLimits(),
        )
        for i in range(3)
    ]
    for box in boxes:
        await box.run(f"tmux new-session -d 'sleep {marker}'; setsid sleep {marker} >/dev/null 2>&1 &")
    print("running", flush=True)
    await asyncio.gather(*(box.run(f"trap '' TERM HUP; sleep {marker}") for box in boxes))

asyncio.run(main(*sys.argv[1:]))
"""


def test_kill_9_of_the_trainer_leaves_no_sandbox() -> None:
    label, marker = f"test-dead-{os.getpid()}", f"31536{secrets.randbelow(10**6)}"
    mounts_before = mounts()
    trainer = subprocess.Popen([sys.executable, "-c", CHILD, label, marker], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"running\n"
        assert len(processes_with(marker)) >= 6
        assert label not in remove_ended_runs(), "the directory of a live run was removed"
    finally:
        trainer.kill()
        trainer.wait()
        assert trainer.stdout is not None
        trainer.stdout.close()
    deadline = time.monotonic() + 60
    while processes_with(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_with(marker) == []
    # Docker trials of other tests can add mounts at the same time.
    assert [mount for mount in mounts() - mounts_before if "docker" not in mount] == []
    while (root_directory() / label).exists() and time.monotonic() < deadline:
        # Another trainer may have removed the directory. A cgroup exists until its last process has ended.
        remove_ended_runs()
    assert not (root_directory() / label).exists()

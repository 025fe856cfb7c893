"""Real sandboxes: what gets in and out, what cannot, and that nothing stays."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

from src.core.errors import ConfigError, SandboxError
from src.envs.sandbox.bubblewrap import Bubblewrap, CommandTimeout, why_no_sandbox
from src.envs.sandbox.dockerfile import Copy, parse_dockerfile
from src.envs.sandbox.environment import Network, SandboxEnvironment, network_of
from src.envs.sandbox.resource_limits import Limits
from src.envs.sandbox.rootfs import build_rootfs
from src.envs.sandbox.run_directory import root_directory, run_directory, sweep

REASON = why_no_sandbox()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no sandbox here: {REASON}")

LABEL = f"test-{os.getpid()}"
ROOT = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def sandbox(*, share_network: bool = False, limits: Limits | None = None) -> AsyncIterator[Bubblewrap]:
    run = run_directory(LABEL)
    running = await Bubblewrap.start(
        run / secrets.token_hex(4),
        skeleton=build_rootfs(run),
        hostname="sandbox",
        share_network=share_network,
        limits=limits or Limits(),
    )
    try:
        yield running
    finally:
        await running.stop()


@asynccontextmanager
async def environment(
    tmp_path: Path, dockerfile: str = "FROM debian\nWORKDIR /app\n", **config: object
) -> AsyncIterator[SandboxEnvironment]:
    directory = tmp_path / "environment"
    directory.mkdir(exist_ok=True)
    (directory / "Dockerfile").write_text(dockerfile)
    paths = TrialPaths(trial_dir=tmp_path / "trial")
    paths.mkdir()
    made = SandboxEnvironment(
        environment_dir=directory,
        environment_name="task",
        session_id="task__env",
        trial_paths=paths,
        task_env_config=EnvironmentConfig.model_validate(config),
        run_label=LABEL,
    )
    try:
        await made.start(force_build=False)
        yield made
    finally:
        await made.stop(delete=True)


async def until_none(running: Bubblewrap, pattern: str) -> None:
    """A killed process takes a moment to go."""
    assert (await running.run(f"while pgrep -f '{pattern}' >/dev/null; do :; done", timeout_s=60)).status == 0


def processes_with(marker: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in line:
                found.append(line.decode(errors="replace"))
    return found


def open_files() -> set[str]:
    """What this process has open, by what it is: a number that another thread lets go may be taken again at once."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


async def seconds(work: Awaitable[object]) -> float:
    started = time.monotonic()
    await work
    return time.monotonic() - started


def mounts() -> set[str]:
    return set(Path("/proc/self/mounts").read_text().splitlines())


async def test_exec_reports_status_output_and_errors_apart() -> None:
    async with sandbox() as running:
        done = await running.run("echo out; echo err >&2; exit 7")
    assert (done.status, done.stdout, done.stderr) == (7, b"out\n", b"err\n")


async def test_exec_keeps_harbors_contract(tmp_path: Path) -> None:
    async with environment(
        tmp_path, "FROM debian\nENV A=image B=image\nWORKDIR /app\n", env={"B": "task"}
    ) as made:
        there = await made.exec("pwd; echo $A $B $C", env={"C": "call"})
        assert there.stdout == "/app\nimage task call\n"
        assert (await made.exec("pwd", cwd="/tmp")).stdout == "/tmp\n"
        assert (await made.exec("exit 3")).return_code == 3
        with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
            await made.exec("sleep 60", timeout_sec=1)
        with pytest.raises(SandboxError, match=r"no user 'alice'.*docker"):
            await made.exec("true", user="alice")
        assert (await made.exec("id -u", user="root")).stdout == "0\n"


async def test_a_timeout_kills_the_whole_command_and_the_sandbox_goes_on() -> None:
    marker = f"31536{secrets.randbelow(10**6)}"
    async with sandbox() as running:
        with pytest.raises(CommandTimeout):
            await running.run(f"sleep {marker} & sleep {marker}; echo never", timeout_s=0.3)
        await until_none(running, f"sleep {marker}")


async def test_a_command_may_leave_processes_behind_until_they_are_killed() -> None:
    async with sandbox() as running:
        await running.run("setsid sleep 1000 >/dev/null 2>&1 & sleep 1001 >/dev/null 2>&1 &")
        assert (await running.run("until [ $(pgrep -cx sleep) = 2 ]; do :; done", timeout_s=60)).status == 0
        await running.kill_processes()
        await until_none(running, "^sleep")


async def test_large_output_arrives_whole() -> None:
    async with sandbox() as running:
        done = await running.run("head -c 5000000 /dev/zero | tr '\\0' x")
    assert done.stdout == b"x" * 5_000_000


async def test_pid_1_survives_everything_inside_can_send_and_a_killed_command_is_noticed() -> None:
    async with sandbox() as running:
        assert (
            await running.run(
                "for s in HUP INT TERM KILL STOP SEGV PIPE CHLD USR1; do kill -$s 1; done; echo ok"
            )
        ).stdout == b"ok\n"
        assert (await running.run("kill -KILL $$; echo still")).status == 137
        assert (await running.run("sleep 1000 & kill -KILL -- -1; wait; echo alone")).stdout == b"alone\n"
        assert (await running.run("echo on")).stdout == b"on\n"


async def test_the_agents_rm_rf_leaves_a_machine_that_still_runs_commands(tmp_path: Path) -> None:
    async with environment(tmp_path) as made:
        await made.exec("rm -rf --no-preserve-root / 2>/dev/null")
        after = await made.exec("mkdir -p /tests && echo fine > /tests/a && cat /tests/a && tmux -V")
        assert after.return_code == 0
        assert (after.stdout or "").startswith("fine\ntmux ")


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


async def test_without_a_network_only_the_own_loopback_exists() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with sandbox() as running:
            assert (await running.run(f"exec 3<>/dev/tcp/127.0.0.1/{listener.getsockname()[1]}")).status != 0
            assert (await running.run("cat /proc/net/dev | grep -c :")).stdout == b"1\n"


@pytest.mark.parametrize(
    ("config", "given", "here", "lacking"),
    [
        ({}, False, Network.PUBLIC, Network.LACKING),
        ({"network_mode": "no-network"}, False, Network.OFF, Network.OFF),
        ({"network_mode": "public"}, False, Network.PUBLIC, Network.REFUSED),
        ({"allow_internet": True}, False, Network.PUBLIC, Network.REFUSED),
        ({"allow_internet": False}, False, Network.OFF, Network.OFF),
        ({}, True, Network.PUBLIC, Network.REFUSED),
        ({"network_mode": "no-network"}, True, Network.PUBLIC, Network.REFUSED),
    ],
)
def test_a_task_has_harbors_default_network_unless_it_says_otherwise(
    config: dict[str, object], given: bool, here: Network, lacking: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Harbor's, about allow_internet
        parsed = EnvironmentConfig.model_validate(config)
    for reason, expected in ((None, here), ("it needs a package", lacking)):
        monkeypatch.setattr("src.envs.sandbox.environment.why_no_network", lambda reason=reason: reason)
        assert network_of(parsed, given=given) is expected


async def test_limits_hold() -> None:
    async with sandbox(limits=Limits(memory_mb=256, storage_mb=64)) as running:
        grow = "x=$(head -c 400000000 /dev/zero | tr '\\0' x); echo ${#x}"
        assert (await running.run(grow)).stdout != b"400000000\n"
        assert (await running.run("head -c 100000000 /dev/zero > /tmp/big")).status != 0
        assert (
            await running.run("for i in 1 2 3; do head -c 30000000 /dev/zero > /tmp/$i || exit 1; done")
        ).status != 0
        assert (await running.run("rm /tmp/*; echo ok")).stdout == b"ok\n"


async def test_files_go_in_and_come_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "empty").mkdir(parents=True)
    (source / "deep" / "script.sh").write_text("#!/bin/bash\necho ran\n")
    (source / "deep" / "script.sh").chmod(0o755)
    async with environment(tmp_path) as made:
        await made.upload_dir(source, "/opt/there")
        assert (
            await made.exec("/opt/there/deep/script.sh; ls -d /opt/there/deep/empty")
        ).stdout == "ran\n/opt/there/deep/empty\n"
        await made.upload_file(source / "deep" / "script.sh", "/new/place/run.sh")
        await made.upload_file(source / "deep" / "script.sh", "/opt/there")
        assert (
            await made.exec("/new/place/run.sh; cat /opt/there/script.sh")
        ).stdout == "ran\n#!/bin/bash\necho ran\n"
        await made.download_dir("/opt/there", tmp_path / "back")
        assert (tmp_path / "back" / "deep" / "script.sh").read_text() == "#!/bin/bash\necho ran\n"
        await made.download_file("/etc/hostname", tmp_path / "name")
        assert (tmp_path / "name").read_text() == "sandbox\n"
        with pytest.raises(SandboxError, match="cannot download /nowhere"):
            await made.download_dir("/nowhere", tmp_path / "nothing")
        with pytest.raises(SandboxError, match="cannot download /nowhere"):
            await made.download_file("/nowhere", tmp_path / "nothing")


async def test_planted_links_and_devices_never_reach_the_host(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    async with environment(tmp_path) as made:
        await made.exec(
            f"mkdir -p /logs/out/sub && cd /logs/out && ln -s {outside} link && ln -s /etc/passwd passwd && mkfifo pipe && "
            "echo good > sub/file && ln sub/file hard && chmod 4755 sub/file"
        )
        await made.download_dir("/logs/out", tmp_path / "back")
        with pytest.raises(SandboxError):
            await made.download_file("/logs/out/pipe", tmp_path / "pipe")
    assert {
        path.name
        for path in (tmp_path / "back").rglob("*")
        if path.is_symlink() or not (path.is_file() or path.is_dir())
    } == set()
    assert (tmp_path / "back" / "sub" / "file").stat().st_mode & 0o7000 == 0
    assert list(outside.iterdir()) == []


async def test_a_dockerfile_is_followed(tmp_path: Path) -> None:
    context = tmp_path / "environment"
    (context / "data").mkdir(parents=True)
    (context / "data" / "a.txt").write_text("a")
    (context / "run.sh").write_text("echo hi")
    dockerfile = r"""
# syntax=docker/dockerfile:1
FROM python:3.12-slim AS only
ARG WHO=world
ENV GREETING="hello $WHO" \
    EMPTY=
WORKDIR /srv/app
COPY --chmod=755 run.sh /usr/local/bin/greet
COPY data/ ./data/
COPY ["data/a.txt", "copies/"]
RUN apt-get update && apt-get install -y --no-install-recommends tmux bash \
    && rm -rf /var/lib/apt/lists/*
RUN echo "$GREETING" > made.txt
RUN <<EOF
echo one > here.txt
echo two >> here.txt
EOF
WORKDIR sub
CMD ["sleep", "infinity"]
"""
    async with environment(tmp_path, dockerfile) as made:
        shown = await made.exec(
            "pwd; cd ..; cat made.txt here.txt data/a.txt copies/a.txt; echo; greet; echo $GREETING"
        )
    assert shown.stdout == "/srv/app/sub\nhello world\none\ntwo\naa\nhi\nhello world\n"


@pytest.mark.parametrize(
    ("dockerfile", "message"),
    [
        (
            "FROM a\nFROM b\n",
            "Dockerfile:2: the sandbox cannot build more than one stage; use environment_type=docker",
        ),
        (
            "FROM a\nRUN apt-get update && apt-get install -y tmux no-such-package-x\n",
            "cannot install no-such-package-x",
        ),
        ("FROM a\nRUN pip install numpy\n", "cannot reach the network for `pip install`"),
        ("FROM a\nRUN cd / && curl -LsSf https://example.org | sh\n", "cannot reach the network for `curl`"),
        ("FROM a\nUSER alice\n", "cannot run as the user alice"),
        ("FROM a\nCOPY --from=b /x /y\n", "cannot COPY with --from=b"),
        ("FROM a\nCOPY ../up /y\n", "../up is not in"),
        ("FROM a\nADD https://example.org/x /y\n", "cannot fetch https://example.org/x"),
        ("FROM a\nADD x.tar.gz /y\n", "cannot unpack x.tar.gz with ADD"),
        ("FROM a\nONBUILD RUN true\n", "cannot follow ONBUILD"),
        ("RUN true\n", "no FROM line"),
    ],
)
def test_what_the_sandbox_cannot_build_is_refused_by_line(
    tmp_path: Path, dockerfile: str, message: str
) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(dockerfile)
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_dockerfile(path)


def test_an_archive_is_copied_as_it_is_whatever_the_comments_are_written_in(tmp_path: Path) -> None:
    (tmp_path / "x.tar").touch()
    (tmp_path / "Dockerfile").write_bytes(b"# caf\xe9\nFROM a\nCOPY x.tar /y\n")
    (copy,) = parse_dockerfile(tmp_path / "Dockerfile").steps
    assert copy == Copy(files=((tmp_path / "x.tar", "/y"),), mode=None, line=3)


@pytest.mark.parametrize(
    "line",
    ("COPY a 'b", 'COPY ["a", 1]', "ENV A='b", "ARG A='b", "WORKDIR 'b", "ADD [1", f"COPY {'x' * 5000} y"),
)
def test_an_instruction_that_cannot_be_read_is_one_line_of_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(f"FROM debian\n{line}\n")
    with pytest.raises(ConfigError, match=r"Dockerfile:2: \w+") as refused:
        parse_dockerfile(path)
    assert "\n" not in str(refused.value)


async def test_a_build_step_that_fails_names_docker(tmp_path: Path) -> None:
    with pytest.raises(
        SandboxError,
        match=r"Dockerfile line 2: RUN failed in the sandbox \(.*Read-only.*\); use environment_type=docker",
    ):
        async with environment(tmp_path, "FROM a\nRUN touch /usr/bin/thing\n"):
            pass


async def test_a_pane_keeps_long_output() -> None:
    async with sandbox() as running:
        await running.run(
            "tmux new-session -d -x 80 -y 24 -s t 'bash --login'; tmux set-option -g history-limit 10000000"
        )
        shown = await running.run("tmux display -p -t t '#{history_limit}'")
    assert shown.stdout == b"100000\n"


async def test_sandboxes_start_fast_and_leave_no_descriptor_task_or_file() -> None:
    async with sandbox():
        pass  # the skeleton is built once per run
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
    slow = max(
        1.0, min(plain_s) / 0.01
    )  # how much slower this machine is now than an idle one, on which this takes 3 ms
    assert min(start_s) < 1.5 * slow and min(exec_s) < 0.15 * slow  # ten times what it takes there
    await asyncio.sleep(0)
    assert open_files() <= before
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert {path.name for path in run_directory(LABEL).iterdir()} == {"lock", "skeleton"}


async def test_a_cancelled_command_ends_and_one_in_a_dying_sandbox_fails() -> None:
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
        with pytest.raises(SandboxError, match="the sandbox stopped answering after commands ran in it"):
            await waiting
        with pytest.raises(SandboxError, match="gone"):
            await running.run("true")
        with pytest.raises(SandboxError, match="gone"):
            await running.kill_processes()


CHILD = """
import asyncio, sys
from src.envs.sandbox.bubblewrap import Bubblewrap
from src.envs.sandbox.resource_limits import Limits
from src.envs.sandbox.run_directory import run_directory
from src.envs.sandbox.rootfs import build_rootfs

async def main(label, marker):
    run = run_directory(label)
    boxes = [
        await Bubblewrap.start(run / str(i), skeleton=build_rootfs(run), hostname="sandbox", share_network=False, limits=Limits())
        for i in range(3)
    ]
    for box in boxes:
        await box.run(f"tmux new-session -d 'sleep {marker}'; setsid sleep {marker} >/dev/null 2>&1 &")
    print("playing", flush=True)
    await asyncio.gather(*(box.run(f"trap '' TERM HUP; sleep {marker}") for box in boxes))

asyncio.run(main(*sys.argv[1:]))
"""


def test_kill_9_of_the_trainer_leaves_nothing() -> None:
    label, marker = f"test-dead-{os.getpid()}", f"31536{secrets.randbelow(10**6)}"
    mounts_before = mounts()
    trainer = subprocess.Popen([sys.executable, "-c", CHILD, label, marker], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"playing\n"
        assert len(processes_with(marker)) >= 6
        assert label not in sweep(), "a living run's directory was swept"
    finally:
        trainer.kill()
        trainer.wait()
        assert trainer.stdout is not None
        trainer.stdout.close()
    deadline = time.monotonic() + 60
    while processes_with(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_with(marker) == []
    assert [
        mount for mount in mounts() - mounts_before if "docker" not in mount
    ] == []  # the trial on Docker may be beside this test
    while (root_directory() / label).exists() and time.monotonic() < deadline:
        sweep()  # unless another trainer that has started in the meantime did; a cgroup whose last process ends stays until it has ended
    assert not (root_directory() / label).exists()

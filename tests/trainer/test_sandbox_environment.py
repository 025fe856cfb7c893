"""Tests Harbor environments in real sandboxes: builds, commands, file transfers and the network of a task."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from harbor.models.task.config import EnvironmentConfig

from src.core.errors import SandboxError
from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.envs.sandbox.environment import command_script
from src.envs.sandbox.task_requirements import NetworkAccess, network_access
from tests.security.sandboxes import environment

REASON = why_no_sandbox()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no sandbox here: {REASON}")


async def test_exec_keeps_harbors_contract(tmp_path: Path) -> None:
    async with environment(
        tmp_path, "FROM debian\nENV A=image B=image\nWORKDIR /app\n", env={"B": "task"}
    ) as env:
        result = await env.exec("pwd; echo $A $B $C", env={"C": "call"})
        assert result.stdout == "/app\nimage task call\n"
        assert (await env.exec("pwd", cwd="/tmp")).stdout == "/tmp\n"
        assert (await env.exec("exit 3")).return_code == 3
        with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
            await env.exec("sleep 60", timeout_sec=1)
        with pytest.raises(SandboxError, match=r"no user 'alice'.*docker"):
            await env.exec("true", user="alice")
        assert (await env.exec("id -u", user="root")).stdout == "0\n"


async def test_commands_still_run_after_rm_rf_of_the_root(tmp_path: Path) -> None:
    async with environment(tmp_path) as env:
        await env.exec("rm -rf --no-preserve-root / 2>/dev/null")
        after = await env.exec("mkdir -p /tests && echo fine > /tests/a && cat /tests/a && tmux -V")
        assert after.return_code == 0
        assert (after.stdout or "").startswith("fine\ntmux ")


@pytest.mark.parametrize(
    ("config", "has_network_option", "with_network", "without_network"),
    [
        ({}, False, NetworkAccess.PUBLIC, NetworkAccess.LACKING),
        ({"network_mode": "no-network"}, False, NetworkAccess.OFF, NetworkAccess.OFF),
        ({"network_mode": "public"}, False, NetworkAccess.PUBLIC, NetworkAccess.REFUSED),
        ({"allow_internet": True}, False, NetworkAccess.PUBLIC, NetworkAccess.REFUSED),
        ({"allow_internet": False}, False, NetworkAccess.OFF, NetworkAccess.OFF),
        ({}, True, NetworkAccess.PUBLIC, NetworkAccess.REFUSED),
        ({"network_mode": "no-network"}, True, NetworkAccess.PUBLIC, NetworkAccess.REFUSED),
    ],
)
def test_a_task_has_harbors_default_network(
    config: dict[str, object],
    has_network_option: bool,
    with_network: NetworkAccess,
    without_network: NetworkAccess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Harbor warns that allow_internet is deprecated
        parsed = EnvironmentConfig.model_validate(config)
    for reason, expected in ((None, with_network), ("it needs a package", without_network)):
        monkeypatch.setattr("src.envs.sandbox.task_requirements.why_no_network", lambda reason=reason: reason)
        assert network_access(parsed, has_network_option=has_network_option) is expected


async def test_files_are_uploaded_and_downloaded(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "empty").mkdir(parents=True)
    (source / "deep" / "script.sh").write_text("#!/bin/bash\necho ran\n")
    (source / "deep" / "script.sh").chmod(0o755)
    async with environment(tmp_path) as env:
        await env.upload_dir(source, "/opt/there")
        assert (
            await env.exec("/opt/there/deep/script.sh; ls -d /opt/there/deep/empty")
        ).stdout == "ran\n/opt/there/deep/empty\n"
        await env.upload_file(source / "deep" / "script.sh", "/new/place/run.sh")
        await env.upload_file(source / "deep" / "script.sh", "/opt/there")
        assert (await env.exec("/new/place/run.sh; /opt/there/script.sh")).stdout == "ran\nran\n"
        await env.download_dir("/opt/there", tmp_path / "back")
        assert (tmp_path / "back" / "deep" / "script.sh").read_text() == "#!/bin/bash\necho ran\n"
        await env.download_file("/etc/hostname", tmp_path / "name")
        assert (tmp_path / "name").read_text() == "sandbox\n"
        with pytest.raises(SandboxError, match="cannot download /nowhere"):
            await env.download_dir("/nowhere", tmp_path / "nothing")
        with pytest.raises(SandboxError, match="cannot download /nowhere"):
            await env.download_file("/nowhere", tmp_path / "nothing")


async def test_files_without_permissions_are_downloaded(tmp_path: Path) -> None:
    async with environment(tmp_path) as env:
        await env.exec(
            "mkdir -p /logs/out/a/b && cd /logs/out && touch file a/b/file && chmod 000 file a/b/file a/b a ."
        )
        await env.download_dir("/logs/out", tmp_path / "back")
    names = {str(path.relative_to(tmp_path / "back")) for path in (tmp_path / "back").rglob("*")}
    assert names == {"file", "a", "a/b", "a/b/file"}


async def test_planted_links_and_devices_never_reach_the_host(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    async with environment(tmp_path) as env:
        await env.exec(
            f"mkdir -p /logs/out/sub && cd /logs/out && ln -s {outside} link && ln -s /etc/passwd passwd && "
            "mkfifo pipe && "
            "echo good > sub/file && ln sub/file hard && chmod 4755 sub/file"
        )
        await env.download_dir("/logs/out", tmp_path / "back")
        with pytest.raises(SandboxError):
            await env.download_file("/logs/out/pipe", tmp_path / "pipe")
    assert {
        path.name
        for path in (tmp_path / "back").rglob("*")
        if path.is_symlink() or not (path.is_file() or path.is_dir())
    } == set()
    assert (tmp_path / "back" / "sub" / "file").stat().st_mode & 0o7000 == 0
    assert list(outside.iterdir()) == []


def test_variables_that_a_shell_cannot_export_are_omitted() -> None:
    script = command_script("true", cwd="/", environment={"naïve": "1", "a.b": "1", "A_1": "x y"})
    assert script == "cd -- / 2>/dev/null || cd /\nexport A_1='x y'\ntrue\n"


async def test_a_dockerfile_is_built(tmp_path: Path) -> None:
    context = tmp_path / "environment"
    (context / "data").mkdir(parents=True)
    (context / "empty").mkdir()
    (context / "data" / "a.txt").write_text("a")
    (context / "run.sh").write_text("echo hi")
    dockerfile = r"""
# syntax=docker/dockerfile:1
FROM python:3.12-slim AS only
ARG WHO=nobody
ARG WHO=world
ENV GREETING="hello $WHO" \
    EMPTY=
WORKDIR /srv/app
COPY --chmod=755 run.sh /usr/local/bin/greet
COPY data/ ./data/
COPY empty /srv/empty
COPY ["data/a.txt", "copies/"]
COPY data/a.txt /srv/app
RUN	apt-get update && apt-get install -y -o Dpkg::Options::=--force-confold -t stable tmux bash \

    && rm -rf /var/lib/apt/lists/*
RUN echo "$GREETING" > made.txt
RUN echo "one\ntwo" > here.txt
SHELL ["/bin/bash", "-c"]
RUN <<EOF
[[ -s here.txt ]]
EOF
WORKDIR sub
CMD ["sleep", "infinity"]
"""
    async with environment(tmp_path, dockerfile) as env:
        shown = await env.exec(
            "pwd; "
            "test -d /srv/empty && cd ..; cat made.txt here.txt data/a.txt copies/a.txt a.txt; echo; greet; "
            "echo $GREETING"
        )
    assert shown.stdout == "/srv/app/sub\nhello world\none\ntwo\naaa\nhi\nhello world\n"


async def test_a_build_step_can_create_the_working_directory(tmp_path: Path) -> None:
    text = "FROM debian\nRUN mkdir -m 700 /app && touch /app/a\nWORKDIR /app\n"
    for name in ("1", "2", "3"):
        (tmp_path / name).mkdir()
    async with environment(tmp_path / "1", text) as env:
        assert (await env.exec("pwd; ls")).stdout == "/app\na\n"
    async with environment(tmp_path / "2", text.replace("WORKDIR /app", "USER root"), workdir="/app") as env:
        assert (await env.exec("pwd; ls; stat -c %a .")).stdout == "/app\na\n700\n"
    async with environment(tmp_path / "3", workdir="/new/x") as env:
        assert (await env.exec("pwd; touch a; ls")).stdout == "/new/x\na\n"


async def test_a_failing_build_step_recommends_docker(tmp_path: Path) -> None:
    with pytest.raises(
        SandboxError,
        match=r"Dockerfile line 2: RUN failed in the sandbox \(.*Read-only.*\); use environment_type=docker",
    ):
        async with environment(tmp_path, "FROM a\nRUN touch /usr/bin/thing\n"):
            pass

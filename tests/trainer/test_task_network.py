"""Which commands need the network, and what a task that lacks it is told: by command, not by word."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from src.config import TrainerConfig
from src.core.errors import ConfigError
from src.envs.harbor.environment import HarborTasks, open_harbor
from src.envs.harbor.task_folders import verifier_needs
from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.envs.sandbox.dockerfile import why_not_runnable
from src.envs.sandbox.shell_commands import commands, needs_network
from src.envs.validate import main as validate
from tests.fakes.tokenizer import byte_chat

REASON = why_no_sandbox()
needs_sandbox = pytest.mark.skipif(REASON is not None, reason=f"no sandbox here: {REASON}")
HELLO = Path(__file__).resolve().parents[1] / "tasks" / "hello-file"
REWARD = "echo 1 > /logs/verifier/reward.txt"


def network_commands(script: str) -> list[str]:
    return [reaching for words in commands(script) if (reaching := needs_network(words))]


@pytest.mark.parametrize(
    "script",
    [
        "echo hello  # wget https://example.org is not run",
        "echo 'curl https://example.org | sh'",
        'echo "to install: pip install x"',
        "apt-get install -y curl wget git",
        "which curl || command -v wget",
        "curl --version; pip --version; npm --help",
        "curl -fsS http://localhost:8000/health",
        "wget -q 127.0.0.1:80/index.html",
        "pip install --no-index --find-links wheels x",
        "git clone /srv/repository copy",
        "cat > later.sh <<'EOF'\ncurl -O https://example.org/x\nEOF\nchmod +x later.sh",
        "grep -c 'pip install' README.md > 'wget x.org'",
        'sed -i "s/curl https:../x/" file',
        "mkdir -p /opt/curl && touch /opt/curl/wget.conf",
    ],
)
def test_words_that_are_no_commands_need_no_network(script: str) -> None:
    assert network_commands(script) == []


@pytest.mark.parametrize(
    ("script", "needed"),
    [
        ("curl -LsSf https://example.org/install.sh | sh", "curl"),
        ("cd /app && A=1 sudo -E pip3 install 'a b'", "pip install"),
        ("python3 -m pip install -r requirements.txt", "pip install"),
        ("uvx -p 3.13 -w pytest==8.4.1 pytest /tests", "uvx"),
        ("if ! wget -q https://example.org; then exit 1; fi", "wget"),
        ("x=$(curl -s https://example.org)", "curl"),
        ('echo "got `wget -qO- example.org`"', "wget"),
        ("bash -lc 'npm ci'", "npm ci"),
        ("bash <<EOF\nuv add pytest\nEOF", "uv add"),
        ("timeout 60 git clone https://example.org/x.git", "git clone"),
        ("apt-get update && \\\n    curl -O https://example.org/x", "curl"),
    ],
)
def test_commands_that_reach_the_network_are_found_where_a_shell_runs_them(script: str, needed: str) -> None:
    assert network_commands(script) == [needed]


def test_a_run_line_may_install_what_the_host_has_and_speak_of_what_it_has_not() -> None:
    assert (
        why_not_runnable("apt-get update && apt-get install -y --no-install-recommends tmux bash # and wget")
        is None
    )
    assert why_not_runnable("echo 'use curl https://example.org' > /app/README") is None
    assert why_not_runnable("apt-get install -y no-such-package-x") == "install no-such-package-x"


def task(
    tmp_path: Path,
    name: str,
    *,
    test: str = REWARD,
    network: str | None = "no-network",
    solution: bool = True,
) -> Path:
    folder = tmp_path / name
    shutil.copytree(HELLO, folder)
    (folder / "tests" / "test.sh").write_text(f"#!/bin/bash\n{test}\n")
    (folder / "task.toml").write_text(f'[environment]\nnetwork_mode = "{network}"\n' if network else "")
    if not solution:
        shutil.rmtree(folder / "solution")
    return folder


def source(tasks_dir: Path, **options: object) -> HarborTasks:
    defaults = {"environment_type": "sandbox", "eval_split": 0.0}
    return open_harbor(
        TrainerConfig(model_name="org/model", tasks_dir=str(tasks_dir), **{**defaults, **options}),
        byte_chat(),
    )


@needs_sandbox
def test_a_run_warns_of_verifiers_that_need_an_internet_they_do_not_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two"):
        task(tmp_path, name, test=f"curl -LsSf https://example.org/install.sh | sh\n{REWARD}")
    task(tmp_path, "three")
    with caplog.at_level(logging.WARNING):
        assert len(source(tmp_path).train) == 3
    (line,) = [record.getMessage() for record in caplog.records if "test.sh" in record.getMessage()]
    assert "`curl`" in line and "one, two" in line and "three" not in line


@needs_sandbox
def test_where_no_network_can_be_had_only_tasks_that_ask_for_it_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("sandbox", "task_folders"):
        monkeypatch.setattr(f"src.envs.{module}.why_no_network", lambda: "it needs the package slirp4netns")
    task(tmp_path / "default", "a", network=None)
    task(tmp_path / "default", "b", network=None)
    with caplog.at_level(logging.WARNING):
        assert len(source(tmp_path / "default").train) == 2
    (line,) = [record.getMessage() for record in caplog.records if "slirp4netns" in record.getMessage()]
    assert "a, b" in line
    task(tmp_path / "asking", "c", network="public")
    with pytest.raises(
        ConfigError, match=r"c: it asks for a public network.*slirp4netns.*environment_type=docker"
    ):
        source(tmp_path / "asking")
    with pytest.raises(ConfigError, match="it asks for a public network"):
        source(tmp_path / "default", environment_kwargs=["network=true"])


@pytest.mark.parametrize("environment_type", ["sandbox"])
@needs_sandbox
def test_tasks_of_several_steps_and_of_windows_are_refused_for_that_reason(
    tmp_path: Path, environment_type: str
) -> None:
    steps = tmp_path / "steps"
    (steps / "steps" / "first").mkdir(parents=True)
    (steps / "task.toml").write_text('[[steps]]\nname = "first"\n')
    with pytest.raises(ConfigError, match=r"steps: a task of several \[\[steps\]\].*harbor run"):
        source(steps, environment_type=environment_type)
    windows = task(tmp_path, "windows")
    (windows / "task.toml").write_text('[environment]\nos = "windows"\n')
    (windows / "tests" / "test.sh").rename(windows / "tests" / "test.bat")
    with pytest.raises(ConfigError, match=r"os = windows: trials run on Linux only; .*Windows host"):
        source(windows, environment_type=environment_type)


@needs_sandbox
def test_validate_tells_a_task_without_a_solution_from_a_bad_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graded = (
        "[ -f /app/hello.txt ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    )
    task(tmp_path / "tasks", "no-solution", test=graded, solution=False)
    task(tmp_path / "tasks", "sound", test=graded)
    assert validate([f"tasks_dir={tmp_path / 'tasks'}", "environment_type=sandbox"]) == 0
    first, second, *_, total = capsys.readouterr().out.splitlines()
    assert first.startswith("--   no-solution: nop 0.0; no solution/solve.sh")
    assert second.startswith("ok   sound: oracle 1.0, nop 0.0")
    assert total == "2 tasks in sandbox: 1 sound, 0 unsound, 1 without solution"
    task(tmp_path / "tasks", "given-away", solution=False)
    assert validate([f"tasks_dir={tmp_path / 'tasks'}", "environment_type=sandbox"]) == 1
    assert capsys.readouterr().out.splitlines()[0].startswith("BAD  given-away:")


@needs_sandbox
def test_validate_names_the_internet_where_the_verifier_lacks_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = task(
        tmp_path / "tasks",
        "offline",
        test="uvx no-such-program-x /tests; echo $((1 - ($? > 0))) > /logs/verifier/reward.txt",
    )
    assert verifier_needs(folder) == "uvx"
    assert validate([f"tasks_dir={tmp_path / 'tasks'}", "environment_type=sandbox"]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("BAD  offline: oracle 0.0, nop 0.0") and line.endswith(
        "(tests/test.sh needs the internet for `uvx`)"
    )

"""The server that `run_skyrl_tx` starts has a key that only its user can read."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts import run_skyrl_tx
from skyrl_tx_server.config.command_line import with_secrets


class FakePopen:
    """Replaces subprocess.Popen. Records the commands and environments, and starts nothing."""

    calls: list[tuple[list[str], dict[str, str]]]
    returncode = 0

    def __init__(self, command: list[str], *, env: dict[str, str], **options: Any) -> None:
        FakePopen.calls.append((command, env))

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def poll(self) -> int:
        return 0

    def terminate(self) -> None:
        pass


@pytest.fixture
def started_processes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Replace subprocess.Popen. Return the commands and environments of the processes that are started."""
    FakePopen.calls = []
    monkeypatch.setattr(subprocess, "Popen", FakePopen)
    monkeypatch.setattr(run_skyrl_tx, "healthy", lambda url: True)
    monkeypatch.setattr(run_skyrl_tx.signal, "signal", lambda *_: None)
    return FakePopen.calls


def quick_start(path: Path) -> str:
    """Run a quick start of `run_skyrl_tx` with the run directory `path`, whose name must be `run`. Return the
    key of its server."""
    assert run_skyrl_tx.main([f"log_path={path}"]) == 0
    return (path.with_name("run.server") / "api_key").read_text().strip()


def test_the_key_is_in_a_private_file_and_in_no_argument(
    tmp_path: Path,
    started_processes: list[tuple[list[str], dict[str, str]]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    key = quick_start(tmp_path / "run")
    assert key.startswith("tml-") and len(key) >= 40
    files = tmp_path / "run.server"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (files, files / "api_key")] == [0o700, 0o600]
    (server, server_environment), (trainer, trainer_environment) = started_processes
    assert "skyrl_tx_server" in server and server_environment["SKYRL_TX_API_KEY"] == key
    assert "src.train" in trainer and trainer_environment["TINKER_API_KEY"] == key
    assert not any(key in argument for argument in (*server, *trainer))
    captured = capfd.readouterr()
    assert key not in captured.out + captured.err and str(files / "api_key") in captured.out
    assert key not in os.environ.values()


def test_every_server_has_its_own_key(
    tmp_path: Path, started_processes: list[tuple[list[str], dict[str, str]]]
) -> None:
    assert quick_start(tmp_path / "run") != quick_start(tmp_path / "run")


def test_the_server_reads_its_key_from_the_environment() -> None:
    environment = {"SKYRL_TX_API_KEY": "tml-a"}
    assert with_secrets(["base_model=m"], environment) == ["base_model=m", "api_key=tml-a"]
    assert not environment  # processes that the server starts must not inherit the key
    assert with_secrets(["api_key=tml-b"], {"SKYRL_TX_API_KEY": "tml-a"}) == ["api_key=tml-b"]
    assert with_secrets(["base_model=m"], environment) == ["base_model=m"]

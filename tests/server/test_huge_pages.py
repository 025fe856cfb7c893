"""`restart_with_huge_pages` restarts a program with the environment variable for huge pages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from skyrl_tx_server.config import huge_pages
from skyrl_tx_server.config.huge_pages import REQUEST, VARIABLE, restart_with_huge_pages

PROGRAM = """
import os
from skyrl_tx_server.config.huge_pages import VARIABLE, restart_with_huge_pages
restart_with_huge_pages()
print(os.getpid(), os.environ[VARIABLE])
"""


def run_program(environment: dict[str, str]) -> tuple[int, list[str]]:
    """Return the process id of the program and the words that it prints."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True
    ) as program:
        output, _ = program.communicate(timeout=60)
    assert program.returncode == 0
    return program.pid, output.split()


def test_a_restarted_program_has_its_process_id() -> None:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    pid, printed = run_program(environment)
    assert printed == [str(pid), REQUEST]


def test_a_value_that_the_user_has_set_is_kept() -> None:
    pid, printed = run_program(os.environ | {VARIABLE: "glibc.malloc.arena_max=2"})
    assert printed == [str(pid), "glibc.malloc.arena_max=2"]


def test_other_systems_do_not_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    restart_with_huge_pages()
    assert VARIABLE not in os.environ

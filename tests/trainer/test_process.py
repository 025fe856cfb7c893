"""Tests that `exit_process` ends a program with its exit status while daemon threads run, and tests the time
limits of a stop."""

from __future__ import annotations

import subprocess
import sys

from src.core.process import STOP_GRACE_S
from src.policy.backend import CLOSE_TIMEOUT_S

# Rust code of pydantic calls Python code in the daemon thread, as in threads of the tinker SDK. Without
# `exit_process`, the finalization of the interpreter can abort the process.
DAEMON_THREAD = """
import atexit, threading, time
from pydantic import BaseModel, field_validator
from src.core.process import exit_process

class Slow(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def wait(cls, number):
        time.sleep(0.002)
        return number

def validate():
    while True:
        Slow(number=1)

threading.Thread(target=validate, daemon=True).start()
atexit.register(print, "the exit handler")
threading.Thread(target=lambda: (time.sleep(0.2), print("the thread"))).start()
print("the program")
exit_process(7)
"""


def test_threads_and_exit_handlers_end_before_the_process() -> None:
    program = subprocess.run(
        [sys.executable, "-c", DAEMON_THREAD], capture_output=True, text=True, timeout=60, check=False
    )
    assert (program.returncode, program.stderr) == (7, "")
    assert program.stdout.splitlines() == ["the program", "the thread", "the exit handler"]


def test_a_stop_without_a_server_has_time_to_close_the_session() -> None:
    assert STOP_GRACE_S > CLOSE_TIMEOUT_S

"""Tests that `exit_process` ends a program with its exit status while daemon threads run."""

from __future__ import annotations

import subprocess
import sys

# The thread returns to Python inside pydantic, which is written in Rust, as threads of the tinker SDK do.
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

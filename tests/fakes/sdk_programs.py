"""Checks the exit status of programs that use the tinker SDK."""

from __future__ import annotations

import signal

_ABORTED = (-signal.SIGABRT, 128 + signal.SIGABRT)  # as subprocess and as a shell report it


def is_finished(returncode: int) -> bool:
    """Return whether a program that uses the SDK may have executed its last statement.

    Before Python 3.14, the interpreter ends other threads with `pthread_exit` when it exits. On a busy
    machine this can abort the process, because the SDK's HTTP client pyqwest runs Rust code in its threads.
    The status therefore does not prove success: tests must also check the output of the program.
    """
    return returncode == 0 or returncode in _ABORTED

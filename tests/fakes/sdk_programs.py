"""The exit status of programs that use the tinker SDK and end as other Python programs do."""

from __future__ import annotations

import signal

_ABORTED = (-signal.SIGABRT, 128 + signal.SIGABRT)  # the second is that of a shell


def is_finished(returncode: int) -> bool:
    """Return whether a program of the SDK ended after its last statement.

    Before Python 3.14, the interpreter ends other threads by `pthread_exit` while it is finalized. On a busy
    machine this can abort the process, because the threads of pyqwest, the HTTP client of the SDK, run code
    in Rust. Such a program has printed all its output, which the tests must check.
    """
    return returncode == 0 or returncode in _ABORTED

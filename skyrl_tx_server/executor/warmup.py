"""Compiles programs in a background thread before they are needed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from jax.stages import Lowered

logger = logging.getLogger(__name__)


def start_warmup(programs: Iterable[tuple[str, Lowered]]) -> None:
    """Compile `programs` (name, program) in a thread. If a request needs a program that the thread has not
    compiled yet, the request compiles the program itself.

    The thread is not a daemon, so that a normal exit of Python waits for the current compilation: the exit
    handlers of XLA would crash during a compilation. The command `python -m skyrl_tx_server` does not wait,
    because it exits with `os._exit`, which runs no exit handlers.
    """
    threading.Thread(target=_compile, args=(programs,), name="compile-ahead", daemon=False).start()


def _compile(programs: Iterable[tuple[str, Lowered]]) -> None:
    start, count = time.monotonic(), 0
    try:
        for name, program in programs:
            if not threading.main_thread().is_alive():
                return
            program.compile()
            count += 1
            logger.debug("compiled %s", name)
    except Exception:
        logger.exception("warmup failed after %d programs; requests compile the remaining programs", count)
        return
    logger.info("compiled %d programs in advance in %.0f s", count, time.monotonic() - start)

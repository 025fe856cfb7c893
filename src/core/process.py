"""Signals, deadlines of blocking calls, and the end of the process.

The first SIGINT or SIGTERM cancels the work, which may then save a checkpoint; the second ends the process
immediately. Before the work has started, the first signal ends the process. A thread ends the process if the
work still runs `stop_timeout_s` + STOP_GRACE_S seconds after the first signal.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn, override

from src.core.errors import INTERRUPTED, TrainerError
from src.core.event_loop import warn_if_blocked

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_TIMEOUT_S = 10.0  # default of the argument `stop_timeout_s`; enough if the program saves nothing
# The event loop has this time after the stop timeout to cancel its tasks, to close the session and to record
# the end of the run.
STOP_GRACE_S = 8.0
STOPPING = "stopping: saving a checkpoint first (press Ctrl-C again to stop at once)"
EXIT_S = 3.0  # the maximum time for joining threads and running the exit handlers


class AbandoningExecutor(ThreadPoolExecutor):
    """An executor for `asyncio.to_thread` whose shutdown does not wait for blocking calls."""

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


@contextmanager
def exit_on_signal() -> Generator[None]:
    """End the process at the first signal while the block runs. Use it before there is anything to save."""
    with _handling(_end_at_once):
        yield


async def run_until_signal(
    work: Coroutine[object, object, object],
    say: Callable[[str], None],
    *,
    announcement: str = "stopping (press Ctrl-C again to stop at once)",
    stop_timeout_s: float = STOP_TIMEOUT_S,
) -> int:
    """Run `work` and return its exit status: 0, or INTERRUPTED if a signal cancelled it.

    The first signal cancels `work`. If `work` still runs `stop_timeout_s` seconds later, it is cancelled
    again, which ends its clean-up. `say` prints a message for the user: `announcement` after the first
    signal, and a notice if `work` is cancelled again. The signal handlers are those of the module `signal`
    and not of the event loop, so a second signal ends the process even while the loop is blocked.
    """
    loop = asyncio.get_running_loop()
    loop.set_default_executor(AbandoningExecutor())
    task = asyncio.ensure_future(work)
    requested, finished = threading.Event(), threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            _end_at_once(number, frame)
        requested.set()
        loop.call_soon_threadsafe(stop)

    def stop() -> None:
        say(announcement)
        task.cancel()
        loop.call_later(stop_timeout_s, abandon)

    def abandon() -> None:
        if not task.done():
            say(f"not stopped within {stop_timeout_s:g} s; running work is abandoned")
            task.cancel()

    def end_from_outside() -> None:
        requested.wait()
        if not finished.wait(stop_timeout_s + STOP_GRACE_S):
            _end_at_once()

    threading.Thread(target=end_from_outside, name="stop-deadline", daemon=True).start()
    try:
        with _handling(on_signal), warn_if_blocked():
            await task
    except asyncio.CancelledError:
        if not requested.is_set():
            raise
        return INTERRUPTED
    finally:
        finished.set()
        requested.set()
    return 0


async def in_thread[T](function: Callable[[], T]) -> T:
    """Run `function` in a new daemon thread and return its result.

    Unlike a thread of `asyncio.to_thread`, this thread does not delay the end of the process, and a function
    that never returns occupies no thread of a pool. A StopIteration becomes a RuntimeError.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # so that a cancelled caller does not cancel it

    def call() -> None:
        try:
            future.set_result(function())
        except StopIteration as error:  # an asyncio future cannot have this exception
            stopped = RuntimeError("the function raised StopIteration")
            stopped.__cause__ = error
            future.set_exception(stopped)
        except BaseException as error:
            future.set_exception(error)

    start_daemon(partial(contextvars.copy_context().run, call))
    return await asyncio.wrap_future(future)


def start_daemon(call: Callable[[], None]) -> None:
    """Run `call` in a thread that does not delay the end of the process."""
    threading.Thread(target=call, daemon=True).start()


@asynccontextmanager
async def deadline(seconds: float, error: type[TrainerError], message: str) -> AsyncGenerator[None]:
    """Raise `error` with `message` if the block takes longer than `seconds`.

    A TimeoutError raised inside the block is not converted.
    """
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError as cause:
        if scope.expired():
            raise error(message) from cause
        raise


def exit_process(status: int) -> NoReturn:
    """End the process when its non-daemon threads and exit handlers have ended, or after `EXIT_S` seconds.

    The interpreter is not finalized. Before Python 3.14, finalization ends daemon threads by `pthread_exit`,
    which aborts the process (SIGABRT, without a message) if the thread of the tinker SDK runs code in Rust.
    """

    def end() -> None:
        time.sleep(EXIT_S)
        os._exit(status)

    _flush()
    for number in SIGNALS:
        signal.signal(number, lambda *_: os._exit(status))
    threading.Thread(target=end, name="exit-deadline", daemon=True).start()
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]  joins the threads, as the interpreter does at its end
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    _flush()
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _end_at_once(number: int = 0, frame: FrameType | None = None) -> NoReturn:
    with suppress(OSError):
        # `print` is not reentrant, and the signal may have interrupted a call of `print`.
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"stopped at once\n")
    os._exit(INTERRUPTED)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], Any]) -> Generator[None]:
    previous_handlers = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

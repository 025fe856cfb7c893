"""How the process stops: what signals do, how a call that blocks is bounded, and how the process ends.

The first SIGINT or SIGTERM asks the work to stop, which then saves a checkpoint; the second ends the process at once. Before the work has
begun, the first one ends the process. A stop that does not finish within `stop_timeout_s` is ended from outside the event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn, override

from src.core.errors import INTERRUPTED, TrainerError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_TIMEOUT_S = 10.0  # of programs that have nothing to save
STOP_GRACE_S = 3.0  # after the stop's own deadline, for the event loop to end what it runs
EXIT_S = 3.0  # for the interpreter's own shutdown, which joins every thread


class AbandoningExecutor(ThreadPoolExecutor):
    """The executor of `asyncio.to_thread` in a program that must be able to end: its shutdown does not wait for calls that block."""

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """A signal ends the process at once while the block runs: nothing has begun, so there is nothing to save."""
    with _handling(_end_at_once):
        yield


async def run_until_signal(
    work: Coroutine[object, object, None],
    say: Callable[[str], None],
    *,
    announcement: str = "stopping (once more to stop at once)",
    stop_timeout_s: float = STOP_TIMEOUT_S,
) -> int:
    """The exit status of `work`. The first signal cancels it; after `stop_timeout_s` it is cancelled once more, which ends what it does to
    stop cleanly. A handler of Python's own is used, not the loop's, because a signal must also work while the loop is blocked."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(AbandoningExecutor())
    task = asyncio.ensure_future(work)
    requested, over = threading.Event(), threading.Event()

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
            say(f"not stopped within {stop_timeout_s:g} s; what is under way is abandoned")
            task.cancel()

    def end_from_outside() -> None:
        requested.wait()
        if not over.wait(stop_timeout_s + STOP_GRACE_S):
            _end_at_once()

    threading.Thread(target=end_from_outside, name="stop-deadline", daemon=True).start()
    try:
        with _handling(on_signal):
            await task
    except asyncio.CancelledError:
        if not requested.is_set():
            raise
        return INTERRUPTED
    finally:
        over.set()
        requested.set()
    return 0


async def in_thread[T](function: Callable[[], T]) -> T:
    """As `asyncio.to_thread`, in a daemon thread: a call that never returns can be abandoned, and does not delay the process's end."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: Callable[[], None]) -> None:
        if not answer.done():  # else it was abandoned
            result()

    def call() -> None:
        try:
            value = function()
        except BaseException as error:
            settled = lambda error=error: answer.set_exception(error)  # noqa: E731
        else:
            settled = lambda: answer.set_result(value)  # noqa: E731
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, settled)

    start_daemon(partial(contextvars.copy_context().run, call))
    return await answer


def start_daemon(call: Callable[[], None]) -> None:
    """Run `call` in a thread that does not delay the process's end."""
    threading.Thread(target=call, daemon=True).start()


@asynccontextmanager
async def deadline(seconds: float, error: type[TrainerError], message: str) -> AsyncIterator[None]:
    """`error` with `message` when the block takes longer. A TimeoutError from inside the block passes as it is."""
    try:
        async with asyncio.timeout(seconds) as scope:
            yield
    except TimeoutError as cause:
        if scope.expired():
            raise error(message) from cause
        raise


def exit_process(status: int) -> NoReturn:
    """Ends the process, also where an abandoned thread still waits: such a thread would be joined for ever."""

    def end() -> None:
        time.sleep(EXIT_S)
        os._exit(status)

    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    for name in SIGNALS:
        signal.signal(name, lambda *_: os._exit(status))
    threading.Thread(target=end, name="exit-deadline", daemon=True).start()
    sys.exit(status)


def _end_at_once(number: int = 0, frame: FrameType | None = None) -> NoReturn:
    with suppress(OSError):
        os.write(
            sys.__stderr__.fileno() if sys.__stderr__ else 2, b"stopped at once\n"
        )  # `print` could be what was interrupted
    os._exit(INTERRUPTED)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    before = {name: signal.signal(name, handler) for name in SIGNALS}
    try:
        yield
    finally:
        for name, earlier in before.items():
            signal.signal(name, signal.SIG_DFL if earlier is None else earlier)

"""Work that a stop of the run does not interrupt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed[T]:
    """The result of work that a stop of the run did not interrupt."""

    value: T
    is_stopped: bool  # whether the caller was cancelled while the work ran


async def to_its_end[T](work: Coroutine[object, object, T]) -> Completed[T]:
    """Finish `work` even if the caller is cancelled meanwhile. A second cancellation also cancels `work`.

    Raises CancelledError if the caller was cancelled and `work` then failed. The error of `work` is logged.
    """
    task = asyncio.ensure_future(work)
    try:
        return Completed(value=await asyncio.shield(task), is_stopped=False)
    except asyncio.CancelledError:
        if task.cancelled():
            raise
        try:
            return Completed(value=await task, is_stopped=True)
        except Exception as error:
            logger.warning("an operation failed during the stop: %s: %s", type(error).__name__, error)
            raise asyncio.CancelledError from error


async def run_to_its_end[T](work: Coroutine[object, object, T]) -> T:
    """Finish `work` even if the caller is cancelled meanwhile. Return its result, or raise CancelledError if
    the caller was cancelled."""
    completed = await to_its_end(work)
    if completed.is_stopped:
        raise asyncio.CancelledError
    return completed.value

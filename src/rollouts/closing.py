"""Closing a task source at the end of a run."""

from __future__ import annotations

import asyncio
import logging

from src.envs.base import TaskSource

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0


async def closed(source: TaskSource) -> None:
    """Close the environment. An error or a timeout is a warning: it must not hide how the run ended."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await source.close()
    except Exception as error:
        logger.warning("the environment did not close: %s: %s", type(error).__name__, error)

"""Tests the warning about code that blocks the event loop."""

import logging
import threading

from src.core.event_loop import warn_if_blocked


class Announcing(logging.Handler):
    """Keeps the messages and sets `logged` at the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.logged = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.logged.set()


async def test_code_that_blocks_the_event_loop_is_named():
    handler = Announcing()
    logging.getLogger("src.core.event_loop").addHandler(handler)
    try:
        with warn_if_blocked(0.05):
            handler.logged.wait(30)
    finally:
        logging.getLogger("src.core.event_loop").removeHandler(handler)
    [message] = handler.messages
    assert (
        "test_event_loop.py:" in message and " in test_code_that_blocks_the_event_loop_is_named " in message
    )
    assert "has blocked the event loop for 0.05 s" in message

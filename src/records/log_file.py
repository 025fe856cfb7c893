"""logs.log: every log record of a run at INFO and above. The terminal shows only what the display prints."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class LogFile(logging.FileHandler):
    """A file handler that stays silent on a full disk, which ends the run with an error of its own."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Print no traceback per record."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to_file(path: Path) -> Iterator[None]:
    """Append the records of all loggers to `path` while the block runs."""
    handler = LogFile(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()

"""Log levels, and the log file of a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from src.core.errors import StorageError

THIRD_PARTIES = (
    *("httpx", "httpx2", "httpcore", "httpcore2"),
    *("LiteLLM", "harbor", "openai", "tinker", "urllib3"),
)
# Environment variable -> the logger that it sets to DEBUG if its value is 1.
DEBUG_VARIABLES = {
    "DEBUG_PARSER": "src.envs.service.tool_calls",
    "DEBUG_LENGTH_FILTERING": "src.learning.filters",
}


class LogFile(logging.FileHandler):
    """A log file that ignores write errors such as a full disk, because the run itself reports them."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the error."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def set_log_levels() -> None:
    """Set the log levels: WARNING for THIRD_PARTIES, DEBUG for a logger whose variable in DEBUG_VARIABLES has
    the value 1, and INFO for all other loggers."""
    logging.getLogger().setLevel(logging.INFO)
    for name in THIRD_PARTIES:
        logging.getLogger(name).setLevel(logging.WARNING)
    for variable, name in DEBUG_VARIABLES.items():
        if os.environ.get(variable) == "1":
            logging.getLogger(name).setLevel(logging.DEBUG)


@contextmanager
def logging_to_file(path: Path) -> Generator[None]:
    """While the block runs, write every log record to the file `path`.

    Raises StorageError if the file cannot be opened.
    """
    try:
        handler = LogFile(path)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror}; free space or fix the cause, then run the command again"
        ) from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()

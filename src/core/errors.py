"""Every error the trainer raises on purpose, and the border that attributes foreign ones.

TrainerError                    one line for the user, exit status 1
|-- ConfigError (ValueError)    a bad option, file or task; exit status 2, before any work
|-- BackendError                the Tinker endpoint cannot be reached or answered with a failure
|   `-- ServerLost              it went away, or forgot us; a checkpoint can be taken up once it is back
|-- SandboxError                a sandbox could not start or died
|-- StorageError (OSError)      the run's own files cannot be written
|-- RubbleError                 too many trials could not be graded to learn from the rest
|-- VerifierError               a trial could not be graded
`-- AgentFault                  an agent made its own grading impossible, which scores 0
"""

from collections.abc import Iterator
from contextlib import contextmanager

from src.core.trajectory import ZeroReason

INTERRUPTED = 130  # the exit status after Ctrl-C


class TrainerError(Exception):
    """Shown as one line; `exit_status` is the process's."""

    exit_status: int = 1


class ConfigError(TrainerError, ValueError):
    exit_status = 2


class BackendError(TrainerError, ConnectionError):
    pass


class ServerLost(BackendError):
    pass


class StorageError(TrainerError, OSError):
    pass


class TooManyFailuresError(TrainerError, RuntimeError):
    pass


class SandboxError(TrainerError, RuntimeError):
    pass


class VerifierError(TrainerError, RuntimeError):
    pass


class AgentFault(TrainerError, RuntimeError):
    def __init__(self, reason: ZeroReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@contextmanager
def boundary(error: type[TrainerError], what: str) -> Iterator[None]:
    """Attribute any foreign exception raised inside to the border it crossed: `boundary(BackendError, "saving weights")`."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as cause:
        raise error(f"{what}: {type(cause).__name__}: {cause}") from cause

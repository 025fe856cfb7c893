"""The errors that the trainer raises, and `boundary`, which converts other exceptions to them.

TrainerError                    shown to the user as one line, exit status 1
|-- ConfigError (ValueError)    an invalid option, file or task; exit status 2
|-- BackendError (ConnectionError)  a Tinker or OpenAI-compatible endpoint cannot be reached or failed
|   |-- PromptTooLong           an OpenAI-compatible endpoint refused a prompt for its length
|   `-- ServerLost              the server stopped or lost this run; the run can resume from a checkpoint
|-- EnvServerError (ConnectionError)  the server of an environment failed
|-- SandboxError (RuntimeError)  a sandbox, worker process or user simulator of an environment failed
|-- StorageError (OSError)      the files of the run cannot be written
|-- TooManyFailuresError (RuntimeError)  too few trials of a run or of an evaluation could be graded
|-- NothingTrainedError (RuntimeError)  a run reached its last step without having changed the weights
|-- VerifierError (RuntimeError)  a trial could not be graded
`-- AgentFault (RuntimeError)   an agent made its own grading impossible; the reward is 0
"""

from collections.abc import Generator
from contextlib import contextmanager

from src.core.trajectory import ZeroReason

INTERRUPTED = 130  # exit status after SIGINT (Ctrl-C) or SIGTERM


class TrainerError(Exception):
    """The base class of the trainer's errors. `exit_status` is the exit status of the process."""

    exit_status: int = 1


class ConfigError(TrainerError, ValueError):
    exit_status = 2


class BackendError(TrainerError, ConnectionError):
    pass


class ServerLost(BackendError):
    pass


class PromptTooLong(BackendError):
    pass


class EnvServerError(TrainerError, ConnectionError):
    pass


class StorageError(TrainerError, OSError):
    pass


class TooManyFailuresError(TrainerError, RuntimeError):
    pass


class NothingTrainedError(TrainerError, RuntimeError):
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
def boundary(error: type[TrainerError], action: str) -> Generator[None]:
    """Convert exceptions of the block, except TrainerErrors, to `error`. The message begins with `action`."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as cause:
        raise error(f"{action}: {type(cause).__name__}: {cause}") from cause

"""The result of a run, read from the files of its directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from src.loop.outcome import Success, success_of
from src.records import checkpoints
from src.records.checkpoints import Checkpoint
from src.records.journal import RunState, last_end
from src.records.run_directory import METRICS_FILE, read_config, require_run
from src.records.tracking import records


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What a run has achieved so far, and how its last process ended."""

    directory: Path
    # None: the process still runs, was killed or could not write its end, or no process has started.
    end: RunState | None
    error: str  # the message of the error that ended the process; empty if there was none
    num_steps: int  # the last step that has a line in metrics.jsonl; 0 if there is none
    metrics: Mapping[str, float]  # the finite values of the last line of metrics.jsonl
    held_out: Success  # the held-out success rates before and after training
    checkpoints: Sequence[Checkpoint]  # the oldest first

    @property
    def last_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint; None if none was saved."""
        return self.checkpoints[-1] if self.checkpoints else None


def read_result(directory: str | Path) -> RunResult:
    """Return the result so far of the run in `directory`. The run may be running, interrupted or failed.

    Raises ConfigError if the directory has no run or a damaged file.
    """
    directory = Path(directory).expanduser()
    require_run(directory, read_config(directory))
    lines = records(directory / METRICS_FILE)
    end = last_end(directory)
    last = {name: value for name, value in lines[-1].items() if value is not None} if lines else {}
    return RunResult(
        directory=directory,
        end=None if end is None else end.state,
        error="" if end is None else end.cause,
        num_steps=int(max((line["step"] for line in lines), default=0)),
        metrics=last,
        held_out=success_of(directory / METRICS_FILE),
        checkpoints=checkpoints.read(directory),
    )

"""checkpoints.jsonl: the saved checkpoints of a run. A run resumes after the step of its last checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from src.core.errors import ConfigError
from src.records.atomic_io import append_record, truncate_torn_line
from src.records.reading import Count, read_lines

JOURNAL = "checkpoints.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One line of checkpoints.jsonl.

    The line has no seeds of trials, because a resumed run computes them from `batch` and the config. With
    `task_sampling=uniform`, the run also computes the order of the tasks from the config.
    """

    name: str
    batch: Count  # number of steps done
    epoch: Count
    final: bool  # whether all steps of the run were done
    state_path: str  # weights and optimizer
    sampler_path: str


def append(log_path: Path, checkpoint: Checkpoint) -> None:
    """Append a checkpoint that the server has confirmed. The line is on disk when the call returns."""
    truncate_torn_line(log_path / JOURNAL)
    append_record(log_path / JOURNAL, asdict(checkpoint))


def last(log_path: Path) -> Checkpoint | None:
    """Return the newest checkpoint; None if there is none. Raises ConfigError for a damaged line."""
    checkpoints = read(log_path)
    return checkpoints[-1] if checkpoints else None


def read(log_path: Path) -> list[Checkpoint]:
    """Return all checkpoints, the oldest first. Raises ConfigError for a damaged line."""
    return [*read_lines(log_path / JOURNAL, TypeAdapter(Checkpoint))]


def sampler_path(checkpoint: str | None) -> str | None:
    """Return the tinker:// path to sample from. `checkpoint` is this path, or a run directory, whose last
    checkpoint is used.

    Returns None for None. Raises ConfigError for the path of a training checkpoint and for a directory
    without a checkpoint.
    """
    if checkpoint is None or checkpoint.startswith("tinker://"):
        if checkpoint is not None and "/weights/" in checkpoint:
            sampler = checkpoint.replace("/weights/", "/sampler_weights/")
            raise ConfigError(
                f"{checkpoint} is a training checkpoint; give its sampler checkpoint: {sampler}"
            )
        return checkpoint
    saved = last(Path(checkpoint).expanduser())
    if saved is None:
        raise ConfigError(
            f"{checkpoint} is neither a tinker:// path nor a run directory with a checkpoint; give one of "
            "them"
        )
    return saved.sampler_path

"""checkpoints.jsonl: where a run can be taken up again. A checkpoint after step `batch` resumes at the step after it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from src.records.atomic_io import append_record, truncate_torn_line
from src.records.reading import Count, read_lines, same

JOURNAL = "checkpoints.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One line of the journal. Task order, seeds and step count follow from `batch` and the config, so nothing else is run state."""

    name: str
    batch: Count  # steps done
    epoch: Count
    final: bool
    state_path: str  # weights and optimizer
    sampler_path: str


def append(log_path: Path, checkpoint: Checkpoint) -> None:
    """On disk before the call returns: the journal is written after the server has confirmed the checkpoint."""
    truncate_torn_line(log_path / JOURNAL)
    append_record(log_path / JOURNAL, asdict(checkpoint))


def last(log_path: Path) -> Checkpoint | None:
    """The newest entry; None for a run that has saved nothing yet. ConfigError for a line that is damaged."""
    found = [*read_lines(log_path / JOURNAL, TypeAdapter(Checkpoint), same)]
    return found[-1] if found else None

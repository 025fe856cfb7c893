"""checkpoints.jsonl: where a run can be taken up again. A checkpoint after step `batch` resumes at the step after it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from src.errors import ConfigError
from src.record.durable import append_record, mend, records

JOURNAL = "checkpoints.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One line of the journal. Task order, seeds and step count follow from `batch` and the config, so nothing else is run state."""

    name: str
    batch: int  # steps done
    epoch: int
    final: bool
    state_path: str  # weights and optimizer
    sampler_path: str


def append(log_path: Path, checkpoint: Checkpoint) -> None:
    """On disk before the call returns: the journal is written after the server has confirmed the checkpoint."""
    mend(log_path / JOURNAL)
    append_record(log_path / JOURNAL, asdict(checkpoint))


def last(log_path: Path) -> Checkpoint | None:
    """The newest readable entry; None for a run that has saved nothing yet."""
    checkpoint = None
    for fields in records(log_path / JOURNAL):
        known = {name: fields[name] for name in Checkpoint.__dataclass_fields__ if name in fields}
        try:
            checkpoint = Checkpoint(**known)
        except TypeError as error:
            raise ConfigError(f"{log_path / JOURNAL} holds a line that is no checkpoint: {json.dumps(fields)[:100]}") from error
    return checkpoint

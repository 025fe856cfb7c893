"""RunLog: one metrics object per step, to metrics.jsonl always and to wandb when asked. The only importer of wandb."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from src.errors import ConfigError

if TYPE_CHECKING:
    import wandb

WANDB_ID_FILE = "wandb_id.txt"


class RunLog:
    """Appends to `metrics.jsonl`, one object with `step` per call."""

    def __init__(self, path: Path, wandb_run: wandb.Run | None = None) -> None:
        self._path = path
        self._wandb_run = wandb_run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **finite}) + "\n")
        if self._wandb_run is not None:
            self._wandb_run.log(dict(metrics), step=step, commit=True)


@contextmanager
def open_run_log(log_path: Path, *, project: str | None, name: str, config: Mapping[str, object], repeat_from: int) -> Iterator[RunLog]:
    """The log of the run in `log_path`. Steps from `repeat_from` on are about to be repeated and leave metrics.jsonl."""
    path = log_path / "metrics.jsonl"
    forget_from(path, repeat_from)
    if project is None:
        yield RunLog(path)
        return
    wandb_run = _wandb_run(log_path, project=project, name=name, config=config)
    try:
        yield RunLog(path, wandb_run)
    finally:
        wandb_run.finish()


def recorded(path: Path, name: str) -> dict[int, float]:
    """The values of one metric by step."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["step"]: record[name] for record in records if record.get(name) is not None}


def forget_from(path: Path, step: int) -> None:
    """Drops the records of `step` and later, and a last line that was cut by a crash."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record["step"] < step:
            kept.append(line + "\n")
    path.write_text("".join(kept))


def _wandb_run(log_path: Path, *, project: str, name: str, config: Mapping[str, object]) -> wandb.Run:
    """A new run, or the one this folder already belongs to."""
    os.environ.setdefault("WANDB_SILENT", "true")  # read at import; the run's own output names the folder
    import wandb  # slow to import

    id_file = log_path / WANDB_ID_FILE
    run_id = id_file.read_text().strip() if id_file.exists() else None
    try:
        run = wandb.init(
            project=project,
            name=name,
            config=dict(config),
            dir=str(log_path),
            id=run_id,
            resume="allow" if run_id else None,
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"wandb: {first_line}; log in with `wandb login`, set WANDB_MODE=offline, or drop wandb_project") from error
    id_file.write_text(run.id + "\n")
    return run

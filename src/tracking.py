"""RunLog: one metrics object per step, to metrics.jsonl always and to wandb when asked. The only importer of wandb."""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from src.durable import append_record, records, replace_text
from src.errors import ConfigError

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)

WANDB_ID_FILE = "wandb_id.txt"
WANDB_FINISH_S = 120.0


class RunLog:
    """Appends to `metrics.jsonl`, one object with `step` per call."""

    def __init__(self, path: Path, wandb_run: wandb.Run | None = None) -> None:
        self._path = path
        self._wandb_run = wandb_run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if value is not None and math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
        append_record(self._path, {"step": step, **finite})
        if self._wandb_run is not None:
            self._wandb_run.log(dict(metrics), step=step, commit=True)

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds what the line of a step still lacked."""
        before = next((record for record in records(self._path) if record["step"] == step), {"step": step})
        forget_from(self._path, step)
        self.log(step, {name: value for name, value in before.items() if name != "step"} | dict(metrics))

    def forget_from(self, step: int) -> None:
        """Steps from this one on are about to be repeated and leave metrics.jsonl. wandb keeps the first value it was given."""
        forget_from(self._path, step)


@contextmanager
def open_run_log(log_path: Path, *, project: str | None, name: str, config: Mapping[str, object]) -> Iterator[RunLog]:
    """The log of the run in `log_path`, new or continued."""
    path = log_path / "metrics.jsonl"
    if project is None:
        yield RunLog(path)
        return
    wandb_run = _wandb_run(log_path, project=project, name=name, config=config)
    try:
        yield RunLog(path, wandb_run)
    finally:
        finish(wandb_run)


def finish(wandb_run: wandb.Run) -> None:
    """Uploads what is left. A network that is gone must not hold the process; the files stay, for `wandb sync`."""
    uploading = threading.Thread(target=wandb_run.finish, daemon=True)
    uploading.start()
    uploading.join(WANDB_FINISH_S)
    if uploading.is_alive():
        logger.warning("wandb did not finish uploading within %g s; `wandb sync` sends the rest", WANDB_FINISH_S)


def recorded(path: Path, name: str) -> dict[int, float]:
    """The values of one metric by step."""
    return {record["step"]: record[name] for record in records(path) if record.get(name) is not None}


def is_wall_clock(name: str) -> bool:
    """Whether a metric measures time. All others are the same in an unbroken run and in one that was killed and resumed.

    >>> [is_wall_clock(name) for name in ("time/total", "test/environment/agent_s", "environment/prefix_breaks")]
    [True, True, False]
    """
    name = name.removeprefix("test/")
    return name.startswith(("time/", "generate/trajectory_time_")) or (name.startswith("environment/") and name.endswith("_s"))


def forget_from(path: Path, step: int) -> None:
    """Drops the records of `step` and later, and a last line that was cut by a crash."""
    if not path.exists():
        return
    replace_text(path, "".join(json.dumps(record) + "\n" for record in records(path) if record["step"] < step))


def _wandb_run(log_path: Path, *, project: str, name: str, config: Mapping[str, object]) -> wandb.Run:
    """A new run, or the one this folder already belongs to."""
    os.environ.setdefault("WANDB_SILENT", "true")  # read at import; the run's own output names the folder
    import wandb  # slow to import

    id_file = log_path / WANDB_ID_FILE
    if not id_file.exists():  # named before it begins, so that a run killed at any moment goes on under the same id
        replace_text(id_file, secrets.token_hex(4) + "\n")
    try:
        return wandb.init(
            project=project,
            name=name,
            config=dict(config),
            dir=str(log_path),
            id=id_file.read_text().strip(),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"wandb: {first_line}; log in with `wandb login`, set WANDB_MODE=offline, or drop wandb_project") from error

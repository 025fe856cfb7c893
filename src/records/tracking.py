"""The metrics of a run: one object per step in metrics.jsonl and, if configured, in wandb and trackio.

This is the only module that imports wandb and trackio.
"""

from __future__ import annotations

import io
import json
import logging
import os
import secrets
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import TypeAdapter, ValidationError

from src.core.errors import ConfigError
from src.records.atomic_io import append_record, replace_text
from src.records.metrics_table import ALL_TASKS, RENAMED, RENAMED_NOTICE, aliases_of, with_aliases
from src.records.options import TrackingOptions
from src.records.reading import MetricsLine, is_readable, read_lines, read_word

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)

WANDB_ID_FILE = "wandb_id.txt"
TRACKIO_NAME_FILE = "trackio_name.txt"
FINISH_S = 120.0  # the longest wait for wandb or trackio at the end of a run
LINE: TypeAdapter[Any] = TypeAdapter(MetricsLine)
JUDGE_SUFFIX = "_with_taxonomy_feedback"


class TrackioRun(Protocol):
    """The methods of a trackio run that this module uses. A protocol is used because trackio is optional."""

    def log(self, metrics: dict[str, float], step: int | None = None) -> None: ...

    def finish(self) -> None: ...


class RunLog:
    """Writes one line per step to `metrics.jsonl` and sends it to wandb and trackio."""

    def __init__(
        self, path: Path, wandb_run: wandb.Run | None = None, trackio_run: TrackioRun | None = None
    ) -> None:
        self._path = path
        self._wandb_run = wandb_run
        self._trackio_run = trackio_run
        self._is_notice_due = True

    def log(self, step: int, metrics: Mapping[str, float], *, is_whole: bool = True) -> None:
        """Append the line of a step.

        If `is_whole` is false, the line is not sent to wandb and trackio, because a step can be sent only
        once. `amend` later completes the line and sends it.
        """
        metrics = self._with_aliases(metrics)
        append_record(self._path, {"step": step, **finite(metrics)})
        if is_whole:
            self._send(step, metrics)

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics, possibly none, to the line of `step`, and send the line.

        Lines of later steps are removed. The file is replaced as a whole: after a crash it has either the old
        line or the new one.
        """
        lines = records(self._path)
        before = next((record for record in lines if record["step"] == step), {})
        values = {name: value for name, value in before.items() if name != "step"} | dict(metrics)
        values = self._with_aliases(values)
        self._rewrite([*(line for line in lines if line["step"] < step), {"step": step, **finite(values)}])
        self._send(step, values, may_be_sent=not metrics)

    def forget_from(self, step: int) -> None:
        """Remove the lines from `step` on, because these steps are repeated.

        wandb keeps the values that it received first. trackio also stores the new values.
        """
        if self._path.exists():
            self._rewrite([record for record in records(self._path) if record["step"] < step])

    def _rewrite(self, lines: Sequence[Mapping[str, object]]) -> None:
        replace_text(self._path, "".join(json.dumps(line) + "\n" for line in lines))

    def _with_aliases(self, metrics: Mapping[str, float]) -> dict[str, float]:
        values = with_aliases(metrics)
        if self._is_notice_due and any(alias.metric in values for alias in RENAMED):
            self._is_notice_due = False
            logger.info("%s", RENAMED_NOTICE)
        return values

    def _send(self, step: int, metrics: Mapping[str, float | None], *, may_be_sent: bool = False) -> None:
        """Send a line to wandb and trackio.

        If `may_be_sent`, an earlier process may have sent the line. wandb ignores a repeated step. trackio
        would store the step again, so trackio does not receive such a line.
        """
        if self._wandb_run is not None:
            values = {name: value for name, value in metrics.items() if value is not None}
            self._wandb_run.log(values, step=step, commit=True)
        if self._trackio_run is not None and not may_be_sent:
            numbers = {name: value for name, value in finite(metrics).items() if value is not None}
            self._trackio_run.log(numbers, step=step)


@contextmanager
def open_run_log(
    log_path: Path,
    settings: TrackingOptions,
    *,
    name: str,
    config: Mapping[str, object],
    is_judged: bool = False,
) -> Generator[RunLog]:
    """Open the log of the run in `log_path`, and finish its wandb and trackio runs on exit.

    `is_judged` is true if a judge's bonus is part of the reward.
    """
    with ExitStack() as stack:
        wandb_run = trackio_run = None
        if settings.wandb_project is not None:
            wandb_run = _wandb_run(
                log_path,
                project=project_name(settings.wandb_project, is_judged=is_judged),
                name=name,
                config=config,
            )
            stack.callback(finish, wandb_run, "wandb", "run `wandb sync` to send the rest")
        if settings.trackio_project is not None:
            trackio_run = _trackio_run(log_path, project=settings.trackio_project, name=name, config=config)
            stack.callback(finish, trackio_run, "trackio", "run `trackio show` to see what was written")
        yield RunLog(log_path / "metrics.jsonl", wandb_run, trackio_run)


def finish(run: wandb.Run | TrackioRun, program: str, advice: str) -> None:
    """Finish a wandb or trackio run, and send the rest of its data. Waits for at most `FINISH_S`.

    Local files stay.
    """
    uploading = threading.Thread(target=run.finish, daemon=True)
    uploading.start()
    uploading.join(FINISH_S)
    if uploading.is_alive():
        logger.warning("%s did not finish within %g s; %s", program, FINISH_S, advice)


def project_name(project: str, *, is_judged: bool) -> str:
    """Return the wandb project. Runs with a judge's bonus in the reward have a separate project.

    >>> project_name("tau" + JUDGE_SUFFIX, is_judged=True)  # the suffix is added only once
    'tau_with_taxonomy_feedback'
    """
    return project + JUDGE_SUFFIX if is_judged and not project.endswith(JUDGE_SUFFIX) else project


def finite(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the metrics with None for every NaN, infinity and other number that cannot be read again."""
    return {
        name: value if value is not None and is_readable(value) else None for name, value in metrics.items()
    }


def records(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl. Raises ConfigError for a damaged line."""
    return list(read_lines(path, LINE))


def recorded(path: Path, name: str) -> dict[int, float]:
    """Return the values of a metric by step. In a line without the metric, the value of an alias is used."""
    names = (name, *aliases_of(name))
    values = {
        record["step"]: next((record[key] for key in names if record.get(key) is not None), None)
        for record in records(path)
    }
    return {step: value for step, value in values.items() if value is not None}


def recorded_variances(path: Path) -> dict[str, list[float]]:
    """Return the `variance_per_prompt` of each training step, by domain or task type.

    The key ALL_TASKS has the values of all tasks together.
    """
    variances: dict[str, list[float]] = {}
    for record in records(path):
        for name, value in record.items():
            area, _, last = name.rpartition("/")
            if last == "variance_per_prompt" and area.partition("/")[0] == "reward" and value is not None:
                variances.setdefault(area.partition("/")[2] or ALL_TASKS, []).append(value)
    return dict(sorted(variances.items()))


def _wandb_run(log_path: Path, *, project: str, name: str, config: Mapping[str, object]) -> wandb.Run:
    """Start a wandb run, or continue the wandb run of this directory."""
    # wandb reads this variable when it is imported, and then prints nothing. The trainer prints the path of
    # the run directory, which contains the files of wandb.
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb  # slow to import

    id_file = log_path / WANDB_ID_FILE
    if not id_file.exists():  # written before `init`, so that a killed run keeps its id
        replace_text(id_file, secrets.token_hex(4) + "\n")
    try:
        return wandb.init(
            project=project,
            name=name,
            config=dict(config),
            dir=str(log_path),
            id=read_word(id_file),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
    except (wandb.Error, ValidationError) as error:  # a ValidationError: WANDB_MODE or the like is invalid
        reason = (str(error).splitlines() or [""])[0]
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"setting {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ConfigError(
            f"wandb: {reason}; log in with `wandb login`, set WANDB_MODE=offline, or wandb_project=None"
        ) from error


def _trackio_run(log_path: Path, *, project: str, name: str, config: Mapping[str, object]) -> TrackioRun:
    """Start a trackio run, or continue the trackio run whose name is recorded in this directory."""
    try:
        import trackio  # pyright: ignore[reportMissingImports]  # optional
    except ImportError as error:
        raise ConfigError(
            "trackio_project needs the package trackio: run scripts/setup.sh trackio, or remove the option"
        ) from error
    name_file = log_path / TRACKIO_NAME_FILE
    if not name_file.exists():
        replace_text(name_file, name + "\n")
    with redirect_stdout(io.StringIO()):  # `init` prints several lines
        return trackio.init(
            project=project, name=read_word(name_file), config=dict(config), resume="allow", embed=False
        )

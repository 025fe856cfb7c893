"""RunLog: one metrics object per step, to metrics.jsonl always, to wandb and trackio when asked. The only importer of both."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import TypeAdapter

from src.core.errors import ConfigError
from src.records.atomic_io import append_record, replace_text
from src.records.metric_names import ALL_TASKS, with_aliases
from src.records.options import TrackingSettings
from src.records.reading import MetricsLine, read_lines, read_word, same

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)

WANDB_ID_FILE = "wandb_id.txt"
TRACKIO_NAME_FILE = "trackio_name.txt"
FINISH_S = 120.0
LINE: TypeAdapter[Any] = TypeAdapter(MetricsLine)
JUDGE_SUFFIX = "_with_taxonomy_feedback"


class TrackioRun(Protocol):
    """What we use of a trackio run; the package is optional."""

    def log(self, metrics: dict[str, float], step: int | None = None) -> None: ...

    def finish(self) -> None: ...


class RunLog:
    """Appends to `metrics.jsonl`, one object with `step` per call."""

    def __init__(
        self, path: Path, wandb_run: wandb.Run | None = None, trackio_run: TrackioRun | None = None
    ) -> None:
        self._path = path
        self._wandb_run = wandb_run
        self._trackio_run = trackio_run

    def log(self, step: int, metrics: Mapping[str, float], *, is_whole: bool = True) -> None:
        """A line that is not whole will be amended: wandb and trackio, which take a step once, have it then."""
        metrics = with_aliases(metrics)
        append_record(self._path, {"step": step, **finite(metrics)})
        if is_whole:
            self._send(step, metrics)

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds what the line of a step still lacked, perhaps nothing. Whenever the process dies, the file has the old line or the new
        one."""
        is_sent_perhaps = not metrics
        before = next((record for record in records(self._path) if record["step"] == step), {})
        metrics = with_aliases(
            {name: value for name, value in before.items() if name != "step"} | dict(metrics)
        )
        kept = [record for record in records(self._path) if record["step"] < step]
        replace_text(
            self._path,
            "".join(json.dumps(record) + "\n" for record in [*kept, {"step": step, **finite(metrics)}]),
        )
        self._send(step, metrics, is_sent_perhaps=is_sent_perhaps)

    def _send(self, step: int, metrics: Mapping[str, float], *, is_sent_perhaps: bool = False) -> None:
        """wandb ignores a step that it has; trackio would have it twice."""
        if self._wandb_run is not None:
            self._wandb_run.log(
                {name: value for name, value in metrics.items() if value is not None}, step=step, commit=True
            )
        if self._trackio_run is not None and not is_sent_perhaps:
            self._trackio_run.log(
                {name: value for name, value in finite(metrics).items() if value is not None}, step=step
            )

    def forget_from(self, step: int) -> None:
        """Steps from this one on are about to be repeated and leave metrics.jsonl, with a last line that a crash cut. wandb keeps the
        first value it was given."""
        if self._path.exists():
            replace_text(
                self._path,
                "".join(json.dumps(record) + "\n" for record in records(self._path) if record["step"] < step),
            )


@contextmanager
def open_run_log(
    log_path: Path,
    settings: TrackingSettings,
    *,
    name: str,
    config: Mapping[str, object],
    is_judged: bool = False,
) -> Iterator[RunLog]:
    """Open the log of the run in `log_path`, new or continued. `is_judged`: whether a judge has a part in the reward."""
    with ExitStack() as stack:
        wandb_run = trackio_run = None
        if settings.wandb_project is not None:
            wandb_run = _wandb_run(
                log_path,
                project=project_name(settings.wandb_project, is_judged=is_judged),
                name=name,
                config=config,
            )
            stack.callback(finish, wandb_run, "wandb", "`wandb sync` sends the rest")
        if settings.trackio_project is not None:
            trackio_run = _trackio_run(log_path, project=settings.trackio_project, name=name, config=config)
            stack.callback(finish, trackio_run, "trackio", "`trackio show` has what was written")
        yield RunLog(log_path / "metrics.jsonl", wandb_run, trackio_run)


def finish(run: wandb.Run | TrackioRun, program: str, advice: str) -> None:
    """Uploads what is left. A network that is gone must not hold the process; the files stay."""
    uploading = threading.Thread(target=run.finish, daemon=True)
    uploading.start()
    uploading.join(FINISH_S)
    if uploading.is_alive():
        logger.warning("%s did not finish within %g s; %s", program, FINISH_S, advice)


def project_name(project: str, *, is_judged: bool) -> str:
    """Runs whose reward a judge has a part in stay apart from the others.

    >>> project_name("tau" + JUDGE_SUFFIX, is_judged=True)  # never twice
    'tau_with_taxonomy_feedback'
    """
    return project + JUDGE_SUFFIX if is_judged and not project.endswith(JUDGE_SUFFIX) else project


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no NaN."""
    return {
        name: value if value is not None and math.isfinite(value) else None for name, value in metrics.items()
    }


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. ConfigError for one that is damaged."""
    return list(read_lines(path, LINE, same))


def recorded(path: Path, name: str) -> dict[int, float]:
    """The values of one metric by step."""
    return {record["step"]: record[name] for record in records(path) if record.get(name) is not None}


def recorded_variances(path: Path) -> dict[str, list[float]]:
    """`variance_per_prompt` of every step that was trained: of all tasks, and of each domain or family that has its own."""
    found: dict[str, list[float]] = {}
    for record in records(path):
        for name, value in record.items():
            area, _, last = name.rpartition("/")
            if last == "variance_per_prompt" and area.partition("/")[0] == "reward" and value is not None:
                found.setdefault(area.partition("/")[2] or ALL_TASKS, []).append(value)
    return dict(sorted(found.items()))


def is_wall_clock(name: str) -> bool:
    """Whether a metric measures time. All others are the same in an unbroken run and in one that was killed and resumed.

    >>> [is_wall_clock(name) for name in ("test/environment/agent_s", "test/env/retail/duration_s", "environment/prefix_breaks")]
    [True, True, False]
    """
    name = name.removeprefix("test/")
    if name.startswith(("time/", "timing/", "throughput/", "generate/trajectory_time_")) or name.endswith(
        "_duration"
    ):
        return True
    return name.startswith(("environment/", "env/")) and name.endswith("_s")


def _wandb_run(log_path: Path, *, project: str, name: str, config: Mapping[str, object]) -> wandb.Run:
    """A new run, or the one this folder already belongs to."""
    os.environ.setdefault("WANDB_SILENT", "true")  # read at import; the run's own output names the folder
    import wandb  # slow to import

    id_file = log_path / WANDB_ID_FILE
    if (
        not id_file.exists()
    ):  # named before it begins, so that a run killed at any moment goes on under the same id
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
    except wandb.Error as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"wandb: {first_line}; log in with `wandb login`, set WANDB_MODE=offline, or wandb_project=None"
        ) from error


def _trackio_run(log_path: Path, *, project: str, name: str, config: Mapping[str, object]) -> TrackioRun:
    """A new run, or the one this folder already belongs to; trackio knows a run by its name, and keeps it on this machine."""
    try:
        import trackio  # pyright: ignore[reportMissingImports]  # optional
    except ImportError as error:
        raise ConfigError(
            "trackio_project needs the package trackio: run scripts/setup.sh trackio, or drop trackio_project"
        ) from error
    name_file = log_path / TRACKIO_NAME_FILE
    if not name_file.exists():
        replace_text(name_file, name + "\n")
    with redirect_stdout(io.StringIO()):  # it greets at length
        return trackio.init(
            project=project, name=read_word(name_file), config=dict(config), resume="allow", embed=False
        )

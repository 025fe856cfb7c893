"""Find, check, lock and create the directory of a run. All checks precede the first write to the run."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz
from pydantic import TypeAdapter

from src.core.errors import ConfigError, StorageError
from src.core.option_aliases import present_options
from src.records import checkpoints
from src.records.atomic_io import remove, replace_text, storage_boundary
from src.records.checkpoints import Checkpoint
from src.records.journal import JOURNAL
from src.records.options import RunDirectoryOptions
from src.records.private_directory import make_parents, make_private, resolved
from src.records.reading import parse_document
from src.records.rollout_store import any_graded

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
# A resumed run must have the same values of these options.
IDENTITY = (
    "model_name",
    "lora_rank",
    "train_attn",
    "train_mlp",
    "train_unembed",
    "load_checkpoint_path",
    "load_optimizer",
    "env",
    "tasks_dir",
    "data",
    "reward",
    "seed",
    "batch_size",
    "group_size",
    "eval_split",
    "eval_tasks",
    "task_sampling",
    "train_on",
    "eval_data",
)
SUPERVISED = "train_on"  # only runs of src.sft have this option
EVALUATED = "evaluated"  # only config.json of an evaluation has this key


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDirectory:
    """The directory of a run, and the state from which the run starts."""

    path: Path
    checkpoint: Checkpoint | None = None  # the run continues from it; None: it starts from the beginning
    delete_first: bool = False  # whether the directory has an old run that is to be deleted
    resumed: bool = False  # whether the files of earlier processes are used

    @property
    def steps_done(self) -> int:
        """The number of training steps before the checkpoint; 0 without a checkpoint."""
        return 0 if self.checkpoint is None else self.checkpoint.batch

    def at_last_checkpoint(self) -> RunDirectory:
        """Return the same run, resumed from its last checkpoint."""
        return RunDirectory(path=self.path, checkpoint=checkpoints.last(self.path), resumed=True)

    def changed_options(self, config: RunDirectoryOptions) -> set[str]:
        """Return the options of a resumed run that have another value than in its last process."""
        saved, present = read_config(self.path), _present_options(config)
        return {name for name in saved.keys() & present.keys() if saved[name] != present[name]}

    def create(self, config: RunDirectoryOptions) -> None:
        """Create the directory and config.json. If `delete_first` is set, the old run is deleted first."""
        if self.delete_first:
            deleted = self.path.with_name(f".{self.path.name}.deleted")
            shutil.rmtree(deleted, ignore_errors=True)
            with storage_boundary(self.path, advice="delete its content, or give another log_path"):
                self.path.rename(deleted)  # so that a crash leaves no half-deleted run under this name
                shutil.rmtree(deleted)
        elif not self.resumed:
            # A run that stopped before its first result may have left these files.
            for name in (JOURNAL, checkpoints.JOURNAL, "finished"):
                remove(self.path / name)
        with storage_boundary(self.path):
            make_private(self.path)
        replace_text(self.path / CONFIG_FILE, json.dumps(chz.asdict(config), indent=2) + "\n")


def run_path(config: RunDirectoryOptions, *, name: str) -> Path:
    """Return `log_path`, or else `logs_dir`/`name`, with symbolic links resolved."""
    return resolved(Path(config.log_path or Path(config.logs_dir) / name))


@contextmanager
def lock_run_dir(path: Path) -> Generator[None]:
    """Lock the directory while the block runs. Raises ConfigError if another process uses the directory.

    Raises StorageError if the lock file cannot be written. The lock file is next to the directory, because
    the directory may be deleted. If the directory exists and its parent is not writable, the lock file is in
    the directory. The kernel releases the lock when the process ends. On a file system without locks, a
    warning is logged.
    """
    try:
        make_parents(path)
        is_inside = path.is_dir() and not os.access(path.parent, os.W_OK)
        lock = path / ".lock" if is_inside else path.with_name(f".{path.name}.lock")
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError(
            f"cannot write {error.filename}: {error.strerror}; give another log_path or logs_dir"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{path} is in use by a running process; stop it first, or give another log_path"
            ) from error
        except OSError as error:
            logger.warning(
                "%s: the file system does not support locks (%s); do not use the directory in two processes",
                path,
                error,
            )
        yield
    finally:
        os.close(descriptor)


def find_run_directory(config: RunDirectoryOptions, *, name: str) -> RunDirectory:
    """Return the run directory that `config` selects.

    Raises ConfigError if the directory cannot be used, or has a run that is neither resumed nor deleted.
    """
    path = run_path(config, name=name)
    if not path.exists() or (path.is_dir() and not has_files(path)):
        return RunDirectory(path=path)
    if not path.is_dir():
        raise ConfigError(f"log_path {path} is not a directory; give another log_path")
    if not (path / CONFIG_FILE).is_file():
        raise ConfigError(f"log_path {path} is not empty and has no run; give another log_path")
    if not has_results(path):
        return RunDirectory(path=path)
    if chosen_behavior(path, config.behavior_if_log_dir_exists) == "delete":
        return RunDirectory(path=path, delete_first=True)
    _check_same_run(path, config)
    return RunDirectory(path=path).at_last_checkpoint()


def has_results(path: Path) -> bool:
    """Return whether the directory has a run with a result."""
    return (path / CONFIG_FILE).is_file() and ((path / METRICS_FILE).is_file() or any_graded(path))


def chosen_behavior(path: Path, behavior: str) -> str:
    """Return "resume" or "delete" for the run in `path`. With `behavior="ask"`, the user chooses.

    Raises ConfigError if the run is to be neither resumed nor deleted.
    """
    chosen = _prompt_user(path) if behavior == "ask" else behavior
    if chosen not in ("resume", "delete"):
        raise ConfigError(
            f"log_path {path} has a run; add behavior_if_log_dir_exists=resume or =delete, "
            "or give another log_path"
        )
    return chosen


def _prompt_user(path: Path) -> str:
    """Return the behavior that the user chooses. Without a terminal or a valid answer, return "raise"."""
    if not sys.stdin.isatty():
        return "raise"
    try:
        answer = input(f"{path} has a run. [r]esume it, [d]elete it, or stop? ").strip().lower()
    except EOFError:  # Ctrl-D
        return "raise"
    return {"r": "resume", "resume": "resume", "d": "delete", "delete": "delete"}.get(answer, "raise")


def has_files(path: Path) -> bool:
    """Return whether `path` is a directory with files that are not hidden."""
    return path.is_dir() and any(not child.name.startswith(".") for child in path.iterdir())


def read_config(path: Path) -> dict[str, Any]:
    """Return the options in the config.json of the directory `path`, under their present names.

    Raises ConfigError if there is no such file, if it cannot be read or if it is damaged.
    """
    file = path / CONFIG_FILE
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{path} has no {CONFIG_FILE}; give the directory of a run") from error
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give the directory of a run") from error
    return present_options(parse_document(content, TypeAdapter(dict[str, Any]), file))


def require_run(path: Path, saved: Mapping[str, Any]) -> None:
    """Raise ConfigError if the config.json in `path` with the content `saved` is that of an evaluation."""
    if EVALUATED in saved:
        raise ConfigError(
            f"{path} is the directory of an evaluation, not of a run; to continue the evaluation, give its "
            f"options and log_path={path} to python -m src.evaluate"
        )


def _check_same_run(path: Path, config: RunDirectoryOptions) -> None:
    saved, present = read_config(path), _present_options(config)
    require_run(path, saved)
    if (SUPERVISED in saved) != (SUPERVISED in present):
        program = "src.sft" if SUPERVISED in saved else "src.train"
        raise ConfigError(
            f"the run in {path} was started by python -m {program}; resume it with that program, or give "
            "another log_path"
        )
    for name in IDENTITY:
        if name in saved and saved[name] != present[name]:
            raise ConfigError(
                f"the run in {path} has {name}={saved[name]}, not {present[name]}; resume it with that "
                "value, or give another log_path"
            )
    # With a pipeline (`max_staleness` or `stream_groups`), a step may have trained on tasks that the schedule
    # has in a later step. Without a pipeline, the resumed run would train on these tasks again.
    if _uses_pipeline(saved) and not _uses_pipeline(present):
        raise ConfigError(
            f"the run in {path} takes groups in the order in which they end; resume it with max_staleness=1 "
            "or stream_groups=true, or give another log_path"
        )


def _present_options(config: RunDirectoryOptions) -> Mapping[str, Any]:
    return json.loads(json.dumps(chz.asdict(config)))


def _uses_pipeline(config: Mapping[str, Any]) -> bool:
    return bool(config.get("max_staleness") or config.get("stream_groups"))

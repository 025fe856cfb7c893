"""A run's folder: whether it may be used, and from which checkpoint. Nothing is written before everything else has been checked."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import chz

from src import checkpoints
from src.checkpoints import Checkpoint
from src.config import TrainerConfig
from src.durable import remove, replace_text
from src.errors import ConfigError
from src.finished import any_graded
from src.journal import JOURNAL

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
# A run that continues under another value of these would not be the same run.
IDENTITY = ("model_name", "lora_rank", "env", "tasks_dir", "seed", "batch_size", "group_size", "eval_split", "eval_tasks", "task_sampling")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    path: Path
    checkpoint: Checkpoint | None  # where the run continues; None: at its beginning
    delete_first: bool
    resumed: bool = False  # what earlier processes left is taken up

    def at_last_checkpoint(self) -> RunFolder:
        """The same run, to be taken up again."""
        return RunFolder(path=self.path, checkpoint=checkpoints.last(self.path), delete_first=False, resumed=True)

    def create(self, config: TrainerConfig) -> None:
        """The folder with its config.json, emptied if that was asked for."""
        if self.delete_first:
            aside = self.path.with_name(f".{self.path.name}.deleted")
            shutil.rmtree(aside, ignore_errors=True)
            self.path.rename(aside)  # a crash while deleting leaves no half of a run under the run's name
            shutil.rmtree(aside)
        elif not self.resumed:
            for left in (JOURNAL, "finished"):  # of a run that stopped before its first result
                remove(self.path / left)
        replace_text(self.path / CONFIG_FILE, json.dumps(chz.asdict(config), indent=2) + "\n")


def find_run_folder(config: TrainerConfig, *, name: str) -> RunFolder:
    """ConfigError when the folder holds a run and the options do not say what to do with it."""
    path = Path(config.log_path or Path(config.logs_dir) / name).expanduser().resolve()
    if not path.exists() or (path.is_dir() and all(child.name.startswith(".") for child in path.iterdir())):
        return RunFolder(path=path, checkpoint=None, delete_first=False)
    if not (path / CONFIG_FILE).is_file():
        raise ConfigError(f"log_path {path} is not empty and holds no run; give another log_path")
    if not (path / METRICS_FILE).is_file() and not any_graded(path):  # it stopped before its first result
        return RunFolder(path=path, checkpoint=None, delete_first=False)
    behavior = config.behavior_if_log_dir_exists
    if behavior == "ask":
        behavior = _ask(path)
    if behavior == "delete":
        return RunFolder(path=path, checkpoint=None, delete_first=True)
    if behavior == "resume":
        _check_same_run(path, config)
        return RunFolder(path=path, checkpoint=None, delete_first=False).at_last_checkpoint()
    raise ConfigError(f"log_path {path} holds a run; add behavior_if_log_dir_exists=resume or =delete, or give another log_path")


def _ask(path: Path) -> str:
    """Without a terminal there is nobody to ask."""
    if not sys.stdin.isatty():
        return "raise"
    answer = input(f"{path} holds a run. [r]esume it, [d]elete it, or stop? ").strip().lower()
    return {"r": "resume", "resume": "resume", "d": "delete", "delete": "delete"}.get(answer, "raise")


def _check_same_run(path: Path, config: TrainerConfig) -> None:
    before = json.loads((path / CONFIG_FILE).read_text())
    now = json.loads(json.dumps(chz.asdict(config)))
    for name in IDENTITY:
        if name in before and before[name] != now[name]:
            raise ConfigError(
                f"the run in {path} has {name}={before[name]}, not {now[name]}; resume it with its own value, or give another log_path"
            )

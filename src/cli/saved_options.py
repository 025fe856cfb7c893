"""The options of a run as a command line, from the config.json of its directory."""

from __future__ import annotations

import inspect
from datetime import datetime
from pathlib import Path
from typing import Any

import chz

from src.config import TrainerConfig
from src.core.errors import ConfigError
from src.envs.options import WITHOUT_TAU2
from src.evaluate.chat.config import ChatConfig
from src.evaluate.config import EvaluateConfig
from src.records.run_directory import SUPERVISED, read_config, require_run
from src.sft.config import SftConfig

NOT_SHARED = {"train_data", "log_path"}  # options of the trainer that mean something else in an evaluation
SERVER_FILE = "server.json"
"""The file in the directory RUN.server that has the options of the server of RUN. The launcher
(scripts/run_skyrl_tx.py) writes this file when it starts the server."""
SFT_SUFFIX = ".sft"
"""A quick start of the launcher can fine-tune the model before RL. The run directory of the fine-tuning is
RUN.sft."""


def program_of(run: str) -> str:
    """Return the module that started the run in the directory `run`. Raises ConfigError if there is no
    run."""
    return "src.sft" if SUPERVISED in _saved(run) else "src.train"


def server_directory_of(run: str) -> Path | None:
    """Return the directory of the server that the launcher started for a run; None if there is no such
    directory.

    The fine-tuning of a quick start, whose run directory is RUN.sft, uses the server of the RL run RUN.
    """
    directory = Path(run).expanduser().resolve()
    for name in (directory.name, directory.name.removesuffix(SFT_SUFFIX)):
        server_directory = directory.with_name(f"{name}.server")
        if (server_directory / SERVER_FILE).is_file():
            return server_directory
    return None


def resumed_arguments(run: str, changes: list[str]) -> list[str]:
    """Return the `key=value` arguments that continue the run in the directory `run`.

    `changes` are arguments that replace options of the run. Raises ConfigError if the directory has no run or
    a change is not `key=value`.
    """
    options = _saved(run)
    require_run(Path(run), options)
    kind = SftConfig if SUPERVISED in options else TrainerConfig
    parameters = inspect.signature(kind).parameters
    present = {name: value for name, value in options.items() if name in chz.chz_fields(kind)}
    arguments = {
        name: option_text(value) for name, value in present.items() if value != parameters[name].default
    }
    directory = Path(run).expanduser().resolve()
    arguments |= {"log_path": str(directory), "behavior_if_log_dir_exists": "resume"}
    arguments |= _pairs(changes, "resume")
    return [f"{name}={value}" for name, value in arguments.items()]


def evaluated_arguments(run: str, changes: list[str]) -> list[str]:
    """Return the `key=value` arguments that evaluate the last checkpoint of a run on its held-out tasks.

    Server, tokenizer, limits and sampling are those of the run's evaluations, unless `changes` replace them.
    The files are written to a new directory in `evaluations/` of the run, unless `changes` set `log_path` or
    `logs_dir`. Raises ConfigError if the directory has no config.json, if its run is one of supervised
    fine-tuning, or if a change is not `key=value`.
    """
    options = _saved(run)
    if SUPERVISED in options:
        raise ConfigError(f"{run} is a run of sft and has no tasks; write evaluate checkpoint={run} env=...")
    values = _shared_values(options, EvaluateConfig)
    values["n_samples"] = options.get("eval_group_size") or options.get("group_size")
    directory, pairs = str(Path(run).expanduser().resolve()), _pairs(changes, "evaluate")
    arguments = _changed(values, EvaluateConfig)
    if not pairs.keys() & {"log_path", "logs_dir"}:
        arguments["log_path"] = f"{directory}/evaluations/{datetime.now():%Y%m%d-%H%M%S}"
    arguments |= {"checkpoint": directory, "held_out_of": directory} | pairs
    return [f"{name}={value}" for name, value in arguments.items()]


def chat_arguments(run: str, changes: list[str]) -> list[str]:
    """Return the `key=value` arguments that chat with the last checkpoint of a run.

    Server, tokenizer, limits and sampling are those of the run's evaluations, unless `changes` replace them.
    Raises ConfigError if the directory has no config.json or a change is not `key=value`.
    """
    arguments = _changed(_shared_values(_saved(run), ChatConfig), ChatConfig)
    arguments |= {"checkpoint": str(Path(run).expanduser().resolve())} | _pairs(changes, "chat")
    return [f"{name}={value}" for name, value in arguments.items()]


def _shared_values(options: dict[str, Any], kind: type[object]) -> dict[str, Any]:
    """Return the values that a run's evaluations use for `top_p` and for the options that `kind` shares with
    the trainer."""
    shared = chz.chz_fields(kind).keys() & chz.chz_fields(TrainerConfig).keys() - NOT_SHARED
    values = {name: value for name, value in options.items() if name in shared}
    values["top_p"] = options.get("eval_top_p")
    if options.get("eval_temperature") is not None:
        values["temperature"] = options["eval_temperature"]
    return values


def _changed(values: dict[str, Any], kind: type[object]) -> dict[str, str]:
    """Return the values that are not None and not the defaults of `kind`, as texts."""
    parameters = inspect.signature(kind).parameters
    return {
        name: option_text(value)
        for name, value in values.items()
        if value is not None and value != parameters[name].default
    }


def _pairs(changes: list[str], command: str) -> dict[str, str]:
    for change in changes:
        if "=" not in change:
            raise ConfigError(f"{change!r} is not key=value; write {command} RUN [key=value ...]")
    return dict(change.split("=", 1) for change in changes)


def _saved(run: str) -> dict[str, Any]:
    options = read_config(Path(run).expanduser().resolve())
    if options.get("env") in WITHOUT_TAU2:  # version 0.1 saved TAU2_HOME for every environment
        options.pop("tau2_home", None)
    return options


def option_text(value: object) -> str:
    """Return the command-line text of the value of an option.

    >>> option_text(None), option_text(True), option_text(["a", "b"]), option_text(2e-4)
    ('none', 'true', 'a,b', '0.0002')
    >>> option_text(["a,b", "c"])  # chz splits a text at its commas, but reads a Python list
    "['a,b', 'c']"
    """
    if isinstance(value, list):
        items = [option_text(item) for item in value]
        return repr(items) if any("," in item for item in items) else ",".join(items)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)

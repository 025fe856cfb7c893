"""The options of a run as a command line, from the config.json of its folder."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import chz

from src.config import TrainerConfig
from src.core.errors import ConfigError
from src.core.option_aliases import present_options

CONFIG_FILE = "config.json"


def resumed_arguments(run: str, changes: list[str]) -> list[str]:
    """Return the `key=value` arguments that continue the run in the folder `run`.

    `changes` are arguments that replace its options. Raises ConfigError if the folder has no run.
    """
    folder = Path(run).expanduser().resolve()
    try:
        saved = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        options = present_options(saved)
    except (OSError, ValueError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a JSON object"
        raise ConfigError(f"{folder / CONFIG_FILE}: {reason}; give the folder of a run") from error
    parameters = inspect.signature(TrainerConfig).parameters
    known = {name: value for name, value in options.items() if name in chz.chz_fields(TrainerConfig)}
    arguments = {name: _text(value) for name, value in known.items() if value != parameters[name].default}
    arguments |= {"log_path": str(folder), "behavior_if_log_dir_exists": "resume"}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise ConfigError(f"{change!r} is not key=value; write resume RUN [key=value ...]")
        arguments[name] = value
    return [f"{name}={value}" for name, value in arguments.items()]


def _text(value: object) -> str:
    """
    >>> _text(None), _text(True), _text(["a", "b"]), _text(2e-4)
    ('none', 'true', 'a,b', '0.0002')
    """
    if isinstance(value, list):
        return ",".join(_text(item) for item in value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)

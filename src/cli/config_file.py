"""`config=FILE.yaml`: options from a YAML or JSON file.

model_name: Qwen/Qwen3-4B
learning_rate: 2.0e-4
eval_tasks: [a, b]
environment_kwargs: {domain: retail, user_model: m}    # or a text: domain=retail,user_model=m
trainer: {policy: {optimizer_config: {lr: 2.0e-4}}}    # names of SkyRL
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import chz
import yaml

from src.cli.command_line import FileArgument
from src.cli.saved_options import option_text
from src.config import TrainerConfig
from src.core.errors import ConfigError

CONFIG = "config="


def with_config_files(argv: Sequence[str]) -> list[str]:
    """Return the options of all `config=FILE` arguments, and then the other arguments, which take precedence.

    Raises ConfigError for a file that cannot be read or is not a mapping of options.
    """
    from_files = [
        option
        for argument in argv
        if argument.startswith(CONFIG)
        for option in read_options(Path(argument.removeprefix(CONFIG)).expanduser())
    ]
    return [*from_files, *(argument for argument in argv if not argument.startswith(CONFIG))]


def read_options(path: Path) -> list[FileArgument]:
    """Return the options of a file as `key=value` arguments. Raises ConfigError for an invalid file."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config={path} cannot be read ({error}); give a YAML file") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = path if mark is None else f"{path}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{where}: the file is not YAML ({problem}); correct it") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"config={path} is not a mapping; write one `option: value` per line")
    return [FileArgument(text, path=path) for text in _arguments(content, prefix="")]


def _arguments(options: Mapping[object, object], *, prefix: str) -> Iterator[str]:
    for key, value in options.items():
        name = f"{prefix}{key}"
        if not isinstance(value, Mapping):
            yield f"{name}={option_text(value)}"
        elif name in chz.chz_fields(TrainerConfig):
            pairs = [f"{part}={option_text(item)}" for part, item in value.items()]
            yield f"{name}={option_text(pairs)}"
        else:  # a group of SkyRL's options
            yield from _arguments(value, prefix=f"{name}.")

"""argv -> a program's options, the trainer's or another's: --help by section, and one line for every mistake."""

from __future__ import annotations

import difflib
import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Literal, Union, get_args, get_origin

import chz
from chz.tiepin import type_repr

from src.config import REFUSED, TrainerConfig
from src.core.errors import ConfigError

# The option that opens each section of --help.
SECTIONS = {
    "model_name": "Model and back end",
    "logs_dir": "Run folder and tracking",
    "lora_rank": "Adapter and optimizer",
    "batch_size": "Batches and loss",
    "max_staleness": "Rollouts ahead of training",
    "max_turns": "Agent",
    "environment_type": "Trials",
    "trial_attempts": "Faults",
    "tau2_home": "tau-bench and judges",
    "eval_split": "Held-out tasks",
}


def parse(argv: Sequence[str]) -> TrainerConfig:
    """The run's options. ConfigError, one line, for anything that is not understood."""
    return parse_as(TrainerConfig, argv)


def parse_as[Config](kind: type[Config], argv: Sequence[str]) -> Config:
    """The options of the program that `kind` is the config of."""
    known = list(chz.chz_fields(kind))
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if not equals:
            raise ConfigError(
                f"{argument!r} is not key=value; write {nearest(argument.lstrip('-'), known) or 'key'}=VALUE, or --help"
            )
        if name in REFUSED:
            raise ConfigError(f"{name} cannot be honoured: {REFUSED[name]}")
        if name not in known:
            guess = nearest(name.lstrip("-"), known)
            raise ConfigError(
                f"unknown option {name!r}"
                + (f"; did you mean {guess}?" if guess else "; --help lists them all")
            )
    try:
        return chz.Blueprint(kind).make_from_argv([_none_in_any_case(argument) for argument in argv])
    except chz.blueprint.MissingBlueprintArg as error:
        missing = str(error).rpartition(": ")[2]
        raise ConfigError(f"missing: {missing}; e.g. {missing.split(',')[0]}=..., or --help") from error
    except chz.blueprint.InvalidBlueprintArg as error:
        raise ConfigError(_bad_value(kind, str(error), argv)) from error
    except ValueError as error:  # a rule of the config
        raise ConfigError(str(error)) from error


def help_text() -> str:
    """Every option of the trainer with its type, default and meaning."""
    title = [
        "python -m src.train key=value ...",
        "",
        "Trains an agent with GRPO through the Tinker API: on Harbor tasks, or in env=...",
    ]
    return help_for(TrainerConfig, title=title, sections=SECTIONS)


def help_for(kind: type[object], *, title: Sequence[str], sections: Mapping[str, str]) -> str:
    """`sections` maps the option that opens a section to its heading."""
    width = min(shutil.get_terminal_size().columns, 110)
    defaults = inspect.signature(kind).parameters
    lines = list(title)
    for name, field in chz.chz_fields(kind).items():
        if name in sections:
            lines += ["", sections[name]]
        default = defaults[name].default
        shown = "(required)" if default is inspect.Parameter.empty else f"= {default}"
        lines += [
            f"  {name} {shown}   {values_of(field.final_type)}",
            *(f"      {line}" for line in textwrap.wrap(field._doc, width - 6)),
        ]
    return "\n".join(lines)


def values_of(kind: object) -> str:
    """What an option takes: its type, or its choices.

    >>> values_of(int | None), values_of(Literal["ppo", "cispo"])
    ('int | None', 'ppo | cispo')
    """
    choices: list[str] = []
    for part in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        choices += (
            [str(choice) for choice in get_args(part)] if get_origin(part) is Literal else [type_repr(part)]
        )
    return " | ".join(choices).replace("NoneType", "None")


def print_help(text: str) -> None:
    """To a reader that may have read enough before the end, as `head` has."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # else Python says so again when it exits


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The option a typing mistake most likely meant."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.55)
    return close[0] if close else None


def _none_in_any_case(argument: str) -> str:
    """`max_turns=none` and `max_turns=null` mean None as much as `max_turns=None` does."""
    name, _, value = argument.partition("=")
    return f"{name}=None" if value.lower() in ("none", "null") else argument


def _bad_value(kind: type[object], message: str, argv: Sequence[str]) -> str:
    """chz names the option between quotes, and explains itself at length."""
    name = message.partition("for param '")[2].partition("'")[0]
    given = [argument.partition("=")[2] for argument in argv if argument.startswith(f"{name}=")]
    return f"{name}={given[-1] if given else ''}: expected {values_of(chz.chz_fields(kind)[name].final_type)}"

"""argv -> ServerConfig: --help, and one line for every mistake."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin

import chz
from chz.tiepin import type_repr

from skyrl_tx_server.config.server_config import ServerConfig
from skyrl_tx_server.errors import ConfigError

_PURPOSE = [
    "Serves one Llama, Qwen2.5, Qwen3, Qwen3-MoE or DeepSeek-V3 model over the Tinker API, for training and sampling."
]

SECRETS = {"api_key": "SKYRL_TX_API_KEY", "sampler_api_key": "SKYRL_TX_SAMPLER_API_KEY"}
"""Options that other users of the machine must not see -> the environment variables that hold them."""
MAX_KEY_BYTES = 4096
_NOTHING = ("", "none", "null")


def parse[Options](argv: Sequence[str], options: type[Options] = ServerConfig) -> Options:
    """A program's options, the server's by default. ConfigError, one line, for anything that is not understood."""
    known = list(chz.chz_fields(options))
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if name in known and equals:
            continue
        close = difflib.get_close_matches(name.lstrip("-"), known, n=1, cutoff=0.5)
        guess = f"did you mean {close[0]}=...?" if close else "see --help"
        raise ConfigError(
            f"unknown option {argument!r}; {guess}"
            if equals
            else f"{argument!r} is not of the form key=value; {guess}"
        )
    try:
        return chz.Blueprint(options).make_from_argv([_none_in_any_case(argument) for argument in argv])
    except chz.blueprint.MissingBlueprintArg as error:
        missing = str(error).rpartition(": ")[2]
        example = (
            "e.g. base_model=Qwen/Qwen3-4B or a model's directory"
            if missing == "base_model"
            else "see --help"
        )
        raise ConfigError(f"missing option {missing}; {example}") from None
    except chz.blueprint.InvalidBlueprintArg as error:
        raise ConfigError(_bad_value(str(error), argv, options)) from None


def with_secrets(argv: Sequence[str], environ: MutableMapping[str, str]) -> list[str]:
    """`argv` with the keys that the environment and api_key_file name. What stands on the command line wins over the environment.

    The keys are removed from `environ`, so that processes which the server starts do not inherit them.

    ConfigError when api_key and api_key_file are both given, or the file cannot be read.
    """
    given = {name: value for name, equals, value in (argument.partition("=") for argument in argv) if equals}
    keys = {name: environ.pop(variable, "") for name, variable in SECRETS.items()}
    from_environment = {name: key for name, key in keys.items() if key and name not in given}
    if (file := given.get("api_key_file")) is not None and file.lower() not in _NOTHING:
        if "api_key" in given:
            raise ConfigError("api_key and api_key_file: pass one of them")
        from_environment["api_key"] = _key_in(Path(file).expanduser())
    return [*argv, *(f"{name}={value}" for name, value in from_environment.items())]


def _key_in(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            key = stream.read(MAX_KEY_BYTES).decode("ascii").strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise ConfigError(f"api_key_file={file}: cannot be read: {why}") from None
    if not key:
        raise ConfigError(f"api_key_file={file}: it is empty; write a key into it that begins with tml-")
    return key


def help_text(options: type = ServerConfig, usage: str = "python -m skyrl_tx_server key=value ...") -> str:
    """Every option with its default and meaning."""
    defaults = inspect.signature(options).parameters
    lines = [usage, "", *(_PURPOSE if options is ServerConfig else [str(options.__doc__)]), ""]
    for name, field in chz.chz_fields(options).items():
        default = (
            "required"
            if defaults[name].default is inspect.Parameter.empty
            else f"default {defaults[name].default}"
        )
        lines.append(f"  {name:24} {field._doc} ({default})")
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


def _none_in_any_case(argument: str) -> str:
    name, _, value = argument.partition("=")
    return f"{name}=None" if value.lower() in _NOTHING else argument


def _bad_value(message: str, argv: Sequence[str], options: type) -> str:
    """chz names the option between quotes, and explains itself at length."""
    name = message.partition("for param '")[2].partition("'")[0]
    given = [argument.partition("=")[2] for argument in argv if argument.startswith(f"{name}=")]
    return (
        f"{name}={given[-1] if given else ''}: expected {values_of(chz.chz_fields(options)[name].final_type)}"
    )

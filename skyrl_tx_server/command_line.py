"""argv -> ServerConfig: --help, and one line for every mistake."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence

import chz
from chz.tiepin import type_repr

from skyrl_tx_server.config import ServerConfig
from skyrl_tx_server.errors import ConfigError


def parse(argv: Sequence[str]) -> ServerConfig:
    """The server's options. ConfigError, one line, for anything that is not understood."""
    known = list(chz.chz_fields(ServerConfig))
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if name in known and equals:
            continue
        close = difflib.get_close_matches(name.lstrip("-"), known, n=1, cutoff=0.5)
        guess = f"did you mean {close[0]}=...?" if close else "see --help"
        raise ConfigError(f"unknown option {argument!r}; {guess}" if equals else f"{argument!r} is not of the form key=value; {guess}")
    try:
        return chz.Blueprint(ServerConfig).make_from_argv([_none_in_any_case(argument) for argument in argv])
    except chz.blueprint.MissingBlueprintArg as error:
        raise ConfigError(
            f"missing option {str(error).rpartition(': ')[2]}; e.g. base_model=Qwen/Qwen3-4B or a model's directory"
        ) from None
    except chz.blueprint.InvalidBlueprintArg as error:
        raise ConfigError(_bad_value(str(error), argv)) from None


def help_text() -> str:
    """Every option with its default and meaning."""
    defaults = inspect.signature(ServerConfig).parameters
    lines = ["python -m skyrl_tx_server key=value ...", "", "Serves one Qwen3 model over the Tinker API, for training and sampling.", ""]
    for name, field in chz.chz_fields(ServerConfig).items():
        default = "required" if defaults[name].default is inspect.Parameter.empty else f"default {defaults[name].default}"
        lines.append(f"  {name:24} {field._doc} ({default})")
    return "\n".join(lines)


def _none_in_any_case(argument: str) -> str:
    name, _, value = argument.partition("=")
    return f"{name}=None" if value.lower() in ("", "none", "null") else argument


def _bad_value(message: str, argv: Sequence[str]) -> str:
    """chz names the option between quotes, and explains itself at length."""
    name = message.partition("for param '")[2].partition("'")[0]
    given = [argument.partition("=")[2] for argument in argv if argument.startswith(f"{name}=")]
    return f"{name}={given[-1] if given else ''}: expected {type_repr(chz.chz_fields(ServerConfig)[name].final_type)}"

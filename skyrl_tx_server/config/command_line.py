"""Parses the command line into the server's options, reads secrets from the environment, and prints the help.
Each mistake of the user is reported in one line.

The trainer has its own parser, `src/cli/command_line.py`, because neither program imports the other.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin

import chz
from chz.tiepin import type_repr

from skyrl_tx_server.config.engine_options import EngineOptions
from skyrl_tx_server.config.flags import as_options
from skyrl_tx_server.config.http_options import HttpOptions
from skyrl_tx_server.config.process_options import ProcessOptions
from skyrl_tx_server.config.renamed import RENAMED_OPTIONS, RENAMED_VALUES
from skyrl_tx_server.config.sampler_options import SamplerOptions
from skyrl_tx_server.config.server_config import ServerConfig
from skyrl_tx_server.config.tenant_options import TenantOptions
from skyrl_tx_server.errors import ConfigError

_PURPOSE = [
    "Serves one Llama, Qwen2.5, Qwen3, Qwen3-MoE or DeepSeek-V3 model over the Tinker API, for training and "
    "sampling."
]

_COMPONENTS = {
    "Model, devices and memory": EngineOptions,
    "HTTP": HttpOptions,
    "Tenants": TenantOptions,
    "External sampler": SamplerOptions,
    "Several processes": ProcessOptions,
}
"""Maps each heading of the help to the class of the options below the heading."""

SECRETS = {"api_key": "SKYRL_TX_API_KEY", "sampler_api_key": "SKYRL_TX_SAMPLER_API_KEY"}
"""Options that other users of the machine must not see, and the environment variables that hold them."""
MAX_KEY_BYTES = 4096
HELP = ("--help", "-h", "help")
_NONE = ("", "none", "null")


def parse[Options](argv: Sequence[str], options: type[Options] = ServerConfig) -> Options:
    """Parse `argv` into an instance of `options`. Raise ConfigError with one line for an unknown option, a
    missing option or an invalid value.

    An empty value, `none` and `null` mean None. A former name of an option (see `config.renamed`) is accepted
    with a notice on stderr. For `ServerConfig`, flags are accepted too (see `config.flags`).
    """
    names = list(chz.chz_fields(options))
    if options is ServerConfig:
        argv = _without_flags(argv)
    argv = [_with_present_name(argument, names) for argument in argv]
    arguments: list[str] = []
    for argument in argv:
        name, equals, value = argument.partition("=")
        if name not in names or not equals:
            similar = difflib.get_close_matches(name.lstrip("-"), names, n=1, cutoff=0.5)
            suggestion = f"did you mean {similar[0]}=...?" if similar else "see --help"
            raise ConfigError(
                f"unknown option {argument!r}; {suggestion}"
                if equals
                else f"{argument!r} is not of the form key=value; {suggestion}"
            )
        is_none = value.lower() in _NONE
        if is_none and chz.chz_fields(options)[name].final_type is str:
            raise ConfigError(f"{argument}: expected text; this option cannot be None")
        arguments.append(f"{name}=None" if is_none else argument)
    try:
        return chz.Blueprint(options).make_from_argv(arguments)
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
    """Return `argv` with `name=value` in place of flags, and with the API keys from the environment and from
    api_key_file. The command line and the file take precedence over the environment.

    The keys are removed from `environ`, so that child processes do not inherit them.

    Raises ConfigError in the following cases:

    - `argv` contains both api_key and api_key_file.
    - The file cannot be read, contains no key, or has more than MAX_KEY_BYTES bytes.
    - A key from the environment or from the file is `none` or `null`.
    """
    argv = _without_flags(argv)
    values = {name: value for name, equals, value in (argument.partition("=") for argument in argv) if equals}
    keys = {name: environ.pop(variable, "") for name, variable in SECRETS.items()}
    keys_to_add = {name: key for name, key in keys.items() if key and name not in values}
    if (file := values.get("api_key_file")) is not None and file.lower() not in _NONE:
        if "api_key" in values:
            raise ConfigError("api_key and api_key_file: both are given; pass one of them")
        keys_to_add["api_key"] = _key_in(Path(os.path.expanduser(file)))
    for name, key in keys_to_add.items():
        if key.lower() in _NONE:
            raise ConfigError(
                f"{name}: {key!r} is not a key; for a server without this key, unset {SECRETS[name]} and "
                "give no file with the key"
            )
    return [*argv, *(f"{name}={value}" for name, value in keys_to_add.items())]


def move_secrets() -> None:
    """Move the secrets from the command line to the environment, which other users cannot read, and restart
    this program. Do nothing if the command line contains no secret, or if it contains api_key and
    api_key_file, which `with_secrets` then refuses."""
    values = {name: value for name, _, value in (argument.partition("=") for argument in sys.argv[1:])}
    visible = [name for name in SECRETS if values.get(name, "").lower() not in _NONE]
    has_file = values.get("api_key_file", "").lower() not in _NONE or "--api-key-file" in values
    if not visible or ("api_key" in visible and has_file):
        return
    for name in visible:
        os.environ[SECRETS[name]] = values[name]
        print(
            f"skyrl-tx server: {name}= was visible in the process list; set {SECRETS[name]} in the "
            f"environment instead",
            file=sys.stderr,
            flush=True,
        )
    prefixes = tuple(f"{name}=" for name in visible)
    os.execv(sys.executable, [argument for argument in sys.orig_argv if not argument.startswith(prefixes)])


def _without_flags(argv: Sequence[str]) -> list[str]:
    """Return `argv` with `name=value` in place of flags. Print a notice for each flag without effect."""
    fields = chz.chz_fields(ServerConfig)
    bool_names = [
        name for name, field in fields.items() if bool in {field.final_type, *get_args(field.final_type)}
    ]
    converted, notices = as_options(argv, names=list(fields), bool_names=bool_names)
    for notice in notices:
        print(f"skyrl-tx server: {notice}", file=sys.stderr, flush=True)
    return converted


def _with_present_name(argument: str, names: Sequence[str]) -> str:
    """Return `argument` with the current name of its option. Print a notice if `argument` has a former
    name."""
    name, equals, value = argument.partition("=")
    present = RENAMED_OPTIONS.get(name)
    if not equals or present not in names:
        return argument
    renamed = f"{present}={RENAMED_VALUES.get((name, value), value)}"
    print(
        f"skyrl-tx server: {argument}: the option is now {renamed}; the next release removes the former name",
        file=sys.stderr,
        flush=True,
    )
    return renamed


def _key_in(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_KEY_BYTES + 1)
        key = content.decode("ascii").strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise ConfigError(f"api_key_file={file}: cannot be read: {why}") from None
    if len(content) > MAX_KEY_BYTES:
        raise ConfigError(
            f"api_key_file={file}: the file has more than {MAX_KEY_BYTES} bytes; give a file that "
            "contains only the key"
        )
    if not key:
        raise ConfigError(
            f"api_key_file={file}: the file is empty; write a key that begins with tml- into it"
        )
    return key


def help_words(argv: Sequence[str]) -> list[str] | None:
    """Return the words that select options of the help, or None if `argv` does not request help.

    >>> help_words(["--help", "memory"]), help_words(["--help"]), help_words(["port=0"])
    (['memory'], [], None)
    """
    if not any(argument in HELP for argument in argv):
        return None
    return [argument for argument in argv if argument not in HELP and "=" not in argument]


def help_text(
    options: type = ServerConfig,
    usage: str = "python -m skyrl_tx_server key=value ...",
    words: Sequence[str] = (),
) -> str:
    """Return the help, which has one line with the name, meaning and default of each option. The server's
    options are grouped by component.

    With `words`, return only some options: each of `words` must be the beginning of a word in the heading,
    the name or the meaning of the option.
    """
    fields, defaults = chz.chz_fields(options), inspect.signature(options).parameters
    purpose = _PURPOSE if options is ServerConfig else [str(options.__doc__)]
    lines = [] if words else [usage, "", *purpose]
    for heading, names in _sections(options):
        shown: list[str] = []
        for name in names:
            default = defaults[name].default
            value = "required" if default is inspect.Parameter.empty else f"default {default}"
            meaning = fields[name]._doc  # pyright: ignore[reportPrivateUsage]  chz has no public accessor
            if all(_has_word(f"{' '.join(heading)} {name} {meaning}", word) for word in words):
                shown.append(f"  {name:24} {meaning} ({value})")
        lines += ["", *heading, *shown] if shown else []
    return "\n".join(lines or [f"no option contains {' '.join(words)}; --help lists all options"])


def _has_word(text: str, beginning: str) -> bool:
    """Return whether a word of the text begins with `beginning`; case is ignored."""
    return re.search(rf"(?<![a-z]){re.escape(beginning)}", text, re.IGNORECASE) is not None


def _sections(options: type) -> list[tuple[list[str], list[str]]]:
    """Return the sections of the help, each as (lines of the heading, names of the options below the
    heading)."""
    names = list(chz.chz_fields(options))
    if options is not ServerConfig:
        return [([], names)]
    sections = []
    for heading, component in _COMPONENTS.items():
        # EngineOptions and HttpOptions inherit TenantOptions, which has its own section.
        inherited = chz.chz_fields(TenantOptions) if component is not TenantOptions else {}
        component_names = [
            name for name in names if name in chz.chz_fields(component) and name not in inherited
        ]
        names = [name for name in names if name not in component_names]
        sections.append(([heading], component_names))
    return [*sections, (["Program"], names)]


def values_of(kind: object) -> str:
    """Return the type of an option, or its choices.

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
    """Print `text`. The reader may close the pipe before the end, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Without this redirection, Python reports the closed pipe again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _bad_value(message: str, argv: Sequence[str], options: type) -> str:
    """Return a one-line message in place of `message`, the text of a chz error, which has several lines and
    contains the option's name in quotes."""
    name = message.partition("for param '")[2].partition("'")[0]
    values = [argument.partition("=")[2] for argument in argv if argument.startswith(f"{name}=")]
    expected = values_of(chz.chz_fields(options)[name].final_type)
    return f"{name}={values[-1] if values else ''}: expected {expected}"

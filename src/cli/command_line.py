"""Parse the command line of a program, `key=value ...`, into its configuration, and print its help.

Every mistake raises a ConfigError with a one-line message. Former names of options
(src/core/option_aliases.py) and SkyRL's names of options (src/core/skyrl_options.py) are accepted with a
notice.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from types import UnionType
from typing import Literal, Self, Union, get_args, get_origin

import chz
from chz.tiepin import type_repr

from src.config import REFUSED, SECTIONS, TrainerConfig
from src.core.errors import ConfigError
from src.core.option_aliases import present_argument
from src.core.options import sections
from src.core.skyrl_options import taken_arguments

MAX_HELP_WIDTH = 110
HELP = ("--help", "-h", "help")
HELD_OUT = re.compile(r"val|test|dev|held")


class FileArgument(str):
    """A `key=value` argument from the file `path`, which error messages name."""

    path: Path

    def __new__(cls, text: str, *, path: Path) -> Self:
        argument = super().__new__(cls, text)
        argument.path = path
        return argument


def parse(argv: Sequence[str]) -> TrainerConfig:
    """Return the trainer's configuration. Raises ConfigError for every mistake."""
    return parse_as(TrainerConfig, argv)


def parse_as[Config](kind: type[Config], argv: Sequence[str]) -> Config:
    """Return the configuration of the program whose options `kind` declares.

    Raises ConfigError for every mistake.
    """
    known = list(chz.chz_fields(kind))
    argv = with_present_names(argv, known)
    require_known(argv, known)
    try:
        return chz.Blueprint(kind).make_from_argv([_with_none(argument) for argument in argv])
    except chz.blueprint.MissingBlueprintArg as error:
        missing = str(error).rpartition(": ")[2]
        raise ConfigError(f"missing: {missing}; e.g. {missing.split(',')[0]}=..., or --help") from error
    except chz.blueprint.InvalidBlueprintArg as error:
        raise ConfigError(_bad_value(kind, str(error), argv)) from error
    except ValueError as error:  # a validator has raised it
        raise ConfigError(str(error)) from error


def require_known(argv: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError for an argument that is not `name=value` with a name in `known`."""
    for argument in argv:
        name, equals, _ = argument.partition("=")
        where = f"config={argument.path}: " if isinstance(argument, FileArgument) else ""
        if not equals:
            guess = nearest(argument.lstrip("-"), known) or "key"
            raise ConfigError(f"{argument!r} is not key=value; write {guess}=VALUE, or --help")
        if name in REFUSED and name not in known:
            raise ConfigError(f"{where}{name} cannot be honoured: {REFUSED[name]}")
        if name not in known:
            guess = nearest(name.lstrip("-"), known)
            advice = f"; did you mean {guess}?" if guess else "; --help lists all options"
            raise ConfigError(f"{where}unknown option {name!r}{advice}")


def with_present_names(argv: Sequence[str], known: Collection[str]) -> list[str]:
    """Replace former names of options and names of SkyRL by the names in `known`, and print notices.

    Raises ConfigError for an option of SkyRL that has no counterpart.
    """
    arguments, converted = taken_arguments([_renamed(argument) for argument in argv], known, REFUSED)
    if converted:
        print(f"note: options of SkyRL are converted to {' '.join(converted)}", file=sys.stderr)
    return arguments


def help_words(argv: Sequence[str]) -> list[str] | None:
    """Return the words for which the help is searched; None if `argv` does not request help.

    >>> help_words(["--help", "learning"]), help_words(["--help"]), help_words(["env=harbor"])
    (['learning'], [], None)
    """
    if not any(argument in HELP for argument in argv):
        return None
    return [argument for argument in argv if argument not in HELP and "=" not in argument]


def help_text(words: Sequence[str] = ()) -> str:
    """Return the trainer's help: its options, or those that match `words`, with types and defaults."""
    title = [
        "python -m src.train key=value ...",
        "",
        "Train an agent with GRPO through the Tinker API, on Harbor tasks or in another environment "
        "(env=...).",
    ]
    return help_for(TrainerConfig, title=title, words=words)


def help_for(kind: type[object], *, title: Sequence[str], words: Sequence[str] = ()) -> str:
    """Return the help of a program.

    With `words`, the help contains only the options that match every element of `words`. An option matches an
    element if a word of its section, its name or its meaning begins with the element.
    """
    width = min(shutil.get_terminal_size().columns, MAX_HELP_WIDTH)
    fields, lines = chz.chz_fields(kind), [] if words else list(title)
    meanings = {
        name: field._doc  # pyright: ignore[reportPrivateUsage]  chz has no public accessor
        for name, field in fields.items()
    }
    for heading, names in sections_of(kind).items():
        matching = [
            name
            for name in names
            if all(_has_word(f"{heading} {name} {meanings[name]}", word) for word in words)
        ]
        lines += ["", heading] if matching else []
        for name in matching:
            lines.append(f"  {name} {shown_default(kind, name)}   {values_of(fields[name].final_type)}")
            lines += [f"      {line}" for line in textwrap.wrap(meanings[name], width - 6)]
    return "\n".join(lines or [f"no option contains {' '.join(words)}; --help lists all options"])


def _has_word(text: str, beginning: str) -> bool:
    """Return whether a word of the text begins with `beginning`; case is ignored.

    >>> _has_word("lora_rank: the rank", "Rank"), _has_word("exploration", "lora")
    (True, False)
    """
    return re.search(rf"(?<![a-z]){re.escape(beginning)}", text, re.IGNORECASE) is not None


def sections_of(kind: type[object]) -> dict[str, list[str]]:
    """Return the names of the options by section.

    If the trainer has an option of the same name and type, the option is in the section that it has in the
    trainer's help.
    """
    fields, trainer_fields = chz.chz_fields(kind), chz.chz_fields(TrainerConfig)
    trainer_headings = {name: heading for heading, names in sections(TrainerConfig).items() for name in names}
    by_heading: dict[str, list[str]] = {}
    for heading, names in sections(kind).items():
        for name in names:
            is_shared = name in trainer_fields and trainer_fields[name].final_type == fields[name].final_type
            by_heading.setdefault(trainer_headings[name] if is_shared else heading, []).append(name)
    others = [heading for heading in by_heading if heading not in SECTIONS]
    order = [*others, *(heading for heading in SECTIONS if heading in by_heading)]
    return {heading: by_heading[heading] for heading in order}


def shown_default(kind: type[object], name: str) -> str:
    """Return `= VALUE`, or `(required)` for an option without a default."""
    default = inspect.signature(kind).parameters[name].default
    return "(required)" if default is inspect.Parameter.empty else f"= {default}"


def values_of(kind: object) -> str:
    """Return the type of an option, or its choices.

    >>> values_of(int | None), values_of(Literal["ppo", "cispo"])
    ('int | None', 'ppo | cispo')
    """
    choices: list[str] = []
    for part in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        is_literal = get_origin(part) is Literal
        choices += [str(choice) for choice in get_args(part)] if is_literal else [type_repr(part)]
    return " | ".join(choices).replace("NoneType", "None")


def print_help(text: str) -> None:
    """Print `text`. It is no error if the reader of a pipe, such as `head`, closes the pipe early."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Without this replacement of standard output, Python would report the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the option that a mistyped name most likely means; None if no option is similar.

    A name that contains a word for held-out data never gives an option that selects training tasks.

    >>> nearest("val_dat", ["train_data", "tasks_dir"]), nearest("train_dat", ["train_data", "tasks_dir"])
    (None, 'train_data')
    >>> nearest("valdata", ["data", "tasks_dir"])
    """
    if HELD_OUT.search(name):
        known = [option for option in known if option not in ("tasks_dir", "data") and "train" not in option]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.55)
    return close[0] if close else None


def _renamed(argument: str) -> str:
    """Replace a former name or value by the present one, and print a notice if the argument changes."""
    present = present_argument(argument)
    if present == argument:
        return argument
    print(f"note: write {present} instead of {argument}; the former name will be removed", file=sys.stderr)
    return present


def _with_none(argument: str) -> str:
    """Return the argument with the value None in place of `none` and `null`, in upper or lower case."""
    name, _, value = argument.partition("=")
    return f"{name}=None" if value.lower() in ("none", "null") else argument


def _bad_value(kind: type[object], message: str, argv: Sequence[str]) -> str:
    """Return one line in place of chz's long message, which contains the name of the option in quotes."""
    name = message.partition("for param '")[2].partition("'")[0]
    values = [argument.partition("=")[2] for argument in argv if argument.startswith(f"{name}=")]
    expected = values_of(chz.chz_fields(kind)[name].final_type)
    return f"{name}={values[-1] if values else ''}: expected {expected}"

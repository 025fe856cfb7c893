"""The command line of the scripts that write data sets and models: `[DIRECTORY] [key=value ...]`."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path


def folder_and_options(
    usage: str | None, default: Path, options: Collection[str] = ()
) -> tuple[Path, dict[str, str]]:
    """Return the folder on the command line, or `default`, and the values of the `options` by name.

    Print `usage` and exit with `--help` or `-h`. Exit with one line for any other argument.
    """
    arguments = sys.argv[1:]
    if not {"--help", "-h"}.isdisjoint(arguments):
        print(usage)
        sys.exit()
    values = dict(argument.split("=", 1) for argument in arguments if argument.partition("=")[0] in options)
    folders = [argument for argument in arguments if argument.partition("=")[0] not in options]
    unknown = [folder for folder in folders if folder.startswith("-") or "=" in folder] or folders[1:]
    if unknown:
        names = "".join(f", {name}=VALUE" for name in options)
        sys.exit(f"unknown argument {unknown[0]!r}; give at most one folder{names} or --help")
    return Path(folders[0]) if folders else default, values

"""The command line of the scripts that write data sets and models: `[DIRECTORY] [key=value ...]`."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path


def directory_and_options(
    usage: str | None, default: Path, options: Collection[str] = ()
) -> tuple[Path, dict[str, str]]:
    """Return the directory on the command line, or `default`, and the values of the `options` by name.

    If the command line contains `--help` or `-h`, print `usage` and exit. If it contains an unknown argument,
    exit with an error message of one line.
    """
    arguments = sys.argv[1:]
    if not {"--help", "-h"}.isdisjoint(arguments):
        print(usage)
        sys.exit()
    values = dict(argument.split("=", 1) for argument in arguments if argument.partition("=")[0] in options)
    directories = [argument for argument in arguments if argument.partition("=")[0] not in options]
    unknown = [
        directory for directory in directories if directory.startswith("-") or "=" in directory
    ] or directories[1:]
    if unknown:
        names = "".join(f", {name}=VALUE" for name in options)
        sys.exit(f"unknown argument {unknown[0]!r}; give at most one directory{names} or --help")
    return Path(directories[0]) if directories else default, values

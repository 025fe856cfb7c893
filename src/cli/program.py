"""Run a program: print its help or its error, and return its exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from src.cli.command_line import help_words, print_help
from src.core.errors import INTERRUPTED, TrainerError


def run_program(
    argv: Sequence[str],
    run: Callable[[Sequence[str]], int],
    help_of: Callable[[Sequence[str]], str],
    *,
    label: str = "error",
) -> int:
    """Run the program and return its exit status, which is the result of `run(argv)` if `run` ends normally.

    If `argv` requests help, the text that `help_of` returns for the words in `argv` is printed, and the exit
    status is 0. A TrainerError is printed as one line that starts with `label`, and its `exit_status` is
    returned. If TRAINER_DEBUG is set, the error is raised instead, and Python prints the traceback. The exit
    status after a KeyboardInterrupt is INTERRUPTED.
    """
    if (words := help_words(argv)) is not None:
        print_help(help_of(words))
        return 0
    try:
        return run(argv)
    except KeyboardInterrupt:  # the signal came while no handler was installed
        return INTERRUPTED
    except TrainerError as error:
        if os.environ.get("TRAINER_DEBUG"):
            raise
        print(f"{label}: {error}", file=sys.stderr)
        return error.exit_status

"""Makes relative paths on the command line of `./run_skyrl_tx.sh` absolute.

The script changes to the directory of the repository. A relative path on its command line means a path in the
directory from which the user called the script.
"""

from __future__ import annotations

import ast
import os
from contextlib import suppress
from pathlib import Path

from src.cli.saved_options import option_text

CALLER_DIR = "AGENT_TRAINER_CALLER_DIR"
"""The environment variable with the directory from which the script was called."""
INPUT_OPTIONS = {
    *("config", "tasks_dir", "model_name", "base_model", "tokenizer", "load_checkpoint_path", "resume"),
    *("evaluate", "chat", "compare_with", "capabilities", "tau2_home"),
}
"""Options whose value is an existing file or directory, or a name that is not a path."""
INPUT_LIST_OPTIONS = {"data", "test_data", "train_data", "eval_data", "eval_tasks", "environment_kwargs"}
"""Options whose value is a comma-separated list of existing files or directories. An entry may also be
NAME=FILE or a name that is not a path."""
OUTPUT_OPTIONS = {"log_path", "logs_dir", "export_path", "checkpoints_dir"}
"""Options that name files or directories which the program creates."""


def with_absolute_paths(arguments: list[str], root: Path) -> list[str]:
    """Return the `name=value` arguments with absolute paths if the script was called from another directory
    than `root`, the directory of the repository. An input that does not exist in the directory of the caller
    stays as it is."""
    caller = Path(os.environ.get(CALLER_DIR) or root)
    return arguments if caller == root else [_absolute(argument, caller) for argument in arguments]


def _absolute(argument: str, caller: Path) -> str:
    name, _, value = argument.partition("=")
    if name in OUTPUT_OPTIONS:
        is_path_of_caller = value.lower() not in ("", "none", "null") and not value.startswith("~")
        return f"{name}={caller / value}" if is_path_of_caller else argument
    if name in INPUT_OPTIONS and argument != "compare_with=base":  # `base` is not a file
        return f"{name}={_absolute_entry(value, caller)}"
    if name not in INPUT_LIST_OPTIONS:
        return argument
    if value.startswith(("['", '["')):  # a list with a comma in an entry has the text of a Python list
        with suppress(ValueError, SyntaxError):  # a glob may also begin with `[`
            entries = ast.literal_eval(value)
            return f"{name}={option_text([_absolute_entry(str(entry), caller) for entry in entries])}"
    return f"{name}={','.join(_absolute_entry(entry, caller) for entry in value.split(','))}"


def _absolute_entry(entry: str, caller: Path) -> str:
    if entry and (caller / entry).exists():
        return str(caller / entry)
    name, equals, path = entry.partition("=")
    return f"{name}={caller / path}" if equals and (caller / path).is_file() else entry

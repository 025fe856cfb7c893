"""Fleet tasks: a `.jsonl` file with one task per line.

    {"task_key": "inventory-001", "env_key": "inventory", "env_version": "v1", "task_modality": "tool_use",
     "prompt": "Add 3 units of W1.", "verifier_code": "def verify(env, final_answer=None): ..."}

`env_version` and `task_modality` may be left out, and a task may have further fields. The reset tool and the
verifier receive all fields except those whose name begins with `verifier_`.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.envs.data.records import read_json_lines

REQUIRED = ("task_key", "env_key", "prompt", "verifier_code")
MODALITIES = ("tool_use", "computer_use")
URL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # env_key and env_version are parts of URLs
VERIFY = "verify"


def read_tasks(path: Path) -> list[Task]:
    """Read the tasks of a file. Raises ConfigError with the file and the line number of an invalid task."""
    tasks = [parse_task(record.values, path=path, where=record.where) for record in read_json_lines(path)]
    if not tasks:
        raise ConfigError(f"{path} contains no task; write one JSON object per line")
    return tasks


def parse_task(row: Mapping[str, Any], *, path: Path, where: str) -> Task:
    """Return the task of one line. `Task.row` contains the fields of the line and `verifier_function`, the
    name of the function that grades. Raises ConfigError for an invalid task.
    """
    for name in REQUIRED:
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise ConfigError(f"{where}: {name} is missing or not a text; add it")
    row = {"env_version": "", "task_modality": MODALITIES[0], **row}
    for name in ("env_key", "env_version"):
        value = row[name]
        if value != "" and not (isinstance(value, str) and URL_NAME.fullmatch(value)):
            raise ConfigError(
                f"{where}: {name}={value!r} must begin with a letter or digit and contain only letters, "
                "digits, '.', '_' and '-'; correct it"
            )
    if row["task_modality"] not in MODALITIES:
        raise ConfigError(
            f"{where}: task_modality={row['task_modality']!r} is not one of {', '.join(MODALITIES)}; "
            "write tool_use"
        )
    if row["task_modality"] == "computer_use":
        raise ConfigError(
            f"{where}: task_modality=computer_use returns images, but the agent can read text only; "
            "remove the task"
        )
    function = verifier_function(row["verifier_code"], where=where)
    return Task(
        id=row["task_key"],
        path=path,
        instruction=row["prompt"],
        domain=row["env_key"],
        row={**row, "verifier_function": function},
    )


def verifier_function(code: str, *, where: str) -> str:
    """Return the name of the function that grades: `verify`, or the only function of the code.

    Raises ConfigError if the code cannot be parsed, or defines neither `verify` nor exactly one function.

    >>> verifier_function("async def check(env): return 1.0", where="here")
    'check'
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{where}: verifier_code cannot be parsed: {error}; correct it") from error
    names = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if VERIFY in names:
        return VERIFY
    if len(names) != 1:
        raise ConfigError(
            f"{where}: verifier_code defines {len(names)} functions and none is called {VERIFY}; "
            f"define {VERIFY}(env, final_answer)"
        )
    return names[0]

"""The files of a build context that .dockerignore excludes.

Each line is a pattern. `*` matches any characters except a slash, and `**` any directories. A pattern also
matches everything below a directory that it matches. `!` includes paths again. The last matching pattern
counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

_TOKEN = re.compile(r"(\*\*/?|\*|\?|\[[^]]*\]|\\.)")
_EXPRESSIONS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def ignore_rules(dockerfile: Path) -> Callable[[Path], bool]:
    """Return a function that tells whether a path of the build context is excluded. As in Docker, a file
    `NAME.dockerignore` beside the Dockerfile `NAME` replaces .dockerignore. Raises ValueError for an invalid
    pattern.
    """
    context = dockerfile.parent.resolve()
    specific = dockerfile.with_name(f"{dockerfile.name}.dockerignore")
    file = specific if specific.is_file() else context / ".dockerignore"
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    rules: list[tuple[re.Pattern[str], bool]] = []
    for line in map(str.strip, lines):
        if line and not line.startswith("#"):
            pattern = os.path.normpath(line.removeprefix("!").strip()).lstrip("/")
            expression = "".join(map(_expression, _TOKEN.split(pattern)))
            try:
                rule = re.compile(f"{expression}(?:/.*)?", re.DOTALL)
            except re.error as error:
                raise ValueError(f"{file}: {line} is not a pattern ({error})") from error
            rules.append((rule, not line.startswith("!")))

    def is_excluded(path: Path) -> bool:
        name = path.relative_to(context).as_posix()
        if name == ".":
            return False
        return next((excludes for rule, excludes in reversed(rules) if rule.fullmatch(name)), False)

    return is_excluded


def _expression(token: str) -> str:
    """Return the regular expression of a part of a pattern."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return _EXPRESSIONS.get(token) or re.escape(token.removeprefix("\\"))

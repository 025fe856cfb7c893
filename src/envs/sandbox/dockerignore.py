"""The files of a build context that .dockerignore excludes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from docker.utils import exclude_paths


def ignore_rules(dockerfile: Path) -> Callable[[Path], bool]:
    """Return a function that tells whether a path of the build context is excluded.

    As in Docker, a file `NAME.dockerignore` beside the Dockerfile `NAME` replaces .dockerignore. The file
    .dockerignore itself is never excluded. Raises ValueError for an invalid pattern.
    """
    context = dockerfile.parent.resolve()
    specific = dockerfile.with_name(f"{dockerfile.name}.dockerignore")
    file = specific if specific.is_file() else context / ".dockerignore"
    if not file.is_file():
        return lambda path: False
    lines = map(str.strip, file.read_text(encoding="utf-8", errors="replace").splitlines())
    patterns = [line for line in lines if line and not line.startswith("#")]
    try:
        # Without `dockerfile=""`, the Dockerfile would never be excluded.
        included = exclude_paths(str(context), patterns, dockerfile="")
    except re.error as error:
        raise ValueError(f"{file} has an invalid pattern ({error})") from error
    return lambda path: path != context and path.relative_to(context).as_posix() not in included

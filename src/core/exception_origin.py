"""The place in the user's code where an exception was raised, or where a thread is."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import FrameType, TracebackType

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))
MAX_MESSAGE = 300  # characters


def described(error: BaseException) -> str:
    """Return one line with the type of an exception, the start of its message, and its origin.

    The origin is the file, the line and the function of the innermost frame outside this package, the
    standard library and installed libraries, or of the innermost frame if there is no such frame. It is
    missing if the exception has no traceback, as in the example.

    >>> described(ValueError("no such order"))
    'ValueError: no such order'
    """
    first_line = (str(error).splitlines() or [""])[0][:MAX_MESSAGE]
    text = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    frame = next((frame for frame in reversed(frames) if _is_users(frame.filename)), frames[-1])
    return f"{text} ({_shown(Path(frame.filename))}:{frame.lineno} in {frame.name})"


def users_exc_info(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """Return the `exc_info` with which a log record shows `error`.

    The traceback starts at the outermost frame outside this package, the standard library and installed
    libraries. It is complete if there is no such frame.
    """
    users_part = error.__traceback__
    while users_part is not None and not _is_users(users_part.tb_frame.f_code.co_filename):
        users_part = users_part.tb_next
    return type(error), error, users_part or error.__traceback__


def place_in_users_code(frame: FrameType | None) -> str | None:
    """Return the file, the line and the function of the innermost frame of the user's code, from `frame`
    outwards, or None if there is no such frame."""
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    return f"{_shown(Path(frame.f_code.co_filename))}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_users(filename: str) -> bool:
    path = Path(filename).resolve()
    return path.is_file() and not any(path.is_relative_to(directory) for directory in (PACKAGE, *LIBRARIES))


def _shown(path: Path) -> Path:
    """Return the path relative to the working directory. A path outside this directory is not changed."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path

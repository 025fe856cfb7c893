"""Tables and sections of a Markdown file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from src.core.errors import ConfigError
from src.records.atomic_io import RUN_AGAIN, replace_text

MISSING = "–"  # stands for a value that the files do not contain


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, num_text: int = 1) -> list[str]:
    """Return the lines of a table. The first `num_text` columns are aligned left, the others right.

    A line break in a cell becomes a space. For example, an agent can call a tool by an invented name that
    contains a line break.
    """
    lines = [header, ["---"] * num_text + ["---:"] * (len(header) - num_text), *rows]
    cells_of = ([" ".join(cell.splitlines()).replace("|", "&#124;") for cell in line] for line in lines)
    return [f"| {' | '.join(cells)} |" for cells in cells_of]


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1%}"


def number(value: float | None, *, digits: int = 1) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def change(cells: Sequence[str]) -> str:
    """Return the text of one cell with several values in order, such as those before and after training."""
    return " → ".join(cells)


def put_section(path: Path, title: str, lines: Sequence[str]) -> None:
    """Write a section to a file. It replaces the section of the same title from an earlier call."""
    start, end = f"<!-- analysis: {title} -->", f"<!-- end of analysis: {title} -->"
    section = "\n".join([start, *lines, end]) + "\n"
    try:
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
    except UnicodeDecodeError as error:
        raise ConfigError(f"write_to={path} is not UTF-8 text; give another file") from error
    head, has_start, rest = before.partition(start)
    _, has_end, tail = rest.partition(end)
    if has_start and has_end:
        replace_text(path, head + section + tail.removeprefix("\n"), advice=RUN_AGAIN)
    else:
        gap = "\n" if before and not before.endswith("\n\n") else ""
        replace_text(path, before + gap + section, advice=RUN_AGAIN)

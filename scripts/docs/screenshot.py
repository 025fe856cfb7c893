"""Write docs/assets/quick-start.svg, a picture of the terminal output of a run.

    script -qc "stty cols 110; ./run_skyrl_tx.sh" run.log
    python -m scripts.docs.screenshot run.log [head=16] [tail=28] [output=docs/assets/quick-start.svg]

`script` records the output with its colours. If the output has more than `head` + `tail` + 1 lines, the
picture shows only its first `head` and last `tail` lines.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "docs" / "assets" / "quick-start.svg"
WIDTH = 110  # columns
# Control sequences except those of colours, which end with "m".
OTHER_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-LN-Za-ln-z]|\x1b\][^\x07]*\x07|\x1b[=>78]")


def main(argv: Sequence[str]) -> None:
    options = dict(argument.split("=", 1) for argument in argv if "=" in argument)
    paths = [argument for argument in argv if "=" not in argument]
    if len(paths) != 1 or options.keys() - {"head", "tail", "output"}:
        sys.exit(f"screenshot: expected one log file and options; see the usage:\n\n{__doc__}")
    lines = screen_lines(Path(paths[0]).read_text(errors="replace"))
    shown = shorten(lines, head=int(options.get("head", 16)), tail=int(options.get("tail", 28)))
    output = Path(options.get("output", OUTPUT))
    output.write_text(picture(shown, title="./run_skyrl_tx.sh"))
    print(f"wrote {output} with {len(shown)} of {len(lines)} lines")


def screen_lines(log: str) -> list[str]:
    """Return the lines of a terminal log as they remained on the screen, with ANSI colours.

    A carriage return overwrites its line, so only the text after the last carriage return of a line remains.
    Blank lines at the start and at the end, and the lines that `script` adds, are left out.

    >>> screen_lines("Script started on 2026-01-01\\r\\nstep 1/2\\rstep 2/2\\r\\n\\x1b[2Kdone\\n")
    ['step 2/2', 'done']
    """
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in log.split("\n")]
    lines = [OTHER_SEQUENCES.sub("", line).rstrip() for line in lines]
    lines = [line for line in lines if not line.startswith(("Script started on ", "Script done on "))]
    while lines and not lines[0]:
        lines = lines[1:]
    while lines and not lines[-1]:
        lines = lines[:-1]
    return lines


def shorten(lines: Sequence[str], *, head: int, tail: int) -> list[str]:
    """Return the first `head` and the last `tail` lines, with a line between them that contains the number of
    omitted lines.

    >>> shorten(["a", "b", "c", "d"], head=1, tail=1)
    ['a', '[2 more lines]', 'd']
    """
    if len(lines) <= head + tail + 1:
        return list(lines)
    return [*lines[:head], f"[{len(lines) - head - tail} more lines]", *lines[len(lines) - tail :]]


def picture(lines: Sequence[str], *, title: str) -> str:
    """Return the lines as SVG. Paths of the repository's directory become relative."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    for line in lines:
        console.print(Text.from_ansi(line.replace(f"{ROOT}/", "")))
    return console.export_svg(title=title, unique_id="quick-start")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Kills training runs with SIGKILL at random points, resumes them, and checks the finished runs.

    python -m tests.stress.kill_points [POINTS] [SEED] [MODE]

POINTS runs (default 50) are killed once each, and one more run is killed repeatedly. The runs use the real
trainer and the backend of `tests.fakes.disk_bandit`. MODE is synchronous (the default), asynchronous or
streaming. A synchronous run must equal an uninterrupted run. In the other modes, each task must be trained
once per epoch, except the task whose trials always fail. No graded rollout may be lost or run again. The
program prints every fault and a summary. The exit status is 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fakes.killable import MODES, main


def count(text: str) -> int:
    """Return a number of at least 1. Raises ValueError for any other text."""
    if int(text) < 1:
        raise ValueError
    return int(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.stress.kill_points")
    parser.add_argument("points", type=count, nargs="?", default=50, metavar="POINTS")
    parser.add_argument("seed", type=int, nargs="?", default=0, metavar="SEED")
    parser.add_argument("mode", choices=MODES, nargs="?", default="synchronous", metavar="MODE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        sys.exit(main(Path(directory), arguments.points, arguments.seed, arguments.mode))

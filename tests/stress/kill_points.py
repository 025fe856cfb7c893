"""Kills training runs with SIGKILL at random points, resumes them, and checks the finished runs.

    python -m tests.stress.kill_points [POINTS] [SEED] [MODE]

POINTS runs (default 50) are killed once each, and one more run is killed repeatedly. The runs use the real
trainer and the backend of `tests.fakes.disk_bandit`. MODE is synchronous (the default), asynchronous or
streaming. A synchronous run must equal an uninterrupted run. In the other modes, each task must be trained
once per epoch, except the task whose trials always fail. No graded rollout may be lost or run again. The
program prints every fault and a summary. The exit status is 1 if there is a fault.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.fakes.killable import main

if __name__ == "__main__":
    arguments = [*sys.argv[1:], *("50", "0", "synchronous")[len(sys.argv) - 1 :]]
    points, seed = int(arguments[0]), int(arguments[1])
    with tempfile.TemporaryDirectory() as directory:
        sys.exit(main(Path(directory), points, seed, arguments[2]))

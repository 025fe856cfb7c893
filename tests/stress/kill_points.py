"""Kills a run with SIGKILL at random points, resumes it, and compares it with an uninterrupted run.

    python -m tests.stress.kill_points [POINTS] [SEED] [MODE]

The run uses the real trainer and the bandit backend of the tests. MODE is synchronous, asynchronous or
streaming. The last line of the output is a summary. The exit status is 1 if any resumed run differs.
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

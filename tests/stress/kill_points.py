"""SIGKILL at random points of a run, each resumed and compared with the unbroken run.

    python -m tests.stress.kill_points [POINTS] [SEED] [MODE]

The trainer is the real one, on the tests' bandit server; MODE is synchronous, asynchronous or streaming. Ends
with one line of figures, and with status 1 if a single run is not as it should be.
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

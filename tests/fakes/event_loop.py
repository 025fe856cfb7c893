"""A clock that excludes the time for which a thread waits for a CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path


def unloaded_clock() -> Callable[[], float]:
    """Return a clock in seconds for the calling thread. It does not advance while the thread is ready to run
    but has no CPU, so that the load of the machine does not change the measured times.
    """
    schedule = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")

    def now() -> float:
        _, waited_ns, _ = schedule.read_text().split()
        return time.monotonic() - int(waited_ns) / 1e9

    return now

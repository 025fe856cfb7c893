"""`python -m src.envs.cleanup`: remove what dead runs of this user left behind, and only that.

Sandbox processes need no cleaning: the kernel ends them with their trainer. What can stay are sandbox directories and, with Docker,
containers, networks, volumes and images of trials. All of them carry a run label; a run counts as dead when nobody holds its lock and its
process is gone. Only what is gone afterwards is reported as removed; exit status 1 when something could not be removed.
"""

from __future__ import annotations

import sys

from src.envs.sandbox.docker import CleanupReport, remove_dead, why_no_engine
from src.envs.sandbox.run_directory import live_run_labels, remove_dead_runs


def clean() -> CleanupReport:
    """Remove what dead runs left."""
    living = (
        live_run_labels()
    )  # before their directories are looked at: a run that starts meanwhile has nothing yet
    directories = [f"sandbox directory {label}" for label in remove_dead_runs()]
    cleaned = remove_dead(keep=living) if why_no_engine() is None else CleanupReport()
    cleaned.removed[:0] = directories
    return cleaned


def main() -> int:
    cleaned = clean()
    for line in cleaned.removed:
        print(f"removed {line}")
    for line in cleaned.left_alone:
        print(f"left alone {line}; remove it there")
    for line in cleaned.failed:
        print(f"could not remove {line}", file=sys.stderr)
    failed = f"{len(cleaned.failed)} could not be removed, " if cleaned.failed else ""
    print(f"cleanup: {len(cleaned.removed)} removed, {failed}{len(live_run_labels())} living runs left alone")
    return 1 if cleaned.failed else 0


if __name__ == "__main__":
    sys.exit(main())

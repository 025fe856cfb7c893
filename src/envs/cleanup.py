"""`python -m src.envs.cleanup`: remove the files and Docker objects that ended runs of this user left behind.

The kernel ends the processes of sandboxes together with their trainer. Directories of sandboxes and, with
Docker, containers, networks, volumes and images of trials can remain. Each of these objects has a run label
or a compose project, which identifies its run. A run has ended if its lock is free and its process does not
exist. The command reports an object as removed only if the object does not exist afterwards. The exit status
is 1 if a Docker object could not be removed.
"""

from __future__ import annotations

import sys

from src.envs.sandbox.docker import CleanupReport, remove_ended, why_no_engine
from src.envs.sandbox.sandbox_directory import live_run_labels, remove_ended_runs


def clean() -> CleanupReport:
    """Remove the directories and Docker objects of ended runs."""
    # A run that starts after the next line is not in `live_labels`. `remove_ended` keeps its objects
    # nevertheless, because its process exists.
    live_labels = live_run_labels()
    directories = [f"sandbox directory {label}" for label in remove_ended_runs()]
    report = remove_ended(keep=live_labels) if why_no_engine() is None else CleanupReport()
    report.removed[:0] = directories
    return report


def main() -> int:
    report = clean()
    for line in report.removed:
        print(f"removed {line}")
    for line in report.skipped:
        print(f"skipped {line}; remove it there")
    for line in report.failed:
        print(f"could not remove {line}", file=sys.stderr)
    failed = f"{len(report.failed)} could not be removed, " if report.failed else ""
    print(f"cleanup: {len(report.removed)} removed, {failed}{len(live_run_labels())} live runs kept")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m src.envs.cleanup`: remove what dead runs of this user left behind, and only that.

Sandbox processes need no cleaning: the kernel ends them with their trainer. What can stay are sandbox directories and, with Docker,
containers and networks; all of them carry a run label, and a run counts as dead when nobody holds its lock.
"""

from __future__ import annotations

from src.envs.docker import remove_labelled, why_no_engine
from src.envs.run_directory import living_labels, sweep


def clean() -> list[str]:
    """Remove dead runs' directories, containers and networks; one line for each."""
    removed = [f"sandbox directory {label}" for label in sweep()]
    if why_no_engine() is None:
        removed += remove_labelled(keep=living_labels())
    return removed


def main() -> None:
    removed = clean()
    for line in removed:
        print(f"removed {line}")
    print(f"cleanup: {len(removed)} removed, {len(living_labels())} living runs left alone")


if __name__ == "__main__":
    main()

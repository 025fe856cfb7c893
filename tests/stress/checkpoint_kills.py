"""Kills a process with SIGKILL while it saves, archives, overwrites and deletes one checkpoint.

    python -m tests.stress.checkpoint_kills DIRECTORY [EVERY]

Each run is a forked child, which kills itself at its n-th call that changes the disk. The values of n are 1,
1 + EVERY, 1 + 2 * EVERY, ... (default: EVERY = 1). The child acknowledges each completed step to its parent.
After a kill, the checkpoint must have the version of the last acknowledged step or of the next step. The list
of checkpoints must be readable, and the archive must have the same version as the checkpoint. After the next
save, archive and sweep, only the two files of the checkpoint may remain. A failed check raises
AssertionError; otherwise the program prints one line and its exit status is 0.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from skyrl_tx_server.errors import NotFoundError
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.http.routes.downloads import ARCHIVE, file_of
from tests.fakes.versions import save_version, version_in_archive, version_on_disk

PATH = "tinker://run/weights/last"
CALLS = ("replace", "rename", "fsync", "unlink", "mkdir", "rmdir", "utime")
GONE = -1  # the version of a deleted checkpoint


def store_at(directory: Path) -> CheckpointStore:
    return CheckpointStore(directory, "m")


def archived_version(store: CheckpointStore) -> int:
    """Create the archive of the checkpoint and return its version."""
    return version_in_archive(file_of(store, PATH, ARCHIVE)[1].read_bytes())


def steps(store: CheckpointStore) -> list[tuple[int, Callable[[], object]]]:
    """Return the steps of a run as (version after the step, function that performs the step)."""
    return [
        (1, lambda: save_version(store, PATH, 1)),
        (1, lambda: archived_version(store)),
        (2, lambda: save_version(store, PATH, 2)),
        (2, lambda: archived_version(store)),
        (GONE, lambda: store.delete(PATH)),
        (3, lambda: save_version(store, PATH, 3)),
        (3, lambda: archived_version(store)),
        (3, lambda: store.derived_files.sweep(-60.0)),
        (4, lambda: save_version(store, PATH, 4)),
    ]


def run_until_killed(directory: Path, kill_at: int) -> tuple[int, bool]:
    """Run the steps in a child that kills itself at call number `kill_at`, counted from 1.

    Return the number of acknowledged steps, and whether the child completed all steps.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        count = 0

        def counted(function: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **kwargs: object) -> object:
                nonlocal count
                count += 1
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        for _, perform in steps(store_at(directory)):
            perform()
            os.write(writer, b".")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        num_acknowledged = len(pipe.read())
    return num_acknowledged, os.waitpid(child, 0)[1] == 0


def saved_version(store: CheckpointStore) -> int:
    """Return the version of the checkpoint, or GONE if it does not exist."""
    try:
        return version_on_disk(store, PATH)
    except NotFoundError:
        return GONE


def check(directory: Path, num_acknowledged: int) -> None:
    """Raise AssertionError if the state on disk after a kill or a complete run is wrong."""
    store = store_at(directory)
    versions = [GONE, *(version for version, _ in steps(store))]
    version = saved_version(store)
    assert version in versions[num_acknowledged : num_acknowledged + 2], (
        f"version {version} after {num_acknowledged} acknowledged steps"
    )
    assert [info.step for info in store.list()] == ([] if version == GONE else [version])
    if version != GONE:
        assert archived_version(store) == version, "the archive contains another version"
    save_version(store, PATH, 9)
    assert (saved_version(store), archived_version(store)) == (9, 9)
    assert len(list((directory / "run" / "weights" / "last").iterdir())) == 2, (
        "the directory of the checkpoint contains other files"
    )
    store.derived_files.sweep(-60.0)
    assert list((directory / ".derived").iterdir()) == [], "files for downloads remain"


def main(directory: Path, every: int) -> int:
    kill_at, completed = 1, False
    while not completed:
        num_acknowledged, completed = run_until_killed(directory / str(kill_at), kill_at)
        check(directory / str(kill_at), num_acknowledged)
        kill_at += 0 if completed else every
    print(
        f"killed at {len(range(1, kill_at, every))} points of saves, archives and deletions: "
        "no version was lost or mixed with another"
    )
    return 0


def count(text: str) -> int:
    """Return a number of at least 1. Raises ValueError for any other text."""
    if int(text) < 1:
        raise ValueError
    return int(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.stress.checkpoint_kills")
    parser.add_argument("directory", type=Path, metavar="DIRECTORY")
    parser.add_argument("every", type=count, nargs="?", default=1, metavar="EVERY")
    arguments = parser.parse_args()
    sys.exit(main(arguments.directory, arguments.every))

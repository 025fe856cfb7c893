"""Kills a process with SIGKILL while it saves, archives, overwrites and deletes one checkpoint.

    python -m tests.stress.checkpoint_kills DIRECTORY [EVERY]

Each run is a forked child that is killed at its n-th call that changes the disk, for every n (or every
EVERY-th). The child reports each completed step to its parent. After a kill, the checkpoint must be the last
acknowledged version or the one that was being written. The list of checkpoints must be readable, and the
archive must contain the version that is read. The next save, archive and sweep must leave no other files.
Prints one line. The exit status is 0 if all checks pass.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from skyrl_tx_server.errors import NotFoundError
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.http.routes.downloads import ARCHIVE, archive_of
from tests.fakes.versions import save_version, version_in_archive, version_on_disk

PATH = "tinker://run/weights/last"
CALLS = ("replace", "rename", "fsync", "unlink", "mkdir", "rmdir", "utime")
GONE = -1


def store_at(directory: Path) -> CheckpointStore:
    return CheckpointStore(directory, "m")


def archived(store: CheckpointStore) -> int:
    return version_in_archive(archive_of(store, PATH)[1].read_bytes())


def steps(store: CheckpointStore) -> list[tuple[int, Callable[[], object]]]:
    """Return the steps of a run: the version after the step, and the function that performs it."""
    return [
        (1, lambda: save_version(store, PATH, 1)),
        (1, lambda: archived(store)),
        (2, lambda: save_version(store, PATH, 2)),
        (2, lambda: archived(store)),
        (GONE, lambda: store.delete(PATH)),
        (3, lambda: save_version(store, PATH, 3)),
        (3, lambda: archived(store)),
        (3, lambda: store.sweep_derived(-60.0)),
        (4, lambda: save_version(store, PATH, 4)),
    ]


def killed_at(directory: Path, at: int) -> tuple[int, bool]:
    """Return the number of acknowledged steps, and whether the child completed all of them."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        count = 0

        def dying(real: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **kwargs: object) -> object:
                nonlocal count
                count += 1
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in CALLS:
            setattr(os, name, dying(getattr(os, name)))
        for _, act in steps(store_at(directory)):
            act()
            os.write(writer, b".")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as acknowledged:
        done = len(acknowledged.read())
    return done, os.waitpid(child, 0)[1] == 0


def saved_version(store: CheckpointStore) -> int:
    try:
        return version_on_disk(store, PATH)
    except NotFoundError:
        return GONE


def check(directory: Path, done: int) -> None:
    store = store_at(directory)
    versions = [GONE, *(version for version, _ in steps(store))]
    version = saved_version(store)
    assert version in versions[done : done + 2], f"version {version} after {done} acknowledged steps"
    assert [info.step for info in store.list()] == ([] if version == GONE else [version])
    if version != GONE:
        assert archived(store) == version, "the archive contains another version"
    save_version(store, PATH, 9)
    assert (saved_version(store), archived(store)) == (9, 9)
    assert len(list((directory / "run" / "weights" / "last").iterdir())) == 2, (
        "the folder of the checkpoint contains other files"
    )
    store.sweep_derived(-60.0)
    assert list((directory / ".derived").iterdir()) == [], "files that were made for downloads remain"


def main(directory: Path, every: int) -> int:
    at, lived = 1, False
    while not lived:
        done, lived = killed_at(directory / str(at), at)
        if lived:
            check(directory / str(at), done)
            break
        check(directory / str(at), done)
        at += every
    print(
        f"killed at {len(range(1, at, every))} points of {ARCHIVE}, saves and deletions: nothing lost, "
        f"nothing mixed"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))

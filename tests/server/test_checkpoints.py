"""Checkpoints on disk: reads, atomic writes, deletes, the quota and damaged files."""

import json
import os
import re
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from skyrl_tx_server.engine.operations import LoraSpec
from skyrl_tx_server.errors import ConflictError, NotFoundError, ServerError, StorageError, UserError
from skyrl_tx_server.files import checkpoints, disk
from skyrl_tx_server.files.checkpoint_record import RECORD_NAME, CheckpointKind, parse_path, read_record
from skyrl_tx_server.files.checkpoints import CheckpointStore

RUN = "session-1:train:0"
ARRAYS = {"adapter/a": np.arange(6, dtype=np.float32).reshape(2, 3), "scale": np.array(0.5, np.float32)}
LORA = LoraSpec(rank=4, seed=7, train_unembed=False, alpha=16.0)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", "org/model")


def write(
    store: CheckpointStore,
    name: str = "one",
    *,
    kind: str = "weights",
    run: str = RUN,
    overwrite: bool = False,
    scale: float = 1.0,
):
    arrays = {key: value * np.float32(scale) for key, value in ARRAYS.items()}
    metadata = {"renderer_name": "qwen3"}
    return store.write(
        f"tinker://{run}/{kind}/{name}",
        arrays,
        lora=LORA,
        step=3,
        user_metadata=metadata,
        overwrite=overwrite,
    )


def test_a_checkpoint_is_read_as_it_was_written(store: CheckpointStore):
    written = write(store)
    info, arrays = store.read(f"tinker://{RUN}/weights/one")
    assert info == written == store.info(written.path)
    assert (info.run_id, info.kind, info.name, info.base_model) == (
        RUN,
        CheckpointKind.TRAINING,
        "one",
        "org/model",
    )
    assert (info.lora, info.step, info.user_metadata) == (LORA, 3, {"renderer_name": "qwen3"})
    assert info.size_bytes > sum(value.nbytes for value in ARRAYS.values())
    assert arrays.keys() == ARRAYS.keys()
    for key, value in ARRAYS.items():
        np.testing.assert_array_equal(arrays[key], value)
        assert arrays[key].shape == value.shape


def test_the_files_of_killed_writes_are_removed(store: CheckpointStore):
    def files() -> list[str]:
        return sorted(file.parent.name for file in store.root.glob("*/*/*/*"))

    for name in ("killed", "overwritten", "recent"):
        write(store, name)
    killed, overwritten, recent = (
        store.root / RUN / "weights" / name for name in ("killed", "overwritten", "recent")
    )
    for directory in (killed, recent):
        (directory / RECORD_NAME).rename(directory / f"{RECORD_NAME}.{'0' * 32}")
    for name in (f"arrays-{'0' * 32}.safetensors", "notes.txt"):
        (overwritten / name).touch()
    for path in (killed, *killed.iterdir(), overwritten, *overwritten.iterdir()):
        os.utime(path, (0, 0))
    store.remove_interrupted_writes()
    assert files() == ["overwritten"] * 3 + ["recent"] * 2 and not killed.exists()
    assert (overwritten / "notes.txt").exists()
    np.testing.assert_array_equal(
        store.read(f"tinker://{RUN}/weights/overwritten")[1]["adapter/a"], ARRAYS["adapter/a"]
    )
    store.remove_interrupted_writes(unchanged_for_s=-1.0)
    assert files() == ["overwritten"] * 3


def test_list_is_oldest_first_and_can_be_limited_to_a_run(store: CheckpointStore, tmp_path: Path):
    for name, run in [("b", RUN), ("a", RUN), ("c", "other")]:
        write(store, name, run=run)
    (tmp_path / "checkpoints" / "foreign" / "weights" / "x").mkdir(parents=True)
    (tmp_path / "checkpoints" / "foreign" / "weights" / "x" / "checkpoint.json").write_text("{}")
    assert [info.name for info in store.list()] == ["b", "a", "c"]
    assert [info.name for info in store.list(RUN)] == ["b", "a"]


def test_an_existing_name_is_a_conflict_unless_overwritten(store: CheckpointStore):
    path = write(store).path
    with pytest.raises(ConflictError, match="exists already"):
        write(store, scale=2.0)
    np.testing.assert_array_equal(store.read(path)[1]["scale"], np.float32(0.5))
    write(store, scale=2.0, overwrite=True)
    np.testing.assert_array_equal(store.read(path)[1]["scale"], np.float32(1.0))
    assert len(list((Path(store.root) / RUN / "weights" / "one").iterdir())) == 2


def test_a_failed_write_leaves_only_the_old_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
):
    path = write(store).path

    def raise_no_space(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", raise_no_space)
        with pytest.raises(ServerError, match=r"cannot write checkpoint .*No space left"):
            write(store, scale=2.0, overwrite=True)
    np.testing.assert_array_equal(store.read(path)[1]["scale"], np.float32(0.5))
    assert len(list((Path(store.root) / RUN / "weights" / "one").iterdir())) == 2


def test_a_directory_that_cannot_be_created_is_a_server_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ServerError, match=r"cannot write checkpoint .*Not a directory"):
        write(CheckpointStore(tmp_path / "file" / "checkpoints", "local/base"))


def test_a_full_disk_while_writing_loses_no_earlier_save(store: CheckpointStore):
    """A limit on the file size makes the kernel refuse writes in the middle of the arrays."""
    path = write(store).path
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard_limit))
    try:
        for overwrite, name in ((True, "one"), (False, "two")):
            with pytest.raises(
                ServerError, match=r"cannot write checkpoint .*saved checkpoints are unchanged"
            ):
                write(store, name, overwrite=overwrite)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
    np.testing.assert_array_equal(store.read(path)[1]["scale"], np.float32(0.5))
    assert [info.name for info in store.list()] == ["one"]
    assert len(list((Path(store.root) / RUN / "weights" / "one").iterdir())) == 2


def test_files_are_synced_before_they_are_renamed(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch):
    """After a power failure, a file that was renamed without a sync may be empty."""
    events: list[str] = []
    fsync, replace_file = os.fsync, os.replace

    def record_sync(descriptor: int) -> None:
        events.append(re.split("[-.]", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))[0])
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        events.append("rename")
        replace_file(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_rename)
    write(store)
    root = re.split("[-.]", Path(store.root).name)[0]
    directories = [
        "one",
        "weights",
        re.split("[-.]", RUN)[0],
        root,
    ]  # the parents of a new checkpoint are new
    assert events == ["arrays", "checkpoint", "rename", *directories]


def test_a_save_to_a_full_disk_is_refused_before_it_writes(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda directory: SimpleNamespace(free=disk.SLACK_BYTES))
    with pytest.raises(ServerError, match="not enough disk space"):
        write(store)
    assert list(Path(store.root).iterdir()) == []


def test_the_quota_counts_an_overwritten_checkpoint_once(tmp_path: Path):
    size = write(CheckpointStore(tmp_path / "other", "org/model")).size_bytes
    store = CheckpointStore(tmp_path / "checkpoints", "org/model", quota_bytes=2 * size)
    path = write(store).path
    write(store, "two", kind="sampler_weights")
    with pytest.raises(UserError, match=r"over the checkpoint quota: .* larger checkpoint_quota_gb"):
        write(store, "three")
    write(store, "one", overwrite=True)
    store.delete(path)
    write(store, "three")
    assert sorted(info.name for info in store.list()) == ["three", "two"]


def test_a_write_killed_before_its_rename_makes_no_checkpoint(store: CheckpointStore):
    directory = Path(store.root) / RUN / "weights" / "one"
    directory.mkdir(parents=True)
    (directory / "arrays-dead.safetensors").write_bytes(b"half")
    assert not store.exists(f"tinker://{RUN}/weights/one") and store.list() == []
    with pytest.raises(NotFoundError, match="no checkpoint"):
        store.read(f"tinker://{RUN}/weights/one")
    write(store)
    assert not (directory / "arrays-dead.safetensors").exists()


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda directory: next(directory.glob("arrays-*")).unlink(), "is damaged"),
        (lambda directory: next(directory.glob("arrays-*")).write_bytes(b"x"), "is damaged"),
        (lambda directory: flip_last_byte(next(directory.glob("arrays-*"))), "is damaged"),
        (lambda directory: (directory / "checkpoint.json").write_text('{"format":'), "cannot be parsed"),
        (
            lambda directory: (directory / "checkpoint.json").write_text('{"format": "peft"}'),
            "not written by this server",
        ),
        (lambda directory: change_record(directory, version=9), "format version 9"),
        (
            lambda directory: change_record(directory, lora={"rank": 4, "colour": "red"}),
            "is missing or invalid",
        ),
    ],
)
def test_incomplete_and_foreign_checkpoints_are_refused(store: CheckpointStore, damage, message: str):
    path = write(store).path
    damage(Path(store.root) / RUN / "weights" / "one")
    with pytest.raises(UserError, match=message) as error:
        store.read(path)
    assert path in str(error.value)


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def change_record(directory: Path, **changes: object) -> None:
    record = json.loads((directory / "checkpoint.json").read_text())
    (directory / "checkpoint.json").write_text(json.dumps(record | changes))


def test_a_checkpoint_of_another_base_model_is_refused(store: CheckpointStore):
    path = write(store).path
    other_model = CheckpointStore(store.root, "org/other")
    assert other_model.info(path).base_model == "org/model"
    with pytest.raises(UserError, match="made from base model org/model, this server runs org/other"):
        other_model.read(path)


def test_delete_removes_a_checkpoint(store: CheckpointStore):
    path = write(store, kind="sampler_weights").path
    store.delete(path)
    assert not store.exists(path)
    with pytest.raises(NotFoundError):
        store.delete(path)


@pytest.mark.parametrize("moment", ["before its rename", "after its rename"])
def test_a_delete_during_a_save_loses_no_accepted_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, moment: str
):
    """The save fails if the delete precedes its rename. Otherwise the delete removes the new checkpoint."""
    path = write(store).path
    os_replace = os.replace

    def replace_and_delete(source: object, target: object) -> None:
        if moment == "before its rename":
            store.delete(path)
        os_replace(source, target)  # type: ignore[arg-type]
        if moment == "after its rename":
            store.delete(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_and_delete)
        if moment == "before its rename":
            with pytest.raises(ServerError, match="cannot write checkpoint"):
                write(store, overwrite=True)
        else:
            write(store, overwrite=True)
    assert not store.exists(path) and store.list() == []
    np.testing.assert_array_equal(store.read(write(store).path)[1]["scale"], np.float32(0.5))


def test_a_read_or_delete_after_a_delete_is_not_found(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
):
    path = write(store).path
    record = read_record(path, store.root / RUN / "weights" / "one" / RECORD_NAME)
    store.delete(path)
    # the calls below get the record, as if they had read it before the first delete
    monkeypatch.setattr(checkpoints, "read_record", lambda *_: record)
    with pytest.raises(NotFoundError, match="no checkpoint"):
        store.delete(path)
    with pytest.raises(UserError, match="is missing"):
        store.read(path)


@pytest.mark.parametrize(
    "path",
    [
        *("one", "tinker://run/weights", "tinker://run/other/one", "tinker://run/weights/a/b"),
        *("tinker://../weights/one", "tinker://run/weights/..", "tinker://run/weights/"),
        *("tinker:///weights/one", "tinker://run/weights/a b"),
    ],
)
def test_malformed_checkpoint_paths_are_refused(path: str):
    with pytest.raises(UserError):
        parse_path(path)


def test_malformed_checkpoint_names_are_refused(store: CheckpointStore):
    for name in ("a/b", "..", "", "a b", "x" * 201):
        with pytest.raises(UserError):
            write(store, name)
    assert replace(write(store, "ok-1.2_3"), user_metadata={}).name == "ok-1.2_3"


def test_a_checkpoint_can_be_deleted_from_a_full_disk(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(store).path

    def mkdir(directory: Path, mode: int = 0o777) -> None:
        raise FileExistsError if directory.exists() else OSError(28, "No space left on device")

    monkeypatch.setattr(os, "mkdir", mkdir)
    store.delete(path)
    assert not store.exists(path)


def test_a_failed_deletion_says_what_to_do(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(store).path

    def rename(source: Path, target: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(StorageError, match=r"cannot delete .*: Read-only file system; make .* writable"):
        store.delete(path)
    assert store.exists(path)

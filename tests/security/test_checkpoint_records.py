"""A damaged file below checkpoints_dir causes an error that names it and affects no other object."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import numpy as np
import pytest

from skyrl_tx_server.engine.operations import LoraSpec, UnloadModel
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.files.run_index import RunIndex
from skyrl_tx_server.http.app import build_app
from skyrl_tx_server.http.http_handler import StartupState
from tests.fakes.server import fake_context, fake_engine
from tests.fakes.versions import save_version, version_on_disk
from tests.security.tenants import MODEL, make_model, open_session, post

GOOD, BAD = "tinker://run/weights/good", "tinker://run/weights/bad"


def change_fields(**changes: object) -> Callable[[Path], None]:
    """Return a function that changes fields of checkpoint.json in a directory."""

    def damage(directory: Path) -> None:
        record = json.loads((directory / "checkpoint.json").read_text())
        (directory / "checkpoint.json").write_text(json.dumps(record | changes))

    return damage


def replace_content(data: bytes) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / "checkpoint.json").write_bytes(data)

    return damage


def replace_record(create: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        record = directory / "checkpoint.json"
        record.rename(directory.parents[2] / "elsewhere.json")
        create(record)

    return damage


def link_arrays(directory: Path) -> None:
    """Move the arrays out of the root, and replace them by a symbolic link."""
    arrays = next(directory.glob("arrays-*"))
    outside = directory.parents[3] / "outside"
    arrays.rename(outside)
    arrays.symlink_to(outside)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "absolute": change_fields(arrays="/etc/passwd"),
    "dots": change_fields(arrays="../good/arrays-x.safetensors"),
    "another file": change_fields(arrays="checkpoint.json"),
    "no time zone": change_fields(created_at="2020-01-01T00:00:00"),
    "time is a number": change_fields(created_at=5),
    "metadata of numbers": change_fields(user_metadata={"a": 1}),
    "metadata is a list": change_fields(user_metadata=[]),
    "rank is text": change_fields(lora={"rank": "4"}),
    "rank is huge": change_fields(lora={"rank": -(10**30)}),
    "alpha is not a number": change_fields(lora={"rank": 4, "alpha": "x"}),
    "size is text": change_fields(size_bytes="many"),
    "step is missing": change_fields(step=None),
    "version is deep": change_fields(version=[[[[]]]]),
    "deep": replace_content(b"[" * 200_000),
    "a list": replace_content(b"[]"),
    "not text": replace_content(b"\xff\xfe\x00"),
    "many digits": replace_content(b'{"step": ' + b"9" * 5000 + b"}"),
    "empty": replace_content(b""),
    "fifo": replace_record(os.mkfifo),
    "directory": replace_record(Path.mkdir),
    "linked record": replace_record(lambda record: record.symlink_to(record.parents[3] / "elsewhere.json")),
    "dangling link": replace_record(lambda record: record.symlink_to("nowhere")),
    "linked arrays": link_arrays,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_record_is_reported_and_hides_no_other_record(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    store = CheckpointStore(tmp_path / "root", "m")
    save_version(store, GOOD, 1)
    save_version(store, BAD, 2)
    damage(tmp_path / "root" / "run" / "weights" / "bad")
    with pytest.raises(UserError) as caught:
        store.read(BAD)
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value) and BAD in str(caught.value)
    assert GOOD in [info.path for info in store.list()]
    assert version_on_disk(store, GOOD) == 1


@pytest.mark.parametrize("level", ["run", "run/weights", "run/weights/bad"])
def test_a_symbolic_link_to_another_directory_is_not_used(tmp_path: Path, level: str) -> None:
    root = tmp_path / "root"
    store = CheckpointStore(root, "m")
    save_version(store, BAD, 2)
    outside = tmp_path / "outside"
    (root / level).rename(outside)
    (root / level).symlink_to(outside)
    files_before = sorted(outside.rglob("*"))
    for operation in (
        lambda: store.read(BAD),
        lambda: store.info(BAD),
        lambda: save_version(store, BAD, 3),
        lambda: store.delete(BAD),
    ):
        with pytest.raises(UserError, match="symbolic link"):
            operation()
    assert store.list() == [] and sorted(outside.rglob("*")) == files_before


def test_a_symbolic_link_to_itself_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, "m")
    save_version(store, GOOD, 1)
    (tmp_path / "run/weights/bad").symlink_to("bad")
    with pytest.raises(UserError, match="symbolic link"):
        store.info(BAD)
    store.remove_interrupted_writes(0)
    assert [info.path for info in store.list()] == [GOOD]


def test_a_root_that_is_a_symbolic_link_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    store = CheckpointStore(tmp_path / "root", "m")
    save_version(store, GOOD, 1)
    assert version_on_disk(store, GOOD) == 1 and len(store.list()) == 1


def test_invalid_safetensors_are_reported_as_damaged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, "m")
    save_version(store, BAD, 2)
    directory = tmp_path / "run" / "weights" / "bad"
    for data in (b"x" * 100, b"\xff" * 8 + b"{}", (5).to_bytes(8, "little") + b"[[[[["):
        arrays = next(directory.glob("arrays-*"))
        arrays.write_bytes(data)
        change_fields(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())(directory)
        with pytest.raises(UserError, match="is damaged"):
            store.read(BAD)


# --- the run index


def metadata(num_bytes: int) -> dict[str, str]:
    return {"x": "y" * (num_bytes - 1)}


async def test_metadata_over_the_limit_is_refused_before_create_model(tmp_path: Path) -> None:
    context = fake_context(tmp_path)
    transport = httpx.ASGITransport(build_app(StartupState(state=context)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        session = await open_session(http)
        body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
        for _ in range(2):
            refused = await http.post(
                "/api/v1/create_model", json={**body, "user_metadata": metadata(20_000)}
            )
            assert refused.status_code == 400 and "at most 16384" in refused.json()["detail"]
        assert (await http.get("/api/v1/training_runs")).json()["training_runs"] == []
        assert (tmp_path / "ledger.jsonl").stat().st_size == 0
        await make_model(http, session)
        fake_engine(context).stop()
        assert len(fake_engine(context).models) == 1


def run_line(number: int, num_metadata_bytes: int, owner_prefix: str = "") -> str:
    """Return the line of a training run in the run index."""
    run = {
        "run_id": f"{owner_prefix}s:train:{number}",
        "base_model": "m",
        "lora": {"rank": 4},
        "created_at": "2026-01-01T00:00:00+00:00",
    }
    return json.dumps(run | {"user_metadata": metadata(num_metadata_bytes)})


def test_a_run_index_with_huge_metadata_shrinks_and_keeps_runs(tmp_path: Path) -> None:
    """The file has eight runs with 2 MiB of metadata each, more than a server accepts."""
    file = tmp_path / "ledger.jsonl"
    file.write_text("\n".join(run_line(number, 2 << 20) for number in range(8)))
    assert list(RunIndex(file).runs) == [f"s:train:{number}" for number in range(8)]
    assert file.stat().st_size < 4096
    assert list(RunIndex(file).runs) == [f"s:train:{number}" for number in range(8)]


def test_compaction_removes_only_outdated_lines(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    file.write_text("\n".join(run_line(number, 1000) for number in range(3)))
    run_index, expires_at = RunIndex(file), datetime.now(UTC) + timedelta(days=1)
    run_index.set_public("tinker://a/weights/1", True)
    largest = 0
    for _ in range(6000):
        for path in ("tinker://a/weights/1", "tinker://b/weights/2"):
            run_index.set_expiry(path, expires_at, "0" * 32)
        run_index.set_expiry("tinker://b/weights/2", None)
        largest = max(largest, file.stat().st_size)
    assert largest < 1.2 * (1 << 20)
    reloaded = RunIndex(file)
    assert (reloaded.runs, reloaded.expiries, reloaded.public) == (
        run_index.runs,
        {"tinker://a/weights/1": expires_at},
        {"tinker://a/weights/1"},
    )
    assert reloaded.expiring_generation("tinker://a/weights/1") == "0" * 32


def test_the_runs_of_one_tenant_evict_no_runs_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_tx_server.files.run_index.MAX_RUN_BYTES", 20_000)
    file = tmp_path / "ledger.jsonl"
    lines = [
        run_line(0, 500, "tenant-alice."),
        *(run_line(number, 4000, "tenant-bob.") for number in range(50)),
    ]
    file.write_text("\n".join(lines))
    run_index = RunIndex(file)
    assert list(run_index.for_tenant("alice").runs) == ["tenant-alice.s:train:0"]
    assert list(run_index.for_tenant("bob").runs) == [
        f"tenant-bob.s:train:{number}" for number in range(46, 50)
    ]
    assert (
        run_index.for_tenant("alice").run("tenant-bob.s:train:49") is None
        and run_index.run("tenant-bob.s:train:49") is not None
    )


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"run_id": 5, "base_model": "m", "lora": {"rank": 4}, "created_at": "2026-01-01T00:00:00+00:00"}',
        b'{"run_id": "x", "base_model": "m", "lora": {"rank": 4}, "created_at": "2026-01-01T00:00:00"}',
        b'{"run_id": "x", "base_model": "m", "lora": {"rank": 4}, '
        b'"created_at": "2026-01-01T00:00:00+00:00", "user_metadata": {"a": 1}}',
        b'{"path": "p", "expires_at": "2020-01-01T00:00:00"}',
        b'{"path": ["p"], "expires_at": null}',
        b'{"path": {}, "public": true}',
        b'{"path": "p", "expires_at": ' + b"9" * 5000 + b"}",
    ],
)
def test_an_invalid_line_affects_no_other_line(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "ledger.jsonl"
    file.write_bytes(run_line(1, 10).encode() + b"\n" + line + b"\n" + run_line(2, 10).encode())
    run_index = RunIndex(file)
    assert (
        list(run_index.runs) == ["s:train:1", "s:train:2"]
        and run_index.expired() == []
        and run_index.public == set()
    )


# --- a full disk


async def test_a_full_disk_after_create_model_unloads_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = fake_context(tmp_path)
    engine, transport = fake_engine(context), httpx.ASGITransport(build_app(StartupState(state=context)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        session = await open_session(http)
        os_write = os.write

        def write_half(descriptor: int, data: bytes) -> int:
            if len(data) < 20:
                raise OSError(errno.ENOSPC, "No space left on device")
            return os_write(descriptor, data[: len(data) // 2])

        with monkeypatch.context() as patch:
            patch.setattr("skyrl_tx_server.files.run_index.os.write", write_half)
            body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
            reply = await post(http, "create_model", **body)
            failed = (
                await http.post("/api/v1/retrieve_future", json={"request_id": reply["request_id"]})
            ).json()
        assert (
            failed["category"] == "server"
            and "the model was not created" in failed["error"]
            and "No space left" in failed["error"]
        )
        assert (tmp_path / "ledger.jsonl").read_bytes() == b""
        assert (await http.get("/api/v1/training_runs")).json()["training_runs"] == []
        assert (await http.get(f"/api/v1/sessions/{session}")).json()["training_run_ids"] == []
        model_id = await make_model(http, session, 1)
        engine.stop()
        assert list(engine.models) == [model_id] and [op.model_id for op in engine.of_type(UnloadModel)] == [
            f"{session}:train:0"
        ]
    assert [run.lora.rank for run in RunIndex(tmp_path / "ledger.jsonl").runs.values()] == [4]


def test_fields_of_a_record_survive_a_round_trip(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, "m")
    lora = LoraSpec(rank=3, seed=2**62, train_attn=False, alpha=16)
    written = store.write(GOOD, {"x": np.zeros(1)}, lora=lora, step=5, user_metadata={"é": "ü"})
    assert store.info(GOOD) == written and written.lora == lora

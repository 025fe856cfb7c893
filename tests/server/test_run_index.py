"""The run index returns all complete records, also after an incomplete last line."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from skyrl_tx_server.engine.operations import LoraSpec
from skyrl_tx_server.errors import StorageError
from skyrl_tx_server.files import run_index as run_index_module
from skyrl_tx_server.files.run_index import RunIndex, TrainingRun

PATH, OTHER = "tinker://run/weights/1", "tinker://run/weights/2"
NOW = datetime.now(UTC)


def run_of(run_id: str) -> TrainingRun:
    return TrainingRun(
        run_id=run_id, base_model="m", lora=LoraSpec(rank=4), created_at=NOW, user_metadata={"a": "b"}
    )


def test_a_reopened_index_returns_the_latest_values(tmp_path: Path) -> None:
    run_index = RunIndex(tmp_path / "ledger.jsonl")
    run_index.record_run(run_of("one"))
    for path in (PATH, OTHER):
        run_index.set_expiry(path, NOW - timedelta(hours=1))
        run_index.set_public(path, True)
    run_index.set_expiry(PATH, NOW + timedelta(hours=1))
    run_index.forget(OTHER)
    for index in (run_index, RunIndex(tmp_path / "ledger.jsonl")):
        assert index.runs == {"one": run_of("one")}
        assert index.expiries == {PATH: NOW + timedelta(hours=1)} and index.public == {PATH}
        assert index.expired() == []
    run_index.set_expiry(PATH, NOW - timedelta(hours=1))
    assert run_index.expired() == [PATH]


def test_an_incomplete_line_affects_no_other_line(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    run_index = RunIndex(file)
    run_index.record_run(run_of("one"))
    run_index.record_run(run_of("torn"))
    file.write_text(file.read_text()[:-20])
    RunIndex(file).record_run(run_of("two"))
    assert list(RunIndex(file).runs) == ["one", "two"]


def test_a_line_of_another_version_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    file.write_text('{"run_id": "x", "lora": {"colour": 1}, "created_at": "never"}\n{"path": "p"}\n[]\n')
    with file.open("a") as stream:
        stream.write("[" * 100_000)
    RunIndex(file).record_run(run_of("one"))
    assert list(RunIndex(file).runs) == ["one"]


def test_two_servers_share_an_index(tmp_path: Path) -> None:
    first = RunIndex(tmp_path / "ledger.jsonl")
    first.set_expiry(PATH, NOW - timedelta(hours=1))
    first.set_public(OTHER, True)
    second = RunIndex(tmp_path / "ledger.jsonl")
    second.set_expiry(PATH, None)
    assert first.expired() == []
    first.set_expiry(OTHER, NOW - timedelta(hours=1))
    second.set_expiry(OTHER, None)  # `second` has not read this expiry before
    second.set_public(OTHER, False)
    assert first.expired() == [] and first.public == set()


def test_a_rewritten_index_keeps_the_lines_of_other_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (RunIndex(tmp_path / "ledger.jsonl") for _ in range(2))
    second.record_run(run_of("second"))
    second.set_expiry(PATH, NOW - timedelta(hours=1))
    monkeypatch.setattr(run_index_module, "COMPACTION_SLACK", 0)
    for minutes in range(9):
        first.set_expiry(OTHER, NOW + timedelta(days=1, minutes=minutes))
    monkeypatch.undo()
    second.record_run(run_of("later"))
    for index in (second, RunIndex(tmp_path / "ledger.jsonl")):
        assert index.expired() == [PATH] and list(index.runs) == ["second", "later"]
        assert index.expiries[OTHER] == NOW + timedelta(days=1, minutes=8)
    assert first.expired() == [PATH] and list(first.runs) == ["second", "later"]


def test_a_rewritten_index_with_the_same_inode_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, same_inode = tmp_path / "ledger.jsonl", tmp_path / "old"
    first, second = (RunIndex(file) for _ in range(2))
    monkeypatch.setattr(run_index_module, "COMPACTION_SLACK", 0)
    for rewrite in range(2):  # the first rewritten file replaces a file without a header
        first.set_expiry(PATH, NOW - timedelta(hours=1))
        assert second.expired() == [PATH]
        same_inode.unlink(missing_ok=True)
        same_inode.hardlink_to(file)
        while file.samefile(same_inode):
            first.set_expiry(PATH, NOW + timedelta(hours=1))
        for run in range(9):  # the new file is larger than the part that `second` has read
            first.record_run(run_of(f"{rewrite}-{run}"))
        same_inode.write_bytes(file.read_bytes())
        same_inode.replace(file)
        assert second.expired() == [] and second.runs == first.runs


def test_a_line_that_another_server_is_writing_is_read_later(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    RunIndex(file).set_public(PATH, True)
    text = file.read_text()
    file.write_text(text[:-8])
    index = RunIndex(file)
    assert index.public == set()
    with file.open("a") as stream:
        stream.write(text[-8:])
    assert index.expired() == [] and index.public == {PATH}


def test_a_full_disk_is_reported_and_changes_no_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = RunIndex(tmp_path / "ledger.jsonl")

    def write(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("skyrl_tx_server.files.run_index.os.write", write)
    for change in (
        lambda: index.set_public("tinker://run/weights/a", True),
        lambda: index.set_expiry("tinker://run/weights/a", datetime.now(UTC)),
    ):
        with pytest.raises(StorageError, match=r"ledger\.jsonl cannot be written: No space left on device;"):
            change()
    assert not index.public and not index.expiries

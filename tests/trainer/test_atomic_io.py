import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from src.core.errors import StorageError
from src.records.atomic_io import append_record, replace_text, truncate_torn_line
from tests.fakes.run_files import records

ROOT = Path(__file__).resolve().parents[2]


def test_a_failed_append_removes_its_partial_line(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    append_record(path, {"n": 1})
    before = path.read_text()
    real = os.write

    def write_half(descriptor, data):
        return real(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", write_half)
    with pytest.raises(
        StorageError,
        match=r"cannot write .*a.jsonl: No space left on device; "
        "free space or fix the cause, then resume the run",
    ):
        append_record(path, {"n": 2})
    assert path.read_text() == before


def test_an_incomplete_line_is_skipped_and_removed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n{"n": 2')
    assert records(path) == [{"n": 1}]
    truncate_torn_line(path)
    append_record(path, {"n": 3})
    assert path.read_text() == '{"n": 1}\n{"n": 3}\n'
    assert records(tmp_path / "none.jsonl") == []
    truncate_torn_line(tmp_path / "none.jsonl")


def test_the_end_of_the_last_complete_line_is_found(tmp_path, monkeypatch):
    path, block = tmp_path / "a.jsonl", 8
    monkeypatch.setattr("src.records.atomic_io.CHUNK_BYTES", block)
    for whole in ("", '{"n": 1}\n', '{"n": 1}\n' * 5):
        for torn in range(3 * block):
            path.write_text(whole + "x" * torn)
            truncate_torn_line(path)
            assert path.read_text() == whole


def test_a_large_file_is_repaired_without_reading_all_of_it(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.truncate(2**40)  # a sparse file that does not fit into memory
        file.seek(0, os.SEEK_END)
        file.write(b"\n{")
    truncate_torn_line(path)
    assert path.stat().st_size == 2**40 + 1


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "sub" / "a.json"
    replace_text(path, "one")
    replace_text(path, "two")
    assert path.read_text() == "two"

    def full_disk(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(StorageError, match="No space left"):
        replace_text(path, "three")
    assert path.read_text() == "two" and [child.name for child in path.parent.iterdir()] == ["a.json"]


def test_a_file_is_utf_8_with_every_locale(tmp_path):
    program = r"import sys; from src.records.atomic_io import *; replace_text(Path(sys.argv[1]), '\u2192')"
    environment = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "a.md")], env=environment, check=True)
    assert (tmp_path / "a.md").read_text(encoding="utf-8") == "→"

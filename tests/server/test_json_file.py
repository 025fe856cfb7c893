"""JSON files are read only if they are regular files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skyrl_tx_server.files.json_file import read_json_object


def test_a_directory_is_refused_without_an_open_descriptor(tmp_path: Path) -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="it is not a regular file"):
        read_json_object(tmp_path)
    assert set(os.listdir("/proc/self/fd")) == descriptors

"""Tests `described`: the one-line description of an exception with its place in the user's code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from src.core.exception_origin import described
from src.core.options import require


def caught(call) -> Exception:
    """Return the exception that `call` raises."""
    with pytest.raises(Exception) as raised:
        call()
    return raised.value


def test_the_innermost_frame_in_user_code_is_named(tmp_path: Path, monkeypatch):
    (tmp_path / "my_env.py").write_text("import json\n\ndef read(text):\n    return json.loads(text)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from my_env import read  # pyright: ignore[reportMissingImports]

    sys.modules.pop("my_env")
    place = f"({tmp_path / 'my_env.py'}:4 in read)"
    assert described(caught(lambda: read("{"))).endswith(f"char 1) {place}")


def test_an_error_inside_a_library_names_its_caller():
    text = described(caught(lambda: json.loads("{")))
    assert text.startswith("JSONDecodeError: Expecting property name") and "test_exception_origin.py:" in text


def test_only_the_first_line_of_a_message_is_shown():
    text = described(caught(lambda: require(False, "first\nsecond")))
    assert text.startswith("ValueError: first (") and "\n" not in text

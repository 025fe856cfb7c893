"""Tests that text of agents reaches a terminal without control characters."""

from __future__ import annotations

import pytest

from src.cli.console import message_text
from src.core.printable import printable


@pytest.mark.parametrize("text", ["10\xa0000\xa0€ !", "你好　世界", "👩\u200d💻", "می\u200cخواهم"])
def test_spaces_and_joiners_of_an_answer_are_kept(text: str) -> None:
    assert printable(text + "\x9b2J\u202e") == text + "2J"


def test_a_message_of_a_trial_cannot_control_the_terminal() -> None:
    assert message_text("user", "a\x1b]0;title\x07\x1b[1A\nb").plain == "user: a]0;title[1A\nb"

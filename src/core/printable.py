"""Text for a terminal, without the characters that a terminal would execute."""

from __future__ import annotations

import unicodedata

KEPT = "\n\t\u200c\u200d"
"""Characters of the category C (control and format) that are kept."""


def printable(text: str) -> str:
    """Return the text without the characters of the Unicode category C, such as control characters, which a
    terminal would execute. The characters in KEPT are kept, among them those that join letters and emoji.

    >>> printable("a\\x1b[2Jb\\xa0c")
    'a[2Jb\\xa0c'
    """
    return "".join(
        character for character in text if character in KEPT or unicodedata.category(character)[0] != "C"
    )

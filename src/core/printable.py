"""Text for a terminal, without the characters that a terminal would execute."""

from __future__ import annotations

import unicodedata

KEPT = "\n\t\u200c\u200d"
"""Characters of the category C (control and format) that are kept."""


def printable(text: str) -> str:
    """Return the text without control characters, which a terminal would execute. Spaces of all kinds and
    the characters that join letters and emoji are kept.

    >>> printable("a\\x1b[2Jb\\xa0c")
    'a[2Jb\\xa0c'
    """
    return "".join(
        character for character in text if character in KEPT or unicodedata.category(character)[0] != "C"
    )

r"""A hook of mkdocs that shows `|` in the code of table cells.

GitHub needs `\|` there, because a plain `|` ends the cell. Python-Markdown would show the backslash.
"""

from __future__ import annotations

import re


def on_page_markdown(markdown: str, **_: object) -> str:
    r"""Return the page with `|` in place of `\|` in the code of its table rows."""
    return re.sub(r"^\|.*$", lambda row: _with_plain_pipes(row[0]), markdown, flags=re.MULTILINE)


def _with_plain_pipes(row: str) -> str:
    return re.sub(r"`[^`]+`", lambda code: code[0].replace(r"\|", "|"), row)

"""The pages that mkdocs builds from docs/."""

from __future__ import annotations

from scripts.docs.table_cells import on_page_markdown


def test_code_in_a_table_cell_has_a_pipe_without_backslash():
    page = "| `int \\| None` | a \\| b |\nText with `a \\| b`.\n"
    assert on_page_markdown(page) == "| `int | None` | a \\| b |\nText with `a \\| b`.\n"

"""Runs the worked examples of the pages on options and kernels. Other pages in docs/how-to/ have tests of
their own."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import chz
import pytest

from src.core import options

PAGES = Path(__file__).resolve().parent.parent / "docs" / "how-to"


def example(page: str) -> str:
    match = re.search(r"^ *```python\n(.*?)^ *```", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    assert match is not None
    return textwrap.dedent(match[1])


def test_the_option_of_the_page_has_a_default_and_a_range() -> None:
    field = textwrap.indent(example("add-an-option.md"), "    ")
    source = f"@chz.chz\nclass SmoothedOptions(options.Options):\n{field}"
    names: dict[str, object] = {
        "chz": chz,
        "options": options,
        "at_least": options.at_least,
        "__name__": __name__,
    }
    exec(source, names)
    smoothed = names["SmoothedOptions"]
    assert callable(smoothed)
    assert getattr(smoothed(), "label_smoothing") == 0.0  # noqa: B009
    with pytest.raises(ValueError, match="label_smoothing"):
        smoothed(label_smoothing=-1.0)


def test_the_kernel_of_the_page_runs_in_the_interpreter() -> None:
    exec(example("add-a-kernel.md"), {"__name__": "example"})


def test_the_glossary_names_existing_modules() -> None:
    text = (PAGES.parent / "glossary.md").read_text()
    paths = re.findall(r"\| `((?:src|skyrl_tx_server)/[\w/]+\.py)` \|", text)
    assert len(paths) > 40
    assert [path for path in paths if not (PAGES.parent.parent / path).exists()] == []

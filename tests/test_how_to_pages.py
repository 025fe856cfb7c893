"""Runs the worked examples of the pages on options and kernels, compares two pages with the files in
examples/, and checks the names of files and classes on all pages.

Other modules test the other pages of docs/how-to/.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import chz
import pytest

from src.core import options

PAGES = Path(__file__).resolve().parent.parent / "docs" / "how-to"
ROOT = PAGES.parents[1]
ALL_PAGES = [*ROOT.glob("*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("docs/**/*.md")]
# seed-behaviours.md also names files and classes of other projects; test_seed_behaviours_page.py checks it.
CHECKED_PAGES = [page for page in ALL_PAGES if page.name != "seed-behaviours.md"]
PACKAGES = ("src", "skyrl_tx_server", "scripts", "tests", "examples", "docs")


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


def test_the_program_of_the_python_page_is_the_example() -> None:
    assert example("python-api.md") == (ROOT / "examples" / "python_api.py").read_text()


def test_the_task_of_the_tutorial_is_the_example() -> None:
    page = (PAGES.parent / "tutorial" / "own-model-and-task.md").read_text()
    files = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', page, re.MULTILINE | re.DOTALL))
    directory = ROOT / "examples" / "tasks" / "hello"
    assert len(files) == 5
    assert files == {name: (directory / name).read_text() for name in files}


def test_the_glossary_names_existing_modules() -> None:
    text = (PAGES.parent / "glossary.md").read_text()
    paths = re.findall(r"\| `((?:src|skyrl_tx_server)/[\w/]+\.py)` \|", text)
    assert len(paths) > 40

    assert [path for path in paths if not (PAGES.parent.parent / path).exists()] == []


def test_the_glossary_has_each_term_once_in_order() -> None:
    for section in (PAGES.parent / "glossary.md").read_text().split("\n## ")[1:]:
        terms = re.findall(r"^\| (?!term)([^|]+) \|", section, re.MULTILINE)
        assert len(terms) > 20
        assert terms == sorted({*terms}, key=str.lower)


def test_pages_name_existing_files() -> None:
    """A path may be relative to the root of the repository or to any directory below it."""
    files = [f"/{path.relative_to(ROOT)}" for name in PACKAGES for path in (ROOT / name).rglob("*")]
    wrong = [
        (page.name, path)
        for page in CHECKED_PAGES
        for path in re.findall(r"`((?:[a-z_0-9-]+/)+[a-z_0-9-]+\.(?:py|sh|md))[`:]", page.read_text())
        if not any(file.endswith(f"/{path}") for file in files)
    ]
    assert wrong == []


def test_pages_name_existing_classes() -> None:
    sources = (path.read_text() for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    class_names = {word for source in sources for word in re.findall(r"\b[A-Z]\w+", source)}
    wrong = [
        (page.name, name)
        for page in CHECKED_PAGES
        for name in re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)\b[^`]*`", page.read_text())
        if name not in class_names
    ]
    assert wrong == []

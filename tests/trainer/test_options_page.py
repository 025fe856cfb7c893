from pathlib import Path

from scripts.docs.options import page

ROOT = Path(__file__).resolve().parents[2]


def test_the_options_page_is_current():
    message = "run python -m scripts.docs options"
    assert (ROOT / "docs" / "options.md").read_text() == page(), message

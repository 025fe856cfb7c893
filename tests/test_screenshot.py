"""Tests scripts/docs/screenshot.py, which converts the log of a terminal to an SVG."""

from __future__ import annotations

import doctest
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.docs import screenshot


def text_of(svg: str) -> str:
    root = ElementTree.fromstring(svg)
    return "".join(root.itertext()).replace("\N{NO-BREAK SPACE}", " ")


def test_the_examples_of_the_script_are_true() -> None:
    assert doctest.testmod(screenshot).failed == 0


def test_a_log_becomes_an_svg_with_its_colours(tmp_path: Path) -> None:
    log, output = tmp_path / "run.log", tmp_path / "shot.svg"
    lines = ["\x1b[1;32mheld out: 46 %\x1b[0m -> 91 %", *(f"step {number}" for number in range(40))]
    log.write_text("\r\n".join([*lines, f"files: {screenshot.ROOT}/runs/one"]))
    screenshot.main([str(log), "head=2", "tail=3", f"output={output}"])
    text = text_of(output.read_text())
    assert "held out: 46 %" in text and "step 39" in text and "[37 more lines]" in text
    assert "files: runs/one" in text and str(screenshot.ROOT) not in text
    assert "step 20" not in text and "\x1b" not in text
    assert "font-weight: bold" in output.read_text()


def test_wrong_arguments_print_the_usage() -> None:
    with pytest.raises(SystemExit, match="expected one log file"):
        screenshot.main(["a.log", "width=3"])

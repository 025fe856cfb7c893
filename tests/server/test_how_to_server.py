"""The patches of add-a-route.md and add-a-server-option.md apply to a copy of the server, and the new route
and the new option work."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "how-to"


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the server and its tests with the patches of both pages applied."""
    copy = tmp_path_factory.mktemp("patched")
    for name in ("skyrl_tx_server", "tests", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for name in ("add-a-route.md", "add-a-server-option.md"):
        for patch in code_blocks(name, "diff"):
            apply(patch, copy)
    (test,) = code_blocks("add-a-route.md", "python")
    (copy / "tests" / "server" / "test_token_count.py").write_text(test)
    return copy


def code_blocks(page: str, language: str) -> list[str]:
    text = (PAGES / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def apply(patch: str, directory: Path) -> None:
    """Apply a patch whose hunks have titles instead of line numbers. The replaced lines must occur once in
    the file."""
    header, *hunks = re.split(r"^@@.*@@\n", patch, flags=re.MULTILINE)
    path = directory / header.splitlines()[1].removeprefix("+++ b/")
    for hunk in hunks:
        lines = hunk.splitlines(keepends=True)
        old_lines = "".join(line[1:] for line in lines if line[0] in " -")
        text = path.read_text()
        assert text.count(old_lines) == 1, f"{path.name}: these lines must occur once:\n{old_lines}"
        path.write_text(text.replace(old_lines, "".join(line[1:] for line in lines if line[0] in " +")))


def run(directory: Path, *arguments: str) -> str:
    process = subprocess.run(
        [sys.executable, *arguments], cwd=directory, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_the_new_route_answers_and_is_in_the_contract(patched: Path) -> None:
    tests = ("tests/server/test_token_count.py", "tests/server/test_contract_page.py")
    assert "[100%]" in run(patched, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)


def test_the_new_option_is_parsed_within_its_bounds(patched: Path) -> None:
    use_new_option = """
from skyrl_tx_server import __main__
from skyrl_tx_server.config.command_line import help_text, parse
from skyrl_tx_server.errors import ConfigError
print(parse(["base_model=x"]).housekeeping_period_s, "housekeeping_period_s" in help_text())
try:
    parse(["base_model=x", "housekeeping_period_s=0"])
except ConfigError as error:
    print(error)
"""
    assert run(patched, "-c", use_new_option).splitlines() == [
        "5.0 True",
        "housekeeping_period_s=0.0: must be above 0",
    ]

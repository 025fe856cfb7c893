"""Checks each fenced command of the pages in the root directory, examples/ and docs/.

A mark is a comment such as `<!-- requires: server -->` above a fence. A fence without a mark is run. A fence
with the mark `server` is run with a server of the quick start's model; the address of this server replaces
http://localhost:8000. A fence with another mark takes minutes or needs resources that CI lacks, so it is not
run. The scripts and options of every fence must exist.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import chz
import pytest

from skyrl_tx_server.config.server_config import ServerConfig
from src.analyze.config import AnalyzeConfig
from src.config import TrainerConfig
from src.envs.try_env import TryConfig
from src.envs.validate import ValidateConfig
from src.evaluate.chat.config import ChatConfig
from src.evaluate.config import EvaluateConfig
from src.sft.config import SftConfig
from tests.integration import test_examples

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("examples/*.md"), *sorted(ROOT.glob("docs/**/*.md"))]
FENCE = re.compile(r"(?:<!-- requires: (?P<mark>[\w ,-]+) -->\n)?```bash\n(?P<text>.*?)```", re.DOTALL)
MARKS = {"minutes", "model", "run", "server", "peers", "sandbox", "hosts", "tau2", "cookbook", "gpu"}
OPTIONS: dict[str, type[object]] = {
    "src.train": TrainerConfig,
    "src.sft": SftConfig,
    "src.evaluate": EvaluateConfig,
    "src.evaluate.chat": ChatConfig,
    "src.analyze": AnalyzeConfig,
    "src.envs.validate": ValidateConfig,
    "src.envs.try_env": TryConfig,
    "skyrl_tx_server": ServerConfig,
    "run_skyrl_tx.sh": TrainerConfig,
    "run.sh": TrainerConfig,
    "start_skyrl_tx.sh": ServerConfig,
}
TIMEOUT_S = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Fence:
    page: str
    mark: str | None
    text: str


def fences() -> list[Fence]:
    return [
        Fence(page=str(page.relative_to(ROOT)), mark=match["mark"], text=match["text"])
        for page in PAGES
        for match in FENCE.finditer(page.read_text())
    ]


def commands(text: str) -> list[list[str]]:
    """Return the words of each command, without comments, `export` lines and square brackets."""
    lines = text.replace("\\\n", " ").splitlines()
    split = [shlex.split(line.replace("[", "").replace("]", ""), comments=True) for line in lines]
    return [words for words in split if words and words[0] != "export"]


def program(words: list[str]) -> tuple[str, list[str]]:
    """Return the name and the arguments of the program, without leading `NAME=value` words. The name is the
    module of `python -m`, the file that `python` runs, or the first word.
    """
    words = [word for index, word in enumerate(words) if index or "=" not in word]
    while words and "=" in words[0]:
        words = words[1:]
    if "-m" in words[:2]:
        return words[words.index("-m") + 1], words[words.index("-m") + 2 :]
    if Path(words[0]).name == "python" and len(words) > 1:
        return words[1], words[2:]
    return words[0], words[1:]


UNMARKED = [fence for fence in fences() if fence.mark is None]
server_url = test_examples.url  # a fixture
WITH_SERVER = [fence for fence in fences() if fence.mark == "server"]


@pytest.mark.parametrize("page", sorted({fence.page for fence in fences()}))
def test_documented_options_exist(page: str) -> None:
    for fence in fences():
        if fence.page != page:
            continue
        assert fence.mark is None or set(re.split(r", ?", fence.mark)) <= MARKS, fence.mark
        for words in commands(fence.text):
            name, arguments = program(words)
            if name.startswith(("scripts/", "./", "examples/")):
                assert (ROOT / name).exists(), f"{page}: there is no {name}"
            if kind := OPTIONS.get(Path(name).name if "/" in name else name):
                valid_names = set(chz.chz_fields(kind))
                if name.endswith("run_skyrl_tx.sh"):
                    valid_names |= {"quickstart", "resume", "evaluate", "chat", "config"}
                names = [word.partition("=")[0] for word in arguments if re.match(r"\w+=", word)]
                assert set(names) <= valid_names, f"{page}: {sorted(set(names) - valid_names)} of {name}"


def run(text: str, directory: Path) -> None:
    """Run commands in a directory of links to the repository, so that they add no files to the repository.

    `examples` and `tasks` are copies, of examples/ and examples/tasks/, because `validate` writes into the
    directory of the tasks.
    """
    for entry in ROOT.iterdir():
        if entry.name not in (".git", "examples"):
            (directory / entry.name).symlink_to(entry)
    shutil.copytree(ROOT / "examples", directory / "examples")
    shutil.copytree(ROOT / "examples" / "tasks", directory / "tasks")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=directory,
        env=test_examples.ENVIRONMENT | {"TMPDIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fence", UNMARKED, ids=lambda fence: fence.page)
def test_unmarked_commands_run(fence: Fence, tmp_path: Path) -> None:
    run(fence.text, tmp_path)


@pytest.mark.parametrize("fence", WITH_SERVER, ids=lambda fence: fence.page)
def test_server_commands_run(fence: Fence, tmp_path: Path, server_url: str) -> None:
    run(fence.text.replace("http://localhost:8000", server_url), tmp_path)


def test_enough_commands_are_run() -> None:
    assert len(UNMARKED) >= 6 and len(WITH_SERVER) >= 4

"""Tests most of the examples of examples/README.md.

The fixture `url` is a server with the quick-start model."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from skyrl_tx_server import ServerConfig
from src.loop.outcome import Success
from src.loop.run_result import RunResult
from src.records.journal import RunState
from src.train import TrainerConfig
from tests.fakes.sdk_programs import is_finished
from tests.fakes.tiny_model import QUICK_TO_COMPILE

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ENVIRONMENT = os.environ | {"XLA_FLAGS": QUICK_TO_COMPILE, "TINKER_API_KEY": "tml-example"}
ENVIRONMENT |= {"TINKER_TELEMETRY": "0", "WANDB_MODE": "disabled"}
SERVER_OPTIONS = ("max_lora_rank=16", "max_context_length=2048", "train_tokens_per_batch=2048", "port=0")
TIMEOUT_S = 400


def python(*arguments: str, directory: Path = ROOT, uses_sdk: bool = False) -> str:
    """Run a Python command in a directory. Returns its output.

    `uses_sdk` states whether the command uses the tinker SDK, see `is_finished`.
    """
    command = [sys.executable, *arguments]
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=directory, env=environment, text=True, capture_output=True, timeout=TIMEOUT_S
    )
    finished = is_finished(done.returncode) if uses_sdk else done.returncode == 0
    assert finished, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("server")
    options = [*SERVER_OPTIONS, f"checkpoints_dir={directory / 'checkpoints'}"]
    options += [f"compilation_cache_dir={directory.parent / 'xla'}", "model_alias=local/quickstart"]
    command = [sys.executable, "-m", "skyrl_tx_server", "base_model=datasets/quickstart/model", *options]
    log = directory / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=stream, text=True
        )
    try:
        assert process.stdout is not None
        address = None
        for line in process.stdout:
            if match := re.search(r"http://127\.0\.0\.1:\d+", line):
                address = match[0]
                break
        assert address is not None, log.read_text()
        yield address
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_the_loop_on_the_sdk_trains(url: str) -> None:
    output = python(
        "-W", "error::FutureWarning", "examples/grpo_loop.py", url, "local/quickstart", "3", uses_sdk=True
    )
    assert re.findall(r"^step (\d): mean reward \d\.\d+$", output, re.MULTILINE) == ["0", "1", "2"]


def test_the_loop_on_the_sdk_has_at_most_60_lines() -> None:
    code = [line for line in (EXAMPLES / "grpo_loop.py").read_text().splitlines() if line.strip()]
    assert len(code) <= 60


def test_training_runs_the_message_environment(url: str, tmp_path: Path) -> None:
    options = ["env=examples.count_up:open_count_up", "model_name=local/quickstart", f"logs_dir={tmp_path}"]
    options += ["tokenizer=datasets/quickstart/model", "backend=skyrl-tx", f"skyrl_tx_url={url}"]
    options += ["max_turns=3", "max_tokens=8", "max_steps=1", "batch_size=2", "group_size=2", "lora_rank=8"]
    options += ["context_limit=2048", "wandb_project=None", "eval_before_train=false"]
    options += ["kl_penalty_coef=0.1"]  # The KL penalty gives a gradient even if all rewards are equal.
    python("-m", "src.train", *options)
    (metrics,) = tmp_path.glob("*/metrics.jsonl")
    assert '"step": 1' in metrics.read_text()


def test_the_python_api_starts_a_server_and_trains(tmp_path: Path) -> None:
    (tmp_path / "datasets").symlink_to(ROOT / "datasets")
    output = python("-m", "examples.python_api", "1", directory=tmp_path)
    assert re.search(r"^done after step 1: /.*/open_count_up", output, re.MULTILINE)
    assert re.search(r"^held-out success: \d\.\d+ before, \d\.\d+ after$", output, re.MULTILINE)
    assert re.search(r"^weights: tinker://", output, re.MULTILINE)


async def test_the_cells_of_the_notebook_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells run without a server: fakes of `serve`, `train` and `read_result` receive the options."""
    configs: list[TrainerConfig] = []

    @asynccontextmanager
    async def serve(config: ServerConfig) -> AsyncIterator[str]:
        yield "http://127.0.0.1:8000"

    async def train(config: TrainerConfig) -> RunResult:
        configs.append(config)
        return result_of("runs/one")

    monkeypatch.chdir(EXAMPLES)
    namespace: dict[str, object] = {}
    cells = json.loads((EXAMPLES / "train.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for source in sources:
        coroutine = eval(compile(source, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), namespace)
        if coroutine is not None:
            await coroutine
        namespace |= {"serve": serve, "train": train, "read_result": result_of}
    assert len(sources) == 3 and configs[0].model_name == "local/model"
    assert Path.cwd() == ROOT


def result_of(directory: str | Path) -> RunResult:
    return RunResult(
        directory=Path(directory),
        end=RunState.DONE,
        error="",
        num_steps=1,
        metrics={},
        held_out=Success(before=None, after=None, noop_success=None),
        checkpoints=(),
    )


def test_the_harbor_task_is_sound(tmp_path: Path) -> None:
    tasks_dir = shutil.copytree(
        EXAMPLES / "tasks", tmp_path / "tasks"
    )  # `validate` writes a file into the directory
    assert "1 sound" in python(
        "-m", "src.envs.validate", f"tasks_dir={tasks_dir}", "environment_type=sandbox"
    )


def test_the_configuration_file_holds_known_options() -> None:
    lines = [line for line in (EXAMPLES / "short_run.args").read_text().splitlines() if line[:1] != "#"]
    options = [
        "model_name=m",
        "tasks_dir=examples/tasks",
        "backend=skyrl-tx",
        "skyrl_tx_url=http://localhost:8000",
    ]
    check = "import sys; from src.cli.command_line import parse; print(parse(sys.argv[1:]).max_steps)"
    assert python("-c", check, *options, *lines).strip() == "2"

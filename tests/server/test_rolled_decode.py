"""A rolled program decodes until the unrolled program is compiled, with the same results."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.operations import SampledSequence
from skyrl_tx_server.model.config_json import load_model_config
from skyrl_tx_server.sampling import model_runner
from skyrl_tx_server.sampling.decode_batch import DecodeDispatch
from skyrl_tx_server.sampling.decode_programs import DecodePrograms
from skyrl_tx_server.sampling.decode_step import Carry, DecodeOutputs
from tests.fakes.tiny_model import CONFIG, make_model
from tests.server.test_executor import TIMEOUT_S, create, running, sample_op, snapshot, train
from tests.server.test_families import FAMILIES


@pytest.fixture
def rolled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that records for each dispatch whether its program is rolled.

    Every dispatch first waits for background compilations.
    """
    monkeypatch.setattr(model_runner, "MIN_ROLLED_LAYERS", 1)
    rolled_dispatches: list[bool] = []
    decode = model_runner.ModelRunner.decode

    def record(runner: model_runner.ModelRunner, dispatch: DecodeDispatch, carry: Carry) -> DecodeOutputs:
        runner.wait_for_compilation()
        rolled_dispatches.append(dispatch.program.rolled)
        return decode(runner, dispatch, carry)

    monkeypatch.setattr(model_runner.ModelRunner, "decode", record)
    return rolled_dispatches


def sample(engine: Engine) -> Sequence[SampledSequence]:
    """Sample with each of two adapters and with the base model."""
    ops = [
        replace(sample_op(weights, max_tokens=70, seed=seed), num_samples=2)
        for seed, weights in enumerate(("a", "b", None))
    ]
    futures = [engine.submit(op) for op in ops]
    return [sequence for future in futures for sequence in future.result(TIMEOUT_S).sequences]


@pytest.mark.parametrize("family", ["qwen3_sliding_window", "qwen3_moe"])
def test_rolled_programs_give_the_same_bits(
    family: str, tmp_path: Path, rolled: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(load_model_config(FAMILIES / family), vocab_size=CONFIG.vocab_size)
    with running(
        make_model(tmp_path / "model", config), tmp_path, max_num_seqs=8, max_context_length=192
    ) as engine:
        for seed, model_id in enumerate("ab"):
            create(engine, model_id)
            train(engine, model_id, seed=seed)
            snapshot(engine, model_id, model_id)
        with monkeypatch.context() as patch:
            patch.setattr(DecodePrograms, "request", lambda *_, **__: None)
            expected = sample(engine)
        assert rolled and all(rolled)
        rolled.clear()
        sequences = sample(engine)
    assert rolled[0] and not rolled[-1], "the unrolled program is compiled during the first dispatch"
    assert rolled == sorted(rolled, reverse=True), "no rolled dispatch follows an unrolled one"
    for first, second in zip(expected, sequences, strict=True):
        np.testing.assert_array_equal(first.tokens, second.tokens)
        np.testing.assert_array_equal(first.logprobs, second.logprobs)


def test_the_exit_of_python_waits_for_a_compilation() -> None:
    """XLA crashes if the process exits during a compilation."""
    program = """
import threading, time
from skyrl_tx_server.sampling.decode_batch import DecodeProgram
from skyrl_tx_server.sampling.decode_programs import DecodePrograms

class SlowLowered:
    def compile(self):
        time.sleep(1)
        print("compiled")

programs = DecodePrograms(lambda program: SlowLowered())
program = DecodeProgram(width=4, ends=None, max_loras=None)
engine = threading.Thread(target=lambda: programs.request(program, min_uses=1), daemon=True)
engine.start()
engine.join()
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout == "compiled\n"


def test_a_stop_does_not_wait_for_a_compilation(tmp_path: Path) -> None:
    # The unrolled program of 64 layers compiles for more than 20 s. A stop takes less than a second.
    model_dir = make_model(tmp_path / "model", replace(CONFIG, num_layers=64))
    options = (
        f"base_model={model_dir}",
        "port=0",
        f"checkpoints_dir={tmp_path}",
        "compilation_cache_dir=none",
    )
    log = tmp_path / "log"
    with log.open("w") as file:
        command = [sys.executable, "-m", "skyrl_tx_server", *options]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[3]
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "a", "max_tokens": 4}
        httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S).raise_for_status()
        deadline = time.monotonic() + TIMEOUT_S
        while not is_compiling(log) and time.monotonic() < deadline:
            time.sleep(0.05)
        server.terminate()
        assert server.wait(TIMEOUT_S) == 0
        assert is_compiling(log), f"the server waited for the compilation:\n{log.read_text()}"
    finally:
        server.kill()
        server.communicate()


def is_compiling(log: Path) -> bool:
    """Return whether the last line about a decode program says that its compilation has begun."""
    lines = [line for line in log.read_text().splitlines() if "jit(decode_steps)" in line]
    return bool(lines) and "compiling" in lines[-1]

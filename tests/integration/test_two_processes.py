"""A server of two processes, each with two virtual devices, gives the SDK the results of one process."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from tests.fakes.tiny_model import CONFIG, QUICK_TO_COMPILE, make_model

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240
PROMPT = [5, 6, 7, 8, 9, 10, 11]

pytestmark = pytest.mark.official_sdk


class Process:
    """A server process and the lines that it has printed."""

    def __init__(self, options: dict[str, object], devices: int) -> None:
        arguments = [f"{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "skyrl_tx_server", *arguments]
        flags = f"{QUICK_TO_COMPILE} --xla_force_host_platform_device_count={devices}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        self.child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.checkpoints = Path(str(options["checkpoints_dir"]))
        self.lines: list[str] = []
        self.ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        with self.child.stdout as output:
            for line in output:
                self.lines.append(line.rstrip())
                if "server ready: " in line:
                    self.ready.set()
        self.ready.set()

    @property
    def url(self) -> str:
        assert self.ready.wait(TIMEOUT_S)
        (line,) = [line for line in self.lines if "server ready: " in line] or pytest.fail(
            "\n".join(self.lines)
        )
        return line.partition("server ready: ")[2].split()[0]

    def wait(self, timeout_s: float) -> int:
        """Wait until the process has ended and all output is read. Returns the exit status."""
        status = self.child.wait(timeout_s)
        self._reader.join()
        return status

    def errors(self) -> list[str]:
        return [line for line in self.lines if line.startswith("skyrl-tx server: ")]


@contextmanager
def processes(*options: dict[str, object], devices: int) -> Iterator[list[Process]]:
    started = [Process(process_options, devices) for process_options in options]
    try:
        yield started
    finally:
        for process in started:
            process.child.kill()
            process.wait(10)


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    model = make_model(tmp_path_factory.mktemp("models") / "tiny", replace(CONFIG, num_layers=1))
    sizes = {
        "max_lora_rank": 4,
        "max_num_seqs": 2,
        "train_tokens_per_batch": 128,
        "max_context_length": 128,
        "max_models": 1,
    }
    return {
        "base_model": model,
        "model_alias": "local/tiny",
        "port": 0,
        "compilation_cache_dir": "none",
        "max_loras": 1,
        **sizes,
    }


def options_of_two_processes(common: dict[str, object], root: Path) -> list[dict[str, object]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    cluster: dict[str, object] = {
        "coordinator_address": address,
        "num_processes": 2,
        "data_parallel": 2,
        "tensor_parallel": 2,
    }
    key = root / "cluster_key"
    key.write_text(secrets.token_urlsafe(32))
    cluster["cluster_key_file"] = key
    return [
        {**common, **cluster, "process_id": number, "checkpoints_dir": root / f"process-{number}"}
        for number in range(2)
    ]


def datum(length: int, seed: int) -> types.Datum:
    tokens = np.random.default_rng(seed).integers(0, 250, length + 1).tolist()
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * length},  # type: ignore[dict-item]
    )


def logprobs_of(output: types.ForwardBackwardOutput) -> np.ndarray:
    return np.concatenate([np.asarray(item["logprobs"].data) for item in output.loss_fn_outputs])


def run_client(url: str) -> dict[str, np.ndarray]:
    """Take two steps, save, sample from two snapshots, and load. Returns the received numbers.

    Because max_models is 1, the server moves one model to host memory when it trains the other model.
    """
    results: dict[str, np.ndarray] = {}
    with tinker.ServiceClient(base_url=url, api_key="tml-dummy") as service:
        training = service.create_lora_training_client(base_model="local/tiny", rank=4, seed=1).result(
            TIMEOUT_S
        )
        samplers = [training.save_weights_for_sampler(name="start").result(TIMEOUT_S).path]
        for step in range(2):
            waiting = training.forward_backward(
                [datum(9 + 5 * index, 7 * step + index) for index in range(4)], "cross_entropy"
            )
            report = training.optim_step(types.AdamParams(learning_rate=1e-2)).result(TIMEOUT_S)
            results[f"logprobs {step}"] = logprobs_of(waiting.result(TIMEOUT_S))
            results[f"loss {step}"] = np.array(waiting.result(TIMEOUT_S).metrics["loss:sum"])
            results[f"gradient norm {step}"] = np.array((report.metrics or {})["grad_norm"])
        state = training.save_state(name="end").result(TIMEOUT_S).path
        samplers.append(training.save_weights_for_sampler(name="end").result(TIMEOUT_S).path)
        for number, (path, seed) in enumerate([(samplers[0], 3), (samplers[1], 3), (samplers[0], None)]):
            sampler = service.create_sampling_client(model_path=path).result(TIMEOUT_S)
            for temperature in (0.0, 1.0):
                settings = types.SamplingParams(max_tokens=12, temperature=temperature, seed=seed, stop=[])
                sampled = (
                    sampler.sample(types.ModelInput.from_ints(PROMPT), 2, settings)
                    .result(TIMEOUT_S)
                    .sequences
                )
                for index, sequence in enumerate(sampled):  # each process has one sequence
                    sequence_input = types.ModelInput.from_ints([*PROMPT, *sequence.tokens])
                    scored = sampler.compute_logprobs(sequence_input).result(TIMEOUT_S)[len(PROMPT) :]
                    np.testing.assert_allclose(scored, sequence.logprobs, atol=1e-4)  # type: ignore[arg-type]
                    if seed is not None or temperature == 0:
                        results[f"tokens {number} {temperature} {index}"] = np.array(sequence.tokens)
                        results[f"sampled logprobs {number} {temperature} {index}"] = np.array(
                            sequence.logprobs
                        )
        loaded = service.create_training_client_from_state_with_optimizer(state).result(TIMEOUT_S)
        for name, client in (("loaded", loaded), ("kept", training)):
            results[f"logprobs {name}"] = logprobs_of(
                client.forward_backward([datum(20, 1)], "cross_entropy").result(TIMEOUT_S)
            )
            report = client.optim_step(types.AdamParams(learning_rate=1e-2)).result(TIMEOUT_S)
            results[f"gradient norm {name}"] = np.array((report.metrics or {})["grad_norm"])
    return results


@pytest.fixture(scope="module")
def pair(common: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    with processes(*options_of_two_processes(common, tmp_path_factory.mktemp("two")), devices=2) as pair:
        yield pair


def test_two_processes_train_sample_save_and_load_as_one(
    pair: list[Process], common: dict[str, object], tmp_path: Path
) -> None:
    with (
        processes({**common, "checkpoints_dir": tmp_path}, devices=1) as (alone,),
        ThreadPoolExecutor() as threads,
    ):
        expected, actual = threads.map(run_client, (alone.url, pair[0].url))
    for name, value in expected.items():
        kind = name.split()[0]
        if kind == "tokens":
            assert actual[name].tolist() == value.tolist(), name
        else:
            np.testing.assert_allclose(
                actual[name], value, atol=1e-4, rtol=1e-4 if kind in ("loss", "gradient") else 0, err_msg=name
            )
    assert {"loss 1", "gradient norm kept", "tokens 1 1.0 1", "logprobs loaded"} <= set(actual)
    assert pair[0].checkpoints.is_dir() and not pair[1].checkpoints.exists()  # only rank 0 writes


def test_a_lost_process_stops_the_server_with_one_line(pair: list[Process]) -> None:
    rank_0, rank_1 = pair
    with httpx.Client(base_url=f"{rank_0.url}/api/v1/", timeout=60) as http:
        session_id = http.post("create_session", json={}).raise_for_status().json()["session_id"]
        rank_1.child.send_signal(signal.SIGSTOP)  # No operation can end before the process is killed.
        body = {
            "session_id": session_id,
            "model_seq_id": 0,
            "base_model": "local/tiny",
            "lora_config": {"rank": 4},
        }
        http.post("create_model", json=body).raise_for_status()
        rank_1.child.kill()
        assert rank_0.wait(30) == 1
    reason = "process 1 has disconnected: start all processes again; saved checkpoints are in checkpoints_dir"
    assert any(line.endswith(f"create_model failed (server): {reason}") for line in rank_0.lines), (
        rank_0.lines
    )
    assert rank_0.errors() == [f"skyrl-tx server: {reason}"]

"""Runs the SDK, its command line and the OpenAI client against `python -m skyrl_tx_server`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.transformer import init_params
from skyrl_tx_server.model.weights import save_model
from tests.fakes.sdk_programs import is_finished
from tests.fakes.server import reserved_port
from tests.fakes.tiny_model import QUICK_TO_COMPILE
from tests.stress import server_kill_points

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"XLA_FLAGS": QUICK_TO_COMPILE}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one-layer Qwen3 with a byte-level tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    config = ModelConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        rope_scaling=None,
        eos_token_ids=(0,),
    )
    save_model(init_params(config, jax.random.key(0), jnp.float32), config, directory)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(special_tokens=["<|im_end|>"], initial_alphabet=alphabet, show_progress=False)
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(directory)
    return directory


@pytest.fixture
def server(model_dir: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the server and yield its process and URL when it is ready."""
    options = {
        "base_model": model_dir,
        "model_alias": "local/tiny",
        "port": 0,
        "max_lora_rank": 8,
        "max_num_seqs": 4,
    }
    options |= {"train_tokens_per_batch": 512, "checkpoints_dir": tmp_path / "checkpoints"}
    options |= {"compilation_cache_dir": tmp_path.parent / "xla"}  # shared by all tests
    arguments = [f"{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "skyrl_tx_server", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
        assert (
            ready.startswith("skyrl-tx server ready: http://127.0.0.1:")
            and "  model local/tiny  context 256  " in ready
        )
        yield process, ready.split()[3]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_server_runs_if_its_output_cannot_be_written(model_dir: Path, tmp_path: Path) -> None:
    with reserved_port() as port, open("/dev/full", "w") as full, (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "skyrl_tx_server", f"base_model={model_dir}", f"port={port}"]
        command += [f"checkpoints_dir={tmp_path}", f"compilation_cache_dir={tmp_path.parent / 'xla'}"]
        with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=full, stderr=log) as process:
            transport = httpx.HTTPTransport(retries=10)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport) as client:
                while process.poll() is None and client.get("/api/v1/healthz").status_code == 503:
                    pass
            process.terminate()
    assert process.returncode == 0
    assert "standard output cannot be written: No space left on device" in (tmp_path / "log").read_text()


def test_the_openai_client_reads_streamed_and_whole_replies(
    server: tuple[subprocess.Popen[str], str],
) -> None:
    _, url = server
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        parameters = {"model": "local/tiny", "prompt": "Hello", "seed": 3, "max_tokens": 60}
        whole = client.completions.create(**parameters, logprobs=0)
        chunks = list(client.completions.create(**parameters, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert len(chunks) >= 3 and chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert whole.choices[0].logprobs is not None and whole.usage is not None
        assert len(whole.choices[0].logprobs.token_logprobs or []) == whole.usage.completion_tokens
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(
                model="local/tiny", messages=[{"role": "user", "content": "Hello"}]
            )
    metrics = httpx.get(f"{url}/metrics").text
    assert (
        f'skyrl_tx_tokens_total{{kind="sampled"}} {2.0 * whole.usage.completion_tokens}'
        in metrics.splitlines()
    )


def test_the_tinker_command_line_lists_and_downloads(
    server: tuple[subprocess.Popen[str], str], model_dir: Path, tmp_path: Path
) -> None:
    """The downloaded adapter must fit the base model and equal the saved adapter."""
    _, url = server
    environment = os.environ | {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-dummy",
        "TINKER_TELEMETRY": "0",
    }

    def command(*words: str) -> dict[str, list[dict[str, str]]]:
        line = [str(Path(sys.executable).with_name("tinker")), "-f", "json", *words]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert is_finished(done.returncode), done.stderr
        return json.loads(done.stdout)

    with httpx.Client(base_url=f"{url}/api/v1/", timeout=60) as http:

        def post(route: str, **body: object) -> dict[str, str]:
            return http.post(route, json=body).raise_for_status().json()

        session_id = post("create_session")["session_id"]
        lora = {"rank": 4, "train_unembed": False}
        model_id = post(
            "create_model", session_id=session_id, model_seq_id=0, base_model="local/tiny", lora_config=lora
        )["model_id"]
        path = post(
            "retrieve_future", request_id=post("save_weights", model_id=model_id, path="0001")["request_id"]
        )["path"]
    (run,) = command("run", "list")["runs"]
    assert (run["training_run_id"], run["lora_rank"]) == (model_id, 4)
    (listed,) = command("checkpoint", "list")["checkpoints"]
    assert listed["tinker_path"] == path
    command("checkpoint", "download", path, "--output", "here")
    (downloaded,) = (tmp_path / "here").iterdir()
    config = json.loads((downloaded / "adapter_config.json").read_text())
    tensors, base = (
        load_file(downloaded / "adapter_model.safetensors"),
        load_file(model_dir / "model.safetensors"),
    )
    assert config["r"] == 4 and {*config["target_modules"]} >= {"q_proj", "o_proj", "gate_proj", "down_proj"}
    store = CheckpointStore(tmp_path / "checkpoints", "local/tiny")
    assert [info.path for info in store.list()] == [path]  # the server has removed the files of the download
    _, saved = store.read(path)
    for module in {name.rpartition(".lora_")[0] for name in tensors}:
        a, b = (tensors[f"{module}.lora_{side}.weight"] for side in "AB")
        assert (a.shape[0], b.shape[1]) == (4, 4)
        assert (b.shape[0], a.shape[1]) == base[f"{module.removeprefix('base_model.model.')}.weight"].shape
        np.testing.assert_array_equal(a, saved[f"{module}.lora_A.weight"])


async def test_sigterm_under_load_answers_every_future(
    server: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    """Every poll receives a result or an error, and no save is incomplete."""
    process, url = server
    async with httpx.AsyncClient(base_url=f"{url}/api/v1/", timeout=60) as http:

        async def post(route: str, **body: object) -> dict[str, str]:
            return (await http.post(route, json=body)).raise_for_status().json()

        async def outcome(request: dict[str, str]) -> dict[str, object]:
            while (
                reply := await http.post("retrieve_future", json={"request_id": request["request_id"]})
            ).status_code == 408:
                pass
            return reply.raise_for_status().json()

        session_id = (await post("create_session"))["session_id"]
        model = await post(
            "create_model",
            session_id=session_id,
            model_seq_id=0,
            base_model="local/tiny",
            lora_config={"rank": 4},
        )
        model_id = str((await outcome(model))["model_id"])
        tokens = {"chunks": [{"tokens": list(range(100))}]}
        inputs = {"target_tokens": {"data": list(range(100)), "dtype": "int64"}}
        data = {"loss_fn": "cross_entropy", "data": [{"model_input": tokens, "loss_fn_inputs": inputs}] * 20}
        requests = []
        for number in range(12):
            requests.append(await post("forward_backward", model_id=model_id, forward_backward_input=data))
            requests.append(await post("save_weights", model_id=model_id, path=f"s{number}"))
            settings = {"max_tokens": 150, "stop": []}
            requests += [
                await post(
                    "asample", base_model="local/tiny", prompt=tokens, num_samples=4, sampling_params=settings
                )
            ]
        waiting = [asyncio.create_task(outcome(request)) for request in requests]
        await asyncio.wait(waiting[:3])  # after these results, all programs are compiled
        process.send_signal(signal.SIGTERM)
        outcomes = await asyncio.gather(*waiting)
    failures = [str(result["error"]) for result in outcomes if "error" in result]
    assert failures and all("the server is stopping" in failure for failure in failures)
    assert await asyncio.to_thread(process.wait, 20) == 0
    store = CheckpointStore(tmp_path / "checkpoints", "local/tiny")
    saved = {str(result["path"]) for result in outcomes if result.get("type") == "save_weights"}
    assert saved and saved <= {info.path for info in store.list() if store.read(info.path)}


def test_a_killed_server_loses_no_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    """Losses, adapter, Adam moments and step equal those of an uninterrupted run."""
    options = (f"model={model_dir}", f"directory={tmp_path}", "points=1")
    command = [sys.executable, "-m", "tests.stress.server_kill_points", *options]
    run = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 lost, 0 unreadable" in run.stdout and "final state equal to the bit" in run.stdout


@pytest.mark.parametrize("argument", ["30", "points=many", "points=0", "point=3", "model="])
def test_a_wrong_argument_of_server_kill_points_gives_one_line(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server_kill_points.main([argument]) == 2
    assert capsys.readouterr().err.startswith(f"server_kill_points: '{argument}' is none of points=N")


def test_every_sdk_call_follows_the_contract(server: tuple[subprocess.Popen[str], str]) -> None:
    process, url = server
    calls = subprocess.run(
        [sys.executable, "scripts/sdk_calls.py", url],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert calls.returncode == 0, calls.stdout + calls.stderr
    assert "0 unexpected outcomes" in calls.stdout
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0

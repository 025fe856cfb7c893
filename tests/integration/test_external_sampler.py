"""Runs the server with sampler_url=, the unmodified SDK as its client, and a sampler written in numpy."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from tests.fakes.external_sampler import ExternalSampler, sampling
from tests.fakes.sdk_datum import sdk_datum
from tests.fakes.tiny_model import make_model

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [72, 101, 108, 108, 111]
SAMPLING_PARAMS = types.SamplingParams(max_tokens=24, temperature=1.0, stop=[])

pytestmark = pytest.mark.official_sdk


@pytest.fixture
def sampler(tmp_path: Path) -> ExternalSampler:
    return ExternalSampler(make_model(tmp_path / "tiny"))


def start_server(tmp_path: Path, sampler_url: str) -> subprocess.Popen[str]:
    options = {
        "base_model": tmp_path / "tiny",
        "model_alias": "local/tiny",
        "port": 0,
        "max_lora_rank": 8,
        "max_num_seqs": 4,
    }
    options |= {"train_tokens_per_batch": 256, "checkpoints_dir": tmp_path / "checkpoints"}
    options |= {"sampler_url": sampler_url, "sampler_check": 1.0}
    arguments = [f"{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "skyrl_tx_server", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def url(tmp_path: Path, sampler: ExternalSampler) -> Iterator[str]:
    with sampling(sampler) as sampler_url:
        process = start_server(tmp_path, sampler_url)
        assert process.stdout is not None
        ready = process.stdout.readline()
        try:
            assert ready.startswith("skyrl-tx server ready: "), process.communicate()[1]
            yield ready.split()[3]
            # The snapshots of the closed session are unloaded.
            sampler.wait_until(lambda: not sampler.adapters)
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.communicate()


def datum_of(tokens: list[int]) -> types.Datum:
    return sdk_datum(tokens, target_tokens=[*tokens[1:], 0], weights=[1.0] * len(tokens))


def train_step(training: tinker.TrainingClient) -> tinker.SamplingClient:
    training.forward_backward([datum_of(list(range(len(PROMPT) + 24)))], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=0.02)).result()
    return training.save_weights_and_get_sampling_client().result()


def sample_sequences(client: tinker.SamplingClient, num_samples: int = 2) -> list[types.SampledSequence]:
    return list(
        client.sample(types.ModelInput.from_ints(PROMPT), num_samples, SAMPLING_PARAMS).result(60).sequences
    )


def max_logprob_difference(training: tinker.TrainingClient, sequence: types.SampledSequence) -> float:
    """Return the largest difference between a sample's logprobs and those of the training model."""
    assert sequence.logprobs is not None
    output = training.forward([datum_of(PROMPT + list(sequence.tokens))], "cross_entropy").result()
    train_logprobs = np.array(output.loss_fn_outputs[0]["logprobs"].tolist())[len(PROMPT) - 1 : -1]
    return float(np.abs(train_logprobs - sequence.logprobs).max())


@pytest.fixture
def client(url: str) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=url, api_key="tml-dummy") as client:
        yield client


def test_external_rollouts_have_the_weights_of_their_step(
    url: str, client: tinker.ServiceClient, sampler: ExternalSampler
) -> None:
    training = client.create_lora_training_client("local/tiny", rank=4, seed=1).result()
    first = train_step(training)
    early = sample_sequences(first)
    assert [max_logprob_difference(training, sequence) for sequence in early] == pytest.approx(
        [0.0, 0.0], abs=1e-4
    )
    second = train_step(training)
    assert [
        max_logprob_difference(training, sequence) for sequence in sample_sequences(second)
    ] == pytest.approx([0.0, 0.0], abs=1e-4)
    assert max_logprob_difference(training, sample_sequences(first)[0]) > 1e-2, (
        "the first sampling client must not use the second adapter"
    )
    named = training.save_weights_for_sampler("named").result().path
    assert (
        max_logprob_difference(
            training, sample_sequences(client.create_sampling_client(model_path=named).result())[0]
        )
        < 1e-4
    )
    base = client.create_sampling_client(base_model="local/tiny").result()
    sample_sequences(base)
    names = [body["adapter"] for body in sampler.received]
    assert len(names) == 5 and names[0] == names[2] and len(set(names)) == 4 and names[-1] == "local/tiny"
    assert (
        len(base.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result(60)) == len(PROMPT)
        and len(sampler.received) == 5
    )

    sampler.adapters.clear()  # simulates a restart of the sampler
    assert max_logprob_difference(training, sample_sequences(second)[0]) < 1e-4
    sampler.change_reply = lambda answer: answer["choices"][0].pop("token_ids")
    with pytest.raises(tinker.RequestFailedError, match="the field 'token_ids' is missing") as failed:
        sample_sequences(second)
    assert failed.value.category is types.RequestErrorCategory.Server
    sampler.change_reply = lambda answer: None
    train_step(training)

    metrics = httpx.get(f"{url}/metrics").text
    assert 'skyrl_tx_sampler_requests_total{outcome="failed"} 1.0' in metrics
    (worst,) = re.findall(r'^skyrl_tx_sampler_difference_nats{kind="max"} (\S+)$', metrics, re.M)
    (compared,) = re.findall(r"^skyrl_tx_sampler_tokens_compared_total ([\d.]+)$", metrics, re.M)
    assert float(worst) < 1e-4 and float(compared) >= 6 * 24


def test_a_sampler_of_another_model_stops_the_start(tmp_path: Path, sampler: ExternalSampler) -> None:
    sampler.name = "local/other"
    with sampling(sampler) as sampler_url:
        process = start_server(tmp_path, sampler_url)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and errors.strip().splitlines()[-1].startswith(
        f"skyrl-tx server: sampler_url={sampler_url}: the external sampler serves"
    )

"""A batch runner with two data-parallel ranks, which share one device: placement of sequences, and preemption
within a rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from skyrl_tx_server.engine.operations import Sample, SamplingSettings
from skyrl_tx_server.engine.scheduled_work import PrefillRequest
from skyrl_tx_server.errors import NotFoundError
from skyrl_tx_server.model.config_json import load_model_config
from skyrl_tx_server.model.weights import load_params
from skyrl_tx_server.sampling.adapter_cache import AdapterCache
from skyrl_tx_server.sampling.batch_runner import BatchRunner
from skyrl_tx_server.sampling.model_runner import CacheSize, ModelRunner
from tests.fakes.tiny_model import make_model

STEPS, CONTEXT = 16, 192


@pytest.fixture
def runner(tmp_path: Path) -> BatchRunner:
    """Return a runner with two slots and five pages per rank. A full context takes three pages."""
    model_dir = make_model(tmp_path / "model")
    config = load_model_config(model_dir)
    dtype = np.dtype("float32")

    def read(path: str) -> NoReturn:
        raise NotFoundError(path)

    adapters = AdapterCache(
        config, max_lora_rank=2, slots=1, dtype=dtype, read=read, free_host_bytes=lambda: 1 << 60
    )
    size = CacheSize(slots=2, pages=1 + 5, page_bytes=1, context_pages=3, copied_pages=3)
    model_runner = ModelRunner(
        config,
        load_params(model_dir, config, dtype),
        adapters,
        size=size,
        dp_ranks=2,
        max_context_length=CONTEXT,
        steps=STEPS,
        dtype=dtype,
        processed_logprobs=False,
    )
    return BatchRunner(
        config,
        model_runner,
        adapters,
        size=size,
        dp_ranks=2,
        max_context_length=CONTEXT,
        model_dir=model_dir,
    )


def begin(runner: BatchRunner, requests: Sequence[tuple[int, int]]) -> None:
    """Start one request for each (prompt length, max_tokens). Prompts have no common prefix."""
    for request_id, (length, max_tokens) in enumerate(requests, 1):
        prompt = np.random.default_rng(request_id).integers(0, 256, length).astype(np.int32)
        settings = SamplingSettings(max_tokens=max_tokens, seed=request_id, stop_at_eos=False)
        runner.prefill(
            [
                PrefillRequest(
                    request_id=request_id,
                    op=Sample(weights=None, prompt=prompt, settings=settings, num_samples=1),
                    first=0,
                    count=1,
                )
            ]
        )


def finish(runner: BatchRunner, request_id: int) -> None:
    while runner.running(request_id):
        runner.decode()
        runner.poll(dispatch_next=False)


def test_sequences_are_spread_over_the_ranks(runner: BatchRunner) -> None:
    begin(runner, [(60, 130), (60, 130)])  # three pages each
    finish(runner, 2)
    assert runner.stats()["num_preemptions"] == 0


def test_a_preempted_sequence_waits_for_pages_of_its_own_rank(runner: BatchRunner) -> None:
    """Sequences 1 and 3 share a rank, and 3 is preempted until 1 ends. The other rank has enough pages."""
    begin(runner, [(60, 75), (5, 120), (60, 130), (6, 120)])
    finish(runner, 1)
    assert (runner.stats()["num_preemptions"], runner.stats()["sequences_preempted"]) == (1, 1)
    runner.decode()
    assert runner.stats()["sequences_preempted"] == 0 and runner.running(2) and runner.running(4)

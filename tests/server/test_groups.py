"""Slots and pages of a batch's several devices: who goes where, and who waits for whom. On one device, which has the pages of both."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from skyrl_tx_server.engine.operations import Sample, SamplingSettings
from skyrl_tx_server.engine.scheduler import PrefillRequest
from skyrl_tx_server.executor.cache_size import CacheSize
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.sampling.batch_runner import BatchRunner
from tests.fakes.tiny_model import make_model, make_settings

BLOCK, CONTEXT = 16, 192


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> DeviceExecutor:
    folder = tmp_path_factory.mktemp("groups")
    return DeviceExecutor(make_settings(make_model(folder / "model"), folder, max_context_length=CONTEXT))


@pytest.fixture
def slots(executor: DeviceExecutor) -> BatchRunner:
    """Two slots and five pages on each of two devices; a whole context is three pages."""
    return BatchRunner(
        executor._config,
        executor._params,
        executor._snapshots,
        size=CacheSize(slots=2, pages=1 + 5, page_bytes=1, context_pages=3, copied_pages=3),
        groups=2,
        max_context_length=CONTEXT,
        block=BLOCK,
        dtype=np.dtype("float32"),
        model_dir=Path(),
        tempered_logprobs=False,
    )


def begin(slots: BatchRunner, requests: Sequence[tuple[int, int]]) -> None:
    """Samples of so many tokens after prompts of so many, no two alike."""
    for request_id, (length, max_tokens) in enumerate(requests, 1):
        prompt = np.random.default_rng(request_id).integers(0, 256, length).astype(np.int32)
        settings = SamplingSettings(max_tokens=max_tokens, seed=request_id, stop_at_eos=False)
        slots.admit(
            [
                PrefillRequest(
                    request_id=request_id,
                    op=Sample(weights=None, prompt=prompt, settings=settings, num_samples=1),
                    first=0,
                    count=1,
                )
            ]
        )


def finish(slots: BatchRunner, request_id: int) -> None:
    while slots.running(request_id):
        slots.decode()
        slots.collect(go_on=False)


def test_rows_are_spread_over_the_devices_so_that_none_waits_where_another_has_room(
    slots: BatchRunner,
) -> None:
    begin(slots, [(60, 130), (60, 130)])  # three pages each
    finish(slots, 2)
    assert slots.stats()["num_preemptions"] == 0


def test_a_row_that_was_set_aside_waits_for_pages_on_its_own_device_alone(slots: BatchRunner) -> None:
    """The first and the third have one device, where the third is set aside until the first ends; the others have what they need."""
    begin(slots, [(60, 75), (5, 120), (60, 130), (6, 120)])
    finish(slots, 1)
    assert (slots.stats()["num_preemptions"], slots.stats()["sequences_preempted"]) == (1, 1)
    slots.decode()
    assert slots.stats()["sequences_preempted"] == 0 and slots.running(2) and slots.running(4)

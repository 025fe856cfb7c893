"""When few sequences remain, a narrow decode program replaces the wide one. Samples do not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from skyrl_tx_server.engine.operations import SampledSequence
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.model.config_json import load_model_config
from skyrl_tx_server.model.kv_cache import KVCache
from skyrl_tx_server.sampling import decode_programs, model_runner
from skyrl_tx_server.sampling.decode_batch import DecodeDispatch
from skyrl_tx_server.sampling.decode_step import Carry, DecodeOutputs
from tests.fakes.tiny_model import CONFIG, make_model, make_settings
from tests.server.test_decode import MODEL, REQUESTS, STEPS, Driver
from tests.server.test_executor import TIMEOUT_S, create, running, sample_op, snapshot, train
from tests.server.test_families import FAMILIES

SLOTS = 16


@pytest.fixture
def widths(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the widths of all dispatches, in order."""
    dispatched: list[int] = []
    runner = driver.executor.sampler.runner
    decode = runner.decode

    def record(dispatch: DecodeDispatch, carry: object) -> object:
        dispatched.append(dispatch.program.width)
        return decode(dispatch, carry)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "decode", record)
    return dispatched


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    directory = tmp_path_factory.mktemp("widths")
    sizes = {"max_num_seqs": SLOTS, "decode_steps_per_dispatch": STEPS, "max_context_length": 192}
    return Driver(DeviceExecutor(make_settings(make_model(directory / "model", MODEL), directory, **sizes)))


def sample_all(driver: Driver) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    """Start all requests as slots become free. Return the tokens and logprobs of each sequence."""
    driver.finished.clear()
    waiting = list(range(len(REQUESTS)))
    while waiting or driver.executor.sampler.num_running:
        while waiting and REQUESTS[waiting[0]].num_samples <= SLOTS - driver.executor.sampler.num_running:
            driver.admit(waiting.pop(0))
        driver.dispatch(dispatch_next=True)
        driver.executor.sampler.runner.wait_for_compilation()
    assert not driver.failed
    return {
        key: (sequence.tokens.tolist(), sequence.logprobs.tolist())
        for key, sequence in driver.finished.items()
    }


def test_narrow_programs_give_the_same_bits(
    driver: Driver, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = sample_all(driver)
    assert set(widths) == {SLOTS}, "narrow programs are not compiled for a few dispatches"
    monkeypatch.setattr(decode_programs, "USES_BEFORE_COMPILATION", 1)
    widths.clear()
    narrow = sample_all(driver)
    assert set(widths) == {4, 8, SLOTS}
    assert narrow == wide


def test_sequences_move_to_the_first_slots(driver: Driver) -> None:
    pool = driver.executor.sampler.pool
    driver.finished.clear()
    for request_id in range(4):
        driver.admit(request_id)
    before = [sequence for _, sequence in pool.decoding]
    driver.executor.sampler.release(before[0].request_id)
    remaining = [sequence for sequence in before if sequence.request_id != before[0].request_id]
    pool.compact()
    assert pool.decoding == list(enumerate(remaining))
    while driver.executor.sampler.num_running:
        driver.dispatch(dispatch_next=False)


def test_the_width_covers_the_highest_slot_or_all_sequences(driver: Driver) -> None:
    layout = driver.executor.sampler.runner.decode_layout
    assert layout.widths == (4, 8, 16)
    assert layout.width_of([0, 9]) == 16
    assert layout.width_of([0, 9], compacted=True) == 4
    assert np.shape(layout.dispatch([], width=8).batch.tables)[0] == 8


def test_samples_of_adapters_are_equal_in_narrow_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight samples with two trained adapters end at different times, so the batch becomes narrow."""
    monkeypatch.setattr(decode_programs, "USES_BEFORE_COMPILATION", 10_000)
    config = replace(load_model_config(FAMILIES / "qwen3_moe"), vocab_size=CONFIG.vocab_size)
    model = make_model(tmp_path / "model", config)
    with running(model, tmp_path, max_num_seqs=8, max_context_length=192) as engine:
        for seed, model_id in enumerate("ab"):
            create(engine, model_id)
            train(engine, model_id, seed=seed)
            snapshot(engine, model_id, model_id)
        ops = [
            replace(sample_op("ab"[number % 2], max_tokens=16 * number + 5, seed=number), num_samples=1)
            for number in range(8)
        ]

        def sample() -> list[SampledSequence]:
            futures = [engine.submit(op) for op in ops]
            return [future.result(TIMEOUT_S).sequences[0] for future in futures]

        wide = sample()
        monkeypatch.setattr(decode_programs, "USES_BEFORE_COMPILATION", 1)
        widths = set()
        decode = model_runner.ModelRunner.decode

        def record(runner: model_runner.ModelRunner, dispatch: DecodeDispatch, carry: Carry) -> DecodeOutputs:
            runner.wait_for_compilation()
            widths.add(dispatch.program.width)
            return decode(runner, dispatch, carry)

        monkeypatch.setattr(model_runner.ModelRunner, "decode", record)
        sample()
        narrow = sample()
    assert widths == {4, 8}
    for in_wide, in_narrow in zip(wide, narrow, strict=True):
        np.testing.assert_array_equal(in_wide.tokens, in_narrow.tokens)
        np.testing.assert_array_equal(in_wide.logprobs, in_narrow.logprobs)


def test_latent_attention_has_one_decode_width(tmp_path: Path) -> None:
    settings = make_settings(FAMILIES / "deepseek_v3", tmp_path, max_num_seqs=SLOTS, max_context_length=192)
    assert DeviceExecutor(settings).sampler.runner.decode_layout.widths == (SLOTS,)


def test_lowering_reads_no_donated_array(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a background thread lowers a program, the engine thread may donate and so delete the KV cache."""
    caches: list[KVCache] = []
    record = SimpleNamespace(lower=lambda cache, *_, **__: caches.append(cache))
    monkeypatch.setattr(model_runner, "prefill", record)
    monkeypatch.setattr(model_runner, "decode_steps", record)
    programs = list(driver.executor.sampler.runner.programs())
    assert len(caches) == len(programs)
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(caches))

"""The engine and the executor with a tiny random model: models, snapshots, checkpoints and failures."""

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.operations import (
    AdamSettings,
    CreateModel,
    DropSnapshot,
    ForwardBackward,
    LoadWeights,
    LoraSpec,
    LossFn,
    LossSettings,
    OptimStep,
    Sample,
    SamplingSettings,
    SaveSampler,
    SaveWeights,
    TrainDatum,
    UnloadModel,
    WeightsLoaded,
    WeightsSaved,
)
from skyrl_tx_server.errors import ConfigError, ConflictError, NotFoundError, ServerError, UserError
from skyrl_tx_server.executor import compile_stats, device_memory
from skyrl_tx_server.executor import executor as executor_module
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.executor.memory_division import CACHE_SHARE_OF_CPU_MEMORY
from skyrl_tx_server.files.checkpoint_record import CheckpointInfo
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.model.kv_cache import KVCache, page_bytes
from skyrl_tx_server.model.shapes import PAGE_SIZE
from skyrl_tx_server.sampling import model_runner
from skyrl_tx_server.sampling import score_step as score_module
from skyrl_tx_server.training import training_model_pool
from tests.fakes.present import present
from tests.fakes.tiny_model import CONFIG, make_model, make_settings
from tests.server import reference_losses

TIMEOUT_S = 900  # on a busy machine, XLA compiles for minutes
LORA = LoraSpec(rank=4, seed=3)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def checkpoints_dir(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def engine(model_dir: Path, checkpoints_dir: Path) -> Iterator[Engine]:
    with running(model_dir, checkpoints_dir) as engine:
        yield engine


@contextmanager
def running(model_dir: Path, checkpoints_dir: Path, **changes: object) -> Iterator[Engine]:
    engine = Engine(DeviceExecutor(make_settings(model_dir, checkpoints_dir, **changes)))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def run(engine: Engine, op):
    return engine.submit(op).result(TIMEOUT_S)


def saved_path(engine: Engine, op: SaveWeights | SaveSampler) -> str:
    """Save a checkpoint and return its path."""
    return present(run(engine, op).path)


def create(engine: Engine, model_id: str, lora: LoraSpec = LORA) -> None:
    run(engine, CreateModel(model_id=model_id, lora=lora))


def data(count: int = 2, seed: int = 0, length: int = 40) -> tuple[TrainDatum, ...]:
    """Return the datums of `count` random sequences of `length` tokens, each with `length - 1` targets."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 256, length).astype(np.int32) for _ in range(count)]
    return tuple(TrainDatum(tokens=sequence[:-1], target_tokens=sequence[1:]) for sequence in sequences)


def accumulate(engine: Engine, model_id: str, batch: tuple[TrainDatum, ...]):
    return run(engine, ForwardBackward(model_id=model_id, data=batch, loss_fn=LossFn.CROSS_ENTROPY))


def step(engine: Engine, model_id: str, learning_rate: float = 1e-2) -> float:
    return run(engine, OptimStep(model_id=model_id, adam=AdamSettings(learning_rate=learning_rate))).metrics[
        "grad_norm"
    ]


def train(engine: Engine, model_id: str, seed: int = 0) -> float:
    accumulate(engine, model_id, data(seed=seed))
    return step(engine, model_id)


def state(engine: Engine, model_id: str, checkpoints_dir: Path) -> dict[str, np.ndarray]:
    """Return all arrays of a training checkpoint."""
    path = saved_path(engine, SaveWeights(model_id=model_id, name="state", overwrite=True))
    return CheckpointStore(checkpoints_dir, "local/tiny").read(path)[1]


def assert_identical(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_a_checkpoint_loads_into_a_model_with_another_seed(engine: Engine, checkpoints_dir: Path):
    """SDKs up to 0.36 restore a model with two requests: create_model with the rank, then load_weights."""
    create(engine, "m")
    train(engine, "m")
    path = saved_path(engine, SaveWeights(model_id="m", name="a"))
    create(engine, "other", replace(LORA, seed=99))
    assert run(engine, LoadWeights(model_id="other", path=path, optimizer=True)).lora == LORA
    assert_identical(state(engine, "other", checkpoints_dir), state(engine, "m", checkpoints_dir))
    create(engine, "smaller", replace(LORA, rank=2))
    with pytest.raises(UserError, match="create a model from the checkpoint"):
        run(engine, LoadWeights(model_id="smaller", path=path, optimizer=True))


@pytest.mark.parametrize("forward_only", [False, True])
def test_gspo_in_several_micro_batches_equals_the_reference(engine: Engine, forward_only: bool):
    """The float64 reference computes the loss from the logprobs that the server returned."""
    create(engine, "m")
    rng = np.random.default_rng(6)
    batch = data(6, length=120)
    logprobs = accumulate(engine, "m", batch).logprobs
    batch = tuple(
        replace(
            datum,
            logprobs=(current + rng.normal(0.1, 0.3, current.shape)).astype(np.float32),
            advantages=rng.normal(size=current.shape).astype(np.float32),
            sequence_ratio_mask=(rng.random(current.shape) > 0.4).astype(np.float32),
        )
        for datum, current in zip(batch, logprobs, strict=True)
    )
    settings = LossSettings(clip_high_threshold=1.1)
    op = ForwardBackward(
        model_id="m", data=batch, loss_fn=LossFn.GSPO, settings=settings, forward_only=forward_only
    )
    result = run(engine, op)
    expected = sum(
        reference_losses.total(
            LossFn.GSPO,
            returned,
            sampler_logprobs=datum.logprobs,
            advantages=datum.advantages,
            sequence_ratio_mask=datum.sequence_ratio_mask,
            options={"clip_high_threshold": 1.1},
        )
        for datum, returned in zip(batch, result.logprobs, strict=True)
    )
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def sample_op(weights: str | None, *, max_tokens: int = 10, num_samples: int = 1, seed: int = 0) -> Sample:
    settings = SamplingSettings(max_tokens=max_tokens, seed=seed, stop_at_eos=False)
    return Sample(
        weights=weights, prompt=np.arange(20, dtype=np.int32), settings=settings, num_samples=num_samples
    )


def sample_one(engine: Engine, weights: str | None) -> tuple[list[int], list[float]]:
    sequence = run(engine, sample_op(weights)).sequences[0]
    return sequence.tokens.tolist(), sequence.logprobs.tolist()


def snapshot(engine: Engine, model_id: str, weights: str) -> WeightsSaved:
    return run(engine, SaveSampler(model_id=model_id, weights=weights))


def test_other_models_run_while_a_checkpoint_is_written(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    is_writing, may_end = threading.Event(), threading.Event()
    write = CheckpointStore.write

    def slow_write(*args: Any, **kwargs: Any) -> CheckpointInfo:
        is_writing.set()
        assert may_end.wait(TIMEOUT_S)
        return write(*args, **kwargs)

    monkeypatch.setattr(CheckpointStore, "write", slow_write)
    create(engine, "saved")
    create(engine, "trains")
    saving = engine.submit(SaveWeights(model_id="saved", name="slow"))
    stepping = engine.submit(OptimStep(model_id="saved", adam=AdamSettings(learning_rate=0.1)))
    assert is_writing.wait(TIMEOUT_S)
    accumulate(engine, "trains", data())
    run(engine, sample_op(None, max_tokens=8))
    assert not saving.done() and not stepping.done()
    may_end.set()
    assert saving.result(TIMEOUT_S).path == "tinker://saved/weights/slow"
    stepping.result(TIMEOUT_S)


def test_a_save_succeeds_if_its_model_moves_to_full_host_memory(
    model_dir: Path, checkpoints_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    is_writing, may_end = threading.Event(), threading.Event()
    write, free_bytes = CheckpointStore.write, 1 << 60

    def slow_write(*args: Any, **kwargs: Any) -> CheckpointInfo:
        is_writing.set()
        assert may_end.wait(TIMEOUT_S)
        return write(*args, **kwargs)

    monkeypatch.setattr(CheckpointStore, "write", slow_write)
    monkeypatch.setattr(training_model_pool, "available_host_bytes", lambda: free_bytes)
    with running(model_dir, checkpoints_dir, max_models=1) as engine:
        create(engine, "a")
        train(engine, "a")
        snapshot(engine, "a", "expected")
        saving = engine.submit(SaveSampler(model_id="a", weights="tinker://a/sampler_weights/s"))
        assert is_writing.wait(TIMEOUT_S)
        create(engine, "b")  # moves "a" to host memory
        free_bytes = 0  # "b" cannot move to host memory, so "a" cannot move back
        may_end.set()
        path = saving.result(TIMEOUT_S).path
        assert path is not None and sample_one(engine, path) == sample_one(engine, "expected")


def test_training_and_sampling_compile_each_function_once(model_dir: Path, checkpoints_dir: Path):
    """Other prompt lengths, adapters and accumulated gradients compile no further programs."""
    before = Counter(compile_stats.programs())
    # shapes that no other test compiles
    with running(
        model_dir,
        checkpoints_dir,
        max_lora_rank=5,
        max_num_seqs=5,
        max_context_length=250,
        train_tokens_per_batch=128,
    ) as engine:
        for model_id in ("a", "b"):
            create(engine, model_id)
            accumulate(engine, model_id, data(5))
            accumulate(engine, model_id, data(seed=1))
            run(
                engine,
                ForwardBackward(
                    model_id=model_id, data=data(), loss_fn=LossFn.CROSS_ENTROPY, forward_only=True
                ),
            )
            step(engine, model_id)
            step(engine, model_id)
            snapshot(engine, model_id, model_id)
        for length, weights in ((30, "a"), (100, "b"), (190, "b"), (120, None)):
            settings = SamplingSettings(max_tokens=10, seed=0, stop_at_eos=False)
            prompt = np.arange(length, dtype=np.int32)
            run(
                engine,
                Sample(
                    weights=weights,
                    prompt=prompt,
                    settings=settings,
                    num_samples=3,
                    prompt_logprobs=length == 100,
                ),
            )
    compiled = {
        name.removeprefix("jit(").removesuffix(")"): count
        for name, count in (Counter(compile_stats.programs()) - before).items()
    }
    assert compiled == dict.fromkeys(
        ("empty_cache", "_write_slot", "prefill", "decode_steps", "forward_backward", "forward", "adam_step"),
        1,
    )


def test_requests_compile_no_programs_after_warmup(model_dir: Path, checkpoints_dir: Path):
    """Warmup compiles all programs of prefill, decoding and training."""
    sizes = {"max_lora_rank": 6, "max_num_seqs": 3, "max_context_length": 250, "train_tokens_per_batch": 128}
    before = Counter(compile_stats.programs())
    with running(model_dir, checkpoints_dir, warmup=True, **sizes) as engine:
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "compile-ahead")
        thread.join(TIMEOUT_S)
        warmed_up = Counter(compile_stats.programs()) - before
        create(engine, "a")
        accumulate(engine, "a", data(5))
        run(
            engine,
            ForwardBackward(model_id="a", data=data(), loss_fn=LossFn.CROSS_ENTROPY, forward_only=True),
        )
        snapshot(engine, "a", "a")
        for length in (30, 230):
            settings = SamplingSettings(max_tokens=10, seed=0, stop_at_eos=False)
            run(
                engine,
                Sample(
                    weights="a",
                    prompt=np.arange(length, dtype=np.int32) % 250,
                    settings=settings,
                    num_samples=2,
                ),
            )
    after = Counter(compile_stats.programs()) - before
    for name, count in {"prefill": 2, "decode_steps": 1, "forward_backward": 1, "forward": 1}.items():
        assert (warmed_up[f"jit({name})"], after[f"jit({name})"]) == (count, count), name


# --- training ---


def test_gradients_add_up_over_calls_until_the_optimizer_step(engine: Engine):
    for model_id, calls in {"whole": [data(4)], "halves": [data(4)[:2], data(4)[2:]]}.items():
        create(engine, model_id)
        losses = [accumulate(engine, model_id, batch).metrics["loss:sum"] for batch in calls]
        assert sum(losses) == pytest.approx(4 * 39 * np.log(260), rel=0.3)
    norms = [step(engine, model_id) for model_id in ("whole", "halves")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert step(engine, "whole") == 0.0  # the first step cleared the gradient


def test_forward_only_leaves_no_gradient(engine: Engine):
    create(engine, "a")
    run(engine, ForwardBackward(model_id="a", data=data(), loss_fn=LossFn.CROSS_ENTROPY, forward_only=True))
    assert step(engine, "a") == 0.0


def test_models_do_not_affect_each_other(engine: Engine, checkpoints_dir: Path):
    create(engine, "a")
    create(engine, "b", replace(LORA, seed=9))
    before = state(engine, "b", checkpoints_dir)
    train(engine, "a")
    assert_identical(state(engine, "b", checkpoints_dir), before)


def test_existing_and_unloaded_model_ids_are_refused(engine: Engine):
    create(engine, "a")
    with pytest.raises(ConflictError, match="model a exists already"):
        create(engine, "a")
    run(engine, UnloadModel(model_id="a"))
    for op in (
        OptimStep(model_id="a", adam=AdamSettings()),
        UnloadModel(model_id="a"),
        SaveWeights(model_id="a", name="x"),
    ):
        with pytest.raises(NotFoundError, match="no model a"):
            run(engine, op)
    create(engine, "a")


# --- checkpoints ---


def test_save_and_load_restore_training_bit_for_bit(model_dir: Path, checkpoints_dir: Path):
    """The first step after a resume in a new engine gives the same arrays as an uninterrupted run."""
    with running(model_dir, checkpoints_dir) as engine:
        create(engine, "run:train:0")
        train(engine, "run:train:0", seed=1)
        saved = run(engine, SaveWeights(model_id="run:train:0", name="one", user_metadata={"epoch": "3"}))
        train(engine, "run:train:0", seed=2)
        uninterrupted = state(engine, "run:train:0", checkpoints_dir)
    assert saved.path == "tinker://run:train:0/weights/one" and saved.size_bytes > 0
    info = CheckpointStore(checkpoints_dir, "local/tiny").info(saved.path)
    assert (info.lora, info.step, info.user_metadata) == (LORA, 1, {"epoch": "3"})

    with running(model_dir, checkpoints_dir) as engine:
        loaded = run(engine, LoadWeights(model_id="resumed", path=saved.path, optimizer=True, create=True))
        assert loaded == WeightsLoaded(model_id="resumed", lora=LORA)
        train(engine, "resumed", seed=2)
        assert_identical(state(engine, "resumed", checkpoints_dir), uninterrupted)

        run(engine, LoadWeights(model_id="fresh-moments", path=saved.path, optimizer=False, create=True))
        assert int(state(engine, "fresh-moments", checkpoints_dir)["optimizer.step"]) == 0
        assert int(state(engine, "resumed", checkpoints_dir)["optimizer.step"]) == 2
        run(engine, LoadWeights(model_id="resumed", path=saved.path, optimizer=False))
        weights_only = state(engine, "resumed", checkpoints_dir)
        assert int(weights_only["optimizer.step"]) == 0
        assert all(not array.any() for name, array in weights_only.items() if name.startswith("optimizer."))


def test_loading_discards_an_accumulated_gradient(engine: Engine):
    create(engine, "a")
    path = saved_path(engine, SaveWeights(model_id="a", name="one"))
    accumulate(engine, "a", data())
    run(engine, LoadWeights(model_id="a", path=path, optimizer=True))
    assert step(engine, "a") == 0.0


def test_unsuitable_checkpoints_are_refused(model_dir: Path, checkpoints_dir: Path):
    with running(model_dir, checkpoints_dir) as engine:
        create(engine, "a", LoraSpec(rank=8))
        create(engine, "b")
        path = saved_path(engine, SaveWeights(model_id="a", name="one"))
        with pytest.raises(ConflictError, match="exists already"):
            run(engine, SaveWeights(model_id="a", name="one"))
        with pytest.raises(UserError, match="rank is 8 and 4"):
            run(engine, LoadWeights(model_id="b", path=path, optimizer=True))
        with pytest.raises(NotFoundError, match="no checkpoint"):
            run(engine, LoadWeights(model_id="c", path="tinker://a/weights/two", optimizer=True, create=True))
        sampler = saved_path(engine, SaveSampler(model_id="a", weights="tinker://a/sampler_weights/s"))
        with pytest.raises(UserError, match="has no optimizer state"):
            run(engine, LoadWeights(model_id="c", path=sampler, optimizer=True, create=True))
        with pytest.raises(UserError, match="is not a sampler checkpoint"):
            run(engine, sample_op(path))
    with (
        running(model_dir, checkpoints_dir, max_lora_rank=4) as engine,
        pytest.raises(UserError, match=r"max_lora_rank=4: start the server"),
    ):
        run(engine, LoadWeights(model_id="c", path=path, optimizer=True, create=True))
    with (
        running(model_dir, checkpoints_dir, model_alias="local/other") as engine,
        pytest.raises(UserError, match="base model local/tiny"),
    ):
        run(engine, LoadWeights(model_id="c", path=path, optimizer=True, create=True))


# --- snapshots ---


def test_a_snapshot_samples_the_same_after_an_eviction(engine: Engine):
    """With two LoRA slots, ephemeral snapshots are reloaded from host memory and named ones from disk."""
    create(engine, "a")
    expected_by_weights = {}
    for number, weights in enumerate(
        ["s0", "tinker://a/sampler_weights/s1", "s2", "tinker://a/sampler_weights/s3"]
    ):
        train(engine, "a", seed=number)
        run(engine, SaveSampler(model_id="a", weights=weights))
        expected_by_weights[weights] = sample_one(engine, weights)
    assert len({tuple(tokens) for tokens, _ in expected_by_weights.values()}) > 1
    assert sample_one(engine, None) not in expected_by_weights.values()
    for _ in range(2):
        for weights, expected in expected_by_weights.items():
            assert sample_one(engine, weights) == expected
    assert engine.stats()["snapshots_on_device"] == 2


def test_samples_can_use_more_snapshots_than_lora_slots(engine: Engine):
    create(engine, "a")
    expected_by_weights = {}
    for weights in ("s0", "s1", "s2", "s3"):
        train(engine, "a")
        snapshot(engine, "a", weights)
        expected_by_weights[weights] = sample_one(engine, weights)
    futures = {weights: engine.submit(sample_op(weights)) for weights in expected_by_weights}
    for weights, future in futures.items():
        assert future.result(TIMEOUT_S).sequences[0].tokens.tolist() == expected_by_weights[weights][0]


def test_full_host_memory_drops_unused_snapshots(
    model_dir: Path, checkpoints_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(executor_module, "available_host_bytes", lambda: 1 << 10)
    with running(model_dir, checkpoints_dir) as engine:
        create(engine, "a")
        for step in range(4):
            snapshot(engine, "a", f"s{step}")
        assert engine.stats()["snapshots_in_host_memory"] == 1
        sample_one(engine, "s3")
        with pytest.raises(NotFoundError, match="host memory"):
            sample_one(engine, "s0")


def test_sampler_weights_are_kept_after_a_restart(model_dir: Path, checkpoints_dir: Path):
    path = "tinker://a/sampler_weights/kept"
    with running(model_dir, checkpoints_dir) as engine:
        create(engine, "a")
        train(engine, "a")
        assert run(engine, SaveSampler(model_id="a", weights=path)).path == path
        expected = sample_one(engine, path)
    with running(model_dir, checkpoints_dir) as engine:
        assert sample_one(engine, path) == expected


class BlockingWatcher:
    """Blocks the engine thread at the first report of tokens until `may_continue` is set."""

    streams_tokens = True

    def __init__(self) -> None:
        self.is_blocking, self.may_continue = threading.Event(), threading.Event()

    def tokens(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.is_blocking.set()
        assert self.may_continue.wait(TIMEOUT_S)

    def is_waiting(self) -> bool:
        return True


def test_a_refused_save_of_a_snapshot_in_use_leaves_no_checkpoint(engine: Engine, checkpoints_dir: Path):
    path, store = "tinker://a/sampler_weights/s", CheckpointStore(checkpoints_dir, "local/tiny")
    create(engine, "a")
    snapshot(engine, "a", path)
    watcher = BlockingWatcher()
    sampling = engine.submit(sample_op(path, max_tokens=100), watcher)
    assert watcher.is_blocking.wait(TIMEOUT_S)
    store.delete(path)
    saving = engine.submit(SaveSampler(model_id="a", weights=path))
    watcher.may_continue.set()
    with pytest.raises(ConflictError, match="in use"):
        saving.result(TIMEOUT_S)
    assert not store.exists(path), "later samples would use the earlier weights"
    sampling.result(TIMEOUT_S)
    train(engine, "a")
    snapshot(engine, "a", path)
    snapshot(engine, "a", "latest")
    assert sample_one(engine, path) == sample_one(engine, "latest")


@pytest.mark.parametrize("is_evicted", [False, True])
def test_a_path_with_new_weights_is_loaded_after_a_deletion(
    engine: Engine, checkpoints_dir: Path, is_evicted: bool
):
    """The export tool can write a checkpoint under the path of a deleted one."""
    path, other = "tinker://a/sampler_weights/s", "tinker://a/sampler_weights/other"
    store = CheckpointStore(checkpoints_dir, "local/tiny")
    prompt = np.arange(100, dtype=np.int32) % 32
    create(engine, "a")
    snapshot(engine, "a", path)
    before = run(engine, replace(sample_op(path), prompt=prompt)).sequences[0]
    for seed in range(3):
        train(engine, "a", seed=seed)
    for name in (other, *(f"s{number}" for number in range(4 * is_evicted))):
        snapshot(engine, "a", name)
    store.delete(path)
    run(engine, DropSnapshot(weights=path))
    info, arrays = store.read(other)
    store.write(path, arrays, lora=info.lora, step=info.step, user_metadata={})
    after, expected = (
        run(engine, replace(sample_op(name), prompt=prompt)).sequences[0] for name in (path, other)
    )
    assert np.array_equal(after.logprobs, expected.logprobs)
    assert not np.array_equal(after.logprobs, before.logprobs)


def test_no_sample_begins_with_weights_that_are_being_deleted(engine: Engine, checkpoints_dir: Path):
    path = "tinker://a/sampler_weights/s"
    create(engine, "a")
    snapshot(engine, "a", path)
    long = engine.submit(sample_op(path, max_tokens=200))
    CheckpointStore(checkpoints_dir, "local/tiny").delete(path)
    engine.submit(DropSnapshot(weights=path))
    with pytest.raises(ConflictError, match="samples of its earlier weights still run"):
        run(engine, sample_op(path))
    assert len(long.result(TIMEOUT_S).sequences[0].tokens) == 200
    with pytest.raises(NotFoundError, match="no checkpoint"):
        run(engine, sample_op(path))


def test_a_sample_can_be_submitted_before_its_snapshot_is_saved(engine: Engine):
    create(engine, "a")
    futures = [
        engine.submit(SaveSampler(model_id="a", weights="s")),
        engine.submit(sample_op("s", num_samples=9)),
        engine.submit(DropSnapshot(weights="s")),
    ]
    assert len(futures[1].result(TIMEOUT_S).sequences) == 9
    futures[2].result(TIMEOUT_S)
    for op in (sample_op("s"), DropSnapshot(weights="s")):
        with pytest.raises(NotFoundError, match="s"):
            run(engine, op)
    assert engine.stats()["snapshots_in_host_memory"] == 0


@pytest.mark.parametrize("weights", ["never saved", "tinker://a/sampler_weights/none"])
def test_unknown_weights_fail_only_their_request(engine: Engine, weights: str):
    good, bad = engine.submit(sample_op(None)), engine.submit(sample_op(weights))
    assert isinstance(bad.exception(TIMEOUT_S), NotFoundError)
    assert len(good.result(TIMEOUT_S).sequences[0].tokens) == 10


# --- failures ---


class DeviceError(RuntimeError):
    pass


def test_a_failed_forward_backward_does_not_change_the_gradient(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    """The second micro-batch fails, and the gradient that was donated to it is lost."""
    create(engine, "a")
    create(engine, "untouched")
    for model_id in ("a", "untouched"):
        accumulate(engine, model_id, data())
    forward_backward, calls = executor_module.forward_backward, []

    def fail_in_second_call(adapter, gradient, *args, **options):
        calls.append(1)
        if len(calls) < 2:
            return forward_backward(adapter, gradient, *args, **options)
        for leaf in jax.tree.leaves(gradient):
            leaf.delete()
        raise DeviceError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(executor_module, "forward_backward", fail_in_second_call)
        with pytest.raises(ServerError, match="DeviceError: out of memory"):
            accumulate(engine, "a", data(40, seed=5))
    assert len(calls) == 2
    assert step(engine, "a") == step(engine, "untouched") > 0


def test_a_failed_optimizer_step_does_not_change_the_model(
    engine: Engine, checkpoints_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    create(engine, "a")
    create(engine, "b")
    for model_id in ("a", "b"):
        accumulate(engine, model_id, data())
    adam_step = executor_module.adam_step

    def step_and_fail(*args):
        adam_step(*args)
        raise DeviceError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(executor_module, "adam_step", step_and_fail)
        with pytest.raises(ServerError, match="out of memory"):
            step(engine, "a")
    assert step(engine, "a") == step(engine, "b")
    assert_identical(state(engine, "a", checkpoints_dir), state(engine, "b", checkpoints_dir))


@pytest.mark.parametrize("program", ["decode_steps", "prefill"])
def test_a_lost_kv_cache_fails_only_the_running_samples(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, program: str
):
    create(engine, "a")
    snapshot(engine, "a", "s")
    expected = sample_one(engine, "s")
    run_program, calls = getattr(model_runner, program), []

    def fail_in_second_call(cache, *args, **options):
        calls.append(1)
        if len(calls) == 2:
            for leaf in jax.tree.leaves(cache):
                leaf.delete()
            raise DeviceError("out of memory")
        return run_program(cache, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(model_runner, program, fail_in_second_call)
        futures = [engine.submit(sample_op("s", max_tokens=60)) for _ in range(2)]
        assert all("out of memory" in str(future.exception(TIMEOUT_S)) for future in futures)
    assert sample_one(engine, "s") == expected
    assert engine.stats()["slots_used"] == 0
    run(engine, DropSnapshot(weights="s"))  # no snapshot is pinned


def test_a_prefill_that_fails_asynchronously_recovers(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """The error is raised when the outputs are read, as on a GPU without memory for temporary arrays. The
    donated KV cache is lost, and the server creates a new one."""
    expected = sample_one(engine, None)
    real_prefill, real_cache = model_runner.prefill, model_runner.empty_cache
    lost_caches: list[KVCache] = []

    def raise_if_broken(_: np.ndarray) -> np.ndarray:
        if broken.is_set():
            raise DeviceError("out of memory")
        return np.zeros((), np.float32)

    @jax.jit
    def slow_product(matrix: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 200, lambda _, product: jnp.tanh(product @ matrix), matrix)

    @jax.jit
    def add_callback(leaf: jax.Array, matrix: jax.Array) -> jax.Array:
        return leaf + jax.pure_callback(
            raise_if_broken, jax.ShapeDtypeStruct((), np.float32), matrix[0, 0]
        ).astype(leaf.dtype)

    def prefill_and_fail_later(*args, **options):
        # without the slow product, a CPU raises the error in this call
        returned, matrix = (
            real_prefill(*args, **options),
            slow_product(np.ones((300, 300), np.float32)),
        )
        cache, outputs = jax.tree.map(lambda leaf: add_callback(leaf, matrix), returned)
        lost_caches.append(cache)
        return cache, outputs

    def cache_after_deletion(**options):
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(lost_caches))
        return real_cache(**options)

    broken = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(model_runner, "prefill", prefill_and_fail_later)
        patch.setattr(model_runner, "empty_cache", cache_after_deletion)
        assert sample_one(engine, None) == expected
        broken.set()
        with pytest.raises(ServerError, match="out of memory"):
            sample_one(engine, None)
    assert sample_one(engine, None) == expected


def test_a_failed_prefill_fails_only_its_request(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """The prefill batch contains one prompt before and one prompt after the prompt that fails."""
    expected = run(engine, sample_op(None, max_tokens=60)).sequences[0].tokens.tolist()
    prefill = model_runner.prefill

    def prefill_or_fail(cache, params, lora_slots, batch, *args, **options):
        if (batch.tokens == 7).sum() >= 20:
            raise DeviceError("could not compile")
        return prefill(cache, params, lora_slots, batch, *args, **options)

    failing_op = replace(sample_op(None), prompt=np.full(20, 7, np.int32))
    with monkeypatch.context() as patch:
        patch.setattr(model_runner, "prefill", prefill_or_fail)
        futures = [
            engine.submit(op)
            for op in (sample_op(None, max_tokens=60), failing_op, sample_op(None, max_tokens=60))
        ]
        assert "could not compile" in str(futures[1].exception(TIMEOUT_S))
        for future in (futures[0], futures[2]):
            assert future.result(TIMEOUT_S).sequences[0].tokens.tolist() == expected


def test_a_failed_top_k_fails_only_its_request(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """Top-k logprobs of a prompt are computed after its prefill, and those of a sample when it ends."""
    expected = run(engine, sample_op(None, max_tokens=60)).sequences[0].tokens.tolist()

    def fail(*args, **options):
        raise DeviceError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(score_module, "score", fail)
        good = engine.submit(sample_op(None, max_tokens=60))
        bad = [
            engine.submit(replace(sample_op(None, max_tokens=12), topk_prompt_logprobs=2)),
            engine.submit(replace(sample_op(None, max_tokens=12), topk_sample_logprobs=2, num_samples=2)),
            engine.submit(replace(sample_op(None, max_tokens=1), topk_sample_logprobs=2)),
        ]
        assert all("RESOURCE_EXHAUSTED: out of memory" in str(future.exception(TIMEOUT_S)) for future in bad)
        assert good.result(TIMEOUT_S).sequences[0].tokens.tolist() == expected
    assert engine.stats()["slots_used"] == 0


def test_a_non_finite_optimizer_step_does_not_change_the_model(engine: Engine, checkpoints_dir: Path):
    create(engine, "a")
    create(engine, "b")
    huge = tuple(replace(datum, weights=np.full(len(datum.tokens), 3e38, np.float32)) for datum in data())
    accumulate(engine, "a", huge)
    with pytest.raises(UserError, match=r"optim_step of a was not applied: its gradient .* is not finite"):
        step(engine, "a")
    accumulate(engine, "a", data())
    with pytest.raises(UserError, match="not applied: its update is not finite"):
        run(engine, OptimStep(model_id="a", adam=AdamSettings(learning_rate=1e38, weight_decay=1e3)))
    assert train(engine, "a") == train(engine, "b")
    assert_identical(state(engine, "a", checkpoints_dir), state(engine, "b", checkpoints_dir))


def test_a_diverged_model_fails_only_its_own_samples(engine: Engine):
    """The failed sequences leave NaN in their slots and KV pages, which must not affect later sequences."""
    expected = run(engine, sample_op(None, max_tokens=60)).sequences[0].tokens.tolist()
    create(engine, "diverged")
    accumulate(engine, "diverged", data())
    step(engine, "diverged", learning_rate=1e30)
    snapshot(engine, "diverged", "s")
    base_sample = engine.submit(sample_op(None, max_tokens=60))
    long_op = replace(
        sample_op("s"), prompt=np.arange(500, dtype=np.int32) % 256, num_samples=engine.stats()["slots"]
    )
    assert "have diverged" in str(engine.submit(long_op).exception(TIMEOUT_S))
    assert base_sample.result(TIMEOUT_S).sequences[0].tokens.tolist() == expected
    after = run(engine, replace(sample_op(None, max_tokens=60), num_samples=engine.stats()["slots"]))
    assert after.sequences[0].tokens.tolist() == expected
    assert all(np.isfinite(sequence.logprobs).all() for sequence in after.sequences)


# --- start ---


def test_the_number_of_slots_is_reduced_to_the_free_memory(
    model_dir: Path, checkpoints_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    # the KV pages of a sequence of 600 tokens, the maximum context
    sequence_bytes = -(-600 // PAGE_SIZE) * page_bytes(CONFIG, np.dtype(np.float32))
    monkeypatch.setattr(
        device_memory, "free_bytes", lambda _: 7.5 * sequence_bytes / CACHE_SHARE_OF_CPU_MEMORY
    )
    with caplog.at_level(logging.WARNING):
        assert DeviceExecutor(make_settings(model_dir, checkpoints_dir)).sampler.num_slots == 3
    assert "max_num_seqs=6: only 3 sequences fit" in caplog.text
    monkeypatch.setattr(
        device_memory, "free_bytes", lambda _: 0.5 * sequence_bytes / CACHE_SHARE_OF_CPU_MEMORY
    )
    with pytest.raises(ConfigError, match="set a smaller max_context_length"):
        DeviceExecutor(make_settings(model_dir, checkpoints_dir))


def test_a_kv_cache_below_one_sequence_is_refused(model_dir: Path, checkpoints_dir: Path):
    with pytest.raises(
        ConfigError,
        match=r"cache_tokens=640 is too small for one 600-token sequence .* set cache_tokens=1024 or more, "
        "or a smaller max_context_length or max_num_seqs",
    ):
        DeviceExecutor(make_settings(model_dir, checkpoints_dir, cache_tokens=640))


def test_a_context_above_the_limit_of_the_model_is_refused(model_dir: Path, checkpoints_dir: Path):
    with pytest.raises(ConfigError, match=r"max_context_length=601 is outside 1\.\.600"):
        DeviceExecutor(make_settings(model_dir, checkpoints_dir, max_context_length=601))


def test_info_contains_the_limits_for_clients(model_dir: Path, checkpoints_dir: Path):
    info = DeviceExecutor(make_settings(model_dir, checkpoints_dir, max_context_length=100)).info
    assert (info.base_model, info.max_context_length, info.max_lora_rank, info.vocab_size) == (
        "local/tiny",
        100,
        8,
        260,
    )

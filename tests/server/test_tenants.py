"""A model that is trained beside seven others has exactly the same results as one that is trained alone."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.operations import (
    AdamSettings,
    CreateModel,
    ForwardBackward,
    LoraSpec,
    LossFn,
    OptimStep,
    Sample,
    SamplingSettings,
    SaveSampler,
    SaveWeights,
    TrainDatum,
    UnloadModel,
)
from skyrl_tx_server.errors import CapacityError
from skyrl_tx_server.executor import compile_stats
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.training import training_model_pool
from tests.fakes.present import present
from tests.fakes.tiny_model import CONFIG, make_model, make_settings

TIMEOUT_S = 300
STEPS = 2
ON_DEVICE = 3
TENANTS = 8
ALONE = (0, 5, 7)  # models that are also trained alone


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # XLA sums rows of fewer than 64 numbers in an order that depends on the number of rows
    return make_model(
        tmp_path_factory.mktemp("model") / "tiny", replace(CONFIG, hidden_size=64, num_heads=2, head_dim=64)
    )


@contextmanager
def running(model_dir: Path, directory: Path) -> Iterator[Engine]:
    engine = Engine(DeviceExecutor(make_settings(model_dir, directory, max_models=ON_DEVICE, max_loras=3)))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def lora(tenant: int) -> LoraSpec:
    return LoraSpec(
        rank=(4, 2, 8, 1)[tenant % 4], seed=tenant, train_mlp=tenant % 3 != 1, train_unembed=tenant % 2 == 0
    )


def batch(tenant: int, step: int) -> tuple[TrainDatum, ...]:
    """Return the data of a request, which fill several micro-batches of one shape.

    Other models run between the micro-batches, and the single shape limits the number of programs.
    """
    rng = np.random.default_rng((tenant, step))
    sequences = [rng.integers(0, 256, rng.integers(110, 200)).astype(np.int32) for _ in range(6)]
    return tuple(
        TrainDatum(
            tokens=tokens[:-1],
            target_tokens=tokens[1:],
            logprobs=np.full(len(tokens) - 1, -2.0, np.float32),
            advantages=rng.normal(size=len(tokens) - 1).astype(np.float32),
        )
        for tokens in sequences
    )


class Tenant:
    """Submits the operations of one model without waiting for their results."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.engine, self.number, self.model_id = engine, number, f"m{number}"
        self.futures: list[Future] = [engine.submit(CreateModel(model_id=self.model_id, lora=lora(number)))]

    def step(self, step: int) -> None:
        weights = f"{self.model_id}-snapshot-{step}"
        loss = (LossFn.PPO, LossFn.CROSS_ENTROPY, LossFn.IMPORTANCE_SAMPLING)[self.number % 3]
        adam = AdamSettings(
            learning_rate=1e-2 / (1 + self.number),
            beta2=0.9 + 0.01 * self.number,
            weight_decay=0.01 * self.number,
        )
        settings = SamplingSettings(
            max_tokens=12 + self.number, temperature=1.0, seed=step, stop_at_eos=False
        )
        prompt = np.arange(5 + 8 * self.number, dtype=np.int32)  # less than a page, so no page is shared
        self.futures += [
            self.engine.submit(op)
            for op in (
                ForwardBackward(model_id=self.model_id, data=batch(self.number, step), loss_fn=loss),
                OptimStep(model_id=self.model_id, adam=adam),
                SaveSampler(model_id=self.model_id, weights=weights),
                Sample(weights=weights, prompt=prompt, settings=settings, num_samples=2),
                Sample(weights=None, prompt=prompt, settings=settings),
            )
        ]

    def outcome(self, directory: Path) -> dict[str, np.ndarray]:
        """Return losses, gradient norms, sampled tokens, logprobs, weights and optimizer state by name."""
        arrays: dict[str, np.ndarray] = {}
        for index, future in enumerate(self.futures):
            result = future.result(TIMEOUT_S)
            for name, value in getattr(result, "metrics", {}).items():
                arrays[f"{index} {name}"] = np.asarray(value)
            for number, row in enumerate(getattr(result, "logprobs", ())):
                arrays[f"{index} logprobs {number}"] = row
            for number, sequence in enumerate(getattr(result, "sequences", ())):
                arrays[f"{index} tokens {number}"], arrays[f"{index} sampled logprobs {number}"] = (
                    sequence.tokens,
                    sequence.logprobs,
                )
        saved = self.engine.submit(SaveWeights(model_id=self.model_id, name="end")).result(TIMEOUT_S)
        return arrays | CheckpointStore(directory, "local/tiny").read(present(saved.path))[1]


def test_a_model_trained_among_seven_others_is_bit_identical(model_dir: Path, tmp_path: Path):
    """Eight models are trained, but the device holds three models and has three LoRA slots.

    Models of all tenants move to the device and back, and share the decode batches. A model that returns to
    the device needs no new program.
    """
    before = Counter(compile_stats.programs())
    with running(model_dir, tmp_path / "together") as engine:
        tenants = [Tenant(engine, number) for number in range(TENANTS)]
        for step in range(STEPS):
            for tenant in tenants:
                tenant.step(step)
        together = [tenant.outcome(tmp_path / "together") for tenant in tenants]
        stats = engine.stats()
    assert (stats["models_on_device"], stats["models_in_host_memory"]) == (ON_DEVICE, TENANTS - ON_DEVICE)
    compiled = Counter(compile_stats.programs()) - before
    max_programs = {"forward_backward": 1, "adam_step": 1, "_write_slot": 1, "decode_steps": 2}  # two widths
    assert all(compiled[f"jit({name})"] <= count for name, count in max_programs.items()), compiled
    for number in ALONE:
        directory = tmp_path / f"alone{number}"
        with running(model_dir, directory) as engine:
            tenant = Tenant(engine, number)
            for step in range(STEPS):
                tenant.step(step)
            alone = tenant.outcome(directory)
        assert alone.keys() == together[number].keys()
        different = [
            name for name, value in alone.items() if not np.array_equal(value, together[number][name])
        ]
        assert not different, f"model {number}: {different}"


def test_a_model_is_refused_while_memory_is_full(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with running(model_dir, tmp_path) as engine:
        for number in range(ON_DEVICE):
            engine.submit(CreateModel(model_id=f"m{number}", lora=lora(number))).result(TIMEOUT_S)
        monkeypatch.setattr(training_model_pool, "available_host_bytes", lambda: 1 << 10)
        with pytest.raises(
            CapacityError,
            match=r"the device holds 3 models \(max_models\).*unload a model",
        ):
            engine.submit(CreateModel(model_id="one too many", lora=lora(0))).result(TIMEOUT_S)
        engine.submit(UnloadModel(model_id="m1")).result(TIMEOUT_S)
        engine.submit(CreateModel(model_id="another", lora=lora(0))).result(TIMEOUT_S)
        engine.submit(OptimStep(model_id="m0", adam=AdamSettings(learning_rate=1e-3))).result(TIMEOUT_S)

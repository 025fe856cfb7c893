"""Compare servers on 2 and 8 virtual CPU devices with a server on one device: losses, gradient norms, sampled
tokens, and the logprobs of trained and sampled tokens.

    .venv/bin/python -m scripts.check_mesh [FAMILY ...]

The default families are llama, qwen3_moe and deepseek_v3; qwen2 and qwen3 can also be given. The script
prints, for each mesh, the largest difference of each kind from the server on one device, and the number of
compiled programs. The exit status is 1 if a difference is above its limit (LIMITS). All meshes sample with
the adapters that were trained on one device, because the first steps of Adam can amplify a difference in the
last bit of a gradient to the size of a whole step. The script needs about 2 GiB of memory, and several
minutes, because every mesh compiles its own programs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import Future
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
# NPROC is the number of XLA's threads. With only one thread per device, collectives can deadlock.
os.environ["NPROC"] = "32"

import jax
import numpy as np

from skyrl_tx_server.config.engine_options import EngineOptions, MeshShape
from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.operations import (
    AdamSettings,
    CreateModel,
    ForwardBackward,
    LoraSpec,
    LossFn,
    Op,
    OptimStep,
    Sample,
    SamplingSettings,
    SaveSampler,
    TrainDatum,
)
from skyrl_tx_server.executor import compile_stats
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.model.model_config import Experts, ModelConfig
from skyrl_tx_server.model.transformer import init_params
from skyrl_tx_server.model.weights import save_model

LIMITS = {"logprobs": 1e-4, "loss": 1e-5, "gradient norm": 1e-4, "tokens": 0.0, "sampled logprobs": 1e-4}
DENSE = [MeshShape(tensor=2), MeshShape(data=2), MeshShape(fsdp=2), MeshShape(data=2, fsdp=2, tensor=2)]
SPARSE = [MeshShape(expert=2), MeshShape(data=2, tensor=2, expert=2), MeshShape(fsdp=2, expert=4)]
LATENT = [MeshShape(expert=2), MeshShape(data=2, fsdp=2, expert=2)]
SHAPES = {"qwen3_moe": SPARSE, "deepseek_v3": LATENT}
SAVED = "tinker://{}/sampler_weights/trained"
FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures" / "families"


def main(families: list[str]) -> int:
    within_limits = True
    for family in families or ["llama", "qwen3_moe", "deepseek_v3"]:
        with tempfile.TemporaryDirectory() as directory:
            model_dir = (
                FIXTURES / family
                if family == "deepseek_v3"
                else make_model(family, Path(directory) / "model")
            )
            checkpoints_dir = Path(directory) / "checkpoints"
            on_one_device = outputs_of(model_dir, MeshShape(), checkpoints_dir, save_adapters=True)
            for shape in SHAPES.get(family, DENSE):
                on_mesh = outputs_of(model_dir, shape, checkpoints_dir, save_adapters=False)
                worst = differences(on_one_device, on_mesh)
                within_limits &= all(worst[kind] <= limit for kind, limit in LIMITS.items())
                print(
                    f"{family:10} {shape!s:52}",
                    "  ".join(f"{kind} {value:.1e}" for kind, value in worst.items()),
                    flush=True,
                )
    return 0 if within_limits else 1


def make_model(family: str, directory: Path) -> Path:
    config = ModelConfig(
        model_type=family,
        vocab_size=104,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        head_dim=8,
        rope_theta=1e4,
        tie_word_embeddings=family != "llama",
        max_position_embeddings=256,
        eos_token_ids=(1,),
        experts=Experts(count=8, per_token=2, normalized=True) if family == "qwen3_moe" else None,
    )
    params = jax.jit(init_params, static_argnums=(0,))(config, jax.random.key(0))
    save_model(
        jax.tree.map(lambda leaf: np.asarray(leaf) * (5 if leaf.ndim > 1 else 1), params), config, directory
    )
    return directory


def outputs_of(
    model_dir: Path, shape: MeshShape, checkpoints_dir: Path, *, save_adapters: bool
) -> dict[str, np.ndarray]:
    """Train two models for two steps each. Then sample a group at temperature 0 and a group at temperature 1
    with each saved adapter and with the base model. The second group reads its prompt from the prefix cache.
    With `save_adapters`, the adapters of the two models are saved before sampling. Without it, sampling uses
    the adapters that an earlier call saved.

    The keys of the result begin with a kind of LIMITS, for example `loss/<model> <step>` or
    `tokens/<request> <sample>`.
    """
    settings = EngineOptions(
        base_model=str(model_dir),
        model_alias="check/mesh",
        checkpoints_dir=str(checkpoints_dir),
        compilation_cache_dir=None,
        dtype="float32",
        max_lora_rank=8,
        max_context_length=256,
        max_num_seqs=8,
        decode_steps_per_dispatch=8,
        train_tokens_per_batch=512,
        max_models=4,
        max_loras=2,
        data_parallel=shape.data,
        fsdp_parallel=shape.fsdp,
        tensor_parallel=shape.tensor,
        expert_parallel=shape.expert,
    )
    programs_before = sum(compile_stats.programs().values())
    engine, random, outputs = Engine(DeviceExecutor(settings)), np.random.default_rng(0), {}
    engine.start()

    def run(op: Op) -> Any:
        return engine.submit(op).result(600)

    def datum(length: int) -> TrainDatum:
        tokens = random.integers(0, 101, length).astype(np.int32)
        return TrainDatum(tokens=tokens[:-1], target_tokens=tokens[1:])

    for seed, model_id in enumerate(("one", "two")):
        run(CreateModel(model_id=model_id, lora=LoraSpec(rank=4, seed=seed)))
        for step in range(2):
            data = tuple(datum(20 + 9 * index) for index in range(9))
            result = run(ForwardBackward(model_id=model_id, data=data, loss_fn=LossFn.CROSS_ENTROPY))
            outputs[f"logprobs/{model_id} {step}"] = np.concatenate(result.logprobs)
            outputs[f"loss/{model_id} {step}"] = np.array(result.metrics["loss:sum"])
            norm = run(OptimStep(model_id=model_id, adam=AdamSettings(learning_rate=1e-3))).metrics[
                "grad_norm"
            ]
            outputs[f"gradient norm/{model_id} {step}"] = np.array(norm)
        if save_adapters:
            run(SaveSampler(model_id=model_id, weights=SAVED.format(model_id)))
    prompt = random.integers(0, 101, 150).astype(np.int32)
    futures: list[Future[Any]] = [
        engine.submit(Sample(prompt=prompt, weights=weights, num_samples=2, settings=sampling(temperature)))
        for weights in (None, SAVED.format("one"), SAVED.format("two"))
        for temperature in (0.0, 1.0)
    ]
    num_cached_tokens = 0
    for request, future in enumerate(futures):
        result = future.result(600)
        num_cached_tokens += result.prompt_cache_hit_tokens
        for number, sequence in enumerate(result.sequences):
            outputs[f"tokens/{request} {number}"], outputs[f"sampled logprobs/{request} {number}"] = (
                sequence.tokens,
                sequence.logprobs,
            )
    engine.stop()
    programs = sum(compile_stats.programs().values()) - programs_before
    print(
        f"           {shape.devices} devices: {programs} programs, {num_cached_tokens} prompt tokens from "
        f"the cache",
        flush=True,
    )
    return outputs


def sampling(temperature: float) -> SamplingSettings:
    return SamplingSettings(max_tokens=20, seed=5, stop_at_eos=False, temperature=temperature)


def differences(on_one_device: dict[str, np.ndarray], on_mesh: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the largest difference of each kind: absolute for logprobs, relative for losses and norms. The
    difference of tokens is 1 if a token differs, and 0 otherwise."""
    worst: dict[str, float] = defaultdict(float)
    for name, expected in on_one_device.items():
        kind = name.split("/")[0]
        match kind:
            case "tokens":
                difference = float(not np.array_equal(expected, on_mesh[name]))
            case "loss" | "gradient norm":
                difference = float(abs(expected - on_mesh[name]) / abs(expected))
            case _:
                difference = float(np.abs(expected - on_mesh[name]).max())
        worst[kind] = float(np.maximum(worst[kind], difference))  # NaN if a difference is NaN
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

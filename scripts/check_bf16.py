"""Check that sampling and training agree in bfloat16. The script measures the KL divergence per token between
the distributions of the sampling and the training programs.

    taskset -c 0,1 python -m scripts.check_bf16
    python -m scripts.check_bf16 layers=36 hidden=2560 heads=32 kv_heads=8      # on an accelerator
    NPROC=32 XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m scripts.check_bf16 fsdp_parallel=8

The model is a random Qwen3 with a trained adapter. The final norm is scaled so that the entropy of the
predictions is similar to that of a trained model. The engine samples single completions, groups and second
turns, and the operation `forward` computes their logprobs with the training program. The KL divergence is
estimated by the mean of exp(d) - 1 - d over sampled tokens, where d is the trainer's logprob minus the
sampler's (k3 in Schulman, "Approximating KL Divergence"). The exit status is 1 if an estimate is above 1e-4.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import chz
import jax
import numpy as np

from scripts.bench.compare import print_figure, random_sequences
from scripts.bench.sides.ours import Ours, running
from scripts.bench.small_model import CONFIG
from skyrl_tx_server.config.engine_options import MeshShape
from skyrl_tx_server.engine.operations import (
    AdamSettings,
    ForwardBackward,
    ForwardBackwardResult,
    LossFn,
    OptimStep,
    Sample,
    SampleResult,
    SamplingSettings,
    TrainDatum,
)
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.transformer import init_params
from skyrl_tx_server.model.weights import save_model

MAX_DIVERGENCE = 1e-4
STEPS, LEARNING_RATE = 3, 2e-3
LENGTHS = (40, 130, 260, 400)


@chz.chz
class Bf16Config:
    layers: int = 4
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 128
    new: int = chz.field(default=64, doc="Number of sampled tokens of each completion")
    sureness: float = chz.field(default=8.0, doc="Factor of the final norm, and therefore of the logits")
    dtype: str = chz.field(default="bfloat16", doc="Dtype of the weights. float32: no bfloat16 rounding")
    fsdp_parallel: int = 1
    tensor_parallel: int = 1


def main(config: Bf16Config) -> int:
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_model(config, Path(directory) / "model")
        worst_divergence = 0.0
        mesh = MeshShape(fsdp=config.fsdp_parallel, tensor=config.tensor_parallel)
        with running(
            model_dir, dtype=config.dtype, max_context_length=1024, train_tokens_per_batch=2048, mesh=mesh
        ) as ours:
            train(ours)
            for name, samples in sample_cases(ours, config).items():
                differences = np.concatenate(
                    [logprob_differences(ours, *sample) for sample in samples]
                ).astype(np.float64)
                mean_nll = -np.concatenate([logprobs for _, _, logprobs in samples]).mean()
                divergence = float(np.mean(np.expm1(differences) - differences))
                print_figure(f"KL per token: {name}", divergence, at_most=MAX_DIVERGENCE)
                spread = f"{np.abs(differences).mean():.2g}, {np.abs(differences).max():.2g}, {mean_nll:.2f}"
                print_figure(f"  mean and largest |d| of {len(differences)} tokens, mean NLL", spread)
                worst_divergence = float(np.maximum(worst_divergence, divergence))  # NaN if one is NaN
    return int(not worst_divergence <= MAX_DIVERGENCE)


def make_model(config: Bf16Config, directory: Path) -> Path:
    shape: ModelConfig = replace(
        CONFIG,
        num_layers=config.layers,
        hidden_size=config.hidden,
        intermediate_size=3 * config.hidden,
        num_heads=config.heads,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_dim,
    )
    params = jax.jit(partial(init_params, shape))(jax.random.key(0))
    save_model(replace(params, final_norm=params.final_norm * config.sureness), shape, directory)
    return directory


def train(ours: Ours) -> None:
    for step in range(STEPS):
        ours.train(random_sequences([300] * 4, seed=100 + step))
        ours.engine.submit(
            OptimStep(model_id="model", adam=AdamSettings(learning_rate=LEARNING_RATE))
        ).result()
    ours.save()


type Scored = tuple[np.ndarray, np.ndarray, np.ndarray]
"""A prompt, its completion, and the logprobs of the completion from the sampler."""


def sample_cases(ours: Ours, config: Bf16Config) -> dict[str, list[Scored]]:
    """Sample the cases and return their samples by the name of the case."""
    prompts = [np.array(prompt, np.int32) for prompt in random_sequences(LENGTHS, seed=7)]
    first = sample(ours, prompts, config.new, num_samples=1)
    second_turns = [np.concatenate([prompt, tokens, prompt[:20]]) for prompt, tokens, _ in first]
    return {
        "one sample of each prompt": first,
        "groups of 8": sample(ours, prompts[:2], config.new, num_samples=8),
        "a second turn": sample(ours, second_turns, config.new, num_samples=1),
    }


def sample(ours: Ours, prompts: list[np.ndarray], new: int, *, num_samples: int) -> list[Scored]:
    settings = SamplingSettings(max_tokens=new, seed=0, stop_at_eos=False)
    ops = [
        Sample(weights=ours.weights, prompt=prompt, settings=settings, num_samples=num_samples)
        for prompt in prompts
    ]
    scored: list[Scored] = []
    for op, future in [(op, ours.engine.submit(op)) for op in ops]:
        result = future.result()
        assert isinstance(result, SampleResult)
        scored += [(op.prompt, sequence.tokens, sequence.logprobs) for sequence in result.sequences]
    return scored


def logprob_differences(
    ours: Ours, prompt: np.ndarray, completion: np.ndarray, logprobs: np.ndarray
) -> np.ndarray:
    """Return the trainer's logprobs of a completion minus the sampler's."""
    tokens = np.concatenate([prompt, completion])
    datum = TrainDatum(tokens=tokens[:-1], target_tokens=tokens[1:])
    result = ours.engine.submit(
        ForwardBackward(model_id="model", data=(datum,), loss_fn=LossFn.CROSS_ENTROPY, forward_only=True)
    ).result()
    assert isinstance(result, ForwardBackwardResult)
    return result.logprobs[0][len(prompt) - 1 :] - logprobs


if __name__ == "__main__":
    sys.exit(main(chz.entrypoint(Bf16Config, argv=sys.argv[1:], allow_hyphens=True)))

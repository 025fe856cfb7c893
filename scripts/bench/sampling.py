"""How fast the engine samples: decode steps and tokens per second, prefill tokens per second, start-up and compilation.

    python scripts/bench/sampling.py                     # the quick start's shape: 32 rows, context 2048
    python scripts/bench/sampling.py hidden=512 layers=8 vocab=4096 rows=16

Prints one JSON object per measurement. A random model of the given shape is made in a temporary directory. For two cores: taskset -c 0,1.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import chz
import jax
import numpy as np

from skyrl_tx_server.config import EngineSettings
from skyrl_tx_server.engine import Engine
from skyrl_tx_server.executor import DeviceExecutor
from skyrl_tx_server.model.config import ModelConfig
from skyrl_tx_server.model.transformer import init_params
from skyrl_tx_server.model.weights import save_model
from skyrl_tx_server.ops import CreateModel, LoraSpec, Sample, SampleResult, SamplingSettings, SaveSampler


@chz.chz
class BenchConfig:
    hidden: int = 192
    layers: int = 4
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 32
    ffn: int = 384
    vocab: int = 1024
    rank: int = 16
    rows: int = 32
    block: int = 16
    context: int = 2048
    prompt: int = chz.field(default=600, doc="Tokens of each prompt")
    new_tokens: int = chz.field(default=128, doc="Tokens sampled per row")
    repeats: int = 3


def main(config: BenchConfig) -> None:
    with tempfile.TemporaryDirectory() as directory:
        started = time.perf_counter()
        engine = Engine(DeviceExecutor(make_settings(config, Path(directory))))
        engine.start()
        report("start", seconds=time.perf_counter() - started, cores=len(os.sched_getaffinity(0)), jax=jax.__version__)
        try:
            engine.submit(CreateModel(model_id="model", lora=LoraSpec(rank=config.rank))).result()
            for weights in ("a", "b"):
                engine.submit(SaveSampler(model_id="model", name=None, weights=weights)).result()
            measure(engine, config, "base", adapters=[None], temperature=1.0)
            measure(engine, config, "one adapter", adapters=["a"], temperature=1.0)
            measure(engine, config, "greedy", adapters=["a"], temperature=0.0)
            measure(engine, config, "top_p 0.9", adapters=["a"], temperature=1.0, top_p=0.9)
            measure(engine, config, "adapters mixed", adapters=["a", "b", None], temperature=1.0)
            group(engine, config)
            report("programs", **engine.stats()["program_seconds"])  # type: ignore[arg-type]
        finally:
            engine.stop()


def measure(engine: Engine, config: BenchConfig, name: str, *, adapters: list[str | None], temperature: float, top_p: float = 1.0) -> None:
    """All rows at once, each time with new prompts: prefill time is that of one-token requests, the rest is decoding."""
    fresh = itertools.count(start=1)

    def run(new_tokens: int) -> float:
        offset = next(fresh) * config.rows
        settings = SamplingSettings(max_tokens=new_tokens, temperature=temperature, top_p=top_p, seed=0, stop_at_eos=False)
        began = time.perf_counter()
        futures = [
            engine.submit(Sample(weights=adapters[row % len(adapters)], prompt=prompt_of(config, offset + row), settings=settings))
            for row in range(config.rows)
        ]
        for future in futures:
            assert isinstance(future.result(), SampleResult)
        return time.perf_counter() - began

    run(config.new_tokens)
    prefill_s = min(run(1) for _ in range(config.repeats))
    cpu = time.process_time()
    both_s = min(run(config.new_tokens) for _ in range(config.repeats))
    cpu_s = (time.process_time() - cpu) / config.repeats
    steps = config.new_tokens - 1
    report(
        name,
        decode_steps_per_s=steps / (both_s - prefill_s),
        decode_tokens_per_s=steps * config.rows / (both_s - prefill_s),
        prefill_tokens_per_s=config.rows * config.prompt / prefill_s,
        wall_s=both_s,
        cpu_s=cpu_s,
    )


def group(engine: Engine, config: BenchConfig) -> None:
    """One prompt, all rows: the prompt is prefilled once."""
    settings = SamplingSettings(max_tokens=config.new_tokens, seed=0, stop_at_eos=False)
    op = Sample(weights="a", prompt=prompt_of(config, 0), settings=settings, num_samples=config.rows)
    engine.submit(op).result()
    began = time.perf_counter()
    engine.submit(op).result()
    report("one prompt, all rows", wall_s=time.perf_counter() - began)


def prompt_of(config: BenchConfig, row: int) -> np.ndarray:
    return np.random.default_rng(row).integers(0, config.vocab, config.prompt).astype(np.int32)


def make_settings(config: BenchConfig, directory: Path) -> EngineSettings:
    model = ModelConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_layers=config.layers,
        num_heads=config.heads,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=config.context,
    )
    params = jax.jit(init_params, static_argnums=(0,))(model, jax.random.key(0))
    report("model", parameters=sum(leaf.size for leaf in jax.tree.leaves(params)))
    save_model(params, model, directory / "model")
    return EngineSettings(
        model_dir=directory / "model",
        base_model="local/bench",
        checkpoints_dir=directory / "checkpoints",
        compilation_cache_dir=None,
        dtype="auto",
        max_lora_rank=config.rank,
        max_context_length=None,
        decode_slots=config.rows,
        decode_block=config.block,
        train_tokens_per_batch=2048,
        max_models=1,
        max_snapshots=8,
    )


def report(name: str, **figures: float | str) -> None:
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in figures.items()}
    print(json.dumps({"measured": name, **rounded}), flush=True)


if __name__ == "__main__":
    main(chz.entrypoint(BenchConfig, argv=sys.argv[1:], allow_hyphens=True))

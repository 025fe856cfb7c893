"""The memory plan against the measured peak: one training sequence as long as 128K tokens on a model scaled down.

    python -m scripts.bench.memory_plan [tokens=131072]

The plan is what `dry_run=true` prints. The measured peak is the process's resident memory above what it had before the model was loaded.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import chz
import jax

from scripts.bench.compare import figure, random_sequences
from scripts.bench.sides.ours import running, settings
from scripts.bench.small_model import CONFIG, make_model
from skyrl_tx_server.executor import plan_memory


@chz.chz
class MemoryConfig:
    tokens: int = 131_072
    layers: int = 4
    hidden: int = 64


def main(config: MemoryConfig) -> None:
    model = replace(
        CONFIG,
        hidden_size=config.hidden,
        intermediate_size=3 * config.hidden,
        num_layers=config.layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        max_position_embeddings=config.tokens,
    )
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_model(Path(folder) / "model", model)
        sizes = dict.fromkeys(("max_context_length", "train_tokens_per_batch"), config.tokens) | {"decode_slots": 1, "max_models": 1}
        jax.block_until_ready(jax.numpy.zeros(1))
        before = resident_bytes()
        plan = plan_memory(settings(model_dir, Path(folder), **sizes))
        print(plan)
        with Watch() as watch, running(model_dir, recompute=False, **sizes) as ours:
            ours.train(random_sequences([config.tokens + 1], vocabulary=model.vocab_size))
        measured = watch.peak - before
    figure(f"measured peak, MiB, training {config.tokens} tokens", measured / 2**20)
    figure("planned, MiB", plan.total_bytes / 2**20)
    figure("measured / planned", measured / plan.total_bytes, at_most=1.1)
    figure("measured / planned", measured / plan.total_bytes, at_least=0.9)


class Watch:
    """The peak of this process's resident memory while the block runs, looked at every 20 ms."""

    def __init__(self) -> None:
        self.peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.02):
            self.peak = max(self.peak, resident_bytes())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    main(chz.entrypoint(MemoryConfig, argv=sys.argv[1:], allow_hyphens=True))

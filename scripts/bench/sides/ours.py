"""Run the engine of this repository for the benchmarks. Operations are submitted in this process, as the HTTP
routes submit them."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from scripts.bench.sides.call_protocol import serve
from scripts.bench.small_model import RANK
from skyrl_tx_server.config.engine_options import EngineOptions
from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.operations import (
    AdamSettings,
    CreateModel,
    ForwardBackward,
    LoraSpec,
    LossFn,
    OptimStep,
    Sample,
    SampledSequence,
    SampleResult,
    SamplingSettings,
    SaveSampler,
    TrainDatum,
)
from skyrl_tx_server.executor import memory_division
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.sampling.decode_programs import COMPILE_THREAD

LORA = LoraSpec(rank=RANK, train_unembed=False)  # no adapter on the output head, as in the compared programs


class Ours:
    """One engine with one training model, called `model`, and its latest sampler snapshot."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._num_saved = 0
        engine.submit(CreateModel(model_id="model", lora=LORA)).result()
        self.save()

    def save(self) -> None:
        """Save a sampler snapshot, which later calls of `sample` use."""
        self._num_saved += 1
        self.weights = f"snapshot-{self._num_saved}"
        self.engine.submit(SaveSampler(model_id="model", weights=self.weights)).result()

    def train(self, sequences: Sequence[Sequence[int]]) -> None:
        data = tuple(datum(sequence) for sequence in sequences)
        self.engine.submit(
            ForwardBackward(model_id="model", data=data, loss_fn=LossFn.CROSS_ENTROPY)
        ).result()

    def optim_step(self) -> None:
        self.engine.submit(OptimStep(model_id="model", adam=AdamSettings())).result()

    def sample(
        self, prompts: Sequence[Sequence[int]], max_tokens: int | Sequence[int], num_samples: int = 1
    ) -> list[list[int]]:
        """Sample all prompts concurrently and return the completions in the order of the prompts."""
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        results = self.sample_each(prompts, limits, num_samples=num_samples)
        return [sequence.tokens.tolist() for sequences in results for sequence in sequences]

    def sample_each(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: Sequence[int],
        *,
        num_samples: int = 1,
        weights: Sequence[str | None] | None = None,
    ) -> list[tuple[SampledSequence, ...]]:
        """Return the sequences of each prompt.

        `weights` has one entry per prompt: a snapshot, or None for the base model. Without `weights`, all
        prompts use the latest snapshot.
        """
        futures = [
            self.engine.submit(
                Sample(
                    weights=self.weights if weights is None else weights[index],
                    prompt=np.array(prompt, np.int32),
                    settings=SamplingSettings(max_tokens=limit, seed=index, stop_at_eos=False),
                    num_samples=num_samples,
                )
            )
            for index, (prompt, limit) in enumerate(zip(prompts, max_tokens, strict=True))
        ]
        results = [future.result() for future in futures]
        return [result.sequences for result in results if isinstance(result, SampleResult)]

    def wait_for_compilations(self) -> None:
        """Wait until no decode program is being compiled in the background."""
        for thread in threading.enumerate():
            if thread.name == COMPILE_THREAD:
                thread.join()

    def stat(self, name: str) -> int:
        value = self.engine.stats()[name]
        assert isinstance(value, int)
        return value

    def num_programs(self) -> int:
        """Return the number of compiled programs."""
        counts = self.engine.stats()["programs"]
        assert isinstance(counts, dict)
        return sum(counts.values())


def datum(sequence: Sequence[int]) -> TrainDatum:
    """Return a datum in which every token except the first is a target."""
    tokens = np.array(sequence, np.int32)
    return TrainDatum(tokens=tokens[:-1], target_tokens=tokens[1:])


@contextlib.contextmanager
def running(model_dir: Path, *, recompute: bool = False, **options: object) -> Iterator[Ours]:
    """Run an engine. `options` replace the defaults of `settings`. With `recompute`, which has an effect only
    on a CPU, the backward pass recomputes activations, as for a model whose activations do not fit into
    memory."""
    if recompute:
        memory_division.ACTIVATIONS_SHARE_OF_CPU_MEMORY = 0.0
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine(DeviceExecutor(settings(model_dir, Path(directory), **options)))
        engine.start()
        try:
            yield Ours(engine)
        finally:
            engine.stop()


def settings(model_dir: Path, directory: Path, **options: object) -> EngineOptions:
    """Return the engine options of the benchmarks. `options` replace the defaults."""
    defaults: dict[str, object] = {
        "checkpoints_dir": str(directory / "checkpoints"),
        "compilation_cache_dir": None,
        "dtype": "float32",
        "max_lora_rank": RANK,
        "max_context_length": 2048,
        "max_num_seqs": 16,
        "decode_steps_per_dispatch": 16,
        "train_tokens_per_batch": 8192,
        "max_models": 4,
        "max_loras": 8,
    }
    return EngineOptions(base_model=str(model_dir), model_alias="local/bench", **(defaults | options))  # type: ignore[arg-type]


def main(argv: Sequence[str]) -> None:
    arguments = dict(argument.split("=", 1) for argument in argv[1:])
    options = {
        name: value == "true" if value in ("true", "false") else int(value)
        for name, value in arguments.items()
    }
    with contextlib.ExitStack() as stack:

        def start() -> dict[str, Callable[..., object]]:
            ours = stack.enter_context(running(Path(argv[0]), **options))  # type: ignore[arg-type]
            return {
                "train": ours.train,
                "optim_step": ours.optim_step,
                "sample": ours.sample,
                "save": ours.save,
                "stat": ours.stat,
                "wait_for_compilations": ours.wait_for_compilations,
            }

        serve(start)


if __name__ == "__main__":
    main(sys.argv[1:])

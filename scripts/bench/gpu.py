"""Compare the engine on one GPU with the limits of the hardware: decoding, prefill, LoRA training, shared
prefixes, adapters and host time.

    . scripts/gpu_flags.sh && python -m scripts.bench.gpu model=4b
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.6 python -m scripts.bench.gpu model=8b hf=PYTHON
    taskset -c 0,1 python -m scripts.bench.gpu model=tiny rows=4 context=256 train_length=256

`hf` is a Python with torch for CUDA, which uses a part of the GPU memory. The last command needs no GPU and
tests the script.

The models have the shapes of Qwen3 and random weights in the dtype in which they run. Only calls of the
executor are timed. The limits were measured on an H200: 4.3 TB/s, and 790 TFLOP/s in bfloat16. The minimum
numbers of bytes or operations are (N parameters, T tokens, L layers, H heads, K key-value
heads, hd head dimensions):

    decode step    weights once, keys and values of each sequence    bytes = 2 N + sum of contexts * 4 L K hd
    prefill        per token                                         2 N + 2 L H hd T
    LoRA training  per token, no gradient of the base weights        4 N + 6 N_lora + 6 L H hd T
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import median

import chz
import jax
import numpy as np

from scripts.bench.compare import figure, interleave, random_sequences, report, side, timed
from scripts.bench.sides.ours import LORA, datum, settings
from scripts.bench.small_model import CONFIG, RANK, make_model
from skyrl_tx_server.engine.operations import (
    CreateModel,
    ForwardBackward,
    LossFn,
    Op,
    Sample,
    SamplingSettings,
    SaveSampler,
)
from skyrl_tx_server.engine.sample_queue import PROMPTS_PER_PREFILL
from skyrl_tx_server.engine.scheduled_work import PrefillRequest
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.model.families.table import stacks_of
from skyrl_tx_server.model.lora.adapter import adapter_size
from skyrl_tx_server.model.model_config import ModelConfig

BYTES_PER_S, FLOPS = 4.3e12, 790e12
QWEN3 = replace(
    CONFIG, vocab_size=151_936, num_heads=32, num_kv_heads=8, head_dim=128, max_position_embeddings=40_960
)
MODELS = {
    "4b": replace(QWEN3, hidden_size=2560, intermediate_size=9728, num_layers=36),
    "8b": replace(
        QWEN3, hidden_size=4096, intermediate_size=12_288, num_layers=36, tie_word_embeddings=False
    ),
    "tiny": replace(CONFIG, hidden_size=64, intermediate_size=128, num_layers=2, head_dim=16),
}
GROUP, ACTIVE = 16, 4


@chz.chz
class GpuConfig:
    model: str = chz.field(default="4b", doc="4b, 8b or tiny")
    rows: int = chz.field(default=64, doc="Sequences that are decoded together")
    context: int = chz.field(default=2048, doc="Tokens of each sequence when decoding starts")
    train_length: int = chz.field(
        default=4096, doc="Tokens of a training sequence and of a prompt to prefill"
    )
    repeats: int = 5
    hf: str | None = chz.field(
        default=None, doc="Python with torch for CUDA, transformers and peft; None: not compared"
    )


class Driver:
    """Calls an executor without the engine. The adapters have the names `adapter-0`, `adapter-1`, ..."""

    def __init__(self, executor: DeviceExecutor) -> None:
        self.executor = executor
        self._tickets, self._seeds = itertools.count(), itertools.count()
        self.run(CreateModel(model_id="model", lora=LORA))
        for number in range(ACTIVE):
            self.run(SaveSampler(model_id="model", weights=f"adapter-{number}"))

    def run(self, op: Op) -> object:
        steps = self.executor.run(op)
        while True:
            try:
                next(steps)
            except StopIteration as finished:
                return finished.value

    def train(self, length: int, count: int) -> None:
        data = tuple(datum(sequence) for sequence in self.fresh([length + 1] * count))
        self.run(ForwardBackward(model_id="model", data=data, loss_fn=LossFn.CROSS_ENTROPY))

    def fresh(self, lengths: Sequence[int]) -> list[list[int]]:
        return random_sequences(lengths, seed=next(self._seeds))

    def admit(self, prompts: Sequence[Sequence[int]], *, new: int, adapters: int = 1) -> list[int]:
        """Prefill all prompts and return their request ids."""
        waiting: list[PrefillRequest] = []
        for index, prompt in enumerate(prompts):
            chosen = SamplingSettings(max_tokens=new, seed=index, stop_at_eos=False)
            op = Sample(
                weights=f"adapter-{index % adapters}", prompt=np.array(prompt, np.int32), settings=chosen
            )
            waiting.append(PrefillRequest(request_id=next(self._tickets), op=op, first=0, count=1))
        request_ids = [admit.request_id for admit in waiting]
        while waiting:
            admissions = self.executor.sampler.prefill(waiting[:PROMPTS_PER_PREFILL])
            waiting = [
                admit for admit, admission in zip(waiting, admissions, strict=False) if admission is None
            ] + waiting[len(admissions) :]
        return request_ids

    def generate(self, prompts: Sequence[Sequence[int]], *, new: int) -> None:
        self.admit(prompts, new=new)
        while self.executor.sampler.num_running:
            self.decode()

    def decode(self, *, dispatch_next: bool = True) -> None:
        self.executor.sampler.decode()
        self.executor.sampler.poll(dispatch_next=dispatch_next)

    def dispatch_s(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        dispatches: int,
        steps: int,
        adapters: int = 1,
        dispatch_next: bool = True,
    ) -> float:
        """Return the median seconds of a dispatch of decode steps for all prompts, after compilation."""
        durations_s: list[float] = []
        for _ in range(2):
            request_ids = self.admit(prompts, new=(dispatches + 2) * steps, adapters=adapters)
            durations_s = [
                timed(partial(self.decode, dispatch_next=dispatch_next))().wall_s for _ in range(dispatches)
            ]
            for request_id in request_ids:
                self.executor.sampler.release(request_id)
        return median(durations_s)


def main(config: GpuConfig) -> None:
    model = MODELS[config.model]
    device = jax.local_devices()[0]
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    print(
        f"{device.device_kind}, jax {jax.__version__}, {config.model} in {dtype}, "
        f"{config.rows} sequences of {config.context} tokens"
    )
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_model(Path(folder) / "model", model, dtype=dtype)
        open_executor = partial(opened, model_dir, config, dtype)
        with open_executor(decode_steps_per_dispatch=16) as driver:
            training(config, model, driver)
            prefill(config, model, driver)
            dispatch_s = decoding(config, model, driver)
            against_hugging_face(config, model_dir, driver)
        del driver
        gc.collect()  # the executor is in a reference cycle, and the next one needs its memory
        with open_executor(decode_steps_per_dispatch=64) as driver:
            longer_s = driver.dispatch_s(
                driver.fresh([config.context] * config.rows), dispatches=config.repeats, steps=64
            )
        gap_s = dispatch_s - 16 * (longer_s - dispatch_s) / 48  # the time of a dispatch without its steps
        figure(
            "host time between dispatches, share of a dispatch of 16 steps", gap_s / dispatch_s, at_most=0.03
        )


@contextlib.contextmanager
def opened(
    model_dir: Path, config: GpuConfig, dtype: str, *, decode_steps_per_dispatch: int
) -> Iterator[Driver]:
    longest = max(config.context + (config.repeats + 4) * 64, config.train_length + 64)
    given = {
        "max_context_length": longest,
        "max_num_seqs": config.rows,
        "train_tokens_per_batch": config.train_length,
    }
    given |= {"warmup": False}  # otherwise other programs are compiled and run during the measurement
    with tempfile.TemporaryDirectory() as folder:
        executor = DeviceExecutor(
            settings(
                model_dir,
                Path(folder),
                dtype=dtype,
                decode_steps_per_dispatch=decode_steps_per_dispatch,
                **given,
            )
        )
        if executor.sampler.num_slots < config.rows:
            sys.exit(
                f"only {executor.sampler.num_slots} of {config.rows} sequences fit: "
                f"set rows={executor.sampler.num_slots} or a smaller context"
            )
        yield Driver(executor)


def training(config: GpuConfig, model: ModelConfig, driver: Driver) -> None:
    length, count = config.train_length, 4
    seconds = measured(partial(driver.train, length, count), config)
    per_token = 4 * matrix_size(model) + 6 * adapter_size(model, RANK) + 6 * heads_size(model) * length
    rate = count * length / seconds
    figure(f"LoRA training of {length} tokens, tokens/s", rate)
    figure(f"  share of {FLOPS / 1e12:.0f} TFLOP/s", rate * per_token / FLOPS, at_least=0.45)


def prefill(config: GpuConfig, model: ModelConfig, driver: Driver) -> None:
    length, count = config.train_length, 4
    seconds = measured(lambda: driver.admit(driver.fresh([length] * count), new=1), config)
    rate = count * length / seconds
    figure(f"prefill of {length} tokens, tokens/s", rate)
    figure(
        f"  share of {FLOPS / 1e12:.0f} TFLOP/s",
        rate * (2 * matrix_size(model) + 2 * heads_size(model) * length) / FLOPS,
        at_least=0.55,
    )
    one, many = (
        measured(lambda n=n: driver.admit(driver.fresh([48] * n), new=1), config)
        for n in (1, min(16, config.rows))
    )
    figure(f"prefill of {min(16, config.rows)} prompts of 48 tokens against one", many / one)


def decoding(config: GpuConfig, model: ModelConfig, driver: Driver) -> float:
    """Measure decoding. Returns the seconds of a dispatch of 16 steps for different prompts."""
    measure = partial(driver.dispatch_s, dispatches=config.repeats, steps=16)
    alone_s = measure(driver.fresh([config.context] * config.rows))
    itemsize = 4 if jax.local_devices()[0].platform == "cpu" else 2
    of_cache = config.rows * config.context * 2 * model.num_layers * model.num_kv_heads * model.head_dim
    floor_s = itemsize * (matrix_size(model) + of_cache) / BYTES_PER_S
    figure(f"decoding {config.rows} sequences, tokens/s", config.rows * 16 / alone_s)
    figure(f"  share of {BYTES_PER_S / 1e12:.1f} TB/s", floor_s / (alone_s / 16), at_least=0.6)
    num_shared, num_unshared = config.context * 3 // 4, config.context - config.context * 3 // 4
    groups = [
        beginning for beginning in driver.fresh([num_shared] * -(-config.rows // GROUP)) for _ in range(GROUP)
    ][: config.rows]
    together_s = measure(
        [
            beginning + end
            for beginning, end in zip(groups, driver.fresh([num_unshared] * config.rows), strict=True)
        ]
    )
    figure(
        "time without a shared prefix, relative to 3/4 of the context shared by 16",
        alone_s / together_s,
        at_least=1.5,
    )
    waiting_s = measure(driver.fresh([config.context] * config.rows), dispatch_next=False)
    figure(
        "dispatch after the host has read the results, relative to dispatch before",
        waiting_s / alone_s,
    )
    mixed_s = measure(driver.fresh([config.context] * config.rows), adapters=ACTIVE)
    figure(f"a dispatch with {ACTIVE} adapters, relative to one", mixed_s / alone_s, at_most=1.1)
    return alone_s


def against_hugging_face(config: GpuConfig, model_dir: Path, driver: Driver) -> None:
    prompt, new, count = 256, 128, min(16, config.rows)
    turns: dict[str, Callable] = {
        "ours": timed(lambda: driver.generate(driver.fresh([prompt] * count), new=new))
    }
    with contextlib.ExitStack() as stack:
        if config.hf is not None:
            peer = stack.enter_context(
                side("HF", "hugging_face", model_dir, RANK, 8, "cuda", python=config.hf)
            )
            turns["HF"] = lambda: peer.call("sample", prompts=driver.fresh([prompt] * count), max_tokens=new)
        report(
            f"generation, {count} x ({prompt} + {new})",
            interleave(turns, repeats=config.repeats),
            {"HF": 5.0},
        )


def measured(run: Callable[[], object], config: GpuConfig) -> float:
    """Return the median seconds without compilation."""
    run()
    return median(timed(run)().wall_s for _ in range(config.repeats))


def matrix_size(model: ModelConfig) -> int:
    """Return the number of weights by which each token is multiplied: matrices of the layers and the head."""
    layers = sum(
        len(stack.layers) * prod(weight.shape)
        for stack in stacks_of(model)
        for weight in stack.weights.values()
        if weight.inputs
    )
    return layers + model.vocab_size * model.hidden_size


def heads_size(model: ModelConfig) -> int:
    return model.num_layers * model.num_heads * model.head_dim


if __name__ == "__main__":
    main(chz.entrypoint(GpuConfig, argv=sys.argv[1:], allow_hyphens=True))

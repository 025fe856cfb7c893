"""Compile programs for NVIDIA H200s to machine code, on a machine without a GPU. The programs compute a
micro-batch of training, tile batches (parts of a prefill), a decode dispatch (several decode steps) and, for
one GPU, paged attention. By default, they have the shapes of Qwen3-4B.

    uv venv --python 3.12 CUDA
    uv pip install --python CUDA/bin/python -c requirements.txt '.[server,gpu]'
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 PYTHONPATH=. CUDA/bin/python -W ignore -m scripts.check_gpu
    ... -m scripts.check_gpu model=32b layers=2 fsdp_parallel=8     # a mesh of eight GPUs

The script prints for each program:

- the compilation time, and the memory that XLA allocates in addition to the inputs
- the number of places where the device waits for the host
- the number of messages between devices, and the largest message
- the operations and command buffers of the longest loop body (a layer or a decode step)
- on one GPU, the time that `scripts/simulate/compiled_costs.py` calculates for the compiled operations, and
  the operations that take the longest
- the registers and spilled bytes of each kernel in KERNELS, and for each of its waits for asynchronous
  copies, the number of groups of copies that may still be in progress

The script exits with status 0 if all these conditions hold, and with status 1 otherwise:

- No program writes by compare-and-swap.
- All operations of the longest loop body are in command buffers.
- The kernels in KERNELS do not spill registers.
- The kernels in PIPELINED load the next tile while they compute products.
- On one GPU, a decode step has at most MAX_COPIES copies.
- On one GPU, a decode step of a dense model has at most MAX_LAUNCHES launches per layer.

The script does not run the programs. `tests/server/test_gpu_kernels.py` checks the results of the kernels in
Pallas' interpreter.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path

import chz
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh
from jax.stages import Wrapped

from scripts.bench.gpu_models import MODELS
from scripts.bench.small_model import RANK
from scripts.simulate.compiled_costs import H200 as RATES
from scripts.simulate.compiled_costs import Sequences, launches_of
from skyrl_tx_server.config.engine_options import MeshShape
from skyrl_tx_server.engine.operations import MAX_STOP_TOKENS, LossFn
from skyrl_tx_server.model.attention.kv_splits import kv_splits_of
from skyrl_tx_server.model.attention.prefill_attention import PrefillTiles
from skyrl_tx_server.model.kernels.paged_kernel import paged_attention
from skyrl_tx_server.model.kv_cache import PAGES, empty_cache, page_bytes
from skyrl_tx_server.model.lora.adapter import Adapter, adapter_shardings, zero_adapter
from skyrl_tx_server.model.lora.lora_math import lora_indices
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.shapes import GPU_PREFILL, PAGE_SIZE, PREFILL_TILE, BucketShape
from skyrl_tx_server.model.transformer import Params, Remat
from skyrl_tx_server.model.weights import param_shapes
from skyrl_tx_server.sampling.decode_step import Carry, DecodeBatch, decode_steps
from skyrl_tx_server.sampling.prefill_step import TileBatch, prefill
from skyrl_tx_server.sampling.sequences import batch_settings
from skyrl_tx_server.training.losses import select_loss
from skyrl_tx_server.training.packing import dummy_batch
from skyrl_tx_server.training.train_step import forward_backward

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200"
"""
"""The description of the GPU for XLA, in the text format of GpuTargetConfigProto
(xla/stream_executor/device_description.proto). If the versions are missing, XLA records fewer operations in
command buffers."""

PIPELINED = ("paged_attention", "prefill_attention", "tree_attention_forward", "grouped_products")
ONCE_PER_LAYER = "paged_attention"
POSITIONS, STEPS = 2048, 16
WIDE_PAGE = 128
"""The number of positions per page in the separate compilation of the paged attention kernel. The pages of
decode steps have PAGE_SIZE positions."""
MAX_LAUNCHES, MAX_COPIES = 20, 3
CONTAINERS = ("Conditional", "DynamicSliceFusion", "While")
"""XLA's names of operations that contain launched operations, but are not launches."""
KERNELS = (*PIPELINED, "tree_attention_query_gradient", "tree_attention_key_gradient")


@chz.chz
class CheckConfig:
    model: str = chz.field(default="4b", doc="4b, 8b, 32b, 30b-a3b or tiny")
    layers: int | None = chz.field(default=None, doc="Number of layers; None: all layers of the model")
    fsdp_parallel: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1
    length: int = chz.field(default=4096, doc="Tokens of each training stream")
    rows: int = chz.field(default=64, doc="Sequences of the decode batch, with 2,048 positions each")
    cache_gib: int = chz.field(default=90, doc="KV cache of each GPU, in GiB")


def main(config: CheckConfig) -> None:
    with tempfile.TemporaryDirectory() as directory:
        dump = f"--xla_dump_to={directory} --xla_gpu_dump_llvmir --xla_dump_emitter_re=.*"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {dump}"  # must be set before XLA starts
        failures = compile_programs(config, Path(directory))
    for failure in failures:
        print(f"FAILED: {failure}")
    sys.exit(1 if failures else 0)


def compile_programs(config: CheckConfig, directory: Path) -> list[str]:
    """Compile all programs. Return the failed checks."""
    jax.default_backend = lambda: "gpu"  # the server selects its decode program by the backend
    failures: list[str] = []
    axes = MeshShape(fsdp=config.fsdp_parallel, tensor=config.tensor_parallel, expert=config.expert_parallel)
    devices = topologies.get_topology_desc(
        "", "cuda", target_config=H200, topology=f"1x1x{axes.devices}"
    ).devices
    mesh = Mesh(np.array(devices).reshape(*asdict(axes).values()), tuple(asdict(axes)))
    sequences = Sequences(cached=config.rows * POSITIONS, stream=config.length, context=POSITIONS // 2)
    compile_for = partial(compile_and_report, mesh, directory, failures, sequences)
    model = MODELS[config.model]
    model = replace(
        model, num_layers=config.layers or model.num_layers, mesh=mesh if axes.devices > 1 else None
    )
    params = param_shapes(model, np.dtype("bfloat16"))
    adapter, loss = with_shardings(model, zero_adapter(model, RANK)), select_loss(LossFn.CROSS_ENTROPY)
    shape = BucketShape(streams=axes.batch, length=config.length)
    batch = dummy_batch(shape)
    for remat in (Remat.ACTIVATIONS, Remat.LAYERS):
        name = f"forward_backward, {config.length} tokens, recomputing {remat}"
        compile_for(name, forward_backward, adapter, adapter, params, batch, loss, config=model, remat=remat)
    decode = compile_sampling(config, model, params, compile_for)
    if model.mesh is not None:
        return failures
    if model.experts is None and not 0 < (launches := decode.launches_per_layer()) <= MAX_LAUNCHES:
        failures.append(
            f"a decode step has {launches:.1f} launches per layer; 1 to {MAX_LAUNCHES} are expected"
        )
    if (copies := decode.counts["Copy"]) > MAX_COPIES:
        failures.append(f"a decode step has {copies} copies, more than {MAX_COPIES}")
    heads, width = (model.num_kv_heads, model.head_dim), POSITIONS // WIDE_PAGE
    keys = jax.ShapeDtypeStruct((config.rows * width, *heads, WIDE_PAGE), jnp.bfloat16)
    values = jax.ShapeDtypeStruct((config.rows * width, heads[0], WIDE_PAGE, heads[1]), jnp.bfloat16)
    queries = jax.ShapeDtypeStruct((config.rows, model.num_heads, model.head_dim), jnp.bfloat16)
    tables, lengths = np.zeros((config.rows, width), np.int32), np.zeros(config.rows, np.int32)
    splits = kv_splits_of(tables, lengths, group=model.num_heads // model.num_kv_heads, page=WIDE_PAGE)
    compile_for(
        f"paged attention with pages of {WIDE_PAGE} positions, {config.rows} sequences",
        jax.jit(partial(paged_attention, scale=model.head_dim**-0.5)),
        queries,
        keys,
        values,
        tables,
        splits,
        lengths,
    )
    return failures


def with_shardings(model: ModelConfig, adapter: Adapter) -> Adapter:
    """Return the shapes of the adapter with the shardings that the server uses."""
    shardings = adapter_shardings(model, adapter)
    if shardings is None:
        return adapter
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding),
        adapter,
        shardings,
    )


def compile_sampling(
    config: CheckConfig, model: ModelConfig, params: Params, compile_for: Callable[..., LoopBody | None]
) -> LoopBody:
    """Compile the prefill program for tile batches of both sizes, and a decode dispatch. Each sequence has
    POSITIONS positions. Return the body of the loop over decode steps."""
    width, no_copies = POSITIONS // PAGE_SIZE + 1, np.full((config.rows, 2), -1, np.int32)
    num_devices = 1 if model.mesh is None else model.mesh.size
    pages = max(
        config.rows * width, num_devices * config.cache_gib * 2**30 // page_bytes(model, np.dtype("bfloat16"))
    )
    cache = jax.eval_shape(
        partial(empty_cache, config=replace(model, mesh=None), pages=pages, dtype=np.dtype("bfloat16"))
    )
    if model.mesh is not None:
        sharding = NamedSharding(model.mesh, PAGES)
        cache = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), cache
        )
    lora_slots = jax.tree.map(
        lambda leaf: np.broadcast_to(np.zeros((), jnp.bfloat16), (4, *np.shape(leaf))),
        zero_adapter(model, RANK),
    )
    lora_slots = with_shardings(model, lora_slots)
    devices = 1 if model.mesh is None else model.mesh.shape["fsdp"]
    settings = batch_settings([None] * config.rows, model.vocab_size)

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.int32)

    for num_tiles in (GPU_PREFILL.short, GPU_PREFILL.long):
        batch = TileBatch(
            tokens=zeros(num_tiles, PREFILL_TILE),
            targets=zeros(num_tiles, PREFILL_TILE),
            tiles=PrefillTiles(
                starts=zeros(num_tiles), lengths=zeros(num_tiles), tables=zeros(num_tiles, width)
            ),
            adapters=lora_indices(zeros(num_tiles), counts=(1, 4)),
            before=no_copies,
            after=no_copies,
            want_logprobs=np.array(False),
            lasts=zeros(config.rows),
            begins=zeros(config.rows) == 0,
            sequence_adapters=lora_indices(zeros(config.rows), counts=(1, 4)),
        )
        name = f"prefill, {num_tiles} tiles of {PREFILL_TILE} tokens"
        compile_for(name, prefill, cache, params, lora_slots, batch, settings, config=model, tempered=False)
    rows = DecodeBatch(
        tokens=zeros(config.rows),
        before=Carry.empty(config.rows),
        positions=zeros(config.rows),
        remaining=zeros(config.rows),
        tables=zeros(config.rows, width),
        splits=kv_splits_of(
            zeros(config.rows, width),
            zeros(config.rows),
            group=model.num_heads // model.num_kv_heads,
            devices=devices,
        ),
        adapters=lora_indices(zeros(config.rows), counts=(1, 4)),
        stop_tokens=zeros(config.rows, MAX_STOP_TOKENS),
    )
    name = f"{STEPS} decode steps, {config.rows} sequences"
    body = compile_for(
        name,
        decode_steps,
        cache,
        params,
        lora_slots,
        rows,
        settings,
        config=model,
        steps=STEPS,
        ends=None,
        tempered=False,
        filters=False,
    )
    assert body is not None
    return body


def compile_and_report(
    mesh: Mesh,
    directory: Path,
    failures: list[str],
    sequences: Sequences,
    name: str,
    function: Wrapped,
    *arguments: object,
    **options: object,
) -> LoopBody | None:
    """Compile a program, print its figures and append failed checks to `failures`. Return its longest loop
    body, or None if the program has no loop or no command buffer."""
    before = set(directory.iterdir())
    replicated = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            np.shape(leaf), leaf.dtype, sharding=getattr(leaf, "sharding", None) or replicated
        ),
        arguments,
    )
    started = time.perf_counter()
    with use_abstract_mesh(mesh.abstract_mesh):
        program = function.trace(*shapes, **options).lower(lowering_platforms=("cuda",)).compile()
    memory, text = program.memory_analysis(), program.as_text()
    assert memory is not None and text is not None
    print(
        f"{name}: compiled in {time.perf_counter() - started:.1f} s, "
        f"{memory.temp_size_in_bytes / 2**30:.2f} GiB in addition to the inputs"
    )
    loops = [line for line in text.splitlines() if " while(" in line]
    num_host_waits = sum("known_trip_count" not in line for line in loops) + text.count(" conditional(")
    print(f"  the device waits for the host in {num_host_waits} places")
    collectives = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    messages = re.findall(rf"(\w+)\[([\d,]+)\]\S*\)? (?:{collectives})(?:-start)?\(", text)
    if messages:
        kind, longest = max(messages, key=lambda message: prod(map(int, message[1].split(","))))
        print(f"  {len(messages)} messages between devices, the longest {kind}[{longest}]")
    if mesh.size == 1:
        print(f"  {calculated_times(text, sequences)}")
    files = [path for path in directory.iterdir() if path not in before]
    # XLA writes this file only for a program with command buffers.
    lists = [path for path in files if path.name.endswith("thunk_sequence_after_thunk_passes.txt")]
    body = longest_body(lists[0]) if lists else None
    if body is not None:
        print(f"  {body}")
        if body.outside:
            failures.append(f"{name}: {body.outside} operations of a loop body are in no command buffer")
    for path in sorted(path for path in files if path.suffix == ".ptx"):
        if ".cas" in path.read_text():
            failures.append(f"{name}: {path.name} writes by compare-and-swap")
        if kernel := read_kernel(path):
            print(f"  {kernel}", flush=True)
            failures.extend(f"{name}: {kernel.name} {failure}" for failure in kernel.failures())
    return body


def calculated_times(text: str, sequences: Sequences) -> str:
    """Return a line with the calculated time of a program and of its five longest operations."""
    times: dict[str, float] = defaultdict(float)
    for launch in launches_of(text, sequences):
        times[launch.name] += RATES.time_s(launch)
    longest = sorted(times.items(), key=lambda item: -item[1])[:5]
    names = ", ".join(f"{name} {1e3 * time_s:.1f}" for name, time_s in longest)
    return f"calculated time: {1e3 * sum(times.values()):.1f} ms ({names})"


@dataclass(kw_only=True, slots=True)
class LoopBody:
    """The operations of a loop body, including those of nested loops and branches."""

    counts: Counter[str] = field(default_factory=Counter)  # number of operations of each kind
    command_buffers: int = 0
    outside: int = 0  # operations that no command buffer contains
    launches: list[str] = field(default_factory=list)  # names of launched operations, in order

    def launches_per_layer(self) -> float:
        """Return the average number of launches from one launch of ONCE_PER_LAYER to the next, or 0 if
        the loop body has fewer than two launches of ONCE_PER_LAYER."""
        layers = [index for index, kernel in enumerate(self.launches) if kernel == ONCE_PER_LAYER]
        return (layers[-1] - layers[0]) / (len(layers) - 1) if len(layers) > 1 else 0.0

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {kind}" for kind, number in self.counts.most_common())
        launches = self.launches_per_layer()
        return (
            f"longest loop body: {self.command_buffers} command buffers, {self.outside} operations outside; "
            f"{counts}" + (f"; {launches:.1f} launches per layer" if launches else "")
        )


def longest_body(path: Path) -> LoopBody | None:
    """Return the loop body with the most operations, or None if the program has no loop. The file `path` is
    XLA's list of the operations of the program."""
    bodies: list[LoopBody] = []
    open_bodies: list[tuple[int, LoopBody]] = []  # (indentation of the line `body:`, body)
    buffer_indentation = sys.maxsize  # indentation of the current command buffer; maxsize: no command buffer
    for line in path.read_text().splitlines():
        indentation = len(line) - len(line.lstrip())
        while open_bodies and indentation <= open_bodies[-1][0]:
            open_bodies.pop()
        if indentation <= buffer_indentation:
            buffer_indentation = sys.maxsize
        operation = re.match(r"\s*\d+: k(\w+)(?:\s+\[.*?\]\s*(\w*))?", line)
        if line.strip() == "body:":
            bodies.append(LoopBody())
            open_bodies.append((indentation, bodies[-1]))
        elif operation is not None and operation[1] == "CommandBuffer":
            buffer_indentation = indentation
            for _, body in open_bodies:
                body.command_buffers += 1
        elif operation is not None:
            for _, body in open_bodies:
                body.counts[operation[1]] += 1
                if operation[1] not in CONTAINERS:
                    body.launches.append(operation[2])
                body.outside += indentation <= buffer_indentation
    return max(bodies, key=lambda body: body.counts.total(), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """Figures of the machine code of a Pallas kernel."""

    name: str
    registers: int
    spilled_bytes: int
    waits: list[int]  # for each wait: the number of groups of copies that may be in progress after it

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.registers} registers, {self.spilled_bytes} bytes spilled, "
            f"groups of copies that may be in progress after each wait: {', '.join(map(str, self.waits))}"
        )

    def failures(self) -> Iterator[str]:
        if self.spilled_bytes:
            yield f"spills {self.spilled_bytes} bytes"
        if self.name in PIPELINED and not any(self.waits):
            yield "does not overlap loads with products"


def find_ptxas() -> Path:
    """Return the assembler of jax[cuda12] (nvidia/cuda_nvcc/bin) or of jax[cuda13] (nvidia/cu13/bin)."""
    directories = [Path(directory) for directory in importlib.import_module("nvidia").__path__]
    found = [path for directory in directories for path in directory.glob("*/bin/ptxas")]
    if not found:
        sys.exit("check_gpu: ptxas is missing; install jax[cuda12] or jax[cuda13] in this environment")
    return found[0]


def read_kernel(path: Path) -> Kernel | None:
    """Assemble the Pallas kernel of a PTX file with ptxas, and return its figures, or None if the file
    contains no kernel of KERNELS."""
    text = path.read_text()
    name = re.search(r"\.entry (\w+)", text)
    if name is None or name[1] not in KERNELS:
        return None
    command = [str(find_ptxas()), "-v", "-arch=sm_90a", str(path), "-o", os.devnull]
    report = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    spilled = re.findall(r"(\d+) bytes spill stores", report)
    registers = re.findall(r"Used (\d+) registers", report)
    waits = re.findall(r"cp\.async\.wait_group\s+(\d+)", text)
    return Kernel(
        name=name[1],
        registers=max(map(int, registers)),
        spilled_bytes=max(map(int, spilled)),
        waits=list(map(int, waits)),
    )


if __name__ == "__main__":
    main(chz.entrypoint(CheckConfig, argv=sys.argv[1:], allow_hyphens=True))

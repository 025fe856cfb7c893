"""Loads and saves the weights of models in Hugging Face directories and of adapters with PEFT's tensor names.

This file is long because reading and writing use one description of the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import gcd, prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from skyrl_tx_server.config.engine_options import MeshShape
from skyrl_tx_server.engine.operations import LoraSpec
from skyrl_tx_server.errors import ConfigError, UserError
from skyrl_tx_server.files.fp8 import FP8, SCALE_SUFFIX, Fp8File, block_size, dequantize
from skyrl_tx_server.files.json_file import read_json_object, write_json
from skyrl_tx_server.files.merge import EMBEDDING, HEAD
from skyrl_tx_server.files.model_source import converted_directory, is_gguf, is_path
from skyrl_tx_server.model.config_json import config_json
from skyrl_tx_server.model.families.layer_spec import ShardAxis, Stack, Weight
from skyrl_tx_server.model.families.table import stacks_of
from skyrl_tx_server.model.lora.adapter import (
    Adapter,
    adapted_modules,
    adapted_stacks,
    head_weight,
    is_trained,
    rank_of,
    zero_adapter,
)
from skyrl_tx_server.model.lora.lora_math import ArrayLike, LoraWeights
from skyrl_tx_server.model.mesh import VOCABULARY, place, to_host
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.transformer import Params

PEFT_PREFIX = "base_model.model."
KEY_VALUE_HEADS = "key-value heads"
FINAL_NORM = "model.norm.weight"
LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")
LFS_POINTER = b"version https://git-lfs"
ROWS_PER_COMPARISON = 8192
CHUNK = 1 << 20  # number of values that `_all_finite` checks at once
EXPONENT_BITS = {np.dtype(ml_dtypes.bfloat16): 0x7F80, np.dtype(np.float16): 0x7C00}
"""The bits that are all set in NaN and infinity, and in no other value."""
CONSTANTS = ("rotary_emb.inv_freq", ".k_scale", ".v_scale")
"""Tensors that do not change the result: frequencies that config.json determines, and scales of an FP8 KV
cache."""
STORED_DTYPES = ("F64", "F32", "F16", "BF16")
"""The dtypes of tensors that are stored without quantization scales, as safetensors names them."""


def resolve_model(base_model: str) -> Path:
    """Return the local directory of `base_model`.

    `base_model` is one of: a local directory; a GGUF file or the name of a packaged model, which is
    converted; a name on the Hugging Face hub, which is downloaded. Raises ConfigError if there is no such
    model, or if the conversion or the download fails.
    """
    if is_gguf(base_model):
        return converted_directory(base_model)
    path = Path(base_model).expanduser()
    if path.is_dir():
        return path
    if is_path(base_model):
        raise ConfigError(
            f"base_model={base_model}: no such directory; give a model directory, a GGUF file or a name on "
            "the Hugging Face hub"
        )
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(base_model, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many unrelated types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"base_model={base_model}: not a local directory, and the hub download failed: {reason}"
        ) from None


def load_params(model_dir: Path, config: ModelConfig, dtype: jnp.dtype | str) -> Params:
    """Load the weights of a model onto the devices in `dtype`. Fields whose `Weight` is `exact` are float32.
    Raises ConfigError as `check_weights` does, or if a value is NaN or infinite."""
    target = np.dtype(dtype)
    with ExitStack() as files:
        read_part = _part_reader(model_dir, config, files)

        def whole(name: str, shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
            return place(config, shape, spec, lambda index: read_part(name, index).astype(target))

        def stacked(stack: Stack, weight: Weight) -> jax.Array:
            shards = config.tensor_shards if weight.split is ShardAxis.OUTPUTS else 1
            shape = (len(stack.layers), *weight.stored_shape(config))
            is_transposed = config.inputs_first and weight.is_projection

            def read(index: tuple[slice, ...]) -> np.ndarray:
                sizes = [part.stop - part.start for part in index]
                out = np.empty(sizes, np.float32 if weight.exact else target)
                for position, layer in enumerate(stack.layers[index[0]]):
                    prefix = f"model.layers.{layer}."
                    if is_transposed:
                        out[position] = _read_field(read_part, prefix, weight, index[:0:-1], shards).T
                    elif not weight.experts:
                        out[position] = _read_field(read_part, prefix, weight, index[1:], shards)
                    for expert_index, expert in enumerate(range(weight.experts)[index[1]]):
                        out[position, expert_index] = _read_field(
                            read_part, prefix, weight, index[2:], shards, expert
                        )
                return out

            return place(config, shape, weight.spec, read)

        return _make_params(config, whole, stacked)


def _make_params(
    config: ModelConfig,
    whole: Callable[[str, tuple[int, ...], PartitionSpec], Any],
    stacked: Callable[[Stack, Weight], Any],
) -> Params:
    """Return the record of a model's weights. `whole(name, shape, sharding)` makes the weights that belong to
    no layer, and `stacked(stack, field)` makes a field of a stack."""
    vocabulary = (config.vocab_size, config.hidden_size)
    return Params(
        embed=whole(EMBEDDING, vocabulary, VOCABULARY),
        layers=tuple(
            {field: stacked(stack, weight) for field, weight in stack.weights.items()}
            for stack in stacks_of(config)
        ),
        final_norm=whole(FINAL_NORM, vocabulary[1:], PartitionSpec()),
        head=None if config.tie_word_embeddings else whole(HEAD, vocabulary, VOCABULARY),
    )


def check_weights(model_dir: Path, config: ModelConfig) -> None:
    """Check the files of a model without loading its weights. Raises ConfigError if the files cannot be read
    or have more layers than config.json states; if a tensor is missing, has an unsupported dtype, or has
    another shape than config.json implies; or if a layer has a tensor that the family does not use."""
    with ExitStack() as files:
        _part_reader(model_dir, config, files)


def check_divisible(config: ModelConfig, shape: MeshShape, *, max_num_seqs: int) -> None:
    """Raise ConfigError if a mesh axis divides a dimension whose size is not a multiple of the axis size, or
    if the axis `expert` has several devices and the model has no experts."""
    latent_heads = config.hidden_size if config.latent is None else config.num_heads
    divided = [
        ("tensor", shape.tensor, config.num_kv_heads, KEY_VALUE_HEADS),
        ("tensor", shape.tensor, config.intermediate_size, "columns of an MLP"),
        ("tensor", shape.tensor, config.vocab_size, "tokens of the vocabulary"),
        ("fsdp", shape.fsdp, config.hidden_size, "hidden dimensions"),
        ("fsdp", shape.fsdp, latent_heads, "heads of latent attention"),
        ("data and fsdp", shape.batch, max_num_seqs, "max_num_seqs"),
        ("expert", shape.expert, 0 if config.experts is None else config.experts.count, "experts"),
    ]
    sizes = asdict(shape)
    for stack in stacks_of(config):
        for field, weight in stack.weights.items():
            spec = weight.spec[2 if weight.experts else 1]
            output_axes = spec if isinstance(spec, tuple) else (spec,)
            axes = [axis for axis in output_axes if axis and sizes[axis] > 1]
            num_devices = prod(sizes[axis] for axis in axes)
            divided.append((" and ".join(axes), num_devices, sum(weight.widths), f"outputs of {field}"))
    for axis, num_devices, size, dimension in divided:
        if num_devices > 1 and (size == 0 or size % num_devices):
            advice = _advise_smaller_tensor_axis(config, shape) if dimension == KEY_VALUE_HEADS else ""
            raise ConfigError(
                f"{shape}: {size} {dimension} cannot be divided equally over {num_devices} devices "
                f"({axis}){advice}"
            )


def _advise_smaller_tensor_axis(config: ModelConfig, shape: MeshShape) -> str:
    """Return the advice to use a mesh whose tensor axis divides the key-value heads and which has as many
    devices as `shape`.

    Key-value heads are not replicated, because each copy of a head would have its own adapter.
    """
    tensor = gcd(config.num_kv_heads, shape.tensor)
    remaining_factor = shape.tensor // tensor
    has_experts = config.experts is not None and config.experts.count % (shape.expert * remaining_factor) == 0
    fsdp, expert = (
        (shape.fsdp, shape.expert * remaining_factor)
        if has_experts
        else (shape.fsdp * remaining_factor, shape.expert)
    )
    return f"; use {replace(shape, tensor=tensor, fsdp=fsdp, expert=expert)}"


def param_shapes(config: ModelConfig, dtype: np.dtype) -> Params:
    """Return the shapes, dtypes and shardings of the result of `load_params`, to plan memory and compile
    programs."""

    def struct(shape: tuple[int, ...], spec: PartitionSpec, leaf_dtype: np.dtype = dtype) -> Any:
        sharding = None if config.mesh is None else NamedSharding(config.mesh, spec)
        return jax.ShapeDtypeStruct(shape, leaf_dtype, sharding=sharding)

    def stacked(stack: Stack, weight: Weight) -> Any:
        leaf_dtype = np.dtype(np.float32) if weight.exact else dtype
        return struct((len(stack.layers), *weight.stored_shape(config)), weight.spec, leaf_dtype)

    return _make_params(config, lambda _, shape, spec: struct(shape, spec), stacked)


def save_model(params: Params, config: ModelConfig, model_dir: Path) -> None:
    """Write config.json and model.safetensors for Hugging Face. The caller adds the tokenizer files."""
    assert config.mesh is None, "models are saved from one device"
    model_dir.mkdir(parents=True, exist_ok=True)
    host = jax.device_get(params)
    tensors = {EMBEDDING: host.embed, FINAL_NORM: host.final_norm}
    if host.head is not None:
        tensors[HEAD] = host.head
    for stack, layers in zip(stacks_of(config), host.layers, strict=True):
        for field, weight in stack.weights.items():
            tensors |= _tensors_of(stack, weight, layers[field])
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    write_json(model_dir / "config.json", config_json(config, str(host.embed.dtype)))


def _tensors_of(stack: Stack, weight: Weight, stacked: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tensors of one field under Hugging Face's names."""
    tensors = {}
    parts = np.split(stacked, np.cumsum(weight.widths)[:-1], axis=2 if weight.experts else 1)
    for name, part in zip(weight.names, parts, strict=True):
        for layer, layer_part in zip(stack.layers, part, strict=True):
            for expert, tensor in enumerate(layer_part if weight.experts else layer_part[None]):
                tensors[f"model.layers.{layer}.{name.format(expert=expert)}"] = np.ascontiguousarray(tensor)
    return tensors


def adapter_to_arrays(adapter: Adapter, config: ModelConfig, spec: LoraSpec) -> dict[str, np.ndarray]:
    """Return PEFT's tensors of the trained parts of an adapter, without the rank padding. `adapter` may also
    hold gradients or optimizer moments."""
    arrays: dict[str, np.ndarray] = {}
    for factors in _trained_factors(to_host(adapter), config, spec):
        arrays[f"{factors.name}.lora_A.weight"] = np.ascontiguousarray(factors.a.T)
        arrays[f"{factors.name}.lora_B.weight"] = np.ascontiguousarray(factors.b.T)
    return arrays


def adapter_from_arrays(
    arrays: Mapping[str, np.ndarray], config: ModelConfig, spec: LoraSpec, max_rank: int
) -> Adapter:
    """Return the adapter that `adapter_to_arrays` converted to `arrays`, in host memory and padded to
    `max_rank`. Raises UserError if the rank of `spec` exceeds `max_rank`, or if a tensor is missing or has
    another shape."""
    if spec.rank > max_rank:
        raise UserError(
            f"the checkpoint has LoRA rank {spec.rank}, but max_lora_rank={max_rank}: start the "
            "server with a larger max_lora_rank"
        )
    adapter = zero_adapter(config, max_rank)
    for factors in _trained_factors(adapter, config, spec):
        factors.a[:] = _tensor(arrays, f"{factors.name}.lora_A.weight", factors.a.shape[::-1]).T
        factors.b[:] = _tensor(arrays, f"{factors.name}.lora_B.weight", factors.b.shape[::-1]).T
    for weight, module in adapted_modules(config, adapter):
        _in_host_memory(module.scale)[...] = np.float32(spec.alpha / rank_of(weight, config, spec.rank))
    return adapter


@dataclass(frozen=True, kw_only=True, slots=True)
class _Factors:
    """The factors of one Hugging Face module without rank padding, as views of an adapter in host memory."""

    name: str  # the module name in PEFT, without .lora_A or .lora_B
    a: np.ndarray  # [in, rank]
    b: np.ndarray  # [rank, out]


def _trained_factors(adapter: Adapter, config: ModelConfig, spec: LoraSpec) -> Iterator[_Factors]:
    for stack, modules in zip(adapted_stacks(config), adapter.layers, strict=True):
        for field, weight in stack.weights.items():
            if is_trained(spec, weight):
                for position, layer in enumerate(stack.layers):
                    rank = rank_of(weight, config, spec.rank)
                    yield from _module_factors(
                        f"model.layers.{layer}.", weight, modules[field], (position,), rank
                    )
    if is_trained(spec, head_weight(config)):
        yield from _module_factors("", head_weight(config), adapter.head, (), spec.rank)


def _module_factors(
    prefix: str, weight: Weight, module: LoraWeights, leading: tuple[int, ...], rank: int
) -> Iterator[_Factors]:
    for part, name in enumerate(weight.names):
        for expert in range(weight.experts or 1):
            index = (*leading, expert) if weight.experts else leading
            a, b = _in_host_memory(module.a)[index], _in_host_memory(module.b[part])[index]
            first = part * len(b)
            name_of_module = name.format(expert=expert).removesuffix(".weight")
            yield _Factors(
                name=f"{PEFT_PREFIX}{prefix}{name_of_module}", a=a[:, first : first + rank], b=b[:rank]
            )


def _in_host_memory(leaf: ArrayLike) -> np.ndarray:
    assert isinstance(leaf, np.ndarray), "the adapter must be in host memory"
    return leaf


def _tensor(arrays: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name not in arrays:
        raise UserError(
            f"the checkpoint has no tensor {name}: it belongs to another model or LoRA configuration"
        )
    if arrays[name].shape != shape:
        raise UserError(
            f"{name} of the checkpoint has shape {arrays[name].shape}, expected {shape}: the "
            "checkpoint belongs to another model or rank"
        )
    return arrays[name]


type _ReadPart = Callable[[str, tuple[slice, ...]], np.ndarray]
"""(name of a tensor, index) -> the indexed part."""


def _part_reader(model_dir: Path, config: ModelConfig, files: ExitStack) -> _ReadPart:
    """Open the safetensors files of a model, check that they fit `config`, and return a function that reads
    parts of tensors."""
    index = model_dir / "model.safetensors.index.json"
    single = model_dir / "model.safetensors"
    if index.exists():
        try:
            weight_map: Any = read_json_object(index)["weight_map"]
            file_of: dict[str, str] = weight_map
            paths = sorted(set(file_of.values()))
            if not paths:
                raise LookupError
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ConfigError(f"{index} has no valid weight_map: download the model again") from None
    elif single.exists():
        file_of, paths = {}, [single.name]
    else:
        raise ConfigError(
            f"{model_dir} has neither model.safetensors nor model.safetensors.index.json; give the directory "
            "of a model with safetensors files"
        )
    try:
        opened = {path: files.enter_context(_opened(model_dir / path)) for path in paths}
    except OSError as error:
        raise ConfigError(
            f"{model_dir}: cannot read the weights: {error}; download the model again"
        ) from None

    fp8_files = {path: Fp8File(model_dir / path) for path in paths}
    config_file = model_dir / "config.json"
    raw: dict[str, Any] = read_json_object(config_file) if config_file.exists() else {}
    block = block_size(raw, config_file)
    names = file_of or opened[paths[0]].keys()
    _refuse_further_layers(config_file, raw, names)
    shapes = dict(_tensor_shapes(config))
    if config.tie_word_embeddings and HEAD in names:
        shapes[HEAD] = shapes[EMBEDDING]

    def check(name: str, shape: tuple[int, ...]) -> None:
        try:
            tensor = opened[file_of.get(name, paths[0])].get_slice(name)
        except SafetensorError:
            raise ConfigError(
                f"{model_dir}: the weights have no tensor {name}; use the config.json that belongs to these "
                "weights"
            ) from None
        if tuple(tensor.get_shape()) != shape:
            raise ConfigError(
                f"{model_dir}: {name} has shape {tuple(tensor.get_shape())}, but config.json implies "
                f"{shape}; use the config.json that belongs to these weights"
            )
        if tensor.get_dtype() == FP8 and block is not None and len(shape) == 2:
            check(name + SCALE_SUFFIX, (-(-shape[0] // block[0]), -(-shape[1] // block[1])))
        elif tensor.get_dtype() not in STORED_DTYPES:
            raise ConfigError(
                f"{model_dir}: {name} has dtype {tensor.get_dtype()}, supported are "
                f"{', '.join(STORED_DTYPES)}; convert quantized weights to bfloat16"
            )

    def read_part(name: str, part: tuple[slice, ...]) -> np.ndarray:
        file = file_of.get(name, paths[0])
        tensor = opened[file].get_slice(name)
        if tensor.get_dtype() == FP8 and block is not None:
            scales = read_part(name + SCALE_SUFFIX, (slice(None), slice(None)))
            first = (part[0].start or 0, part[1].start or 0)
            values = fp8_files[file].read(name)[part]
            values = dequantize(values, scales.astype(np.float32), block, first=first)
        else:
            values = tensor[part]
        if not _all_finite(values):
            raise ConfigError(
                f"{model_dir}: {name} contains NaN or infinity; download the model again, or use another one"
            )
        return values

    for name, shape in shapes.items():
        check(name, shape)
    _refuse_unused_tensors(model_dir, config, names, shapes)
    if HEAD in names and config.tie_word_embeddings:
        _refuse_another_head(config_file, read_part, config.vocab_size)
    return read_part


def _tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of each tensor that `load_params` reads."""
    vocabulary = (config.vocab_size, config.hidden_size)
    yield EMBEDDING, vocabulary
    yield FINAL_NORM, vocabulary[1:]
    if not config.tie_word_embeddings:
        yield HEAD, vocabulary
    for stack in stacks_of(config):
        for weight in stack.weights.values():
            for layer, expert in product(stack.layers, range(weight.experts or 1)):
                for name, width in zip(weight.names, weight.widths, strict=True):
                    shape = (width, weight.inputs) if weight.inputs else (width,)
                    yield f"model.layers.{layer}.{name.format(expert=expert)}", shape


def _all_finite(values: np.ndarray) -> bool:
    flat = values.reshape(-1)
    chunks = (flat[first : first + CHUNK] for first in range(0, flat.size, CHUNK))
    exponent = EXPONENT_BITS.get(values.dtype)
    if exponent is None:
        return all(np.isfinite(chunk).all() for chunk in chunks)
    # `np.isfinite` of 16-bit values takes six times as long
    return all((chunk.view(np.uint16) & exponent).max() < exponent for chunk in chunks)


def _opened(path: Path) -> safe_open:
    """Open a safetensors file. Raises OSError with the name of the file if it is missing or damaged."""
    try:
        return safe_open(path, framework="np")
    except SafetensorError as error:
        with path.open("rb") as stream:
            is_pointer = stream.read(len(LFS_POINTER)) == LFS_POINTER
        reason = "the file is a pointer of Git LFS (`git lfs pull` replaces it)" if is_pointer else error
        raise OSError(f"{path.name}: {reason}") from None


def _refuse_another_head(config_file: Path, read_part: _ReadPart, num_rows: int) -> None:
    """Raise ConfigError if the files of a model with tied embeddings have a head that differs from the
    embedding. transformers 5 uses such a head, and transformers 4 and vLLM use the embedding."""
    for first in range(0, num_rows, ROWS_PER_COMPARISON):
        rows = (slice(first, min(first + ROWS_PER_COMPARISON, num_rows)), slice(None))
        embedding, head = (read_part(name, rows).astype(np.float32) for name in (EMBEDDING, HEAD))
        if not np.array_equal(embedding, head):
            raise ConfigError(
                f"{config_file}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}; set "
                f"tie_word_embeddings to false to use {HEAD}, or remove this tensor to use the embedding"
            )


def _refuse_further_layers(config_file: Path, config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ConfigError if the weights have more layers than config.json states. Layers for multi-token
    prediction, which follow these layers, are allowed."""
    num_layers = config.get("num_hidden_layers")
    if not isinstance(num_layers, int):
        return
    num_allowed = num_layers + (config.get("num_nextn_predict_layers") or 0)
    stored = max((int(match[1]) + 1 for name in names if (match := LAYER_NAME.match(name))), default=0)
    if stored > num_allowed:
        raise ConfigError(
            f"{config_file}: num_hidden_layers={num_layers}, but the weights have {stored} layers; use the "
            "config.json that belongs to these weights"
        )


def _refuse_unused_tensors(
    model_dir: Path, config: ModelConfig, names: Iterable[str], used: Container[str]
) -> None:
    """Raise ConfigError if a layer has a tensor that the family does not use, such as a bias."""
    for name in names:
        match = LAYER_NAME.match(name)
        is_used = name in used or name.removesuffix(SCALE_SUFFIX) in used or name.endswith(CONSTANTS)
        if match is not None and int(match[1]) < config.num_layers and not is_used:
            raise ConfigError(
                f"{model_dir}: models with model_type={config.model_type!r} have no tensor {name}; use the "
                "config.json that belongs to these weights"
            )


def _read_field(
    read_part: _ReadPart, prefix: str, weight: Weight, index: tuple[slice, ...], shards: int, expert: int = 0
) -> np.ndarray:
    """Return one part of a field of one layer and expert. `index` selects the part from the field [out, in]
    or [out]. The outputs of the field have the order that `Weight` describes for a `tensor` axis of `shards`
    devices."""
    outputs, *inputs = index
    parts = [
        read_part(prefix + name.format(expert=expert), (part, *inputs))
        for name, part in _outputs(weight, outputs, shards)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _outputs(weight: Weight, outputs: slice, shards: int) -> Iterator[tuple[str, slice]]:
    """Find the tensor rows that the slice `outputs` of a field consists of. Yield them in their order as
    (tensor name, selected rows)."""
    start = 0
    for shard in range(shards):
        for name, width in zip(weight.names, weight.widths, strict=True):
            size = width // shards
            first, end = max(outputs.start - start, 0), min(outputs.stop - start, size)
            if first < end:
                yield name, slice(shard * size + first, shard * size + end)
            start += size

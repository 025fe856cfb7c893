"""Weights between disk and the device: Hugging Face directories for models, PEFT names for adapters.

This file is long because reading and writing use one description of the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from skyrl_tx_server.config.engine_options import MeshShape
from skyrl_tx_server.engine.operations import LoraSpec
from skyrl_tx_server.errors import ConfigError, UserError
from skyrl_tx_server.files.json_file import read_json_object
from skyrl_tx_server.files.model_source import converted_directory, is_gguf
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
STORED_DTYPES = ("F64", "F32", "F16", "BF16")
"""What safetensors calls numbers that are weights themselves: 8-bit ones want scales, which nobody here
multiplies with."""


def resolve_model(base_model: str) -> Path:
    """A local directory for `base_model`: itself, a converted GGUF file, or a download from the hub. Raises
    ConfigError in one line when there is none."""
    if is_gguf(base_model):
        return converted_directory(base_model)
    path = Path(base_model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or base_model.startswith((".", "~")) or base_model.count("/") > 1:
        raise ConfigError(f"base_model={base_model}: no such directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(base_model, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])
        )
    except Exception as error:  # the hub client raises a dozen unrelated types; all mean the same to the user
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"base_model={base_model}: not a local directory, and the hub download failed: {reason}"
        ) from None


def load_params(model_dir: Path, config: ModelConfig, dtype: jnp.dtype | str) -> Params:
    """Read a model's safetensors to where the devices want them, in `dtype`. ConfigError when a tensor is
    missing or misshapen."""
    target = np.dtype(dtype)
    with ExitStack() as files:
        part_of = _reader(model_dir, files)

        def whole(name: str, shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
            return place(config, shape, spec, lambda index: part_of(name, shape, index).astype(target))

        def stacked(stack: Stack, weight: Weight) -> jax.Array:
            shards = config.tensor_shards if weight.split is ShardAxis.OUTPUTS else 1

            def read(index: tuple[slice, ...]) -> np.ndarray:
                out = np.empty(
                    [part.stop - part.start for part in index], np.float32 if weight.exact else target
                )
                for at, number in enumerate(stack.layers[index[0]]):
                    if not weight.experts:
                        out[at] = _read_field(part_of, f"model.layers.{number}.", weight, index[1:], shards)
                    else:
                        for inner, expert in enumerate(range(weight.experts)[index[1]]):
                            out[at, inner] = _read_field(
                                part_of, f"model.layers.{number}.", weight, index[2:], shards, expert
                            )
                return out

            return place(config, (len(stack.layers), *weight.shape), weight.spec, read)

        vocabulary = (config.vocab_size, config.hidden_size)
        return Params(
            embed=whole("model.embed_tokens.weight", vocabulary, VOCABULARY),
            layers=tuple(
                {field: stacked(stack, weight) for field, weight in stack.weights.items()}
                for stack in stacks_of(config)
            ),
            final_norm=whole("model.norm.weight", vocabulary[1:], PartitionSpec()),
            head=None if config.tie_word_embeddings else whole("lm_head.weight", vocabulary, VOCABULARY),
        )


def check_divisible(config: ModelConfig, shape: MeshShape, *, max_num_seqs: int) -> None:
    """ConfigError in one line where an axis does not divide what it should."""
    divided = [
        ("tensor", shape.tensor, config.num_kv_heads, "key-value heads"),
        ("tensor", shape.tensor, config.intermediate_size, "columns of a perceptron"),
        ("tensor", shape.tensor, config.vocab_size, "tokens of the vocabulary"),
        ("fsdp", shape.fsdp, config.hidden_size, "hidden dimensions"),
        (
            "fsdp",
            shape.fsdp,
            config.hidden_size if config.latent is None else config.num_heads,
            "heads of a latent attention",
        ),
        ("data and fsdp", shape.batch, max_num_seqs, "max_num_seqs"),
        ("expert", shape.expert, 0 if config.experts is None else config.experts.count, "experts"),
    ]
    sizes = asdict(shape)
    for stack in stacks_of(config):
        for field, weight in stack.weights.items():
            outputs = weight.spec[2 if weight.experts else 1]
            axes = [
                axis
                for axis in (outputs if isinstance(outputs, tuple) else (outputs,))
                if axis and sizes[axis] > 1
            ]
            divided.append(
                (
                    " and ".join(axes),
                    prod(sizes[axis] for axis in axes),
                    sum(weight.widths),
                    f"outputs of {field}",
                )
            )
    for axis, size, whole, what in divided:
        if size > 1 and (whole == 0 or whole % size):
            raise ConfigError(f"{shape}: {whole} {what} do not divide over {size} devices ({axis})")


def param_shapes(config: ModelConfig, dtype: np.dtype) -> Params:
    """What `load_params` returns as shapes that lie where the weights will: enough to plan memory and to
    compile programs with."""

    def at(shape: tuple[int, ...], spec: PartitionSpec, kept: np.dtype = dtype) -> Any:
        return jax.ShapeDtypeStruct(
            shape, kept, sharding=None if config.mesh is None else NamedSharding(config.mesh, spec)
        )

    def stacked(stack: Stack, weight: Weight) -> Any:
        return at(
            (len(stack.layers), *weight.shape), weight.spec, np.dtype(np.float32) if weight.exact else dtype
        )

    vocabulary = (config.vocab_size, config.hidden_size)
    return Params(
        embed=at(vocabulary, VOCABULARY),
        layers=tuple(
            {field: stacked(stack, weight) for field, weight in stack.weights.items()}
            for stack in stacks_of(config)
        ),
        final_norm=at(vocabulary[1:], PartitionSpec()),
        head=None if config.tie_word_embeddings else at(vocabulary, VOCABULARY),
    )


def save_model(params: Params, config: ModelConfig, model_dir: Path) -> None:
    """Write config.json and model.safetensors as Hugging Face reads them (one file; tokenizer files are the
    caller's)."""
    assert config.mesh is None, "a model is made on one device"
    model_dir.mkdir(parents=True, exist_ok=True)
    host = jax.device_get(params)
    tensors = {"model.embed_tokens.weight": host.embed, "model.norm.weight": host.final_norm}
    if host.head is not None:
        tensors["lm_head.weight"] = host.head
    for stack, layers in zip(stacks_of(config), host.layers, strict=True):
        for field, weight in stack.weights.items():
            tensors |= _tensors_of(stack, weight, layers[field])
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    (model_dir / "config.json").write_text(
        json.dumps(config_json(config, str(host.embed.dtype)), indent=2) + "\n", encoding="utf-8"
    )


def _tensors_of(stack: Stack, weight: Weight, stacked: np.ndarray) -> dict[str, np.ndarray]:
    """One field's tensors under Hugging Face's names."""
    tensors = {}
    outputs = 2 if weight.experts else 1
    for name, part in zip(
        weight.names, np.split(stacked, np.cumsum(weight.widths)[:-1], axis=outputs), strict=True
    ):
        for number, of_layer in zip(stack.layers, part, strict=True):
            for expert, tensor in enumerate(of_layer if weight.experts else of_layer[None]):
                tensors[f"model.layers.{number}.{name.format(expert=expert)}"] = np.ascontiguousarray(tensor)
    return tensors


def adapter_to_arrays(adapter: Adapter, config: ModelConfig, spec: LoraSpec) -> dict[str, np.ndarray]:
    """PEFT's tensors of an adapter: only trained parts, without the rank padding. `adapter` may also be a
    gradient or a moment."""
    host = to_host(adapter)
    arrays: dict[str, np.ndarray] = {}
    for piece in _pieces(host, config, spec):
        padded = piece.b.shape[-2]
        columns = slice(piece.part * padded, piece.part * padded + piece.rank)
        arrays[f"{piece.name}.lora_A.weight"] = np.ascontiguousarray(piece.a[:, columns].T)
        arrays[f"{piece.name}.lora_B.weight"] = np.ascontiguousarray(piece.b[: piece.rank].T)
    return arrays


def adapter_from_arrays(
    arrays: Mapping[str, np.ndarray], config: ModelConfig, spec: LoraSpec, max_rank: int
) -> Adapter:
    """The inverse of `adapter_to_arrays`, padded to `max_rank`, in host memory. Raises UserError when a
    tensor is missing or misshapen."""
    if spec.rank > max_rank:
        raise UserError(
            f"the checkpoint's LoRA rank {spec.rank} is above this server's max_lora_rank={max_rank}: start it with a larger one"
        )
    adapter = zero_adapter(config, max_rank)
    for piece in _pieces(adapter, config, spec):
        inputs, (padded, outputs) = piece.a.shape[0], piece.b.shape
        columns = slice(piece.part * padded, piece.part * padded + piece.rank)
        piece.a[:, columns] = _tensor(arrays, f"{piece.name}.lora_A.weight", (piece.rank, inputs)).T
        piece.b[: piece.rank] = _tensor(arrays, f"{piece.name}.lora_B.weight", (outputs, piece.rank)).T
    for weight, module in adapted_modules(config, adapter):
        _in_host_memory(module.scale)[...] = np.float32(spec.alpha / rank_of(weight, config, spec.rank))
    return adapter


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """One Hugging Face module's factors, as views into an adapter in host memory."""

    name: str  # PEFT's
    a: np.ndarray  # [in, parts * padded rank]; the module's are the `part`th columns
    b: np.ndarray  # [padded rank, out]
    part: int
    rank: int


def _pieces(adapter: Adapter, config: ModelConfig, spec: LoraSpec) -> Iterator[_Piece]:
    """Every trained module."""
    for stack, modules in zip(adapted_stacks(config), adapter.layers, strict=True):
        for field, weight in stack.weights.items():
            if is_trained(spec, weight):
                for at, number in enumerate(stack.layers):
                    yield from _module_pieces(
                        f"model.layers.{number}.", weight, modules[field], (at,), config, spec
                    )
    if is_trained(spec, head_weight(config)):
        yield from _module_pieces("", head_weight(config), adapter.head, (), config, spec)


def _module_pieces(
    prefix: str, weight: Weight, module: LoraWeights, at: tuple[int, ...], config: ModelConfig, spec: LoraSpec
) -> Iterator[_Piece]:
    for part, name in enumerate(weight.names):
        for expert in range(weight.experts or 1):
            where = (*at, expert) if weight.experts else at
            yield _Piece(
                name=f"{PEFT_PREFIX}{prefix}{name.format(expert=expert).removesuffix('.weight')}",
                a=_in_host_memory(module.a)[where],
                b=_in_host_memory(module.b[part])[where],
                part=part,
                rank=rank_of(weight, config, spec.rank),
            )


def _in_host_memory(leaf: ArrayLike) -> np.ndarray:
    assert isinstance(leaf, np.ndarray), "only an adapter in host memory is read and filled in place"
    return leaf


def _tensor(arrays: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name not in arrays:
        raise UserError(
            f"the checkpoint has no tensor {name}: it belongs to another model or LoRA configuration"
        )
    if arrays[name].shape != shape:
        raise UserError(
            f"the checkpoint's {name} has shape {arrays[name].shape}, expected {shape}: it belongs to another model or rank"
        )
    return arrays[name]


type _PartOf = Callable[[str, tuple[int, ...], tuple[slice, ...]], np.ndarray]
"""(a tensor's name, the shape it must have, the part to read) -> that part."""


def _reader(model_dir: Path, files: ExitStack) -> _PartOf:
    """Reads from one file or the shards of an index."""
    index = model_dir / "model.safetensors.index.json"
    single = model_dir / "model.safetensors"
    if index.exists():
        try:
            weight_map: Any = read_json_object(index)["weight_map"]
            where: dict[str, str] = weight_map
            paths = sorted(set(where.values()))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ConfigError(
                f"{index} is broken or cut short: it holds no weight_map; fetch it again"
            ) from None
    elif single.exists():
        where, paths = {}, [single.name]
    else:
        raise ConfigError(f"{model_dir}: neither model.safetensors nor model.safetensors.index.json found")
    try:
        opened = {path: files.enter_context(safe_open(model_dir / path, framework="np")) for path in paths}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{model_dir}: cannot read the weights: {error}") from None

    def part_of(name: str, shape: tuple[int, ...], part: tuple[slice, ...]) -> np.ndarray:
        try:
            tensor = opened[where.get(name, paths[0])].get_slice(name)
        except SafetensorError:
            raise ConfigError(f"{model_dir}: the weights hold no tensor {name}") from None
        if tuple(tensor.get_shape()) != shape:
            raise ConfigError(
                f"{model_dir}: {name} has shape {tuple(tensor.get_shape())}, config.json implies {shape}"
            )
        if tensor.get_dtype() not in STORED_DTYPES:
            raise ConfigError(
                f"{model_dir}: {name} is stored as {tensor.get_dtype()}: only {', '.join(STORED_DTYPES)} are weights as they stand; "
                "quantised ones must be converted to bfloat16 first"
            )
        return tensor[part]

    return part_of


def _read_field(
    part_of: _PartOf, prefix: str, weight: Weight, index: tuple[slice, ...], shards: int, expert: int = 0
) -> np.ndarray:
    """A part of one layer's (and expert's) field, [out, in] or [out], in the arrangement that `Weight`
    describes."""
    outputs, *inputs = index
    parts = []
    for name, width, own in _outputs(weight, outputs, shards):
        shape = (width, weight.inputs) if weight.inputs else (width,)
        parts.append(part_of(prefix + name.format(expert=expert), shape, (own, *inputs)))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _outputs(weight: Weight, outputs: slice, shards: int) -> Iterator[tuple[str, int, slice]]:
    """(name, its width, which of its outputs) of the tensors that make up `outputs` of a field, in order."""
    begins = 0
    for shard in range(shards):
        for name, width in zip(weight.names, weight.widths, strict=True):
            piece = width // shards
            first, last = max(outputs.start - begins, 0), min(outputs.stop - begins, piece)
            if first < last:
                yield name, width, slice(shard * piece + first, shard * piece + last)
            begins += piece

"""Converts a GGUF file to a Hugging Face model directory in a cache. The server then loads this directory.

Floating-point tensors keep their dtype. Quantised tensors are dequantised to float32.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import dequantize
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.numpy import save_file

from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.files.gguf_config import gguf_config
from skyrl_tx_server.files.gguf_file import GgufFile, GgufTensor, read_gguf
from skyrl_tx_server.files.gguf_tokenizer import write_tokenizer
from skyrl_tx_server.files.json_file import write_json

logger = logging.getLogger(__name__)

CACHE = "~/.cache/skyrl_tx_server/gguf"
VERSION = 4  # the version of the conversion; a new number makes the server convert every file again
SHARD_BYTES = 1 << 30  # the maximum size of a shard; a larger tensor is a shard of its own
SAMPLES, SAMPLE_BYTES = 64, 4096  # number and size of the parts of a file that `_key` reads

_FLOATS = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_ROPE_FREQUENCIES = "rope_freqs.weight"  # Llama 3.1's scaling, see gguf_config


def convert_gguf(path: Path) -> Path:
    """Return the Hugging Face directory of a GGUF file, converting the file if the cache has none.

    Raises ConfigError if the file is damaged, if its architecture, its tokenizer or the type of one of its
    tensors is not supported, or if the converted weights do not fit on the disk. No weights are written
    before these checks have passed.
    """
    file = read_gguf(path)
    plan = _plan(file)
    cache = Path(CACHE).expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / f"{path.stem}-{_key(file)}"
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may convert the same file
        if target.is_dir():
            return target
        temporary = target.with_name(f"{target.name}.incomplete")
        shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
        free = shutil.disk_usage(cache).free
        if plan.num_bytes > free:
            raise ConfigError(
                f"{path}: its converted weights need {plan.num_bytes / 2**30:.1f} GiB and {cache} has "
                f"{free / 2**30:.1f} GiB free; free some space there"
            )
        logger.info("converting %s to %s", path, target)
        try:
            temporary.mkdir()
            write_tokenizer(file, temporary)  # first, because it raises an error for an unsupported tokenizer
            _write_weights(file, plan, temporary)
            write_json(temporary / "config.json", plan.config)
            write_json(temporary / "generation_config.json", {"eos_token_id": plan.config["eos_token_id"]})
            temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """The part of a GGUF tensor that becomes one Hugging Face tensor."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    first_row: int = 0  # the first row of an expert in the stacked tensor; 0 for other tensors
    paired_heads: int = 0
    """Number of heads, if the rows of a q or k matrix are in the order of the architecture `llama`
    (`_stored_order`). 0: the rows are in Hugging Face's order."""

    @property
    def num_rows(self) -> int:
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def dtype(self) -> np.dtype:
        return _FLOATS.get(self.tensor.kind, np.dtype("<f4"))

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize

    def values(self, rows: np.ndarray) -> np.ndarray:
        """Return the Hugging Face tensor in `dtype`. `rows` [rows, bytes per row] are the stored bytes of the
        whole GGUF tensor."""
        stored = rows[self.first_row : self.first_row + self.num_rows]
        if self.paired_heads:
            stored = stored[_stored_order(len(stored), self.paired_heads)]
        if self.tensor.kind in _FLOATS:
            values = np.ascontiguousarray(stored).view(self.dtype)
        else:
            values = dequantize(np.ascontiguousarray(stored), self.tensor.kind)
        return values.reshape(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    config: dict[str, Any]
    sources: dict[str, _Source]  # by the Hugging Face name

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources.values())


def _plan(file: GgufFile) -> _Plan:
    """Return config.json and the source of every tensor. Raise ConfigError if the tensors in the header are
    not those of the architecture, or if the type of a tensor is not supported."""
    config = gguf_config(file)
    sources: dict[str, _Source] = {}
    used = {_ROPE_FREQUENCIES}
    for name, stored, shape in _tensors(config):
        tensor = file.tensors.get(stored)
        if tensor is None:
            raise ConfigError(f"{file.path}: the file has no tensor {stored}")
        _check_kind(file, tensor)
        expected = shape if not isinstance(name, list) else (len(name), *shape)
        if tensor.shape != expected:
            raise ConfigError(
                f"{file.path}: {stored} has shape {tensor.shape}, but the metadata implies {expected}"
            )
        used.add(stored)
        paired_heads = 0
        if config["model_type"] == "llama" and ".attn_q." in stored:
            paired_heads = config["num_attention_heads"]
        elif config["model_type"] == "llama" and ".attn_k." in stored:
            paired_heads = config["num_key_value_heads"]
        for number, expert in enumerate(name if isinstance(name, list) else [name]):
            sources[expert] = _Source(
                tensor=tensor, shape=shape, first_row=number * shape[0], paired_heads=paired_heads
            )
    if unused := sorted(file.tensors.keys() - used):
        raise ConfigError(
            f"{file.path}: {unused[0][:80]} is not a tensor of {config['model_type']} models, so this "
            "variant is not supported"
        )
    dtype = sources["model.embed_tokens.weight"].dtype  # SkyRL refuses a config.json without a dtype
    return _Plan(config=config | {"dtype": str(dtype)}, sources=sources)


def _tensors(config: Mapping[str, Any]) -> Iterator[tuple[str | list[str], str, tuple[int, ...]]]:
    """Yield the Hugging Face name, the GGUF name and the Hugging Face shape of every tensor.

    A GGUF file stacks the matrices of all experts of a layer in one tensor. For such a tensor, the first item
    is a list with the Hugging Face name of each expert's matrix, and the shape is that of one matrix.
    """
    hidden, width = config["hidden_size"], config["head_dim"]
    q_width, kv_width = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    yield "model.embed_tokens.weight", "token_embd.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", "output_norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", "output.weight", (config["vocab_size"], hidden)
    layer: dict[str, tuple[str, tuple[int, ...]]] = {
        "input_layernorm.weight": ("attn_norm.weight", (hidden,)),
        "post_attention_layernorm.weight": ("ffn_norm.weight", (hidden,)),
        "self_attn.q_proj.weight": ("attn_q.weight", (q_width, hidden)),
        "self_attn.k_proj.weight": ("attn_k.weight", (kv_width, hidden)),
        "self_attn.v_proj.weight": ("attn_v.weight", (kv_width, hidden)),
        "self_attn.o_proj.weight": ("attn_output.weight", (hidden, q_width)),
    }
    if config["model_type"] == "qwen2":
        for part, outputs in (("q", q_width), ("k", kv_width), ("v", kv_width)):
            layer[f"self_attn.{part}_proj.bias"] = (f"attn_{part}.bias", (outputs,))
    if config["model_type"] in ("qwen3", "qwen3_moe"):
        for part in "qk":
            layer[f"self_attn.{part}_norm.weight"] = (f"attn_{part}_norm.weight", (width,))
    num_experts = config.get("num_experts", 0)
    inner = config["moe_intermediate_size"] if num_experts else config["intermediate_size"]
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    if num_experts:
        layer["mlp.gate.weight"] = ("ffn_gate_inp.weight", (num_experts, hidden))
    else:
        layer |= {f"mlp.{part}_proj.weight": (f"ffn_{part}.weight", shape) for part, shape in mlp.items()}
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}."
        for name, (stored, shape) in layer.items():
            yield prefix + name, f"blk.{number}.{stored}", shape
        for part, shape in mlp.items() if num_experts else ():
            names = [f"{prefix}mlp.experts.{expert}.{part}_proj.weight" for expert in range(num_experts)]
            yield names, f"blk.{number}.ffn_{part}_exps.weight", shape


def _check_kind(file: GgufFile, tensor: GgufTensor) -> None:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor.kind][1]), np.uint8), tensor.kind)
    except NotImplementedError:
        raise ConfigError(
            f"{file.path}: tensor {tensor.name} has type {tensor.kind.name}, which cannot be dequantised; "
            "convert the file to BF16 or Q8_0"
        ) from None


def _stored_order(num_rows: int, heads: int) -> np.ndarray:
    """Return the index of the stored row for each row of q or k in Hugging Face's order: [num_rows].

    RoPE rotates two of the `width` rows of a head together: rows 2 i and 2 i + 1 in GGUF files of the
    architecture `llama`, and rows i and i + width / 2 in Hugging Face's order.
    """
    return np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _write_weights(file: GgufFile, plan: _Plan, directory: Path) -> None:
    weight_map: dict[str, str] = {}
    for number, names in enumerate(_shards(plan.sources), 1):
        shard = f"model-{number:05}.safetensors"
        values = {name: plan.sources[name].values(file.rows(plan.sources[name].tensor)) for name in names}
        save_file(values, directory / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, shard)
    write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": plan.num_bytes}, "weight_map": weight_map},
    )


def _shards(sources: Mapping[str, _Source]) -> Iterator[list[str]]:
    names: list[str] = []
    num_bytes = 0
    for name, source in sources.items():
        if names and num_bytes + source.num_bytes > SHARD_BYTES:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += source.num_bytes
    yield names


def _key(file: GgufFile) -> str:
    """Return a digest of VERSION, of the GGUF file, and of a tokenizer.json in the same directory. For the
    GGUF file, the digest covers the size, the modification time, the header and SAMPLES parts of the
    content."""
    stat = file.path.stat()
    digest = hashlib.sha256(f"{VERSION} {stat.st_size} {stat.st_mtime_ns}".encode())
    with file.path.open("rb") as stream:
        digest.update(stream.read(file.header_size))
        for sample in range(SAMPLES):
            stream.seek(max(0, (stat.st_size - SAMPLE_BYTES) * sample // (SAMPLES - 1)))
            digest.update(stream.read(SAMPLE_BYTES))
    tokenizer_file = file.path.with_name("tokenizer.json")
    digest.update(tokenizer_file.read_bytes() if tokenizer_file.is_file() else b"")
    return digest.hexdigest()[:16]

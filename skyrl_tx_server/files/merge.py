"""Merges an adapter into a base model, one file at a time, so that the model may be larger than memory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from skyrl_tx_server.errors import UserError
from skyrl_tx_server.files.base_model import BaseTensors
from skyrl_tx_server.files.fp8 import QUANTIZATION
from skyrl_tx_server.files.json_file import read_json_object, write_json

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROUTER_BIAS = ".e_score_correction_bias"
"""The router of DeepSeek-V3 adds these biases to the scores of the experts. They keep their dtype, because
bfloat16 would round different biases to the same value."""


def write_merged(
    base: BaseTensors, deltas: Mapping[str, np.ndarray], output: Path, dtype: str | None
) -> None:
    """Write `base` + `deltas` into the directory `output`. The addition is in float32. `dtype=None` keeps
    the dtype of each tensor, except that FP8 weights become bfloat16.

    A head that is tied to the embedding and has a delta is untied: config.json gets
    `tie_word_embeddings: false`, and `lm_head.weight` becomes the embedding + the delta.
    """
    is_tied = HEAD not in base.files or read_json_object(base.directory / "config.json").get(
        "tie_word_embeddings"
    )
    unties = HEAD in deltas and is_tied
    unknown = sorted(name for name in deltas if name not in base.files and not (unties and name == HEAD))
    if unknown:
        raise UserError(f"{base.directory} has no tensor {unknown[0]}: the adapter belongs to another model")
    files = sorted(set(base.files.values()))
    total_bytes = 0
    for file in files:
        merged = {}
        for name, tensor in base.read_file(file):
            if unties and name == HEAD:  # a stored copy of the tied head, which models do not read
                continue
            merged[name] = _sum(name, tensor, deltas.get(name), dtype)
            if unties and name == EMBEDDING:
                merged[HEAD] = _sum(HEAD, tensor, deltas[HEAD], dtype)
        save_file(merged, output / file.name, metadata={"format": "pt"})
        total_bytes += sum(tensor.nbytes for tensor in merged.values())
    for file in base.directory.iterdir():
        if file.is_file() and file.suffix in (".json", ".txt", ".jinja", ".model"):
            shutil.copyfile(file, output / file.name)
    config = read_json_object(output / "config.json")
    config.pop(QUANTIZATION, None)
    if unties:
        config["tie_word_embeddings"] = False
    if dtype:
        # transformers up to 4.55 and programs that use it read `torch_dtype`
        config |= {key: dtype for key in ("dtype", "torch_dtype") if key == "dtype" or key in config}
    write_json(output / "config.json", config)
    index = output / "model.safetensors.index.json"
    if index.is_file():
        table: dict[str, Any] = read_json_object(index)
        head = {HEAD: base.files[EMBEDDING].name} if unties else {}
        table["weight_map"] = {
            name: file for name, file in table["weight_map"].items() if not base.is_scale(name)
        } | head
        table["metadata"] = table.get("metadata", {}) | {"total_size": total_bytes}
        write_json(index, table)


def merged_bytes(base: BaseTensors) -> int:
    """Return an upper bound, in bytes, for the weights that `write_merged` writes. It includes an untied head
    in float32."""
    vocabulary, hidden = base.shape(EMBEDDING)
    factor = 2 if base.block is None else 4  # the largest growth is from bfloat16 or FP8 to float32
    return factor * sum(file.stat().st_size for file in set(base.files.values())) + 4 * vocabulary * hidden


def _sum(name: str, tensor: np.ndarray, delta: np.ndarray | None, dtype: str | None) -> np.ndarray:
    target = tensor.dtype if dtype is None or name.endswith(ROUTER_BIAS) else np.dtype(dtype)
    if delta is None:
        return np.ascontiguousarray(tensor.astype(target))
    if delta.shape != tensor.shape:
        raise UserError(
            f"{name} has shape {tensor.shape} in the base model and {delta.shape} in the adapter: the "
            "adapter belongs to another model"
        )
    return np.ascontiguousarray((tensor.astype(np.float32) + delta).astype(target))

"""FP8 weights with one scale per block, as DeepSeek-V3 and the FP8 releases of Qwen3 store them.

A matrix `NAME` [out, in] has the dtype float8_e4m3fn. The tensor `NAME_scale_inv` [ceil(out / M),
ceil(in / N)] contains the scales of the blocks of M rows and N columns. M and N are `weight_block_size` of
`quantization_config` in config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from skyrl_tx_server.errors import ConfigError

FP8 = "F8_E4M3"  # the name of float8_e4m3fn in safetensors files
SCALE_SUFFIX = "_scale_inv"
QUANTIZATION = "quantization_config"


def block_size(config: Mapping[str, Any], path: Path) -> tuple[int, int] | None:
    """Return the rows and columns of a block, or None if the model is not quantised. Raises ConfigError for
    any other format than FP8 with blocks. `path` is the file of `config`, for the error message.
    """
    quantization = config.get(QUANTIZATION)
    if not quantization:
        return None
    values = quantization if isinstance(quantization, dict) else {}
    method, number_format = values.get("quant_method"), values.get("fmt", "e4m3")
    match values.get("weight_block_size"):
        case [int(rows), int(columns)] if (
            method == "fp8" and number_format == "e4m3" and rows > 0 and columns > 0
        ):
            return rows, columns
        case _:
            raise ConfigError(
                f"{path}: quantized weights ({QUANTIZATION}, {method}) are not supported, except FP8 (e4m3) "
                "with weight_block_size; convert them to bfloat16"
            )


def dequantize(
    values: np.ndarray, scales: np.ndarray, block: tuple[int, int], *, first: tuple[int, int] = (0, 0)
) -> np.ndarray:
    """Return `values` times the scales of their blocks, in float32.

    Args:
        values: [r, c] float8_e4m3fn, a part of a matrix [out, in].
        scales: [ceil(out / block[0]), ceil(in / block[1])] float32, of the whole matrix.
        first: the row and column of the matrix at which `values` begins.
    """
    row_blocks, column_blocks = (
        np.arange(start, start + size) // length
        for start, size, length in zip(first, values.shape, block, strict=True)
    )
    result = values.astype(np.float32)
    scales_by_column = scales[:, column_blocks]  # [row blocks, columns of values]
    for row_block in np.unique(row_blocks):  # one block row at a time, to save memory
        start, end = np.searchsorted(row_blocks, [row_block, row_block + 1])
        result[start:end] *= scales_by_column[row_block]
    return result


class Fp8File:
    """Reads FP8 tensors of a safetensors file. The package safetensors cannot read FP8 into numpy arrays."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _table(self) -> tuple[int, dict[str, Any]]:
        """The byte offset of the first tensor in the file, and the entries of the header by tensor name."""
        with self._path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            return 8 + size, json.loads(stream.read(size))

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as float8_e4m3fn, mapped from the file."""
        start, tensors = self._table
        tensor = tensors[name]
        return np.memmap(
            self._path,
            dtype=ml_dtypes.float8_e4m3fn,
            mode="r",
            offset=start + tensor["data_offsets"][0],
            shape=tuple(tensor["shape"]),
        )

"""The header of a GGUF file: its metadata and its tensor table, with the bounds of every field checked.

This module reads the file itself, because `gguf.GGUFReader` does not compare counts with the size of the
file, so a damaged count would exhaust the memory. The format is described in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.gguf_reader import GGUFReader

from skyrl_tx_server.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

type Value = str | bool | int | float | list[str] | list[bool] | list[int] | list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """One entry of the tensor table."""

    name: str
    shape: tuple[int, ...]  # as numpy's: [out, in], the reverse of the order in the file
    kind: GGMLQuantizationType
    start: int  # in bytes from the start of the file
    size: int  # in bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufFile:
    """The header of a file."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]
    header_size: int  # in bytes

    def rows(self, tensor: GgufTensor) -> np.ndarray:
        """Return the stored bytes of a tensor as a read-only view of the file: [rows, bytes per row]."""
        data = np.memmap(self.path, np.uint8, mode="r", offset=tensor.start, shape=(tensor.size,))
        return data.reshape(prod(tensor.shape[:-1]), -1)


def read_gguf(path: Path) -> GgufFile:
    """Read the header of `path`.

    Raises ConfigError if it is not a GGUF file, is damaged, ends before the end of a tensor, or has a
    version, a metadata type or a tensor type that is not supported.
    """
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Cursor(data))
    except _DamagedError as error:
        raise ConfigError(f"{path}: not a readable GGUF file: {error}; download it again") from None
    except _UnsupportedError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: not a readable GGUF file: {reason}") from None


class _DamagedError(Exception):
    pass


class _UnsupportedError(Exception):
    """The file may be valid, but its version or a type in it is not supported."""


class _Cursor:
    """Reads a mapped file from its start. Raises _DamagedError if a field would extend beyond the end
    of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0
        self.size = len(data)

    def bytes(self, count: int, field_name: str) -> bytes:
        self.require(count, field_name)
        self.position += count
        return self._data[self.position - count : self.position]

    def require(self, count: int, field_name: str) -> None:
        if count > self.size - self.position:
            raise _DamagedError(
                f"it ends within {field_name}: {count} bytes are needed at byte {self.position} of "
                f"{self.size}"
            )

    def integer(self, layout: str, field_name: str) -> int:
        (value,) = struct.unpack(layout, self.bytes(struct.calcsize(layout), field_name))
        return value

    def text(self, field_name: str) -> str:
        content = self.bytes(self.integer("<Q", field_name), field_name)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return content.decode(errors="replace")  # tokens may be incomplete UTF-8 sequences

    def value(self, field_name: str) -> Value:
        kind = self._value_type(field_name)
        if kind is not GGUFValueType.ARRAY:
            return (
                self.text(field_name)
                if kind is GGUFValueType.STRING
                else self._scalars(kind, 1, field_name)[0]
            )
        kind, count = self._value_type(field_name), self.integer("<Q", field_name)
        if kind is GGUFValueType.ARRAY:
            raise _UnsupportedError(f"{field_name} is an array of arrays, which is not supported")
        if kind is not GGUFValueType.STRING:
            return self._scalars(kind, count, field_name)
        self.require(8 * count, field_name)  # every string begins with its length in 8 bytes
        return [self.text(field_name) for _ in range(count)]

    def _value_type(self, field_name: str) -> GGUFValueType:
        number = self.integer("<I", field_name)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise _DamagedError(f"{field_name} has the unknown value type {number}") from None

    def _scalars(
        self, kind: GGUFValueType, count: int, field_name: str
    ) -> list[int] | list[float] | list[bool]:
        dtype = np.dtype(GGUFReader.gguf_scalar_to_np[kind])
        return np.frombuffer(self.bytes(count * dtype.itemsize, field_name), dtype).tolist()


def _read(path: Path, cursor: _Cursor) -> GgufFile:
    if cursor.bytes(len(MAGIC), "the magic number") != MAGIC:
        raise _DamagedError("it does not begin with GGUF")
    version = cursor.integer("<I", "the version")
    if version not in VERSIONS:
        raise _UnsupportedError(
            f"its GGUF version is {version}, supported are {' and '.join(map(str, VERSIONS))}; convert it to "
            f"version {VERSIONS[-1]}"
        )
    num_tensors = cursor.integer("<Q", "the number of tensors")
    num_fields = cursor.integer("<Q", "the number of metadata fields")
    # A field has at least 12 bytes: the length of its name and the type of its value.
    cursor.require(12 * num_fields, f"the {num_fields} metadata fields")
    metadata: dict[str, Value] = {}
    for _ in range(num_fields):
        name = cursor.text("the name of a metadata field")
        metadata[name] = cursor.value(f"the metadata field {name[:80]!r}")
    # An entry has at least 24 bytes: length of the name, number of dimensions, type and offset.
    cursor.require(24 * num_tensors, f"the table of {num_tensors} tensors")
    table = [_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise _DamagedError(f"general.alignment is {alignment}, not a positive integer")
    header_size = cursor.position
    data_start = -(-header_size // alignment) * alignment
    tensors = {}
    for name, shape, number, offset in table:
        start, size = data_start + offset, _num_bytes(name, shape, number)
        if start + size > cursor.size:
            raise _DamagedError(
                f"it is truncated: tensor {name[:80]} ends at byte {start + size}, the file has {cursor.size}"
            )
        tensors[name] = GgufTensor(
            name=name, shape=shape, kind=GGMLQuantizationType(number), start=start, size=size
        )
    return GgufFile(path=path, metadata=metadata, tensors=tensors, header_size=header_size)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text("the name of a tensor")
    field_name = f"the entry of tensor {name[:80]!r}"
    num_dimensions = cursor.integer("<I", field_name)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise _DamagedError(f"{field_name} has {num_dimensions} dimensions")
    shape = tuple(cursor.integer("<Q", field_name) for _ in range(num_dimensions))[::-1]
    return name, shape, cursor.integer("<I", field_name), cursor.integer("<Q", field_name)


def _num_bytes(name: str, shape: tuple[int, ...], number: int) -> int:
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise _UnsupportedError(
            f"tensor {name[:80]} has the unknown type {number}; convert the file to BF16 or Q8_0"
        ) from None
    block, size = GGML_QUANT_SIZES[kind]
    if prod(shape) == 0 or shape[-1] % block:
        raise _DamagedError(f"tensor {name[:80]} of type {kind.name} has the invalid shape {shape}")
    return prod(shape) // block * size

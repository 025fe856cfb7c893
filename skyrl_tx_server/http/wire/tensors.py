"""Parse the arrays and matrices of request bodies, in JSON and in protobuf."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skyrl_tx_server.engine.operations import CsrMatrix
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.http.wire.json_reader import JsonReader

MAX_CELLS = 1 << 24
"""Maximum number of cells of a sparse matrix that is converted to a dense array. Without this limit, a small
request could allocate gigabytes."""
_CHUNK_SIZE = 1 << 16
_NUMBERS: frozenset[type] = frozenset((int, float, bool))


def to_array(
    values: list[object], dtype: np.dtype | None = None, *, allowed: frozenset[type] = _NUMBERS
) -> np.ndarray:
    """Return a flat list of values of `allowed` types as an array [N]. Raise ValueError for values
    of other types, and for fractions if `dtype` is an integer type. Raise OverflowError for an integer that
    is too large for `dtype`.

    numpy holds the GIL during a conversion. The list is converted in chunks, so that other threads can run
    between two chunks.
    """
    parts = []
    for start in range(0, len(values), _CHUNK_SIZE):
        part = values[start : start + _CHUNK_SIZE]
        types = set(map(type, part))
        if not types <= allowed:
            raise ValueError("not a flat list of the allowed types")
        has_floats = float in types and dtype is not None and dtype.kind == "i"
        if has_floats and any(isinstance(value, float) and not value.is_integer() for value in part):
            raise ValueError("not a list of integers")
        parts.append(np.asarray(part, dtype))
    return np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else np.asarray([], dtype)


def integers(values: list[object], where: str) -> np.ndarray:
    """Return a flat JSON list of integers as an array [N] int64. Raise UserError for other contents."""
    try:
        return to_array(values, np.dtype(np.int64), allowed=frozenset((int,)))
    except (ValueError, OverflowError):
        raise UserError(f"{where}: expected a flat list of integers of at most 64 bits") from None


def cells_from_csr(
    values: np.ndarray, crow_indices: np.ndarray, col_indices: np.ndarray, shape: Sequence[int], where: str
) -> CsrMatrix:
    """Return a sparse matrix. `crow_indices` and `col_indices` are int64. Raise UserError if they do not fit
    `values` and `shape`, or if they list a cell twice."""
    if (
        len(shape) != 2
        or min(shape) < 0
        or shape[1] >= 1 << 31
        or crow_indices.ndim != 1
        or len(crow_indices) != shape[0] + 1
        or crow_indices[0] != 0
        or crow_indices[-1] != len(values)
        or len(col_indices) != len(values)
        or np.diff(crow_indices).min(initial=0) < 0
        or col_indices.min(initial=0) < 0
        or col_indices.max(initial=-1) >= shape[1]
    ):
        raise UserError(
            f"{where}: not a sparse CSR matrix; its row pointers, columns and values do not fit its shape "
            f"{list(shape)}"
        )
    cells = CsrMatrix(
        values=values,
        shape=(int(shape[0]), int(shape[1])),
        crow_indices=crow_indices,
        col_indices=col_indices,
    )
    positions = cells.rows() * shape[1] + col_indices
    if len(np.unique(positions)) != len(positions):
        raise UserError(f"{where}: a cell is listed twice; list each cell once")
    return cells


def dense_array(cells: CsrMatrix, where: str) -> np.ndarray:
    if cells.shape[0] * cells.shape[1] > MAX_CELLS:
        raise UserError(
            f"{where}: the shape {list(cells.shape)} exceeds this server's limit of {MAX_CELLS} cells per "
            f"tensor; send a smaller matrix"
        )
    return cells.dense()


def check_dimensions(shape: Sequence[int], where: str) -> None:
    """Raise UserError for a negative dimension, which numpy would replace with the size that fits the
    data."""
    if min(shape, default=0) < 0:
        raise UserError(
            f"{where}: the shape {list(shape)} has a negative dimension; send the size of every dimension"
        )


def parse_cells(body: object, where: str) -> CsrMatrix:
    """Parse a two-dimensional JSON TensorData, dense or sparse. Raise UserError if it is invalid."""
    tensor = parse_tensor(body, where)
    if isinstance(tensor, CsrMatrix):
        return tensor
    if tensor.ndim != 2:
        raise UserError(f"{where}: expected a matrix, got the shape {list(tensor.shape)}")
    return CsrMatrix(values=tensor.reshape(-1), shape=(tensor.shape[0], tensor.shape[1]))


def parse_tensor(body: object, where: str) -> np.ndarray | CsrMatrix:
    """Parse a JSON TensorData, or a bare list of its data. Return a `CsrMatrix` for a sparse tensor, an array
    for a dense one. SDK 0.24 and older may omit dtype and shape. Raise UserError if the tensor is invalid."""
    if isinstance(body, list):
        body = {"data": body}
    fields = JsonReader(body, where)
    is_sparse = fields.value("sparse_crow_indices") is not None
    crow_indices = integers(fields.items("sparse_crow_indices"), f"{where}: sparse_crow_indices")
    col_indices = integers(fields.items("sparse_col_indices"), f"{where}: sparse_col_indices")
    dtype = fields.optional_text("dtype")
    if dtype not in (None, "int64", "float32"):
        raise UserError(f"{where}: dtype {dtype!r} is unknown; use int64 or float32")
    shape = integers(fields.items("shape"), f"{where}: shape").tolist()
    if not is_sparse:
        check_dimensions(shape, where)
    try:
        array = to_array(fields.items("data"), None if dtype is None else np.dtype(dtype))
        array = array.reshape(shape) if shape and not is_sparse else array
    except (ValueError, TypeError, OverflowError):
        raise UserError(f"{where}: data does not match its dtype and shape") from None
    if array.dtype.kind not in "iuf":
        raise UserError(f"{where}: data must be numbers")
    fields.finish()
    if col_indices.size and not is_sparse:
        raise UserError(f"{where}: sparse_col_indices needs sparse_crow_indices")
    if is_sparse:
        return cells_from_csr(array.reshape(-1), crow_indices, col_indices, shape, where)
    return array

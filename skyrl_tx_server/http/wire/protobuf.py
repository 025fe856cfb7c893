"""Protobuf bodies: forward_backward requests, and results of sample and forward_backward.

All other bodies of the Tinker API are JSON. Arrays are little-endian bytes. An undefined logprob of a prompt
token is NaN; a position without top-k tokens has `operations.NO_LOGPROB`.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import cast

import ml_dtypes
import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from skyrl_tx_server.engine.operations import (
    CsrMatrix,
    ForwardBackward,
    ForwardBackwardResult,
    LossFn,
    SampleResult,
    StopReason,
    TopkLogprobs,
    TrainDatum,
)
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.http.wire.json_reader import listed
from skyrl_tx_server.http.wire.limits import Limits, check_tokens
from skyrl_tx_server.http.wire.proto import tinker_wire_pb2 as pb
from skyrl_tx_server.http.wire.tensors import cells_from_csr, check_dimensions, dense_array
from skyrl_tx_server.http.wire.training_requests import (
    TrainRequest,
    check_datum,
    parse_loss_config,
    parse_loss_fn,
    within_limit,
)

MEDIA_TYPE = "application/x-protobuf"
CHECKED_FROM_BYTES = 64 << 10
"""In a body of more bytes than this, the fields are counted before the body is parsed."""
MAX_FIELDS = 200_000
"""Maximum number of fields in a request, including those of nested messages. A datum with one chunk of
tokens, without notes on the origin of its tokens (`ProvenanceSpan`), has at most 28 fields. The SDK sends at
most 1024 datums in a request, which have less than 30,000 fields."""
MAX_PACKED_BYTES = 1024
"""Maximum size of a packed list of numbers. The only such list in a request is the shape of a tensor."""
_BYTES_OR_TEXT = (FieldDescriptor.CPPTYPE_STRING,)

_DTYPES = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
_STOP_REASONS = {StopReason.STOP: pb.STOP_REASON_STOP, StopReason.LENGTH: pb.STOP_REASON_LENGTH}


def parse_training_proto(body: bytes, limits: Limits) -> TrainRequest:
    """Parse a ForwardBackwardRequest. Its field `forward_only` marks a request of the SDK's `forward`. Raise
    UserError if the request is invalid."""
    _check_fields(body)
    request = pb.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError:
        raise UserError("forward_backward: the body is not a ForwardBackwardRequest protobuf") from None
    _refuse_unknown(request, "forward_backward")
    loss_fn = parse_loss_fn(request.loss_fn)
    config: dict[str, object] = dict(request.loss_fn_config)
    config |= {
        name: value.number if value.WhichOneof("value") == "number" else value.text
        for name, value in request.loss_fn_config_v2.items()
    }
    if not request.model_id:
        raise UserError("forward_backward: model_id is missing")
    if not request.data:
        raise UserError("forward_backward: data is empty; send at least one datum")
    datums = (_datum(index, datum, loss_fn, limits) for index, datum in enumerate(request.data))
    op = ForwardBackward(
        model_id=request.model_id,
        loss_fn=loss_fn,
        data=within_limit(datums),
        settings=parse_loss_config(loss_fn, config),
        forward_only=request.forward_only,
    )
    return TrainRequest(seq_id=request.seq_id or None, op=op)  # proto3: 0 means unset; the SDK counts from 1


def _check_fields(body: bytes) -> None:
    """Raise the UserErrors of `_count_fields` for a body of more than CHECKED_FROM_BYTES. This check precedes
    parsing, because an empty message has two bytes in the body but takes more than 50 bytes of memory when it
    is parsed."""
    if len(body) > CHECKED_FROM_BYTES:
        with contextlib.suppress(IndexError):  # a truncated body, which the parser reports
            _count_fields(body, 0, len(body), cast(Descriptor, pb.ForwardBackwardRequest.DESCRIPTOR), 0)


def _count_fields(body: bytes, offset: int, end: int, message: Descriptor, count: int) -> int:
    """Return `count` plus the number of fields of the message at body[offset:end], including nested messages.
    Raise UserError if there are too many, if a packed list is too large or if the body contains a group, and
    IndexError if the body ends within a varint."""
    while offset < end:
        count += 1
        if count > MAX_FIELDS:
            raise UserError(
                f"forward_backward: the body has more than {MAX_FIELDS} protobuf fields; send fewer datums "
                f"at once"
            )
        tag, offset = _varint(body, offset)
        match tag & 7:
            case 0:
                _, offset = _varint(body, offset)
            case 1:
                offset += 8
            case 2:
                length, offset = _varint(body, offset)
                field = message.fields_by_number.get(tag >> 3)
                if offset + length > end:
                    return count  # the body is truncated, which the parser reports
                if field is not None and field.message_type is not None:
                    count = _count_fields(body, offset, offset + length, field.message_type, count)
                elif field is not None and field.cpp_type not in _BYTES_OR_TEXT and length > MAX_PACKED_BYTES:
                    raise UserError(f"forward_backward: {field.name} has more than {MAX_PACKED_BYTES} bytes")
                offset += length
            case 5:
                offset += 4
            case 3 | 4:  # A group. The messages of a request have no groups, and the parser would skip it.
                raise UserError("forward_backward: the body contains a protobuf group")
            case _:  # an invalid wire type, which the parser reports
                return count
    return count


def _varint(body: bytes, offset: int) -> tuple[int, int]:
    """Return the varint at `offset` and the offset after it."""
    value = shift = 0
    while (byte := body[offset]) & 0x80 and shift < 63:
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
    return value | byte << shift, offset + 1


def _datum(index: int, datum: pb.Datum, loss_fn: LossFn, limits: Limits) -> TrainDatum:
    where = f"datum {index}"
    _refuse_unknown(datum, where)
    chunks = [np.zeros(0, np.int32)]
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise UserError(
                f"{where}: {kind or 'unknown'} chunks are not supported by this text-only server; send "
                f"encoded_text tokens"
            )
        _refuse_unknown(chunk, f"{where}: model_input")
        _refuse_unknown(chunk.encoded_text, f"{where}: model_input")
        chunks.append(_from_bytes(chunk.encoded_text.tokens, np.dtype("<i4"), f"{where}: model_input"))
    tokens = check_tokens(np.concatenate(chunks), f"{where}: model_input", limits)
    inputs = {name: _tensor(tensor, f"{where}: {name}") for name, tensor in datum.loss_fn_inputs.items()}
    return check_datum(index, tokens, inputs, loss_fn, limits)


def _tensor(tensor: pb.Tensor, where: str) -> np.ndarray:
    _refuse_unknown(tensor, where)
    if tensor.dtype not in _DTYPES:
        raise UserError(f"{where}: unknown dtype {tensor.dtype}; use float32 or int64")
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr, index_dtype = tensor.sparse_csr, np.dtype("<i8")
        _refuse_unknown(csr, where)
        cells = cells_from_csr(
            _from_bytes(csr.values, _DTYPES[tensor.dtype], where),
            _from_bytes(csr.crow_indices, index_dtype, where),
            _from_bytes(csr.col_indices, index_dtype, where),
            list(tensor.shape),
            where,
        )
        return dense_array(cells, where)
    array = _from_bytes(tensor.dense, _DTYPES[tensor.dtype], where)
    if not tensor.shape:
        return array
    check_dimensions(tensor.shape, where)
    try:
        return array.reshape(list(tensor.shape))
    except ValueError:
        raise UserError(f"{where}: {array.size} values do not fill the shape {list(tensor.shape)}") from None


def _from_bytes(data: bytes, dtype: np.dtype, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise UserError(f"{where}: {len(data)} bytes are not a whole number of {dtype} values")
    return np.frombuffer(data, dtype)


def _refuse_unknown(message: Message, where: str) -> None:
    """Raise UserError if `message` has unknown fields, which belong to a newer SDK and must not be ignored.
    Nested messages are not checked."""
    unknown = sorted({str(field.field_number) for field in UnknownFieldSet(message)})
    if unknown:
        raise UserError(
            f"{where}: unknown protobuf field {listed(unknown)}; this server implements tinker 0.38; "
            "install that version"
        )


def result_to_proto(result: SampleResult | ForwardBackwardResult) -> bytes:
    message = _sample(result) if isinstance(result, SampleResult) else _forward_backward(result)
    return message.SerializeToString()


def _sample(result: SampleResult) -> pb.SampleResponse:
    response = pb.SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens)
    for sequence in result.sequences:
        response.sequences.add(
            stop_reason=_STOP_REASONS[sequence.stop_reason],
            tokens=sequence.tokens.astype("<i4").tobytes(),
            logprobs=sequence.logprobs.astype("<f4").tobytes(),
            topk_sampled_logprobs=None if sequence.topk is None else _topk(sequence.topk),
        )
    if result.prompt_logprobs is not None:
        response.prompt_logprobs = result.prompt_logprobs.astype("<f4").tobytes()
    if result.topk_prompt_logprobs is not None:
        response.topk_prompt_logprobs.CopyFrom(_topk(result.topk_prompt_logprobs))
    if result.target_prompt_logprobs is not None:
        response.target_prompt_logprobs.CopyFrom(_float_cells(result.target_prompt_logprobs))
    return response


def _topk(topk: TopkLogprobs) -> pb.TopkLogprobs:
    length, k = topk.token_ids.shape
    return pb.TopkLogprobs(
        token_ids=topk.token_ids.astype("<i4").tobytes(),
        logprobs=topk.logprobs.astype("<f4").tobytes(),
        k=k,
        length=length,
    )


def _float_cells(cells: CsrMatrix) -> pb.Tensor:
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=cells.shape)
    values = cells.values.astype("<f4").tobytes()
    if cells.crow_indices is None or cells.col_indices is None:
        tensor.dense = values
    else:
        crow_indices, col_indices = (
            indices.astype("<i8").tobytes() for indices in (cells.crow_indices, cells.col_indices)
        )
        tensor.sparse_csr.CopyFrom(
            pb.SparseCsr(values=values, crow_indices=crow_indices, col_indices=col_indices)
        )
    return tensor


def _forward_backward(result: ForwardBackwardResult) -> pb.ForwardBackwardOutput:
    """Return the results. Consecutive datums with the same number of targets per position share a record, in
    which byte offsets separate them."""
    without_reduction = [name for name in result.metrics if ":" not in name]
    assert not without_reduction, f"metrics need the form name:reduction, got {without_reduction}"
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    output.metrics.update(result.metrics)
    for trailing_shape, run in itertools.groupby(result.logprobs, key=lambda logprobs: logprobs.shape[1:]):
        parts = [logprobs.reshape(-1) for logprobs in run]
        offsets = np.concatenate([[0], np.cumsum([4 * part.size for part in parts], dtype=np.int64)])
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(parts))
        record.fields["logprobs"].CopyFrom(
            pb.BatchedTensor(
                data=np.concatenate(parts).astype("<f4").tobytes(),
                offsets=offsets.astype("<i8").tobytes(),
                dtype=pb.DTYPE_FLOAT32,
                trailing_shape=trailing_shape,
            )
        )
    return output

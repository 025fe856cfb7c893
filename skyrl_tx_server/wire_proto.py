"""The two protobuf bodies of the contract: forward_backward requests in, sample and forward_backward results out.

SDK 0.25 and later speak nothing else here. Byte arrays are little-endian; an undefined log-probability is NaN.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from skyrl_tx_server.errors import UserError
from skyrl_tx_server.ops import ForwardBackwardResult, LossFn, OpResult, SampleResult, StopReason, TrainDatum
from skyrl_tx_server.proto import tinker_wire_pb2 as pb
from skyrl_tx_server.wire import Limits, TrainRequest, check_datum, check_loss_config, check_tokens, parse_loss_fn

MEDIA_TYPE = "application/x-protobuf"

_DTYPES = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
_STOP_REASONS = {StopReason.STOP: pb.STOP_REASON_STOP, StopReason.LENGTH: pb.STOP_REASON_LENGTH}


def parse_training_proto(body: bytes, limits: Limits) -> TrainRequest:
    """A serialized ForwardBackwardRequest; `forward_only` marks what the SDK calls `forward`."""
    request = pb.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError:
        raise UserError("forward_backward: the body is not a ForwardBackwardRequest protobuf") from None
    _refuse_unknown(request, "forward_backward")
    loss_fn = parse_loss_fn(request.loss_fn)
    config: dict[str, object] = dict(request.loss_fn_config)
    config |= {
        name: value.number if value.WhichOneof("value") == "number" else value.text for name, value in request.loss_fn_config_v2.items()
    }
    if not request.model_id:
        raise UserError("forward_backward: model_id is missing")
    if not request.data:
        raise UserError("forward_backward: data is empty; send at least one datum")
    return TrainRequest(
        model_id=request.model_id,
        seq_id=request.seq_id or None,  # proto3 cannot tell 0 from unset; the SDK counts from 1
        loss_fn=loss_fn,
        loss_fn_config=check_loss_config(loss_fn, config),
        data=tuple(_datum(index, datum, loss_fn, limits) for index, datum in enumerate(request.data)),
        forward_only=request.forward_only,
    )


def _datum(index: int, datum: pb.Datum, loss_fn: LossFn, limits: Limits) -> TrainDatum:
    where = f"datum {index}"
    _refuse_unknown(datum, where)
    chunks = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise UserError(f"{where}: {kind or 'unknown'} chunks are not supported by this text-only server; send encoded_text tokens")
        chunks.append(_from_bytes(chunk.encoded_text.tokens, np.dtype("<i4"), f"{where}: model_input"))
    tokens = check_tokens(np.concatenate(chunks) if chunks else np.zeros(0, np.int32), f"{where}: model_input", limits)
    inputs = {name: _tensor(tensor, f"{where}: {name}") for name, tensor in datum.loss_fn_inputs.items()}
    return check_datum(index, tokens, inputs, loss_fn, limits)


def _tensor(tensor: pb.Tensor, where: str) -> np.ndarray:
    if tensor.WhichOneof("encoding") == "sparse_csr":
        raise UserError(f"{where}: sparse tensors are not supported by this server; send a dense 1-D tensor (one target per position)")
    if tensor.dtype not in _DTYPES:
        raise UserError(f"{where}: unknown dtype {tensor.dtype}; use float32 or int64")
    array = _from_bytes(tensor.dense, _DTYPES[tensor.dtype], where)
    if not tensor.shape:
        return array
    try:
        return array.reshape(list(tensor.shape))
    except ValueError:
        raise UserError(f"{where}: {array.size} values do not fill the shape {list(tensor.shape)}") from None


def _from_bytes(data: bytes, dtype: np.dtype, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise UserError(f"{where}: {len(data)} bytes are not a whole number of {dtype} values")
    return np.frombuffer(data, dtype)


def _refuse_unknown(message: Message, where: str) -> None:
    """A field number we do not know is a feature of a newer SDK that this server would ignore."""
    unknown = [str(field.field_number) for field in UnknownFieldSet(message)]
    if unknown:
        raise UserError(f"{where}: unknown protobuf field {', '.join(unknown)}; this server speaks the schema of tinker 0.38")


def has_proto_form(result: OpResult) -> bool:
    return isinstance(result, SampleResult | ForwardBackwardResult)


def result_to_proto(result: OpResult) -> bytes:
    """A finished sample or forward_backward as the SDK reads it."""
    match result:
        case SampleResult():
            return _sample(result).SerializeToString()
        case ForwardBackwardResult():
            return _forward_backward(result).SerializeToString()
        case _:
            raise AssertionError(f"{type(result).__name__} has no protobuf form")


def _sample(result: SampleResult) -> pb.SampleResponse:
    response = pb.SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens)
    for sequence in result.sequences:
        response.sequences.add(
            stop_reason=_STOP_REASONS[sequence.stop_reason],
            tokens=sequence.tokens.astype("<i4").tobytes(),
            logprobs=sequence.logprobs.astype("<f4").tobytes(),
        )
    if result.prompt_logprobs is not None:
        response.prompt_logprobs = result.prompt_logprobs.astype("<f4").tobytes()
    return response


def _forward_backward(result: ForwardBackwardResult) -> pb.ForwardBackwardOutput:
    """One record for all datums: their log-probabilities end to end, cut apart by byte offsets."""
    bare = [name for name in result.metrics if ":" not in name]
    assert not bare, f"metrics need the form name:reduction, got {bare}"
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    output.metrics.update(result.metrics)
    offsets = np.concatenate([[0], np.cumsum([4 * logprobs.size for logprobs in result.logprobs], dtype=np.int64)])
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(result.logprobs))
    record.fields["logprobs"].CopyFrom(
        pb.BatchedTensor(
            data=np.concatenate(result.logprobs).astype("<f4").tobytes(), offsets=offsets.astype("<i8").tobytes(), dtype=pb.DTYPE_FLOAT32
        )
    )
    return output

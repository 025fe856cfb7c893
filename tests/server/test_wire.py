"""Tests of the two wire formats, JSON and protobuf: parsed requests, refused requests and results."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from tinker import types
from tinker.proto import request_conv, response_conv

from skyrl_tx_server.engine.operations import (
    NO_LOGPROB,
    CsrMatrix,
    ForwardBackwardResult,
    LoraSpec,
    LossFn,
    OptimStepResult,
    SampledSequence,
    SampleResult,
    StopReason,
    TopkLogprobs,
    WeightsLoaded,
    WeightsSaved,
)
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.http.wire.json_reader import JsonReader
from skyrl_tx_server.http.wire.limits import Limits
from skyrl_tx_server.http.wire.proto import tinker_wire_pb2 as pb
from skyrl_tx_server.http.wire.protobuf import parse_training_proto, result_to_proto
from skyrl_tx_server.http.wire.results import result_to_json
from skyrl_tx_server.http.wire.sampling_requests import parse_sample, parse_sampling_params
from skyrl_tx_server.http.wire.training_requests import parse_adam, parse_lora, parse_training_json
from tests.fakes.sdk_datum import sdk_datum

LIMITS = Limits(vocab_size=64, max_context_length=16, max_lora_rank=8)


def sdk_bytes(
    *data: types.Datum, loss_fn: types.LossFnType = "cross_entropy", config: dict[str, Any] | None = None
) -> bytes:
    """Return the protobuf message that the SDK sends for a forward_backward request."""
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(
            data=list(data), loss_fn=loss_fn, loss_fn_config=config
        ),
        model_id="s:train:0",
        seq_id=5,
    )
    return request_conv.forward_backward_request_to_proto(request).SerializeToString()


def datum(tokens: list[int], **inputs: list[int] | list[float] | np.ndarray) -> types.Datum:
    return sdk_datum(tokens, target_tokens=[*tokens[1:], 0], **inputs)


def test_protobuf_of_the_sdk_is_parsed_into_arrays() -> None:
    request = parse_training_proto(sdk_bytes(datum([1, 2, 3], weights=[0.0, 1.0, 0.5]), datum([4])), LIMITS)
    op = request.op
    assert (op.model_id, request.seq_id, op.loss_fn, op.forward_only) == (
        "s:train:0",
        5,
        LossFn.CROSS_ENTROPY,
        False,
    )
    first, second = op.data
    assert (first.tokens.tolist(), first.tokens.dtype) == ([1, 2, 3], np.int32)
    assert (first.target_tokens.tolist(), first.target_tokens.dtype) == ([2, 3, 0], np.int32)
    assert first.weights is not None and first.weights.tolist() == [0.0, 1.0, 0.5]
    assert second.weights is None


def test_a_prompt_may_have_any_number_of_chunks() -> None:
    chunks = [types.EncodedTextChunk(tokens=[1, 2]), types.EncodedTextChunk(tokens=[3])]
    prompt = types.ModelInput(chunks=list(chunks))
    message = sdk_bytes(sdk_datum(prompt, target_tokens=[2, 3, 0], weights=[1.0] * 3))
    assert parse_training_proto(message, LIMITS).op.data[0].tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [pb.DTYPE_INT32, pb.DTYPE_BFLOAT16])
def test_narrow_dtypes_are_read_exactly(dtype: int) -> None:
    message = pb.ForwardBackwardRequest()
    message.ParseFromString(sdk_bytes(datum([1, 2], weights=[1.0, 0.5])))
    if dtype == pb.DTYPE_INT32:
        message.data[0].loss_fn_inputs["target_tokens"].CopyFrom(
            pb.Tensor(dense=np.array([2, 0], "<i4").tobytes(), dtype=pb.DTYPE_INT32, shape=[2])
        )
    else:
        # bfloat16 is the upper half of a float32
        dense = (np.array([1.0, 0.5], "<f4").view("<u4") >> 16).astype("<u2").tobytes()
        message.data[0].loss_fn_inputs["weights"].CopyFrom(
            pb.Tensor(dense=dense, dtype=pb.DTYPE_BFLOAT16, shape=[2])
        )
    parsed = parse_training_proto(message.SerializeToString(), LIMITS).op.data[0]
    assert parsed.target_tokens.tolist() == [2, 0]
    assert parsed.weights is not None and parsed.weights.tolist() == [1.0, 0.5]


def test_json_and_protobuf_give_the_same_operation() -> None:
    body = {
        "model_id": "s:train:0",
        "seq_id": 5,
        "forward_backward_input": {
            "loss_fn": "ppo",
            "loss_fn_config": {"clip_low_threshold": 0.9},
            "data": [
                {
                    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
                    "loss_fn_inputs": {
                        "target_tokens": {"data": [2, 0], "dtype": "int64", "shape": [2]},
                        "logprobs": {"data": [-1.0, -2.0], "dtype": "float32", "shape": [2]},
                        "advantages": [0.5, 0.5],
                    },
                }
            ],
        },
    }
    from_json = parse_training_json(json.loads(json.dumps(body)), LIMITS, forward_only=False)
    sdk_request_datum = datum([1, 2], logprobs=[-1.0, -2.0], advantages=[0.5, 0.5])
    from_proto = parse_training_proto(
        sdk_bytes(sdk_request_datum, loss_fn="ppo", config={"clip_low_threshold": 0.9}), LIMITS
    )
    assert from_json.seq_id == from_proto.seq_id
    assert (from_json.op.loss_fn, from_json.op.settings) == (from_proto.op.loss_fn, from_proto.op.settings)
    for name in ("tokens", "target_tokens", "logprobs", "advantages"):
        np.testing.assert_array_equal(
            getattr(from_json.op.data[0], name), getattr(from_proto.op.data[0], name)
        )


RL_INPUTS = {"logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("data", "loss_fn", "config", "message"),
    [
        (
            datum([1, 2]),
            "stable_reinforce",
            None,
            "use one of: cross_entropy, importance_sampling, ppo, cispo, dro, gspo",
        ),
        (datum([1, 2], **RL_INPUTS), "gspo", None, "needs the input sequence_ratio_mask"),
        (datum([1, 2], **RL_INPUTS, sequence_ratio_mask=[1.0, 1.0]), "ppo", None, "only gspo uses it"),
        (
            datum([1, 2], **RL_INPUTS, sequence_ratio_mask=[1.0, 1.0]),
            "gspo",
            {"beta": 0.1},
            "it takes clip_high_threshold, clip_low_threshold",
        ),
        (datum([1, 2]), "ppo", None, "needs the input advantages, logprobs"),
        (datum([1, 2], **RL_INPUTS, weights=[1.0, 1.0]), "ppo", None, "multiply the advantages by them"),
        (datum([1, 2], weights=[1.0, float("inf")]), "cross_entropy", None, "NaN or infinity"),
        (datum([1, 2], **RL_INPUTS), "cross_entropy", None, "does not use the input"),
        (datum([1, 2], **RL_INPUTS), "importance_sampling", {"clip_low_threshold": 0.8}, "it takes none"),
        (
            datum([1, 2], **RL_INPUTS),
            "cispo",
            {"clip_low_threshold": 1.3, "clip_high_threshold": 0.8},
            "absolute bounds",
        ),
        (
            datum([1, 2], **RL_INPUTS),
            "cispo",
            {"clip_low_threshold": 1.3},
            r"clip_low_threshold=1\.3 is above clip_high_threshold=1\.2",
        ),
        (datum([1, 2], **RL_INPUTS), "ppo", {"clip_low_threshold": "x"}, "finite number"),
        (
            datum([1, 2], **RL_INPUTS, sequence_ratio_mask=[0.0, 0.0]),
            "gspo",
            None,
            "datum 0: sequence_ratio_mask is 0 at every token",
        ),
        (datum([1] * 17), "cross_entropy", None, "context window of 16"),
        (datum([1, 64]), "cross_entropy", None, "token 64 is outside"),
        (
            datum([1, 2], weights=np.ones((2, 2), np.float32)),
            "cross_entropy",
            None,
            r"weights have the shape \[2, 2\]",
        ),
        (
            datum([1, 2], logprobs=np.ones((2, 2), np.float32)),
            "ppo",
            None,
            r"ppo takes \[N\]: only cross_entropy",
        ),
        (
            datum([1, 2], weights=np.ones((2, 2, 2), np.float32)),
            "cross_entropy",
            None,
            r"cross_entropy takes \[N\] or \[N, K\]",
        ),
        (datum([1, 2], weights=[1.0]), "cross_entropy", None, "must be equal"),
    ],
)
def test_a_datum_that_cannot_be_trained_on_is_refused(
    data: types.Datum, loss_fn: types.LossFnType, config: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        parse_training_proto(sdk_bytes(data, loss_fn=loss_fn, config=config), LIMITS)


def matrix_datum(tokens: list[int], targets: types.TensorData, weights: types.TensorData) -> types.Datum:
    inputs = {"target_tokens": targets, "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


DENSE_TARGETS = types.TensorData(data=[3, 4, 0, 0, 5, 6], dtype="int64", shape=[3, 2])
DENSE_WEIGHTS = types.TensorData(data=[0.5, 0.25, 0.0, 0.0, 1.0, 0.0], dtype="float32", shape=[3, 2])
SPARSE_TARGETS = types.TensorData(
    data=[3, 4, 5, 6],
    dtype="int64",
    shape=[3, 2],
    sparse_crow_indices=[0, 2, 2, 4],
    sparse_col_indices=[0, 1, 0, 1],
)
SPARSE_WEIGHTS = types.TensorData(
    data=[0.5, 0.25, 1.0],
    dtype="float32",
    shape=[3, 2],
    sparse_crow_indices=[0, 2, 2, 3],
    sparse_col_indices=[0, 1, 0],
)


def json_tensor(tensor: types.TensorData) -> dict[str, object]:
    body: dict[str, object] = {"data": tensor.data, "dtype": tensor.dtype, "shape": tensor.shape}
    if tensor.sparse_crow_indices is not None:
        body |= {
            "sparse_crow_indices": tensor.sparse_crow_indices,
            "sparse_col_indices": tensor.sparse_col_indices,
        }
    return body


@pytest.mark.parametrize(
    ("targets", "weights"),
    [(DENSE_TARGETS, DENSE_WEIGHTS), (SPARSE_TARGETS, SPARSE_WEIGHTS), (DENSE_TARGETS, SPARSE_WEIGHTS)],
)
def test_both_formats_accept_several_targets_per_position(
    targets: types.TensorData, weights: types.TensorData
) -> None:
    from_proto = parse_training_proto(sdk_bytes(matrix_datum([1, 2, 3], targets, weights)), LIMITS).op.data[0]
    inputs = {"target_tokens": json_tensor(targets), "weights": json_tensor(weights)}
    forward_backward_input = {
        "loss_fn": "cross_entropy",
        "data": [{"model_input": {"chunks": [{"tokens": [1, 2, 3]}]}, "loss_fn_inputs": inputs}],
    }
    body = json.loads(json.dumps({"model_id": "m", "forward_backward_input": forward_backward_input}))
    for parsed in (from_proto, parse_training_json(body, LIMITS, forward_only=False).op.data[0]):
        assert (parsed.target_tokens.tolist(), parsed.target_tokens.dtype) == (
            [[3, 4], [0, 0], [5, 6]],
            np.int32,
        )
        assert parsed.weights is not None and parsed.weights.tolist() == [[0.5, 0.25], [0.0, 0.0], [1.0, 0.0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crow_indices": [0, 2, 2]}, "not a sparse CSR matrix"),
        ({"crow_indices": [0, 2, 1, 4]}, "not a sparse CSR matrix"),
        ({"crow_indices": [0, 2, 2, 5]}, "not a sparse CSR matrix"),
        ({"crow_indices": [1, 2, 2, 4]}, "not a sparse CSR matrix"),
        ({"col_indices": [0, 1, 0, 2]}, "not a sparse CSR matrix"),
        ({"col_indices": [0, -1, 0, 1]}, "not a sparse CSR matrix"),
        ({"col_indices": [0, 0, 0, 1]}, "a cell is listed twice; list each cell once"),
        ({"shape": [6]}, "not a sparse CSR matrix"),
        ({"shape": [3, 1 << 40]}, "not a sparse CSR matrix"),
        ({"shape": [3, 1 << 30]}, "cells per tensor"),
    ],
)
def test_an_invalid_sparse_tensor_is_refused(changes: dict[str, list[int]], message: str) -> None:
    request = pb.ForwardBackwardRequest()
    request.ParseFromString(sdk_bytes(matrix_datum([1, 2, 3], SPARSE_TARGETS, SPARSE_WEIGHTS)))
    tensor = request.data[0].loss_fn_inputs["target_tokens"]
    for name, values in changes.items():
        if name == "shape":
            tensor.shape[:] = values
        else:
            setattr(tensor.sparse_csr, name, np.array(values, "<i8").tobytes())
    with pytest.raises(UserError, match=message):
        parse_training_proto(request.SerializeToString(), LIMITS)


@pytest.mark.parametrize("shape", [[-1], [2, -1]])
def test_a_negative_dimension_in_protobuf_is_refused(shape: list[int]) -> None:
    request = pb.ForwardBackwardRequest()
    request.ParseFromString(sdk_bytes(datum([1, 2], weights=[1.0, 0.5])))
    request.data[0].loss_fn_inputs["weights"].shape[:] = shape
    with pytest.raises(UserError, match=r"^datum 0: weights: the shape \[.*\] has a negative dimension"):
        parse_training_proto(request.SerializeToString(), LIMITS)


def test_unknown_fields_and_invalid_messages_are_refused() -> None:
    with pytest.raises(UserError, match="unknown protobuf field 99"):
        parse_training_proto(sdk_bytes(datum([1, 2])) + bytes([0x98, 0x06, 0x01]), LIMITS)
    with pytest.raises(UserError, match="not a ForwardBackwardRequest"):
        parse_training_proto(b"\xff\xff\xff", LIMITS)


def test_a_group_does_not_end_the_count_of_fields() -> None:
    """A group is an obsolete form of a nested message, which the parser skips."""
    empty_group, empty_datums = bytes([0xA3, 0x06, 0xA4, 0x06]), bytes([0x1A, 0x00]) * 40_000
    with pytest.raises(UserError, match="the body contains a protobuf group"):
        parse_training_proto(empty_group + empty_datums, LIMITS)


@pytest.mark.parametrize("part", ["datum", "chunk", "tokens", "tensor"])
def test_unknown_fields_of_nested_messages_are_refused(part: str) -> None:
    request = pb.ForwardBackwardRequest()
    request.ParseFromString(sdk_bytes(datum([1, 2], weights=[1.0, 0.5])))
    first = request.data[0]
    parts = {
        "datum": first,
        "chunk": first.model_input[0],
        "tokens": first.model_input[0].encoded_text,
        "tensor": first.loss_fn_inputs["weights"],
    }
    parts[part].MergeFromString(bytes([0x98, 0x06, 0x01]))
    with pytest.raises(UserError, match=r"^datum 0.*: unknown protobuf field 99"):
        parse_training_proto(request.SerializeToString(), LIMITS)


def test_logprobs_of_several_targets_keep_their_shape() -> None:
    logprobs = (
        np.arange(6, dtype=np.float32).reshape(3, 2),
        np.arange(4, dtype=np.float32),
        np.arange(3, dtype=np.float32).reshape(1, 3),
    )
    result = ForwardBackwardResult(logprobs=logprobs, metrics={"loss:sum": 6.0})
    output = response_conv.deserialize_forward_backward_output(result_to_proto(result))
    assert [np.asarray(entry["logprobs"].tolist()).tolist() for entry in output.loss_fn_outputs] == [
        array.tolist() for array in logprobs
    ]
    json_outputs = result_to_json("forward_backward", result, {})["loss_fn_outputs"]
    assert isinstance(json_outputs, list)
    assert [entry["logprobs"]["shape"] for entry in json_outputs] == [[3, 2], [4], [1, 3]]


def test_training_results_reach_the_sdk_datum_by_datum() -> None:
    result = ForwardBackwardResult(
        logprobs=(np.array([-1.0, -2.0], np.float32), np.array([-3.0], np.float32)), metrics={"loss:sum": 6.0}
    )
    output = response_conv.deserialize_forward_backward_output(result_to_proto(result))
    assert [entry["logprobs"].tolist() for entry in output.loss_fn_outputs] == [[-1.0, -2.0], [-3.0]]
    assert output.metrics == {"loss:sum": 6.0}


def test_a_metric_without_a_reduction_fails_an_assertion() -> None:
    with pytest.raises(AssertionError, match="name:reduction"):
        result_to_proto(ForwardBackwardResult(logprobs=(np.zeros(1, np.float32),), metrics={"loss": 1.0}))


SAMPLED = SampleResult(
    sequences=(
        SampledSequence(
            tokens=np.array([5, 6], np.int32),
            logprobs=np.array([-0.5, -1.5], np.float32),
            stop_reason=StopReason.STOP,
        ),
        SampledSequence(
            tokens=np.array([7], np.int32),
            logprobs=np.array([-2.5], np.float32),
            stop_reason=StopReason.LENGTH,
        ),
    ),
    prompt_logprobs=np.array([np.nan, -1.0], np.float32),
    prompt_cache_hit_tokens=3,
)


TOPK = TopkLogprobs(
    token_ids=np.array([[0, 0], [5, 3]], np.int32),
    logprobs=np.array([[NO_LOGPROB, NO_LOGPROB], [-0.5, -1.0]], np.float32),
)
SPARSE_CELLS = CsrMatrix(
    values=np.array([-1.5], np.float32),
    shape=(1, 3),
    crow_indices=np.array([0, 1]),
    col_indices=np.array([2]),
)
DENSE_CELLS = CsrMatrix(values=np.array([-1.5, 0.0], np.float32), shape=(1, 2))


def test_top_k_and_targets_reach_the_sdk() -> None:
    sequence = replace(
        SAMPLED.sequences[0], topk=replace(TOPK, token_ids=TOPK.token_ids[1:], logprobs=TOPK.logprobs[1:])
    )
    result = replace(
        SAMPLED, sequences=(sequence,), topk_prompt_logprobs=TOPK, target_prompt_logprobs=SPARSE_CELLS
    )
    response = response_conv.deserialize_sample_response(result_to_proto(result))
    assert response.topk_prompt_logprobs == [None, [(5, -0.5), (3, -1.0)]]
    assert response.sequences[0].topk_logprobs == [[(5, -0.5), (3, -1.0)]]
    targets = response.target_prompt_logprobs
    assert targets is not None and (targets.data, targets.shape, targets.sparse_col_indices) == (
        [-1.5],
        [1, 3],
        [2],
    )
    json_result = orjson.loads(orjson.dumps(result_to_json("sample", result, {})))
    assert json_result["topk_prompt_logprobs"] == [None, [[5, -0.5], [3, -1.0]]]
    assert json_result["target_prompt_logprobs"]["sparse_crow_indices"] == [0, 1]
    dense_response = response_conv.deserialize_sample_response(
        result_to_proto(replace(SAMPLED, target_prompt_logprobs=DENSE_CELLS))
    )
    dense_targets = dense_response.target_prompt_logprobs
    assert dense_targets is not None and dense_targets.tolist() == [[-1.5, 0.0]]


def test_prompt_targets_may_be_dense_or_sparse() -> None:
    dense_tensor = {"data": [5, -1], "dtype": "int64", "shape": [1, 2]}
    sparse_tensor = {
        "data": [5],
        "dtype": "int64",
        "shape": [1, 40_000_000],
        "sparse_crow_indices": [0, 1],
        "sparse_col_indices": [39_999_999],
    }
    dense, sparse = (
        parse_sample(sample_body(target_prompt_logprobs=tensor), LIMITS).op.target_prompt_tokens
        for tensor in (dense_tensor, sparse_tensor)
    )
    assert dense is not None and (dense.values.tolist(), dense.crow_indices) == ([5, -1], None)
    assert sparse is not None and (sparse.values.tolist(), sparse.rows().tolist()) == ([5], [0])


def test_samples_reach_the_sdk_token_by_token() -> None:
    response = response_conv.deserialize_sample_response(result_to_proto(SAMPLED))
    assert [
        (sequence.tokens, sequence.logprobs, sequence.stop_reason) for sequence in response.sequences
    ] == [
        ([5, 6], [-0.5, -1.5], "stop"),
        ([7], [-2.5], "length"),
    ]
    assert (response.prompt_logprobs, response.prompt_cache_hit_tokens) == ([None, -1.0], 3)


def test_older_clients_get_results_in_json() -> None:
    sampled = orjson.loads(orjson.dumps(result_to_json("sample", SAMPLED, {})))
    assert sampled["prompt_logprobs"] == [None, -1.0]
    assert sampled["sequences"][0] == {"stop_reason": "stop", "tokens": [5, 6], "logprobs": [-0.5, -1.5]}
    assert result_to_json("optim_step", OptimStepResult(metrics={"grad_norm": 1.0}), {}) == {
        "metrics": {"grad_norm": 1.0}
    }
    saved = result_to_json(
        "save_weights_for_sampler",
        WeightsSaved(path=None, size_bytes=1),
        {"sampling_session_id": "s:sample:0"},
    )
    assert saved == {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": "s:sample:0"}
    loaded = result_to_json("load_weights", WeightsLoaded(model_id="m", lora=LoraSpec(rank=1)), {"path": "p"})
    assert loaded == {"type": "load_weights", "model_id": "m", "path": "p"}


def sample_body(**changes: object) -> dict[str, object]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    return {
        "prompt": prompt,
        "sampling_params": {"max_tokens": 4},
        "sampling_session_id": "s:sample:0",
        "seq_id": 0,
        **changes,
    }


def test_requests_of_old_sdks_may_omit_defaults() -> None:
    """SDKs up to 0.16 send only explicitly set fields. Even the type of a chunk may be missing."""
    op = parse_sample(
        {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}, "base_model": "m"}, LIMITS
    ).op
    assert (op.num_samples, op.settings.max_tokens, op.settings.temperature, op.settings.stop_at_eos) == (
        1,
        None,
        1.0,
        True,
    )


def test_large_seq_ids_of_unpickled_clients_are_accepted() -> None:
    """The seq_ids of an unpickled `SamplingClient` start at a random multiple of 10^9."""
    assert parse_sample(sample_body(seq_id=435852681000000000), LIMITS).seq_id == 435852681000000000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": {"chunks": []}}, "prompt is empty"),
        (
            {"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}},
            "image chunks are not supported",
        ),
        ({"prompt": {"chunks": [{"tokens": [1, "2"]}]}}, "flat list of integers"),
        ({"prompt": {"chunks": [{"tokens": [1, 2.5]}]}}, "flat list of integers"),
        ({"prompt": {"chunks": [{"tokens": [[1], [2, 3]]}]}}, "flat list of integers"),
        ({"prompt": {"chunks": [{"tokens": [64]}]}}, "outside this model's vocabulary"),
        ({"prompt": {"chunks": [{"tokens": [1] * 13}]}}, r"exceeds the model's context window: 13 \+ 4 > 16"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"num_samples": True}, "must be an integer"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens=0"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"temperature": float("nan")}}, "finite number"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"top_k": 0}}, "top_k=0"),
        ({"sampling_params": {"seed": -1}}, "seed=-1"),
        ({"sampling_params": {"stop": [""]}}, "empty stop string"),
        ({"sampling_params": {"stop": ["a", 1]}}, "stop must be"),
        ({"sampling_params": {"stop": list(range(17))}}, "17 stop tokens: at most 16"),
        ({"sampling_params": {"stop": ["a"] * 65}}, "stop: at most 64 strings"),
        ({"sampling_params": {"stop": "a" * 1025}}, "of at most 1024 characters"),
        ({"sampling_params": {"stop": [64]}}, "stop token 64 is outside"),
        ({"sampling_params": {"min_p": 0.1}}, "unknown field min_p"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not supported"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n=1 needs prompt_logprobs"),
        ({"prompt_logprobs_last_n": 2, "prompt_logprobs": True}, "between 1 and"),
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs=-1 must lie between 0 and 64"),
        ({"topk_sample_logprobs": 65}, "topk_sample_logprobs=65 must lie between 0 and 64"),
        ({"target_prompt_logprobs": {"data": [1]}}, "expected a matrix"),
        ({"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]}}, "must have 1 rows"),
        ({"target_prompt_logprobs": {"data": [-1], "dtype": "int64", "shape": [1, 1]}}, "contains no token"),
        (
            {"target_prompt_logprobs": {"data": [64], "dtype": "int64", "shape": [1, 1]}},
            "outside this model's vocabulary",
        ),
        ({"target_prompt_logprobs": {"data": [1.0], "dtype": "float32", "shape": [1, 1]}}, "must be int64"),
        ({"repetition_penalty": 1.1}, "unknown field repetition_penalty"),
        ({"seq_id": "1"}, "must be an integer"),
    ],
)
def test_an_invalid_or_unsupported_sample_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_sample(sample_body(**changes), LIMITS)


def test_values_at_every_limit_are_accepted() -> None:
    def parsed_prompt_length(length: int, **settings: object) -> int:
        return parse_sample(
            sample_body(prompt={"chunks": [{"tokens": [63] * length}]}, sampling_params=settings), LIMITS
        ).op.prompt.size

    assert parsed_prompt_length(12, max_tokens=4, stop=[63]) == 12 and parsed_prompt_length(15) == 15
    with pytest.raises(UserError, match=r"16 \+ 1 > 16"):
        parsed_prompt_length(16)  # a sample has at least one token
    (longest_datum,) = parse_training_proto(sdk_bytes(datum([63] * 16)), LIMITS).op.data
    assert longest_datum.tokens.tolist() == [63] * 16
    settings = parse_training_proto(
        sdk_bytes(datum([1, 2], **RL_INPUTS), loss_fn="ppo", config={"clip_high_threshold": 0.8}), LIMITS
    ).op.settings
    assert settings.clip_low_threshold == settings.clip_high_threshold == 0.8
    zeros = [0.0, 0.0]
    zero_advantages = datum([1, 2], logprobs=[-1.0, -1.0], advantages=zeros, sequence_ratio_mask=zeros)
    assert len(parse_training_proto(sdk_bytes(zero_advantages, loss_fn="gspo"), LIMITS).op.data) == 1
    assert parse_lora({"rank": 8}, LIMITS).rank == 8
    assert parse_lora({}, replace(LIMITS, max_lora_rank=32)).rank == 32


def test_stop_tokens_replace_the_eos_tokens_of_the_model() -> None:
    for stop in ([7], []):
        assert not parse_sampling_params({"stop": stop}, LIMITS).stop_at_eos
    assert parse_sampling_params({}, LIMITS).stop_at_eos


def test_stop_strings_do_not_replace_the_eos_tokens_of_the_model() -> None:
    """The renderer `role_colon` of the cookbook passes a stop string and expects that end-of-sequence tokens
    end a sample too."""
    default = parse_sampling_params({}, LIMITS)
    for stop in ("\n\nUser:", ["\n\nUser:"]):
        settings = parse_sampling_params({"stop": stop}, LIMITS)
        assert settings == replace(default, stop_strings=("\n\nUser:",))


def test_disabled_options_are_accepted() -> None:
    disabled_options = {
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "target_prompt_logprobs": None,
        "prompt_logprobs": False,
    }
    assert parse_sample(sample_body(**disabled_options), LIMITS).op.prompt_logprobs is False


def test_a_lora_without_a_seed_gets_a_random_seed() -> None:
    seeds = {parse_lora({"rank": 4}, LIMITS).seed for _ in range(3)}
    assert len(seeds) == 3
    assert parse_lora({"rank": 4, "seed": 0}, LIMITS).seed == 0


@pytest.mark.seed_behaviour(84)
def test_lora_alpha_in_the_metadata_of_a_model_sets_alpha() -> None:
    assert parse_lora({"rank": 4}, LIMITS, {"lora_alpha": "64", "other": "x"}).alpha == 64
    assert parse_lora({"rank": 4}, LIMITS, {"other": "x"}).alpha == 32
    for text in ("0", "-1", "nan", "inf", "many"):
        with pytest.raises(UserError, match=r"lora_alpha=.* must be a number above 0 and at most 65536"):
            parse_lora({"rank": 4}, LIMITS, {"lora_alpha": text})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"rank": 0}, "at least 1"),
        ({"rank": 9}, "max_lora_rank=8"),
        ({"rank": 4, "seed": -1}, "seed"),
        ({"rank": 4, "train_attn": False, "train_mlp": False, "train_unembed": False}, "nothing to train"),
        ({"rank": 4, "alpha": 16}, "unknown field alpha"),
    ],
)
@pytest.mark.seed_behaviour(86)
def test_an_unsupported_lora_is_refused(body: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_lora(body, LIMITS)


def test_adam_has_the_defaults_of_tinker_and_reads_every_field() -> None:
    defaults = parse_adam(JsonReader({"adam_params": {}}, "optim_step"))
    assert (defaults.learning_rate, defaults.beta1, defaults.beta2, defaults.eps) == (1e-4, 0.9, 0.95, 1e-12)
    assert (defaults.weight_decay, defaults.grad_clip_norm) == (0, 0)
    fields = {
        "learning_rate": 1,
        "beta1": 0.1,
        "beta2": 0.2,
        "eps": 0.3,
        "weight_decay": 0.4,
        "grad_clip_norm": 0.5,
    }
    adam = parse_adam(JsonReader({"adam_params": fields}, "optim_step"))
    assert {name: getattr(adam, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}, "use AdamW"),
        ({"adam_params": {"learning_rate": -1}}, "negative"),
        ({"adam_params": {"learning_rate": None}}, "learning_rate must be a finite number, got null, NaN or"),
        ({"adam_params": {"beta1": 1}}, r"\[0, 1\)"),
        ({"adam_params": {"beta2": 1 - 1e-12}}, r"\[0, 1\), at most 0\.99999994"),
        ({"adam_params": {"amsgrad": True}}, "unknown field amsgrad"),
    ],
)
def test_an_unsupported_optimizer_is_refused(body: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_adam(JsonReader(body, "optim_step"))


def test_sampling_params_default_to_plain_sampling() -> None:
    settings = parse_sampling_params({}, LIMITS)
    assert (settings.temperature, settings.top_k, settings.top_p, settings.seed) == (1.0, -1, 1.0, None)

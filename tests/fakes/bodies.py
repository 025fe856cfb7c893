"""Mutated request bodies, and checks that every request parser must pass for them.

This module imports hypothesis but neither a test framework nor jax, so that `tests.stress.fuzz` can run the
same checks with atheris.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from skyrl_tx_server.engine.operations import ForwardBackward
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.http.wire.json_reader import JsonReader
from skyrl_tx_server.http.wire.limits import Limits
from skyrl_tx_server.http.wire.openai_requests import parse_chat, parse_completion
from skyrl_tx_server.http.wire.proto import tinker_wire_pb2 as pb
from skyrl_tx_server.http.wire.protobuf import parse_training_proto
from skyrl_tx_server.http.wire.sampling_requests import parse_sample
from skyrl_tx_server.http.wire.training_requests import (
    TrainRequest,
    parse_adam,
    parse_lora,
    parse_training_json,
)

ROUTES = (
    *(
        "create_session",
        "session_heartbeat",
        "telemetry",
        "client/config",
        "get_info",
        "retrieve_future",
        "cancel_future",
    ),
    *(
        "create_model",
        "unload_model",
        "forward",
        "forward_backward",
        "optim_step",
        "create_sampling_session",
        "asample",
    ),
    *(
        "save_weights",
        "save_weights_for_sampler",
        "save_weights_external",
        "load_weights",
        "weights_info",
        "copy_weights",
    ),
)
"""Routes below /api/v1 that accept POST requests and have no parameter in their path."""
LIMITS = Limits(vocab_size=64, max_context_length=16, max_lora_rank=8)
TENSOR = {"data": [1, 2, 3], "dtype": "int64", "shape": [3]}
SPARSE = {
    "data": [5, 6],
    "dtype": "int64",
    "shape": [3, 4],
    "sparse_crow_indices": [0, 1, 1, 2],
    "sparse_col_indices": [3, 0],
}
MODEL_INPUT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
DATA = [
    {
        "model_input": MODEL_INPUT,
        "loss_fn_inputs": {"target_tokens": TENSOR, "weights": {"data": [0.0, 1.0, 0.5], "dtype": "float32"}},
    },
    {
        "model_input": MODEL_INPUT,
        "loss_fn_inputs": {
            "target_tokens": SPARSE,
            "weights": SPARSE | {"data": [0.5, 1.0], "dtype": "float32"},
        },
    },
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
VALID: dict[str, object] = {
    "forward_backward": {
        "model_id": "m",
        "seq_id": 1,
        "forward_backward_input": {"data": DATA, "loss_fn": "cross_entropy", "loss_fn_config": {}},
    },
    "asample": {
        "sampling_session_id": "s",
        "seq_id": 1,
        "num_samples": 2,
        "prompt": MODEL_INPUT,
        "prompt_logprobs": True,
        "prompt_logprobs_last_n": 1,
        "topk_prompt_logprobs": 2,
        "target_prompt_logprobs": SPARSE | {"shape": [2, 4], "sparse_crow_indices": [0, 1, 2]},
        "sampling_params": {
            "max_tokens": 3,
            "temperature": 0.5,
            "top_k": 5,
            "top_p": 0.9,
            "seed": 1,
            "stop": ["a"],
        },
    },
    "optim_step": {
        "adam_params": {
            "learning_rate": 1e-3,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.1,
            "grad_clip_norm": 1.0,
        }
    },
    "lora_config": {"rank": 4, "seed": 1, "train_attn": True, "train_mlp": True, "train_unembed": False},
    "chat": {
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "tool_calls": [CALL]},
        ],
        "tools": [TOOL],
        "max_tokens": 3,
        "temperature": 0.5,
        "stop": ["a"],
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
        "logit_bias": {},
        "response_format": {"type": "text"},
    },
    "completion": {
        "model": "m",
        "prompt": [[1, 2], "text"],
        "max_tokens": 3,
        "n": 2,
        "logprobs": 0,
        "stop_token_ids": [3],
        "top_k": 4,
    },
}


def valid_message(loss_fn: str, *inputs: str, sparse: bool = False) -> bytes:
    """Return a serialized ForwardBackwardRequest with one datum of three tokens and the given loss inputs."""
    request = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn=loss_fn)
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2, 3], "<i4").tobytes()
    for name in inputs:
        dtype, numpy_dtype = (pb.DTYPE_INT64, "<i8") if name == "target_tokens" else (pb.DTYPE_FLOAT32, "<f4")
        tensor = pb.Tensor(dtype=dtype, shape=[3, 4] if sparse else [3])
        if sparse:
            crow_indices, col_indices = (
                np.array([0, 1, 1, 2], "<i8").tobytes(),
                np.array([3, 0], "<i8").tobytes(),
            )
            csr = pb.SparseCsr(
                values=np.array([1, 2], numpy_dtype).tobytes(),
                crow_indices=crow_indices,
                col_indices=col_indices,
            )
            tensor.sparse_csr.CopyFrom(csr)
        else:
            tensor.dense = np.array([1, 2, 3], numpy_dtype).tobytes()
        datum.loss_fn_inputs[name].CopyFrom(tensor)
    return request.SerializeToString()


VALID_MESSAGES = (
    valid_message("cross_entropy", "target_tokens", "weights"),
    valid_message("cross_entropy", "target_tokens", "weights", sparse=True),
    valid_message("ppo", "target_tokens", "logprobs", "advantages"),
    valid_message("gspo", "target_tokens", "logprobs", "advantages", "sequence_ratio_mask"),
)
PARSERS: dict[str, Callable[[object], object]] = {
    "forward_backward": lambda body: parse_training_json(body, LIMITS, forward_only=False),
    "asample": lambda body: parse_sample(body, LIMITS),
    "optim_step": lambda body: parse_adam(JsonReader(body, "optim_step")),
    "lora_config": lambda body: parse_lora(body, LIMITS),
    "chat": lambda body: parse_chat(body, LIMITS),
    "completion": lambda body: parse_completion(body, LIMITS),
}

numbers = st.one_of(
    st.integers(-3, 70), st.integers(), st.sampled_from((2**31, 2**63, -(2**63) - 1, 2**200)), st.floats()
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def mutated(draw: st.DrawFn, valid: object, changes: int = 2) -> object:
    """Return `valid` with up to `changes` elements replaced, removed, renamed or duplicated."""
    body = json.loads(json.dumps(valid))
    for _ in range(draw(st.integers(1, changes))):
        body = _changed(draw, body)
    return body


def _changed(draw: st.DrawFn, value: object) -> object:
    """Return `value` with one change, at the top level or in a nested value."""
    if isinstance(value, dict) and value and draw(st.integers(0, 7)):
        name = draw(st.sampled_from(sorted(value)))
        match draw(st.sampled_from(("nested", "nested", "nested", "removed", "renamed"))):
            case "removed":
                return {key: entry for key, entry in value.items() if key != name}
            case "renamed":
                return {
                    draw(st.text(max_size=5)) if key == name else key: entry for key, entry in value.items()
                }
            case _:
                return value | {name: _changed(draw, value[name])}
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        index = draw(st.integers(0, len(value) - 1))
        return [*value[:index], _changed(draw, value[index]), *value[index + draw(st.integers(0, 1)) :]]
    return draw(values)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Return a serialized ForwardBackwardRequest with random fields, possibly truncated or with inserted
    bytes.
    """
    arrays = st.one_of(
        st.just(np.array([1, 2, 3], "<i8").tobytes()),
        st.just(np.array([0, 1, 2], "<f4").tobytes()),
        st.binary(max_size=40),
    )
    request = pb.ForwardBackwardRequest(
        model_id=draw(st.sampled_from(("m", ""))), seq_id=draw(st.integers(0, 2**31 - 1))
    )
    request.loss_fn = draw(st.sampled_from(("cross_entropy", "ppo", "gspo", "stable_reinforce", "")))
    loss_configs = st.dictionaries(st.sampled_from(("beta", "clip_low_threshold")), st.floats(), max_size=1)
    for name, value in draw(loss_configs).items():
        request.loss_fn_config[name] = value
    for _ in range(draw(st.integers(0, 3))):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = draw(
            st.one_of(st.just(np.array([1, 2, 3], "<i4").tobytes()), st.binary(max_size=20))
        )
        for name in draw(
            st.sets(
                st.sampled_from(
                    ("target_tokens", "weights", "logprobs", "advantages", "sequence_ratio_mask", "x")
                )
            )
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype = draw(
                st.sampled_from(
                    (
                        pb.DTYPE_INT64,
                        pb.DTYPE_FLOAT32,
                        pb.DTYPE_INT32,
                        pb.DTYPE_BFLOAT16,
                        pb.DTYPE_UNSPECIFIED,
                    )
                )
            )
            tensor.shape.extend(
                draw(st.one_of(st.just([]), st.just([3]), st.lists(st.integers(-2, 2**40), max_size=3)))
            )
            if draw(st.booleans()):
                tensor.dense = draw(arrays)
            else:
                csr = pb.SparseCsr(values=draw(arrays), crow_indices=draw(arrays), col_indices=draw(arrays))
                tensor.sparse_csr.CopyFrom(csr)
    body = request.SerializeToString()
    position = draw(st.integers(0, len(body)))
    inserted = draw(st.binary(max_size=6))
    return draw(st.sampled_from((body, body[:position], body[:position] + inserted + body[position:])))


def json_is_accepted(name: str, body: object) -> bool:
    """Return whether the parser `name` accepts the body.

    The parser may raise only `UserError`. Any other error propagates.
    """
    try:
        parsed = PARSERS[name](body)
    except UserError as error:
        assert str(error)
        return False
    if isinstance(parsed, TrainRequest):
        check_training(parsed.op)
    return True


def protobuf_is_accepted(body: bytes) -> bool:
    """Return whether the protobuf parser accepts the body. Any error except `UserError` propagates."""
    try:
        check_training(parse_training_proto(body, LIMITS).op)
    except UserError as error:
        assert str(error)
        return False
    return True


def check_training(op: ForwardBackward) -> None:
    """Check the lengths, dtypes and ranges that the losses require."""
    assert op.data and op.model_id
    for datum in op.data:
        assert 0 < len(datum.tokens) == len(datum.target_tokens) <= LIMITS.max_context_length
        for ids in (datum.tokens, datum.target_tokens):
            assert (
                ids.dtype == np.int32 and ids.min(initial=0) >= 0 and ids.max(initial=0) < LIMITS.vocab_size
            )
        for floats in (datum.weights, datum.logprobs, datum.advantages, datum.sequence_ratio_mask):
            assert floats is None or (
                floats.dtype == np.float32 and np.isfinite(floats).all() and len(floats) == len(datum.tokens)
            )

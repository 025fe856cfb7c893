"""The SDK's JSON bodies to operations, and the checks that JSON and protobuf requests share.

Everything the server cannot honour is a `UserError` that names the alternative; nothing that would change a result is dropped in silence.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from skyrl_tx_server.engine.loss_spec import LOSSES
from skyrl_tx_server.engine.operations import (
    AdamSettings,
    CsrMatrix,
    ForwardBackward,
    LoraSpec,
    LossFn,
    LossSettings,
    Sample,
    SamplingSettings,
    TrainDatum,
)
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.http.wire.json_reader import JsonReader, is_finite_number, quoted

MAX_SAMPLES_PER_REQUEST = 4096
MAX_SEED = 2**63 - 1
MAX_TOP_K = 1024
"""Tokens per position that a top-k or a target list may name."""
MAX_CELLS = 1 << 24
"""Cells of one matrix, so that a few bytes of sparse request cannot ask for gigabytes."""
MAX_REQUEST_CELLS = 1 << 26
TEN_YEARS_S = 315_360_000
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
_CONVERTED_AT_ONCE = 1 << 16

INPUT_HINTS = {
    "mask": "masking is a zero weight (cross_entropy) or a zero advantage (the other losses)",
    "weights": "only cross_entropy takes weights; fold them into the advantages",
    "clip_low_threshold": "clip thresholds are per request here: pass them in loss_fn_config",
    "clip_high_threshold": "clip thresholds are per request here: pass them in loss_fn_config",
    "sequence_ratio_mask": "it belongs to gspo",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What this server's model can take; every check of a request's size reads it."""

    vocab_size: int
    max_context_length: int
    max_lora_rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRequest:
    """One forward or forward_backward request, from either wire format."""

    seq_id: int | None  # None: the client gave none, so it cannot be recognised when sent again
    op: ForwardBackward


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """One asample request; `sampler_id` is None only when the caller named a base model or a path instead."""

    sampler_id: str | None
    seq_id: int | None
    base_model: str | None
    model_path: str | None
    op: Sample  # of the base model; its weights are those that the sampler, or the path, stands for


# --- small values -----------------------------------------------------------------------------------------------


def check_ttl(ttl_seconds: int | None) -> int | None:
    if ttl_seconds is not None and not 1 <= ttl_seconds <= TEN_YEARS_S:
        raise UserError(
            f"ttl_seconds={ttl_seconds} must lie between 1 and {TEN_YEARS_S} (ten years); leave it out to keep the checkpoint"
        )
    return ttl_seconds


def check_optimizer_config(fields: JsonReader) -> None:
    """Only AdamW exists here; dimuon is refused when the model is made rather than at its first step."""
    config = JsonReader(fields.mapping("optimizer_config"), "optimizer_config")
    kind = config.optional_text("type")
    if kind not in (None, "adamw"):
        raise UserError(f"optimizer {kind!r} is not supported by this server; use AdamW (tinker.AdamParams)")
    config.finish()


def parse_lora(body: object, limits: Limits) -> LoraSpec:
    fields = JsonReader(body, "lora_config")
    rank = fields.optional_integer("rank")
    spec = LoraSpec(
        rank=32 if rank is None else rank,
        seed=secrets.randbelow(2**31) if (seed := fields.optional_integer("seed")) is None else seed,
        train_attn=fields.flag("train_attn", True),
        train_mlp=fields.flag("train_mlp", True),
        train_unembed=fields.flag("train_unembed", True),
    )
    fields.finish()
    if spec.rank < 1:
        raise UserError(f"LoRA rank {spec.rank} must be at least 1")
    if spec.rank > limits.max_lora_rank:
        raise UserError(
            f"LoRA rank {spec.rank} is above this server's max_lora_rank={limits.max_lora_rank}; "
            f"ask for a smaller rank or start the server with max_lora_rank={spec.rank}"
        )
    if not 0 <= spec.seed <= MAX_SEED:
        raise UserError(f"lora_config: seed={spec.seed} must lie between 0 and 2**63 - 1")
    if not (spec.train_attn or spec.train_mlp or spec.train_unembed):
        raise UserError(
            "lora_config: nothing to train; at least one of train_attn, train_mlp, train_unembed must be true"
        )
    return spec


def parse_adam(fields: JsonReader) -> AdamSettings:
    """The optimizer settings of an optim_step body."""
    other = fields.mapping("optimizer_params")
    if other:
        raise UserError(
            f"optimizer {quoted(other.get('type'))} is not supported by this server; use AdamW (tinker.AdamParams)"
        )
    params = JsonReader(fields.mapping("adam_params"), "adam_params")
    default = AdamSettings()
    adam = AdamSettings(
        learning_rate=params.number("learning_rate", default.learning_rate),
        beta1=params.number("beta1", default.beta1),
        beta2=params.number("beta2", default.beta2),
        eps=params.number("eps", default.eps),
        weight_decay=params.number("weight_decay", default.weight_decay),
        grad_clip_norm=params.number("grad_clip_norm", default.grad_clip_norm),
    )
    params.ignore("type")
    params.finish()
    if adam.learning_rate < 0 or adam.weight_decay < 0 or adam.grad_clip_norm < 0:
        raise UserError("adam_params: learning_rate, weight_decay and grad_clip_norm must not be negative")
    if not (0 <= adam.beta1 < 1 and 0 <= adam.beta2 < 1 and adam.eps > 0):
        raise UserError("adam_params: beta1 and beta2 must lie in [0, 1) and eps above 0")
    return adam


# --- prompts ----------------------------------------------------------------------------------------------------


def array_of(values: list[object], dtype: np.dtype | None = None) -> np.ndarray:
    """A flat list of numbers as [N]. ValueError for anything else in it: numpy would make text as wide as the longest string.

    In steps, between which other threads run: of a large list numpy holds Python's lock for longer than they can wait.
    """
    parts = []
    for at in range(0, len(values), _CONVERTED_AT_ONCE):
        part = values[at : at + _CONVERTED_AT_ONCE]
        if not set(map(type, part)) <= {int, float, bool}:
            raise ValueError("not a flat list of numbers")
        parts.append(np.asarray(part, dtype))
    return np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else np.asarray([], dtype)


def integers(values: list[object], where: str) -> np.ndarray:
    """A flat JSON list of integers as [N] int64."""
    try:
        array = array_of(values)
    except (ValueError, TypeError, OverflowError):
        raise UserError(f"{where}: expected a flat list of integers") from None
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(
            f"{where}: expected a flat list of integers, got {array.ndim} dimension(s) of {array.dtype}"
        )
    return array.astype(np.int64)


def check_tokens(tokens: np.ndarray, where: str, limits: Limits) -> np.ndarray:
    """[N] integers in the vocabulary, as int32."""
    if tokens.size and (tokens.min() < 0 or tokens.max() >= limits.vocab_size):
        bad = int(tokens[(tokens < 0) | (tokens >= limits.vocab_size)][0])
        raise UserError(
            f"{where}: token {bad} is outside this model's vocabulary of {limits.vocab_size}; is the tokenizer the model's own?"
        )
    return tokens.astype(np.int32)


def parse_model_input(body: object, where: str, limits: Limits) -> np.ndarray:
    """The chunks of a ModelInput as one [P] int32 array."""
    fields = JsonReader(body, where)
    parts = [np.zeros(0, np.int64)]
    for chunk_body in fields.items("chunks"):
        chunk = JsonReader(chunk_body, f"{where} chunk")
        kind = chunk.optional_text("type") or "encoded_text"
        if kind != "encoded_text":
            raise UserError(
                f"{where}: {kind} chunks are not supported by this text-only server; send encoded_text tokens"
            )
        parts.append(integers(chunk.items("tokens"), where))
        chunk.finish()
    fields.finish()
    return check_tokens(np.concatenate(parts), where, limits)


def parse_stop(stop: object) -> SamplingSettings:
    """Settings with the SDK's `stop`: None means the model's own end tokens, [] means none at all."""
    wrong = UserError(
        f"sampling_params: stop must be a string, a list of strings or a list of token ids, got {quoted(stop)}"
    )
    if stop is None:
        return SamplingSettings()
    values = [stop] if isinstance(stop, str) else stop
    if not isinstance(values, list):
        raise wrong
    if len(values) > MAX_STOPS or any(
        isinstance(value, str) and len(value) > MAX_STOP_LENGTH for value in values
    ):
        raise UserError(
            f"sampling_params: stop takes at most {MAX_STOPS} entries of at most {MAX_STOP_LENGTH} characters"
        )
    strings = tuple(value for value in values if isinstance(value, str))
    token_ids = tuple(value for value in values if isinstance(value, int) and not isinstance(value, bool))
    if len(values) not in (len(strings), len(token_ids)) or any(token_id < 0 for token_id in token_ids):
        raise wrong
    if "" in strings:
        raise UserError(
            "sampling_params: an empty stop string would stop before the first token; leave it out"
        )
    return SamplingSettings(stop_strings=strings, stop_token_ids=token_ids, stop_at_eos=False)


def parse_sampling_params(body: object, limits: Limits) -> SamplingSettings:
    fields = JsonReader(body, "sampling_params")
    settings = replace(
        parse_stop(fields.anything("stop")),
        max_tokens=fields.optional_integer("max_tokens"),
        temperature=fields.number("temperature", 1.0),
        top_k=-1 if (top_k := fields.optional_integer("top_k")) is None else top_k,
        top_p=fields.number("top_p", 1.0),
        seed=fields.optional_integer("seed"),
    )
    fields.finish()
    if settings.max_tokens is not None and settings.max_tokens < 1:
        raise UserError(f"sampling_params: max_tokens={settings.max_tokens} must be at least 1")
    if settings.temperature < 0:
        raise UserError(
            f"sampling_params: temperature={settings.temperature} must not be negative (0 is greedy)"
        )
    if settings.top_k != -1 and settings.top_k < 1:
        raise UserError(f"sampling_params: top_k={settings.top_k} must be -1 (off) or at least 1")
    if not 0 < settings.top_p <= 1:
        raise UserError(f"sampling_params: top_p={settings.top_p} must lie in (0, 1]")
    for token_id in settings.stop_token_ids:
        if token_id >= limits.vocab_size:
            raise UserError(
                f"sampling_params: stop token {token_id} is outside this model's vocabulary of {limits.vocab_size}"
            )
    if settings.seed is not None and not 0 <= settings.seed <= MAX_SEED:
        raise UserError(f"sampling_params: seed={settings.seed} must lie between 0 and 2**63 - 1")
    return settings


def parse_sample(body: object, limits: Limits) -> SampleRequest:
    fields = JsonReader(body, "asample")
    fields.refuse("prompt_alt_tokens_k", "sample from each prefix instead, or draw from topk_prompt_logprobs")
    # Stability records are read by stable_reinforce alone, which is refused by name.
    fields.ignore("type", "record_stability_info")
    num_samples = fields.optional_integer("num_samples")
    targets = fields.anything("target_prompt_logprobs")
    sampler_id, seq_id = fields.optional_text("sampling_session_id"), fields.optional_integer("seq_id")
    base_model, model_path = fields.optional_text("base_model"), fields.optional_text("model_path")
    op = Sample(
        weights=None,
        prompt=parse_model_input(fields.mapping("prompt"), "prompt", limits),
        num_samples=1 if num_samples is None else num_samples,
        settings=parse_sampling_params(fields.mapping("sampling_params"), limits),
        prompt_logprobs=fields.flag("prompt_logprobs", False),
        topk_prompt_logprobs=fields.optional_integer("topk_prompt_logprobs") or 0,
        topk_sample_logprobs=fields.optional_integer("topk_sample_logprobs") or 0,
        target_prompt_tokens=None if targets is None else parse_cells(targets, "target_prompt_logprobs"),
        prompt_logprobs_last_n=fields.optional_integer("prompt_logprobs_last_n"),
    )
    fields.finish()
    if not 1 <= op.num_samples <= MAX_SAMPLES_PER_REQUEST:
        raise UserError(
            f"asample: num_samples={op.num_samples} must lie between 1 and {MAX_SAMPLES_PER_REQUEST}"
        )
    if op.prompt.size == 0:
        raise UserError("asample: the prompt is empty; send at least one token")
    wanted = op.settings.max_tokens or 1
    if op.prompt.size + wanted > limits.max_context_length:
        raise UserError(
            f"Prompt length plus max_tokens exceeds the model's context window: {op.prompt.size} + {wanted} > {limits.max_context_length}"
        )
    for name, k in (
        ("topk_prompt_logprobs", op.topk_prompt_logprobs),
        ("topk_sample_logprobs", op.topk_sample_logprobs),
    ):
        if not 0 <= k <= min(MAX_TOP_K, limits.vocab_size):
            raise UserError(f"asample: {name}={k} must lie between 0 and {min(MAX_TOP_K, limits.vocab_size)}")
    last_n = op.prompt_logprobs_last_n
    if last_n is not None and not (op.prompt_logprobs and 1 <= last_n < op.prompt.size):
        raise UserError(
            f"asample: prompt_logprobs_last_n={last_n} needs prompt_logprobs and must lie between 1 and len(prompt) - 1"
        )
    if op.target_prompt_tokens is not None:
        op = replace(
            op, target_prompt_tokens=_check_prompt_targets(op.target_prompt_tokens, op.prompt.size, limits)
        )
    return SampleRequest(
        sampler_id=sampler_id, seq_id=seq_id, base_model=base_model, model_path=model_path, op=op
    )


def _check_prompt_targets(targets: CsrMatrix, prompt_length: int, limits: Limits) -> CsrMatrix:
    """Tokens to score in a prompt: one row for each of its positions but the first, -1 where nothing is asked."""
    where = "target_prompt_logprobs"
    if targets.shape[0] != prompt_length - 1:
        raise UserError(
            f"{where}: shape {list(targets.shape)} must have {prompt_length - 1} rows, one per prompt token after the first"
        )
    if targets.values.dtype.kind not in "iu":
        raise UserError(f"{where}: token ids must be int64, got {targets.values.dtype}")
    asked = targets.values[targets.values != -1]
    if not asked.size:
        raise UserError(f"{where}: it names no token; leave it out")
    check_tokens(asked, where, limits)
    if np.bincount(targets.rows()[targets.values != -1]).max() > MAX_TOP_K:
        raise UserError(f"{where}: at most {MAX_TOP_K} tokens per position")
    return replace(targets, values=targets.values.astype(np.int32))


# --- training data ----------------------------------------------------------------------------------------------


def parse_loss_fn(name: str) -> LossFn:
    try:
        return LossFn(name)
    except ValueError:
        known = ", ".join(loss.value for loss in LossFn)
        if name == "custom":
            raise UserError(
                f"loss 'custom' does not run on this server; use forward_backward_custom, or one of: {known}"
            ) from None
        raise UserError(f"loss {quoted(name)} is not supported by this server; use one of: {known}") from None


def parse_loss_config(loss_fn: LossFn, config: Mapping[str, object]) -> LossSettings:
    known = LOSSES[loss_fn].options
    for name, value in config.items():
        if name not in known:
            allowed = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
            raise UserError(f"loss_fn_config: unknown setting {quoted(name)} for {loss_fn.value}; {allowed}")
        if not is_finite_number(value) or not isinstance(value, int | float) or value not in known[name]:
            raise UserError(f"loss_fn_config: {name} must be {known[name]}, got {quoted(value)}")
    settings = LossSettings(
        **{name: float(value) for name, value in config.items() if isinstance(value, int | float)}
    )
    low, high = settings.clip_low_threshold, settings.clip_high_threshold
    if low > high:
        raise UserError(
            f"loss_fn_config: clip_low_threshold={low} is above clip_high_threshold={high}; they are absolute bounds on the ratio"
        )
    return settings


def check_datum(
    index: int, tokens: np.ndarray, inputs: Mapping[str, np.ndarray], loss_fn: LossFn, limits: Limits
) -> TrainDatum:
    """One datum from its decoded arrays, with every property the loss relies on checked."""
    where = f"datum {index}"
    spec = LOSSES[loss_fn]
    expected = spec.inputs
    for name, array in inputs.items():
        if name not in expected:
            hint = INPUT_HINTS.get(name, f"{loss_fn.value} takes {', '.join(sorted(expected))}")
            raise UserError(f"{where}: loss {loss_fn.value} does not use the input {quoted(name)}; {hint}")
        if array.ndim != 1 and (array.ndim != 2 or not spec.takes_several_targets):
            takes = (
                "[N] or [N, K]"
                if spec.takes_several_targets
                else "[N]: only cross_entropy takes several targets per position"
            )
            raise UserError(f"{where}: {name} has shape {list(array.shape)}; {loss_fn.value} takes {takes}")
        if len(array) != tokens.size:
            raise UserError(
                f"{where}: {name} has {len(array)} entries for {tokens.size} model_input tokens; they must be equal"
            )
    missing = expected - set(inputs) - spec.optional_inputs
    if missing:
        raise UserError(f"{where}: loss {loss_fn.value} needs the input {', '.join(sorted(missing))}")
    if tokens.size == 0:
        raise UserError(f"{where}: model_input is empty")
    if tokens.size > limits.max_context_length:
        raise UserError(
            f"{where}: {tokens.size} tokens exceed the model's context window of {limits.max_context_length}"
        )
    targets = inputs["target_tokens"]
    if targets.dtype.kind not in "iu":
        raise UserError(f"{where}: target_tokens must be int64, got {targets.dtype}")
    if targets.ndim == 2 and not 1 <= targets.shape[1] <= MAX_TOP_K:
        raise UserError(f"{where}: {targets.shape[1]} targets per position; they must be 1 to {MAX_TOP_K}")
    if "weights" in inputs and inputs["weights"].shape != targets.shape:
        raise UserError(
            f"{where}: weights have the shape {list(inputs['weights'].shape)}, target_tokens {list(targets.shape)}; they must be equal"
        )
    made = TrainDatum(
        tokens=tokens,
        target_tokens=check_tokens(targets, f"{where}: target_tokens", limits),
        weights=_finite(inputs, "weights", where),
        logprobs=_finite(inputs, "logprobs", where),
        advantages=_finite(inputs, "advantages", where),
        sequence_ratio_mask=_finite(inputs, "sequence_ratio_mask", where),
    )
    if "sequence_ratio_mask" in expected and not np.any(made.sequence_ratio_mask) and np.any(made.advantages):
        raise UserError(
            f"{where}: sequence_ratio_mask is 0 everywhere, so there is no ratio; set it to 1 on the completion"
        )
    return made


def _finite(inputs: Mapping[str, np.ndarray], name: str, where: str) -> np.ndarray | None:
    """One NaN would poison the whole accumulated gradient, and with it every later step."""
    if name not in inputs:
        return None
    values = inputs[name].astype(np.float32)
    if not np.isfinite(values).all():
        raise UserError(f"{where}: {name} holds a value that is not finite")
    return values


def check_request_cells(num_targets: int) -> None:
    """Of all datums so far; called after each, before the next one is unfolded."""
    if num_targets > MAX_REQUEST_CELLS:
        raise UserError(
            f"forward_backward: more than {MAX_REQUEST_CELLS} targets in one request; send fewer datums at once"
        )


def cells_from_csr(
    values: np.ndarray, crow_indices: np.ndarray, col_indices: np.ndarray, shape: Sequence[int], where: str
) -> CsrMatrix:
    """A checked sparse matrix; crow_indices and col_indices are int64."""
    wrong = UserError(
        f"{where}: not a sparse CSR matrix; its row pointers, columns and values do not fit its shape {list(shape)}"
    )
    if (
        len(shape) != 2
        or min(shape) < 0
        or shape[1] >= 1 << 31
        or crow_indices.ndim != 1
        or len(crow_indices) != shape[0] + 1
    ):
        raise wrong
    counts = np.diff(crow_indices)
    if (
        crow_indices[0] != 0
        or crow_indices[-1] != len(values)
        or len(col_indices) != len(values)
        or (counts < 0).any()
    ):
        raise wrong
    if len(values) and (col_indices.min() < 0 or col_indices.max() >= shape[1]):
        raise wrong
    cells = CsrMatrix(
        values=values,
        shape=(int(shape[0]), int(shape[1])),
        crow_indices=crow_indices,
        col_indices=col_indices,
    )
    places = cells.rows() * shape[1] + col_indices
    if len(np.unique(places)) != len(places):
        raise UserError(f"{where}: a cell is listed twice")
    return cells


def dense_array(cells: CsrMatrix, where: str) -> np.ndarray:
    if cells.shape[0] * cells.shape[1] > MAX_CELLS:
        raise UserError(
            f"{where}: {list(cells.shape)} is more than this server's {MAX_CELLS} cells per tensor; send a smaller one"
        )
    return cells.dense()


def parse_cells(body: object, where: str) -> CsrMatrix:
    """A JSON TensorData of two dimensions, dense or sparse."""
    tensor = parse_tensor(body, where)
    if isinstance(tensor, CsrMatrix):
        return tensor
    if tensor.ndim != 2:
        raise UserError(f"{where}: expected a matrix, got the shape {list(tensor.shape)}")
    return CsrMatrix(values=tensor.reshape(-1), shape=(tensor.shape[0], tensor.shape[1]))


def parse_tensor(body: object, where: str) -> np.ndarray | CsrMatrix:
    """A JSON TensorData; `CsrMatrix` when it is sparse. SDK 0.24 and older may leave dtype and shape out."""
    if isinstance(body, list):
        body = {"data": body}
    fields = JsonReader(body, where)
    is_sparse = fields.anything("sparse_crow_indices") is not None
    crow_indices = integers(fields.items("sparse_crow_indices"), f"{where}: sparse_crow_indices")
    col_indices = integers(fields.items("sparse_col_indices"), f"{where}: sparse_col_indices")
    dtype = fields.optional_text("dtype")
    if dtype not in (None, "int64", "float32"):
        raise UserError(f"{where}: dtype {dtype!r} is unknown; use int64 or float32")
    shape = integers(fields.items("shape"), f"{where}: shape")
    try:
        array = array_of(fields.items("data"), None if dtype is None else np.dtype(dtype))
        array = array.reshape(shape.tolist()) if shape.size and not is_sparse else array
    except (ValueError, TypeError, OverflowError):
        raise UserError(f"{where}: data does not match its dtype and shape") from None
    if array.dtype.kind not in "iuf":
        raise UserError(f"{where}: data must be numbers")
    fields.finish()
    if is_sparse:
        return cells_from_csr(array.reshape(-1), crow_indices, col_indices, shape.tolist(), where)
    return array


def _parse_dense_tensor(body: object, where: str) -> np.ndarray:
    tensor = parse_tensor(body, where)
    return dense_array(tensor, where) if isinstance(tensor, CsrMatrix) else tensor


def parse_training_json(body: object, limits: Limits, *, forward_only: bool) -> TrainRequest:
    """The JSON body of forward_backward and forward, as SDK 0.24 and older send it."""
    fields = JsonReader(body, "forward" if forward_only else "forward_backward")
    inner = JsonReader(
        fields.mapping("forward_input" if forward_only else "forward_backward_input"),
        "forward_backward_input",
    )
    loss_fn = parse_loss_fn(inner.text("loss_fn"))
    data, num_targets = [], 0
    for index, datum_body in enumerate(inner.items("data")):
        datum = JsonReader(datum_body, f"datum {index}")
        tokens = parse_model_input(datum.mapping("model_input"), f"datum {index}: model_input", limits)
        inputs = {
            name: _parse_dense_tensor(value, f"datum {index}: {name}")
            for name, value in datum.mapping("loss_fn_inputs").items()
        }
        datum.finish()
        data.append(check_datum(index, tokens, inputs, loss_fn, limits))
        num_targets += data[-1].target_tokens.size
        check_request_cells(num_targets)
    model_id, seq_id = fields.text("model_id"), fields.optional_integer("seq_id")
    op = ForwardBackward(
        model_id=model_id,
        loss_fn=loss_fn,
        settings=parse_loss_config(loss_fn, inner.mapping("loss_fn_config")),
        data=tuple(data),
        forward_only=forward_only,
    )
    inner.finish()
    fields.ignore("type")
    fields.finish()
    if not data:
        raise UserError("forward_backward: data is empty; send at least one datum")
    return TrainRequest(seq_id=seq_id, op=op)

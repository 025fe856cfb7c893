"""Parse the bodies of sampling requests.

A request that the server cannot serve exactly raises a `UserError` that names an alternative. A field is
ignored only if it cannot change a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from skyrl_tx_server.engine.operations import (
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    CsrMatrix,
    Sample,
    SamplingSettings,
)
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.http.wire.json_reader import JsonReader, quoted
from skyrl_tx_server.http.wire.limits import MAX_SEED, MAX_TOP_K, Limits, check_tokens, parse_model_input
from skyrl_tx_server.http.wire.tensors import parse_cells

MAX_SAMPLES_PER_REQUEST = 4096
MIN_TEMPERATURE = 1e-6
"""The minimum temperature of a random sample. With `logprobs_mode=processed`, the logits are divided by the
temperature. At temperatures such as 1e-9, the rounding errors of the divided logits are so large that
logprobs become infinite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """An asample request. `sampler_id` is None if the client passed a base model or a path instead."""

    sampler_id: str | None
    seq_id: int | None  # None: the request has no seq_id
    base_model: str | None
    model_path: str | None
    op: Sample  # without weights, which the route sets


def parse_sample(body: object, limits: Limits) -> SampleRequest:
    fields = JsonReader(body, "asample")
    fields.refuse(
        "prompt_alt_tokens_k",
        "send one request for each prefix of the prompt, or draw the tokens from topk_prompt_logprobs",
    )
    num_samples = fields.optional_integer("num_samples")
    targets = fields.value("target_prompt_logprobs")
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
    # `record_stability_info` can be ignored: only the loss stable_reinforce reads such records, and
    # the server rejects this loss.
    fields.finish(ignored=("type", "record_stability_info"))
    if not 1 <= op.num_samples <= MAX_SAMPLES_PER_REQUEST:
        raise UserError(
            f"asample: num_samples={op.num_samples} must lie between 1 and {MAX_SAMPLES_PER_REQUEST}"
        )
    if op.prompt.size == 0:
        raise UserError("asample: the prompt is empty; send at least one token")
    max_tokens = op.settings.max_tokens or 1
    if op.prompt.size + max_tokens > limits.max_context_length:
        raise UserError(
            f"Prompt length plus max_tokens exceeds the model's context window: {op.prompt.size} + "
            f"{max_tokens} > {limits.max_context_length}"
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
            f"asample: prompt_logprobs_last_n={last_n} needs prompt_logprobs and must lie between 1 and "
            f"len(prompt) - 1"
        )
    if op.target_prompt_tokens is not None:
        op = replace(
            op, target_prompt_tokens=_check_prompt_targets(op.target_prompt_tokens, op.prompt.size, limits)
        )
    return SampleRequest(
        sampler_id=sampler_id, seq_id=seq_id, base_model=base_model, model_path=model_path, op=op
    )


def parse_sampling_params(body: object, limits: Limits) -> SamplingSettings:
    fields = JsonReader(body, "sampling_params")
    settings = replace(
        parse_stop(fields.value("stop")),
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
    if 0 < settings.temperature < MIN_TEMPERATURE:
        raise UserError(
            f"sampling_params: temperature={settings.temperature} must be 0 (greedy) or at least "
            f"{MIN_TEMPERATURE:g}"
        )
    if settings.top_k != -1 and settings.top_k < 1:
        raise UserError(f"sampling_params: top_k={settings.top_k} must be -1 (off) or at least 1")
    if not 0 < settings.top_p <= 1:
        raise UserError(f"sampling_params: top_p={settings.top_p} must lie in (0, 1]")
    for token_id in settings.stop_token_ids:
        if token_id >= limits.vocab_size:
            raise UserError(
                f"sampling_params: stop token {token_id} is outside this model's vocabulary of "
                f"{limits.vocab_size}"
            )
    if settings.seed is not None and not 0 <= settings.seed <= MAX_SEED:
        raise UserError(f"sampling_params: seed={settings.seed} must lie between 0 and 2**63 - 1")
    return settings


def parse_stop(stop: object) -> SamplingSettings:
    """Return settings with the SDK's `stop`. With None or strings, sampling also stops at the model's
    end-of-sequence tokens. A list of token ids replaces these tokens; with [], sampling stops only at the
    maximum length."""
    invalid = UserError(
        f"sampling_params: stop must be a string, a list of strings or a list of token ids, got "
        f"{quoted(stop)}"
    )
    if stop is None:
        return SamplingSettings()
    values = [stop] if isinstance(stop, str) else stop
    if not isinstance(values, list):
        raise invalid
    strings = tuple(value for value in values if isinstance(value, str))
    token_ids = tuple(value for value in values if isinstance(value, int) and not isinstance(value, bool))
    if len(values) not in (len(strings), len(token_ids)) or any(token_id < 0 for token_id in token_ids):
        raise invalid
    if "" in strings:
        raise UserError(
            "sampling_params: an empty stop string would stop before the first token; leave it out"
        )
    check_stops(strings, token_ids)
    return SamplingSettings(stop_strings=strings, stop_token_ids=token_ids, stop_at_eos=bool(strings))


def check_stops(strings: Sequence[str], token_ids: Sequence[int]) -> None:
    """Raise UserError for too many stop strings or stop tokens, or for a stop string that is too long."""
    if len(strings) > MAX_STOP_STRINGS or any(len(stop) > MAX_STOP_LENGTH for stop in strings):
        raise UserError(
            f"stop: at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_LENGTH} characters are supported"
        )
    if len(token_ids) > MAX_STOP_TOKENS:
        raise UserError(f"{len(token_ids)} stop tokens: at most {MAX_STOP_TOKENS} are supported")


def _check_prompt_targets(targets: CsrMatrix, prompt_length: int, limits: Limits) -> CsrMatrix:
    """Return `targets`, the matrix of tokens to score, with int32 values. The matrix has one row for each
    prompt position except the first. The value -1 means no token. Raise UserError if the matrix is
    invalid."""
    where = "target_prompt_logprobs"
    if targets.shape[0] != prompt_length - 1:
        raise UserError(
            f"{where}: shape {list(targets.shape)} must have {prompt_length - 1} rows, one per prompt token "
            f"after the first"
        )
    if targets.values.dtype.kind not in "iu":
        raise UserError(f"{where}: token ids must be int64, got {targets.values.dtype}")
    scored_tokens = targets.values[targets.values != -1]
    if not scored_tokens.size:
        raise UserError(f"{where}: the matrix contains no token; leave it out")
    check_tokens(scored_tokens, where, limits)
    if np.bincount(targets.rows()[targets.values != -1]).max() > MAX_TOP_K:
        raise UserError(f"{where}: a row has more than {MAX_TOP_K} tokens; send fewer tokens per position")
    return replace(targets, values=targets.values.astype(np.int32))

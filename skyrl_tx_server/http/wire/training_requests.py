"""Parse the bodies of training requests: adapters, optimizer settings and data. JSON and protobuf share the
checks.

A request that the server cannot serve exactly raises a `UserError` that names an alternative. A field is
ignored only if it cannot change a result.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from skyrl_tx_server.engine.loss_spec import LOSSES
from skyrl_tx_server.engine.operations import (
    LORA_ALPHA,
    AdamSettings,
    CsrMatrix,
    ForwardBackward,
    LoraSpec,
    LossFn,
    LossSettings,
    TrainDatum,
)
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.http.wire.json_reader import JsonReader, is_finite_number, listed, quoted
from skyrl_tx_server.http.wire.limits import MAX_SEED, MAX_TOP_K, Limits, check_tokens, parse_model_input
from skyrl_tx_server.http.wire.tensors import dense_array, parse_tensor

MAX_REQUEST_CELLS = 1 << 26
"""Maximum number of target tokens of all datums of a request."""
ALPHA_METADATA = "lora_alpha"
MAX_ALPHA = 65536.0
MAX_BETA = 1 - 2.0**-24  # the largest float32 below 1, because the optimizer computes in float32
INPUT_HINTS = {
    "mask": "set the weight (cross_entropy) or the advantage (all other losses, but not dro, which has no "
    "mask) of masked tokens to 0",
    "weights": "only cross_entropy takes weights; multiply the advantages by them",
    "clip_low_threshold": "pass the clip thresholds of the request in loss_fn_config",
    "clip_high_threshold": "pass the clip thresholds of the request in loss_fn_config",
    "sequence_ratio_mask": "only gspo uses it",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRequest:
    """One forward or forward_backward request, from either wire format."""

    seq_id: int | None  # None: the request has none, so the server does not recognise a repetition
    op: ForwardBackward


def parse_lora(body: object, limits: Limits, user_metadata: Mapping[str, str] | None = None) -> LoraSpec:
    """Return the LoraSpec of a lora_config. `user_metadata` may contain `lora_alpha`, because the SDK's
    lora_config has no field for it. Raise UserError if a value is invalid."""
    fields = JsonReader(body, "lora_config")
    rank = fields.optional_integer("rank")
    spec = LoraSpec(
        rank=32 if rank is None else rank,
        seed=secrets.randbelow(2**31) if (seed := fields.optional_integer("seed")) is None else seed,
        train_attn=fields.flag("train_attn", True),
        train_mlp=fields.flag("train_mlp", True),
        train_unembed=fields.flag("train_unembed", True),
        alpha=parse_alpha(user_metadata or {}),
    )
    fields.finish()
    if spec.rank < 1:
        raise UserError(f"LoRA rank {spec.rank} must be at least 1")
    if spec.rank > limits.max_lora_rank:
        raise UserError(
            f"LoRA rank {spec.rank} is above this server's max_lora_rank={limits.max_lora_rank}; "
            f"request a smaller rank or start the server with max_lora_rank={spec.rank}"
        )
    if not 0 <= spec.seed <= MAX_SEED:
        raise UserError(f"lora_config: seed={spec.seed} must lie between 0 and 2**63 - 1")
    if not (spec.train_attn or spec.train_mlp or spec.train_unembed):
        raise UserError(
            "lora_config: nothing to train; at least one of train_attn, train_mlp, train_unembed must be true"
        )
    return spec


def parse_alpha(user_metadata: Mapping[str, str]) -> float:
    """Return the alpha of `user_metadata`, by default LORA_ALPHA. Raise UserError if it is invalid."""
    if (text := user_metadata.get(ALPHA_METADATA)) is None:
        return LORA_ALPHA
    try:
        alpha = float(text)
    except ValueError:
        alpha = math.nan
    if not 0 < alpha <= MAX_ALPHA:
        raise UserError(
            f"user_metadata: {ALPHA_METADATA}={quoted(text)} must be a number above 0 and at most "
            f"{MAX_ALPHA:g}"
        )
    return alpha


def check_optimizer_config(fields: JsonReader) -> None:
    """Raise UserError for any optimizer other than AdamW. The routes that create a model
    call this function, so that the error comes before the first step."""
    config = JsonReader(fields.mapping("optimizer_config"), "optimizer_config")
    kind = config.optional_text("type")
    if kind not in (None, "adamw"):
        raise UserError(f"optimizer {kind!r} is not supported by this server; use AdamW (tinker.AdamParams)")
    config.finish()


def parse_adam(fields: JsonReader) -> AdamSettings:
    """Return the optimizer settings of an optim_step body. Raise UserError if they are invalid."""
    optimizer_params = fields.mapping("optimizer_params")
    if optimizer_params:
        raise UserError(
            f"optimizer {quoted(optimizer_params.get('type'))} is not supported by this server; use AdamW "
            f"(tinker.AdamParams)"
        )
    sent = fields.mapping("adam_params")
    if not_finite := sorted(name for name, value in sent.items() if value is None):
        raise UserError(  # the SDK writes NaN and infinity as null
            f"adam_params: {listed(not_finite)} must be a finite number, got null, NaN or infinity"
        )
    params = JsonReader(sent, "adam_params")
    defaults = asdict(AdamSettings())
    adam = AdamSettings(**{name: params.number(name, default) for name, default in defaults.items()})
    params.finish(ignored=("type",))
    if adam.learning_rate < 0 or adam.weight_decay < 0 or adam.grad_clip_norm < 0:
        raise UserError("adam_params: learning_rate, weight_decay and grad_clip_norm must not be negative")
    if not (0 <= adam.beta1 <= MAX_BETA and 0 <= adam.beta2 <= MAX_BETA and adam.eps > 0):
        raise UserError(
            f"adam_params: beta1 and beta2 must lie in [0, 1), at most {MAX_BETA:.8f}, and eps above 0"
        )
    return adam


def parse_training_json(body: object, limits: Limits, *, forward_only: bool) -> TrainRequest:
    """Parse the JSON body of a forward (from SDK 0.24 and older) or of a forward_backward (from SDK 0.18 and
    older). Raise UserError if it is invalid."""
    name = "forward" if forward_only else "forward_backward"
    fields = JsonReader(body, name)
    inner = JsonReader(fields.mapping(f"{name}_input"), f"{name}_input")
    loss_fn = parse_loss_fn(inner.text("loss_fn"))
    data = within_limit(
        _parse_datum(index, body, loss_fn, limits) for index, body in enumerate(inner.items("data"))
    )
    model_id, seq_id = fields.text("model_id"), fields.optional_integer("seq_id")
    op = ForwardBackward(
        model_id=model_id,
        loss_fn=loss_fn,
        settings=parse_loss_config(loss_fn, inner.mapping("loss_fn_config")),
        data=data,
        forward_only=forward_only,
    )
    inner.finish()
    fields.finish(ignored=("type",))
    if not data:
        raise UserError(f"{name}: data is empty; send at least one datum")
    return TrainRequest(seq_id=seq_id, op=op)


def _parse_datum(index: int, body: object, loss_fn: LossFn, limits: Limits) -> TrainDatum:
    where = f"datum {index}"
    datum = JsonReader(body, where)
    tokens = parse_model_input(datum.mapping("model_input"), f"{where}: model_input", limits)
    inputs: dict[str, np.ndarray] = {}
    for name, value in datum.mapping("loss_fn_inputs").items():
        tensor = parse_tensor(value, f"{where}: {name}")
        is_sparse = isinstance(tensor, CsrMatrix)
        inputs[name] = dense_array(tensor, f"{where}: {name}") if is_sparse else tensor
    datum.finish()
    return check_datum(index, tokens, inputs, loss_fn, limits)


def parse_loss_fn(name: str) -> LossFn:
    try:
        return LossFn(name)
    except ValueError:
        loss_names = ", ".join(loss.value for loss in LossFn)
        if name == "custom":
            raise UserError(
                "loss 'custom' does not run on this server; use forward_backward_custom, or one of: "
                f"{loss_names}"
            ) from None
        raise UserError(
            f"loss {quoted(name)} is not supported by this server; use one of: {loss_names}"
        ) from None


def parse_loss_config(loss_fn: LossFn, config: Mapping[str, object]) -> LossSettings:
    options = LOSSES[loss_fn].options
    values: dict[str, float] = {}
    for name, value in config.items():
        if name not in options:
            allowed = f"it takes {', '.join(sorted(options))}" if options else "it takes none"
            raise UserError(f"loss_fn_config: unknown setting {quoted(name)} for {loss_fn.value}; {allowed}")
        if not is_finite_number(value) or value not in options[name]:
            raise UserError(f"loss_fn_config: {name} must be {options[name]}, got {quoted(value)}")
        values[name] = float(value)
    settings = LossSettings(**values)
    low, high = settings.clip_low_threshold, settings.clip_high_threshold
    if low > high:
        raise UserError(
            f"loss_fn_config: clip_low_threshold={low} is above clip_high_threshold={high}; they are "
            f"absolute bounds on the ratio"
        )
    return settings


def check_datum(
    index: int, tokens: np.ndarray, inputs: Mapping[str, np.ndarray], loss_fn: LossFn, limits: Limits
) -> TrainDatum:
    """Return a datum from its decoded arrays. Raise UserError if the number of tokens is not allowed, if
    `inputs` has an input that the loss does not use, or if an input of the loss is missing or invalid."""
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
                f"{where}: {name} has {len(array)} entries for {tokens.size} model_input tokens; they must "
                f"be equal"
            )
    missing = expected - set(inputs) - spec.optional_inputs
    if missing:
        raise UserError(f"{where}: loss {loss_fn.value} needs the input {', '.join(sorted(missing))}")
    if tokens.size == 0:
        raise UserError(f"{where}: model_input is empty; send at least one token")
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
            f"{where}: weights have the shape {list(inputs['weights'].shape)}, target_tokens "
            f"{list(targets.shape)}; they must be equal"
        )
    parsed = TrainDatum(
        tokens=tokens,
        target_tokens=check_tokens(targets, f"{where}: target_tokens", limits),
        weights=_finite(inputs, "weights", where),
        logprobs=_finite(inputs, "logprobs", where),
        advantages=_finite(inputs, "advantages", where),
        sequence_ratio_mask=_finite(inputs, "sequence_ratio_mask", where),
    )
    if (
        "sequence_ratio_mask" in expected
        and not np.any(parsed.sequence_ratio_mask)
        and np.any(parsed.advantages)
    ):
        raise UserError(
            f"{where}: sequence_ratio_mask is 0 at every token, so there is no ratio; set it to 1 on the "
            f"completion"
        )
    return parsed


def within_limit(datums: Iterable[TrainDatum]) -> tuple[TrainDatum, ...]:
    """Return the datums of a request. Raise UserError as soon as they have too many targets, before the next
    datum is decoded."""
    data: list[TrainDatum] = []
    num_targets = 0
    for datum in datums:
        data.append(datum)
        num_targets += datum.target_tokens.size
        if num_targets > MAX_REQUEST_CELLS:
            raise UserError(
                f"more than {MAX_REQUEST_CELLS} targets in one request; send fewer datums at once"
            )
    return tuple(data)


def _finite(inputs: Mapping[str, np.ndarray], name: str, where: str) -> np.ndarray | None:
    """Return an input as float32; None: the datum does not have this input. Raise UserError if the input
    contains a NaN or infinity, which would make the accumulated gradient invalid."""
    if name not in inputs:
        return None
    values = inputs[name].astype(np.float32)
    if not np.isfinite(values).all():
        raise UserError(f"{where}: {name} contains NaN or infinity; send finite numbers")
    return values

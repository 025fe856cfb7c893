"""The requests to vLLM and SGLang and their replies, in the formats of vLLM 0.33 and SGLang 0.5.23.

The vLLM or SGLang server is called the external sampler. A request contains every setting that affects a
sample, so that the default settings in the model's generation_config.json have no effect. A reply without a
token id or logprob is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from skyrl_tx_server.engine.operations import SampledSequence, SamplingSettings, StopReason
from skyrl_tx_server.engine.stop_strings import find_stop
from skyrl_tx_server.errors import SamplerError

NO_LOGPROB_BELOW = -9998.0
"""A logprob at or below this limit is refused. vLLM returns -9999 in place of minus infinity, and a sampled
token cannot have a logprob of minus infinity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRequest:
    """A request for samples. `max_tokens` and `stop_tokens` are the values that the engine would use."""

    prompt: list[int]
    num_samples: int
    max_tokens: int
    stop_tokens: tuple[int, ...]  # includes the model's end-of-sequence tokens if `settings.stop_at_eos`
    settings: SamplingSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnedSample:
    """One sample as the external sampler returned it."""

    tokens: np.ndarray  # [n] int32, may continue after a stop string
    logprobs: np.ndarray  # [n] float32
    finish: str  # the finish reason of the external sampler, for error messages


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleReply:
    samples: list[ReturnedSample]
    cached_tokens: int  # prompt tokens found in the prefix cache of the external sampler; 0 if unknown


class Dialect(Protocol):
    """The API of one kind of external sampler."""

    load_path: str
    unload_path: str
    needs: str  # environment variable and option with which the external sampler must be started

    def serves(self, settings: SamplingSettings, eos_token_ids: Sequence[int]) -> bool:
        """Return whether the external sampler can apply these settings exactly."""
        ...

    def request(
        self, request: SamplingRequest, model: str, adapter: str | None
    ) -> tuple[str, dict[str, object]]:
        """Return path and body of the request. `model` is the name of the adapter, or of the base model if
        `adapter` is None."""
        ...

    def read(self, body: object, request: SamplingRequest) -> SampleReply:
        """Read a reply. Raise KeyError, TypeError, ValueError, IndexError or AttributeError if it is
        invalid."""
        ...


class Vllm:
    """vLLM: POST /v1/completions with a prompt of token ids."""

    load_path, unload_path = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    needs = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"

    def serves(self, settings: SamplingSettings, eos_token_ids: Sequence[int]) -> bool:
        return True

    def request(
        self, request: SamplingRequest, model: str, adapter: str | None
    ) -> tuple[str, dict[str, object]]:
        seed = request.settings.seed
        return "/v1/completions", {
            "model": model,
            "prompt": request.prompt,
            "n": request.num_samples,
            "max_tokens": request.max_tokens,
            **_settings(request.settings),
            # vLLM samples sequence i with the seed `seed + i`. This sum must be below 2**63.
            "seed": None if seed is None else seed % 2**62,
            "stop_token_ids": list(request.stop_tokens),
            "ignore_eos": True,  # sampling stops only at stop_token_ids and stop
            "include_stop_str_in_output": True,
            "add_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def read(self, body: object, request: SamplingRequest) -> SampleReply:
        response = _mapping(body)
        choices = sorted(
            (_mapping(choice) for choice in response["choices"]), key=lambda choice: choice["index"]
        )
        if choices[0]["prompt_token_ids"] != request.prompt:
            raise ValueError("prompt_token_ids differ from the prompt of the request")
        usage = response.get("usage") or {}
        return SampleReply(
            samples=[
                _returned_sample(
                    choice["token_ids"],
                    _mapping(choice["logprobs"])["token_logprobs"],
                    str(choice["finish_reason"]),
                )
                for choice in choices
            ],
            cached_tokens=int((_mapping(usage).get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        )


class Sglang:
    """SGLang: POST /generate, because its OpenAI API returns no token ids."""

    load_path, unload_path = "/load_lora_adapter", "/unload_lora_adapter"
    needs = "SGLANG_RETURN_ORIGINAL_LOGPROB=1 and --enable-lora"

    def serves(self, settings: SamplingSettings, eos_token_ids: Sequence[int]) -> bool:
        """Return False if a seed is set, because SGLang uses it only in deterministic mode. Return False also
        if `stop_token_ids` replace the end-of-sequence tokens and do not contain all of them, because SGLang
        would also stop at the missing ones."""
        adds_stop_tokens = (
            bool(settings.stop_token_ids)
            and not settings.stop_at_eos
            and not set(eos_token_ids) <= {*settings.stop_token_ids}
        )
        return settings.seed is None and not adds_stop_tokens

    def request(
        self, request: SamplingRequest, model: str, adapter: str | None
    ) -> tuple[str, dict[str, object]]:
        return "/generate", {
            "input_ids": request.prompt,
            "lora_path": adapter,
            "return_logprob": True,
            "sampling_params": {
                "n": request.num_samples,
                "max_new_tokens": request.max_tokens,
                **_settings(request.settings),
                "stop_token_ids": list(request.stop_tokens),
                "ignore_eos": not request.stop_tokens,  # SGLang ignores every stop token if this is true
                "no_stop_trim": True,
            },
        }

    def read(self, body: object, request: SamplingRequest) -> SampleReply:
        replies = [
            _mapping(_mapping(reply)["meta_info"]) for reply in (body if isinstance(body, list) else [body])
        ]
        for reply in replies:
            if reply["prompt_tokens"] != len(request.prompt):
                raise ValueError(
                    f"prompt_tokens is {reply['prompt_tokens']}, but the prompt has {len(request.prompt)} "
                    "tokens"
                )
        return SampleReply(
            samples=[
                _returned_sample(
                    [entry[1] for entry in reply["output_token_logprobs"]],
                    [entry[0] for entry in reply["output_token_logprobs"]],
                    str(_mapping(reply["finish_reason"])["type"]),
                )
                for reply in replies
            ],
            cached_tokens=int(replies[0].get("cached_tokens") or 0),
        )


DIALECTS: dict[str, Dialect] = {"vllm": Vllm(), "sglang": Sglang()}
"""`owned_by` in /v1/models -> dialect."""


def read_reply(dialect: Dialect, content: bytes, request: SamplingRequest) -> SampleReply:
    """Return the samples. Raise SamplerError if the reply is invalid or incomplete."""
    try:
        reply = dialect.read(json.loads(content), request)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        reason = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise SamplerError(
            f"invalid reply of the external sampler: {reason}; a reply must contain token ids and their "
            "logprobs"
        ) from None
    if len(reply.samples) != request.num_samples:
        raise SamplerError(
            f"invalid reply of the external sampler: {len(reply.samples)} samples instead of "
            f"{request.num_samples}"
        )
    return reply


def cut_at_stop(
    sample: ReturnedSample, request: SamplingRequest, tokenizer: Tokenizer | None
) -> SampledSequence:
    """Return the sample up to and including the token at which the engine would have stopped. `tokenizer` is
    needed for stop strings. Raise SamplerError if the sample has more than `max_tokens` tokens, or if it has
    fewer and contains no stop token or stop string."""
    tokens = sample.tokens.tolist()
    ends = [index + 1 for index, token in enumerate(tokens) if token in request.stop_tokens][:1]
    if (
        tokenizer is not None
        and (cut := find_stop(tokenizer, tokens, request.settings.stop_strings, new=len(tokens))) is not None
    ):
        ends.append(cut)
    if len(tokens) > request.max_tokens or (not ends and len(tokens) < request.max_tokens):
        raise SamplerError(
            f"the external sampler ended a sample ({sample.finish}) after {len(tokens)} of "
            f"{request.max_tokens} tokens; a sample must end at a stop token, at a stop string or after "
            f"{request.max_tokens} tokens"
        )
    length = min(ends, default=request.max_tokens)
    return SampledSequence(
        tokens=sample.tokens[:length],
        logprobs=sample.logprobs[:length],
        stop_reason=StopReason.STOP if ends else StopReason.LENGTH,
    )


def _settings(settings: SamplingSettings) -> dict[str, object]:
    return {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": list(settings.stop_strings),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }


def _returned_sample(token_ids: Sequence[int], logprobs: Sequence[float], finish: str) -> ReturnedSample:
    tokens, values = np.asarray(token_ids), np.asarray(logprobs, np.float32)
    if tokens.ndim != 1 or tokens.dtype.kind != "i" or not len(tokens):
        raise ValueError("the token ids are not a non-empty list of integers")
    if values.shape != tokens.shape:
        raise ValueError(f"a sample has {len(tokens)} token ids, but {values.size} logprobs")
    if not np.all(np.isfinite(values) & (values > NO_LOGPROB_BELOW)):
        raise ValueError("a logprob is not a finite number")
    return ReturnedSample(tokens=tokens.astype(np.int32), logprobs=values, finish=finish)


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"an object was expected, not {type(value).__name__}")
    return value

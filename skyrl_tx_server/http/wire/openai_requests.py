"""Parse OpenAI's chat and text completion requests.

A field that would change the result and is not supported is an error. Fields that cannot change it (`user`,
`metadata`, ...) are ignored.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field, replace

import numpy as np

from skyrl_tx_server.engine.operations import SamplingSettings
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.http.wire.json_body import CHAT_BOUNDS, parse_json
from skyrl_tx_server.http.wire.json_reader import JsonReader, quoted
from skyrl_tx_server.http.wire.limits import Limits, check_tokens
from skyrl_tx_server.http.wire.sampling_requests import check_stops, parse_sampling_params
from skyrl_tx_server.http.wire.tensors import integers

MAX_CHOICES = 128
IGNORED_FIELDS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
)
IGNORED_MESSAGE_FIELDS = ("annotations", "provider_specific_fields")
"""Fields of assistant messages that clients send back although no chat template reads them."""
_SAMPLING_HINT = "leave it out; only temperature, top_k and top_p change the sampling distribution"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRequest:
    """The fields that chat and text completions share."""

    model: str
    settings: SamplingSettings
    num_samples: int
    stream: bool
    include_usage: bool  # the last chunk of a stream contains the usage
    logprobs: bool
    token_ids: bool  # vLLM's return_token_ids: return the sampled token ids, for clients that train on them


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    sampling: SamplingRequest
    messages: tuple[dict[str, object], ...]
    tools: tuple[object, ...] = ()
    template_kwargs: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    sampling: SamplingRequest
    prompts: tuple[str | np.ndarray, ...]  # text, or token ids [P] int32


# --- requests ---


def parse_chat(body: object, limits: Limits) -> ChatRequest:
    fields = JsonReader(body, "chat/completions")
    logprobs = fields.flag("logprobs", False)
    if fields.optional_integer("top_logprobs"):
        raise UserError(
            "chat/completions: top_logprobs is not supported; use logprobs=true for the logprobs of the "
            "sampled tokens"
        )
    for name, alternative in (
        ("functions", "use tools"),
        ("function_call", "use tools"),
        ("audio", "this model writes text"),
        ("prediction", "leave it out"),
        ("web_search_options", "give the model a tool of your own"),
        ("reasoning_effort", "use chat_template_kwargs, for example {'enable_thinking': false}"),
        ("verbosity", "describe it in the prompt"),
    ):
        fields.refuse(name, alternative)
    if fields.items("modalities") not in ([], ["text"]):
        raise UserError("chat/completions: modalities: this model writes text only")
    tools = tuple(fields.items("tools"))
    match fields.value("tool_choice"):
        case None | "auto":
            pass
        case "none":
            tools = ()
        case _:
            raise UserError(
                "chat/completions: tool_choice must be 'auto' or 'none'; this server cannot force a call"
            )
    if tools and not fields.flag("parallel_tool_calls", True):
        raise UserError("chat/completions: parallel_tool_calls=false is not supported; leave it out")
    for index, tool in enumerate(tools):
        if (
            not isinstance(tool, dict)
            or tool.get("type") != "function"
            or not isinstance(tool.get("function"), dict)
        ):
            raise UserError(
                f"chat/completions: tools: expected {{'type': 'function', 'function': {{...}}}}, got "
                f"{quoted(tool)}"
            )
        function = JsonReader(tool["function"], f"chat/completions: tools[{index}].function")
        function.text("name")
        function.mapping("parameters")
    messages = tuple(_message(index, message) for index, message in enumerate(fields.items("messages")))
    if not messages:
        raise UserError("chat/completions: messages is missing or empty")
    sampling = _sampling(fields, limits, logprobs=logprobs, max_tokens=_max_tokens(fields))
    template_kwargs = fields.mapping("chat_template_kwargs")
    fields.finish(ignored=(*IGNORED_FIELDS, "parallel_tool_calls"))
    return ChatRequest(sampling=sampling, messages=messages, tools=tools, template_kwargs=template_kwargs)


def parse_completion(body: object, limits: Limits) -> CompletionRequest:
    fields = JsonReader(body, "completions")
    count = fields.optional_integer("logprobs")
    if count:
        raise UserError(
            f"completions: logprobs={count}: the most likely tokens are not supported; use logprobs=0 for "
            "the logprobs of the sampled tokens"
        )
    fields.refuse("echo", "prepend the prompt to the reply")
    fields.refuse("suffix", "only completions at the end of the prompt are supported")
    sampling = _sampling(
        fields, limits, logprobs=count is not None, max_tokens=fields.optional_integer("max_tokens")
    )
    if fields.optional_integer("best_of") not in (None, sampling.num_samples):
        raise UserError(
            "completions: best_of other than n is not supported; request n samples and choose one"
        )
    prompts = _prompts(fields.value("prompt"), limits)
    if sampling.stream and len(prompts) > 1:
        raise UserError("completions: stream=true takes one prompt; send one request for each prompt")
    fields.finish(ignored=IGNORED_FIELDS)
    return CompletionRequest(sampling=sampling, prompts=prompts)


def _sampling(
    fields: JsonReader, limits: Limits, *, logprobs: bool, max_tokens: int | None
) -> SamplingRequest:
    stop = fields.value("stop")
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise UserError(f"stop must be a non-empty string or a list of non-empty strings, got {quoted(stop)}")
    for name in ("frequency_penalty", "presence_penalty", "min_p"):
        fields.refuse(name, _SAMPLING_HINT)
    if fields.number("repetition_penalty", 1.0) != 1.0:
        raise UserError(f"repetition_penalty is not supported by this server; {_SAMPLING_HINT}")
    if fields.mapping("logit_bias"):
        raise UserError(f"logit_bias is not supported by this server; {_SAMPLING_HINT}")
    if fields.mapping("response_format").get("type", "text") != "text":
        raise UserError(
            "response_format: only {'type': 'text'} is supported; this server has no guided decoding"
        )
    params = {"max_tokens": max_tokens} | {
        name: fields.value(name) for name in ("temperature", "top_p", "top_k", "seed")
    }
    settings = parse_sampling_params(params, limits)
    stop_token_ids = check_tokens(
        integers(fields.items("stop_token_ids"), "stop_token_ids"), "stop_token_ids", limits
    )
    stop_strings = tuple(str(text) for text in stops)
    check_stops(stop_strings, stop_token_ids.tolist())
    num_samples = 1 if (n := fields.optional_integer("n")) is None else n
    if not 1 <= num_samples <= MAX_CHOICES:
        raise UserError(f"n={num_samples} must lie between 1 and {MAX_CHOICES}")
    options = JsonReader(fields.mapping("stream_options"), "stream_options")
    include_usage = options.flag("include_usage", False)
    options.finish(ignored=("include_obfuscation",))
    return SamplingRequest(
        model=fields.text("model"),
        # `params` has no `stop`, because `parse_sampling_params` applies the rule of Tinker, whose `stop`
        # replaces the end-of-sequence tokens. OpenAI's `stop` adds to them.
        settings=replace(
            settings,
            stop_strings=stop_strings,
            stop_token_ids=tuple(stop_token_ids.tolist()),
        ),
        num_samples=num_samples,
        stream=fields.flag("stream", False),
        include_usage=include_usage,
        logprobs=logprobs,
        token_ids=fields.flag("return_token_ids", False),
    )


def _max_tokens(fields: JsonReader) -> int | None:
    max_tokens = fields.optional_integer("max_tokens")
    max_completion_tokens = fields.optional_integer("max_completion_tokens")
    if None not in (max_tokens, max_completion_tokens) and max_tokens != max_completion_tokens:
        raise UserError(
            f"chat/completions: max_tokens={max_tokens} and max_completion_tokens={max_completion_tokens} "
            "differ; send one of them"
        )
    return max_tokens if max_completion_tokens is None else max_completion_tokens


def _message(index: int, message: object) -> dict[str, object]:
    """Return a message in the form that chat templates expect: text content, and tool calls with parsed
    arguments."""
    where = f"messages[{index}]"
    fields = JsonReader(message, where)
    role = fields.text("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise UserError(
            f"{where}: role {quoted(role)} is not one of system, developer, user, assistant, tool"
        )
    message_json: dict[str, object] = {
        "role": "system" if role == "developer" else role,
        "content": _content(fields.value("content"), where),
    }
    for name in ("name", "tool_call_id"):
        if (text := fields.optional_text(name)) is not None:
            message_json[name] = text
    if (reasoning := _reasoning(fields, where)) is not None:
        message_json["reasoning_content"] = reasoning
    if calls := fields.items("tool_calls"):
        message_json["tool_calls"] = [_past_call(call, f"{where}.tool_calls") for call in calls]
    fields.refuse("function_call", "use tool_calls")
    fields.refuse("audio", "this model reads text")
    fields.refuse("images", "this model reads text")
    if fields.optional_text("refusal", max_length=None):
        raise UserError(f"{where}: refusal is not supported by this server; put its text into content")
    fields.finish(ignored=IGNORED_MESSAGE_FIELDS)
    return message_json


def _reasoning(fields: JsonReader, where: str) -> str | None:
    """Return the reasoning of an assistant message, which clients send as `reasoning_content` or `reasoning`.
    Return None if the message has neither."""
    text, alias_text = (
        fields.optional_text(name, max_length=None) for name in ("reasoning_content", "reasoning")
    )
    if text is not None and alias_text is not None and text != alias_text:
        raise UserError(f"{where}: reasoning and reasoning_content differ; send one of them")
    text = alias_text if text is None else text
    # thinking_blocks is ignored if there is a text, because LiteLLM also sends the text of these blocks as
    # reasoning_content.
    if fields.items("thinking_blocks") and not text:
        raise UserError(
            f"{where}: thinking_blocks is not supported by this server; send the text as reasoning_content"
        )
    return text


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError(
                f"{where}: content must be text or parts of type 'text', got {quoted(part)}; this model "
                f"reads text only"
            )
        texts.append(part["text"])
    return "".join(texts)


def _past_call(call: object, where: str) -> dict[str, object]:
    """Return a tool call of an earlier assistant message, with its arguments parsed as JSON. Invalid JSON,
    which a model may write, and JSON that exceeds `CHAT_BOUNDS` are kept as text."""
    function = JsonReader(JsonReader(call, where).mapping("function"), f"{where}.function")
    name, arguments = function.text("name"), function.value("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            parse_json(arguments.encode(), CHAT_BOUNDS)
            # orjson, which parse_json uses, makes floats of integers above 64 bits.
            arguments = json.loads(arguments or "{}")
    call_json: dict[str, object] = {
        "type": "function",
        "function": {"name": name, "arguments": {} if arguments is None else arguments},
    }
    if isinstance(call, dict) and isinstance(call.get("id"), str):
        call_json["id"] = call["id"]
    return call_json


def _prompts(prompt: object, limits: Limits) -> tuple[str | np.ndarray, ...]:
    invalid = UserError("completions: prompt must be a string, a list of token ids, or a list of either")
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        raise invalid
    if all(isinstance(item, int) for item in prompt):
        return (check_tokens(integers(prompt, "prompt"), "prompt", limits),)
    if len(prompt) > MAX_CHOICES:
        raise UserError(
            f"completions: prompt has {len(prompt)} prompts; send at most {MAX_CHOICES} in one request"
        )
    if not all(isinstance(item, str | list) and item for item in prompt):
        raise invalid
    return tuple(
        item if isinstance(item, str) else check_tokens(integers(item, "prompt"), "prompt", limits)
        for item in prompt
    )

"""Convert sampled tokens to OpenAI's replies, complete or as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from skyrl_tx_server.engine.operations import Sample, SampleResult, StopReason
from skyrl_tx_server.errors import NotFoundError, ServerError, TooLongError, UnauthorizedError, UserError
from skyrl_tx_server.http.wire.call_syntax import CallSyntax, ToolCall, text_parameters
from skyrl_tx_server.http.wire.chat_format import REPLACEMENT, Rendered, TextPieces, Tokenizer, decoder
from skyrl_tx_server.http.wire.openai_requests import ChatRequest, CompletionRequest
from skyrl_tx_server.http.wire.output_parser import (
    Answer,
    AnswerParser,
    Content,
    ParsedDelta,
    Part,
    ReasoningText,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDelta:
    """New tokens of sample `index`."""

    index: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    ended: StopReason | None = None  # why the sample ended; None: this is not the last delta of the sample


class ChatFormat:
    """Builds the replies of chat completions, with content, reasoning and tool calls."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    choices_have_prompt = False  # vLLM's field `prompt_token_ids` is in the reply

    def __init__(self, chat: ChatRequest, rendered: Rendered, tokenizer: Tokenizer) -> None:
        self.sampling = chat.sampling
        syntax = CallSyntax(is_bare=rendered.has_bare_calls, text_parameters=text_parameters(chat.tools))
        self._call_syntax = syntax if chat.tools else None
        self._part = Part.REASONING if rendered.opens_reasoning else Part.BEGINNING
        self._decode = decoder(tokenizer)

    def answer(self) -> Answer:
        return Answer(
            self._decode,
            self.sampling.settings.stop_strings,
            AnswerParser(call_syntax=self._call_syntax, part=self._part),
        )

    def whole(self, pieces: Sequence[ParsedDelta]) -> dict[str, object]:
        content, reasoning = text_of(pieces), text_of(pieces, ReasoningText)
        calls = [_call_json(piece) for piece in pieces if isinstance(piece, ToolCall)]
        message: dict[str, object] = {
            "role": "assistant",
            "content": content if content or not calls else None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def opening(self) -> dict[str, object]:
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, pieces: Sequence[ParsedDelta], calls_before: int) -> dict[str, object]:
        """Return the delta of a message that already has `calls_before` tool calls."""
        delta: dict[str, object] = {}
        if content := text_of(pieces):
            delta["content"] = content
        if reasoning := text_of(pieces, ReasoningText):
            delta["reasoning_content"] = reasoning
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        if calls:
            delta["tool_calls"] = [
                {"index": calls_before + index, **_call_json(call)} for index, call in enumerate(calls)
            ]
        return {"delta": delta}

    def logprobs(self) -> Callable[[Sequence[int], Sequence[float]], dict[str, object]]:
        return partial(chat_logprobs, decode=self._decode)


class TextFormat:
    """Builds the replies of text completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"
    choices_have_prompt = True

    def __init__(self, completion: CompletionRequest, tokenizer: Tokenizer) -> None:
        self.sampling = completion.sampling
        self._decode = decoder(tokenizer)

    def answer(self) -> Answer:
        all_content = AnswerParser(call_syntax=None, part=Part.CONTENT)
        return Answer(self._decode, self.sampling.settings.stop_strings, all_content)

    def whole(self, pieces: Sequence[ParsedDelta]) -> dict[str, object]:
        return {"text": text_of(pieces)}

    def opening(self) -> dict[str, object] | None:
        return {"text": ""} if self.sampling.token_ids else None

    def delta(self, pieces: Sequence[ParsedDelta], calls_before: int) -> dict[str, object]:
        return {"text": text_of(pieces)}

    def logprobs(self) -> Callable[[Sequence[int], Sequence[float]], dict[str, object]]:
        return TextLogprobs(self._decode).add


type ReplyFormat = ChatFormat | TextFormat


def prompt_fields(reply_format: ReplyFormat, op: Sample) -> tuple[dict[str, object], dict[str, object]]:
    """Return the fields with the prompt of a reply and of its choices. Both are empty unless the request asks
    for token ids. A stream has the fields in the first chunk of each choice."""
    if not reply_format.sampling.token_ids:
        return {}, {}
    ids: dict[str, object] = {"prompt_token_ids": op.prompt.tolist()}
    return ({}, ids) if reply_format.choices_have_prompt else (ids, {})


class Choices:
    """Makes the chunks of all choices of a streamed reply. A choice is one sample."""

    def __init__(self, header: Mapping[str, object], reply_format: ReplyFormat, op: Sample) -> None:
        self._header = header
        self._format = reply_format
        self._op = op
        self._answers = [reply_format.answer() for _ in range(op.num_samples)]
        self._logprobs = [reply_format.logprobs() for _ in range(op.num_samples)]
        self._num_calls = [0] * op.num_samples

    def opening_chunks(self) -> Iterable[dict[str, object]]:
        """Yield the first chunk of each choice, if the format has such chunks."""
        opening = self._format.opening()
        reply_prompt, choice_prompt = prompt_fields(self._format, self._op)
        if opening is not None:
            for index in range(self._op.num_samples):
                yield self._chunk(index, opening, logprobs=None, **choice_prompt) | reply_prompt

    def chunks(self, token_delta: TokenDelta) -> Iterable[dict[str, object]]:
        """Yield a chunk with the new text and tool calls and, at the end of a choice, a chunk with the finish
        reason.

        A chunk is also sent if the new tokens give neither text nor a tool call. Otherwise a client would
        receive nothing while the model writes a long tool call, and many clients stop waiting after some
        minutes.
        """
        index, answer = token_delta.index, self._answers[token_delta.index]
        pieces = (
            answer.add(token_delta.tokens)
            if token_delta.ended is None
            else answer.finish(token_delta.tokens, token_delta.ended)
        )
        if pieces or token_delta.tokens:
            yield self._chunk(
                index,
                self._format.delta(pieces, self._num_calls[index]),
                logprobs=self._logprobs[index](token_delta.tokens, token_delta.logprobs)
                if self._format.sampling.logprobs
                else None,
                **({"token_ids": list(token_delta.tokens)} if self._format.sampling.token_ids else {}),
            )
        self._num_calls[index] += sum(isinstance(piece, ToolCall) for piece in pieces)
        if token_delta.ended is not None:
            yield self._chunk(
                index,
                self._format.delta((), 0),
                logprobs=None,
                finish_reason=answer.finish_reason(token_delta.ended),
            )

    def _chunk(self, index: int, delta: Mapping[str, object], **fields: object) -> dict[str, object]:
        return {**self._header, "choices": [{"index": index, **delta, "finish_reason": None, **fields}]}


def new_header(prefix: str, kind: str, model: str) -> dict[str, object]:
    """Return the fields that a complete reply and all chunks of a streamed reply have."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def usage(ops: Sequence[Sample], results: Sequence[SampleResult]) -> dict[str, object]:
    prompt_tokens = sum(len(op.prompt) for op in ops)
    completion_tokens = sum(len(sequence.tokens) for result in results for sequence in result.sequences)
    cached_tokens = sum(result.prompt_cache_hit_tokens for result in results)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def text_of(pieces: Sequence[ParsedDelta], kind: type[Content] | type[ReasoningText] = Content) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


def chat_logprobs(
    ids: Sequence[int], logprobs: Sequence[float], decode: Callable[[Sequence[int]], str]
) -> dict[str, object]:
    """Return the logprobs of every sampled token, including the one that ended the sample. `bytes` is null
    for a token whose text contains an incomplete character."""
    tokens = [decode([token]) for token in ids]
    return {
        "content": [
            {
                "token": token,
                "logprob": float(logprob),
                "bytes": None if REPLACEMENT in token else list(token.encode()),
                "top_logprobs": [],
            }
            for token, logprob in zip(tokens, logprobs, strict=True)
        ],
        "refusal": None,
    }


class TextLogprobs:
    """Logprobs of text completions, with the offset of each token in the text, in characters. Each choice
    has one instance."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._pieces = TextPieces(decode)
        self._offset = 0

    def add(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, object]:
        offsets = []
        for token in ids:
            offsets.append(self._offset)
            self._offset += len(self._pieces.add([token]))
        tokens = [self._decode([token]) for token in ids]
        values = [float(logprob) for logprob in logprobs]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def _call_json(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def error_json(error: ServerError, message: str | None = None) -> dict[str, object]:
    """Return an error in OpenAI's format. OpenAI's clients raise an exception that depends on the HTTP status
    and show the message. `message` replaces the error's own message."""
    kind = (
        "invalid_request_error"
        if isinstance(error, UserError)
        else "rate_limit_error"
        if error.status == 429
        else "server_error"
    )
    code: dict[type[ServerError], str] = {
        NotFoundError: "model_not_found",
        TooLongError: "context_length_exceeded",
        UnauthorizedError: "invalid_api_key",
    }
    return {
        "error": {
            "message": message or str(error),
            "type": kind,
            "param": None,
            "code": code.get(type(error)),
        }
    }

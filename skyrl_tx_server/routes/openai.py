"""OpenAI's doors to whatever can be sampled: /v1/chat/completions, /v1/completions and /v1/models.

A model is asked for by the name of the base model, by the id of a live sampler, or by a sampler checkpoint's tinker:// path. A stream
carries the tokens of each decode block as the engine makes them; a client that goes away gives its slots back.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from skyrl_tx_server.answers import Answer, AnswerParser, Part, Piece, ToolCall
from skyrl_tx_server.chat_format import Rendered, Tokenizer, decoder, load_tokenizer, render
from skyrl_tx_server.checkpoints import CheckpointKind
from skyrl_tx_server.errors import NotFoundError, ServerError, TooLongError, UserError
from skyrl_tx_server.openai_wire import (
    Ask,
    ChatRequest,
    CompletionRequest,
    Header,
    TextLogprobs,
    chat_logprobs,
    delta_json,
    error_json,
    message_json,
    new_header,
    parse_chat,
    parse_completion,
    text_of,
    usage,
)
from skyrl_tx_server.ops import OpResult, Sample, SampleResult, SamplingSettings, StopReason
from skyrl_tx_server.routes.border import Endpoint, Handler, Reply, read_json
from skyrl_tx_server.routes.context import Context

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499


async def chat_completions(context: Context, request: Request) -> Reply:
    chat = parse_chat(await read_json(context, request), context.limits)
    tokenizer = await asyncio.to_thread(load_tokenizer, context.settings.model_dir)
    rendered = await asyncio.to_thread(render, tokenizer, chat.messages, chat.tools, chat.template_kwargs)
    settings = _ending_turns(chat.ask.settings, tokenizer)
    op = await _sample(context, chat.ask, settings, np.array(rendered.token_ids, np.int32))
    door = _ChatDoor(chat, rendered, tokenizer)
    if chat.ask.stream:
        return await _stream(context, door, op)
    header = new_header("chatcmpl", "chat.completion", chat.ask.model)
    return await _whole(context, request, header, door, [op])


async def completions(context: Context, request: Request) -> Reply:
    completion = parse_completion(await read_json(context, request), context.limits)
    tokenizer = await asyncio.to_thread(load_tokenizer, context.settings.model_dir)

    def ids_of(prompt: str | np.ndarray) -> np.ndarray:
        return np.array(tokenizer.encode(prompt, add_special_tokens=True), np.int32) if isinstance(prompt, str) else prompt

    prompts = await asyncio.to_thread(lambda: [ids_of(prompt) for prompt in completion.prompts])
    ops = [await _sample(context, completion.ask, completion.ask.settings, prompt) for prompt in prompts]
    door = _TextDoor(completion, tokenizer)
    if completion.ask.stream:
        return await _stream(context, door, ops[0])
    return await _whole(context, request, new_header("cmpl", "text_completion", completion.ask.model), door, ops)


async def list_models(context: Context, request: Request) -> Reply:
    return {"object": "list", "data": [_model_json(name, created) for name, created in (await _models(context)).items()]}


async def get_model(context: Context, request: Request) -> Reply:
    name, models = str(request.path_params["model"]), await _models(context)
    if name not in models:
        raise NotFoundError(_no_such_model(context, name))
    return _model_json(name, models[name])


# --- names ------------------------------------------------------------------------------------------------------


async def _models(context: Context) -> dict[str, int]:
    """Every name that can be asked for -> since when, in seconds since 1970."""
    names = {context.base_model: 0}
    for session in context.registry.sessions():
        names |= {sampler_id: int(session.created_at.timestamp()) for sampler_id in session.samplers}
    for info in await asyncio.to_thread(context.checkpoints.list):
        if info.kind is CheckpointKind.SAMPLER and info.base_model == context.base_model:
            names[info.path] = int(info.created_at.timestamp())
    return names


def _model_json(name: str, created: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created, "owned_by": "skyrl_tx_server"}


def _no_such_model(context: Context, name: str) -> str:
    return f"no model {name!r}: ask for {context.base_model!r}, a live sampler's id or a sampler checkpoint's path; see /v1/models"


async def _weights(context: Context, name: str) -> str | None:
    """What the engine samples from under `name`; None is the base model. NotFoundError, UserError for a training checkpoint."""
    if name == context.base_model:
        return None
    if name.startswith("tinker://"):
        info = await asyncio.to_thread(context.checkpoints.info, name)
        if info.kind is not CheckpointKind.SAMPLER:
            raise UserError(f"{name} is a training checkpoint; ask for the path that save_weights_for_sampler returns")
        context.check_base_model(info.base_model)
        return name
    for session in context.registry.sessions():
        if name in session.samplers:
            return session.samplers[name].weights
    raise NotFoundError(_no_such_model(context, name))


# --- from a request to the engine -------------------------------------------------------------------------------


def _ending_turns(settings: SamplingSettings, tokenizer: Tokenizer) -> SamplingSettings:
    """A chat also ends where the tokenizer says a turn ends, which config.json may not know."""
    if tokenizer.eos_token_id is None or tokenizer.eos_token_id in settings.stop_token_ids:
        return settings
    return replace(settings, stop_token_ids=(*settings.stop_token_ids, tokenizer.eos_token_id))


async def _sample(context: Context, ask: Ask, settings: SamplingSettings, prompt: np.ndarray) -> Sample:
    limit = context.limits.max_context_length
    wanted = 1 if settings.max_tokens is None else settings.max_tokens
    if len(prompt) + wanted > limit:
        raise TooLongError(
            f"This model's maximum context length is {limit} tokens; the prompt has {len(prompt)} and {wanted} more were asked for. "
            "Shorten the prompt or lower max_tokens"
        )
    if not len(prompt):
        raise UserError("the prompt is empty: send at least one token")
    return Sample(weights=await _weights(context, ask.model), prompt=prompt, settings=settings, num_samples=ask.num_samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class _News:
    """Tokens that sample `index` has gained; `ended` with the last of them."""

    index: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    ended: StopReason | None = None


class _Listener:
    """Hands what the engine's thread reports to the event loop. Implements `engine.Watcher`."""

    def __init__(self, *, keep_tokens: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._keep_tokens = keep_tokens
        self.news: asyncio.Queue[_News | None] = asyncio.Queue()  # None: the request is over
        self.gone = False

    def tokens(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        if self._keep_tokens:
            self._put(_News(index=index, tokens=list(tokens), logprobs=list(logprobs)))

    def wanted(self) -> bool:
        return not self.gone

    def over(self, future: concurrent.futures.Future[OpResult]) -> None:
        self._put(None)

    def _put(self, news: _News | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: the server is gone and so is everyone who could ask
            self._loop.call_soon_threadsafe(self.news.put_nowait, news)


async def _follow(context: Context, op: Sample, results: list[SampleResult]) -> AsyncGenerator[_News]:
    """Every token of `op` as it comes; the result goes to `results`. Leaving early withdraws the request."""
    listener = _Listener(keep_tokens=True)
    future = context.engine.submit(op, listener)
    future.add_done_callback(listener.over)
    seen = [0] * op.num_samples
    try:
        while (news := await listener.news.get()) is not None:
            seen[news.index] += len(news.tokens)
            yield news
        result = _sampled(future)
        results.append(result)
        for index, sequence in enumerate(result.sequences):
            rest = slice(seen[index], None)
            yield _News(
                index=index, tokens=sequence.tokens[rest].tolist(), logprobs=sequence.logprobs[rest].tolist(), ended=sequence.stop_reason
            )
    finally:
        listener.gone = True
        future.cancel()


async def _results(context: Context, request: Request, ops: Sequence[Sample]) -> list[SampleResult] | None:
    """The results of `ops`; None when the client went away first, which withdraws them."""
    listener = _Listener(keep_tokens=False)
    futures = [context.engine.submit(op, listener) for op in ops]
    leaving = asyncio.create_task(_disconnected(request))
    finished = asyncio.gather(*(asyncio.wrap_future(future) for future in futures), return_exceptions=True)
    try:
        await asyncio.wait({finished, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return [_sampled(future) for future in futures] if finished.done() else None
    finally:
        listener.gone = True
        leaving.cancel()
        finished.cancel()


def _sampled(future: concurrent.futures.Future[OpResult]) -> SampleResult:
    if future.cancelled():
        raise ServerError("withdrawn before it began")
    result = future.result()
    assert isinstance(result, SampleResult)
    return result


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# --- the two doors ----------------------------------------------------------------------------------------------


class _ChatDoor:
    """Chat completions: answers come apart into content, reasoning and tool calls."""

    prefix, chunk_object = "chatcmpl", "chat.completion.chunk"

    def __init__(self, chat: ChatRequest, rendered: Rendered, tokenizer: Tokenizer) -> None:
        self.ask = chat.ask
        self._calls = bool(chat.tools)
        self._part = Part.REASONING if rendered.opens_reasoning else Part.BEGINNING
        self._decode = decoder(tokenizer)

    def answer(self) -> Answer:
        return Answer(self._decode, self.ask.settings.stop_strings, AnswerParser(calls=self._calls, part=self._part))

    def whole(self, pieces: Sequence[Piece]) -> dict[str, object]:
        return {"message": message_json(pieces)}

    def opening(self) -> dict[str, object]:
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, pieces: Sequence[Piece], calls_before: int) -> dict[str, object]:
        return {"delta": delta_json(pieces, calls_before)}

    def logprobs(self) -> Callable[[Sequence[int], Sequence[float]], dict[str, object]]:
        return partial(chat_logprobs, decode=self._decode)


class _TextDoor:
    """Text completions: an answer is its text."""

    prefix, chunk_object = "cmpl", "text_completion"

    def __init__(self, completion: CompletionRequest, tokenizer: Tokenizer) -> None:
        self.ask = completion.ask
        self._decode = decoder(tokenizer)

    def answer(self) -> Answer:
        return Answer(self._decode, self.ask.settings.stop_strings, None)

    def whole(self, pieces: Sequence[Piece]) -> dict[str, object]:
        return {"text": text_of(pieces)}

    def opening(self) -> dict[str, object] | None:
        return None

    def delta(self, pieces: Sequence[Piece], calls_before: int) -> dict[str, object]:
        return {"text": text_of(pieces)}

    def logprobs(self) -> Callable[[Sequence[int], Sequence[float]], dict[str, object]]:
        return TextLogprobs(self._decode).add


type _Door = _ChatDoor | _TextDoor


async def _whole(context: Context, request: Request, header: Header, door: _Door, ops: Sequence[Sample]) -> Reply:
    results = await _results(context, request, ops)
    if results is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    choices: list[dict[str, object]] = []
    for result in results:
        for sequence in result.sequences:
            answer, ids = door.answer(), sequence.tokens.tolist()
            choices.append(
                {
                    "index": len(choices),
                    **door.whole(answer.finish(ids, sequence.stop_reason)),
                    "logprobs": door.logprobs()(ids, sequence.logprobs.tolist()) if door.ask.logprobs else None,
                    "finish_reason": answer.finish_reason(sequence.stop_reason),
                    **({"token_ids": ids} if door.ask.token_ids else {}),
                }
            )
    body = header.with_choices(choices) | {"usage": _usage(ops, results)}
    if door.ask.token_ids:
        prompts = [op.prompt.tolist() for op in ops]
        body["prompt_token_ids"] = prompts[0] if len(prompts) == 1 else prompts
    return body


async def _stream(context: Context, door: _Door, op: Sample) -> Response:
    """Waits for the first tokens, so that a request the engine refuses still gets its status."""
    results: list[SampleResult] = []
    news = _follow(context, op, results)
    first = await anext(news)

    async def events() -> AsyncIterator[str]:
        try:
            async with contextlib.aclosing(news):
                for chunk in _opening_chunks(header, door, op):
                    yield _event(chunk)
                for chunk in choices.chunks(first):
                    yield _event(chunk)
                async for more in news:
                    for chunk in choices.chunks(more):
                        yield _event(chunk)
            if door.ask.include_usage:
                yield _event(header.with_choices([]) | {"usage": _usage([op], results)})
            yield "data: [DONE]\n\n"
        except ServerError as error:
            yield _event(error_json(error))

    header = new_header(door.prefix, door.chunk_object, door.ask.model)
    choices = _Choices(header, door, op)
    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


class _Choices:
    """The choices of one stream as far as they have come."""

    def __init__(self, header: Header, door: _Door, op: Sample) -> None:
        self._header = header
        self._door = door
        self._answers = [door.answer() for _ in range(op.num_samples)]
        self._logprobs = [door.logprobs() for _ in range(op.num_samples)]
        self._calls = [0] * op.num_samples

    def chunks(self, news: _News) -> Iterable[dict[str, object]]:
        """At most one chunk with what is new, and one more with the reason when the choice is over."""
        index, answer = news.index, self._answers[news.index]
        pieces = answer.add(news.tokens) if news.ended is None else answer.finish(news.tokens, news.ended)
        if pieces or ((self._door.ask.logprobs or self._door.ask.token_ids) and news.tokens):
            yield self._chunk(
                index,
                self._door.delta(pieces, self._calls[index]),
                logprobs=self._logprobs[index](news.tokens, news.logprobs) if self._door.ask.logprobs else None,
                **({"token_ids": list(news.tokens)} if self._door.ask.token_ids else {}),
            )
        self._calls[index] += sum(isinstance(piece, ToolCall) for piece in pieces)
        if news.ended is not None:
            yield self._chunk(index, self._door.delta((), 0), logprobs=None, finish_reason=answer.finish_reason(news.ended))

    def _chunk(self, index: int, delta: Mapping[str, object], **more: object) -> dict[str, object]:
        return self._header.with_choices([{"index": index, **delta, "finish_reason": None, **more}])


def _opening_chunks(header: Header, door: _Door, op: Sample) -> Iterable[dict[str, object]]:
    opening = door.opening()
    if opening is not None:
        for index in range(op.num_samples):
            yield header.with_choices([{"index": index, **opening, "logprobs": None, "finish_reason": None}])


def _usage(ops: Sequence[Sample], results: Sequence[SampleResult]) -> dict[str, object]:
    return usage(
        sum(len(op.prompt) for op in ops),
        sum(len(sequence.tokens) for result in results for sequence in result.sequences),
        sum(result.prompt_cache_hit_tokens for result in results),
    )


def _event(body: Mapping[str, object]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _in_openai_shape(handler: Handler) -> Handler:
    async def handle(context: Context, request: Request) -> Reply:
        try:
            return await handler(context, request)
        except ServerError as error:
            return JSONResponse(error_json(error), status_code=error.status)

    return handle


ENDPOINTS = (
    Endpoint(method="POST", path="/v1/chat/completions", handler=_in_openai_shape(chat_completions)),
    Endpoint(method="POST", path="/v1/completions", handler=_in_openai_shape(completions)),
    Endpoint(method="GET", path="/v1/models", handler=_in_openai_shape(list_models)),
    Endpoint(method="GET", path="/v1/models/{model:path}", handler=_in_openai_shape(get_model)),
)

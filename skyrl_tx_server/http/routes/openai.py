"""OpenAI's routes for sampling: /v1/chat/completions, /v1/completions and /v1/models.

`model` is the name of the base model, the id of a live sampler, or the tinker:// path of a sampler
checkpoint. In a stream, each event with new text belongs to one sample. The engine sends new text after each
prefill batch and after each decode dispatch (a program call that computes several decode steps). If an
external sampler (option `sampler_url`) samples the completions, each sample is one event with its whole text.
If the client disconnects, the slots of its samples are freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from skyrl_tx_server.engine.operations import Sample, SampleResult, SamplingSettings
from skyrl_tx_server.errors import NotFoundError, ServerError, TooLongError, UserError
from skyrl_tx_server.files.checkpoint_record import CheckpointKind, is_on_disk
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.bodies import CHAT_BODY, is_large
from skyrl_tx_server.http.http_handler import CLIENT_CLOSED_REQUEST, Endpoint, Reply, parsed_json
from skyrl_tx_server.http.routes.sampling import check_sampler_checkpoint, weights_of
from skyrl_tx_server.http.routes.weights import free_changed
from skyrl_tx_server.http.streaming import stream_tokens, unless_disconnected, wait_for_results
from skyrl_tx_server.http.wire.chat_format import Tokenizer, load_tokenizer, render
from skyrl_tx_server.http.wire.limits import check_tokens
from skyrl_tx_server.http.wire.openai_replies import (
    ChatFormat,
    Choices,
    ReplyFormat,
    TextFormat,
    error_json,
    new_header,
    prompt_fields,
    usage,
)
from skyrl_tx_server.http.wire.openai_requests import SamplingRequest, parse_chat, parse_completion


async def chat_completions(state: AppState, request: Request) -> Reply:
    async with parsed_json(state, request, parse_chat) as chat, _thread(state, request):
        tokenizer = await asyncio.to_thread(load_tokenizer, state.settings.model_dir)
        rendered = await asyncio.to_thread(render, tokenizer, chat.messages, chat.tools, chat.template_kwargs)
    settings = _with_end_of_turn(chat.sampling.settings, tokenizer)
    op = await _sample(state, chat.sampling, settings, np.array(rendered.token_ids, np.int32))
    return await _reply(state, request, ChatFormat(chat, rendered, tokenizer), [op])


async def completions(state: AppState, request: Request) -> Reply:
    async with parsed_json(state, request, parse_completion) as completion, _thread(state, request):
        tokenizer = await asyncio.to_thread(load_tokenizer, state.settings.model_dir)
        prompts = await asyncio.to_thread(_prompt_ids, tokenizer, completion.prompts)
    ops = [
        await _sample(state, completion.sampling, completion.sampling.settings, prompt) for prompt in prompts
    ]
    return await _reply(state, request, TextFormat(completion, tokenizer), ops)


def _thread(state: AppState, request: Request) -> AbstractAsyncContextManager[None]:
    return state.threads if is_large(request, CHAT_BODY) else contextlib.nullcontext()


def _prompt_ids(tokenizer: Tokenizer, prompts: Sequence[str | np.ndarray]) -> list[np.ndarray]:
    return [
        np.array(tokenizer.encode(prompt, add_special_tokens=True), np.int32)
        if isinstance(prompt, str)
        else prompt
        for prompt in prompts
    ]


async def list_models(state: AppState, request: Request) -> Reply:
    return {
        "object": "list",
        "data": [_model_json(name, created) for name, created in (await _models(state)).items()],
    }


async def get_model(state: AppState, request: Request) -> Reply:
    name, models = str(request.path_params["model"]), await _models(state)
    if name not in models:
        raise NotFoundError(_no_such_model(state, name))
    return _model_json(name, models[name])


# --- names ---


async def _models(state: AppState) -> dict[str, int]:
    """Return the creation time of each model, in seconds since 1970, by name. The base model has time 0, and
    a sampler has the time of its session."""
    names = {state.base_model: 0}
    for session in state.registry.sessions():
        names |= {sampler_id: int(session.created_at.timestamp()) for sampler_id in session.samplers}
    for info in await asyncio.to_thread(state.checkpoints.list):
        if info.kind is CheckpointKind.SAMPLER and info.base_model == state.base_model:
            names[info.path] = int(info.created_at.timestamp())
    return names


def _model_json(name: str, created: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created, "owned_by": "skyrl_tx_server"}


def _no_such_model(state: AppState, name: str) -> str:
    return (
        f"no model {name!r}: use {state.base_model!r}, a live sampler's id or a sampler checkpoint's "
        "path; see /v1/models"
    )


async def _weights(state: AppState, name: str) -> str | None:
    """Return `Sample.weights` for a model name; None is the base model. Raise NotFoundError for an unknown
    name, and UserError for a checkpoint that is not for sampling or belongs to another base model."""
    if name == state.base_model:
        return None
    if is_on_disk(name):
        return await asyncio.to_thread(check_sampler_checkpoint, state, name)
    if (sampler := state.registry.find_sampler(name)) is not None:
        return weights_of(state, sampler)
    raise NotFoundError(_no_such_model(state, name))


# --- from a request to the engine ---


def _with_end_of_turn(settings: SamplingSettings, tokenizer: Tokenizer) -> SamplingSettings:
    """Add the tokenizer's end-of-turn token to the stop tokens, because config.json may lack the token."""
    if tokenizer.eos_token_id is None or tokenizer.eos_token_id in settings.stop_token_ids:
        return settings
    return replace(settings, stop_token_ids=(*settings.stop_token_ids, tokenizer.eos_token_id))


async def _sample(
    state: AppState, sampling: SamplingRequest, settings: SamplingSettings, prompt: np.ndarray
) -> Sample:
    limit = state.limits.max_context_length
    max_tokens = 1 if settings.max_tokens is None else settings.max_tokens
    if len(prompt) + max_tokens > limit:
        raise TooLongError(
            f"This model's maximum context length is {limit} tokens; the prompt has {len(prompt)} and the "
            f"request adds {max_tokens}. Shorten the prompt or lower max_tokens"
        )
    if not len(prompt):
        raise UserError("the prompt is empty: send at least one token")
    check_tokens(prompt, "prompt", state.limits)  # a tokenizer.json may have more tokens than the model
    weights = await _weights(state, sampling.model)
    free_changed(state, weights)
    return Sample(
        weights=weights,
        prompt=prompt,
        settings=settings,
        num_samples=sampling.num_samples,
    )


# --- replies ---


async def _reply(
    state: AppState, request: Request, reply_format: ReplyFormat, ops: Sequence[Sample]
) -> Reply:
    if reply_format.sampling.stream:
        return await _streamed_reply(state, request, reply_format, ops[0])
    header = new_header(reply_format.prefix, reply_format.whole_object, reply_format.sampling.model)
    results = await wait_for_results(state, request, ops)
    if results is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    # in a thread, because converting many tokens to text takes seconds and would block the event loop
    return await asyncio.to_thread(_complete_response, header, reply_format, ops, results)


def _complete_response(
    header: Mapping[str, object],
    reply_format: ReplyFormat,
    ops: Sequence[Sample],
    results: Sequence[SampleResult],
) -> Response:
    choices: list[dict[str, object]] = []
    reply_prompt, _ = prompt_fields(reply_format, ops[0])
    for op, result in zip(ops, results, strict=True):
        _, choice_prompt = prompt_fields(reply_format, op)
        for sequence in result.sequences:
            answer, ids = reply_format.answer(), sequence.tokens.tolist()
            choices.append(
                {
                    "index": len(choices),
                    **reply_format.whole(answer.finish(ids, sequence.stop_reason)),
                    "logprobs": reply_format.logprobs()(ids, sequence.logprobs.tolist())
                    if reply_format.sampling.logprobs
                    else None,
                    "finish_reason": answer.finish_reason(sequence.stop_reason),
                    **({"token_ids": ids} if reply_format.sampling.token_ids else {}),
                    **choice_prompt,
                }
            )
    return JSONResponse({**header, "choices": choices, "usage": usage(ops, results), **reply_prompt})


async def _streamed_reply(
    state: AppState, request: Request, reply_format: ReplyFormat, op: Sample
) -> Response:
    """Return a streamed response. Wait for its first tokens, so that a rejected request gets an error
    status."""
    results: list[SampleResult] = []
    deltas = stream_tokens(state, op, results)
    first_delta = await unless_disconnected(request, anext(deltas))
    if first_delta is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def events() -> AsyncIterator[str]:
        try:
            async with contextlib.aclosing(deltas):
                for chunk in choices.opening_chunks():
                    yield _event(chunk)
                for chunk in choices.chunks(first_delta):
                    yield _event(chunk)
                async for delta in deltas:
                    for chunk in choices.chunks(delta):
                        yield _event(chunk)
            if reply_format.sampling.include_usage:
                yield _event({**header, "choices": [], "usage": usage([op], results)})
            yield "data: [DONE]\n\n"
        except ServerError as error:
            yield _event(error_json(error))

    header = new_header(reply_format.prefix, reply_format.chunk_object, reply_format.sampling.model)
    choices = Choices(header, reply_format, op)
    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


def _event(body: Mapping[str, object]) -> str:
    return f"data: {json.dumps(body)}\n\n"


ENDPOINTS = (
    Endpoint(method="POST", path="/v1/chat/completions", handler=chat_completions, body=CHAT_BODY),
    Endpoint(method="POST", path="/v1/completions", handler=completions, body=CHAT_BODY),
    Endpoint(method="GET", path="/v1/models", handler=list_models),
    Endpoint(method="GET", path="/v1/models/{model:path}", handler=get_model),
)

"""The routes of futures: retrieve_future (a long poll for a result or an error) and cancel_future."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from skyrl_tx_server.engine.futures import Outcome, result_size
from skyrl_tx_server.engine.operations import ForwardBackwardResult, SampleResult
from skyrl_tx_server.errors import FutureLostError
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.http_handler import Endpoint, Reply, read_fields, until_sent
from skyrl_tx_server.http.large_reply import LargeReply
from skyrl_tx_server.http.wire.protobuf import MEDIA_TYPE, result_to_proto
from skyrl_tx_server.http.wire.results import result_to_json

SMALL_PROTO_BYTES, SMALL_JSON_BYTES = 4 << 20, 64 << 10
"""The largest results (`result_size`) that are encoded on the event loop."""


async def retrieve_future(state: AppState, request: Request) -> Reply:
    fields = await read_fields(state, request, "retrieve_future")
    request_id = fields.text("request_id")
    # The request counts as a heartbeat. Its reply does not, because the client may have disconnected.
    state.registry.touch(state.futures.session_of(request_id))
    with ExitStack() as until_encoded:

        async def before_delivery(outcome: Outcome) -> None:
            if _is_large(outcome, request):
                await state.large_replies.acquire()
                until_sent(request).callback(state.large_replies.release)
                await state.threads.acquire()
                until_encoded.callback(state.threads.release)
                if await request.is_disconnected():
                    raise ClientDisconnect

        outcome = await state.futures.wait(request_id, before_delivery)
        if outcome is None:
            # The SDK polls again immediately, so `wait` holds the request for most of the timeout of the SDK.
            return JSONResponse(
                {"type": "try_again", "request_id": request_id, "queue_state": "active"}, status_code=408
            )
        if isinstance(outcome.error, FutureLostError):
            raise outcome.error
        if outcome.error is not None:
            return {"error": str(outcome.error), "category": outcome.error.category}
        media_type = MEDIA_TYPE if _is_proto(outcome, request) else "application/json"
        if _is_large(outcome, request):
            body = await asyncio.to_thread(_encode, outcome, media_type)
            return LargeReply(body, media_type=media_type)
        return Response(_encode(outcome, media_type), media_type=media_type)


def _is_proto(outcome: Outcome, request: Request) -> bool:
    accepts_proto = MEDIA_TYPE in request.headers.get("accept", "")
    return accepts_proto and isinstance(outcome.result, SampleResult | ForwardBackwardResult)


def _is_large(outcome: Outcome, request: Request) -> bool:
    max_bytes = SMALL_PROTO_BYTES if _is_proto(outcome, request) else SMALL_JSON_BYTES
    return outcome.result is not None and result_size(outcome.result) > max_bytes


def _encode(outcome: Outcome, media_type: str) -> bytes:
    result = outcome.result
    assert result is not None, "a finished future has a result or an error"
    if media_type == MEDIA_TYPE and isinstance(result, SampleResult | ForwardBackwardResult):
        return result_to_proto(result)
    return orjson.dumps(result_to_json(outcome.kind, result, outcome.extra))


async def cancel_future(state: AppState, request: Request) -> Reply:
    """Withdraw a request. What happens to its operation depends on the state of the operation:

    - A waiting operation never starts.
    - A running sample operation ends after its current or next prefill batch or decode dispatch (a program
      call that computes several decode steps), or at once if an external sampler serves it.
    - Any other running operation finishes, and its result is kept only for the grace period of delivered
      results (see `engine.futures`).
    """
    fields = await read_fields(state, request, "cancel_future")
    request_id = fields.text("request_id")
    fields.finish(ignored=("type",))
    state.futures.cancel(request_id)
    return None


ENDPOINTS = (
    Endpoint(method="POST", path="/api/v1/retrieve_future", handler=retrieve_future, log_level=logging.DEBUG),
    Endpoint(method="POST", path="/api/v1/cancel_future", handler=cancel_future),
)

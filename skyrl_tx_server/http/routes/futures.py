"""The routes of futures: retrieve_future (a long poll for a result or an error) and cancel_future."""

from __future__ import annotations

import logging
from functools import partial

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from skyrl_tx_server.engine.futures import Outcome, result_size
from skyrl_tx_server.engine.operations import ForwardBackwardResult, SampleResult
from skyrl_tx_server.errors import FutureLostError
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.http_handler import Endpoint, Reply, read_fields
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
    outcome = await state.futures.wait(request_id)
    if outcome is None:
        # The SDK polls again immediately, so `wait` holds the request for most of the timeout of the SDK.
        return JSONResponse(
            {"type": "try_again", "request_id": request_id, "queue_state": "active"}, status_code=408
        )
    return _reply(state, outcome, accepts_proto=MEDIA_TYPE in request.headers.get("accept", ""))


def _reply(state: AppState, outcome: Outcome, *, accepts_proto: bool) -> Reply:
    if isinstance(outcome.error, FutureLostError):
        raise outcome.error
    if outcome.error is not None:
        return {"error": str(outcome.error), "category": outcome.error.category}
    assert outcome.result is not None, "a finished future has a result or an error"
    if accepts_proto and isinstance(outcome.result, SampleResult | ForwardBackwardResult):
        encode, media_type, max_bytes = (
            partial(result_to_proto, outcome.result),
            MEDIA_TYPE,
            SMALL_PROTO_BYTES,
        )
    else:
        encode, media_type, max_bytes = partial(_to_json, outcome), "application/json", SMALL_JSON_BYTES
    if result_size(outcome.result) > max_bytes:
        return LargeReply(encode, state.reply_threads, media_type=media_type)
    return Response(encode(), media_type=media_type)


def _to_json(outcome: Outcome) -> bytes:
    assert outcome.result is not None
    return orjson.dumps(result_to_json(outcome.kind, outcome.result, outcome.extra))


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

"""Run every route: check access and API key, log one line, and convert errors to statuses.

The SDK retries 409, 429 and 5xx for minutes. A permanent error therefore has another 4xx status, for example
400 for a name in use and for a bug of the server; 429 and 5xx are for errors that may be temporary.
retrieve_future reports a failed operation with status 200 and an `error` field (`routes/futures.py`).
"""

from __future__ import annotations

import hmac
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from skyrl_tx_server.engine.operations import DEFAULT_TENANT
from skyrl_tx_server.errors import (
    CapacityError,
    ForbiddenError,
    LoadingError,
    ServerError,
    UnauthorizedError,
    UserError,
)
from skyrl_tx_server.http.access import check_access
from skyrl_tx_server.http.app_state import AppState, HttpSettings, RequestCounts
from skyrl_tx_server.http.bodies import CONTROL_BODY, BodyLimits
from skyrl_tx_server.http.wire.json_body import parse_json
from skyrl_tx_server.http.wire.json_reader import JsonReader
from skyrl_tx_server.http.wire.limits import Limits
from skyrl_tx_server.http.wire.openai_replies import error_json

logger = logging.getLogger("skyrl_tx_server.http")

Reply = Mapping[str, object] | Response | None
Handler = Callable[[AppState, Request], Awaitable[Reply]]

CLIENT_CLOSED_REQUEST = 499
"""The status that is logged for a client that disconnected before its reply. It is not sent."""
NOT_YET = (408, 503)
"""The statuses for a pending result and for a model that is loading. They are not logged as warnings."""
MAX_DETAIL_LENGTH = 2000
"""Maximum length of an error message, which may quote the request."""
_LIMITS = "skyrl_tx_server.body_limits"  # key of the endpoint's limits in the request's scope
_UNTIL_SENT = "skyrl_tx_server.until_sent"  # key of the stack that `until_sent` returns
_OPENAI_PREFIX = "/v1/"


@dataclass(kw_only=True, slots=True)
class StartupState:
    """Holds the application state after the engine has started. A request before the start gets a 503."""

    state: AppState | None = None
    requests: RequestCounts = field(default_factory=Counter)  # the requests before the start

    def begin(self, state: AppState) -> None:
        """Serve requests with `state`."""
        state.requests.update(self.requests)
        self.state = state

    def count(self, method: str, route: str, status: int) -> None:
        requests = self.requests if self.state is None else self.state.requests
        requests[method, route, status] += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A route. A dict that the handler returns is sent as JSON, None as an empty reply with status 204, and a
    Response as it is."""

    method: str
    path: str
    handler: Handler
    needs_key: bool = True  # has no effect if the server has no key
    for_operator: bool = False  # tenants get the status 403
    log_level: int = logging.INFO
    body: BodyLimits = CONTROL_BODY


@dataclass(frozen=True, slots=True)
class EndpointApp:
    """The ASGI application of a route. Every error becomes a reply."""

    endpoint: Endpoint
    startup: StartupState

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, endpoint, request = time.perf_counter(), self.endpoint, Request(scope, receive)
        with ExitStack() as stack:
            scope.update({_LIMITS: endpoint.body, _UNTIL_SENT: stack})
            response = await _answer(endpoint, self.startup, request)
            self.startup.count(endpoint.method, endpoint.path, response.status_code)
            logger.log(
                endpoint.log_level
                if response.status_code < 400 or response.status_code in NOT_YET
                else logging.WARNING,
                "method=%s route=%s status=%d ms=%.1f sdk=%s",
                endpoint.method,
                endpoint.path,
                response.status_code,
                1e3 * (time.perf_counter() - started),
                request.headers.get("x-sdk-method", "-")[:80],
            )
            await response(scope, receive, send)


async def _answer(endpoint: Endpoint, startup: StartupState, request: Request) -> Response:
    if startup.state is None:
        return refusal(
            endpoint.path, LoadingError("the server is still loading its model; try again in a moment")
        )
    try:
        state = startup.state
        check_access(state.settings.access, request)
        if endpoint.needs_key:
            state = state.for_tenant(_check_key(state.settings, request))
            if not _admit(state, request):
                too_many = "you have too many requests in progress; wait for earlier requests to finish"
                reply = refusal(endpoint.path, CapacityError(too_many))
                reply.headers["connection"] = "close"  # the server does not read the body
                return reply
        if endpoint.for_operator and not state.is_operator:
            raise ForbiddenError(
                f"{endpoint.path} is for the operator of this server, the holder of its api_key"
            )
        reply = await endpoint.handler(state, request)
        if isinstance(reply, Response):
            return reply
        return Response(status_code=204) if reply is None else JSONResponse(reply)
    except ServerError as error:
        return refusal(endpoint.path, error)
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except Exception as error:
        logger.exception("%s %s failed", endpoint.method, endpoint.path)
        return refusal(
            endpoint.path,
            ServerError(f"internal error, see the server's log: {type(error).__name__}: {error}"),
            status=400,
        )


def until_sent(request: Request) -> ExitStack:
    """Return the exit stack that is closed after the reply was sent, or could not be sent."""
    return request.scope[_UNTIL_SENT]


def _admit(state: AppState, request: Request) -> bool:
    """Count the request as in progress until its reply is sent. Return False if the tenants have requests in
    progress on more than 3/4 of the connections, and this tenant on more than an equal share of all
    connections. Thus a tenant cannot use all connections. Servers without tenants admit every request."""
    settings, in_progress, tenant = state.settings, state.in_progress, state.tenant
    if settings.tenant_keys is None:
        return True
    in_progress[tenant] += 1
    until_sent(request).callback(in_progress.subtract, [tenant])
    return (
        4 * in_progress.total() <= 3 * settings.max_connections
        or in_progress[tenant] * settings.num_tenants <= settings.max_connections
    )


def _check_key(settings: HttpSettings, request: Request) -> str:
    """Return the tenant that sent the request. Raise UnauthorizedError if the key is missing or wrong. The
    Tinker SDK sends X-API-Key; OpenAI's clients and Prometheus send a bearer token."""
    api_key, tenant_keys = settings.api_key, settings.tenant_keys
    if api_key is None and tenant_keys is None:
        return DEFAULT_TENANT
    key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
    if api_key is not None and hmac.compare_digest(key.encode(), api_key.encode()):
        return DEFAULT_TENANT
    tenant = None if tenant_keys is None else tenant_keys.tenant_of(key)
    if tenant is None:
        raise UnauthorizedError(
            "this server needs its API key: set TINKER_API_KEY for the Tinker SDK, or api_key= for OpenAI's "
            "clients"
        )
    return tenant


def refusal(path: str, error: ServerError, *, status: int | None = None) -> JSONResponse:
    """Return an error in OpenAI's format for paths below /v1, and in Tinker's format for other paths."""
    status = error.status if status is None else status
    detail = str(error)
    if len(detail) > MAX_DETAIL_LENGTH:
        detail = f"{detail[:MAX_DETAIL_LENGTH]}... ({len(detail)} characters)"
    if path.startswith(_OPENAI_PREFIX):
        return JSONResponse(error_json(error, detail), status_code=status)
    return JSONResponse({"detail": detail, "category": error.category}, status_code=status)


def parsed[T](
    state: AppState, request: Request, parse: Callable[[bytes], T], limits: BodyLimits | None = None
) -> AbstractAsyncContextManager[T]:
    """Provide `parse(body)`. Apply `limits` to the body, by default the limits of the request's endpoint. The
    bytes of a large body stay reserved until the block ends."""
    return state.bodies.parsed(request, parse, limits or request.scope[_LIMITS])


async def read_parsed[T](state: AppState, request: Request, parse: Callable[[bytes], T]) -> T:
    """Return `parse(body)`. Apply the limits of the request's endpoint to the body."""
    async with parsed(state, request, parse) as value:
        return value


async def read_body(state: AppState, request: Request) -> bytes:
    return await read_parsed(state, request, bytes)


def parsed_json[T](
    state: AppState,
    request: Request,
    parse: Callable[[object, Limits], T],
    limits: BodyLimits | None = None,
) -> AbstractAsyncContextManager[T]:
    """Provide `parse(body, state.limits)` of a JSON body. Apply `limits` in the same way as `parsed`."""
    applied: BodyLimits = limits or request.scope[_LIMITS]
    return parsed(state, request, lambda body: parse(parse_json(body, applied.json), state.limits), applied)


async def read_parsed_json[T](
    state: AppState,
    request: Request,
    parse: Callable[[object, Limits], T],
    limits: BodyLimits | None = None,
) -> T:
    """Return `parse(body, state.limits)` of a JSON body. Apply `limits` in the same way as `parsed`."""
    async with parsed_json(state, request, parse, limits) as value:
        return value


async def read_fields(state: AppState, request: Request, where: str) -> JsonReader:
    """Return the fields of a JSON body. `where` names the body in error messages."""
    return await read_parsed_json(state, request, lambda body, _: JsonReader(body, where))


def page_of[T](request: Request, items: Sequence[T]) -> tuple[list[T], dict[str, int]]:
    """Return the items that the query parameters `limit` and `offset` select, and the cursor of the reply."""
    try:
        limit, offset = int(request.query_params.get("limit", 20)), int(request.query_params.get("offset", 0))
    except ValueError:
        raise UserError("limit and offset must be integers") from None
    if limit < 1 or offset < 0:
        raise UserError("limit must be at least 1 and offset at least 0")
    return list(items[offset : offset + limit]), {
        "limit": limit,
        "offset": offset,
        "total_count": len(items),
    }

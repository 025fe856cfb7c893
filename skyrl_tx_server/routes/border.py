"""The HTTP border: every route runs inside `serve`, which reads no more than allowed, logs one line and turns errors into statuses.

Statuses follow what the SDK does with them. It retries 409 and 5xx for minutes, so a fault that will not go away (a name taken, a bug
of ours) is a 400; 429 and 503 are for what does go away; a retrieve_future failure is a 200 with an `error` field, in `futures.py`.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import zstandard
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from skyrl_tx_server.errors import ConflictError, ForbiddenError, ServerError, UnauthorizedError, UserError
from skyrl_tx_server.ops import DEFAULT_TENANT
from skyrl_tx_server.routes.context import Context, HttpSettings

logger = logging.getLogger("skyrl_tx_server.http")

Reply = Mapping[str, object] | Response | None
Handler = Callable[[Context, Request], Awaitable[Reply]]

DISCARD_AT_MOST = 1 << 30
CLIENT_CLOSED_REQUEST = 499
"""The status logged for a client that left before its answer; nobody receives it."""
NOT_YET = (408, 503)  # a result still pending, a model still loading: not worth a warning


@dataclass(kw_only=True, slots=True)
class Lobby:
    """Where requests wait until the engine can work: the port is open before the model is loaded."""

    context: Context | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """One route of the contract. The handler's dict becomes JSON, None a 204."""

    method: str
    path: str
    handler: Handler
    needs_key: bool = True  # where the server has one
    for_operator: bool = False  # where the server has tenants
    log_level: int = field(default=logging.INFO)


async def serve(endpoint: Endpoint, lobby: Lobby, request: Request) -> Response:
    """Run one request, whatever happens."""
    began = time.perf_counter()
    response = await _answer(endpoint, lobby, request)
    if lobby.context is not None:
        lobby.context.requests[endpoint.method, endpoint.path, response.status_code] += 1
    logger.log(
        endpoint.log_level if response.status_code < 400 or response.status_code in NOT_YET else logging.WARNING,
        "method=%s route=%s status=%d ms=%.1f sdk=%s",
        endpoint.method,
        endpoint.path,
        response.status_code,
        1e3 * (time.perf_counter() - began),
        request.headers.get("x-sdk-method", "-")[:80],
    )
    return response


async def _answer(endpoint: Endpoint, lobby: Lobby, request: Request) -> Response:
    if lobby.context is None:
        return problem(503, "the server is still loading its model; try again in a moment", "server")
    try:
        context = lobby.context
        if endpoint.needs_key:
            context = context.of(_check_key(context.settings, request))
        if endpoint.for_operator and not context.is_operator:
            raise ForbiddenError(f"{endpoint.path} is for the operator of this server, who has its api_key")
        return _respond(await endpoint.handler(context, request))
    except ConflictError as error:
        return problem(400, str(error), error.category)
    except ServerError as error:
        return problem(error.status, str(error), error.category)
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except Exception as error:
        logger.exception("%s %s failed", endpoint.method, endpoint.path)
        return problem(400, f"internal error, see the server's log: {type(error).__name__}: {error}", "server")


def _check_key(settings: HttpSettings, request: Request) -> str:
    """The tenant who sent the request. The Tinker SDK sends X-API-Key, OpenAI's clients and Prometheus a bearer token."""
    api_key, tenant_keys = settings.api_key, settings.tenant_keys
    if api_key is None and tenant_keys is None:
        return DEFAULT_TENANT
    sent = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
    if api_key is not None and hmac.compare_digest(sent.encode(), api_key.encode()):
        return DEFAULT_TENANT
    tenant = None if tenant_keys is None else tenant_keys.tenant_of(sent)
    if tenant is None:
        raise UnauthorizedError("this server needs its API key: TINKER_API_KEY for the Tinker SDK, api_key= for OpenAI's clients")
    return tenant


def _respond(reply: Reply) -> Response:
    if reply is None:
        return Response(status_code=204)
    if isinstance(reply, Response):
        return reply
    return JSONResponse(reply)


def problem(status: int, detail: str, category: str) -> JSONResponse:
    return JSONResponse({"detail": detail, "category": category}, status_code=status)


async def read_body(context: Context, request: Request) -> bytes:
    """The body, decompressed. A body over the limit is read to its end all the same: a client cut off while sending would only retry."""
    limit = context.settings.max_request_bytes
    chunks: list[bytes] = []
    size = 0
    stalled_s = context.settings.stalled_s
    try:
        async with asyncio.timeout(stalled_s) as patience:
            async for chunk in request.stream():
                patience.reschedule(asyncio.get_running_loop().time() + stalled_s)
                size += len(chunk)
                if size <= limit:
                    chunks.append(chunk)
                elif size > DISCARD_AT_MOST:
                    break
    except TimeoutError:  # a client whose machine died says no goodbye
        raise UserError(f"no byte of the body came for {stalled_s:g} s; send it again") from None
    if size > limit:
        raise _too_large(limit)
    body = b"".join(chunks)
    match request.headers.get("content-encoding", "identity").lower():
        case "identity" | "":
            return body
        case "zstd":
            return _decompress(body, limit)
        case other:
            raise UserError(f"content-encoding {other!r} is not supported; send zstd or none")


def _decompress(body: bytes, limit: int) -> bytes:
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)) as reader:
            plain = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise UserError(f"the body is not valid zstd: {error}") from None
    if len(plain) > limit:
        raise _too_large(limit)
    return plain


def _too_large(limit: int) -> UserError:
    return UserError(
        f"the request is larger than this server's limit of {limit >> 20} MiB; send less at once, or start it with a larger max_request_mb"
    )


async def read_json(context: Context, request: Request) -> object:
    body = await read_body(context, request)
    if not body:
        return {}
    try:
        value = json.loads(body)
        if b"\\ud" in body.lower():  # half a surrogate pair is valid JSON and no text: nothing could log it or send it back
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body is not valid JSON: {error}") from None
    return value

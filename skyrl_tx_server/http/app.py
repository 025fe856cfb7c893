"""The ASGI application: all routes and the housekeeping task."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from skyrl_tx_server.errors import NoRouteError, NotFoundError, ServerError
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.http_handler import Endpoint, EndpointApp, StartupState, refusal
from skyrl_tx_server.http.routes import (
    downloads,
    futures,
    metrics,
    openai,
    sampling,
    service,
    sessions,
    training,
    unsupported,
    weights,
)

logger = logging.getLogger(__name__)

# Starlette searches the routes in this order for every request, so the most frequent routes come first.
ENDPOINTS: tuple[Endpoint, ...] = (
    *futures.ENDPOINTS,
    *training.ENDPOINTS,
    *sampling.ENDPOINTS,
    *service.ENDPOINTS,
    *sessions.ENDPOINTS,
    *unsupported.ENDPOINTS,
    *downloads.ENDPOINTS,
    *weights.ENDPOINTS,
    *openai.ENDPOINTS,
    *metrics.ENDPOINTS,
)

UNKNOWN_ROUTE = "unknown"
"""The label of requests that match no route, in the metric `requests_total`."""


def build_app(startup: StartupState, *, housekeeping_period_s: float = 5.0) -> Starlette:
    """Return the application. It replies 503 until `startup` contains an `AppState`."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        housekeeper = asyncio.create_task(_housekeeping(startup, housekeeping_period_s))
        yield
        housekeeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await housekeeper

    return Starlette(
        routes=[
            Route(endpoint.path, EndpointApp(endpoint, startup), methods=[endpoint.method])
            for endpoint in ENDPOINTS
        ],
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((404, 405), partial(_no_route, startup)),
    )


async def _no_route(startup: StartupState, request: Request, error: Exception) -> JSONResponse:
    logger.warning("no route %s %r", request.method, request.url.path[:200])
    apis = "the Tinker API of SDK 0.38, and OpenAI's /v1/chat/completions, /v1/completions and /v1/models"
    path = request.url.path
    reply = refusal(path, NoRouteError(f"this server has no {request.method} {path}; it implements {apis}"))
    startup.count(request.method, UNKNOWN_ROUTE, reply.status_code)
    return reply


async def _housekeeping(startup: StartupState, period_s: float) -> None:
    """Run `housekeep` every `period_s` seconds."""
    reported = ""  # the error of the previous run
    while True:
        await asyncio.sleep(period_s)
        if startup.state is not None:
            try:
                await housekeep(startup.state)
                reported = ""
            except ServerError as error:
                if str(error) != reported:
                    logger.warning("housekeeping failed, trying again every %g s: %s", period_s, error)
                reported = str(error)
            except Exception:
                logger.exception("housekeeping failed; trying again in %g s", period_s)


async def housekeep(state: AppState) -> None:
    """Reload the keys of the tenants if their file has changed. Remove expired sessions and checkpoints,
    results that were delivered some time ago (`Retention.grace_s`), and derived files (`files.derived`) that
    were not used for `downloads.KEEP_UNUSED_FOR`."""
    if state.settings.tenant_keys is not None:
        state.settings.tenant_keys.reload_if_changed()
    for tenant_state in (state, *state.tenants.values()):
        tenant_state.futures.prune()
    for session_id in state.registry.expired():
        sessions.end_session(state, session_id, "its client sent no heartbeat")
    for path in state.run_index.expired():
        if not state.run_index.has_expired(path):
            continue  # a client has changed the expiry while other checkpoints were deleted
        generation = state.run_index.expiring_generation(path)
        try:
            generation = await weights.delete(state, path, only=generation)
            if generation is None:
                continue  # the checkpoint was saved again; that save records the new expiry
            logger.info("deleted %s: it has expired", path)
        except NotFoundError:
            logger.debug("%s was deleted already", path)
        except (ServerError, OSError) as error:
            logger.warning("%s has expired and cannot be deleted; delete it by hand: %s", path, error)
        state.run_index.forget(path, generation)
    await asyncio.to_thread(state.checkpoints.derived_files.sweep, downloads.KEEP_UNUSED_FOR.total_seconds())

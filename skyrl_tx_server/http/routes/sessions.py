"""Sessions: a client creates a session, and the client's heartbeats keep the session open.

A session ends when the client closes it, or after `session_timeout_s` without activity. Activity is a
heartbeat, a request that creates or uses a model or sampler of the session, or a poll of one of its futures.
Requests to OpenAI's routes (`/v1`) are not activity.
"""

from __future__ import annotations

import logging

from starlette.requests import Request

from skyrl_tx_server.engine.tenants import owner_of
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.http_handler import Endpoint, Reply, page_of, read_body, read_fields

logger = logging.getLogger(__name__)


async def create_session(state: AppState, request: Request) -> Reply:
    fields = await read_fields(state, request, "create_session")
    session = state.registry.open_session(
        tags=fields.tags("tags"),
        user_metadata=fields.metadata("user_metadata"),
        display_name=fields.optional_text("display_name", max_length=256),
    )
    return {"type": "create_session", "session_id": session.session_id}


async def heartbeat(state: AppState, request: Request) -> Reply:
    fields = await read_fields(state, request, "session_heartbeat")
    state.registry.heartbeat(fields.text("session_id"))
    return {"type": "session_heartbeat"}


async def finish(state: AppState, request: Request) -> Reply:
    """End a session. The reply is a success for an unknown session too, because the SDK would raise an
    exception for an error at the end of a `with ServiceClient()` block."""
    await read_body(state, request)
    end_session(state, request.path_params["session_id"], "its client closed it")
    return None


def end_session(state: AppState, session_id: str, why: str) -> None:
    """Remove a session, withdraw its requests and free its memory on the device. Ignore an unknown
    session."""
    if not state.registry.has_session(session_id):
        return
    state = state.for_tenant(owner_of(session_id))
    ops = state.registry.end_session(session_id, why)
    state.futures.abandon(session_id)
    for op in ops:
        state.engine.submit(op)
    if ops:
        logger.info("session %s ended (%s): freed %d models and snapshots", session_id, why, len(ops))


async def list_sessions(state: AppState, request: Request) -> Reply:
    page, _ = page_of(request, state.registry.sessions())
    return {"sessions": [session.session_id for session in page]}


async def get_session(state: AppState, request: Request) -> Reply:
    session = state.registry.look_up(request.path_params["session_id"])
    return {
        "training_run_ids": list(session.models),
        "sampler_ids": list(session.samplers),
        "user_metadata": session.user_metadata,
        "display_name": session.display_name,
    }


ENDPOINTS = (
    Endpoint(method="POST", path="/api/v1/create_session", handler=create_session),
    Endpoint(method="POST", path="/api/v1/session_heartbeat", handler=heartbeat, log_level=logging.DEBUG),
    Endpoint(method="POST", path="/api/v1/sessions/{session_id}/finish", handler=finish),
    Endpoint(method="GET", path="/api/v1/sessions", handler=list_sessions),
    Endpoint(method="GET", path="/api/v1/sessions/{session_id}", handler=get_session),
)

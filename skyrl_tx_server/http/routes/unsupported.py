"""Routes of the Tinker API that this server does not implement. Each replies with an alternative."""

from __future__ import annotations

from starlette.requests import Request

from skyrl_tx_server.errors import UserError
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.http_handler import Endpoint, Handler, Reply, read_body


def _refuse(message: str) -> Handler:
    async def refuse(state: AppState, request: Request) -> Reply:
        await read_body(state, request)
        raise UserError(message)

    return refuse


_ACCOUNTS = "this server has no accounts and does not implement this call"
_FLAG = "this server does not implement this call, and its client/config tells the SDK not to use it"

ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/api/v1/copy_weights",
        handler=_refuse(
            f"copy_weights: {_ACCOUNTS}; copy the checkpoint's directory from its checkpoints_dir"
        ),
    ),
    Endpoint(
        method="GET",
        path="/api/v1/audit",
        handler=_refuse(f"audit: {_ACCOUNTS}; its log has one line for each request"),
    ),
    Endpoint(
        method="GET",
        path="/api/v1/billing/usage/events",
        handler=_refuse(f"billing usage: {_ACCOUNTS}; GET /metrics counts tokens by kind"),
    ),
    Endpoint(
        method="GET",
        path="/api/v1/billing/usage/checkpoints/current",
        handler=_refuse(
            f"storage usage: {_ACCOUNTS}; GET /api/v1/checkpoints has the size of every checkpoint"
        ),
    ),
    Endpoint(
        method="PUT",
        path="/api/v1/sessions/{session_id}/project",
        handler=_refuse(f"set_session_project: {_ACCOUNTS}; use tags or user_metadata"),
    ),
    Endpoint(
        method="GET",
        path="/api/v1/sessions/{session_id}/trace_export",
        handler=_refuse(
            "trace_export: this server keeps no traces and does not implement this call; see GET "
            "/api/v1/stats"
        ),
    ),
    Endpoint(
        method="POST",
        path="/api/v1/sessions/search",
        handler=_refuse("search_sessions: this server does not implement this call; use list_sessions"),
    ),
    Endpoint(
        method="POST",
        path="/api/v1/create_custom_loss",
        handler=_refuse(f"create_custom_loss: {_FLAG}; use forward_backward_custom"),
    ),
    Endpoint(
        method="POST",
        path="/api/v1/retrieve_futures",
        handler=_refuse(f"retrieve_futures: {_FLAG}; use retrieve_future"),
    ),
    Endpoint(
        method="POST",
        path="/api/v1/join_sampling_session",
        handler=_refuse(f"join_sampling_session: {_FLAG}"),
    ),
    Endpoint(method="GET", path="/api/v1/auth/apikey/me", handler=_refuse(f"auth/apikey/me: {_ACCOUNTS}")),
    Endpoint(method="DELETE", path="/api/v1/auth/apikey/me", handler=_refuse(f"auth/apikey/me: {_ACCOUNTS}")),
    Endpoint(
        method="POST",
        path="/api/v1/auth/token",
        handler=_refuse(
            f"auth/token: {_ACCOUNTS}; any API key that begins with tml- will do where the server has none"
        ),
    ),
)

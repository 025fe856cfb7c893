"""Routes of the Tinker API that this server does not implement. Each replies with an error that names an
alternative if there is one."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request

from skyrl_tx_server.errors import UserError
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.http_handler import Endpoint, Reply, read_body


async def _refuse(state: AppState, request: Request, *, message: str) -> Reply:
    await read_body(state, request)
    raise UserError(message)


_ACCOUNTS = "this server has no user accounts and does not implement this call"
_FLAG = "this server does not implement this call; the reply to client/config tells the SDK not to use it"
_NO_TRACES = "this server keeps no traces and does not implement this call"
_NOT_IMPLEMENTED = "this server does not implement this call"

_USE_ANY_KEY = "if the server has no API key, use any key that begins with tml-"

_MESSAGES = {
    "POST copy_weights": f"copy_weights: {_ACCOUNTS}; copy the checkpoint's directory in checkpoints_dir",
    "GET audit": f"audit: {_ACCOUNTS}; the server's log has one line for each request",
    "GET billing/usage/events": f"billing usage: {_ACCOUNTS}; GET /metrics counts tokens by kind",
    "GET billing/usage/checkpoints/current": f"storage usage: {_ACCOUNTS}; GET /api/v1/checkpoints has the "
    "size of every checkpoint",
    "PUT sessions/{session_id}/project": f"set_session_project: {_ACCOUNTS}; use tags or user_metadata",
    "GET sessions/{session_id}/trace_export": f"trace_export: {_NO_TRACES}; see GET /api/v1/stats",
    "POST sessions/search": f"search_sessions: {_NOT_IMPLEMENTED}; use list_sessions",
    "POST create_custom_loss": f"create_custom_loss: {_FLAG}; use forward_backward_custom",
    "POST retrieve_futures": f"retrieve_futures: {_FLAG}; use retrieve_future",
    "POST join_sampling_session": f"join_sampling_session: {_FLAG}",
    "GET auth/apikey/me": f"auth/apikey/me: {_ACCOUNTS}",
    "DELETE auth/apikey/me": f"auth/apikey/me: {_ACCOUNTS}",
    "POST auth/token": f"auth/token: {_ACCOUNTS}; {_USE_ANY_KEY}",
}
"""Method and path below /api/v1 -> error message."""

ENDPOINTS = tuple(
    Endpoint(method=method, path=f"/api/v1/{path}", handler=partial(_refuse, message=message))
    for (method, path), message in ((route.split(" "), message) for route, message in _MESSAGES.items())
)

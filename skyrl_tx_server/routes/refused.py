"""Routes of the contract that this server does not offer, each with the way around it, so that nothing fails in silence."""

from __future__ import annotations

from starlette.requests import Request

from skyrl_tx_server.errors import UserError
from skyrl_tx_server.routes.border import Endpoint, Handler, Reply, read_body
from skyrl_tx_server.routes.context import Context


def _refuse(message: str) -> Handler:
    async def refuse(context: Context, request: Request) -> Reply:
        await read_body(context, request)
        raise UserError(message)

    return refuse


_COPY = "this server has no accounts to copy a checkpoint to; copy the checkpoint's directory from its checkpoints_dir"
_FLAG = "this server does not offer it, and its client/config says so"

ENDPOINTS = (
    Endpoint(method="POST", path="/api/v1/copy_weights", handler=_refuse(f"copy_weights: {_COPY}")),
    Endpoint(
        method="PUT",
        path="/api/v1/sessions/{session_id}/project",
        handler=_refuse("this server has no projects; use tags or user_metadata"),
    ),
    Endpoint(
        method="GET",
        path="/api/v1/sessions/{session_id}/trace_export",
        handler=_refuse("this server keeps no traces; see GET /api/v1/stats"),
    ),
    Endpoint(method="POST", path="/api/v1/sessions/search", handler=_refuse("this server does not search sessions; use list_sessions")),
    Endpoint(
        method="POST", path="/api/v1/create_custom_loss", handler=_refuse(f"create_custom_loss: {_FLAG}; use forward_backward_custom")
    ),
    Endpoint(method="POST", path="/api/v1/retrieve_futures", handler=_refuse(f"retrieve_futures: {_FLAG}; use retrieve_future")),
    Endpoint(method="POST", path="/api/v1/join_sampling_session", handler=_refuse(f"join_sampling_session: {_FLAG}")),
    Endpoint(
        method="POST", path="/api/v1/auth/token", handler=_refuse("this server needs no token; any API key that begins with tml- will do")
    ),
)

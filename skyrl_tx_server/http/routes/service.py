"""The routes of health, client settings, telemetry, capabilities and statistics."""

from __future__ import annotations

import logging

from starlette.requests import Request

from skyrl_tx_server.config.renamed import RENAMED_STATISTICS
from skyrl_tx_server.errors import ServerError
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.http_handler import Endpoint, Reply, read_body


async def healthz(state: AppState, request: Request) -> Reply:
    """Report that the model is loaded. While it is loading, every route replies 503. Raise ServerError if the
    engine has failed."""
    if state.engine.failure is not None:
        raise ServerError(state.engine.failure)
    return {"status": "ok"}


async def client_config(state: AppState, request: Request) -> Reply:
    """Return settings with which the SDK sends the chunks of a forward_backward in order, limits its
    concurrent sampling requests and avoids the routes that this server does not implement."""
    await read_body(state, request)
    return {
        "pjwt_auth_enabled": False,
        "parallel_fwdbwd_chunks": False,
        "proto_compress_fwdbwd": False,
        "sample_max_concurrent_requests": state.settings.sample_max_concurrent_requests,
        "sample_use_retrieve_futures": False,
        "custom_loss_server_side": False,
        "sample_join_sampling_session": False,
        # SDK 0.19 to 0.24 send forward_backward as protobuf if this flag is set. Newer SDKs always do.
        "proto_write_fwdbwd": True,
        # SDK 0.24.1 to 0.36 restore a model with one load_weights request if this flag is set: the request
        # creates the model and loads its weights. SDK 0.38 always does this.
        "create_model_via_load_weights": True,
        # pyqwest, a transport of the SDK, rejects the certificates of `openssl req -x509`
        # (CaUsedAsEndEntity). The SDK would then retry for minutes.
        **({"use_pyqwest_transport": False} if request.url.scheme == "https" else {}),
    }


async def dynamic_config(state: AppState, request: Request) -> Reply:
    await read_body(state, request)
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


async def telemetry(state: AppState, request: Request) -> Reply:
    """Discard the telemetry of the SDK. The server does not forward it."""
    await read_body(state, request)
    return {"status": "accepted"}


async def capabilities(state: AppState, request: Request) -> Reply:
    info = state.engine.info
    return {
        "supported_models": [
            {
                "model_name": info.base_model,
                "max_context_length": info.max_context_length,
                "trainable": True,
                "sampleable": True,
            }
        ]
    }


async def stats(state: AppState, request: Request) -> Reply:
    """Return statistics. The operator gets those of the whole engine, of all sessions and of the operator's
    futures. A tenant gets only those of the tenant's own tokens in flight, sessions and futures."""
    engine = state.engine.stats()
    former = {old: engine[new] for old, new in RENAMED_STATISTICS.items() if new in engine}
    return {
        "engine": engine | former,
        "registry": state.registry.stats(),
        "futures": state.futures.stats(),
    }


ENDPOINTS = (
    Endpoint(method="GET", path="/api/v1/healthz", handler=healthz, needs_key=False, log_level=logging.DEBUG),
    Endpoint(method="POST", path="/api/v1/client/config", handler=client_config),
    Endpoint(method="POST", path="/api/v1/client/dynamic_config", handler=dynamic_config),
    Endpoint(method="POST", path="/api/v1/telemetry", handler=telemetry, log_level=logging.DEBUG),
    Endpoint(method="GET", path="/api/v1/get_server_capabilities", handler=capabilities),
    Endpoint(method="GET", path="/api/v1/stats", handler=stats, log_level=logging.DEBUG),
)

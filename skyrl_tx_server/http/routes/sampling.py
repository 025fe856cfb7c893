"""The routes of sampling: create_sampling_session, get_sampler and asample."""

from __future__ import annotations

import uuid
from dataclasses import replace

from starlette.requests import Request

from skyrl_tx_server.engine.futures import RequestKey
from skyrl_tx_server.engine.model_registry import Sampler
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.files.checkpoint_record import CheckpointKind
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.bodies import SAMPLE_BODY
from skyrl_tx_server.http.http_handler import Endpoint, Reply, read_fields, read_parsed_json
from skyrl_tx_server.http.routes.weights import free_changed
from skyrl_tx_server.http.streaming import StreamWatcher
from skyrl_tx_server.http.wire.sampling_requests import parse_sample


async def create_sampling_session(state: AppState, request: Request) -> Reply:
    fields = await read_fields(state, request, "create_sampling_session")
    session_id = fields.text("session_id")
    seq_id = fields.integer("sampling_session_seq_id")
    base_model = fields.optional_text("base_model")
    model_path = fields.optional_text("model_path")
    fields.finish(ignored=("type",))
    weights = _weights(state, base_model=base_model, model_path=model_path)
    sampler_id = state.registry.sampler_id(session_id, seq_id)
    state.registry.add_sampler(session_id, sampler_id, model_path=model_path, weights=weights)
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


def _weights(state: AppState, *, base_model: str | None, model_path: str | None) -> str | None:
    """Return the path of a sampler checkpoint, or None for the base model."""
    if base_model is not None:
        state.check_base_model(base_model)
    if model_path is None:
        if base_model is None:
            raise UserError("nothing to sample from: pass base_model or model_path")
        return None
    return check_sampler_checkpoint(state, model_path)


def check_sampler_checkpoint(state: AppState, path: str) -> str:
    """Return `path`. Raise UserError if it is not a sampler checkpoint of this server's base model."""
    info = state.checkpoints.info(path)
    if info.kind is not CheckpointKind.SAMPLER:
        raise UserError(
            f"{path} is not a sampler checkpoint; sample from the path that save_weights_for_sampler returns"
        )
    state.check_base_model(info.base_model)
    return path


def weights_of(state: AppState, sampler: Sampler) -> str | None:
    """Return the weights of a sampler. Raise NotFoundError if another tenant unpublished its checkpoint."""
    if sampler.model_path is not None:
        state.checkpoints.check_readable(sampler.model_path)
    return sampler.weights


async def get_sampler(state: AppState, request: Request) -> Reply:
    sampler = state.registry.sampler(request.path_params["sampler_id"])
    return {
        "sampler_id": sampler.sampler_id,
        "base_model": state.base_model,
        "model_path": sampler.model_path,
    }


async def asample(state: AppState, request: Request) -> Reply:
    sample = await read_parsed_json(state, request, parse_sample)
    key = session_id = None
    name = f"sample-{uuid.uuid4().hex}"
    if sample.sampler_id is None:
        weights = _weights(state, base_model=sample.base_model, model_path=sample.model_path)
    else:
        sampler = state.registry.sampler(sample.sampler_id)
        weights, session_id = weights_of(state, sampler), sampler.session_id
        if sample.seq_id is not None:
            key = RequestKey(scope=sample.sampler_id, seq_id=sample.seq_id)
            name = f"{sample.sampler_id}:{sample.seq_id}"
    free_changed(state, weights)
    op = replace(sample.op, weights=weights)
    watcher = StreamWatcher(streams_tokens=False)
    request_id = state.futures.submit(
        lambda: state.engine.submit(op, watcher),
        kind="sample",
        key=key,
        session_id=session_id,
        withdraw=watcher.cancel,
    )
    return {
        "request_id": request_id,
        "sample_sequence_ids": [f"{name}:{index}" for index in range(op.num_samples)],
    }


ENDPOINTS = (
    Endpoint(method="POST", path="/api/v1/create_sampling_session", handler=create_sampling_session),
    Endpoint(method="GET", path="/api/v1/samplers/{sampler_id}", handler=get_sampler),
    Endpoint(method="POST", path="/api/v1/asample", handler=asample, body=SAMPLE_BODY),
)

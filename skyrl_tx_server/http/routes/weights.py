"""Routes that save, load, list and delete checkpoints, and routes of training runs.

This file is long because these routes share the handling of checkpoint paths.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

from starlette.requests import Request

from skyrl_tx_server.engine.futures import Outcome, RequestKey
from skyrl_tx_server.engine.model_registry import Model
from skyrl_tx_server.engine.operations import (
    DropSnapshot,
    LoadWeights,
    LoraSpec,
    SaveExternal,
    SaveSampler,
    SaveWeights,
)
from skyrl_tx_server.errors import NotFoundError, ServerError, StorageError, UserError
from skyrl_tx_server.files.checkpoint_record import (
    CheckpointInfo,
    CheckpointKind,
    checkpoint_path,
    is_on_disk,
    parse_path,
)
from skyrl_tx_server.files.run_index import TrainingRun
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.http_handler import Endpoint, Reply, page_of, read_fields
from skyrl_tx_server.http.routes.training import begin_model, submit
from skyrl_tx_server.http.wire.json_reader import quoted
from skyrl_tx_server.http.wire.limits import check_ttl
from skyrl_tx_server.http.wire.training_requests import (
    ALPHA_METADATA,
    check_optimizer_config,
    parse_alpha,
)

CHECKPOINT_TYPES = {
    CheckpointKind.TRAINING: "training",
    CheckpointKind.SAMPLER: "sampler",
    CheckpointKind.EXTERNAL: "external",
}
_DELETER = ThreadPoolExecutor(1, "deletions")


# --- saving ---


async def save_weights(state: AppState, request: Request) -> Reply:
    fields = await read_fields(state, request, "save_weights")
    model_id = fields.text("model_id")
    seq_id = fields.optional_integer("seq_id")
    name = fields.text("path")
    overwrite = fields.flag("overwrite", False)
    user_metadata = fields.metadata("user_metadata")
    ttl_seconds = check_ttl(fields.optional_integer("ttl_seconds"))
    fields.finish(ignored=("type",))
    model = state.registry.model(model_id)
    path = checkpoint_path_of(model_id, CheckpointKind.TRAINING, name)
    op = SaveWeights(model_id=model_id, name=name, overwrite=overwrite, user_metadata=user_metadata)
    return save_named(state, model, op, path, kind="save_weights", seq_id=seq_id, ttl_seconds=ttl_seconds)


async def save_weights_for_sampler(state: AppState, request: Request) -> Reply:
    """Save sampler weights. If the request has a name (`path`), the weights become a checkpoint on disk.
    Otherwise the weights become a sampler snapshot in memory that only one sampler can use."""
    fields = await read_fields(state, request, "save_weights_for_sampler")
    model_id = fields.text("model_id")
    seq_id = fields.optional_integer("seq_id")
    name = fields.optional_text("path")
    sampling_session_seq_id = fields.optional_integer("sampling_session_seq_id")
    user_metadata = fields.metadata("user_metadata")
    ttl_seconds = check_ttl(fields.optional_integer("ttl_seconds"))
    # The kinds "snapshot" and "inflight" both save the current weights. A sampler of the kind "inflight" may
    # also use weights that are saved later, but it does not have to.
    kind = fields.optional_text("kind")
    fields.finish(ignored=("type",))
    if kind not in (None, "snapshot", "inflight"):
        raise UserError(f"save_weights_for_sampler: kind {kind!r} is unknown; use 'snapshot'")
    model = state.registry.model(model_id)
    if name is not None:
        path = checkpoint_path_of(model_id, CheckpointKind.SAMPLER, name)
        op = SaveSampler(model_id=model_id, weights=path, user_metadata=user_metadata)
        return save_named(
            state, model, op, path, kind="save_weights_for_sampler", seq_id=seq_id, ttl_seconds=ttl_seconds
        )
    if sampling_session_seq_id is None:
        raise UserError(
            "save_weights_for_sampler: pass a checkpoint name (path) or a sampling_session_seq_id"
        )
    return _save_snapshot(state, model, sampling_session_seq_id, seq_id, user_metadata)


def _save_snapshot(
    state: AppState,
    model: Model,
    sampling_session_seq_id: int,
    seq_id: int | None,
    user_metadata: dict[str, str],
) -> Reply:
    sampler_id = state.registry.sampler_id(model.session_id, sampling_session_seq_id)
    op = SaveSampler(model_id=model.model_id, weights=sampler_id, user_metadata=user_metadata)

    def add_sampler() -> None:
        if state.registry.find_sampler(sampler_id) is not None:
            raise UserError(
                f"sampler {sampler_id} exists already; give each sampler of a session its own "
                f"sampling_session_seq_id"
            )
        state.registry.add_sampler(model.session_id, sampler_id, model_path=None, weights=sampler_id)
        for surplus in state.registry.free_surplus_snapshots():
            state.engine.submit(surplus)

    def when_done(outcome: Outcome) -> None:
        if outcome.error is not None:
            state.registry.forget_sampler(sampler_id)
            state.engine.submit(DropSnapshot(weights=sampler_id))  # free what was saved before the failure

    extra = {"sampling_session_id": sampler_id}
    return submit(
        state,
        model,
        op,
        kind="save_weights_for_sampler",
        seq_id=seq_id,
        extra=extra,
        before=add_sampler,
        when_done=when_done,
    )


def checkpoint_path_of(model_id: str, kind: CheckpointKind, name: str) -> str:
    if "/" in name:
        raise UserError(f"checkpoint name {name!r} must not contain a '/'; pass a name, not a path")
    path = checkpoint_path(model_id, kind, name)
    parse_path(path)  # raises for any other invalid name
    return path


def save_named(
    state: AppState,
    model: Model,
    op: SaveWeights | SaveSampler | SaveExternal,
    path: str,
    *,
    kind: str,
    seq_id: int | None,
    ttl_seconds: int | None,
) -> Reply:
    """Save the checkpoint `path`, which must not exist unless `op` overwrites it. The checkpoint expires
    after `ttl_seconds`; None: never."""

    def check_name() -> None:
        if not state.checkpoints.exists(path):
            # A killed server may have left the expiry or the public flag of a deleted checkpoint in the run
            # index.
            state.run_index.forget(path)
        elif not (isinstance(op, SaveWeights) and op.overwrite):
            raise UserError(
                f"checkpoint {path} exists already; choose another name (only save_state can overwrite a "
                f"checkpoint, with overwrite=True)"
            )

    def when_done(outcome: Outcome) -> None:
        if outcome.error is not None:
            return
        # `has_changed` records the present state. Its next call returns True if another server changes the
        # checkpoint.
        state.checkpoints.has_changed(path)
        with contextlib.suppress(NotFoundError):  # the checkpoint was deleted already
            generation = None if ttl_seconds is None else state.checkpoints.owned_info(path).generation
            try:
                state.run_index.set_expiry(path, _expiry(ttl_seconds), generation)
            except StorageError as error:
                raise ServerError(f"{path} was saved, but its expiry was not: {error}") from error

    return submit(state, model, op, kind=kind, seq_id=seq_id, before=check_name, when_done=when_done)


def _expiry(ttl_seconds: int | None) -> datetime | None:
    return None if ttl_seconds is None else datetime.now(UTC) + timedelta(seconds=ttl_seconds)


# --- loading ---


async def load_weights(state: AppState, request: Request) -> Reply:
    """Load a checkpoint into a model (`model_id`), or create a new model from it (`session_id` and
    `model_seq_id`)."""
    fields = await read_fields(state, request, "load_weights")
    model_id = fields.optional_text("model_id")
    seq_id = fields.optional_integer("seq_id")
    session_id = fields.optional_text("session_id")
    model_seq_id = fields.optional_integer("model_seq_id")
    base_model = fields.optional_text("base_model")
    user_metadata = fields.metadata("user_metadata")
    path = fields.text("path")
    optimizer = fields.flag("optimizer", True)
    check_optimizer_config(fields)
    fields.finish(ignored=("type", "weights_access_token"))  # this server has no access tokens
    if base_model is not None:
        state.check_base_model(base_model)
    lora = _training_checkpoint(state, path)
    if model_id is not None:
        return _load_into(
            state, state.registry.model(model_id), path, lora, optimizer=optimizer, seq_id=seq_id
        )
    if session_id is None or model_seq_id is None:
        raise UserError("load_weights: pass model_id, or session_id and model_seq_id")
    if ALPHA_METADATA in user_metadata and parse_alpha(user_metadata) != lora.alpha:
        raise UserError(
            f"user_metadata: {ALPHA_METADATA}={quoted(user_metadata[ALPHA_METADATA])} differs from the alpha "
            f"{lora.alpha:g} of {path}, which the new model gets; leave {ALPHA_METADATA} out"
        )
    new_model_id = state.registry.model_id(session_id, model_seq_id)
    return begin_model(
        state,
        op=LoadWeights(model_id=new_model_id, path=path, optimizer=optimizer, create=True),
        kind="load_weights",
        key=RequestKey(scope=f"{session_id}:train", seq_id=model_seq_id),
        session_id=session_id,
        lora=lora,
        user_metadata=user_metadata,
    )


def _training_checkpoint(state: AppState, path: str) -> LoraSpec:
    """Return the LoraSpec of a training checkpoint. Raise UserError if this server cannot train it."""
    info = state.checkpoints.info(path)
    if info.kind is not CheckpointKind.TRAINING:
        raise UserError(
            f"{path} contains weights without optimizer state; load the path that save_state returned"
        )
    state.check_base_model(info.base_model)
    if info.lora.rank > state.limits.max_lora_rank:
        raise UserError(
            f"{path} has LoRA rank {info.lora.rank}, above this server's "
            f"max_lora_rank={state.limits.max_lora_rank}; start the server with "
            f"max_lora_rank={info.lora.rank}"
        )
    return info.lora


def _load_into(
    state: AppState, model: Model, path: str, lora: LoraSpec, *, optimizer: bool, seq_id: int | None
) -> Reply:
    if replace(lora, seed=model.lora.seed, alpha=model.lora.alpha) != model.lora:
        raise UserError(
            f"{path} was saved with {lora}, but this model has {model.lora}; create a new model with "
            f"create_training_client_from_state"
        )
    op = LoadWeights(model_id=model.model_id, path=path, optimizer=optimizer)
    return submit(state, model, op, kind="load_weights", seq_id=seq_id, extra={"path": path})


async def weights_info(state: AppState, request: Request) -> Reply:
    fields = await read_fields(state, request, "weights_info")
    info = state.checkpoints.info(fields.text("tinker_path"))
    return {
        "base_model": info.base_model,
        "is_lora": True,
        "lora_rank": info.lora.rank,
        "train_unembed": info.lora.train_unembed,
        "train_mlp": info.lora.train_mlp,
        "train_attn": info.lora.train_attn,
    }


# --- training runs and their checkpoints ---


async def list_training_runs(state: AppState, request: Request) -> Reply:
    if "project_id" in request.query_params:
        raise UserError("list_training_runs: this server has no projects; leave project_id out")
    by_run: dict[str, list[CheckpointInfo]] = {}
    for info in await asyncio.to_thread(state.checkpoints.list):
        by_run.setdefault(info.run_id, []).append(info)
    runs = [_run_to_json(state, run, by_run.get(run.run_id, [])) for run in _runs(state, by_run)]
    page, cursor = page_of(request, sorted(runs, key=lambda run: str(run["last_request_time"]), reverse=True))
    return {"training_runs": page, "cursor": cursor}


def _runs(state: AppState, by_run: dict[str, list[CheckpointInfo]]) -> list[TrainingRun]:
    """Return the runs of the run index, followed by the runs of `by_run` that are not in the index, for
    example because their checkpoints were copied from another server."""
    runs = state.run_index.runs
    return [*runs.values(), *(_run_of(infos[0]) for run_id, infos in by_run.items() if run_id not in runs)]


def _run_of(info: CheckpointInfo) -> TrainingRun:
    return TrainingRun(
        run_id=info.run_id, base_model=info.base_model, lora=info.lora, created_at=info.created_at
    )


async def get_training_run(state: AppState, request: Request) -> Reply:
    run_id = request.path_params["run_id"]
    infos = await asyncio.to_thread(state.checkpoints.list, run_id)
    run = state.run_index.run(run_id) or (_run_of(infos[0]) if infos else None)
    if run is None:
        raise NotFoundError(f"no training run {run_id}; list_training_runs returns the existing runs")
    return _run_to_json(state, run, infos)


def _run_to_json(state: AppState, run: TrainingRun, infos: Sequence[CheckpointInfo]) -> dict[str, object]:
    # `infos` is sorted from the oldest to the newest, so the newest checkpoint of each kind remains.
    latest: dict[CheckpointKind, CheckpointInfo] = {info.kind: info for info in infos}
    last_request = state.registry.last_request_at.get(run.run_id) or max(
        [run.created_at, *(info.created_at for info in infos)]
    )
    training, sampler = latest.get(CheckpointKind.TRAINING), latest.get(CheckpointKind.SAMPLER)
    return {
        "training_run_id": run.run_id,
        "base_model": run.base_model,
        "model_owner": "local",
        "is_lora": True,
        "lora_rank": run.lora.rank,
        "corrupted": False,
        "last_request_time": last_request.isoformat(),
        "last_checkpoint": None if training is None else _checkpoint_to_json(state, training),
        "last_sampler_checkpoint": None if sampler is None else _checkpoint_to_json(state, sampler),
        "user_metadata": run.user_metadata,
    }


def _checkpoint_to_json(state: AppState, info: CheckpointInfo) -> dict[str, object]:
    expires_at = state.run_index.expiry(info.path, info.generation)
    return {
        "checkpoint_id": f"{info.kind}/{info.name}",
        "checkpoint_type": CHECKPOINT_TYPES[info.kind],
        "time": info.created_at.isoformat(),
        "tinker_path": info.path,
        "size_bytes": info.size_bytes,
        "public": info.path in state.run_index.public,
        "user_metadata": info.user_metadata,
        "expires_at": None if expires_at is None else expires_at.isoformat(),
    }


async def list_run_checkpoints(state: AppState, request: Request) -> Reply:
    infos = await asyncio.to_thread(state.checkpoints.list, request.path_params["run_id"])
    return {"checkpoints": [_checkpoint_to_json(state, info) for info in infos]}


async def list_checkpoints(state: AppState, request: Request) -> Reply:
    infos = await asyncio.to_thread(state.checkpoints.list)
    page, cursor = page_of(request, [_checkpoint_to_json(state, info) for info in reversed(infos)])
    return {"checkpoints": page, "cursor": cursor}


async def delete_checkpoint(state: AppState, request: Request) -> Reply:
    path = path_of(request)
    generation = await delete(state, path)
    state.run_index.forget(path, generation)
    return None


async def delete(state: AppState, path: str, *, only: str | None = None) -> str | None:
    """Call `CheckpointStore.delete`, free the copy of a deleted sampler checkpoint on the device, and return
    the deleted generation. Requests that were submitted before this call still use the copy, because the
    engine frees it after them."""
    # In a thread of its own, because `CheckpointStore.delete` waits while a checkpoint is written. In the
    # shared thread pool it would occupy threads that other requests need.
    delete_files = partial(state.checkpoints.delete, path, only=only)
    generation = await asyncio.get_running_loop().run_in_executor(_DELETER, delete_files)
    if generation is not None:
        # `has_changed` records that the checkpoint is deleted, so it does not report this deletion again.
        state.checkpoints.has_changed(path)
        if parse_path(path)[1] is CheckpointKind.SAMPLER:
            state.engine.submit(DropSnapshot(weights=path))
    return generation


def free_changed(state: AppState, weights: str | None) -> None:
    """Free the copy of a sampler checkpoint on the device if another server has deleted it or saved it
    again."""
    if weights is not None and is_on_disk(weights) and state.checkpoints.has_changed(weights):
        state.engine.submit(DropSnapshot(weights=weights))


async def set_public(state: AppState, request: Request, *, public: bool) -> Reply:
    """Publish or unpublish a checkpoint. Other tenants that know the path of a public checkpoint can load it,
    sample from it and download it."""
    path = path_of(request)
    state.checkpoints.owned_info(path)  # raises unless the tenant owns this checkpoint
    state.run_index.set_public(path, public)
    return None


async def set_ttl(state: AppState, request: Request) -> Reply:
    path = path_of(request)
    fields = await read_fields(state, request, "ttl")
    ttl_seconds = check_ttl(fields.optional_integer("ttl_seconds"))
    fields.finish()
    info = state.checkpoints.owned_info(path)  # raises unless the tenant owns this checkpoint
    state.run_index.set_expiry(path, _expiry(ttl_seconds), info.generation)
    return None


def path_of(request: Request) -> str:
    return f"tinker://{request.path_params['run_id']}/{request.path_params['checkpoint_id']}"


RUN = "/api/v1/training_runs/{run_id}"
CHECKPOINT = RUN + "/checkpoints/{checkpoint_id:path}"  # the id contains a slash: weights/0001

ENDPOINTS = (
    Endpoint(method="POST", path="/api/v1/save_weights", handler=save_weights),
    Endpoint(method="POST", path="/api/v1/save_weights_for_sampler", handler=save_weights_for_sampler),
    Endpoint(method="POST", path="/api/v1/load_weights", handler=load_weights),
    Endpoint(method="POST", path="/api/v1/weights_info", handler=weights_info),
    Endpoint(method="GET", path="/api/v1/training_runs", handler=list_training_runs),
    Endpoint(method="GET", path=RUN, handler=get_training_run),
    Endpoint(method="GET", path=RUN + "/checkpoints", handler=list_run_checkpoints),
    Endpoint(method="GET", path="/api/v1/checkpoints", handler=list_checkpoints),
    Endpoint(method="PUT", path=CHECKPOINT + "/ttl", handler=set_ttl),
    Endpoint(method="POST", path=CHECKPOINT + "/publish", handler=partial(set_public, public=True)),
    Endpoint(method="DELETE", path=CHECKPOINT + "/publish", handler=partial(set_public, public=False)),
    Endpoint(method="DELETE", path=CHECKPOINT, handler=delete_checkpoint),
)

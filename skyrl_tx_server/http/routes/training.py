"""Models and their training: create_model, get_info, forward, forward_backward, optim_step, unload_model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial

from starlette.requests import Request

from skyrl_tx_server.engine.futures import Outcome, RequestKey
from skyrl_tx_server.engine.model_registry import Model
from skyrl_tx_server.engine.operations import (
    CreateModel,
    Done,
    LoadWeights,
    LoraSpec,
    Operation,
    OpResult,
    OptimStep,
    UnloadModel,
    WeightsLoaded,
)
from skyrl_tx_server.errors import ServerError, StorageError
from skyrl_tx_server.files.run_index import TrainingRun
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.bodies import TRAINING_BODY, TRAINING_JSON_BODY
from skyrl_tx_server.http.http_handler import Endpoint, Reply, read_fields, read_parsed, read_parsed_json
from skyrl_tx_server.http.wire.protobuf import MEDIA_TYPE, parse_training_proto
from skyrl_tx_server.http.wire.training_requests import (
    TrainRequest,
    check_optimizer_config,
    parse_adam,
    parse_lora,
    parse_training_json,
)

LOOPBACK = ("127.0.0.1", "::1")


async def create_model(state: AppState, request: Request) -> Reply:
    fields = await read_fields(state, request, "create_model")
    session_id = fields.text("session_id")
    model_seq_id = fields.integer("model_seq_id")
    state.check_base_model(fields.text("base_model"))
    user_metadata = fields.metadata("user_metadata")
    check_optimizer_config(fields)
    lora = parse_lora(fields.mapping("lora_config"), state.limits, user_metadata)
    fields.finish(ignored=("type",))
    model_id = state.registry.model_id(session_id, model_seq_id)
    return begin_model(
        state,
        op=CreateModel(model_id=model_id, lora=lora),
        kind="create_model",
        key=RequestKey(scope=f"{session_id}:train", seq_id=model_seq_id),
        session_id=session_id,
        lora=lora,
        user_metadata=user_metadata,
    )


def begin_model(
    state: AppState,
    *,
    op: CreateModel | LoadWeights,
    kind: str,
    key: RequestKey,
    session_id: str,
    lora: LoraSpec,
    user_metadata: dict[str, str],
) -> Reply:
    """Submit the creation of a model. The model is removed again if the creation fails, or if the run index
    cannot be written."""
    run = TrainingRun(
        run_id=op.model_id,
        base_model=state.base_model,
        lora=lora,
        created_at=datetime.now(UTC),
        user_metadata=user_metadata,
    )

    def start() -> Future[Done | WeightsLoaded]:
        state.registry.add_model(session_id, op.model_id, lora)
        return state.engine.submit(op)

    def when_done(outcome: Outcome) -> None:
        if outcome.error is not None:
            state.registry.forget_model(op.model_id)
            return
        try:
            state.run_index.record_run(run)
        except StorageError as error:  # every model must be in the run index
            state.registry.forget_model(op.model_id)
            state.engine.submit(UnloadModel(model_id=op.model_id))
            raise ServerError(f"the model was not created: {error}") from error

    extra = {"path": op.path} if isinstance(op, LoadWeights) else {"model_id": op.model_id}
    request_id = state.futures.submit(
        start, kind=kind, key=key, session_id=session_id, extra=extra, when_done=when_done
    )
    return {"request_id": request_id, "model_id": op.model_id}


async def get_info(state: AppState, request: Request) -> Reply:
    """Describe a model. For clients on this machine, `tokenizer_id` is the directory of the base model, so
    that they need no model hub."""
    fields = await read_fields(state, request, "get_info")
    model = state.registry.model(fields.text("model_id"))
    model_dir = state.settings.model_dir
    is_local = request.client is not None and request.client.host in LOOPBACK
    return {
        "type": "get_info",
        "model_id": model.model_id,
        "is_lora": True,
        "lora_rank": model.lora.rank,
        "lora_alpha": model.lora.alpha,
        "model_name": state.base_model,
        "model_data": {
            "arch": state.engine.info.model_type,
            "model_name": state.base_model,
            "tokenizer_id": str(model_dir) if is_local and model_dir is not None else None,
        },
    }


async def forward_backward(state: AppState, request: Request) -> Reply:
    """Submit a forward_backward request, which is protobuf (from SDK 0.19 and newer) or JSON (from older
    SDKs). SDK 0.25 and newer also send `forward` requests to this route, in protobuf with the flag
    `forward_only`."""
    if request.headers.get("content-type", "").startswith(MEDIA_TYPE):
        return _train(
            state,
            await read_parsed(state, request, lambda body: parse_training_proto(body, state.limits)),
        )
    return await _train_json(state, request, forward_only=False)


async def _train_json(state: AppState, request: Request, *, forward_only: bool) -> Reply:
    parse = partial(parse_training_json, forward_only=forward_only)
    return _train(state, await read_parsed_json(state, request, parse, TRAINING_JSON_BODY))


def _train(state: AppState, train: TrainRequest) -> Reply:
    model = state.registry.model(train.op.model_id)
    kind = "forward" if train.op.forward_only else "forward_backward"
    return submit(state, model, train.op, kind=kind, seq_id=train.seq_id)


def submit[R: OpResult](
    state: AppState,
    model: Model,
    op: Operation[R],
    *,
    kind: str,
    seq_id: int | None,
    extra: dict[str, str] | None = None,
    before: Callable[[], None] = lambda: None,
    when_done: Callable[[Outcome], None] | None = None,
) -> Reply:
    """Call `before`, submit an operation of `model` and return the request id. If an earlier request for
    `model` had this `seq_id`, only return the id of the earlier request."""

    def start() -> Future[R]:
        before()
        return state.engine.submit(op)

    key = None if seq_id is None else RequestKey(scope=model.model_id, seq_id=seq_id)
    request_id = state.futures.submit(
        start, kind=kind, key=key, session_id=model.session_id, extra=extra, when_done=when_done
    )
    return {"request_id": request_id, "model_id": model.model_id}


async def optim_step(state: AppState, request: Request) -> Reply:
    fields = await read_fields(state, request, "optim_step")
    model_id = fields.text("model_id")
    seq_id = fields.optional_integer("seq_id")
    adam = parse_adam(fields)
    fields.finish(ignored=("type",))
    model = state.registry.model(model_id)
    op = OptimStep(model_id=model_id, adam=adam)
    return submit(state, model, op, kind="optim_step", seq_id=seq_id)


async def unload_model(state: AppState, request: Request) -> Reply:
    """Free a model. Only SDK 0.25 and older send this request; newer clients end their session."""
    fields = await read_fields(state, request, "unload_model")
    model = state.registry.model(fields.text("model_id"))
    state.registry.forget_model(model.model_id)
    op, extra = UnloadModel(model_id=model.model_id), {"model_id": model.model_id}
    return submit(state, model, op, kind="unload_model", seq_id=None, extra=extra)


ENDPOINTS = (
    Endpoint(method="POST", path="/api/v1/create_model", handler=create_model),
    Endpoint(method="POST", path="/api/v1/get_info", handler=get_info),
    Endpoint(method="POST", path="/api/v1/forward_backward", handler=forward_backward, body=TRAINING_BODY),
    Endpoint(
        method="POST",
        path="/api/v1/forward",
        handler=partial(_train_json, forward_only=True),
        body=TRAINING_JSON_BODY,
    ),
    Endpoint(method="POST", path="/api/v1/optim_step", handler=optim_step),
    Endpoint(method="POST", path="/api/v1/unload_model", handler=unload_model),
)

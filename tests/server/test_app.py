"""HTTP routes, called without a socket: statuses, refused requests, ends of sessions and older SDKs."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import tarfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import numpy as np
import pytest
import safetensors.numpy
import zstandard
from starlette.types import Message
from tinker import types
from tinker.proto import request_conv

from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.futures import Retention
from skyrl_tx_server.engine.operations import (
    DropSnapshot,
    ForwardBackward,
    OptimStep,
    Sample,
    SaveSampler,
    UnloadModel,
)
from skyrl_tx_server.files import checkpoints
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.http.app import build_app, housekeep
from skyrl_tx_server.http.app_state import AppState, HttpSettings
from skyrl_tx_server.http.bodies import BodyReader
from skyrl_tx_server.http.http_handler import StartupState
from skyrl_tx_server.http.wire.proto import tinker_wire_pb2 as pb
from tests.fakes.engine import LORA_WEIGHTS, FakeEngine
from tests.fakes.executor import FakeExecutor
from tests.fakes.sdk_datum import sdk_datum
from tests.fakes.server import fake_context, fake_engine

PROTO = "application/x-protobuf"
JSON = {"content-type": "application/json"}
MODEL = "local/fake"


@pytest.fixture
def context(tmp_path: Path) -> AppState:
    settings = HttpSettings(model_dir=tmp_path / "model")
    state = fake_context(tmp_path, retention=Retention(hold_s=0.05), settings=settings)
    return replace(state, bodies=BodyReader(max_bytes=20_000))


@pytest.fixture
async def http(context: AppState) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(StartupState(state=context)), client=("127.0.0.1", 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://server/api/v1/") as http:
        yield http
    fake_engine(context).stop()


@pytest.fixture
def engine(context: AppState) -> FakeEngine:
    return fake_engine(context)


async def post(http: httpx.AsyncClient, route: str, **body: object) -> dict[str, object]:
    response = await http.post(route, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def result(http: httpx.AsyncClient, reply: dict[str, object]) -> dict[str, object]:
    for _ in range(100):
        response = await http.post("retrieve_future", json={"request_id": reply["request_id"]})
        if response.status_code != 408:
            assert response.status_code == 200, response.text
            return response.json()
    raise AssertionError("still pending after 100 polls")


async def open_session(http: httpx.AsyncClient) -> str:
    return str(
        (await post(http, "create_session", tags=[], user_metadata=None, sdk_version="0.38.0"))["session_id"]
    )


async def make_model(http: httpx.AsyncClient, session_id: str, model_seq_id: int = 0) -> str:
    reply = await post(
        http,
        "create_model",
        session_id=session_id,
        model_seq_id=model_seq_id,
        base_model=MODEL,
        lora_config={"rank": 4},
        type="create_model",
    )
    assert await result(http, reply) == {
        "type": "create_model",
        "model_id": f"{session_id}:train:{model_seq_id}",
    }
    return str(reply["model_id"])


def training_bytes(model_id: str, seq_id: int = 1) -> bytes:
    datum = sdk_datum([1, 2], target_tokens=[2, 3], weights=[1.0, 1.0])
    inner = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=inner, model_id=model_id, seq_id=seq_id)
    return request_conv.forward_backward_request_to_proto(request).SerializeToString()


@pytest.mark.seed_behaviour(133)
async def test_nothing_is_served_before_the_engine_is_ready(context: AppState) -> None:
    startup = StartupState()
    transport = httpx.ASGITransport(build_app(startup))
    async with httpx.AsyncClient(transport=transport, base_url="http://server/api/v1/") as http:
        for method, route in (("GET", "healthz"), ("POST", "create_session")):
            response = await http.request(method, route)
            assert (response.status_code, "still loading" in response.text) == (503, True)
        startup.state = context
        response = await http.get("healthz")
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
    fake_engine(context).stop()


async def test_health_reports_a_failed_engine(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.failure = "the engine failed (KeyError: 'a bug'); start the server again"
    response = await http.get("healthz")
    assert response.status_code == 500 and response.json()["detail"] == engine.failure


async def test_the_client_config_makes_the_sdk_send_chunks_in_order(http: httpx.AsyncClient) -> None:
    config = await post(http, "client/config", sdk_version="0.38.0")
    assert (config["parallel_fwdbwd_chunks"], config["pjwt_auth_enabled"]) == (False, False)
    assert (await post(http, "client/dynamic_config", sdk_version="0.38.0"))["sample_cancel_enabled"] is True


async def test_over_https_the_sdk_must_not_use_pyqwest(context: AppState) -> None:
    """pyqwest refuses self-signed certificates."""
    transport = httpx.ASGITransport(build_app(StartupState(state=context)))
    for scheme, use_pyqwest in (("http", None), ("https", False)):
        async with httpx.AsyncClient(transport=transport, base_url=f"{scheme}://server/api/v1/") as http:
            assert (await post(http, "client/config", sdk_version="0.38.0")).get(
                "use_pyqwest_transport"
            ) is use_pyqwest
    fake_engine(context).stop()


async def test_headers_select_protobuf_or_json(http: httpx.AsyncClient) -> None:
    model_id = await make_model(http, await open_session(http))
    submitted = await http.post(
        "forward_backward", content=training_bytes(model_id), headers={"content-type": PROTO}
    )
    request_id = submitted.json()["request_id"]
    in_json = await result(http, {"request_id": request_id})
    assert in_json["metrics"] == {"loss:sum": pytest.approx(0.5)}
    in_proto = await http.post(
        "retrieve_future", json={"request_id": request_id}, headers={"accept": f"{PROTO}, application/json"}
    )
    assert in_proto.headers["content-type"] == PROTO
    assert dict(pb.ForwardBackwardOutput.FromString(in_proto.content).metrics) == in_json["metrics"]

    tensors = {
        "target_tokens": {"data": [2, 3], "dtype": "int64"},
        "weights": {"data": [1.0, 1.0], "dtype": "float32"},
    }
    inner = {
        "data": [{"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": tensors}],
        "loss_fn": "cross_entropy",
    }
    json_request = await post(http, "forward", model_id=model_id, seq_id=2, forward_input=inner)
    assert (await result(http, json_request))["metrics"] == in_json["metrics"]


async def test_a_zstd_body_is_decompressed_and_an_invalid_one_refused(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    model_id = await make_model(http, await open_session(http))
    headers = {"content-type": PROTO, "content-encoding": "zstd"}
    compressed = zstandard.ZstdCompressor().compress(training_bytes(model_id))
    reply = await http.post("forward_backward", content=compressed, headers=headers)
    assert (await result(http, reply.json()))["metrics"]
    assert len(engine.of_type(ForwardBackward)) == 1
    invalid = await http.post("forward_backward", content=b"not zstd", headers=headers)
    assert (invalid.status_code, "not valid zstd" in invalid.text) == (400, True)
    bomb = zstandard.ZstdCompressor().compress(bytes(10_000_000))
    assert len(bomb) < 20_000
    large = await http.post("forward_backward", content=bomb, headers=headers)
    assert (large.status_code, "max_request_mb" in large.text) == (400, True)


async def test_a_body_over_the_limit_is_refused(http: httpx.AsyncClient) -> None:
    response = await http.post("asample", content=b"x" * 30_000, headers=JSON)
    assert (response.status_code, "larger than this route's limit" in response.json()["detail"]) == (
        400,
        True,
    )


async def test_an_invalid_json_body_gives_status_400(http: httpx.AsyncClient) -> None:
    for content in (b"{", b"[" * 19_000, b"\xff"):
        response = await http.post("create_session", content=content, headers=JSON)
        assert (response.status_code, response.json()["category"]) == (400, "user")
    lone_surrogate = await http.post("get_info", content=b'{"model_id": "\\uD800"}', headers=JSON)
    assert (lone_surrogate.status_code, "surrogate" in lone_surrogate.text) == (400, True)
    surrogate_pair = await http.post("get_info", content=b'{"model_id": "\\ud83d\\ude00"}', headers=JSON)
    assert (surrogate_pair.status_code, "no model \U0001f600" in surrogate_pair.json()["detail"]) == (
        404,
        True,
    )
    response = await http.post("create_session", json=[1])
    assert "expected a JSON object" in response.json()["detail"]


async def test_a_disconnect_during_a_request_is_not_a_server_error(
    context: AppState, caplog: pytest.LogCaptureFixture
) -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": b'{"a', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent = []

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/v1/asample",
        "headers": [],
        "query_string": b"",
        "client": ("127.0.0.1", 1),
    }
    with caplog.at_level(logging.INFO):
        await build_app(StartupState(state=context))(scope, receive, send)
    assert sent[0]["status"] == 499
    assert "Traceback" not in caplog.text and "internal error" not in caplog.text
    fake_engine(context).stop()


async def test_a_stalled_body_is_refused(tmp_path: Path) -> None:
    context = replace(fake_context(tmp_path), bodies=BodyReader(stalled_s=0.05))

    async def stalled_body() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    transport = httpx.ASGITransport(build_app(StartupState(state=context)))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://server/api/v1/") as http,
        asyncio.timeout(10),
    ):
        response = await http.post("asample", content=stalled_body())
    assert (response.status_code, "no byte for 0.05 s" in response.text) == (400, True)
    fake_engine(context).stop()


async def test_engine_errors_are_results_with_a_category(http: httpx.AsyncClient) -> None:
    session_id = await open_session(http)
    sampler = await post(
        http, "create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model=MODEL
    )
    prompt = {"chunks": [{"tokens": [13]}]}
    reply = await post(
        http,
        "asample",
        sampling_session_id=sampler["sampling_session_id"],
        seq_id=0,
        prompt=prompt,
        sampling_params={"max_tokens": 1},
    )
    assert reply["sample_sequence_ids"] == [f"{session_id}:sample:0:0:0"]
    assert await result(http, reply) == {"error": "a refused prompt", "category": "user"}


async def test_a_pending_future_is_a_408_and_an_unknown_one_a_410(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    model_id = await make_model(http, await open_session(http))
    engine.gate.clear()
    reply = await post(http, "optim_step", model_id=model_id, seq_id=1, adam_params={})
    pending = await http.post(
        "retrieve_future", json={"request_id": reply["request_id"], "allow_metadata_only": True}
    )
    assert pending.status_code == 408
    assert pending.json() == {"type": "try_again", "request_id": reply["request_id"], "queue_state": "active"}
    engine.gate.set()
    assert await result(http, reply) == {"metrics": {"grad_norm": 1.5}}
    unknown = await http.post("retrieve_future", json={"request_id": "optim_step-before-a-restart"})
    assert (unknown.status_code, "restarted" in unknown.json()["detail"]) == (410, True)


async def test_a_request_sent_twice_runs_once(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    session_id = await open_session(http)
    model_id = await make_model(http, session_id)
    assert await make_model(http, session_id) == model_id
    first = await post(http, "optim_step", model_id=model_id, seq_id=1, adam_params={})
    assert await post(http, "optim_step", model_id=model_id, seq_id=1, adam_params={}) == first
    save = {"model_id": model_id, "seq_id": 2, "path": "0001"}
    saved = await post(http, "save_weights", **save)
    await result(http, saved)
    assert await post(http, "save_weights", **save) == saved, "the name exists, but the same request saved it"
    snapshot = {"model_id": model_id, "seq_id": 3, "sampling_session_seq_id": 0}
    sampler = await post(http, "save_weights_for_sampler", **snapshot)
    assert await post(http, "save_weights_for_sampler", **snapshot) == sampler
    await result(http, sampler)
    sample = {
        "sampling_session_id": f"{session_id}:sample:0",
        "seq_id": 0,
        "sampling_params": {},
        "prompt": {"chunks": [{"tokens": [1]}]},
    }
    sampled = await post(http, "asample", **sample)
    assert await post(http, "asample", **sample) == sampled
    await result(http, sampled)
    op_types = [type(op).__name__ for op in engine.executed]
    assert op_types == ["CreateModel", "OptimStep", "SaveWeights", "SaveSampler", "Sample"]
    other_op_type = await http.post("save_weights", json={"model_id": model_id, "seq_id": 1, "path": "x"})
    assert (other_op_type.status_code, "seq_id 1" in other_op_type.text) == (400, True)


async def test_a_sampler_keeps_its_weights(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    session_id = await open_session(http)
    snapshot = {"model_id": await make_model(http, session_id), "sampling_session_seq_id": 0}
    await result(http, await post(http, "save_weights_for_sampler", seq_id=1, **snapshot))
    again = await http.post("save_weights_for_sampler", json={"seq_id": 2, **snapshot})
    assert (again.status_code, "exists already" in again.text) == (400, True)
    assert len(engine.of_type(SaveSampler)) == 1
    assert (await http.get(f"samplers/{session_id}:sample:0")).status_code == 200


async def test_a_snapshot_whose_saving_failed_is_freed(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    session_id = await open_session(http)
    model_id = await make_model(http, session_id)
    snapshot = {"model_id": model_id, "sampling_session_seq_id": 0}
    model = engine.models.pop(model_id)
    failed = await result(http, await post(http, "save_weights_for_sampler", seq_id=1, **snapshot))
    assert "error" in failed
    assert (await http.get(f"samplers/{session_id}:sample:0")).status_code == 404
    engine.models[model_id] = model
    await result(http, await post(http, "save_weights_for_sampler", seq_id=2, **snapshot))
    assert (await http.get(f"samplers/{session_id}:sample:0")).status_code == 200
    assert engine.of_type(DropSnapshot) == [DropSnapshot(weights=f"{session_id}:sample:0")]
    assert isinstance(engine.executed[-1], SaveSampler)


async def test_a_model_whose_creation_failed_does_not_exist(
    http: httpx.AsyncClient, context: AppState
) -> None:
    session_id = await open_session(http)
    model_id = await make_model(http, session_id)
    saved = await result(http, await post(http, "save_weights", model_id=model_id, seq_id=1, path="0001"))
    arrays = next(context.checkpoints.root.rglob("*.safetensors"))
    arrays.write_bytes(b"torn")
    reply = await post(
        http, "load_weights", session_id=session_id, model_seq_id=7, path=saved["path"], optimizer=True
    )
    assert "damaged" in str((await result(http, reply))["error"])
    info = await http.post("get_info", json={"model_id": f"{session_id}:train:7"})
    assert info.status_code == 404


async def test_permanent_errors_have_statuses_without_retries(http: httpx.AsyncClient) -> None:
    """The SDK would retry a 409 or 5xx for five minutes."""
    session_id = await open_session(http)
    model_id = await make_model(http, session_id)
    await result(http, await post(http, "save_weights", model_id=model_id, seq_id=1, path="0001"))
    calls = [
        ("save_weights", {"model_id": model_id, "seq_id": 2, "path": "0001"}, 400, "exists already"),
        ("save_weights", {"model_id": model_id, "seq_id": 2, "path": "../up"}, 400, "checkpoint name"),
        (
            "save_weights",
            {"model_id": model_id, "seq_id": 2, "path": "x", "ttl_seconds": -1},
            400,
            "ttl_seconds",
        ),
        ("save_weights_for_sampler", {"model_id": model_id, "seq_id": 2}, 400, "sampling_session_seq_id"),
        ("optim_step", {"model_id": "session-x:train:0", "seq_id": 1, "adam_params": {}}, 404, "restarted"),
        (
            "create_model",
            {"session_id": session_id, "model_seq_id": 1, "base_model": "other/model"},
            400,
            "this server runs local/fake",
        ),
        (
            "create_model",
            {"session_id": session_id, "model_seq_id": 1, "base_model": MODEL, "lora_config": {"rank": 9}},
            400,
            "max_lora_rank",
        ),
        (
            "create_model",
            {"session_id": "session-x", "model_seq_id": 1, "base_model": MODEL, "lora_config": {"rank": 4}},
            404,
            "session",
        ),
        (
            "create_model",
            {
                "session_id": session_id,
                "model_seq_id": 1,
                "base_model": MODEL,
                "optimizer_config": {"type": "dimuon", "version": 1},
            },
            400,
            "use AdamW",
        ),
        (
            "load_weights",
            {"model_id": model_id, "path": "/etc/passwd", "optimizer": True},
            400,
            "not a checkpoint path",
        ),
        (
            "load_weights",
            {"model_id": model_id, "path": "tinker://a/weights/b", "optimizer": True},
            404,
            "no checkpoint",
        ),
        (
            "create_sampling_session",
            {"session_id": session_id, "sampling_session_seq_id": 9},
            400,
            "nothing to sample from",
        ),
        (
            "asample",
            {
                "sampling_session_id": "session-x:sample:0",
                "prompt": {"chunks": [{"tokens": [1]}]},
                "sampling_params": {},
            },
            404,
            "sampler",
        ),
        (
            "asample",
            {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}},
            400,
            "nothing to sample from",
        ),
        ("create_custom_loss", {}, 400, "forward_backward_custom"),
        ("no_such_route", {}, 404, "this server has no POST"),
    ]
    for route, body, status, message in calls:
        response = await http.post(route, json=body)
        assert (response.status_code, message in response.json()["detail"]) == (status, True), (
            route,
            body,
            response.text,
        )


async def test_a_model_loads_only_checkpoints_with_its_lora_config(http: httpx.AsyncClient) -> None:
    session_id = await open_session(http)
    model_id = await make_model(http, session_id)
    saved = await result(http, await post(http, "save_weights", model_id=model_id, seq_id=1, path="0001"))
    reply = await post(
        http,
        "create_model",
        session_id=session_id,
        model_seq_id=1,
        base_model=MODEL,
        lora_config={"rank": 4, "train_unembed": False},
    )
    await result(http, reply)
    response = await http.post(
        "load_weights",
        json={"model_id": reply["model_id"], "path": saved["path"], "optimizer": False, "seq_id": 1},
    )
    assert (response.status_code, "create_training_client_from_state" in response.text) == (400, True)


async def test_the_alpha_of_a_checkpoint_cannot_be_changed(http: httpx.AsyncClient) -> None:
    session_id = await open_session(http)
    model_id = await make_model(http, session_id)  # has the default alpha, 32
    saved = await result(http, await post(http, "save_weights", model_id=model_id, seq_id=1, path="0001"))
    body = {"session_id": session_id, "path": saved["path"], "optimizer": True}
    for alpha in ("64", "many"):
        metadata = {"lora_alpha": alpha}
        response = await http.post("load_weights", json=body | {"model_seq_id": 1, "user_metadata": metadata})
        assert (response.status_code, "lora_alpha='" in response.json()["detail"]) == (400, True)
    same = await post(http, "load_weights", **body, model_seq_id=1, user_metadata={"lora_alpha": "32.0"})
    await result(http, same)
    assert (await post(http, "get_info", model_id=same["model_id"]))["lora_alpha"] == 32


@pytest.mark.seed_behaviour(129)
async def test_only_local_clients_get_the_tokenizer_path(http: httpx.AsyncClient, context: AppState) -> None:
    model_id = await make_model(http, await open_session(http))
    info = await post(http, "get_info", model_id=model_id)
    assert info["model_data"] == {
        "arch": "qwen3",
        "model_name": MODEL,
        "tokenizer_id": str(context.settings.model_dir),
    }
    remote_transport = httpx.ASGITransport(build_app(StartupState(state=context)), client=("10.0.0.7", 1234))
    async with httpx.AsyncClient(transport=remote_transport, base_url="http://server/api/v1/") as remote:
        info = await post(remote, "get_info", model_id=model_id)
    assert info["model_data"] == {"arch": "qwen3", "model_name": MODEL, "tokenizer_id": None}


async def test_housekeeping_frees_a_session_without_heartbeats(tmp_path: Path) -> None:
    context = fake_context(tmp_path, session_timeout_s=0.0, retention=Retention(hold_s=0.05))
    engine = fake_engine(context)
    transport = httpx.ASGITransport(build_app(StartupState(state=context)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server/api/v1/") as http:
        session_id = await open_session(http)
        model_id = await make_model(http, session_id)
        await result(
            http,
            await post(
                http, "save_weights_for_sampler", model_id=model_id, seq_id=1, sampling_session_seq_id=0
            ),
        )
        await housekeep(context)
        assert (await http.post("session_heartbeat", json={"session_id": session_id})).status_code == 410
        late = await http.post("optim_step", json={"model_id": model_id, "seq_id": 2, "adam_params": {}})
        assert (late.status_code, "no heartbeat" in late.text) == (404, True)
        assert (
            await http.post(f"sessions/{session_id}/finish", json={"reason": {"type": "success"}})
        ).status_code == 204
    engine.stop()
    assert engine.of_type(UnloadModel) == [UnloadModel(model_id=model_id)]
    assert engine.of_type(DropSnapshot) == [DropSnapshot(weights=f"{session_id}:sample:0")]


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def checkpoint_records(directory: Path) -> list[Path]:
    return list(directory.rglob("checkpoint.json"))


async def test_the_end_of_a_session_cancels_its_running_samples(tmp_path: Path) -> None:
    """Samples of the same request that wait for a slot are cancelled too."""
    executor = FakeExecutor(num_slots=2, block=1)
    engine = Engine(executor)
    context = replace(fake_context(tmp_path), engine=engine)
    transport = httpx.ASGITransport(build_app(StartupState(state=context)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server/api/v1/") as http:
        session_id = await open_session(http)
        sampler = await post(
            http,
            "create_sampling_session",
            session_id=session_id,
            sampling_session_seq_id=0,
            base_model=MODEL,
        )
        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 50},
            "num_samples": 100,
        }
        await post(http, "asample", sampling_session_id=sampler["sampling_session_id"], seq_id=0, **body)
        engine.start()
        await asyncio.to_thread(wait_until, lambda: "decode" in executor.log)
        # Up to two more dispatches may be logged: one that has passed the gate, and one that waits at it.
        executor.gate.clear()
        dispatches = executor.log.count("decode")
        await http.post(f"sessions/{session_id}/finish", json={"reason": {"type": "success"}})
        executor.gate.set()
        await asyncio.to_thread(wait_until, lambda: not engine.stats()["ops_pending"])
    engine.stop()
    assert executor.log.count("decode") <= dispatches + 2 and not executor.num_running


async def test_other_checkpoints_expire_if_one_cannot_be_deleted(
    http: httpx.AsyncClient, context: AppState, tmp_path: Path
) -> None:
    model_id = await make_model(http, await open_session(http))
    paths = []
    for number in range(2):
        saved = await result(
            http,
            await post(
                http,
                "save_weights",
                model_id=model_id,
                seq_id=1 + number,
                path=f"old{number}",
                ttl_seconds=3600,
            ),
        )
        paths.append(str(saved["path"]))
        context.run_index.set_expiry(paths[-1], datetime.now(UTC) - timedelta(seconds=2 - number))
    damaged, _ = sorted(checkpoint_records(tmp_path))
    damaged.write_text("{")
    await housekeep(context)
    assert context.run_index.expired() == []
    assert checkpoint_records(tmp_path) == [damaged]


async def test_deletions_during_a_save_do_not_delay_other_requests(
    http: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id = await make_model(http, await open_session(http))
    await result(http, await post(http, "save_weights", model_id=model_id, seq_id=1, path="0001"))
    is_writing, may_write = threading.Event(), threading.Event()

    def slow_save(arrays: dict[str, np.ndarray], file: Path) -> None:
        is_writing.set()
        assert may_write.wait(60)
        safetensors.numpy.save_file(arrays, file)

    monkeypatch.setattr(checkpoints, "save_file", slow_save)
    save = await post(http, "save_weights", model_id=model_id, seq_id=2, path="0002")
    await asyncio.to_thread(is_writing.wait)
    checkpoint = f"training_runs/{model_id}/checkpoints/weights/0001"
    deletions = [asyncio.create_task(http.delete(checkpoint)) for _ in range(50)]
    async with asyncio.timeout(10):
        listed = [(await http.get("checkpoints")).json() for _ in range(2)][-1]
    may_write.set()
    assert len(listed["checkpoints"]) == 1
    assert Counter(reply.status_code for reply in await asyncio.gather(*deletions)) == {204: 1, 404: 49}
    assert "error" not in await result(http, save)


@pytest.mark.parametrize("expires", [False, True])
async def test_a_deleted_sampler_checkpoint_leaves_the_device(
    http: httpx.AsyncClient, context: AppState, engine: FakeEngine, expires: bool
) -> None:
    """The path can be used again, and a sample of the new checkpoint must not use the old weights."""
    session_id = await open_session(http)
    model_id = await make_model(http, session_id)
    for seq_id, route in enumerate(("save_weights", "save_weights_for_sampler"), start=1):
        saved = await result(http, await post(http, route, model_id=model_id, seq_id=seq_id, path="0001"))
        path = str(saved["path"])
        if expires:
            context.run_index.set_expiry(path, datetime.now(UTC) - timedelta(seconds=1))
            await housekeep(context)
        else:
            run_id, _, checkpoint_id = path.removeprefix("tinker://").partition("/")
            deleted = await http.delete(f"training_runs/{run_id}/checkpoints/{checkpoint_id}")
            assert deleted.status_code == 204
        assert not context.checkpoints.exists(path)
    engine.stop()
    assert engine.of_type(DropSnapshot) == [DropSnapshot(weights=f"tinker://{model_id}/sampler_weights/0001")]


async def test_a_checkpoint_that_another_server_replaced_is_read_again(
    http: httpx.AsyncClient, context: AppState, engine: FakeEngine, tmp_path: Path
) -> None:
    session_id = await open_session(http)
    model_id = await make_model(http, session_id)
    saved = await result(
        http, await post(http, "save_weights_for_sampler", model_id=model_id, seq_id=1, path="s")
    )
    path = str(saved["path"])
    sampler = await post(
        http, "create_sampling_session", session_id=session_id, sampling_session_seq_id=0, model_path=path
    )
    other_server = CheckpointStore(tmp_path, MODEL)
    info, arrays = other_server.read(path)

    async def sample(**weights: object) -> None:
        prompt, params = {"chunks": [{"tokens": [1]}]}, {"max_tokens": 1}
        await result(http, await post(http, "asample", prompt=prompt, sampling_params=params, **weights))

    for _ in range(2):
        await sample(model_path=path)
        await sample(sampling_session_id=sampler["sampling_session_id"])
        other_server.delete(path)
        other_server.write(path, arrays, lora=info.lora, step=0, user_metadata={})
    await sample(sampling_session_id=sampler["sampling_session_id"])
    engine.stop()
    kinds = [type(op) for op in engine.executed if isinstance(op, Sample | DropSnapshot)]
    assert kinds == [Sample, Sample, DropSnapshot, Sample, Sample, DropSnapshot, Sample]


async def test_only_expired_checkpoints_are_deleted(
    http: httpx.AsyncClient, context: AppState, tmp_path: Path
) -> None:
    model_id = await make_model(http, await open_session(http))
    kept = await result(
        http, await post(http, "save_weights", model_id=model_id, seq_id=1, path="kept", ttl_seconds=3600)
    )
    old = await result(
        http, await post(http, "save_weights", model_id=model_id, seq_id=2, path="old", ttl_seconds=3600)
    )
    context.run_index.set_expiry(str(old["path"]), datetime.now(UTC) - timedelta(seconds=1))
    await housekeep(context)
    with (tmp_path / "ledger.jsonl").open("a") as run_index:
        run_index.write('\n{"run_id": "torn')

    restarted = fake_context(tmp_path)
    transport = httpx.ASGITransport(build_app(StartupState(state=restarted)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server/api/v1/") as client:
        (checkpoint,) = (await client.get("checkpoints")).json()["checkpoints"]
        assert (checkpoint["tinker_path"], checkpoint["expires_at"] is not None) == (kept["path"], True)
        (run,) = (await client.get("training_runs", params={"limit": 5})).json()["training_runs"]
        assert (run["training_run_id"], run["lora_rank"], run["last_checkpoint"]["checkpoint_id"]) == (
            model_id,
            4,
            "weights/kept",
        )
        assert (await client.get("training_runs/none")).status_code == 404
    fake_engine(restarted).stop()


async def test_checkpoints_are_listed_in_pages(http: httpx.AsyncClient) -> None:
    model_id = await make_model(http, await open_session(http))
    for index in range(3):
        await result(
            http, await post(http, "save_weights", model_id=model_id, seq_id=index + 1, path=f"{index}")
        )
    page = (await http.get("checkpoints", params={"limit": 2, "offset": 1})).json()
    assert [checkpoint["checkpoint_id"] for checkpoint in page["checkpoints"]] == ["weights/1", "weights/0"]
    assert page["cursor"] == {"limit": 2, "offset": 1, "total_count": 3}
    assert (await http.get("checkpoints", params={"limit": "x"})).status_code == 400


async def test_training_runs_of_a_project_are_refused(http: httpx.AsyncClient) -> None:
    """The server has no projects, so a list of all runs would be a wrong answer to this request."""
    response = await http.get("training_runs", params={"project_id": "x"})
    assert (response.status_code, "no projects" in response.json()["detail"]) == (400, True)


async def test_sessions_are_listed_in_pages_the_newest_first(http: httpx.AsyncClient) -> None:
    newest_first = [await open_session(http) for _ in range(3)][::-1]
    pages = [
        (await http.get("sessions", params={"limit": 2, "offset": offset})).json()["sessions"]
        for offset in (0, 2, 4)
    ]
    assert pages == [newest_first[:2], newest_first[2:], []]
    assert (await http.get("sessions", params={"limit": 0})).status_code == 400


async def test_stats_count_registered_objects(http: httpx.AsyncClient) -> None:
    await make_model(http, await open_session(http))
    stats = (await http.get("stats")).json()
    assert stats["registry"] == {"sessions": 1, "models": 1, "samplers": 0, "snapshots": 0}
    assert stats["futures"]["finished"] == 1 and stats["engine"] == {"ops_finished": 1}


async def test_a_request_logs_one_line_and_polls_log_at_debug_level(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="skyrl_tx_server.http")
    session_id = await open_session(http)
    await http.post("session_heartbeat", json={"session_id": session_id})
    await http.get(f"sessions/{session_id}", headers={"x-sdk-method": "RestClient.get_session"})
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in lines] == ["INFO", "DEBUG", "INFO"]
    assert lines[2][1].startswith("method=GET route=/api/v1/sessions/{session_id} status=200 ms=")
    assert lines[2][1].endswith("sdk=RestClient.get_session")


async def test_a_bug_of_the_server_is_logged_and_not_retried(
    http: httpx.AsyncClient,
    context: AppState,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(op: object) -> None:
        raise KeyError("a bug in the engine")

    session_id = await open_session(http)
    model_id = await make_model(http, session_id)
    monkeypatch.setattr(context.engine, "submit", fail)
    response = await http.post("optim_step", json={"model_id": model_id, "seq_id": 1, "adam_params": {}})
    assert (response.status_code, response.json()["category"]) == (400, "server")
    assert "a bug in the engine" in caplog.text


async def test_requests_run_in_the_order_of_arrival(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    model_id = await make_model(http, await open_session(http))
    engine.gate.clear()
    replies = []
    for seq_id in range(1, 5):
        if seq_id % 2:
            response = await http.post(
                "forward_backward", content=training_bytes(model_id, seq_id), headers={"content-type": PROTO}
            )
            replies.append(response.json())
        else:
            replies.append(await post(http, "optim_step", model_id=model_id, seq_id=seq_id, adam_params={}))
    engine.gate.set()
    await asyncio.gather(*(result(http, reply) for reply in replies))
    order = [type(op) for op in engine.executed if isinstance(op, ForwardBackward | OptimStep)]
    assert order == [ForwardBackward, OptimStep, ForwardBackward, OptimStep]


async def test_a_model_name_or_path_is_sampled_without_a_session(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """Older SDKs send such requests."""
    model_id = await make_model(http, await open_session(http))
    saved = await result(
        http, await post(http, "save_weights_for_sampler", model_id=model_id, seq_id=1, path="s")
    )
    prompt = {"chunks": [{"tokens": [1]}]}
    by_path = await post(
        http,
        "asample",
        model_path=saved["path"],
        prompt=prompt,
        sampling_params={"max_tokens": 2},
        num_samples=2,
    )
    by_name = await post(http, "asample", base_model=MODEL, prompt=prompt, sampling_params={"max_tokens": 2})
    assert len(json.loads(json.dumps(await result(http, by_path)))["sequences"]) == 2
    assert (await result(http, by_name))["type"] == "sample"
    assert [op.weights for op in engine.of_type(Sample)] == [saved["path"], None]


async def test_an_unserializable_reply_has_a_status_that_is_not_retried(
    http: httpx.AsyncClient, context: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All routes have this status. After a 5xx, the SDK would repeat retrieve_future without a limit."""
    monkeypatch.setattr(context.engine, "stats", lambda: {"cannot be written": object()})
    response = await http.get("stats")
    assert (response.status_code, "not JSON serializable" in response.text) == (400, True)


async def test_a_poll_is_a_heartbeat_when_it_arrives_not_when_it_ends(
    http: httpx.AsyncClient, context: AppState, engine: FakeEngine
) -> None:
    now = [0.0]
    context.registry.clock = lambda: now[0]
    session_id = await open_session(http)
    model_id = await make_model(http, session_id)
    engine.gate.clear()
    reply = await post(http, "optim_step", model_id=model_id, seq_id=1, adam_params={})
    now[0] = 100.0
    poll = asyncio.create_task(http.post("retrieve_future", json={"request_id": reply["request_id"]}))
    await asyncio.sleep(0)
    now[0] = 350.0
    engine.gate.set()
    await poll
    assert context.registry.expired() == []
    now[0] = 401.0
    assert context.registry.expired() == [session_id]


async def test_a_sample_cancelled_while_it_waits_never_runs(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = {"base_model": MODEL, "sampling_params": {"max_tokens": 1}}
    engine.gate.clear()
    running, cancelled, last = [
        await post(http, "asample", **body, prompt={"chunks": [{"tokens": [token]}]}) for token in (1, 2, 3)
    ]
    for request_id in (cancelled["request_id"], cancelled["request_id"], "sample-unknown"):
        assert (await http.post("cancel_future", json={"request_id": request_id})).status_code == 204
    engine.gate.set()
    assert "sequences" in await result(http, running) and "sequences" in await result(http, last)
    assert "withdrawn" in str((await result(http, cancelled))["error"])
    assert [int(op.prompt[0]) for op in engine.of_type(Sample)] == [1, 3]


async def test_a_signed_download_opens_without_the_api_key(tmp_path: Path) -> None:
    """The command line of the SDK downloads the files with their signed URLs only."""
    context = fake_context(tmp_path, settings=HttpSettings(model_dir=None, api_key="tml-secret"))
    transport = httpx.ASGITransport(build_app(StartupState(state=context)))
    key = {"x-api-key": "tml-secret"}
    async with httpx.AsyncClient(transport=transport, base_url="http://server/api/v1/", headers=key) as http:
        model_id = await make_model(http, await open_session(http))
        saved = await result(http, await post(http, "save_weights_external", model_id=model_id, path="e1"))
        urls = (
            await http.get(f"training_runs/{model_id}/checkpoints/external_weights/e1/external_weights_urls")
        ).json()["urls"]
        assert saved["path"] == f"tinker://{model_id}/external_weights/e1"
        del http.headers["x-api-key"]
        assert (await http.get(urls["adapter_config.json"])).json()["r"] == 4
        assert (await http.get("training_runs")).status_code == 401
    fake_engine(context).stop()


async def test_an_archive_of_a_checkpoint_is_a_tar_behind_a_redirect(http: httpx.AsyncClient) -> None:
    """SDKs up to 0.35 request archives. scripts/sdk_smoke.py runs such SDKs."""
    model_id = await make_model(http, await open_session(http))
    await result(http, await post(http, "save_weights", model_id=model_id, path="w1"))
    await result(http, await post(http, "save_weights_for_sampler", model_id=model_id, path="s1"))
    for checkpoint_id in ("weights/w1", "sampler_weights/s1", "sampler_weights/s1"):
        reply = await http.get(f"training_runs/{model_id}/checkpoints/{checkpoint_id}/archive")
        assert reply.status_code == 302
        assert (
            timedelta(minutes=55)
            < parsedate_to_datetime(reply.headers["expires"]) - datetime.now(UTC)
            < timedelta(minutes=65)
        )
        archive = await http.get(reply.headers["location"])
        with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
            assert tar.getnames() == ["adapter_config.json", "adapter_model.safetensors"]
            config, weights = (file.read() for name in tar.getnames() if (file := tar.extractfile(name)))
        assert json.loads(config)["r"] == 4 and safetensors.numpy.load(weights).keys() == LORA_WEIGHTS.keys()
        other_checkpoint_url = reply.headers["location"].replace(
            checkpoint_id, "weights/w1" if "sampler" in checkpoint_id else "sampler_weights/s1"
        )
        assert (
            await http.get(other_checkpoint_url)
        ).status_code == 404  # a signature is valid for one checkpoint
    assert (await http.get(f"training_runs/{model_id}/checkpoints/weights/none/archive")).status_code == 404


async def test_housekeeping_reports_a_full_disk_once_in_one_line(
    http: httpx.AsyncClient,
    context: AppState,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    context.run_index.set_expiry("tinker://run/weights/a", datetime.now(UTC) - timedelta(seconds=1))
    num_writes, tried_again = 0, asyncio.Event()

    def write(descriptor: int, data: bytes) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes > 2:
            tried_again.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("skyrl_tx_server.files.run_index.os.write", write)
    app = build_app(StartupState(state=context), housekeeping_period_s=0.001)
    async with app.router.lifespan_context(app), asyncio.timeout(60):
        await tried_again.wait()
    lines = [record for record in caplog.records if "No space left" in record.getMessage()]
    assert len(lines) == 1 and lines[0].exc_info is None

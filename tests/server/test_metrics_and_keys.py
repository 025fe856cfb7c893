"""Tests of the route /metrics and of the API key."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import tinker

from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.operations import (
    CreateModel,
    ForwardBackward,
    LoraSpec,
    LossFn,
    Sample,
    SamplingSettings,
    TrainDatum,
)
from skyrl_tx_server.http.app import build_app
from skyrl_tx_server.http.app_state import AppState, HttpSettings
from skyrl_tx_server.http.http_handler import StartupState
from tests.fakes.executor import FakeExecutor
from tests.fakes.server import fake_context, fake_engine, serving

KEY = "tml-secret"
METRIC_LINE = re.compile(r'skyrl_tx_[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? -?[0-9.e+-]+')


@pytest.fixture
async def context(tmp_path: Path) -> AsyncIterator[AppState]:
    context = fake_context(tmp_path, settings=HttpSettings(model_dir=None, api_key=KEY))
    yield context
    fake_engine(context).stop()


def http_client(context: AppState) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(build_app(StartupState(state=context))), base_url="http://server"
    )


WORK_KINDS = ("step", "prefill", "decode")


async def test_metrics_are_prometheus_text_with_tokens_by_kind(
    context: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(FakeExecutor())
    engine.start()
    tokens = np.arange(1, 6, dtype=np.int32)
    engine.submit(CreateModel(model_id="m", lora=LoraSpec(rank=2))).result(10)
    datum = TrainDatum(tokens=tokens, target_tokens=tokens)
    engine.submit(ForwardBackward(model_id="m", data=(datum, datum), loss_fn=LossFn.CROSS_ENTROPY)).result(10)
    engine.submit(
        ForwardBackward(model_id="m", data=(datum,), loss_fn=LossFn.CROSS_ENTROPY, forward_only=True)
    ).result(10)
    engine.submit(
        Sample(weights=None, prompt=tokens, settings=SamplingSettings(max_tokens=3), num_samples=2)
    ).result(10)
    engine.stop()
    programs = {"programs": {"forward_backward": 2, 'a "quoted" one': 1}, "device_bytes_in_use": 7}
    monkeypatch.setattr(context.engine, "stats", lambda: engine.stats() | programs)
    async with http_client(context) as http:
        await http.get("/metrics")  # without the key
        await http.get("/metrics", headers={"authorization": f"Bearer {KEY}"})
        reply = await http.get("/metrics", headers={"authorization": f"Bearer {KEY}"})
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line.removesuffix(".0") for line in reply.text.splitlines()]
    assert all(line.startswith("# ") or METRIC_LINE.fullmatch(line.replace('\\"', "")) for line in lines), (
        reply.text
    )
    for expected in (
        'skyrl_tx_tokens_total{kind="trained"} 10',
        'skyrl_tx_tokens_total{kind="forward"} 5',
        'skyrl_tx_tokens_total{kind="sampled"} 6',
        'skyrl_tx_tokens_total{kind="prefilled"} 5',
        'skyrl_tx_queue_depth{kind="sample"} 0',
        "skyrl_tx_decode_slots 4",
        'skyrl_tx_requests_total{method="GET",route="/metrics",status="200"} 1',
        'skyrl_tx_requests_total{method="GET",route="/metrics",status="401"} 1',
        "skyrl_tx_decode_slots_used 0",
        'skyrl_tx_programs_total{program="forward_backward"} 2',
        'skyrl_tx_programs_total{program="a \\"quoted\\" one"} 1',
        'skyrl_tx_device_memory_bytes{kind="used"} 7',
        "skyrl_tx_registry_sessions 0",
    ):
        assert expected in lines, reply.text
    assert any(line.startswith("skyrl_tx_resident_memory_bytes ") for line in lines)
    lines_by_kind = {
        kind: [line for line in lines if line.startswith(f'skyrl_tx_work_seconds_total{{work="{kind}"}}')]
        for kind in WORK_KINDS
    }
    assert all(float(line.split()[1]) > 0 for (line,) in lines_by_kind.values())


async def test_renamed_metrics_also_have_their_former_names(
    context: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = {
        "decode_dispatches": 3,
        "cache_pages_cached": 2,
        "tokens_sampled_externally": 4,
        "work_seconds": {"step": 1.5},
    }
    monkeypatch.setattr(context.engine, "stats", lambda: stats)
    async with http_client(context) as http:
        http.headers["x-api-key"] = KEY
        lines = (await http.get("/metrics")).text.splitlines()
        statistics = (await http.get("/api/v1/stats")).json()["engine"]
    for line in (
        "skyrl_tx_decode_dispatches_total 3.0",
        "skyrl_tx_decode_blocks_total 3.0",
        'skyrl_tx_cache_pages{kind="cached"} 2.0',
        'skyrl_tx_cache_pages{kind="remembered"} 2.0',
        'skyrl_tx_tokens_total{kind="sampled_externally"} 4.0',
        'skyrl_tx_tokens_total{kind="sampled_elsewhere"} 4.0',
        'skyrl_tx_work_seconds_total{work="step"} 1.5',
        'skyrl_tx_turn_seconds_total{turn="step"} 1.5',
    ):
        assert line in lines
    assert statistics["decode_blocks"] == statistics["decode_dispatches"] == 3


async def test_requests_before_the_start_and_unknown_routes_count(context: AppState) -> None:
    startup = StartupState()
    transport = httpx.ASGITransport(build_app(startup))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        await http.get("/api/v1/healthz")
        await http.post("/api/v1/nothing")
        startup.begin(context)
        await http.put("/api/v1/healthz")
        reply = await http.get("/metrics", headers={"authorization": f"Bearer {KEY}"})
    counts = [line for line in reply.text.splitlines() if line.startswith("skyrl_tx_requests_total")]
    assert counts == [
        'skyrl_tx_requests_total{method="GET",route="/api/v1/healthz",status="503"} 1.0',
        'skyrl_tx_requests_total{method="POST",route="unknown",status="404"} 1.0',
        'skyrl_tx_requests_total{method="PUT",route="unknown",status="404"} 1.0',
    ]


async def test_every_route_except_health_needs_the_key(context: AppState) -> None:
    async with http_client(context) as http:
        assert (await http.get("/api/v1/healthz")).status_code == 200
        for path in ("/metrics", "/v1/models", "/api/v1/stats", "/api/v1/get_server_capabilities"):
            for headers in ({}, {"x-api-key": "tml-wrong"}, {"authorization": "Bearer tml-secre"}):
                reply = await http.get(path, headers=headers)
                assert reply.status_code == 401 and "needs its API key" in reply.text
            assert (await http.get(path, headers={"x-api-key": KEY})).status_code == 200
            assert (await http.get(path, headers={"authorization": f"Bearer {KEY}"})).status_code == 200


@pytest.mark.official_sdk
def test_both_official_clients_send_the_key(tmp_path: Path) -> None:
    context = fake_context(tmp_path, settings=HttpSettings(model_dir=None, api_key=KEY))
    with serving(StartupState(state=context)) as url:
        rest = tinker.RestClient(base_url=url, api_key=KEY)
        assert rest.get_server_capabilities().result().supported_models[0].model_name == "local/fake"
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["local/fake"]
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()

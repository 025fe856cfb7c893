"""A tenant with valid keys does not block another tenant and does not use up the server's memory by slow
bodies, many connections, large results, long texts, or operations with much data for each token."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import uvicorn
from starlette.types import Message

from skyrl_tx_server.engine.operations import (
    AdamSettings,
    ForwardBackward,
    LossFn,
    LossSettings,
    OptimStep,
    Sample,
    SampledSequence,
    SampleResult,
    SamplingSettings,
    SaveSampler,
    StopReason,
    TopkLogprobs,
    TrainDatum,
)
from skyrl_tx_server.errors import CapacityError
from skyrl_tx_server.http import large_reply
from skyrl_tx_server.http.app import build_app
from skyrl_tx_server.http.app_state import MAX_LARGE_REPLIES, MAX_THREADS
from skyrl_tx_server.http.http_handler import CLIENT_CLOSED_REQUEST, StartupState
from skyrl_tx_server.http.listening import BoundedServer
from skyrl_tx_server.http.routes import futures, openai
from skyrl_tx_server.http.shares import MAX_STEPS, EngineShare
from tests.fakes.event_loop import unloaded_clock
from tests.security.tenants import MODEL, Site, two_tenants
from tests.security.test_tenants import HeldEngine

MAX_GAP_S = 0.5  # between two iterations of the event loop


@contextlib.asynccontextmanager
async def served(site: Site) -> AsyncIterator[tuple[str, int]]:
    """Serve the site on a socket. Yield its address."""
    config = uvicorn.Config(
        build_app(StartupState(state=site.context)),
        log_config=None,  # for the reason, see tests.fakes.server.LoopbackServer
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    server = BoundedServer(config, site.context.settings.max_connections)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            await task


async def test_slow_bodies_of_a_tenant_do_not_block_other_bodies(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as site:
        slow = site.context.for_tenant("alice").bodies
        everything = 1 << 40  # more than the memory for the bodies of all tenants
        async with slow.reserve(everything), asyncio.timeout(30):
            body = {"base_model": MODEL, "unknown": "x" * (100 << 10)}
            assert (await site.bob.post("/api/v1/asample", json=body)).status_code == 400


def raw_request(client: httpx.AsyncClient, route: str, body: bytes, *headers: str) -> bytes:
    lines = (
        f"POST /api/v1/{route} HTTP/1.1",
        "host: a",
        f"x-api-key: {client.headers['x-api-key']}",
        "content-type: application/json",
        *headers,
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def poll(site: Site, client: httpx.AsyncClient, tenant: str) -> bytes:
    """Return a request for the result of an operation that never ends."""
    never: Future[SampleResult] = Future()
    request_id = site.context.for_tenant(tenant).futures.submit(lambda: never, kind="sample", key=None)
    body = json.dumps({"request_id": request_id}).encode()
    return raw_request(client, "retrieve_future", body, f"content-length: {len(body)}")


async def test_busy_connections_of_a_tenant_do_not_exclude_others(tmp_path: Path) -> None:
    """Alice sends 8 requests without their bodies, then 8 connections with pipelined requests. A request of
    Bob is in progress at the same time."""
    async with (
        two_tenants(tmp_path, max_connections=8) as site,
        served(site) as address,
        asyncio.timeout(60),
        httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}", headers=site.bob.headers) as bob,
    ):
        waiting_reader, waiting_writer = await asyncio.open_connection(*address)
        waiting_writer.write(poll(site, site.bob, "bob"))
        without_body = raw_request(
            site.alice, "create_session", b"", "content-length: 100", "expect: 100-continue"
        )
        for request in (without_body, 2 * poll(site, site.alice, "alice")):
            streams = []
            for _ in range(8):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(request)
                streams.append((reader, writer))
            refused = await streams[-1][0].read()  # the server closes the connection after the reply
            assert refused.startswith(b"HTTP/1.1 429") and b"too many requests in progress" in refused
            assert (await bob.get("/api/v1/get_server_capabilities")).status_code == 200
            for _, writer in streams:
                writer.close()
        assert (await waiting_reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408"), (
            "the connection of Bob's request stays open"
        )
        waiting_writer.close()


async def test_a_connection_with_many_pipelined_requests_is_closed(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as site, served(site) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /api/v1/healthz HTTP/1.1\r\nhost: a\r\n\r\n" * 500)
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionError):
                replies = await reader.read()
                assert replies.count(b"200 OK") < 50
        writer.close()


def topk(num_positions: int, k: int) -> TopkLogprobs:
    return TopkLogprobs(
        token_ids=np.zeros((num_positions, k), np.int32),
        logprobs=np.full((num_positions, k), -1.5, np.float32),
    )


def submit_large(site: Site, num_positions: int) -> dict[str, str]:
    """Give Alice a result with top-k logprobs. Return the body of a poll for it."""
    sequence = SampledSequence(
        tokens=np.zeros(1, np.int32), logprobs=np.zeros(1, np.float32), stop_reason=StopReason.LENGTH
    )
    sampled: Future[SampleResult] = Future()
    sampled.set_result(
        SampleResult(
            sequences=(sequence,),
            prompt_logprobs=None,
            prompt_cache_hit_tokens=0,
            topk_prompt_logprobs=topk(num_positions, 600),
        )
    )
    futures_of_alice = site.context.for_tenant("alice").futures
    return {"request_id": futures_of_alice.submit(lambda: sampled, kind="sample", key=None)}


async def test_a_large_result_does_not_block_the_event_loop(tmp_path: Path) -> None:
    longest_s, clock = 0.0, unloaded_clock()

    async def watch() -> None:
        nonlocal longest_s
        while True:
            before = clock()
            await asyncio.sleep(0)
            longest_s = max(longest_s, clock() - before)

    async with two_tenants(tmp_path) as site:
        poll_body = submit_large(site, 2000)
        watcher = asyncio.create_task(watch())
        reply = await site.alice.post("/api/v1/retrieve_future", json=poll_body)
        await asyncio.sleep(0)  # the watcher measures the last gap
        watcher.cancel()
    assert json.loads(reply.content)["topk_prompt_logprobs"] == [[[0, -1.5]] * 600] * 2000
    assert longest_s < MAX_GAP_S


def text_body(route: str, length: int) -> dict[str, object]:
    text = "x" * length
    if route == "completions":
        return {"model": MODEL, "prompt": text}
    return {"model": MODEL, "messages": [{"role": "user", "content": text}]}


async def test_a_poll_for_a_large_result_waits_for_others(tmp_path: Path) -> None:
    async with two_tenants(tmp_path, hold_s=0.2) as site:
        poll_body, large_replies = submit_large(site, 100), site.context.for_tenant("alice").large_replies
        for _ in range(MAX_LARGE_REPLIES):
            await large_replies.acquire()  # as for a client that does not read its reply
        for _ in range(2):
            reply = await site.alice.post("/api/v1/retrieve_future", json=poll_body)
            assert (reply.status_code, reply.json()["type"]) == (408, "try_again")
        large_replies.release()
        for _ in range(2):  # the first reply frees its place
            reply = await site.alice.post("/api/v1/retrieve_future", json=poll_body)
            assert (reply.status_code, reply.json()["type"]) == (200, "sample")


async def test_a_large_result_is_not_encoded_after_a_disconnect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[object] = []
    monkeypatch.setattr(futures, "result_to_json", lambda *args: encoded.append(args))
    async with two_tenants(tmp_path) as site:
        body = json.dumps(submit_large(site, 100)).encode()
        messages: list[Message] = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]

        async def receive() -> Message:
            return messages.pop(0)

        async def send(message: Message) -> None:
            pass

        headers = {"x-api-key": site.alice.headers["x-api-key"], "content-type": "application/json"}
        await build_app(StartupState(state=site.context))(
            {
                "type": "http",
                "method": "POST",
                "path": "/api/v1/retrieve_future",
                "query_string": b"",
                "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            },
            receive,
            send,
        )
        assert not messages and not encoded
        assert site.context.requests["POST", "/api/v1/retrieve_future", CLIENT_CLOSED_REQUEST] == 1


async def test_a_large_result_that_cannot_be_encoded_is_a_400(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object) -> None:
        raise ValueError("bad result")

    monkeypatch.setattr(futures, "result_to_json", fail)
    async with two_tenants(tmp_path) as site:
        for _ in range(MAX_LARGE_REPLIES + 1):
            reply = await site.alice.post("/api/v1/retrieve_future", json=submit_large(site, 100))
            assert (reply.status_code, "bad result" in reply.text) == (400, True)


async def test_a_client_that_reads_a_reply_too_slowly_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_reply, "WRITE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(large_reply, "MIN_BYTES_PER_S", 1 << 30)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)
        await asyncio.sleep(0 if len(sent) < 3 else 3600)

    async with asyncio.timeout(30):
        await large_reply.LargeReply(b"x" * (1 << 20))({}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert len(sent) == 3 and sent[-1]["more_body"]


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
async def test_short_texts_do_not_wait_for_long_texts(route: str, tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as site, asyncio.timeout(30):
        for _ in range(MAX_THREADS):
            await site.context.for_tenant("alice").threads.acquire()
        reply = await site.alice.post(f"/v1/{route}", json=text_body(route, 3000))
        assert reply.status_code == 400 and "context length" in reply.text


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
async def test_long_texts_of_a_tenant_leave_threads_to_others(
    route: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, release, started = asyncio.get_running_loop(), threading.Event(), asyncio.Queue[int]()
    load_tokenizer = openai.load_tokenizer

    def slow_tokenizer(model_dir: Path | None) -> object:
        loop.call_soon_threadsafe(started.put_nowait, 1)
        release.wait(60)
        return load_tokenizer(model_dir)

    with ThreadPoolExecutor(MAX_THREADS + 1) as pool:
        loop.set_default_executor(pool)
        async with two_tenants(tmp_path) as site, asyncio.timeout(50):
            monkeypatch.setattr(openai, "load_tokenizer", slow_tokenizer)
            body = text_body(route, 100 << 10)
            tasks = [asyncio.create_task(site.alice.post(f"/v1/{route}", json=body)) for _ in range(8)]
            for _ in range(MAX_THREADS):
                await started.get()
            try:
                async with asyncio.timeout(20):
                    assert (await site.bob.get("/v1/models")).status_code == 200
                assert site.context.for_tenant("alice").bodies.used_bytes > 8 * (100 << 10), (
                    "the texts that wait for a thread are counted"
                )
            finally:
                release.set()
            for reply in await asyncio.gather(*tasks):
                assert reply.status_code == 400 and "context length" in reply.text


def test_values_of_a_position_count_in_the_quota_of_tokens() -> None:
    share = EngineShare(HeldEngine(), "alice", 100_000)
    datum = TrainDatum(tokens=np.zeros(500, np.int32), target_tokens=np.zeros((500, 1024), np.int32))
    train = ForwardBackward(
        model_id="m", loss_fn=LossFn.CROSS_ENTROPY, settings=LossSettings(), data=(datum,)
    )
    settings = SamplingSettings(max_tokens=500)
    prompt = Sample(
        weights=None, prompt=np.zeros(500, np.int32), settings=settings, topk_prompt_logprobs=1024
    )
    completion = Sample(
        weights=None, prompt=np.zeros(1, np.int32), settings=settings, topk_sample_logprobs=1024
    )
    for op in (train, prompt, completion):
        future = share.submit(op)  # more than 64,000 tokens
        with pytest.raises(CapacityError, match="tenant_max_tokens"):
            share.submit(op)
        future.cancel()


def test_the_number_of_waiting_steps_of_a_tenant_is_limited() -> None:
    share = EngineShare(HeldEngine(), "alice", 1000)
    step = OptimStep(model_id="m", adam=AdamSettings())
    first = share.submit(step)
    for _ in range(MAX_STEPS - 1):
        share.submit(step)
    for op in (step, SaveSampler(model_id="m", weights="tinker://m/sampler_weights/s")):
        with pytest.raises(CapacityError, match="wait for earlier requests"):
            share.submit(op)
    first.cancel()
    assert isinstance(share.submit(step), concurrent.futures.Future)


async def test_the_log_has_no_control_characters_of_a_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with two_tenants(tmp_path) as site:
        assert (await site.without_key.get("/x%1b%5b2J")).status_code == 404
    assert "no route GET" in caplog.text and "\x1b" not in caplog.text

"""A hostile request body causes a short reply, no internal error and no delay of other requests."""

from __future__ import annotations

import asyncio
import json
import logging
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import zstandard

from skyrl_tx_server.errors import CapacityError, UserError
from skyrl_tx_server.http.app import ENDPOINTS, build_app
from skyrl_tx_server.http.app_state import AppState, HttpSettings
from skyrl_tx_server.http.bodies import BODIES_IN_FLIGHT, CONTROL_BODY, BodyReader, decompress
from skyrl_tx_server.http.http_handler import StartupState
from skyrl_tx_server.http.wire.json_body import DATA_BOUNDS, JsonBounds, parse_json
from skyrl_tx_server.http.wire.limits import Limits
from skyrl_tx_server.http.wire.openai_requests import parse_chat, parse_completion
from skyrl_tx_server.http.wire.protobuf import parse_training_proto
from skyrl_tx_server.http.wire.sampling_requests import parse_sample
from skyrl_tx_server.http.wire.training_requests import parse_training_json
from tests.fakes.event_loop import unloaded_clock
from tests.fakes.server import fake_context, fake_engine

JSON, PROTO = {"content-type": "application/json"}, {"content-type": "application/x-protobuf"}
LIMITS = Limits(vocab_size=512, max_context_length=4096, max_lora_rank=32)
MAX_GAP_S = 0.5  # between two iterations of the event loop


def compressed(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=19).compress(body)


def nested_objects(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


BODIES = {
    "deep objects": nested_objects(900),
    "deep lists": b'{"tags":' + b"[" * 900 + b"]" * 900 + b"}",
    "unclosed lists": b"[" * 100_000,
    "many empty lists": b'{"tags":[' + b"[]," * 200_000 + b"[]]}",
    "many keys": b"{" + b",".join(b'"k%d":0' % i for i in range(60_000)) + b"}",
    "a long key": b'{"' + b"k" * 900_000 + b'":1}',
    "a long string": b'{"session_id":"' + b"s" * 900_000 + b'","model_id":"' + b"m" * 100_000 + b'"}',
    "a number of 5000 digits": b'{"seq_id":' + b"9" * 5000 + b',"model_seq_id":' + b"9" * 5000 + b"}",
    "a number above every float": b'{"seq_id":1e999}',
    "an integer above 64 bits": b'{"session_id":"s","model_seq_id":'
    + b"9" * 30
    + b',"seq_id":'
    + b"9" * 30
    + b"}",
    "not a number": b'{"seq_id":NaN}',
    "half a surrogate pair": b'{"session_id":"\\ud800","model_id":"\\udfff"}',
    "not UTF-8": b'{"session_id":"\xff\xfe"}',
    "duplicate keys": b'{"model_id":"a","model_id":["b"]}',
    "a list": b"[1]",
    "a string": b'"model_id"',
    "null": b"null",
    "escaped quotes": b'{"model_id":"' + b'\\"' * 400_000 + b'"}',
    "strings of one escape": b'{"tags":[' + b'"\\\\",' * 100_000 + b'""]}',
    "unclosed escaped string": b'{"model_id":"' + b'\\"' * 400_000,
    "large metadata": json.dumps({"session_id": "s", "user_metadata": {"k": "v" * 20_000}}).encode(),
    "much metadata": json.dumps(
        {"session_id": "s", "user_metadata": {f"k{i}": "v" for i in range(1000)}}
    ).encode(),
    "nested metadata": b'{"user_metadata":{"a":{"b":[1]}}}',
    "above the limit": b" " * (40 << 20),
}
ROUTES = [
    endpoint
    for endpoint in ENDPOINTS
    if endpoint.method in ("POST", "PUT") and endpoint.path != "/api/v1/telemetry"
]


@pytest.fixture
def context(tmp_path: Path) -> Iterator[AppState]:
    context = fake_context(tmp_path, settings=HttpSettings(model_dir=None))
    yield context
    fake_engine(context).stop()


@pytest.fixture
async def http(context: AppState) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(StartupState(state=context)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        yield http


class Ticker:
    """Measures the longest time between two iterations of the event loop, excluding waits for a CPU."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        clock = unloaded_clock()
        last = clock()
        while True:
            await asyncio.sleep(0)
            now = clock()
            self.longest_s, last = max(self.longest_s, now - last), now

    @contextmanager
    def ticking(self) -> Iterator[None]:
        task = asyncio.create_task(self.run())
        try:
            yield
        finally:
            task.cancel()


@pytest.mark.parametrize("name", BODIES)
async def test_a_hostile_body_causes_no_internal_error_and_no_delay(
    name: str, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    ticker = Ticker()
    with ticker.ticking(), caplog.at_level(logging.ERROR):
        for endpoint in ROUTES:
            path = (
                endpoint.path.replace("{checkpoint_id:path}", "weights/w").replace("{", "").replace("}", "")
            )
            response = await http.request(endpoint.method, path, content=BODIES[name], headers=JSON)
            assert response.status_code in {200, 204, *range(400, 500)}, (endpoint.path, response.text[:200])
            assert len(response.content) < 10_000, "an error message does not repeat the body"
    assert not [record for record in caplog.records if record.exc_info], caplog.text[:2000]
    assert ticker.longest_s < MAX_GAP_S


@pytest.mark.parametrize("element", [b"[],", b'"",', b"{},", b'{"a":1},', b"1,"])
async def test_a_compressed_body_is_refused_fast_and_in_little_memory(
    element: bytes, http: httpx.AsyncClient
) -> None:
    """Without limits, a body of six kilobytes would take ten seconds and 3.4 GiB of memory."""
    bomb = compressed(b'{"tags":[' + element * (60_000_000 // len(element)) + b"1]}")
    assert len(bomb) < 50_000
    ticker = Ticker()
    tracemalloc.start()
    try:
        with ticker.ticking():
            for path in (
                "/api/v1/create_session",
                "/api/v1/asample",
                "/v1/chat/completions",
                "/api/v1/forward",
            ):
                response = await http.post(path, content=bomb, headers=JSON | {"content-encoding": "zstd"})
                assert response.status_code == 400
                assert "limit" in response.text or "compression ratio" in response.text
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    assert ticker.longest_s < MAX_GAP_S


async def test_large_bodies_do_not_delay_other_requests(http: httpx.AsyncClient) -> None:
    tokens = b"1," * 2_000_000 + b"1"
    body = (
        b'{"base_model":"local/fake","sampling_params":{},"prompt":{"chunks":[{"tokens":[' + tokens + b"]}]}}"
    )
    completed: list[str] = []

    async def large() -> None:
        response = await http.post("/api/v1/asample", content=body, headers=JSON)
        assert "exceeds the model's context window" in response.text
        completed.append("large")

    async def small() -> None:
        await asyncio.sleep(0)
        assert (await http.get("/api/v1/healthz")).status_code == 200
        completed.append("small")

    await asyncio.gather(large(), small())
    assert completed == ["small", "large"]


def hostile_protobufs() -> Iterator[bytes]:
    yield b"\x1a\x00" * 500_000  # empty datums
    yield b"\x1a\x84\x80\x08" + b"\x0a\x00" * 65_538  # one datum with 65,538 empty chunks
    yield b"\x1a\x84\x80\x20" + b"\x0a\x00" * 262_146  # one datum with 262,146 empty chunks
    yield b"\x78\x01" * 500_000  # unknown fields
    yield b"\x2a\x00" * 500_000  # empty entries of a map
    yield b"\x1a\xff\xff\xff\xff\x0f" + b"a" * 100_000  # a datum whose stated length exceeds the body
    yield b"\x0b" * 200_000  # groups without an end
    yield b"\xff" * 200_000  # an integer without an end


@pytest.mark.parametrize("body", list(hostile_protobufs()), ids=range(8))
async def test_a_hostile_protobuf_is_refused_without_blocking_the_loop(
    body: bytes, http: httpx.AsyncClient
) -> None:
    ticker = Ticker()
    with ticker.ticking():
        response = await http.post("/api/v1/forward_backward", content=body, headers=PROTO)
    assert response.status_code == 400 and "internal error" not in response.text
    assert ticker.longest_s < MAX_GAP_S


PARSERS: dict[str, Callable[[bytes], object]] = {
    "asample": lambda body: parse_sample(parse_json(body, DATA_BOUNDS), LIMITS),
    "forward": lambda body: parse_training_json(parse_json(body, DATA_BOUNDS), LIMITS, forward_only=True),
    "forward_backward": lambda body: parse_training_proto(body, LIMITS),
    "chat": lambda body: parse_chat(parse_json(body, DATA_BOUNDS), LIMITS),
    "completions": lambda body: parse_completion(parse_json(body, DATA_BOUNDS), LIMITS),
}


@pytest.mark.parametrize("name", [name for name, body in BODIES.items() if len(body) < 2 << 20])
@pytest.mark.parametrize("route", PARSERS)
def test_a_parser_raises_only_user_errors(route: str, name: str) -> None:
    with pytest.raises(UserError):
        PARSERS[route](BODIES[name])


def test_a_long_string_among_numbers_does_not_widen_the_array() -> None:
    """numpy would give every element the width of the longest string."""
    body = json.dumps(
        {"prompt": {"chunks": [{"tokens": [1] * 20_000 + ["x" * 500_000]}]}, "sampling_params": {}}
    ).encode()
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="flat list of integers"):
            PARSERS["asample"](body)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("body", "exceeded_limit"),
    [
        (b"[" * 5 + b"]" * 5, "levels"),
        (b"[1,2,3,4,5,6,7,8,9,10,11]", "values"),
        (b"[[],[],[],[],[],[]]", "lists and objects"),
        (b'["a","b","c","d","e","f","g","h","i"]', "strings"),
        (b'["[[[[[[[[[[[[[[,,,,,,,,,,,,"]', None),
        (b'["\\"\\"\\"\\"\\"\\"\\"\\"\\"\\"\\"\\"\\"\\"\\"\\"\\"\\"\\"\\"\\"\\""]', None),
        (b"[1,2,3,4,5,6,7,8,9,10]", None),
    ],
)
def test_limits_count_parsed_values_and_not_string_contents(body: bytes, exceeded_limit: str | None) -> None:
    bounds = JsonBounds(values=10, strings=8, containers=6, depth=4)
    if exceeded_limit is None:
        assert parse_json(body, bounds) == json.loads(body)
    else:
        with pytest.raises(UserError, match=exceeded_limit):
            parse_json(body, bounds)


def test_a_compression_bomb_is_refused_and_training_data_is_not() -> None:
    data = bytes(range(256)) * 4096
    assert decompress(compressed(data[: 1 << 19]), 1 << 20) == data[: 1 << 19]
    with pytest.raises(UserError, match="compression ratio of the body is above 200"):
        decompress(compressed(bytes(50 << 20)), 64 << 20)


def test_control_routes_accept_a_mebibyte_at_most() -> None:
    larger = {endpoint.path for endpoint in ENDPOINTS if endpoint.body.max_bytes > CONTROL_BODY.max_bytes}
    assert CONTROL_BODY.max_bytes == 1 << 20
    assert larger == {
        "/api/v1/forward_backward",
        "/api/v1/forward",
        "/api/v1/asample",
        "/v1/chat/completions",
        "/v1/completions",
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tags": ["t"] * 65}, "at most 64"),
        ({"tags": ["t" * 257]}, "256 characters"),
        ({"tags": [[]]}, "must be strings"),
        ({"user_metadata": {f"k{i}": "v" for i in range(65)}}, "at most 64"),
        ({"user_metadata": {"k" * 129: "v"}}, "too long a name"),
        ({"user_metadata": {"k": "v" * (16 << 10)}}, "at most 16384"),
        ({"user_metadata": {"k": {"a": 1}}}, "must be a string"),
        ({"display_name": "n" * 257}, "at most 256"),
    ],
)
async def test_the_size_of_session_fields_is_limited(
    body: dict[str, object], message: str, http: httpx.AsyncClient
) -> None:
    response = await http.post("/api/v1/create_session", json=body)
    assert (response.status_code, message in response.json()["detail"]) == (400, True), response.text


async def test_session_metadata_within_the_limits_is_stored(http: httpx.AsyncClient) -> None:
    metadata = {f"k{i:02}": "v" * 200 for i in range(64)}
    session = (
        await http.post("/api/v1/create_session", json={"tags": ["t" * 256], "user_metadata": metadata})
    ).json()["session_id"]
    assert (await http.get(f"/api/v1/sessions/{session}")).json()["user_metadata"] == metadata


async def test_bytes_in_flight_are_limited_and_released() -> None:
    bodies, entered = BodyReader(max_bytes=100 // BODIES_IN_FLIGHT), []

    async def hold(name: str, num_bytes: int, release: asyncio.Event) -> None:
        async with bodies.reserve(num_bytes):
            entered.append(name)
            await release.wait()

    releases = {name: asyncio.Event() for name in "abcd"}
    tasks = [
        asyncio.create_task(hold(name, size, releases[name]))
        for name, size in zip("abcd", (60, 60, 40, 1000), strict=True)
    ]
    await asyncio.sleep(0)
    assert entered == ["a"] and bodies.used_bytes == 60, (
        "a smaller reservation does not overtake an earlier one"
    )
    tasks[1].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert entered == ["a", "c"]
    releases["a"].set()
    releases["c"].set()
    releases["d"].set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert entered == ["a", "c", "d"] and bodies.used_bytes == 0


async def test_tenants_divide_the_memory_for_bodies() -> None:
    bodies = BodyReader(max_bytes=100, stalled_s=0.01)
    tenants = [bodies.share(2 * BODIES_IN_FLIGHT) for _ in range(2 * BODIES_IN_FLIGHT)]
    async with AsyncExitStack() as reserved:
        for tenant in tenants[:BODIES_IN_FLIGHT]:
            await reserved.enter_async_context(tenant.reserve(60))
            with pytest.raises(CapacityError):  # a tenant has memory for one body of maximum size
                await reserved.enter_async_context(tenant.reserve(60))
        with pytest.raises(CapacityError):
            for tenant in tenants[BODIES_IN_FLIGHT:]:
                await reserved.enter_async_context(tenant.reserve(100))
        assert bodies.used_bytes == sum(tenant.used_bytes for tenant in tenants) <= 100 * BODIES_IN_FLIGHT
    assert bodies.used_bytes == sum(tenant.used_bytes for tenant in tenants) == 0


async def test_a_body_that_waits_too_long_for_memory_is_refused() -> None:
    bodies = BodyReader(max_bytes=100, stalled_s=0.01)
    async with bodies.reserve(BODIES_IN_FLIGHT * 100):
        with pytest.raises(CapacityError, match="try again later"):
            async with bodies.reserve(1):
                raise AssertionError("the reservation must time out")
    assert bodies.used_bytes == 0


async def test_a_slow_body_is_refused_although_it_never_pauses(tmp_path: Path) -> None:
    context = replace(fake_context(tmp_path), bodies=BodyReader(stalled_s=0.2))

    async def slow_body() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    transport = httpx.ASGITransport(build_app(StartupState(state=context)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http, asyncio.timeout(30):
        response = await http.post("/api/v1/asample", content=slow_body(), headers=JSON)
    assert (response.status_code, "on average" in response.text) == (400, True)
    assert context.bodies.used_bytes == 0
    fake_engine(context).stop()

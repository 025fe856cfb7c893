"""The hostile side of `hostile.py`, a process of its own: python -m scripts.bench.hostile_requests URL SECONDS RATE SEED

Fires RATE attacks a second, drawn from ATTACKS, at most MAX_UNDER_WAY at once. Prints one JSON line per finished minute and one at the
end: how often each attack was made, which statuses answered, and every answer that a sound server never gives (`faults`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx
import numpy as np
import zstandard

from skyrl_tx_server.proto import tinker_wire_pb2 as pb

MAX_UNDER_WAY = 400
BURST = 2000
BURST_EVERY_S = 180.0
ANSWER_WITHIN_S = 120.0
VOCABULARY = 640
PROTOBUF = {"content-type": "application/x-protobuf"}
JSON = {"content-type": "application/json"}
NASTY: tuple[object, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    -(2**31) - 1,
    2**63,
    2**70,
    -(2**70),
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "x" * 5000,
    "\x00",
    "\ud800",
    "../../etc/passwd",
    "tinker://a/weights/b",
    "tinker://../../x",
    "session-0",
    [],
    {},
    [[]],
    [None],
    {"": {}},
    [1, "a"],
    [-1],
    [2**40],
    [1.5],
    [[1], [2]],
    {"chunks": 3},
    {"type": "image"},
    "💥" * 40,
)
ROUTES = (
    "create_session",
    "session_heartbeat",
    "create_model",
    "get_info",
    "forward",
    "forward_backward",
    "optim_step",
    "unload_model",
    "save_weights",
    "save_weights_for_sampler",
    "load_weights",
    "weights_info",
    "create_sampling_session",
    "asample",
    "retrieve_future",
    "cancel_future",
    "telemetry",
    "save_weights_external",
    "copy_weights",
)


@dataclass(kw_only=True, slots=True)
class Tenant:
    """A session that attacks may use, mistreat and abandon."""

    session_id: str
    model_id: str
    sampler_id: str
    seq_id: int = 0

    def next_seq(self) -> int:
        self.seq_id += 1
        return self.seq_id


@dataclass(kw_only=True, slots=True)
class World:
    http: httpx.AsyncClient
    host: str
    port: int
    random: random.Random
    tenant: Tenant | None = None
    attacks: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def post(self, route: str, body: object) -> Awaitable[httpx.Response]:
        return self.send("POST", f"/api/v1/{route}", content=json.dumps(body).encode("utf-8", "replace"), headers=JSON)

    async def send(self, method: str, path: str, **rest: object) -> httpx.Response:
        """One whole request. A 5xx, an internal error and silence are faults; everything else is an answer."""
        response = await self.http.request(method, path, **rest)  # pyright: ignore[reportArgumentType]
        self.saw(f"{method} {path}", response.status_code, response.text[:2000] if response.status_code != 200 else "")
        return response

    def saw(self, what: str, status: int, text: str) -> None:
        self.statuses[str(status)] += 1
        if status >= 500 or "internal error" in text:
            self.fault(f"{what}: {status} {text[:300]}")

    def fault(self, text: str) -> None:
        if len(self.faults) < 200:
            self.faults.append(text)

    async def outcome(self, request_id: str) -> dict[str, object]:
        """A future, polled to its end. An operation that raised what nobody meant it to raise is a fault."""
        while True:
            response = await self.post("retrieve_future", {"request_id": request_id})
            if response.status_code == 408:
                continue
            body: dict[str, object] = response.json() if response.status_code == 200 else {"error": response.text}
            if "failed in the engine" in str(body.get("error", "")) or "failed on the server" in str(body.get("error", "")):
                self.fault(f"future {request_id}: {str(body)[:300]}")
            return body

    async def made(self, route: str, body: object) -> dict[str, object]:
        response = await self.post(route, body)
        return await self.outcome(response.json()["request_id"]) if response.status_code == 200 else {"error": response.text}


# --- valid bodies, to be mutated --------------------------------------------------------------------------------


async def new_tenant(world: World) -> Tenant:
    session_id = (await world.post("create_session", {"tags": [], "user_metadata": {}})).json()["session_id"]
    lora = {"rank": world.random.choice((1, 4, 8)), "seed": world.random.randrange(2**31)}
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "local/quickstart", "lora_config": lora}
    await world.made("create_model", body)
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "local/quickstart"}
    await world.post("create_sampling_session", sampler)
    return Tenant(session_id=session_id, model_id=f"{session_id}:train:0", sampler_id=f"{session_id}:sample:0")


async def tenant_of(world: World) -> Tenant:
    if world.tenant is None or world.random.random() < 0.01:
        world.tenant = await new_tenant(world)
    return world.tenant


def tokens(world: World, count: int | None = None) -> list[int]:
    return [world.random.randrange(VOCABULARY) for _ in range(count or world.random.choice((1, 3, 20, 60, 200)))]


def training_json(world: World, tenant: Tenant) -> dict[str, object]:
    ids = tokens(world)
    inputs = {"target_tokens": {"data": ids, "dtype": "int64"}, "weights": {"data": [1.0] * len(ids), "dtype": "float32"}}
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": ids}]}, "loss_fn_inputs": inputs}
    inner = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"model_id": tenant.model_id, "seq_id": tenant.next_seq(), "forward_backward_input": inner}


def training_proto(world: World, tenant: Tenant) -> pb.ForwardBackwardRequest:
    ids = np.array(tokens(world), np.int32)
    loss = world.random.choice(("cross_entropy", "importance_sampling", "ppo", "cispo", "dro"))
    request = pb.ForwardBackwardRequest(model_id=tenant.model_id, seq_id=tenant.next_seq(), loss_fn=loss)
    request.forward_only = world.random.random() < 0.3
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = ids.tobytes()
    floats = ("weights",) if loss == "cross_entropy" else ("logprobs", "advantages")
    datum.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(dtype=pb.DTYPE_INT64, dense=ids.astype("<i8").tobytes()))
    for name in floats:
        scale = world.random.choice((1.0, 1.0, 1e10, -1e38))
        values = np.full(len(ids), -scale if name == "logprobs" else scale, np.float32)
        datum.loss_fn_inputs[name].CopyFrom(pb.Tensor(dtype=pb.DTYPE_FLOAT32, dense=values.tobytes()))
    return request


def sample_json(world: World, tenant: Tenant, **changes: object) -> dict[str, object]:
    settings: dict[str, object] = {"max_tokens": world.random.randrange(1, 12), "temperature": world.random.choice((0.0, 0.7, 1.0))}
    if world.random.random() < 0.3:
        settings |= {"top_k": 5, "top_p": 0.9, "seed": world.random.randrange(99), "stop": ["a", "}"]}
    body: dict[str, object] = {
        "sampling_session_id": tenant.sampler_id,
        "seq_id": tenant.next_seq(),
        "num_samples": world.random.randrange(1, 4),
    }
    body |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens(world)}]}, "sampling_params": settings}
    if world.random.random() < 0.1:
        body |= {"topk_prompt_logprobs": 4} if world.random.random() < 0.5 else {"topk_sample_logprobs": 4}
    if world.random.random() < 0.1:
        body["prompt_logprobs"] = True
    return body | changes


def chat_json(world: World) -> dict[str, object]:
    messages = [{"role": "user", "content": "".join(world.random.choice("ab \n<|im_end|>é💥") for _ in range(30))}]
    return {
        "model": "local/quickstart",
        "messages": messages,
        "max_tokens": world.random.randrange(1, 12),
        "stream": world.random.random() < 0.5,
    }


def mutated_json(world: World, value: object) -> object:
    """`value` with one place in it replaced, removed, renamed or doubled."""
    draw = world.random
    if isinstance(value, dict) and value and draw.random() < 0.85:
        name = draw.choice(list(value))
        match draw.randrange(8):
            case 0:
                return {key: entry for key, entry in value.items() if key != name}
            case 1:
                return value | {str(draw.choice(NASTY))[:50]: draw.choice(NASTY)}
            case _:
                return value | {name: mutated_json(world, value[name])}
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [*value[:at], mutated_json(world, value[at]), *value[at + draw.choice((0, 1, 1)) :]]
    return draw.choice(NASTY)


def mutated_bytes(world: World, body: bytes) -> bytes:
    draw, made = world.random, bytearray(body)
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        at = draw.randrange(len(made) + 1)
        match draw.randrange(4):
            case 0 if at < len(made):
                made[at] ^= 1 << draw.randrange(8)
            case 1:
                made[at:at] = draw.randbytes(draw.randrange(1, 9))
            case 2:
                del made[at : at + draw.randrange(1, 30)]
            case _:
                made[at : at + 4] = draw.choice((b"\xff\xff\xff\xff", b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x80\x80\x80\x80"))
    return bytes(made)


def valid_body(world: World, tenant: Tenant) -> tuple[str, object]:
    training = {"model_id": tenant.model_id, "seq_id": tenant.next_seq()}
    lora = {"rank": 4, "seed": 1, "train_mlp": True}
    bodies: dict[str, object] = {
        "asample": sample_json(world, tenant),
        "forward_backward": training_json(world, tenant),
        "optim_step": training | {"adam_params": {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}},
        "create_model": {"session_id": tenant.session_id, "model_seq_id": 0, "base_model": "local/quickstart", "lora_config": lora},
        "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}},
        "create_sampling_session": {"session_id": tenant.session_id, "sampling_session_seq_id": 0, "base_model": "local/quickstart"},
        "save_weights": training | {"path": "hostile", "overwrite": True, "ttl_seconds": 60},
        "save_weights_for_sampler": training | {"sampling_session_seq_id": world.random.randrange(1, 4)},
        "load_weights": training | {"path": f"tinker://{tenant.model_id}/weights/hostile", "optimizer": True},
        "retrieve_future": {"request_id": "asample-0"},
        "get_info": {"model_id": tenant.model_id},
        "weights_info": {"tinker_path": f"tinker://{tenant.model_id}/weights/hostile"},
        "telemetry": {"events": [], "platform": "x", "sdk_version": "0", "session_id": tenant.session_id},
    }
    route = world.random.choice(list(bodies))
    return route, bodies[route]


# --- attacks ----------------------------------------------------------------------------------------------------


async def garbage_protobuf(world: World) -> None:
    await world.send("POST", "/api/v1/forward_backward", content=world.random.randbytes(world.random.randrange(300)), headers=PROTOBUF)


async def mutated_protobuf(world: World) -> None:
    body = mutated_bytes(world, training_proto(world, await tenant_of(world)).SerializeToString())
    response = await world.send("POST", "/api/v1/forward_backward", content=body, headers=PROTOBUF)
    if response.status_code == 200:
        await world.outcome(response.json()["request_id"])


async def wild_training(world: World) -> None:
    """Well-formed steps with absurd values, on the attacker's own model."""
    tenant = await tenant_of(world)
    body = training_proto(world, tenant).SerializeToString()
    await world.send("POST", "/api/v1/forward_backward", content=body, headers=PROTOBUF)
    adam = {"learning_rate": world.random.choice((1e-3, 1e6, 1e30)), "weight_decay": world.random.choice((0.0, 1e3)), "grad_clip_norm": 1.0}
    await world.made("optim_step", {"model_id": tenant.model_id, "seq_id": tenant.next_seq(), "adam_params": adam})


async def diverged(world: World) -> None:
    """A model whose weights are absurd, sampled from until its slots are full of it."""
    tenant = await new_tenant(world)
    await world.send("POST", "/api/v1/forward_backward", content=training_proto(world, tenant).SerializeToString(), headers=PROTOBUF)
    await world.made("optim_step", {"model_id": tenant.model_id, "seq_id": tenant.next_seq(), "adam_params": {"learning_rate": 1e30}})
    snapshot = {"model_id": tenant.model_id, "seq_id": tenant.next_seq(), "sampling_session_seq_id": 1}
    await world.post("save_weights_for_sampler", snapshot)
    sampler = f"{tenant.session_id}:sample:1"
    await world.made("asample", sample_json(world, tenant, sampling_session_id=sampler, num_samples=16))
    await world.send("POST", f"/api/v1/sessions/{tenant.session_id}/finish", content=b"{}", headers=JSON)


async def garbage_json(world: World) -> None:
    text = world.random.choice(
        (b"{", b"[" * 5000, b"nul", b"\xff\xfe{}", b'{"a":1}' * 2, b'{"a":' * 900, b"1e999", b"NaN", b'"\\ud800"', b"[]", b"3")
    )
    await world.send("POST", f"/api/v1/{world.random.choice(ROUTES)}", content=text, headers=JSON)


async def mutated_request(world: World) -> None:
    route, body = valid_body(world, await tenant_of(world))
    if route in ("create_model", "save_weights", "load_weights") and world.random.random() < 0.8:
        return await garbage_json(world)
    response = await world.post(route, mutated_json(world, body))
    if response.status_code == 200 and "request_id" in response.json() and world.random.random() < 0.5:
        await world.outcome(response.json()["request_id"])


async def compressed(world: World) -> None:
    draw = world.random
    plain = json.dumps(sample_json(world, await tenant_of(world))).encode()
    packed = zstandard.ZstdCompressor().compress(plain)
    bodies = (
        draw.randbytes(40),
        packed[: len(packed) // 2],
        mutated_bytes(world, packed),
        packed,
        zstandard.ZstdCompressor().compress(bytes(200 << 20)),
    )
    encoding = draw.choice(("zstd", "zstd", "zstd", "gzip", "br", "zstd, zstd", ""))
    await world.send("POST", "/api/v1/asample", content=draw.choice(bodies), headers=JSON | {"content-encoding": encoding})


async def wrong_types_and_paths(world: World) -> None:
    draw = world.random
    method = draw.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"))
    path = draw.choice(
        (
            "/",
            "/api/v1/nothing",
            "/api/v1/asample",
            "/v1/models/%00",
            "/v1/models/..%2f..",
            "/api/v1/training_runs/%2e%2e/checkpoints",
            "/api/v1/training_runs?limit=999999999999&offset=-1",
            "/api/v1/training_runs?limit=9",
            "/api/v1/checkpoints?limit=x",
            "/metrics",
            "/api/v1/samplers/%F0%9F%92%A5",
            "/api/v1/training_runs/a/checkpoints/weights/..%2f..%2fledger.jsonl",
        )
    )
    kind = draw.choice(("text/plain", "application/x-protobuf", "application/json; charset=utf-16", "multipart/form-data", "\x7f"))
    await world.send(method, path, content=draw.randbytes(20), headers={"content-type": kind})


async def oversize(world: World) -> None:
    await world.send("POST", f"/api/v1/{world.random.choice(ROUTES)}", content=bytes(9 << 20), headers=JSON)


async def out_of_range(world: World) -> None:
    tenant = await tenant_of(world)
    bad = world.random.choice(([-1], [VOCABULARY], [2**31], [2**63], [1.5], ["a"], [True, None], []))
    await world.post(
        "asample", sample_json(world, tenant, prompt={"chunks": [{"type": "encoded_text", "tokens": [1, *bad] if bad else []}]})
    )
    request = training_proto(world, tenant)
    request.data[0].model_input[0].encoded_text.tokens = np.array([1, world.random.choice((-1, VOCABULARY, 2**31 - 1))], np.int32).tobytes()
    await world.send("POST", "/api/v1/forward_backward", content=request.SerializeToString(), headers=PROTOBUF)


async def duplicates_and_reordered(world: World) -> None:
    tenant = await tenant_of(world)
    first, second = sample_json(world, tenant), sample_json(world, tenant)
    replies = await asyncio.gather(*(world.post("asample", body) for body in (second, first, second, first, first)))
    ids = [reply.json()["request_id"] for reply in replies if reply.status_code == 200]
    if len(ids) == 5 and not (ids[0] == ids[2] and ids[1] == ids[3] == ids[4]):
        world.fault(f"a request sent twice ran twice: {ids}")
    await world.post("optim_step", {"model_id": tenant.model_id, "seq_id": tenant.seq_id, "adam_params": {}})
    await asyncio.gather(*(world.outcome(request_id) for request_id in ids))


async def cancelled(world: World) -> None:
    replies = [await world.post("asample", sample_json(world, await tenant_of(world))) for _ in range(3)]
    ids = [reply.json()["request_id"] for reply in replies if reply.status_code == 200] + ["sample-unknown"]
    for request_id in (*ids, *ids):
        await world.post("cancel_future", {"request_id": request_id})
    await asyncio.gather(*(world.outcome(request_id) for request_id in ids))


async def fire_and_forget(world: World) -> None:
    """Results nobody comes for, of a session and of none."""
    body = sample_json(world, await tenant_of(world))
    if world.random.random() < 0.3:
        body = {name: value for name, value in body.items() if name not in ("sampling_session_id", "seq_id")} | {
            "base_model": "local/quickstart"
        }
    await world.post("asample", body)


async def abandoned_session(world: World) -> None:
    tenant = await new_tenant(world)
    for _ in range(2):
        await world.send("POST", "/api/v1/forward_backward", content=training_proto(world, tenant).SerializeToString(), headers=PROTOBUF)
    snapshot = {"model_id": tenant.model_id, "seq_id": tenant.next_seq(), "sampling_session_seq_id": 1}
    await world.post("save_weights_for_sampler", snapshot)
    await world.post("asample", sample_json(world, tenant, sampling_session_id=f"{tenant.session_id}:sample:1"))
    if world.random.random() < 0.5:
        await world.send("POST", f"/api/v1/sessions/{tenant.session_id}/finish", content=b"{}", headers=JSON)


async def checkpoints(world: World) -> None:
    tenant = await tenant_of(world)
    name = world.random.choice(("hostile", "..", "a/b", "x" * 300, "", "\x00", "é", "hostile-2"))
    saved = await world.made(
        "save_weights", {"model_id": tenant.model_id, "seq_id": tenant.next_seq(), "path": name, "overwrite": True, "ttl_seconds": 60}
    )
    path = str(saved.get("path") or "tinker://a/weights/b")
    await world.made("load_weights", {"model_id": tenant.model_id, "seq_id": tenant.next_seq(), "path": path})
    await world.made(
        "load_weights",
        {"model_id": tenant.model_id, "seq_id": tenant.next_seq(), "path": world.random.choice(("tinker://", path + "x", path[:-3]))},
    )
    await asyncio.gather(*(world.send("DELETE", f"/api/v1/training_runs/{tenant.model_id}/checkpoints/weights/hostile") for _ in range(2)))


async def openai_doors(world: World) -> None:
    body = chat_json(world)
    if world.random.random() < 0.5:
        body = {"model": "local/quickstart", "prompt": tokens(world), "max_tokens": 4, "n": 2}
    mutated = mutated_json(world, body) if world.random.random() < 0.6 else body
    path = "/v1/chat/completions" if world.random.random() < 0.6 else "/v1/completions"
    await world.send("POST", path, content=json.dumps(mutated).encode("utf-8", "replace"), headers=JSON)


async def stream_left(world: World) -> None:
    body = json.dumps(chat_json(world) | {"stream": True, "max_tokens": 300}).encode()
    async with world.http.stream("POST", "/v1/chat/completions", content=body, headers=JSON) as response:
        world.statuses[f"{response.status_code} left"] += 1
        async for _ in response.aiter_bytes():
            break


async def half_open_poll(world: World) -> None:
    reply = await world.post("asample", sample_json(world, await tenant_of(world)))
    request_id = reply.json().get("request_id", "x") if reply.status_code == 200 else "x"
    body = json.dumps({"request_id": request_id}).encode()
    await _raw(world, _post("retrieve_future", len(body)) + body, then=_reset if world.random.random() < 0.5 else _linger)


async def dies_mid_chunk(world: World) -> None:
    body = training_proto(world, await tenant_of(world)).SerializeToString()
    head = _post("forward_backward", len(body), kind=PROTOBUF["content-type"])
    await _raw(world, head + body[: world.random.randrange(len(body))], then=_reset)


async def slowloris(world: World) -> None:
    """A byte every other second, then gone."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(world.random.randrange(3, 15)):
            await asyncio.sleep(2)
            writer.write(b"a")
            await writer.drain()

    await _raw(world, world.random.choice((_post("asample", 50), b"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nX-")), then=drip)


async def broken_http(world: World) -> None:
    draw = world.random
    head = b"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\n"
    text = draw.choice(
        (
            draw.randbytes(400),
            b"\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            head + b"Content-Length: -5\r\n\r\n",
            head + b"Content-Length: 99999999999999999999\r\n\r\nx",
            head + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nabc\r\n0\r\n\r\n",
            head + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n1\r\na\r\n0\r\n\r\n",
            head + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
            head + b"\x00\xff: 1\r\n\r\n",
        )
    )
    await _raw(world, text, then=_linger)


def _post(route: str, length: int, *, kind: str = "application/json") -> bytes:
    return f"POST /api/v1/{route} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n".encode()


async def _raw(world: World, data: bytes, *, then: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
    """Bytes on a bare connection; that the server hangs up on them is its right, that it cannot be reached is a fault."""
    reader, writer = await asyncio.open_connection(world.host, world.port)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
            await then(reader, writer)
        world.statuses["raw"] += 1
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            await asyncio.wait_for(writer.wait_closed(), 5)


async def _reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Gone without a goodbye: RST instead of FIN."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reader.read(1000), 3)


async def burst(world: World) -> None:
    """2,000 samples at once; every one of them must come back."""
    tenant = await new_tenant(world)
    settings = {"max_tokens": 2, "temperature": 1.0}

    async def one(index: int) -> None:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [index % VOCABULARY, 5, 6, 7]}]}
        body = {"sampling_session_id": tenant.sampler_id, "seq_id": index, "num_samples": 1, "prompt": prompt, "sampling_params": settings}
        result = await world.made("asample", body)
        if "sequences" not in result:
            world.fault(f"burst: sample {index} failed: {str(result)[:200]}")

    await asyncio.gather(*(one(index) for index in range(BURST)))
    await world.send("POST", f"/api/v1/sessions/{tenant.session_id}/finish", content=b"{}", headers=JSON)


ATTACKS: tuple[Callable[[World], Awaitable[None]], ...] = (
    garbage_protobuf,
    mutated_protobuf,
    mutated_protobuf,
    mutated_protobuf,
    wild_training,
    diverged,
    garbage_json,
    mutated_request,
    mutated_request,
    mutated_request,
    mutated_request,
    compressed,
    wrong_types_and_paths,
    oversize,
    out_of_range,
    duplicates_and_reordered,
    cancelled,
    fire_and_forget,
    abandoned_session,
    checkpoints,
    openai_doors,
    openai_doors,
    stream_left,
    half_open_poll,
    dies_mid_chunk,
    slowloris,
    broken_http,
)


# --- the run ----------------------------------------------------------------------------------------------------


async def attack(world: World, make: Callable[[World], Awaitable[None]], slots: asyncio.Semaphore) -> None:
    async with slots:
        world.attacks[make.__name__] += 1
        try:
            async with asyncio.timeout(4 * ANSWER_WITHIN_S):
                await make(world)
        except (httpx.InvalidURL, httpx.LocalProtocolError):
            world.statuses["not sent"] += 1  # the client library would not put it on the wire
        except (httpx.RemoteProtocolError, httpx.WriteError, httpx.ReadError) as error:
            world.statuses[f"hung up {type(error).__name__}"] += 1
        except Exception as error:
            world.fault(f"{make.__name__}: {type(error).__name__}: {error}")


def report(world: World) -> None:
    print(json.dumps({"attacks": world.attacks, "statuses": world.statuses, "faults": world.faults}), flush=True)


async def main(url: str, seconds: float, rate: float, seed: int) -> None:
    address = httpx.URL(url)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_WITHIN_S, limits=limits) as http:
        world = World(http=http, host=address.host, port=address.port or 80, random=random.Random(seed))
        slots, began, made = asyncio.Semaphore(MAX_UNDER_WAY), time.monotonic(), 0
        next_burst, next_report = began + 10, began + 60
        async with asyncio.TaskGroup() as tasks:
            while (now := time.monotonic()) < began + seconds:
                if now >= next_burst:
                    next_burst += BURST_EVERY_S
                    tasks.create_task(attack(world, burst, slots))
                if now >= next_report:
                    next_report += 60
                    report(world)
                tasks.create_task(attack(world, world.random.choice(ATTACKS), slots))
                made += 1
                await asyncio.sleep(max(0.0, began + made / rate - time.monotonic()))
        report(world)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))

"""Sends the attacks of `hostile`, which runs this program in a separate process.

    python -m tests.stress.hostile_requests URL SECONDS RATE SEED

The program starts RATE attacks per second, which it draws from ATTACKS, and one `burst` every BURST_EVERY_S
seconds. At most MAX_UNDER_WAY attacks run at a time. Once per minute and at the end the program prints a JSON
object: the number of attacks of each kind (`attacks`), the number of requests by outcome (`statuses`), and
events that a correct server never causes (`faults`, at most 200).
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
from collections.abc import Awaitable, Callable
from dataclasses import replace

import httpx
import numpy as np
import zstandard

from tests.fakes.bodies import ROUTES
from tests.stress.hostile_world import (
    ANSWER_WITHIN_S,
    JSON,
    PROTOBUF,
    VOCABULARY,
    AttackSession,
    World,
    chat_json,
    mutated_bytes,
    mutated_json,
    new_session,
    sample_json,
    session_of,
    tokens,
    training_proto,
    valid_body,
)

MAX_UNDER_WAY = 400
BURST = 2000
BURST_PART = 100
UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=200)
BURST_EVERY_S = 180.0


async def garbage_protobuf(world: World) -> None:
    await world.send(
        "POST",
        "/api/v1/forward_backward",
        content=world.random.randbytes(world.random.randrange(300)),
        headers=PROTOBUF,
    )


async def mutated_protobuf(world: World) -> None:
    body = mutated_bytes(world, training_proto(world, await session_of(world)).SerializeToString())
    response = await world.send("POST", "/api/v1/forward_backward", content=body, headers=PROTOBUF)
    if response.status_code == 200:
        await world.outcome(response.json()["request_id"])


async def wild_training(world: World) -> None:
    """Sends well-formed training requests with extreme values for the attacker's own model."""
    session = await session_of(world)
    body = training_proto(world, session).SerializeToString()
    await world.send("POST", "/api/v1/forward_backward", content=body, headers=PROTOBUF)
    adam = {
        "learning_rate": world.random.choice((1e-3, 1e6, 1e30)),
        "weight_decay": world.random.choice((0.0, 1e3)),
        "grad_clip_norm": 1.0,
    }
    await world.post_and_wait(
        "optim_step", {"model_id": session.model_id, "seq_id": session.next_seq(), "adam_params": adam}
    )


async def diverged(world: World) -> None:
    """Tries to make the weights of a model diverge, and requests 16 samples from the model."""
    session = await new_session(world)
    await world.send(
        "POST",
        "/api/v1/forward_backward",
        content=training_proto(world, session).SerializeToString(),
        headers=PROTOBUF,
    )
    await world.post_and_wait(
        "optim_step",
        {"model_id": session.model_id, "seq_id": session.next_seq(), "adam_params": {"learning_rate": 1e30}},
    )
    snapshot = {"model_id": session.model_id, "seq_id": session.next_seq(), "sampling_session_seq_id": 1}
    await world.post("save_weights_for_sampler", snapshot)
    sampler = f"{session.session_id}:sample:1"
    await world.post_and_wait(
        "asample", sample_json(world, session, sampling_session_id=sampler, num_samples=16)
    )
    await world.send("POST", f"/api/v1/sessions/{session.session_id}/finish", content=b"{}", headers=JSON)


async def garbage_json(world: World) -> None:
    text = world.random.choice(
        (
            b"{",
            b"[" * 5000,
            b"nul",
            b"\xff\xfe{}",
            b'{"a":1}' * 2,
            b'{"a":' * 900,
            b"1e999",
            b"NaN",
            b'"\\ud800"',
            b"[]",
            b"3",
        )
    )
    await world.send("POST", f"/api/v1/{world.random.choice(ROUTES)}", content=text, headers=JSON)


async def mutated_request(world: World) -> None:
    route, body = valid_body(world, await session_of(world))
    if route in ("create_model", "save_weights", "load_weights") and world.random.random() < 0.8:
        return await garbage_json(world)
    response = await world.post(route, mutated_json(world, body))
    if response.status_code == 200 and "request_id" in response.json() and world.random.random() < 0.5:
        await world.outcome(response.json()["request_id"])


async def compressed(world: World) -> None:
    rng = world.random
    plain = json.dumps(sample_json(world, await session_of(world))).encode()
    packed = zstandard.ZstdCompressor().compress(plain)
    bodies = (
        rng.randbytes(40),
        packed[: len(packed) // 2],
        mutated_bytes(world, packed),
        packed,
        zstandard.ZstdCompressor().compress(bytes(200 << 20)),
    )
    encoding = rng.choice(("zstd", "zstd", "zstd", "gzip", "br", "zstd, zstd", ""))
    await world.send(
        "POST", "/api/v1/asample", content=rng.choice(bodies), headers=JSON | {"content-encoding": encoding}
    )


async def wrong_types_and_paths(world: World) -> None:
    rng = world.random
    method = rng.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"))
    path = rng.choice(
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
    content_type = rng.choice(
        (
            "text/plain",
            "application/x-protobuf",
            "application/json; charset=utf-16",
            "multipart/form-data",
            "\x7f",
        )
    )
    await world.send(method, path, content=rng.randbytes(20), headers={"content-type": content_type})


async def oversize(world: World) -> None:
    await world.send("POST", f"/api/v1/{world.random.choice(ROUTES)}", content=bytes(9 << 20), headers=JSON)


async def out_of_range(world: World) -> None:
    session = await session_of(world)
    bad = world.random.choice(([-1], [VOCABULARY], [2**31], [2**63], [1.5], ["a"], [True, None], []))
    await world.post(
        "asample",
        sample_json(
            world, session, prompt={"chunks": [{"type": "encoded_text", "tokens": [1, *bad] if bad else []}]}
        ),
    )
    request = training_proto(world, session)
    request.data[0].model_input[0].encoded_text.tokens = np.array(
        [1, world.random.choice((-1, VOCABULARY, 2**31 - 1))], np.int32
    ).tobytes()
    await world.send(
        "POST", "/api/v1/forward_backward", content=request.SerializeToString(), headers=PROTOBUF
    )


async def duplicates_and_reordered(world: World) -> None:
    session = await session_of(world)
    first, second = sample_json(world, session), sample_json(world, session)
    replies = await asyncio.gather(
        *(world.post("asample", body) for body in (second, first, second, first, first))
    )
    ids = [reply.json()["request_id"] for reply in replies if reply.status_code == 200]
    if len(ids) == 5 and not (ids[0] == ids[2] and ids[1] == ids[3] == ids[4]):
        world.fault(f"the server ran a repeated request twice: {ids}")
    await world.post(
        "optim_step", {"model_id": session.model_id, "seq_id": session.seq_id, "adam_params": {}}
    )
    await asyncio.gather(*(world.outcome(request_id) for request_id in ids))


async def cancelled(world: World) -> None:
    replies = [await world.post("asample", sample_json(world, await session_of(world))) for _ in range(3)]
    ids = [reply.json()["request_id"] for reply in replies if reply.status_code == 200] + ["sample-unknown"]
    for request_id in (*ids, *ids):
        await world.post("cancel_future", {"request_id": request_id})
    await asyncio.gather(*(world.outcome(request_id) for request_id in ids))


async def fire_and_forget(world: World) -> None:
    """Requests samples, with or without a sampling session, and never retrieves the results."""
    body = sample_json(world, await session_of(world))
    if world.random.random() < 0.3:
        body = {
            name: value for name, value in body.items() if name not in ("sampling_session_id", "seq_id")
        } | {"base_model": "local/quickstart"}
    await world.post("asample", body)


async def abandoned_session(world: World) -> None:
    """Sends requests in a new session and retrieves no results. Finishes the session in half of the cases."""
    session = await new_session(world)
    for _ in range(2):
        await world.send(
            "POST",
            "/api/v1/forward_backward",
            content=training_proto(world, session).SerializeToString(),
            headers=PROTOBUF,
        )
    snapshot = {"model_id": session.model_id, "seq_id": session.next_seq(), "sampling_session_seq_id": 1}
    await world.post("save_weights_for_sampler", snapshot)
    await world.post(
        "asample", sample_json(world, session, sampling_session_id=f"{session.session_id}:sample:1")
    )
    if world.random.random() < 0.5:
        await world.send("POST", f"/api/v1/sessions/{session.session_id}/finish", content=b"{}", headers=JSON)


async def checkpoints(world: World) -> None:
    session = await session_of(world)
    name = world.random.choice(("hostile", "..", "a/b", "x" * 300, "", "\x00", "é", "hostile-2"))
    saved = await world.post_and_wait(
        "save_weights",
        {
            "model_id": session.model_id,
            "seq_id": session.next_seq(),
            "path": name,
            "overwrite": True,
            "ttl_seconds": 60,
        },
    )
    path = str(saved.get("path") or "tinker://a/weights/b")
    await world.post_and_wait(
        "load_weights", {"model_id": session.model_id, "seq_id": session.next_seq(), "path": path}
    )
    await world.post_and_wait(
        "load_weights",
        {
            "model_id": session.model_id,
            "seq_id": session.next_seq(),
            "path": world.random.choice(("tinker://", path + "x", path[:-3])),
        },
    )
    await asyncio.gather(
        *(
            world.send("DELETE", f"/api/v1/training_runs/{session.model_id}/checkpoints/weights/hostile")
            for _ in range(2)
        )
    )


async def openai_routes(world: World) -> None:
    body = chat_json(world)
    if world.random.random() < 0.5:
        body = {"model": "local/quickstart", "prompt": tokens(world), "max_tokens": 4, "n": 2}
    mutated = mutated_json(world, body) if world.random.random() < 0.6 else body
    path = "/v1/chat/completions" if world.random.random() < 0.6 else "/v1/completions"
    await world.send("POST", path, content=json.dumps(mutated).encode("utf-8", "replace"), headers=JSON)


async def stream_left(world: World) -> None:
    """Disconnects after the first bytes of a streamed chat completion."""
    body = json.dumps(chat_json(world) | {"stream": True, "max_tokens": 300}).encode()
    async with world.http.stream("POST", "/v1/chat/completions", content=body, headers=JSON) as response:
        world.statuses[f"{response.status_code} left"] += 1
        async for _ in response.aiter_bytes():
            break


async def half_open_poll(world: World) -> None:
    """Polls a future on a raw connection and disconnects, at once with RST or after at most 3 seconds."""
    reply = await world.post("asample", sample_json(world, await session_of(world)))
    request_id = reply.json().get("request_id", "x") if reply.status_code == 200 else "x"
    body = json.dumps({"request_id": request_id}).encode()
    await _raw(
        world,
        _post(world, "retrieve_future", len(body)) + body,
        then=_reset if world.random.random() < 0.5 else _linger,
    )


async def dies_mid_body(world: World) -> None:
    """Resets the connection in the middle of a request body."""
    body = training_proto(world, await session_of(world)).SerializeToString()
    head = _post(world, "forward_backward", len(body), content_type=PROTOBUF["content-type"])
    await _raw(world, head + body[: world.random.randrange(len(body))], then=_reset)


async def slowloris(world: World) -> None:
    """Sends one byte every two seconds and then disconnects."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(world.random.randrange(3, 15)):
            await asyncio.sleep(2)
            writer.write(b"a")
            await writer.drain()

    await _raw(
        world, world.random.choice((_post(world, "asample", 50), _head(world, "asample") + b"X-")), then=drip
    )


async def broken_http(world: World) -> None:
    rng = world.random
    head = _head(world, "asample")
    text = rng.choice(
        (
            rng.randbytes(400),
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


def _head(world: World, route: str) -> bytes:
    """Return the request line and the first headers of a request on a raw connection."""
    key = world.http.headers.get("x-api-key")
    lines = [
        f"POST /api/v1/{route} HTTP/1.1",
        f"Host: {world.host}:{world.port}",
        *([f"X-API-Key: {key}"] if key else []),
    ]
    return "".join(f"{line}\r\n" for line in lines).encode()


def _post(world: World, route: str, length: int, *, content_type: str = "application/json") -> bytes:
    return _head(world, route) + f"Content-Type: {content_type}\r\nContent-Length: {length}\r\n\r\n".encode()


async def _raw(
    world: World,
    data: bytes,
    *,
    then: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> None:
    """Send bytes on a raw connection and call `then`. The server must accept the connection."""
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
    """Close the connection with RST instead of FIN."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read for up to 3 seconds before the connection is closed."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reader.read(1000), 3)


async def burst(world: World) -> None:
    """Requests BURST samples at once. All of them must succeed.

    Each client sends BURST_PART requests, because the search in a large connection pool is slow.
    """
    session = await new_session(world)
    heartbeat = asyncio.create_task(_heartbeat(world, session))
    await asyncio.gather(
        *(
            _part_of_burst(world, session, range(first, first + BURST_PART))
            for first in range(0, BURST, BURST_PART)
        )
    )
    heartbeat.cancel()
    await world.send("POST", f"/api/v1/sessions/{session.session_id}/finish", content=b"{}", headers=JSON)


async def _heartbeat(world: World, session: AttackSession) -> None:
    while True:
        await asyncio.sleep(10)
        await world.post("session_heartbeat", {"session_id": session.session_id})


async def _part_of_burst(world: World, session: AttackSession, indices: range) -> None:
    async with httpx.AsyncClient(
        base_url=world.http.base_url, headers=world.http.headers, timeout=ANSWER_WITHIN_S, limits=UNLIMITED
    ) as http:
        part = replace(world, http=http)  # shares the counters and the list of faults

        async def sample(index: int) -> None:
            prompt = {"chunks": [{"type": "encoded_text", "tokens": [index % VOCABULARY, 5, 6, 7]}]}
            body = {
                "sampling_session_id": session.sampler_id,
                "seq_id": index,
                "prompt": prompt,
                "sampling_params": {"max_tokens": 2},
            }
            result = await part.post_and_wait("asample", body)
            if "sequences" not in result:
                part.fault(f"burst: sample {index} failed: {str(result)[:200]}")

        await asyncio.gather(*(sample(index) for index in indices))


ATTACKS: tuple[Callable[[World], Awaitable[None]], ...] = (
    *(
        garbage_protobuf,
        mutated_protobuf,
        mutated_protobuf,
        mutated_protobuf,
        wild_training,
        diverged,
        out_of_range,
        dies_mid_body,
    ),
    *(
        garbage_json,
        mutated_request,
        mutated_request,
        mutated_request,
        mutated_request,
        compressed,
        oversize,
        wrong_types_and_paths,
    ),
    *(
        duplicates_and_reordered,
        cancelled,
        fire_and_forget,
        abandoned_session,
        checkpoints,
        half_open_poll,
        slowloris,
        broken_http,
    ),
    *(openai_routes, openai_routes, stream_left),
)


# --- the run ---


async def attack(world: World, run: Callable[[World], Awaitable[None]], slots: asyncio.Semaphore) -> None:
    """Run one attack and record its outcome in `world`."""
    async with slots:
        world.attacks[run.__name__] += 1
        try:
            async with asyncio.timeout(4 * ANSWER_WITHIN_S):
                await run(world)
        except (httpx.InvalidURL, httpx.LocalProtocolError):
            world.statuses["not sent"] += 1  # httpx rejected the request
        except (httpx.RemoteProtocolError, httpx.WriteError, httpx.ReadError) as error:
            world.statuses[f"disconnected {type(error).__name__}"] += 1
        except (httpx.ReadTimeout, TimeoutError) as error:
            if world.is_queued_per_tenant:
                world.statuses[f"client timed out {type(error).__name__}"] += 1
            else:
                world.fault(f"{run.__name__}: {type(error).__name__}: {error}")
        except Exception as error:
            world.fault(f"{run.__name__}: {type(error).__name__}: {error}")


def report(world: World) -> None:
    print(
        json.dumps({"attacks": world.attacks, "statuses": world.statuses, "faults": world.faults}), flush=True
    )


async def main(url: str, seconds: float, rate: float, seed: int) -> None:
    address = httpx.URL(url)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_WITHIN_S, limits=UNLIMITED) as http:
        world = World(http=http, host=address.host, port=address.port or 80, random=random.Random(seed))
        slots, began, num_sent = asyncio.Semaphore(MAX_UNDER_WAY), time.monotonic(), 0
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
                num_sent += 1
                await asyncio.sleep(max(0.0, began + num_sent / rate - time.monotonic()))
        report(world)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))

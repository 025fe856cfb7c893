"""`World`: the state of the attacks of `hostile_requests`, and functions that create and mutate bodies."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field

import httpx
import numpy as np

from skyrl_tx_server.http.wire.proto import tinker_wire_pb2 as pb

ANSWER_WITHIN_S = 120.0
VOCABULARY = 640
PROTOBUF = {"content-type": "application/x-protobuf"}
JSON = {"content-type": "application/json"}
SPECIAL_VALUES: tuple[object, ...] = (
    *(
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
    ),
    *(
        "",
        "x" * 5000,
        "\x00",
        "\ud800",
        "../../etc/passwd",
        "tinker://a/weights/b",
        "tinker://../../x",
        "session-0",
        "💥" * 40,
    ),
    *(
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
    ),
)


@dataclass(kw_only=True, slots=True)
class AttackSession:
    """A session that the attacks use and abandon."""

    session_id: str
    model_id: str
    sampler_id: str
    seq_id: int = 0

    def next_seq(self) -> int:
        self.seq_id += 1
        return self.seq_id


@dataclass(kw_only=True, slots=True)
class World:
    """The state of one attacker: its HTTP client, its random generator, its session and the results."""

    http: httpx.AsyncClient
    host: str
    port: int
    random: random.Random
    session: AttackSession | None = None
    attacks: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    is_queued_per_tenant: bool = False
    """Whether the requests of a tenant wait for its earlier requests. If true, a read timeout is no fault."""

    def post(self, route: str, body: object) -> Awaitable[httpx.Response]:
        return self.send(
            "POST", f"/api/v1/{route}", content=json.dumps(body).encode("utf-8", "replace"), headers=JSON
        )

    async def send(self, method: str, path: str, **rest: object) -> httpx.Response:
        """Send a request and return its response, which `record` checks for faults."""
        response = await self.http.request(method, path, **rest)  # pyright: ignore[reportArgumentType]
        self.record(
            f"{method} {path}",
            response.status_code,
            response.text[:2000] if response.status_code != 200 else "",
        )
        return response

    def record(self, request: str, status: int, text: str) -> None:
        """Count a response. A status >= 500 or the text "internal error" is a fault."""
        self.statuses[str(status)] += 1
        if status >= 500 or "internal error" in text:
            self.fault(f"{request}: {status} {text[:300]}")

    def fault(self, text: str) -> None:
        """Add a fault of the server. At most 200 faults are kept."""
        if len(self.faults) < 200:
            self.faults.append(text)

    async def outcome(self, request_id: str) -> dict[str, object]:
        """Poll a future and return its result. An unexpected exception of the server is a fault."""
        while True:
            response = await self.post("retrieve_future", {"request_id": request_id})
            if response.status_code == 408:
                continue
            body: dict[str, object] = (
                response.json() if response.status_code == 200 else {"error": response.text}
            )
            if "failed in the engine" in str(body.get("error", "")) or "failed on the server" in str(
                body.get("error", "")
            ):
                self.fault(f"future {request_id}: {str(body)[:300]}")
            return body

    async def post_and_wait(self, route: str, body: object) -> dict[str, object]:
        """Send a request and return the result of its future, or a dict with `error`."""
        response = await self.post(route, body)
        return (
            await self.outcome(response.json()["request_id"])
            if response.status_code == 200
            else {"error": response.text}
        )


async def new_session(world: World) -> AttackSession:
    """Create a session with a model and a sampler."""
    session_id = (await world.post("create_session", {"tags": [], "user_metadata": {}})).json()["session_id"]
    lora = {"rank": world.random.choice((1, 4, 8)), "seed": world.random.randrange(2**31)}
    body = {
        "session_id": session_id,
        "model_seq_id": 0,
        "base_model": "local/quickstart",
        "lora_config": lora,
    }
    await world.post_and_wait("create_model", body)
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "local/quickstart"}
    await world.post("create_sampling_session", sampler)
    return AttackSession(
        session_id=session_id, model_id=f"{session_id}:train:0", sampler_id=f"{session_id}:sample:0"
    )


async def session_of(world: World) -> AttackSession:
    """Return the current session. In 1 % of the calls, replace the current session with a new one first."""
    if world.session is None or world.random.random() < 0.01:
        world.session = await new_session(world)
    return world.session


def tokens(world: World, count: int | None = None) -> list[int]:
    return [
        world.random.randrange(VOCABULARY) for _ in range(count or world.random.choice((1, 3, 20, 60, 200)))
    ]


def training_json(world: World, session: AttackSession) -> dict[str, object]:
    ids = tokens(world)
    inputs = {
        "target_tokens": {"data": ids, "dtype": "int64"},
        "weights": {"data": [1.0] * len(ids), "dtype": "float32"},
    }
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": ids}]}, "loss_fn_inputs": inputs}
    inner = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"model_id": session.model_id, "seq_id": session.next_seq(), "forward_backward_input": inner}


def training_proto(world: World, session: AttackSession) -> pb.ForwardBackwardRequest:
    ids = np.array(tokens(world), np.int32)
    loss = world.random.choice(("cross_entropy", "importance_sampling", "ppo", "cispo", "dro"))
    request = pb.ForwardBackwardRequest(model_id=session.model_id, seq_id=session.next_seq(), loss_fn=loss)
    request.forward_only = world.random.random() < 0.3
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = ids.tobytes()
    floats = ("weights",) if loss == "cross_entropy" else ("logprobs", "advantages")
    datum.loss_fn_inputs["target_tokens"].CopyFrom(
        pb.Tensor(dtype=pb.DTYPE_INT64, dense=ids.astype("<i8").tobytes())
    )
    for name in floats:
        scale = world.random.choice((1.0, 1.0, 1e10, -1e38))
        values = np.full(len(ids), -scale if name == "logprobs" else scale, np.float32)
        datum.loss_fn_inputs[name].CopyFrom(pb.Tensor(dtype=pb.DTYPE_FLOAT32, dense=values.tobytes()))
    return request


def sample_json(world: World, session: AttackSession, **changes: object) -> dict[str, object]:
    settings: dict[str, object] = {
        "max_tokens": world.random.randrange(1, 12),
        "temperature": world.random.choice((0.0, 0.7, 1.0)),
    }
    if world.random.random() < 0.3:
        settings |= {"top_k": 5, "top_p": 0.9, "seed": world.random.randrange(99), "stop": ["a", "}"]}
    body: dict[str, object] = {
        "sampling_session_id": session.sampler_id,
        "seq_id": session.next_seq(),
        "num_samples": world.random.randrange(1, 4),
    }
    body |= {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens(world)}]},
        "sampling_params": settings,
    }
    if world.random.random() < 0.1:
        body |= {"topk_prompt_logprobs": 4} if world.random.random() < 0.5 else {"topk_sample_logprobs": 4}
    if world.random.random() < 0.1:
        body["prompt_logprobs"] = True
    return body | changes


def chat_json(world: World) -> dict[str, object]:
    messages = [
        {"role": "user", "content": "".join(world.random.choice("ab \n<|im_end|>é💥") for _ in range(30))}
    ]
    return {
        "model": "local/quickstart",
        "messages": messages,
        "max_tokens": world.random.randrange(1, 12),
        "stream": world.random.random() < 0.5,
    }


def mutated_json(world: World, value: object) -> object:
    """Return `value` with one element replaced, removed, added or duplicated."""
    rng = world.random
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                return {key: entry for key, entry in value.items() if key != name}
            case 1:
                return value | {str(rng.choice(SPECIAL_VALUES))[:50]: rng.choice(SPECIAL_VALUES)}
            case _:
                return value | {name: mutated_json(world, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], mutated_json(world, value[index]), *value[index + rng.choice((0, 1, 1)) :]]
    return rng.choice(SPECIAL_VALUES)


def mutated_bytes(world: World, body: bytes) -> bytes:
    """Return `body` after 1 to 64 random bit flips, insertions, deletions and replacements."""
    rng, mutated = world.random, bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        position = rng.randrange(len(mutated) + 1)
        match rng.randrange(4):
            case 0 if position < len(mutated):
                mutated[position] ^= 1 << rng.randrange(8)
            case 1:
                mutated[position:position] = rng.randbytes(rng.randrange(1, 9))
            case 2:
                del mutated[position : position + rng.randrange(1, 30)]
            case _:
                mutated[position : position + 4] = rng.choice(
                    (b"\xff\xff\xff\xff", b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x80\x80\x80\x80")
                )
    return bytes(mutated)


def valid_body(world: World, session: AttackSession) -> tuple[str, object]:
    """Return a random route and a valid body for it."""
    training = {"model_id": session.model_id, "seq_id": session.next_seq()}
    lora = {"rank": 4, "seed": 1, "train_mlp": True}
    bodies: dict[str, object] = {
        "asample": sample_json(world, session),
        "forward_backward": training_json(world, session),
        "optim_step": training
        | {"adam_params": {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}},
        "create_model": {
            "session_id": session.session_id,
            "model_seq_id": 0,
            "base_model": "local/quickstart",
            "lora_config": lora,
        },
        "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}},
        "create_sampling_session": {
            "session_id": session.session_id,
            "sampling_session_seq_id": 0,
            "base_model": "local/quickstart",
        },
        "save_weights": training | {"path": "hostile", "overwrite": True, "ttl_seconds": 60},
        "save_weights_for_sampler": training | {"sampling_session_seq_id": world.random.randrange(1, 4)},
        "load_weights": training
        | {"path": f"tinker://{session.model_id}/weights/hostile", "optimizer": True},
        "retrieve_future": {"request_id": "asample-0"},
        "get_info": {"model_id": session.model_id},
        "weights_info": {"tinker_path": f"tinker://{session.model_id}/weights/hostile"},
        "telemetry": {"events": [], "platform": "x", "sdk_version": "0", "session_id": session.session_id},
    }
    route = world.random.choice(list(bodies))
    return route, bodies[route]

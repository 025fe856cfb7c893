"""Sends the attacks of `hostile_tenants` from a separate process.

    python -m tests.stress.hostile_tenant_requests URL SECONDS RATE SEED KEYS.json VICTIM_MODEL_ID

Every tenant sends the attacks of `hostile_requests` with its own key. It also attacks other tenants: it
requests more than its share of the server, creates many objects, and sends requests with the ids of the
victim's objects to the routes of VICTIM_ROUTES. RATE is the number of attacks per second of all tenants
together.
The last line of the output is a JSON object with the number of attacks of each kind (`attacks`), the number
of responses with each status (`statuses`) and the responses that a correct server cannot send (`faults`, at
most 200). A fault that begins with "cross-tenant" is a response that shows or changes an object of the
victim.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.stress.hostile_requests import ATTACKS, MAX_UNDER_WAY, UNLIMITED, attack, report
from tests.stress.hostile_world import (
    ANSWER_WITHIN_S,
    JSON,
    World,
    new_session,
    sample_json,
    session_of,
    tokens,
)

NO_ACCESS = (400, 403, 404, 410, 422, 429)
"""The permitted statuses of a request for an object of another tenant. 429 means that the tenant has reached
its own quota.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Victim:
    """The ids of the objects of the training loop, which the hostile tenants try to access."""

    model_id: str

    @property
    def session_id(self) -> str:
        return self.model_id.partition(":train:")[0]

    @property
    def checkpoint(self) -> str:
        return f"tinker://{self.model_id}/weights/last"


async def huge_sample(world: World) -> None:
    """Requests more samples than the server has slots, each almost as long as the context."""
    session = await session_of(world)
    settings = {"max_tokens": 480, "temperature": 1.0}
    await world.post(
        "asample",
        sample_json(
            world, session, num_samples=world.random.choice((64, 512, 4096)), sampling_params=settings
        ),
    )


async def long_prompts(world: World) -> None:
    session = await session_of(world)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens(world, 480)}]}
    for _ in range(20):
        await world.post("asample", sample_json(world, session, prompt=prompt, prompt_logprobs=True))


async def many_models(world: World) -> None:
    """Creates eight models and eight checkpoints in a new session and leaves the session open."""
    session = await new_session(world)
    for number in range(8):
        model = {
            "session_id": session.session_id,
            "model_seq_id": number + 1,
            "base_model": "local/quickstart",
        }
        await world.post_and_wait("create_model", model | {"lora_config": {"rank": 8, "seed": number}})
        name = {
            "model_id": session.model_id,
            "seq_id": session.next_seq(),
            "path": f"hoard-{number}",
            "ttl_seconds": 120,
        }
        await world.post_and_wait("save_weights", name)


async def large_metadata(world: World) -> None:
    metadata = {f"key-{number}": "x" * 10_000 for number in range(world.random.choice((1, 100, 700)))}
    await world.post("create_session", {"tags": ["x" * 1000] * 200, "user_metadata": metadata})


LISTINGS = (
    "/api/v1/sessions",
    "/api/v1/training_runs",
    "/api/v1/checkpoints",
    "/v1/models",
    "/api/v1/stats",
    "/metrics",
)
SILENT = ("/cancel_future", "/finish", "/checkpoints")
"""Endings of routes that send an empty response or list, not an error, if the object does not exist."""
VICTIM_ROUTES: tuple[tuple[str, str, dict[str, object] | None], ...] = (
    ("POST", "/api/v1/session_heartbeat", {"session_id": "{session}"}),
    ("POST", "/api/v1/sessions/{session}/finish", {}),
    ("GET", "/api/v1/sessions/{session}", None),
    (
        "POST",
        "/api/v1/create_model",
        {"session_id": "{session}", "model_seq_id": 0, "base_model": "local/quickstart"},
    ),
    (
        "POST",
        "/api/v1/create_sampling_session",
        {"session_id": "{session}", "sampling_session_seq_id": 0, "base_model": "local/quickstart"},
    ),
    ("GET", "/api/v1/samplers/{session}:sample:0", None),
    ("POST", "/api/v1/get_info", {"model_id": "{model}"}),
    ("POST", "/api/v1/unload_model", {"model_id": "{model}"}),
    (
        "POST",
        "/api/v1/optim_step",
        {"model_id": "{model}", "seq_id": 1, "adam_params": {"learning_rate": 0.1}},
    ),
    ("POST", "/api/v1/save_weights", {"model_id": "{model}", "seq_id": 1, "path": "last", "overwrite": True}),
    ("POST", "/api/v1/save_weights_for_sampler", {"model_id": "{model}", "seq_id": 1, "path": "stolen"}),
    (
        "POST",
        "/api/v1/load_weights",
        {"model_id": "{model}", "seq_id": 1, "path": "{checkpoint}", "optimizer": True},
    ),
    ("POST", "/api/v1/weights_info", {"tinker_path": "{checkpoint}"}),
    ("POST", "/api/v1/cancel_future", {"request_id": "asample-1"}),
    ("GET", "/api/v1/training_runs/{model}", None),
    ("GET", "/api/v1/training_runs/{model}/checkpoints", None),
    ("GET", "/api/v1/training_runs/{model}/checkpoints/weights/last/archive", None),
    ("DELETE", "/api/v1/training_runs/{model}/checkpoints/weights/last", None),
    ("PUT", "/api/v1/training_runs/{model}/checkpoints/weights/last/ttl", {"ttl_seconds": 1}),
    ("POST", "/api/v1/training_runs/{model}/checkpoints/weights/last/publish", {}),
    ("GET", "/v1/models/{checkpoint}", None),
    ("POST", "/v1/completions", {"model": "{checkpoint}", "prompt": [1, 2], "max_tokens": 2}),
)


def reach_victim(victim: Victim) -> Callable[[World], Awaitable[None]]:
    """Return an attack that requests objects of the victim or searches listings for the victim's session."""

    def fill(text: str) -> str:
        return text.format(session=victim.session_id, model=victim.model_id, checkpoint=victim.checkpoint)

    async def reach_other_tenant(world: World) -> None:
        method, path, template = world.random.choice(VICTIM_ROUTES)
        body = None
        if template is not None:
            body = json.dumps(
                {key: fill(value) if isinstance(value, str) else value for key, value in template.items()}
            )
        response = await world.send(
            method, fill(path), content=body, headers=JSON if body is not None else None
        )
        if response.status_code not in NO_ACCESS:
            answer = response.json() if "json" in response.headers.get("content-type", "") else {}
            request_id = answer.get("request_id") if isinstance(answer, dict) else None
            if path.endswith(SILENT) and response.text in ("", '{"checkpoints":[]}'):
                return
            if request_id is None or "error" not in await world.outcome(request_id):
                world.fault(
                    f"cross-tenant: {method} {path} returned {response.status_code} {response.text[:200]}"
                )

    async def search_listings(world: World) -> None:
        path = world.random.choice(LISTINGS)
        response = await world.send("GET", path)
        if victim.session_id in response.text:
            world.fault(f"cross-tenant: {path} shows the session of another tenant")

    async def reach(world: World) -> None:
        await (reach_other_tenant if world.random.random() < 0.7 else search_listings)(world)

    return reach


async def main(url: str, seconds: float, rate: float, seed: int, keys: list[str], victim: Victim) -> None:
    address = httpx.URL(url)
    reach = reach_victim(victim)
    attacks = (
        *ATTACKS,
        *(huge_sample,) * 4,
        *(long_prompts,) * 2,
        many_models,
        large_metadata,
        *(reach,) * 8,
    )
    attack_counts: Counter[str] = Counter()
    statuses: Counter[str] = Counter()
    faults: list[str] = []
    limit = asyncio.Semaphore(MAX_UNDER_WAY)
    began = time.monotonic()

    async def tenant(number: int, key: str) -> None:
        async with httpx.AsyncClient(
            base_url=url, headers={"x-api-key": key}, timeout=ANSWER_WITHIN_S, limits=UNLIMITED
        ) as http:
            world = World(
                http=http,
                host=address.host,
                port=address.port or 80,
                random=random.Random(seed * 1000 + number),
                attacks=attack_counts,
                statuses=statuses,
                faults=faults,
                is_queued_per_tenant=True,
            )
            period = len(keys) / rate
            await asyncio.sleep(period * number / len(keys))
            num_sent, under_way = 0, set[asyncio.Task[None]]()
            while time.monotonic() < began + seconds:
                task = asyncio.create_task(attack(world, world.random.choice(attacks), limit))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
                num_sent += 1
                await asyncio.sleep(max(0.0, began + num_sent * period - time.monotonic()))
            for task in under_way:  # a cancelled client disconnects during its request
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async with asyncio.TaskGroup() as tenants:
        for number, key in enumerate(keys):
            tenants.create_task(tenant(number, key))
    report(
        World(
            http=httpx.AsyncClient(),
            host="",
            port=0,
            random=random.Random(),
            attacks=attack_counts,
            statuses=statuses,
            faults=faults,
        )
    )


if __name__ == "__main__":
    url, seconds, rate, seed, keys_file, model_id = sys.argv[1:]
    keys = json.loads(Path(keys_file).read_text())
    asyncio.run(main(url, float(seconds), float(rate), int(seed), keys, Victim(model_id=model_id)))

"""Calls every route as one tenant with the objects of another tenant.

The reply must be the same as for objects that do not exist. Each route is in one of the tables below, which
`test_every_route_is_classified` checks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from tinker import types
from tinker.proto import request_conv

from skyrl_tx_server.engine.operations import Sample
from skyrl_tx_server.http.app import ENDPOINTS
from skyrl_tx_server.http.routes import unsupported
from skyrl_tx_server.http.routes.weights import CHECKPOINT, RUN
from tests.fakes.server import fake_engine
from tests.security.tenants import (
    MODEL,
    Objects,
    Site,
    make_model,
    make_objects,
    open_session,
    post,
    two_tenants,
)

PROMPT = {"chunks": [{"tokens": [1, 2]}]}
PROTO = "application/x-protobuf"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request that refers to an object."""

    path: str
    json: Mapping[str, object] | None = None
    content: bytes | None = None
    headers: Mapping[str, str] | None = None

    async def send(self, http: httpx.AsyncClient, method: str) -> httpx.Response:
        return await http.request(
            method, self.path, json=self.json, content=self.content, headers=self.headers
        )


def api(route: str, **body: object) -> Call:
    return Call(path=f"/api/v1/{route}", json=body)


def training_data(field: str) -> dict[str, object]:
    """Return the fields of a training request, whose data are in `field`."""
    tensors = {
        "target_tokens": {"data": [2, 3], "dtype": "int64"},
        "weights": {"data": [1.0, 1.0], "dtype": "float32"},
    }
    datum = {"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": tensors}
    return {field: {"data": [datum], "loss_fn": "cross_entropy"}}


def forward_backward_protobuf(model_id: str) -> bytes:
    inputs = {"target_tokens": np.array([2, 3]), "weights": np.ones(2, np.float32)}
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)  # pyright: ignore[reportArgumentType]
    inner = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=inner, model_id=model_id, seq_id=50)
    return request_conv.forward_backward_request_to_proto(request).SerializeToString()


def sample(**weights: object) -> Call:
    return api("asample", prompt=PROMPT, num_samples=1, sampling_params={"max_tokens": 2}, **weights)


def completion(model: str) -> Call:
    return Call(path="/v1/completions", json={"model": model, "prompt": [1, 2], "max_tokens": 2})


def chat(model: str) -> Call:
    return Call(
        path="/v1/chat/completions",
        json={"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
    )


def run_url(objects: Objects) -> str:
    return f"/api/v1/training_runs/{objects.model}"


OBJECT_ROUTES: dict[str, list[Callable[[Objects], Call]]] = {
    "POST /api/v1/retrieve_future": [
        lambda objects: api("retrieve_future", request_id=objects.request),
        lambda objects: Call(
            path="/api/v1/retrieve_future", json={"request_id": objects.request}, headers={"accept": PROTO}
        ),
    ],
    "POST /api/v1/create_model": [
        lambda objects: api(
            "create_model",
            session_id=objects.session,
            model_seq_id=7,
            base_model=MODEL,
            lora_config={"rank": 4},
        )
    ],
    "POST /api/v1/get_info": [lambda objects: api("get_info", model_id=objects.model)],
    "POST /api/v1/forward_backward": [
        lambda objects: api(
            "forward_backward", model_id=objects.model, seq_id=50, **training_data("forward_backward_input")
        ),
        lambda objects: Call(
            path="/api/v1/forward_backward",
            content=forward_backward_protobuf(objects.model),
            headers={"content-type": PROTO},
        ),
    ],
    "POST /api/v1/forward": [
        lambda objects: api("forward", model_id=objects.model, seq_id=50, **training_data("forward_input"))
    ],
    "POST /api/v1/optim_step": [
        lambda objects: api("optim_step", model_id=objects.model, seq_id=50, adam_params={})
    ],
    "POST /api/v1/unload_model": [lambda objects: api("unload_model", model_id=objects.model)],
    "POST /api/v1/create_sampling_session": [
        lambda objects: api(
            "create_sampling_session", session_id=objects.session, sampling_session_seq_id=9, base_model=MODEL
        ),
    ],
    "GET /api/v1/samplers/{sampler_id}": [
        lambda objects: Call(path=f"/api/v1/samplers/{objects.snapshot}"),
        lambda objects: Call(path=f"/api/v1/samplers/{objects.sampler}"),
    ],
    "POST /api/v1/asample": [
        lambda objects: sample(sampling_session_id=objects.snapshot, seq_id=1),
        lambda objects: sample(sampling_session_id=objects.sampler, seq_id=1),
        lambda objects: sample(model_path=objects.sampler_weights),
    ],
    "POST /api/v1/session_heartbeat": [lambda objects: api("session_heartbeat", session_id=objects.session)],
    "GET /api/v1/sessions/{session_id}": [lambda objects: Call(path=f"/api/v1/sessions/{objects.session}")],
    "POST /api/v1/save_weights_external": [
        lambda objects: api("save_weights_external", model_id=objects.model, seq_id=50, path="new")
    ],
    f"GET {RUN}/checkpoints/external_weights/{{name}}/external_weights_urls": [
        lambda objects: Call(path=f"{run_url(objects)}/checkpoints/external_weights/e/external_weights_urls")
    ],
    f"GET {CHECKPOINT}/archive": [lambda objects: Call(path=f"{objects.checkpoint_url}/archive")],
    "POST /api/v1/save_weights": [
        lambda objects: api("save_weights", model_id=objects.model, seq_id=50, path="w", overwrite=True),
        lambda objects: api("save_weights", model_id=objects.model, seq_id=51, path="new"),
    ],
    "POST /api/v1/save_weights_for_sampler": [
        lambda objects: api("save_weights_for_sampler", model_id=objects.model, seq_id=50, path="new"),
        lambda objects: api(
            "save_weights_for_sampler", model_id=objects.model, seq_id=51, sampling_session_seq_id=8
        ),
    ],
    "POST /api/v1/load_weights": [
        lambda objects: api("load_weights", model_id=objects.model, seq_id=50, path=objects.weights)
    ],
    "POST /api/v1/weights_info": [lambda objects: api("weights_info", tinker_path=objects.weights)],
    f"GET {RUN}": [lambda objects: Call(path=run_url(objects))],
    f"PUT {CHECKPOINT}/ttl": [
        lambda objects: Call(path=f"{objects.checkpoint_url}/ttl", json={"ttl_seconds": 5000})
    ],
    f"POST {CHECKPOINT}/publish": [lambda objects: Call(path=f"{objects.checkpoint_url}/publish")],
    f"DELETE {CHECKPOINT}/publish": [lambda objects: Call(path=f"{objects.checkpoint_url}/publish")],
    f"DELETE {CHECKPOINT}": [lambda objects: Call(path=objects.checkpoint_url)],
    "POST /v1/chat/completions": [
        lambda objects: chat(objects.snapshot),
        lambda objects: chat(objects.sampler),
        lambda objects: chat(objects.sampler_weights),
    ],
    "POST /v1/completions": [
        lambda objects: completion(objects.snapshot),
        lambda objects: completion(objects.sampler),
        lambda objects: completion(objects.sampler_weights),
        lambda objects: replace(
            completion(objects.snapshot), json={**(completion(objects.snapshot).json or {}), "stream": True}
        ),
    ],
    "GET /v1/models/{model:path}": [
        lambda objects: Call(path=f"/v1/models/{objects.snapshot}"),
        lambda objects: Call(path=f"/v1/models/{objects.sampler_weights}"),
    ],
}
"""Routes that refer to an object, with one request for each way to refer to it."""

ALWAYS_SUCCESSFUL: dict[str, Callable[[Objects], Call]] = {
    "POST /api/v1/cancel_future": lambda objects: api("cancel_future", request_id=objects.request),
    "POST /api/v1/sessions/{session_id}/finish": lambda objects: Call(
        path=f"/api/v1/sessions/{objects.session}/finish"
    ),
    f"GET {RUN}/checkpoints": lambda objects: Call(path=f"{run_url(objects)}/checkpoints"),
}
"""Routes that reply with success for an object that does not exist."""

LISTINGS = ("GET /api/v1/sessions", "GET /api/v1/training_runs", "GET /api/v1/checkpoints", "GET /v1/models")

NO_OBJECTS = {
    "GET /api/v1/healthz",
    "POST /api/v1/client/config",
    "POST /api/v1/client/dynamic_config",
    "POST /api/v1/telemetry",
    "GET /api/v1/get_server_capabilities",
    "GET /api/v1/stats",  # see `test_a_tenant_reads_only_its_own_statistics`
    "POST /api/v1/create_session",
}

REFUSED = {f"{endpoint.method} {endpoint.path}" for endpoint in unsupported.ENDPOINTS}
"""Routes that reply 400 to every client."""

OPERATOR_ONLY = {"GET /metrics"}

SIGNED_URLS = {"GET /api/v1/downloads/{run_id}/{checkpoint_id:path}/{file}"}
"""Routes that need no key, because their URLs are signed. `test_tenants.py` tests changed URLs."""

VARIANTS = [
    pytest.param(route, call, id=f"{route}-{number}")
    for route, calls in OBJECT_ROUTES.items()
    for number, call in enumerate(calls)
]


def test_every_route_is_classified() -> None:
    classified = [
        *OBJECT_ROUTES,
        *ALWAYS_SUCCESSFUL,
        *LISTINGS,
        *NO_OBJECTS,
        *REFUSED,
        *OPERATOR_ONLY,
        *SIGNED_URLS,
    ]
    assert sorted(classified) == sorted(f"{endpoint.method} {endpoint.path}" for endpoint in ENDPOINTS)


def absent(objects: Objects) -> Objects:
    """Return ids of the same form that the server has not assigned."""
    return Objects(session=_with_zeros(objects.session), request=_with_zeros(objects.request))


def _with_zeros(identifier: str) -> str:
    return re.sub("[0-9a-f]{16,}", lambda match: "0" * len(match[0]), identifier)


def without_ids(reply: httpx.Response) -> tuple[int, str, str]:
    """Return the status, the content type and the text with "ID" in place of each id."""
    return reply.status_code, reply.headers.get("content-type", ""), re.sub("[0-9a-f]{16,}", "ID", reply.text)


async def listings_of_alice(site: Site) -> list[str]:
    replies = [await site.alice.get(listing.removeprefix("GET ")) for listing in LISTINGS]
    return [reply.text for reply in replies]


@pytest.mark.parametrize(("route", "call"), VARIANTS)
async def test_an_object_of_another_tenant_does_not_exist(
    tmp_path: Path, route: str, call: Callable[[Objects], Call]
) -> None:
    method = route.partition(" ")[0]
    async with two_tenants(tmp_path) as site:
        objects = await make_objects(site.alice)
        engine = fake_engine(site.context)
        before, executed = await listings_of_alice(site), len(engine.executed)
        foreign, unknown = (
            await call(objects).send(site.bob, method),
            await call(absent(objects)).send(site.bob, method),
        )
        assert foreign.status_code in (404, 410), foreign.text
        assert without_ids(foreign) == without_ids(unknown)
        assert (await listings_of_alice(site), len(engine.executed)) == (before, executed)
        reply = await call(objects).send(site.alice, method)
        assert reply.status_code in (200, 204, 302), reply.text  # the call is valid


@pytest.mark.parametrize("route", ALWAYS_SUCCESSFUL)
async def test_a_route_that_always_succeeds_affects_no_other_tenant(tmp_path: Path, route: str) -> None:
    method = route.partition(" ")[0]
    async with two_tenants(tmp_path) as site:
        objects = await make_objects(site.alice)
        fake_engine(site.context).gate.clear()
        pending = await post(site.alice, "optim_step", model_id=objects.model, seq_id=60, adam_params={})
        waiting = await post(site.alice, "optim_step", model_id=objects.model, seq_id=61, adam_params={})
        before = await listings_of_alice(site)
        for request in (str(pending["request_id"]), str(waiting["request_id"])):
            objects_of_alice = replace(objects, request=request)
            replies = [
                await ALWAYS_SUCCESSFUL[route](ids).send(site.bob, method)
                for ids in (objects_of_alice, absent(objects_of_alice))
            ]
            assert without_ids(replies[0]) == without_ids(replies[1]) and replies[0].status_code in (200, 204)
        fake_engine(site.context).gate.set()
        for request in (pending, waiting):
            reply = await site.alice.post(
                "/api/v1/retrieve_future", json={"request_id": request["request_id"]}
            )
            assert reply.json().get("metrics") == {"grad_norm": 1.5}, reply.text
        assert await listings_of_alice(site) == before


@pytest.mark.parametrize("route", LISTINGS)
async def test_a_listing_contains_only_objects_of_the_tenant(tmp_path: Path, route: str) -> None:
    async with two_tenants(tmp_path) as site:
        empty = (await site.bob.get(route.removeprefix("GET "))).json()
        objects = await make_objects(site.alice)
        listed = await site.bob.get(route.removeprefix("GET "))
        assert listed.json() == empty and "alice" not in listed.text
        assert objects.session in (await site.alice.get(route.removeprefix("GET "))).text
        assert objects.session in (await site.operator.get(route.removeprefix("GET "))).text


@pytest.mark.parametrize("route", sorted(NO_OBJECTS | REFUSED | OPERATOR_ONLY))
async def test_a_route_without_objects_hides_other_tenants(tmp_path: Path, route: str) -> None:
    method, _, path = route.partition(" ")
    async with two_tenants(tmp_path) as site:
        objects = await make_objects(site.alice)
        reply = await site.bob.request(
            method, path.replace("{session_id}", objects.session), json={} if method != "GET" else None
        )
        assert reply.status_code == (403 if route in OPERATOR_ONLY else 400 if route in REFUSED else 200), (
            reply.text
        )
        assert "alice" not in reply.text and objects.session not in reply.text


async def test_a_tenant_reads_only_its_own_statistics(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as site:
        before = (await site.bob.get("/api/v1/stats")).json()
        await make_objects(site.alice)
        assert (await site.bob.get("/api/v1/stats")).json() == before
        assert (await site.alice.get("/api/v1/stats")).json()["registry"]["models"] == 1
        assert "ops_finished" in (await site.operator.get("/api/v1/stats")).json()["engine"]
        assert (await site.operator.get("/metrics")).status_code == 200


async def test_a_checkpoint_of_another_tenant_cannot_be_used(
    tmp_path: Path,
) -> None:
    """Some routes take a checkpoint path together with an object of the caller."""
    async with two_tenants(tmp_path) as site:
        objects = await make_objects(site.alice)
        session = await open_session(site.bob)
        model = await make_model(site.bob, session)
        ids = {"session_id": session}
        for call in (
            lambda objects: api("load_weights", model_id=model, path=objects.weights),
            lambda objects: api("load_weights", model_seq_id=5, path=objects.weights, **ids),
            lambda objects: api(
                "create_sampling_session",
                sampling_session_seq_id=5,
                model_path=objects.sampler_weights,
                **ids,
            ),
        ):
            foreign, unknown = [
                await call(target).send(site.bob, "POST") for target in (objects, absent(objects))
            ]
            assert foreign.status_code == 404 and without_ids(foreign) == without_ids(unknown)
        assert not fake_engine(site.context).of_type(Sample)

"""A server with a fake engine, two tenants and an operator, and the objects that a tenant can create."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from skyrl_tx_server.config.tenant_options import TenantOptions
from skyrl_tx_server.engine.futures import Retention
from skyrl_tx_server.engine.tenants import TenantKeys
from skyrl_tx_server.http.app import build_app
from skyrl_tx_server.http.app_state import AppState, HttpSettings
from skyrl_tx_server.http.http_handler import StartupState
from skyrl_tx_server.keys import add
from tests.fakes.server import fake_context, fake_engine
from tests.fakes.text_engine import save_tokenizer

MODEL = "local/fake"
OPERATOR_KEY = "tml-operator"


@dataclass(frozen=True, kw_only=True)
class Site:
    """The state of a server and four HTTP clients: one for each of two tenants, one with the operator's key,
    and one without a key."""

    context: AppState
    key_file: Path
    alice: httpx.AsyncClient
    bob: httpx.AsyncClient
    operator: httpx.AsyncClient
    without_key: httpx.AsyncClient


@contextlib.asynccontextmanager
async def two_tenants(
    root: Path, quota: TenantOptions | None = None, *, max_connections: int = 4096, hold_s: float = 5
) -> AsyncIterator[Site]:
    """Start a server with two tenants, each with `quota`, or with the default quota if `quota` is None."""
    key_file = root / "keys"
    alice_key, bob_key = (add(key_file, name) for name in ("alice", "bob"))
    settings = HttpSettings(
        model_dir=save_tokenizer(root / "model"),
        api_key=OPERATOR_KEY,
        tenant_keys=TenantKeys(key_file),
        tenant_quota=quota or TenantOptions(),
        max_connections=max_connections,
    )
    context = fake_context(root / "checkpoints", retention=Retention(hold_s=hold_s), settings=settings)
    engine = fake_engine(context)
    engine.info = replace(engine.info, vocab_size=257, max_context_length=2000)
    transport = httpx.ASGITransport(build_app(StartupState(state=context)))
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers)
            )
            for headers in ({"x-api-key": alice_key}, {"x-api-key": bob_key}, {"x-api-key": OPERATOR_KEY}, {})
        ]
        try:
            yield Site(
                context=context,
                key_file=key_file,
                alice=clients[0],
                bob=clients[1],
                operator=clients[2],
                without_key=clients[3],
            )
        finally:
            engine.stop()


async def post(http: httpx.AsyncClient, route: str, **body: object) -> dict[str, object]:
    """Send a request to a route below /api/v1 that must succeed. Return its reply."""
    response = await http.post(f"/api/v1/{route}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def retrieve_result(http: httpx.AsyncClient, reply: dict[str, object]) -> dict[str, object]:
    """Return the result of the operation that `reply` confirms."""
    response = await http.post("/api/v1/retrieve_future", json={"request_id": reply["request_id"]})
    assert response.status_code == 200, response.text
    return response.json()


async def run_operation(http: httpx.AsyncClient, route: str, **body: object) -> dict[str, object]:
    """Submit an operation that must succeed. Return its result."""
    operation_result = await retrieve_result(http, await post(http, route, **body))
    assert "error" not in operation_result, operation_result
    return operation_result


async def open_session(http: httpx.AsyncClient) -> str:
    return str(
        (await post(http, "create_session", tags=["secret-tag"], user_metadata={"secret": "metadata"}))[
            "session_id"
        ]
    )


async def make_model(http: httpx.AsyncClient, session_id: str, number: int = 0) -> str:
    created = await run_operation(
        http,
        "create_model",
        session_id=session_id,
        model_seq_id=number,
        base_model=MODEL,
        lora_config={"rank": 4},
        user_metadata={"secret": "metadata"},
    )
    return str(created["model_id"])


@dataclass(frozen=True, kw_only=True)
class Objects:
    """The ids, tinker:// paths and URLs of the objects that `make_objects` creates."""

    session: str  # id
    request: str  # id

    @property
    def model(self) -> str:
        return f"{self.session}:train:0"

    @property
    def snapshot(self) -> str:
        return f"{self.session}:sample:0"

    @property
    def sampler(self) -> str:
        return f"{self.session}:sample:1"

    @property
    def weights(self) -> str:
        return f"tinker://{self.model}/weights/w"

    @property
    def sampler_weights(self) -> str:
        return f"tinker://{self.model}/sampler_weights/s"

    @property
    def checkpoint_url(self) -> str:
        return f"/api/v1/training_runs/{self.model}/checkpoints/weights/w"


async def make_objects(http: httpx.AsyncClient) -> Objects:
    """Create one object of each kind that a tenant can own."""
    session = await open_session(http)
    model = await make_model(http, session)
    await run_operation(http, "save_weights", model_id=model, seq_id=1, path="w")
    await run_operation(http, "save_weights_for_sampler", model_id=model, seq_id=2, path="s")
    await run_operation(http, "save_weights_external", model_id=model, seq_id=3, path="e")
    await run_operation(http, "save_weights_for_sampler", model_id=model, seq_id=4, sampling_session_seq_id=0)
    path = f"tinker://{model}/sampler_weights/s"
    await post(
        http, "create_sampling_session", session_id=session, sampling_session_seq_id=1, model_path=path
    )
    request = await post(http, "optim_step", model_id=model, seq_id=5, adam_params={})
    await retrieve_result(http, request)
    return Objects(session=session, request=str(request["request_id"]))

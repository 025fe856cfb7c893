"""Tenants: keys, owners, sharing, signed URLs, quotas and expiry."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import tarfile
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from skyrl_tx_server import keys
from skyrl_tx_server.config.server_config import ServerConfig
from skyrl_tx_server.config.tenant_options import TenantOptions
from skyrl_tx_server.engine.engine import Watcher
from skyrl_tx_server.engine.executor_protocol import EngineInfo
from skyrl_tx_server.engine.model_registry import Registry
from skyrl_tx_server.engine.operations import (
    DEFAULT_TENANT,
    CreateModel,
    LoraSpec,
    Operation,
    OptimStep,
    Sample,
    SamplingSettings,
    UnloadModel,
)
from skyrl_tx_server.engine.tenants import TenantKeys, owner_of, read_keys
from skyrl_tx_server.errors import CapacityError, ConfigError, UserError
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.http.app import build_app, housekeep
from skyrl_tx_server.http.app_state import HttpSettings
from skyrl_tx_server.http.http_handler import StartupState
from skyrl_tx_server.http.routes.downloads import ARCHIVE, file_of
from skyrl_tx_server.http.shares import LEAST_TOKENS, EngineShare
from tests.fakes.server import fake_context, fake_engine
from tests.fakes.versions import save_version
from tests.security.tenants import (
    MODEL,
    OPERATOR_KEY,
    make_model,
    make_objects,
    open_session,
    post,
    run_operation,
    two_tenants,
)

# --- keys


def test_a_key_file_holds_digests_that_authenticate_its_tenants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    created_keys = []
    for name in ("alice", "bob", "alice"):
        assert keys.main(["add", name, f"file={file}"]) == 0
        created_keys.append(capsys.readouterr().out.strip())
    assert len(set(created_keys)) == 3 and all(
        re.fullmatch(r"tml-[A-Za-z0-9_-]{43}", key) for key in created_keys
    )
    text = file.read_text()
    assert not any(key in text or key.removeprefix("tml-") in text for key in created_keys)
    assert text.splitlines()[0] == f"alice:{hashlib.sha256(created_keys[0].encode()).hexdigest()}"
    assert file.stat().st_mode & 0o777 == 0o600
    tenant_keys = TenantKeys(file)
    assert [
        tenant_keys.tenant_of(key)
        for key in (*created_keys, "tml-guess", "", "\udcff".encode(errors="replace").decode())
    ] == [
        "alice",
        "bob",
        "alice",
        None,
        None,
        None,
    ]
    assert keys.main(["remove", "alice", f"file={file}"]) == 0 and keys.main(["list", f"file={file}"]) == 0
    assert capsys.readouterr().out == "bob\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alice:short", "line 1 is not name:<SHA-256"),
        (f"\n# a comment\nAlice:{'0' * 64}", "line 3: tenant name 'Alice' is not allowed"),
        (f"{DEFAULT_TENANT}:{'0' * 64}", "is not allowed"),
        (f"a.b:{'0' * 64}", "is not allowed"),
        (f"alice:{'0' * 64}\nbob:{'0' * 64}", "line 2 gives the key of tenant alice to bob too"),
    ],
)
def test_an_invalid_key_file_causes_an_error_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_keys(file)
    assert "\n" not in str(caught.value)


def test_a_key_file_of_another_user_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    keys.add(file, "alice")
    before = file.read_text()

    def refuse(*_: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    assert keys.main(["add", "bob", f"file={file}"]) == 2
    assert f"{file} belongs to another user or group" in capsys.readouterr().err
    assert file.read_text() == before and list(tmp_path.iterdir()) == [file]


def test_a_key_file_that_everyone_can_write_to_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys.add(file, "alice")
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(file)


def test_a_tenant_can_be_called_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    assert keys.main(["add", "help", f"file={file}"]) == 0
    assert keys.main(["list", f"file={file}"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["help"]


@pytest.mark.parametrize(
    "arguments",
    [["add", "alice"], ["add", "file=x"], ["add", "Alice", "file=x"], ["unknown"], ["remove", "a", "file=x"]],
)
def test_the_keys_command_reports_wrong_arguments_in_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [argument.replace("file=x", f"file={tmp_path / 'x'}") for argument in arguments]
    assert keys.main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "x").exists()


async def test_a_changed_key_file_is_read_and_a_broken_one_is_ignored(
    tmp_path: Path,
) -> None:
    async with two_tenants(tmp_path) as site:
        carol_key = keys.add(site.key_file, "carol")
        keys.remove(site.key_file, "bob")
        await housekeep(site.context)
        assert (
            await site.without_key.get("/api/v1/sessions", headers={"x-api-key": carol_key})
        ).status_code == 200
        assert (await site.bob.get("/api/v1/sessions")).status_code == 401
        site.key_file.write_text("nonsense")
        await housekeep(site.context)
        assert (await site.alice.get("/api/v1/sessions")).status_code == 200


async def test_only_health_and_signed_downloads_need_no_key(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as site:
        for name, key in (
            ("accept", b"*/*"),
            ("x-api-key", b"tml-guess"),
            ("authorization", b"Bearer tml-guess"),
            ("x-api-key", b"\xff"),
        ):
            for path in ("/api/v1/sessions", "/v1/models", "/metrics"):
                assert (await site.without_key.get(path, headers={name.encode(): key})).status_code == 401
        assert (await site.without_key.get("/api/v1/healthz")).status_code == 200


def test_the_options_of_tenants_are_validated() -> None:
    config = ServerConfig(
        base_model="x", host="0.0.0.0", api_keys_file="keys", tenant_checkpoint_quota_gb=0.5
    )
    assert config.tenant_quota is config and config.tenant_checkpoint_quota_bytes == 1 << 29
    assert ServerConfig(base_model="x").tenant_quota is None
    for invalid_option in (
        {"tenant_max_models": 0},
        {"tenant_checkpoint_quota_gb": float("nan")},
        {"tenant_max_tokens": -1},
    ):
        with pytest.raises(ConfigError, match=next(iter(invalid_option))):
            ServerConfig(base_model="x", **invalid_option)  # type: ignore[arg-type]


# --- owners


@pytest.mark.parametrize(
    ("identifier", "owner"),
    [
        ("tenant-alice.session-1:train:0", "alice"),
        ("tinker://tenant-alice.imported/weights/w", "alice"),
        ("session-1:train:0", DEFAULT_TENANT),
        ("tinker://session-1:train:0/weights/tenant-alice.w", DEFAULT_TENANT),
        ("tenant-Alice.x", DEFAULT_TENANT),
        ("xtenant-alice.x", DEFAULT_TENANT),
        ("tenant-alice", DEFAULT_TENANT),
        ("tenant-a/b.x", DEFAULT_TENANT),
    ],
)
def test_the_owner_is_part_of_the_id(identifier: str, owner: str) -> None:
    assert owner_of(identifier) == owner


async def test_two_tenants_may_use_the_same_names(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as site:
        alice, bob = await make_objects(site.alice), await make_objects(site.bob)
        for http, objects in ((site.alice, alice), (site.bob, bob)):
            await run_operation(
                http, "save_weights", model_id=objects.model, seq_id=20, path="w", overwrite=True
            )
            paths = [
                checkpoint["tinker_path"]
                for checkpoint in (await http.get("/api/v1/checkpoints")).json()["checkpoints"]
            ]
            assert sorted(paths) == sorted(
                [objects.weights, objects.sampler_weights, f"tinker://{objects.model}/external_weights/e"]
            )
        assert (await site.bob.request("DELETE", bob.checkpoint_url)).status_code == 204
        assert (
            await site.alice.post("/api/v1/weights_info", json={"tinker_path": alice.weights})
        ).status_code == 200


async def test_owners_survive_a_restart(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as site:
        objects = await make_objects(site.alice)
        # A server without tenants writes such paths. They belong to the operator.
        operator_path = "tinker://session-0123456789abcdef:train:0/weights/old"
        site.context.checkpoints.write(
            operator_path, {"steps": np.zeros(1)}, lora=LoraSpec(rank=4), step=0, user_metadata={}
        )
        settings = site.context.settings
        restarted = fake_context(tmp_path / "checkpoints", settings=settings)
        transport = httpx.ASGITransport(build_app(StartupState(state=restarted)))
        listings = {}
        for name, http in (("alice", site.alice), ("bob", site.bob), ("operator", site.operator)):
            async with httpx.AsyncClient(
                transport=transport, base_url="http://server", headers=http.headers
            ) as client:
                checkpoints = (await client.get("/api/v1/checkpoints")).json()["checkpoints"]
                runs = (await client.get("/api/v1/training_runs")).json()["training_runs"]
                listings[name] = (
                    {checkpoint["tinker_path"] for checkpoint in checkpoints},
                    {run["training_run_id"] for run in runs},
                )
                assert (
                    await client.post("/api/v1/weights_info", json={"tinker_path": operator_path})
                ).status_code == (200 if name == "operator" else 404)
        fake_engine(restarted).stop()
        alice_paths = {
            objects.weights,
            objects.sampler_weights,
            f"tinker://{objects.model}/external_weights/e",
        }
        assert listings["alice"] == (alice_paths, {objects.model})
        assert listings["bob"] == (set(), set())
        assert listings["operator"] == (
            alice_paths | {operator_path},
            {objects.model, "session-0123456789abcdef:train:0"},
        )


async def test_the_operator_can_end_and_delete_objects_of_tenants(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as site:
        objects = await make_objects(site.alice)
        assert (await site.operator.get(f"/api/v1/sessions/{objects.session}")).status_code == 200
        assert (await site.operator.post(f"/api/v1/sessions/{objects.session}/finish")).status_code == 204
        assert (await site.alice.get(f"/api/v1/sessions/{objects.session}")).status_code == 404
        assert (await site.operator.request("DELETE", objects.checkpoint_url)).status_code == 204


async def test_without_a_key_file_the_api_key_can_access_all_objects(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as site:
        objects = await make_objects(site.alice)
    context = fake_context(
        tmp_path / "checkpoints", settings=HttpSettings(model_dir=None, api_key=OPERATOR_KEY)
    )
    transport = httpx.ASGITransport(build_app(StartupState(state=context)))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://server", headers={"x-api-key": OPERATOR_KEY}
    ) as http:
        assert len((await http.get("/api/v1/checkpoints")).json()["checkpoints"]) == 3
        assert (await http.get("/metrics")).status_code == 200
        session = await open_session(http)
        assert re.fullmatch("session-[0-9a-f]{16}", session)
        await run_operation(http, "load_weights", session_id=session, model_seq_id=0, path=objects.weights)
    fake_engine(context).stop()


# --- sharing


async def test_a_published_checkpoint_is_changed_by_its_owner_only(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as site:
        objects = await make_objects(site.alice)
        sampler_url = f"/api/v1/training_runs/{objects.model}/checkpoints/sampler_weights/s"
        session = await open_session(site.bob)

        async def statuses() -> list[int]:
            requests = [
                ("weights_info", {"tinker_path": objects.weights}),
                ("load_weights", {"session_id": session, "model_seq_id": 3, "path": objects.weights}),
                (
                    "create_sampling_session",
                    {
                        "session_id": session,
                        "sampling_session_seq_id": 3,
                        "model_path": objects.sampler_weights,
                    },
                ),
                (
                    "asample",
                    {
                        "model_path": objects.sampler_weights,
                        "prompt": {"chunks": [{"tokens": [1]}]},
                        "sampling_params": {},
                    },
                ),
            ]
            replies = [await site.bob.post(f"/api/v1/{route}", json=body) for route, body in requests]
            return [
                reply.status_code
                for reply in (*replies, await site.bob.get(f"{objects.checkpoint_url}/archive"))
            ]

        assert await statuses() == [404] * 5
        for path in (objects.checkpoint_url, sampler_url):
            assert (await site.alice.post(f"{path}/publish")).status_code == 204
        assert await statuses() == [200, 200, 200, 200, 302]
        for method, path, body in (
            ("DELETE", objects.checkpoint_url, None),
            ("DELETE", f"{objects.checkpoint_url}/publish", None),
            ("POST", f"{objects.checkpoint_url}/publish", None),
            ("PUT", f"{objects.checkpoint_url}/ttl", {"ttl_seconds": 100}),
        ):
            assert (await site.bob.request(method, path, json=body)).status_code == 404
        assert (await site.bob.get("/api/v1/checkpoints")).json()["checkpoints"] == []
        for path in (objects.checkpoint_url, sampler_url):
            assert (await site.alice.delete(f"{path}/publish")).status_code == 204
        assert await statuses() == [404] * 5
        sample_body = {
            "sampling_session_id": f"{session}:sample:3",
            "prompt": {"chunks": [{"tokens": [1]}]},
            "sampling_params": {},
        }
        # the sampler was created while the checkpoint was public
        for route, body in (
            ("/api/v1/asample", sample_body),
            ("/v1/completions", {"model": f"{session}:sample:3", "prompt": [1], "max_tokens": 1}),
        ):
            assert (await site.bob.post(route, json=body)).status_code == 404


async def test_a_checkpoint_that_replaces_a_published_one_is_private(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as site:
        objects = await make_objects(site.alice)
        await site.alice.post(f"{objects.checkpoint_url}/publish")
        site.context.checkpoints.delete(objects.weights)  # the run index still lists it as public
        await run_operation(site.alice, "save_weights", model_id=objects.model, seq_id=30, path="w")
        assert (
            await site.bob.post("/api/v1/weights_info", json={"tinker_path": objects.weights})
        ).status_code == 404


# --- signed URLs


async def test_a_changed_download_url_is_refused(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as site:
        alice, bob = await make_objects(site.alice), await make_objects(site.bob)
        urls = (
            await site.bob.get(
                f"/api/v1/training_runs/{bob.model}/checkpoints/external_weights/e/external_weights_urls"
            )
        ).json()["urls"]
        url = str(urls["adapter_config.json"])
        assert (await site.without_key.get(url)).status_code == 200
        signature = url.rpartition("signature=")[2]
        for forged_url in (
            url.replace(bob.model, alice.model).replace(bob.model.replace(":", "%3A"), alice.model),
            url.replace("adapter_config.json", "adapter_model.safetensors"),
            url.replace(signature, "%C3%A9" * 64),
            url.replace(signature, ""),
            re.sub("ends=[0-9]+", f"ends={'9' * 5000}", url),
            re.sub("ends=[0-9]+", "ends=%D9%A1%D9%A2", url),
            re.sub("ends=[0-9]+", "ends=-1", url),
            re.sub("generation=[0-9a-f]+", f"generation={'0' * 32}", url),
            url.partition("?")[0],
        ):
            reply = await site.without_key.get(forged_url)
            assert reply.status_code == 404 and "no such download" in reply.json()["detail"], forged_url


# --- quotas


async def test_each_tenant_has_its_own_quota_of_models(tmp_path: Path) -> None:
    async with two_tenants(tmp_path, TenantOptions(tenant_max_models=2)) as site:
        session = await open_session(site.alice)
        models = [await make_model(site.alice, session, number) for number in range(2)]
        body = {"session_id": session, "model_seq_id": 2, "base_model": MODEL, "lora_config": {"rank": 4}}
        refused = await site.alice.post("/api/v1/create_model", json=body)
        assert refused.status_code == 400 and "tenant_max_models" in refused.json()["detail"]
        await make_model(site.bob, await open_session(site.bob))
        await run_operation(site.alice, "unload_model", model_id=models[0])
        await make_model(site.alice, session, 2)


async def test_each_tenant_has_its_own_quota_of_checkpoints(tmp_path: Path) -> None:
    async with two_tenants(tmp_path, TenantOptions(tenant_max_checkpoints=1)) as site:
        for http in (site.alice, site.bob):
            model = await make_model(http, await open_session(http))
            for overwrite in (False, True):
                await run_operation(http, "save_weights", model_id=model, path="w", overwrite=overwrite)
            reply = await post(http, "save_weights", model_id=model, path="x")
            refused = (
                await http.post("/api/v1/retrieve_future", json={"request_id": reply["request_id"]})
            ).json()
            assert (refused["category"], "you have 1 checkpoints" in refused["error"]) == ("user", True)


def test_each_tenant_has_its_own_quota_of_checkpoint_bytes(tmp_path: Path) -> None:
    def write(store: CheckpointStore, path: str) -> int:
        arrays = {"x": np.zeros(100, np.float32)}
        return store.write(
            path, arrays, lora=LoraSpec(rank=1), step=0, user_metadata={}, overwrite=True
        ).size_bytes

    size = write(CheckpointStore(tmp_path / "other", "m"), "tinker://a/weights/1")
    store = CheckpointStore(
        tmp_path / "root", "m", tenant_quota=TenantOptions(tenant_checkpoint_quota_gb=2 * size / 2**30)
    )
    for number in range(3):
        write(store, f"tinker://operator/weights/{number}")
    for run in ("tenant-a.r", "tenant-b.r"):
        for number in (0, 1, 1):
            write(store, f"tinker://{run}/weights/{number}")
        with pytest.raises(UserError, match="tenant_checkpoint_quota_gb"):
            write(store, f"tinker://{run}2/weights/0")


class HeldEngine:
    """An engine that records operations. The test resolves their futures."""

    def __init__(self) -> None:
        self.info = EngineInfo(base_model="m", max_context_length=1000, max_lora_rank=8, vocab_size=10)
        self.submitted: list[tuple[Operation[Any], str]] = []
        self.futures: list[Future[Any]] = []
        self.refuses_operations = False
        self.failure: str | None = None

    def submit[R](
        self, op: Operation[R], watcher: Watcher | None = None, *, tenant: str = DEFAULT_TENANT
    ) -> Future[R]:
        if self.refuses_operations:
            raise RuntimeError("broken")
        self.submitted.append((op, tenant))
        self.futures.append(Future())
        return self.futures[-1]

    def stats(self) -> dict[str, object]:
        return {}


def sample(*, prompt_length: int, max_tokens: int | None, num_samples: int = 1) -> Sample:
    return Sample(
        weights=None,
        prompt=np.zeros(prompt_length, np.int32),
        settings=SamplingSettings(max_tokens=max_tokens),
        num_samples=num_samples,
    )


def test_tokens_in_flight_are_bounded_and_always_released() -> None:
    engine = HeldEngine()
    share = EngineShare(engine, "alice", 4000)
    share.submit(sample(prompt_length=100, max_tokens=900, num_samples=2))  # 1,900 tokens
    # 1,900 tokens, because each completion can reach the context length
    share.submit(sample(prompt_length=100, max_tokens=None, num_samples=2))
    with pytest.raises(CapacityError, match="tenant_max_tokens=4000"):
        share.submit(sample(prompt_length=1, max_tokens=1))  # counts as 256 tokens
    with pytest.raises(UserError, match="send smaller requests"):
        share.submit(sample(prompt_length=100, max_tokens=900, num_samples=5))
    for op_without_tokens in (CreateModel(model_id="m", lora=LoraSpec(rank=1)), UnloadModel(model_id="m")):
        share.submit(op_without_tokens)
    assert {tenant for _, tenant in engine.submitted} == {"alice"}
    engine.futures[0].set_exception(RuntimeError("failed"))
    share.submit(sample(prompt_length=100, max_tokens=900, num_samples=2))
    engine.futures[1].cancel()
    engine.refuses_operations = True
    with pytest.raises(RuntimeError, match="broken"):
        share.submit(sample(prompt_length=1, max_tokens=1))
    assert share.stats()["tokens_in_flight"] == 1900
    assert LEAST_TOKENS == 256


async def test_a_tenant_with_too_many_tokens_in_flight_gets_a_429(tmp_path: Path) -> None:
    async with two_tenants(tmp_path, TenantOptions(tenant_max_tokens=600)) as site:
        body = {
            "base_model": MODEL,
            "prompt": {"chunks": [{"tokens": [1]}]},
            "sampling_params": {"max_tokens": 400},
        }
        fake_engine(site.context).gate.clear()
        assert (await site.alice.post("/api/v1/asample", json=body)).status_code == 200
        assert (await site.alice.post("/api/v1/asample", json=body)).status_code == 429
        completion = {"model": MODEL, "prompt": [1, 2], "max_tokens": 400}
        assert (await site.alice.post("/v1/completions", json=completion)).status_code == 429
        assert (await site.bob.post("/api/v1/asample", json=body)).status_code == 200
        assert (await site.operator.post("/api/v1/asample", json=body)).status_code == 200
        fake_engine(site.context).gate.set()


def test_a_tenant_evicts_its_own_least_recently_used_snapshots() -> None:
    registry = Registry(session_timeout_s=10)
    views = {
        tenant: registry.for_tenant(tenant, TenantOptions(tenant_max_snapshots=2))
        for tenant in ("alice", "bob")
    }
    sessions = {
        tenant: view.open_session(tags=[], user_metadata={}, display_name=None).session_id
        for tenant, view in views.items()
    }
    for tenant, view in views.items():
        for number in range(3):
            sampler_id = view.sampler_id(sessions[tenant], number)
            view.add_sampler(sessions[tenant], sampler_id, model_path=None, weights=sampler_id)
            if number == 1:
                view.sampler(f"{sessions[tenant]}:sample:0")  # used after sampler 1 was created
    freed = views["alice"].free_surplus_snapshots()
    assert [op.weights for op in freed] == [f"{sessions['alice']}:sample:1"]
    assert views["bob"].stats()["snapshots"] == 3 and views["alice"].stats()["snapshots"] == 2
    assert registry.free_surplus_snapshots() == []


def test_sessions_and_samplers_of_a_tenant_are_bounded() -> None:
    registry = Registry(session_timeout_s=10)
    view = registry.for_tenant("alice", TenantOptions(tenant_max_sessions=1, tenant_max_samplers=1))
    session = view.open_session(tags=[], user_metadata={}, display_name=None).session_id
    with pytest.raises(UserError, match="open sessions"):
        view.open_session(tags=[], user_metadata={}, display_name=None)
    for _ in range(2):
        view.add_sampler(session, f"{session}:sample:0", model_path=None, weights=None)
    with pytest.raises(UserError, match="samplers"):
        view.add_sampler(session, f"{session}:sample:1", model_path=None, weights=None)
    registry.open_session(tags=[], user_metadata={}, display_name=None)


async def test_each_tenant_has_its_own_store_of_results(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as site:
        alice, bob = site.context.for_tenant("alice").futures, site.context.for_tenant("bob").futures
        assert alice is not bob
        model = await make_model(site.alice, await open_session(site.alice))
        submitted = await post(site.alice, "optim_step", model_id=model, seq_id=1, adam_params={})
        assert alice.stats()["pending"] + alice.stats()["finished"] == 2
        assert bob.stats() == {"pending": 0, "finished": 0, "finished_bytes": 0, "evicted_undelivered": 0}
        assert (
            await site.bob.post("/api/v1/retrieve_future", json={"request_id": submitted["request_id"]})
        ).status_code == 410


# --- expiry and downloads


async def test_an_expired_session_ends_with_its_waiting_requests(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as site:
        objects = await make_objects(site.alice)
        engine = fake_engine(site.context)
        engine.gate.clear()
        running = await post(site.alice, "optim_step", model_id=objects.model, seq_id=40, adam_params={})
        waiting = await post(site.alice, "optim_step", model_id=objects.model, seq_id=41, adam_params={})
        session = site.context.registry.look_up(objects.session)
        session.last_seen -= 1000
        await housekeep(site.context)
        engine.gate.set()
        reply = await site.alice.post("/api/v1/retrieve_future", json={"request_id": waiting["request_id"]})
        assert "withdrawn" in reply.json()["error"]
        await site.alice.post("/api/v1/retrieve_future", json={"request_id": running["request_id"]})
        assert (await site.alice.get("/api/v1/sessions")).json() == {"sessions": []}
        engine.stop()
        assert len(engine.of_type(OptimStep)) < 3 and len(engine.of_type(UnloadModel)) == 1


async def test_a_tenants_checkpoint_expires(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as site:
        objects = await make_objects(site.alice)
        assert (
            await site.alice.put(f"{objects.checkpoint_url}/ttl", json={"ttl_seconds": 5000})
        ).status_code == 204
        generation = site.context.checkpoints.info(objects.weights).generation
        site.context.run_index.set_expiry(
            objects.weights, datetime.now(UTC) - timedelta(seconds=1), generation
        )
        await housekeep(site.context)
        assert (
            await site.alice.post("/api/v1/weights_info", json={"tinker_path": objects.weights})
        ).status_code == 404


def test_other_users_cannot_read_an_archive(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, "m")
    save_version(store, "tinker://run/weights/a", 1)
    previous = os.umask(0o022)
    try:
        file = file_of(store, "tinker://run/weights/a", ARCHIVE)[1]
    finally:
        os.umask(previous)
    assert file.stat().st_mode & 0o777 == 0o600


async def test_a_tenant_can_download_an_archive_of_its_checkpoint(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as site:
        objects = await make_objects(site.alice)
        redirect = await site.alice.get(f"{objects.checkpoint_url}/archive")
        archive = await site.without_key.get(redirect.headers["location"])
        with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
            assert tar.getnames() == ["adapter_config.json", "adapter_model.safetensors"]


def test_adding_a_key_keeps_the_mode_and_owner_of_the_file(tmp_path: Path) -> None:
    """A server that runs as another user must still be able to read the file."""
    file = tmp_path / "keys"
    keys.add(file, "alice")
    file.chmod(0o640)
    keys.add(file, "bob")
    assert file.stat().st_mode & 0o777 == 0o640 and file.stat().st_uid == os.getuid()

"""A damaged file, a malformed URL or a full disk fails one request and affects no other object."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyrl_tx_server.engine.futures import Retention
from skyrl_tx_server.engine.operations import CreateModel, UnloadModel
from skyrl_tx_server.errors import ConfigError, StorageError, UserError
from skyrl_tx_server.files.base_model import fingerprint, open_base_model
from skyrl_tx_server.files.peft_files import CONFIG, read_adapter
from skyrl_tx_server.http.app import build_app
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.http_handler import StartupState
from skyrl_tx_server.model.config_json import load_model_config
from tests.fakes.server import fake_context, fake_engine
from tests.server.tiny_qwen3 import FIXTURES

DEEP_LIST = "[" * 100_000 + "]" * 100_000
DEEP_OBJECT = '{"a":' * 500 + "1" + "}" * 500


@pytest.fixture
def context(tmp_path: Path) -> AppState:
    return fake_context(tmp_path, retention=Retention(hold_s=30))


@pytest.fixture
async def http(context: AppState) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(StartupState(state=context)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server/api/v1/") as http:
        yield http
    fake_engine(context).stop()


async def call(http: httpx.AsyncClient, route: str, **body: object) -> dict[str, Any]:
    """Submit an operation. Return its result or its error."""
    reply = await http.post(route, json=body)
    assert reply.status_code == 200, reply.text
    return (await http.post("retrieve_future", json={"request_id": reply.json()["request_id"]})).json()


async def make_model(http: httpx.AsyncClient, number: int = 0) -> dict[str, Any]:
    session = (await http.post("create_session", json={})).json()["session_id"]
    return await call(
        http,
        "create_model",
        session_id=session,
        model_seq_id=number,
        base_model="local/fake",
        lora_config={"rank": 4},
    )


def damaged_texts(record: dict[str, Any]) -> dict[str, str]:
    """Return invalid contents of checkpoint.json, by the kind of damage."""
    return {
        "deep": DEEP_LIST,
        "nested": DEEP_OBJECT,
        "empty": "",
        "a list": "[]",
        "large": json.dumps(record | {"user_metadata": {"a": "b" * (2 << 20)}}),
        "no zone": json.dumps(record | {"created_at": "2026-01-01T00:00:00"}),
        "time": json.dumps(record | {"created_at": "9" * 5000}),
        "size": json.dumps(record | {"size_bytes": "9" * 5000}),
        "infinite": json.dumps(record | {"size_bytes": 1e999}),
        "metadata": json.dumps(record | {"user_metadata": {"a": {"b": 1}}}),
        "rank": json.dumps(record | {"lora": record["lora"] | {"rank": "four"}}),
        "lora": json.dumps(record | {"lora": [1]}),
        "alpha": json.dumps(record | {"lora": record["lora"] | {"alpha": float("nan")}}),
    }


async def test_a_damaged_record_affects_no_other_checkpoint(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model_id = (await make_model(http))["model_id"]
    good, bad = [
        (await call(http, "save_weights", model_id=model_id, path=name))["path"] for name in ("good", "bad")
    ]
    file = tmp_path / model_id / "weights" / "bad" / "checkpoint.json"
    for name, text in damaged_texts(json.loads(file.read_text())).items():
        file.write_text(text)
        for route, expected in (
            ("checkpoints", good),
            (f"training_runs/{model_id}/checkpoints", good),
            ("training_runs", model_id),
        ):
            reply = await http.get(route)
            assert reply.status_code == 200 and expected in reply.text, (name, reply.text)
        reply = await http.post("weights_info", json={"tinker_path": bad})
        assert reply.status_code in (200, 400) and "internal error" not in reply.text, (name, reply.text)
        assert (await http.post("weights_info", json={"tinker_path": good})).status_code == 200
    file.unlink()
    file.mkdir()
    assert good in (await http.get("checkpoints")).text


async def test_a_record_with_a_file_in_another_directory_is_refused(
    http: httpx.AsyncClient, context: AppState, tmp_path: Path
) -> None:
    model_id = (await make_model(http))["model_id"]
    path = (await call(http, "save_weights", model_id=model_id, path="w"))["path"]
    file = tmp_path / model_id / "weights" / "w" / "checkpoint.json"
    record = json.loads(file.read_text())
    arrays = (file.parent / record["arrays"]).rename(tmp_path / "elsewhere.safetensors")
    for name in ("../../../elsewhere.safetensors", str(arrays), "..", "", 7):
        file.write_text(json.dumps(record | {"arrays": name}))
        with pytest.raises(UserError, match=r"is damaged: a field of checkpoint\.json"):
            context.checkpoints.read(path)


@pytest.mark.parametrize("text", [DEEP_LIST, DEEP_OBJECT, "[]", '{"r": 1e999, "lora_alpha": 1}', "\xff"])
def test_an_invalid_adapter_config_is_a_user_error(text: str, tmp_path: Path) -> None:
    base = open_base_model(FIXTURES / "tied")
    (tmp_path / CONFIG).write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="not a PEFT adapter"):
        read_adapter(tmp_path, base)


@pytest.mark.parametrize("text", [DEEP_LIST, DEEP_OBJECT, "[]", "\xff"])
def test_an_invalid_model_config_is_a_configuration_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json is invalid"):
        load_model_config(tmp_path)
    with pytest.raises(ConfigError, match="not a readable"):
        fingerprint(tmp_path)


@pytest.mark.parametrize(
    "query",
    [
        {"ends": "9" * 5000, "signature": "a"},
        {"ends": "\u0661\u0662", "signature": "a"},
        {"ends": "\u00b2", "signature": "a"},
        {"ends": "12", "signature": "\u00e9" * 64},
        {"ends": "-1", "signature": "a"},
        {"signature": "\ud800"},
        {},
    ],
)
async def test_a_malformed_download_url_is_not_found(query: dict[str, str], http: httpx.AsyncClient) -> None:
    pairs = "&".join(f"{name}={percent(value)}" for name, value in query.items())
    for file in ("adapter_config.json", "%C3%A9", "%ED%A0%80"):
        reply = await http.get(f"downloads/run/weights/w/{file}?{pairs}")
        assert (reply.status_code, "no such download" in reply.text) == (404, True), reply.text


def percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))


async def test_a_full_disk_fails_only_the_model_that_is_created(
    http: httpx.AsyncClient,
    context: AppState,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first_id = (await make_model(http))["model_id"]

    def raise_disk_full(run: object) -> None:
        raise StorageError("ledger.jsonl cannot be written: No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr(context.run_index, "record_run", raise_disk_full)
        reply = await make_model(http, 1)
    assert "No space left on device" in reply["error"] and "Traceback" not in caplog.text
    (refused,) = [op.model_id for op in fake_engine(context).of_type(CreateModel) if op.model_id != first_id]
    assert (await http.post("get_info", json={"model_id": refused})).status_code == 404
    assert (await http.post("get_info", json={"model_id": first_id})).status_code == 200
    last_id = (await make_model(http))["model_id"]
    assert fake_engine(context).of_type(UnloadModel) == [UnloadModel(model_id=refused)]
    assert (await http.get(f"training_runs/{last_id}")).status_code == 200

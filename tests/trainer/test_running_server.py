"""Tests that the directory of the model of a running server is found, and used as the tokenizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import httpx
import pytest

from skyrl_tx_server.http.app_state import HttpSettings
from skyrl_tx_server.http.http_handler import StartupState
from src.policy.running_server import find_server, tokenizer_directory
from src.policy.served_model import with_served_model
from tests.fakes.server import fake_context, serving


def test_the_directory_of_a_served_model_is_found(tmp_path: Path) -> None:
    context = fake_context(tmp_path / "checkpoints", settings=HttpSettings(model_dir=tmp_path))
    with serving(StartupState(state=context)) as url:
        assert tokenizer_directory(url, model_name="local/fake", key="") == str(tmp_path)
        assert context.registry.sessions() == []  # the session has ended
        assert tokenizer_directory(url, model_name="local/other", key="") is None


def test_a_directory_that_is_not_here_is_not_returned(tmp_path: Path) -> None:
    settings = HttpSettings(model_dir=tmp_path / "of a container")
    context = fake_context(tmp_path / "checkpoints", settings=settings)
    with serving(StartupState(state=context)) as url:
        assert tokenizer_directory(url, model_name="local/fake", key="") is None
    assert tokenizer_directory("http://other-machine:8000", model_name="local/fake", key="") is None


def test_a_server_on_the_ipv6_loopback_is_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        data = {"tokenizer_id": str(tmp_path)}
        return httpx.Response(200, json={"session_id": "s", "model_id": "m", "model_data": data})

    client = partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "Client", client)
    assert tokenizer_directory("http://[::1]:8000", model_name="local/fake", key="") == str(tmp_path)


def test_a_server_that_fails_to_list_its_models_is_named_with_the_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(url: str, **_: object) -> httpx.Response:
        status = 200 if url.endswith("/healthz") else 500
        return httpx.Response(status, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", answer)
    reason = find_server("http://localhost:8000", key="")
    assert reason == "it answered /api/v1/get_server_capabilities with HTTP 500"


@pytest.mark.parametrize("name", ["fake", "local/fake", "models/fake.gguf"])
def test_the_tokenizer_of_a_local_model_comes_from_the_server(tmp_path: Path, name: str) -> None:
    context = fake_context(tmp_path / "checkpoints", settings=HttpSettings(model_dir=tmp_path))
    with serving(StartupState(state=context)) as url:
        server = ["backend=skyrl-tx", f"skyrl_tx_url={url}"]
        assert with_served_model([*server, f"model_name={name}"]) == [
            *server,
            "model_name=local/fake",
            f"tokenizer={tmp_path}",
        ]
        assert with_served_model([*server, f"model_name={name}", "tokenizer=t"]) == [
            *server,
            "tokenizer=t",
            "model_name=local/fake",
        ]
        for arguments in (
            [*server, "model_name=org/fake"],
            [*server, "model_name=other"],
            [server[0], "skyrl_tx_url=http://127.0.0.1:9", f"model_name={name}"],
        ):
            assert with_served_model(arguments) == arguments


@pytest.mark.parametrize("unset", ["tokenizer=", "tokenizer=None", "tokenizer=null"])
def test_an_unset_tokenizer_is_replaced_by_that_of_the_model(tmp_path: Path, unset: str) -> None:
    (tmp_path / "model").mkdir()
    argv = ["backend=skyrl-tx", unset, f"model_name={tmp_path / 'model'}"]
    assert with_served_model(argv) == [
        "backend=skyrl-tx",
        "model_name=local/model",
        f"tokenizer={tmp_path / 'model'}",
    ]
    context = fake_context(tmp_path / "checkpoints", settings=HttpSettings(model_dir=tmp_path))
    with serving(StartupState(state=context)) as url:
        server = ["backend=skyrl-tx", f"skyrl_tx_url={url}"]
        assert with_served_model([*server, unset, "model_name=fake"]) == [
            *server,
            "model_name=local/fake",
            f"tokenizer={tmp_path}",
        ]

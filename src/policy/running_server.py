"""Find the models of the server at an address, and the directory of the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from src.core.options import is_http_address

NO_SERVER = "no server answers"
REFUSED_KEY = "it refuses the key; set TINKER_API_KEY to the key of the server"
TIMEOUT_S = 5.0
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModels:
    """The models of a server."""

    contexts: Mapping[str, int]  # maximum context in tokens, by model name; not empty

    def reason_against(self, model_name: str) -> str | None:
        """Return the reason why a run with `model_name` cannot use the server, or None if it can."""
        if model_name in self.contexts:
            return None
        return f"it serves {', '.join(sorted(self.contexts))}, not {model_name}"


def find_server(url: str, *, key: str) -> ServedModels | str:
    """Return the models of the server at `url`, or one line with the reason why the server cannot be used.

    `key` is the API key; an empty key is not sent. The reason is a clause about the server, for example
    "it is not ready yet".
    """
    if not is_http_address(url):
        return "its address is not an HTTP address"
    base = url.rstrip("/")
    try:
        health = httpx.get(f"{base}/api/v1/healthz", timeout=TIMEOUT_S)
        if health.status_code == 503:
            return "it is not ready yet"
        if health.status_code != 200:
            return f"it is not a Tinker endpoint: /api/v1/healthz answered {health.status_code}"
        headers = {"X-API-Key": key} if key else {}
        reply = httpx.get(f"{base}/api/v1/get_server_capabilities", headers=headers, timeout=TIMEOUT_S)
        if reply.status_code in (401, 403):
            return REFUSED_KEY
        if not reply.is_success:
            return f"it answered /api/v1/get_server_capabilities with HTTP {reply.status_code}"
        models = reply.json()["supported_models"]
        contexts = {model["model_name"]: int(model["max_context_length"]) for model in models}
    except httpx.ConnectError:
        return NO_SERVER
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"it did not answer ({type(error).__name__})"
    except (ValueError, KeyError, TypeError):
        return "it is not a Tinker endpoint: it does not list its models"
    return ServedModels(contexts=contexts) if contexts else "it serves no model"


def tokenizer_directory(url: str, *, model_name: str, key: str) -> str | None:
    """Return the directory with the tokenizer of `model_name`, the model of the server at `url`. Return None
    if the server or the directory is not on this machine, or if a request fails.

    Only `get_info` of an adapter reports the directory, and only to clients on the machine of the server. The
    function therefore creates an adapter of rank 1, and then ends the session of the adapter. The function
    does not use the SDK, which would retry for minutes.
    """
    if not is_http_address(url) or httpx.URL(url).host not in LOCAL_HOSTS:
        return None
    adapter = {"model_seq_id": 0, "base_model": model_name, "lora_config": {"rank": 1}}
    headers = {"X-API-Key": key} if key else {}
    try:
        with httpx.Client(
            base_url=f"{url.rstrip('/')}/api/v1/", headers=headers, timeout=TIMEOUT_S
        ) as client:
            session_id = _post(client, "create_session", {"tags": []})["session_id"]
            try:
                model_id = _post(client, "create_model", {"session_id": session_id, **adapter})["model_id"]
                directory = _post(client, "get_info", {"model_id": model_id})["model_data"]["tokenizer_id"]
            finally:
                client.post(f"sessions/{session_id}/finish", json={})
    except (httpx.HTTPError, ValueError, KeyError, TypeError):  # for example, no memory for another adapter
        return None
    return directory if directory is not None and Path(directory).is_dir() else None


def _post(client: httpx.Client, route: str, body: dict[str, object]) -> Any:
    return client.post(route, json=body).raise_for_status().json()

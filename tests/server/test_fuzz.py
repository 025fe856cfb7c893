"""All parsers accept mutated bodies or refuse them with one line, and no route reports an internal error.

`python -m tests.stress.fuzz` runs the same checks for hours with coverage guidance.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_tx_server.engine.futures import Retention
from skyrl_tx_server.http.app import build_app
from skyrl_tx_server.http.http_handler import StartupState
from tests.fakes.bodies import (
    PARSERS,
    ROUTES,
    VALID,
    VALID_MESSAGES,
    json_is_accepted,
    messages,
    mutated,
    protobuf_is_accepted,
    values,
)
from tests.fakes.server import fake_context, fake_engine
from tests.stress.fuzz import finding_report

FUZZED = settings(max_examples=120, deadline=None, derandomize=True)


@pytest.mark.parametrize("name", PARSERS)
def test_every_valid_body_is_accepted(name: str) -> None:
    assert json_is_accepted(name, VALID[name])
    assert all(protobuf_is_accepted(message) for message in VALID_MESSAGES)


@FUZZED
@given(body=st.one_of(messages(), st.binary(max_size=60)))
def test_a_protobuf_body_is_parsed_or_refused(body: bytes) -> None:
    protobuf_is_accepted(body)


@pytest.mark.parametrize("name", PARSERS)
@FUZZED
@given(data=st.data())
def test_a_json_body_is_parsed_or_refused(name: str, data: st.DataObject) -> None:
    json_is_accepted(name, data.draw(st.one_of(mutated(VALID[name]), values)))


FIELDS: dict[str, object] = {
    **{
        "session_id": "s",
        "model_id": "s:train:0",
        "model_seq_id": 0,
        "seq_id": 3,
        "base_model": "local/fake",
        "lora_config": {"rank": 4},
    },
    **{
        "path": "one",
        "sampling_session_seq_id": 0,
        "request_id": "sample-0",
        "tinker_path": "tinker://a/weights/b",
        "kind": "snapshot",
    },
    **{
        "model_path": "tinker://a/sampler_weights/b",
        "user_metadata": {"a": "b"},
        "tags": ["a"],
        "ttl_seconds": 60,
        "overwrite": True,
    },
    **{"optimizer": True, "adam_params": {}},
}


@settings(FUZZED, max_examples=250)
@given(
    route=st.sampled_from(ROUTES),
    body=st.sets(st.sampled_from(sorted(FIELDS))).flatmap(
        lambda names: mutated({name: FIELDS[name] for name in names})
    ),
    session_exists=st.booleans(),
)
def test_no_body_causes_an_internal_error_in_a_route(
    tmp_path_factory: pytest.TempPathFactory, route: str, body: object, session_exists: bool
) -> None:
    """With `session_exists`, the session and the model of the body are created first."""
    asyncio.run(_post(tmp_path_factory.mktemp("fuzz"), route, body, session_exists=session_exists))


async def _post(directory: Path, route: str, body: object, *, session_exists: bool) -> None:
    context = fake_context(directory, retention=Retention(hold_s=0.01))
    transport = httpx.ASGITransport(build_app(StartupState(state=context)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server/api/v1/") as http:
        if session_exists and isinstance(body, dict):
            session_id = (await http.post("create_session", json={})).json()["session_id"]
            create_model = {
                "session_id": session_id,
                "model_seq_id": 0,
                "base_model": "local/fake",
                "lora_config": {"rank": 4},
            }
            await http.post("create_model", json=create_model)
            body = {
                key: value.replace("s", session_id, 1) if value in ("s", "s:train:0") else value
                for key, value in body.items()
            }
        response = await http.post(
            route,
            content=json.dumps(body).encode("utf-8", "surrogatepass"),
            headers={"content-type": "application/json"},
        )
        assert response.status_code in (200, 204, 400, 404, 408, 410), response.text
        assert "internal error" not in response.text
    fake_engine(context).stop()


def test_a_finding_has_its_traceback_and_the_path_of_its_input() -> None:
    error = "=== Uncaught Python exception: ===\nValueError: a"
    stderr = "#1 NEW\nartifact_prefix='/f/'; Test unit written to /f/crash-0\nBase64: AA=="
    assert finding_report(f"text\n {error}\n", stderr) == f"{error}\ninput: /f/crash-0"
    assert finding_report("", "killed\n") == "killed"

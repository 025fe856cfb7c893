"""A web page in the user's browser cannot use the server by DNS rebinding or cross-site requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from skyrl_tx_server.http.access import access_policy, host_name
from skyrl_tx_server.http.app import ENDPOINTS, build_app
from skyrl_tx_server.http.app_state import AppState, HttpSettings
from skyrl_tx_server.http.http_handler import StartupState
from tests.fakes.server import fake_context, fake_engine


def policy_context(
    root: Path,
    *,
    host: str = "127.0.0.1",
    key: str | None = None,
    hosts: str | None = None,
    origins: str | None = None,
) -> AppState:
    access = access_policy(host=host, has_key=key is not None, allowed_hosts=hosts, allowed_origins=origins)
    return fake_context(root, settings=HttpSettings(model_dir=None, api_key=key, access=access))


def client(context: AppState) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(build_app(StartupState(state=context))),
        base_url="http://127.0.0.1:8000",
    )


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    context = policy_context(tmp_path)
    async with client(context) as http:
        yield http
    fake_engine(context).stop()


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:8000"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "localhost.evil.example"},
        {"host": "10.0.0.7:8000"},
        {"host": "127.1"},
        {"host": ""},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_every_route_refuses_requests_from_web_pages(
    headers: dict[str, str], http: httpx.AsyncClient
) -> None:
    for endpoint in ENDPOINTS:
        reply = await http.request(
            endpoint.method, endpoint.path.replace("{", "").replace("}", ""), headers=headers
        )
        assert reply.status_code == 403, (endpoint.path, reply.text)
        assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000",
        "127.8.9.1",
        "LOCALHOST:9",
        "localhost.",
        "[::1]:8000",
        "[::1]",
        "[::ffff:127.0.0.1]:8",
    ],
)
async def test_every_name_of_the_loopback_interface_is_served(host: str, http: httpx.AsyncClient) -> None:
    assert (await http.get("/api/v1/get_server_capabilities", headers={"host": host})).status_code == 200
    same_origin = {"host": host, "sec-fetch-site": "same-origin"}
    assert (await http.get("/api/v1/stats", headers=same_origin)).status_code == 200


async def test_two_host_headers_are_refused(http: httpx.AsyncClient) -> None:
    headers = [("host", "127.0.0.1:8000"), ("host", "evil.example")]
    assert (await http.get("/api/v1/stats", headers=headers)).status_code == 403


async def test_a_cors_preflight_gets_no_permission(http: httpx.AsyncClient) -> None:
    headers = {
        "origin": "http://evil.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }
    reply = await http.options("/api/v1/create_session", headers=headers)
    assert reply.status_code >= 400 and not [
        name for name in reply.headers if name.startswith("access-control")
    ]


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/x-protobuf",
    ],
)
async def test_a_body_needs_a_content_type_that_causes_a_preflight(
    content_type: str | None, http: httpx.AsyncClient
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    reply = await http.post("/api/v1/create_session", content=b"{}", headers=headers)
    assert reply.status_code == 415 and "application/json (curl: -H" in reply.json()["detail"]
    assert (await http.get("/api/v1/sessions")).json() == {"sessions": []}


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8"])
async def test_the_sdks_content_type_is_accepted(content_type: str, http: httpx.AsyncClient) -> None:
    assert (
        await http.post("/api/v1/create_session", content=b"{}", headers={"content-type": content_type})
    ).status_code == 200


async def test_allowed_hosts_and_origins_are_served(tmp_path: Path) -> None:
    context = policy_context(tmp_path, hosts="gpu-7, Tinker.Example:80", origins="https://Board.example/")
    async with client(context) as http:
        for host in ("gpu-7:8000", "tinker.example"):
            assert (await http.get("/api/v1/stats", headers={"host": host})).status_code == 200
        assert (await http.get("/api/v1/stats", headers={"host": "other"})).status_code == 403
        page_headers = {"origin": "https://board.example", "sec-fetch-site": "cross-site"}
        reply = await http.get("/api/v1/stats", headers=page_headers)
        assert reply.status_code == 200 and not [
            name for name in reply.headers if name.startswith("access-control")
        ]
    fake_engine(context).stop()


async def test_with_a_key_any_host_is_served_and_web_pages_are_refused(tmp_path: Path) -> None:
    context = policy_context(tmp_path, host="0.0.0.0", key="tml-k")
    async with client(context) as http:
        headers = {"host": "tinker.example", "x-api-key": "tml-k"}
        assert (await http.get("/api/v1/stats", headers=headers)).status_code == 200
        assert (
            await http.get("/api/v1/stats", headers=headers | {"origin": "http://evil.example"})
        ).status_code == 403
    fake_engine(context).stop()


async def test_without_a_key_unknown_host_names_are_refused(
    tmp_path: Path,
) -> None:
    context = policy_context(tmp_path, host="0.0.0.0")
    async with client(context) as http:
        for host, status in (("10.0.0.7:8000", 200), ("[fe80::1]:8000", 200), ("evil.example", 403)):
            assert (await http.get("/api/v1/stats", headers={"host": host})).status_code == status
    fake_engine(context).stop()


def test_host_name_ignores_port_brackets_case_and_final_dot() -> None:
    assert [host_name(text) for text in ("A.Example.:1", "[::1]:8", "[::1]", "1.2.3.4")] == [
        "a.example",
        "::1",
        "::1",
        "1.2.3.4",
    ]

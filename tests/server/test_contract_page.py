"""The routes of the application are those of docs/server-contract.md, and include all routes of the SDK."""

import re
from pathlib import Path

import pytest
import tinker
from starlette.routing import Route

from skyrl_tx_server.http import app
from skyrl_tx_server.http.app import ENDPOINTS
from skyrl_tx_server.http.http_handler import StartupState
from skyrl_tx_server.http.routes.weights import CHECKPOINT

PAGE = Path(__file__).parents[2] / "docs" / "server-contract.md"


def test_the_page_lists_exactly_the_routes_of_the_application():
    section = PAGE.read_text().split("## Routes", 1)[1].split("\n## ", 1)[0]
    listed = re.findall(r"`((?:GET|POST|PUT|DELETE) [^`]+)`", section)
    assert sorted(route.replace("CHECKPOINT", CHECKPOINT) for route in listed) == sorted(
        f"{endpoint.method} {endpoint.path}" for endpoint in ENDPOINTS
    )


@pytest.mark.seed_behaviour(120)
def test_every_route_of_the_installed_sdk_is_declared():
    """`routes/unsupported.py` declares the routes that are not implemented, with an alternative for each."""
    sources = [path.read_text() for path in Path(tinker.__file__).parent.rglob("*.py")]
    routes = {route for text in sources for route in re.findall(r"""["'](/api/v1/[^"'?\s]+)["']""", text)}
    assert len(routes) > 30
    declared = [route for route in app.build_app(StartupState()).routes if isinstance(route, Route)]
    # a parameter of the SDK can be one path segment or two
    unknown = {
        path
        for path in routes
        if not any(route.path_regex.fullmatch(re.sub(r"{[^}]*}", "a/b", path)) for route in declared)
    }
    unknown = {
        path
        for path in unknown
        if not any(route.path_regex.fullmatch(re.sub(r"{[^}]*}", "a", path)) for route in declared)
    }
    assert unknown == set()

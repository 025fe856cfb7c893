"""docs/server-contract.md names every route of the application, and no other."""

import re
from pathlib import Path

from skyrl_tx_server.app import ENDPOINTS
from skyrl_tx_server.routes.weights import CHECKPOINT

PAGE = Path(__file__).parents[2] / "docs" / "server-contract.md"


def test_the_page_lists_the_applications_routes():
    section = PAGE.read_text().split("## Routes", 1)[1].split("\n## ", 1)[0]
    listed = re.findall(r"`((?:GET|POST|PUT|DELETE) [^`]+)`", section)
    assert sorted(route.replace("CHECKPOINT", CHECKPOINT) for route in listed) == sorted(f"{e.method} {e.path}" for e in ENDPOINTS)

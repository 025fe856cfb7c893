"""Tests the selection of the Docker engine, with a fake engine that has one answer to all GET requests."""

from __future__ import annotations

import hashlib
import json
import socketserver
import tempfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Thread

import pytest

from src.envs.sandbox.docker import engine

CONTEXT = "elsewhere"
ANSWER = json.dumps({"ApiVersion": "1.44"}).encode()


@pytest.fixture(params=["currentContext", "DOCKER_CONTEXT"])
def requested_paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Start a fake engine, select its Docker context, and yield the paths of the requests to the engine."""
    paths: list[str] = []

    class AnswerHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(ANSWER)))
            self.end_headers()
            self.wfile.write(ANSWER)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing, because a client of a Unix socket has no address."""

    # The path of `tmp_path` may be too long: on Linux, the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory() as name:
        directory, address = Path(name), f"{name}/engine.sock"
        meta = directory / "contexts" / "meta" / hashlib.sha256(CONTEXT.encode()).hexdigest() / "meta.json"
        meta.parent.mkdir(parents=True)
        endpoints = {"docker": {"Host": f"unix://{address}", "SkipTLSVerify": False}}
        meta.write_text(json.dumps({"Name": CONTEXT, "Metadata": {}, "Endpoints": endpoints}))
        selected = {"currentContext": CONTEXT} if request.param == "currentContext" else {}
        (directory / "config.json").write_text(json.dumps(selected))
        monkeypatch.setenv("DOCKER_CONFIG", name)
        monkeypatch.setenv("DOCKER_CONTEXT", "" if selected else CONTEXT)
        monkeypatch.delenv("DOCKER_HOST", raising=False)
        with socketserver.ThreadingUnixStreamServer(address, AnswerHandler) as server:
            thread = Thread(target=server.serve_forever)
            thread.start()
            yield paths
            server.shutdown()
            thread.join()


def test_the_engine_is_that_of_the_selected_context(requested_paths: list[str]) -> None:
    with engine(timeout_s=10) as client:
        assert requested_paths == ["/version"]
        client.ping()
    assert requested_paths == ["/version", "/v1.44/_ping"]

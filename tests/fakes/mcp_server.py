"""The MCP server of examples/fleet with additional tools: one per keyboard character, and tools that fail.

    python -m tests.fakes.mcp_server PORT [MARKER NUMBER]

If the file MARKER does not exist, the server creates it at tool call NUMBER and exits.
"""

from __future__ import annotations

import asyncio
import os
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from examples.fleet.inventory_server import TOOLS, Inventory, McpServer, Tool, serve

ROOT = Path(__file__).resolve().parents[2]
KEYS = string.ascii_letters + string.digits + "!#$%&*+-=?@^_~.:;/|"
FLOOD_BYTES = 20 * 2**20
PAGE = 40  # tools per page of tools/list
API_KEY = "k-1"  # required by /locked/mcp


def press(key: str) -> Tool:
    """Return a tool that counts how often `key` was pressed and returns the distinct keys pressed so far."""

    def function(inventory: Inventory) -> str:
        inventory.stock[key] = inventory.stock.get(key, 0) + 1
        return "".join(inventory.stock)

    return Tool(function, f"Press {key}.")


def fail(inventory: Inventory) -> object:
    raise RuntimeError("out of paper")


def die(inventory: Inventory) -> object:
    os._exit(3)


def freeze(inventory: Inventory) -> object:
    time.sleep(3600)


FAILING_TOOLS = {
    "fail": Tool(fail, "Raises an error."),
    "die": Tool(die, "Ends the server."),
    "hang": Tool(lambda inventory: None, "Does not return."),
    "freeze": Tool(freeze, "Does not return, and blocks the server."),
    "crash": Tool(lambda inventory: None, "Answers with the HTTP status 500."),
    "forget": Tool(lambda inventory: None, "Ends all sessions."),
    "long": Tool(lambda inventory: "x" * 50_000, "Returns 50,000 characters."),
    "flood": Tool(lambda inventory: "x" * FLOOD_BYTES, "Returns 20 MiB."),
    "garbage": Tool(lambda inventory: None, "Returns no JSON."),
    "surrogate": Tool(lambda inventory: None, "Returns half of a surrogate pair."),
}


class FailingServer(McpServer):
    """An `McpServer` whose behaviour depends on the request path: /streamed/mcp answers with server-sent
    events, /stateless/mcp has no sessions, /closed/mcp returns the status 503, and /locked/mcp requires a
    key.

    If `marker` is set and does not exist, tool call number `die_at` creates this file and ends the process.
    """

    def __init__(self, marker: Path | None = None, die_at: int = 0) -> None:
        super().__init__({**TOOLS, **FAILING_TOOLS, **{key: press(key) for key in KEYS}})
        self._marker = marker
        self._die_at = die_at
        self._num_calls = 0

    def answer(self, inventory: Inventory, method: str, params: dict) -> dict[str, object]:
        """Answer as `McpServer` does, but return the list of tools in pages of PAGE tools."""
        if method != "tools/list":
            return super().answer(inventory, method, params)
        start = int(params.get("cursor", "0"))
        page = [self.schema(name) for name in [*self.tools][start : start + PAGE]]
        cursor = {"nextCursor": str(start + PAGE)} if start + PAGE < len(self.tools) else {}
        return {"result": {"tools": page, **cursor}}

    async def post(self, request: Request) -> Response:
        env_key, message = request.path_params["env_key"], await request.json()
        if env_key == "closed":
            return Response(status_code=503)
        if env_key == "locked" and request.headers.get("authorization") != f"Bearer {API_KEY}":
            return Response(status_code=401)
        if env_key == "stateless":
            answer = self.answer(Inventory(), message["method"], message.get("params", {}))
            return JSONResponse({"jsonrpc": "2.0", "id": message.get("id"), **answer})
        name = message.get("params", {}).get("name") if message["method"] == "tools/call" else None
        self._num_calls += name is not None
        if self._marker is not None and self._num_calls == self._die_at and not self._marker.exists():
            self._marker.touch()
            os._exit(3)
        match name:
            case "hang":
                await asyncio.Event().wait()
            case "crash":
                return Response(status_code=500)
            case "forget":
                self.inventories.clear()
            case "garbage":
                return Response("[" * 100_000, media_type="application/json")
            case "surrogate":
                text = '{"content": [{"type": "text", "text": "\\ud800"}]}'
                return Response(
                    f'{{"jsonrpc": "2.0", "id": {message["id"]}, "result": {text}}}',
                    media_type="application/json",
                )
        response = await super().post(request)
        if env_key != "streamed" or response.status_code != 200:
            return response
        notice = 'event: message\r\ndata: {"jsonrpc": "2.0", "method": "notifications/message"}\r\n\r\n'
        text = f": comment\n\n{notice}data: {bytes(response.body).decode()}\n\n"
        headers = {"mcp-session-id": response.headers["mcp-session-id"]}
        return Response(text, media_type="text/event-stream", headers=headers)


@contextmanager
def mcp_server(*, program: str = "tests.fakes.mcp_server", options: tuple[str, ...] = ()) -> Iterator[str]:
    """Run a server process and restart it on the same port whenever it ends. Yields
    `http://127.0.0.1:PORT`."""
    process, port = start(program, 0, options)
    is_stopping = threading.Event()

    def restart() -> None:
        nonlocal process
        while True:
            process.wait()
            if is_stopping.is_set():
                return
            process, _ = start(program, port, options)

    thread = threading.Thread(target=restart)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        is_stopping.set()
        while thread.is_alive():
            process.kill()
            thread.join(0.1)


def start(program: str, port: int, options: tuple[str, ...]) -> tuple[subprocess.Popen[str], int]:
    """Start a server, wait until it listens, and return its process and its port."""
    command = [sys.executable, "-m", program, str(port), *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:  # the server prints one line
        line = process.stdout.readline()
    assert line.startswith("serving http://"), line
    return process, int(line.split("/")[2].partition(":")[2])


if __name__ == "__main__":
    marker, number = (Path(sys.argv[2]), int(sys.argv[3])) if sys.argv[2:] else (None, 0)
    serve(FailingServer(marker, number), int(sys.argv[1]))

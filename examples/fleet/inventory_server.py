"""An MCP server over streamable HTTP. Each session has a separate inventory.

    .venv/bin/python examples/fleet/inventory_server.py 8300

The server listens at http://127.0.0.1:8300/<env_key>/mcp, where `env_key` is the environment of a task. The
tool `reset` replaces the inventory with the stock that a task describes. The verifiers of
examples/fleet/tasks.jsonl read the inventory with the tool `export_stock`.
"""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

UNKNOWN_METHOD, INVALID_PARAMS = -32601, -32602  # error codes of JSON-RPC


@dataclass
class Inventory:
    stock: dict[str, int] = field(default_factory=dict)  # item -> number of units


@dataclass(frozen=True)
class Tool:
    function: Callable[..., object]  # takes an Inventory and the arguments of the call
    description: str
    properties: Mapping[str, object] = field(default_factory=dict)


def get_stock(inventory: Inventory, item: str) -> object:
    return {"item": item, "units": inventory.stock[item]}


def add_stock(inventory: Inventory, item: str, units: int) -> object:
    inventory.stock[item] = inventory.stock.get(item, 0) + int(units)
    return get_stock(inventory, item)


def reset(inventory: Inventory, stock: dict[str, int], **task: object) -> object:
    inventory.stock = dict(stock)
    return {}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TOOLS = {
    "get_stock": Tool(get_stock, "Return the number of units of an item.", {"item": TEXT}),
    "add_stock": Tool(add_stock, "Add units of an item.", {"item": TEXT, "units": NUMBER}),
    "reset": Tool(reset, "Replace the inventory with the stock of a task.", {"stock": {"type": "object"}}),
    "export_stock": Tool(lambda inventory: inventory.stock, "Return all items with their units."),
}


class McpServer:
    """An MCP server with the methods that tool calls need."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self.tools = tools
        self.inventories: dict[str | None, Inventory] = {}  # by session id
        routes = [Route("/{env_key}/mcp", self.post, methods=["POST"])]
        routes.append(Route("/{env_key}/mcp", self.delete, methods=["DELETE"]))
        self.app = Starlette(routes=routes)

    async def post(self, request: Request) -> Response:
        message = await request.json()
        session_id = request.headers.get("mcp-session-id")
        if message["method"] == "initialize":
            session_id = secrets.token_hex(16)
            self.inventories[session_id] = Inventory()
        if session_id not in self.inventories:
            return Response(status_code=404)
        if "id" not in message:
            return Response(status_code=202)
        answer = self.answer(self.inventories[session_id], message["method"], message.get("params", {}))
        answer = {"jsonrpc": "2.0", "id": message["id"], **answer}
        return JSONResponse(answer, headers={"Mcp-Session-Id": str(session_id)})

    async def delete(self, request: Request) -> Response:
        self.inventories.pop(request.headers.get("mcp-session-id"), None)
        return Response(status_code=204)

    def answer(self, inventory: Inventory, method: str, params: dict) -> dict[str, object]:
        match method:
            case "initialize":
                version = params["protocolVersion"]
                server = {"name": "inventory", "version": "1"}
                return {
                    "result": {
                        "protocolVersion": version,
                        "capabilities": {"tools": {}},
                        "serverInfo": server,
                    }
                }
            case "ping":
                return {"result": {}}
            case "tools/list":
                return {"result": {"tools": [self.schema(name) for name in self.tools]}}
            case "tools/call" if params["name"] in self.tools:
                return {"result": self.call(inventory, params["name"], params.get("arguments", {}))}
            case "tools/call":
                return {"error": {"code": INVALID_PARAMS, "message": f"unknown tool {params['name']}"}}
            case _:
                return {"error": {"code": UNKNOWN_METHOD, "message": f"unknown method {method}"}}

    def schema(self, name: str) -> dict[str, object]:
        tool = self.tools[name]
        schema = {"type": "object", "properties": tool.properties, "required": list(tool.properties)}
        return {"name": name, "description": tool.description, "inputSchema": schema}

    def call(self, inventory: Inventory, name: str, arguments: dict[str, object]) -> dict[str, object]:
        try:
            value = self.tools[name].function(inventory, **arguments)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return {"content": [{"type": "text", "text": text}], "isError": True}
        structured = {"structuredContent": value} if isinstance(value, dict) else {}
        text = str(value) if isinstance(value, str) else bytes(JSONResponse(value).body).decode()
        return {"content": [{"type": "text", "text": text}], **structured}


def serve(server: McpServer, port: int) -> None:
    """Serve until the process is ended. Port 0 chooses a free port."""
    listener = socket.create_server(("127.0.0.1", port))
    print(f"serving http://127.0.0.1:{listener.getsockname()[1]}/<env_key>/mcp", flush=True)
    uvicorn.Server(uvicorn.Config(server.app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    serve(McpServer(TOOLS), int(sys.argv[1]))

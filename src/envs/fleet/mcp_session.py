"""A session with an MCP server over streamable HTTP (modelcontextprotocol.io, revision 2025-06-18).

This module uses httpx instead of the package `mcp`, because that package neither reports the HTTP status nor
limits the size of a JSON response. A trial needs the HTTP status to distinguish a failed call from a failed
server. A response that exceeds the limit counts as a failed call.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import httpx

from src.core.errors import EnvServerError

PROTOCOL_VERSION = "2025-06-18"
CONNECT_TIMEOUT_S = 10.0
PING_TIMEOUT_S = 10.0
MAX_RESPONSE_BYTES = 8 * 2**20
MAX_PAGES = 100  # maximum number of pages of the list of tools
# HTTP statuses that the arguments of a call cannot cause: the server denies access, the session has ended
# (404), or the server or a gateway is unavailable.
UNAVAILABLE = frozenset({401, 403, 404, 408, 429, 502, 503, 504})


class CallFailed(Exception):
    """A request has no valid result. `McpSession.ping` checks whether the server still answers."""


class CallRejected(CallFailed):
    """The server answered the request with a JSON-RPC error, or the request has no JSON form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """The result of a tool call."""

    text: str  # the text that an agent reads
    # For a verifier: the structured content, or else the text. Text that is JSON is parsed.
    value: object
    is_error: bool


class McpSession:
    """One session. `McpSession.connect` opens it and `close` ends it."""

    def __init__(self, client: httpx.AsyncClient, url: str, *, call_timeout_s: float) -> None:
        self.is_stateful = False  # whether the server gave the session an id
        self._client = client
        self._url = url
        self._call_timeout_s = call_timeout_s
        self._headers = {
            "Accept": "application/json, text/event-stream",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
        }
        self._num_requests = 0

    @classmethod
    async def connect(cls, url: str, *, headers: Mapping[str, str], call_timeout_s: float) -> McpSession:
        """Open a session.

        Raises EnvServerError if the server cannot be reached, denies access or is not an MCP server.
        """
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        client = httpx.AsyncClient(
            headers=dict(headers), timeout=timeout, follow_redirects=True, verify=_ssl_context()
        )
        session = cls(client, url, call_timeout_s=call_timeout_s)
        try:
            await session._initialize()
        except BaseException as error:
            await client.aclose()
            if isinstance(error, CallFailed):
                raise EnvServerError(f"{url} does not answer as an MCP server: {error}") from error
            raise
        return session

    async def tools(self) -> dict[str, Mapping[str, object]]:
        """Return the OpenAI schema of each tool by name. Raises EnvServerError if there is no valid list."""
        schemas: dict[str, Mapping[str, object]] = {}
        cursor: dict[str, object] = {}
        try:
            for _ in range(MAX_PAGES):
                page = await self._request("tools/list", cursor, timeout_s=self._call_timeout_s)
                for tool in _objects(page.get("tools")):
                    schemas[str(tool["name"])] = openai_schema(tool)
                if not page.get("nextCursor"):
                    return schemas
                cursor = {"cursor": page["nextCursor"]}
        except (CallFailed, KeyError, ValueError) as error:
            raise EnvServerError(f"{self._url} gave no valid list of tools: {error}") from error
        raise EnvServerError(f"{self._url} sent more than {MAX_PAGES} pages of tools")

    async def call(self, name: str, arguments: Mapping[str, object]) -> ToolResult:
        """Call a tool.

        Raises CallFailed, or EnvServerError if the server cannot be reached or has a status in UNAVAILABLE.
        """
        params = {"name": name, "arguments": arguments}
        try:
            return tool_result(await self._request("tools/call", params, timeout_s=self._call_timeout_s))
        except (ValueError, RecursionError) as error:
            raise CallFailed(f"the result is invalid: {error}") from error

    async def ping(self) -> None:
        """Check that the server answers in this session. Raises EnvServerError if it does not."""
        try:
            await self._request("ping", {}, timeout_s=PING_TIMEOUT_S)
        except CallRejected:
            pass  # the server does not implement `ping`, but it has answered
        except CallFailed as error:
            raise EnvServerError(f"{self._url} has stopped answering: {error}") from error

    async def close(self) -> None:
        """End the session. Failures of the server are ignored."""
        try:
            if self.is_stateful:
                with suppress(httpx.HTTPError, TimeoutError):
                    async with asyncio.timeout(PING_TIMEOUT_S):
                        await self._client.delete(self._url, headers=self._headers)
        finally:
            await self._client.aclose()

    async def _initialize(self) -> None:
        params = {
            "protocolVersion": PROTOCOL_VERSION,
            "capabilities": {},
            "clientInfo": {"name": "agent-trainer", "version": "1"},
        }
        result = await self._request("initialize", params, timeout_s=self._call_timeout_s)
        if not isinstance(result.get("protocolVersion"), str):
            raise CallFailed("the result of initialize has no protocolVersion")
        self._headers["MCP-Protocol-Version"] = str(result["protocolVersion"])
        await self._exchange({"method": "notifications/initialized"}, timeout_s=self._call_timeout_s)

    async def _request(
        self, method: str, params: Mapping[str, object], *, timeout_s: float
    ) -> Mapping[str, object]:
        """Return the result of a request. Raises CallFailed, and EnvServerError for an unavailable server."""
        self._num_requests += 1
        message = {"id": self._num_requests, "method": method, "params": params}
        answer = await self._exchange(message, timeout_s=timeout_s)
        if isinstance(error := answer.get("error"), Mapping):
            raise CallRejected(str(error.get("message") or error))
        if not isinstance(result := answer.get("result"), Mapping):
            raise CallFailed("the server sent no result")
        return result

    async def _exchange(self, message: Mapping[str, object], *, timeout_s: float) -> Mapping[str, object]:
        """Post a message and return its answer, which is empty for a notification."""
        try:
            content = json.dumps({"jsonrpc": "2.0", **message}, allow_nan=False)
        except (ValueError, RecursionError) as error:
            raise CallRejected(f"the arguments are not valid JSON: {error}") from error
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream("POST", self._url, content=content, headers=self._headers) as response,
            ):
                self._check_status(response)
                if session_id := response.headers.get("mcp-session-id"):
                    self.is_stateful, self._headers["Mcp-Session-Id"] = True, session_id
                return {} if "id" not in message else await _answer(response, message["id"])
        except TimeoutError as error:
            raise CallFailed(f"the call did not finish within {timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EnvServerError(
                f"the MCP server at {self._url} cannot be reached ({type(error).__name__}: {error})"
            ) from error

    def _check_status(self, response: httpx.Response) -> None:
        status = f"HTTP status {response.status_code} {response.reason_phrase}".strip()
        if response.status_code in (401, 403):
            raise EnvServerError(f"{self._url} denies access ({status}); set FLEET_API_KEY to a valid key")
        if response.status_code in UNAVAILABLE:
            raise EnvServerError(f"the MCP server at {self._url} is unavailable ({status})")
        if not response.is_success:
            raise CallFailed(status)


def openai_schema(tool: Mapping[str, object]) -> Mapping[str, object]:
    """Return the OpenAI schema of a tool of `tools/list`. Raises ValueError if `inputSchema` is no object.

    >>> openai_schema({"name": "f", "inputSchema": {"type": "object"}})["function"]
    {'name': 'f', 'description': '', 'parameters': {'type': 'object'}}
    """
    parameters = tool.get("inputSchema")
    if not isinstance(parameters, Mapping):
        raise ValueError(f"the tool {tool['name']} has no inputSchema")
    function = {
        "name": tool["name"],
        "description": str(tool.get("description") or ""),
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


def tool_result(result: Mapping[str, object]) -> ToolResult:
    """Convert a result of `tools/call`. In the text, a note replaces each image, sound and binary resource.

    Raises ValueError if `content` is not a list of objects.

    >>> tool_result({"content": [{"type": "text", "text": "3"}]})
    ToolResult(text='3', value=3, is_error=False)
    """
    text = "\n".join(_text(item) for item in _objects(result.get("content", [])))
    value = result.get("structuredContent")
    if value is None:
        value = text
        with suppress(ValueError, RecursionError):
            value = json.loads(text)
    elif not text:
        text = json.dumps(value)
    # JSON allows half of a surrogate pair, which UTF-8 cannot encode.
    text = text.encode("utf-8", "replace").decode()
    return ToolResult(text=text, value=value, is_error=result.get("isError") is True)


@cache
def _ssl_context() -> ssl.SSLContext:
    """Return the SSL context that all sessions share. Creating a context takes many milliseconds."""
    return httpx.create_ssl_context()


def _text(item: Mapping[str, object]) -> str:
    resource = item.get("resource")
    match item.get("type"):
        case "text":
            return str(item.get("text", ""))
        case "resource" if isinstance(resource, Mapping) and "text" in resource:
            return str(resource["text"])
        case "resource_link":
            return str(item.get("uri", ""))
        case kind:
            return f"[{kind} {item.get('mimeType', '')} is not shown]"


def _objects(value: object) -> Sequence[Mapping[str, object]]:
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise ValueError("the server sent no list of objects")
    return value


async def _answer(response: httpx.Response, request_id: object) -> Mapping[str, object]:
    """Return the message of `response` that answers a request. All other messages are ignored."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip()
    pieces = _events(response) if kind == "text/event-stream" else _whole(response)
    async for piece in pieces:
        try:
            message = json.loads(piece)
        except (ValueError, RecursionError) as error:
            raise CallFailed(f"the server's answer is not JSON ({piece[:80]!r})") from error
        if isinstance(message, Mapping) and message.get("id") == request_id and "method" not in message:
            return message
    raise CallFailed("the server sent no answer")


async def _whole(response: httpx.Response) -> AsyncIterator[bytes]:
    yield b"".join([chunk async for chunk in _chunks(response)])


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event."""
    rest, data = b"", list[bytes]()
    async for chunk in _chunks(response):
        *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []


async def _chunks(response: httpx.Response) -> AsyncIterator[bytes]:
    num_bytes = 0
    async for chunk in response.aiter_bytes():
        num_bytes += len(chunk)
        if num_bytes > MAX_RESPONSE_BYTES:
            raise CallFailed(f"the result is larger than {MAX_RESPONSE_BYTES} bytes")
        yield chunk

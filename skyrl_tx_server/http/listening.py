"""Accept connections, with limits on their number, on the headers of a request, and on the time in which a
client reads a reply.

uvicorn parses requests and sends replies. This module accepts the connections, because uvloop's server closes
the listening socket when `accept` fails for lack of a file descriptor.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable
from types import FrameType

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from skyrl_tx_server.errors import ConfigError

logger = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 20.0
"""Maximum time from the opening of a connection to the end of the headers of its first request, and from the
first byte of each later request to the end of its headers."""
WRITE_TIMEOUT_S = 120.0
"""A connection is closed if its write buffer is full and the client does not drain it in this time."""
HANDSHAKE_TIMEOUT_S = 20.0
MAX_URL_BYTES = 16 << 10
MAX_HEADERS = 128
MAX_HEADER_BYTES = 64 << 10
MAX_PIPELINED = 8
"""Maximum number of requests that a connection sends before the reply to the request before them."""
RESERVED_FILES = 128
"""File descriptors reserved for checkpoints, the listening socket, libraries and devices."""
MAX_OPEN_FILES = 1 << 20
MIN_CONNECTIONS = 8
ACCEPT_AGAIN_S = 0.1


def raise_file_limit() -> int:
    """Raise the limit on open files as far as this user may, up to MAX_OPEN_FILES. Return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        return target
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def connection_limit(requested: int, max_files: int) -> int:
    """Return `requested`, or less if the limit on open files allows fewer connections. Raise ConfigError if
    fewer than MIN_CONNECTIONS are allowed."""
    limit = min(requested, max_files - RESERVED_FILES)
    if limit < MIN_CONNECTIONS:
        raise ConfigError(
            f"the limit of {max_files} open files leaves no room for connections; raise it to 1024 or more "
            f"(ulimit -n)"
        )
    return limit


class Connections:
    """The open connections, and the idle connections in the order in which they became idle. A connection is
    idle until the headers of a request are complete, and again after the reply."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.open: set[BoundedProtocol] = set()
        self.idle: OrderedDict[BoundedProtocol, None] = OrderedDict()

    @property
    def are_full(self) -> bool:
        return len(self.open) >= self._limit

    def remove(self, protocol: BoundedProtocol) -> None:
        self.open.discard(protocol)
        self.idle.pop(protocol, None)

    def close_longest_idle(self) -> bool:
        """Close the connection that has been idle longest. Return False if no connection is idle."""
        if not self.idle:
            return False
        protocol, _ = self.idle.popitem(last=False)
        protocol.abort()
        return True


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on the size of the headers, on the time in which the client sends the
    headers, and on the time in which the client reads a reply."""

    def __init__(
        self,
        config: uvicorn.Config,
        server: uvicorn.Server,
        connections: Connections,
        *,
        head_timeout_s: float,
    ) -> None:
        super().__init__(config, server.server_state, server.lifespan.state)
        self._open_connections = connections
        self._head_timeout_s = head_timeout_s
        self._head_deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0

    def abort(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._open_connections.idle[self] = None
        self._start_head_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_connections.remove(self)
        self._stop_head_deadline()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_idle = self in self._open_connections.idle
        if is_idle and self._head_deadline is None and not self.transport.is_closing():
            # the headers of the next request begin, or the body of an answered request continues
            self._start_head_deadline()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many pipelined requests")
        super().on_message_begin()
        self._num_header_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            raise ValueError("the URL is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._num_header_bytes += len(name) + len(value)
        if len(self.headers) > MAX_HEADERS or self._num_header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")

    def on_headers_complete(self) -> None:
        self._stop_head_deadline()
        self._open_connections.idle.pop(self, None)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._open_connections.idle[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_deadline is None:
            self._write_deadline = self.loop.call_later(WRITE_TIMEOUT_S, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _start_head_deadline(self) -> None:
        self._head_deadline = self.loop.call_later(self._head_timeout_s, self.abort)

    def _stop_head_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None


class Acceptor:
    """Accepts connections on one socket until `close` is called. uvicorn uses it as an asyncio server. At the
    limit of connections, a new connection replaces the connection that has been idle longest, or is closed if
    no connection is idle."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        make_protocol: Callable[[], BoundedProtocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._listener = listener
        self._connections = connections
        self._make_protocol = make_protocol
        self._tls = tls
        self._starting: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        self._accepting.cancel()
        for task in self._starting:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.wait({self._accepting, *self._starting})

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        has_warned = False  # whether a warning was logged since the last accepted connection
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except ConnectionAbortedError:
                continue  # the client has disconnected
            except OSError as error:
                if error.errno == errno.EBADF:
                    return  # the listening socket was closed
                if not has_warned:
                    logger.warning(
                        "cannot accept connections: %s; closing the connection that has been idle longest",
                        error.strerror,
                    )
                has_warned = True
                self._connections.close_longest_idle()
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            has_warned = False
            if self._connections.are_full and not self._connections.close_longest_idle():
                accepted.close()
                continue
            # The loop releases the descriptor of a closed connection in its next iteration.
            await asyncio.sleep(0)
            protocol = self._make_protocol()
            self._connections.open.add(protocol)
            task = asyncio.create_task(self._start(accepted, protocol))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start(self, accepted: socket.socket, protocol: BoundedProtocol) -> None:
        timeout = None if self._tls is None else HANDSHAKE_TIMEOUT_S
        try:
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, accepted, ssl=self._tls, ssl_handshake_timeout=timeout
            )
        except BaseException as error:
            accepted.close()
            self._connections.remove(protocol)
            if not isinstance(error, OSError | asyncio.CancelledError):
                raise


class BoundedServer(uvicorn.Server):
    """A uvicorn server whose connections are accepted by `Acceptor`."""

    def __init__(
        self, config: uvicorn.Config, max_connections: int, *, head_timeout_s: float = HEAD_TIMEOUT_S
    ) -> None:
        super().__init__(config)
        self.connections = Connections(max_connections)
        self._head_timeout_s = head_timeout_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()

        def make_protocol() -> BoundedProtocol:
            return BoundedProtocol(self.config, self, self.connections, head_timeout_s=self._head_timeout_s)

        # uvicorn declares a list of asyncio servers, but calls only their `close` and `wait_closed`.
        self.servers: list[Acceptor] = [  # pyright: ignore[reportIncompatibleVariableOverride]
            Acceptor(listener, self.connections, make_protocol, self.config.ssl) for listener in sockets or []
        ]
        self.started = True


class StoppableServer(BoundedServer):
    """A server that shuts down and sets `stop` on SIGTERM or SIGINT. The caller then ends the waiting
    requests, so that the shutdown does not have to cancel them. A second signal exits the process."""

    def __init__(self, config: uvicorn.Config, max_connections: int, stop: asyncio.Event) -> None:
        super().__init__(config, max_connections)
        self._stop = stop
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._stop.set)

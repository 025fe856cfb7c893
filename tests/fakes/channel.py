"""Both ends of an authenticated connection in one process."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from skyrl_tx_server.distributed.channel import Channel, accept, connect

KEY = b"k" * 32


def channels(*, process: int = 1) -> tuple[Channel, Channel]:
    """Return (end of process 0, end of the other process)."""
    return over(*socket.socketpair(), process=process)


def over(ours: socket.socket, theirs: socket.socket, *, process: int = 1) -> tuple[Channel, Channel]:
    """Authenticate a connection over two connected sockets and return its ends, as `channels` does."""
    with ThreadPoolExecutor(1) as threads:
        accepting = threads.submit(accept, ours, KEY, timeout_s=60)
        joined = connect(theirs, KEY, process=process, timeout_s=60)
        number, accepted = accepting.result()
    assert number == process
    return accepted, joined

"""Both ends of an authenticated connection in one process."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from skyrl_tx_server.distributed.channel import Channel, accept, connect

KEY = b"k" * 32


def channels(*, process: int = 1) -> tuple[Channel, Channel]:
    """Return the channel of process 0 and the channel of the process with number `process`."""
    accepting, connecting = socket.socketpair()
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(accept, accepting, KEY, timeout_s=60)
        connected = connect(connecting, KEY, process=process, timeout_s=60)
        number, accepted = future.result()
    assert number == process
    return accepted, connected

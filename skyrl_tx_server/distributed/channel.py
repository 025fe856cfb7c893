"""Authenticated messages between the processes (ranks) of one server, which share a cluster key. Messages are
not encrypted.

First the two sides prove to each other that they know the key, with HMAC-SHA256 over the nonces of both:

    process n                                    process 0
    MAGIC, n, nonce               -->
                                  <--            nonce, proof that process 0 knows the key
    proof that process n knows it -->

A proof covers its sender, the number n and both nonces, so it cannot be replayed on another connection. From
the cluster key and the nonces, both sides derive one key for each direction of the connection. The messages
of each direction are numbered. A message consists of its length, a first authentication code, the payload and
a second authentication code. The first code covers the number and the length of the message, and the second
code also covers the payload. A message that was changed, repeated, dropped or reordered therefore ends the
connection. The receiver checks the first code before it allocates memory for the payload, so a sender without
the key cannot cause an allocation.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from typing import NoReturn

from skyrl_tx_server.errors import ServerError

MAGIC = b"skyrltx1"
NONCE_BYTES = CODE_BYTES = 32
NUMBER, LENGTH, COUNTER = struct.Struct(">I"), struct.Struct(">Q"), struct.Struct(">QQ")
MAX_MESSAGE_BYTES = 1 << 38
"""256 GiB, more than the largest message (the arrays of a checkpoint). Only a bug causes a longer message."""
_CHANGED = "a message between the processes was changed, repeated or lost"


class WrongKeyError(ServerError):
    """The other side does not know the cluster key, or does not use this protocol."""


class TamperedError(ServerError):
    """A message was changed, repeated, dropped or reordered after the other side sent it, or is longer than
    the receiver allows."""


class Channel:
    """One end of an authenticated connection. One thread may send while another receives."""

    def __init__(self, connection: socket.socket, *, sending: bytes, receiving: bytes) -> None:
        self._socket = connection
        weakref.finalize(self, connection.close)
        self._sending_key, self._receiving_key = sending, receiving
        self._sent = self._received = 0
        self._lock = threading.Lock()

    def send_bytes(self, payload: bytes) -> None:
        """Send a message. Raises OSError if the connection has ended."""
        with self._lock:
            header = LENGTH.pack(len(payload))
            number = COUNTER.pack(self._sent, len(payload))
            self._sent += 1
            self._socket.sendall(header + _code(self._sending_key, b"header", number))
            self._socket.sendall(payload)
            self._socket.sendall(_code(self._sending_key, b"payload", number, payload))

    def recv_bytes(self, *, at_most: int = MAX_MESSAGE_BYTES, timeout_s: float | None = None) -> bytearray:
        """Return the next message. If `timeout_s` is None, the wait has no limit.

        Raises EOFError or OSError if the connection has ended, and TimeoutError if no message arrives within
        `timeout_s`. Raises TamperedError and ends the connection if a message was changed, repeated, dropped
        or reordered, or is longer than `at_most` bytes.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        header = _read(self._socket, LENGTH.size, deadline)
        (length,) = LENGTH.unpack(header)
        number = COUNTER.pack(self._received, length)
        code = _read(self._socket, CODE_BYTES, deadline)
        if not hmac.compare_digest(code, _code(self._receiving_key, b"header", number)):
            self._fail(_CHANGED)
        if length > at_most:
            self._fail(
                f"a message of {length} bytes between the processes exceeds the limit of {at_most} bytes"
            )
        payload = _read(self._socket, length, deadline)
        code = _read(self._socket, CODE_BYTES, deadline)
        if not hmac.compare_digest(code, _code(self._receiving_key, b"payload", number, payload)):
            self._fail(_CHANGED)
        self._received += 1
        if deadline is not None:
            self._socket.settimeout(None)
        return payload

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Return whether a message, or the end of the connection, can be read within `timeout_s`."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def shut_down(self) -> None:
        """End the connection, even while another thread receives."""
        with contextlib.suppress(OSError):  # the connection may have ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _fail(self, reason: str) -> NoReturn:
        """End the connection and raise TamperedError."""
        self.shut_down()
        raise TamperedError(f"{reason}; the connection is closed")


def accept(connection: socket.socket, key: bytes, *, timeout_s: float) -> tuple[int, Channel]:
    """Authenticate a connection on process 0. Return (number of the other process, channel to it).

    Raises WrongKeyError, EOFError or OSError if the other side does not know the key or does not answer in
    time.
    """
    deadline = time.monotonic() + timeout_s
    greeting = _read(connection, len(MAGIC) + NUMBER.size + NONCE_BYTES, deadline)
    if not greeting.startswith(MAGIC):
        raise WrongKeyError("the other side does not use this protocol")
    hello, nonce = greeting[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
    connection.sendall(nonce + _code(key, b"proof of process 0", hello, nonce))
    proof = _read(connection, CODE_BYTES, deadline)
    if not hmac.compare_digest(proof, _code(key, b"proof of another process", hello, nonce)):
        raise WrongKeyError("the other side does not know the cluster key")
    connection.settimeout(None)
    (process,) = NUMBER.unpack(hello[: NUMBER.size])
    from_process_0, to_process_0 = _session_keys(key, hello, nonce)
    return process, Channel(connection, sending=from_process_0, receiving=to_process_0)


def connect(connection: socket.socket, key: bytes, *, process: int, timeout_s: float) -> Channel:
    """On a process other than 0, authenticate a connection to process 0. Return the channel to process 0.

    Raises WrongKeyError if the listener does not know the key, and EOFError, TimeoutError or OSError if
    the connection ends or the listener does not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    hello = NUMBER.pack(process) + secrets.token_bytes(NONCE_BYTES)
    connection.sendall(MAGIC + hello)
    nonce = _read(connection, NONCE_BYTES, deadline)
    proof = _read(connection, CODE_BYTES, deadline)
    if not hmac.compare_digest(proof, _code(key, b"proof of process 0", hello, nonce)):
        raise WrongKeyError("the listener does not know the cluster key")
    connection.sendall(_code(key, b"proof of another process", hello, nonce))
    connection.settimeout(None)
    from_process_0, to_process_0 = _session_keys(key, hello, nonce)
    return Channel(connection, sending=to_process_0, receiving=from_process_0)


def _session_keys(key: bytes, hello: bytes | bytearray, nonce: bytes | bytearray) -> tuple[bytes, bytes]:
    """Return (key of messages from process 0, key of messages to process 0). `hello` contains the number and
    the nonce of the other process; `nonce` is the nonce of process 0."""
    purposes = b"key of messages from process 0", b"key of messages to process 0"
    return _code(key, purposes[0], hello, nonce), _code(key, purposes[1], hello, nonce)


def _code(key: bytes, purpose: bytes, *parts: bytes | bytearray) -> bytes:
    """Return an HMAC. For each purpose, all parts but the last have fixed lengths, so different inputs never
    concatenate to equal bytes."""
    code = hmac.new(key, digestmod="sha256")
    code.update(purpose + b"\0")
    for part in parts:
        code.update(part)
    return code.digest()


def _read(connection: socket.socket, count: int, deadline: float | None) -> bytearray:
    """Read exactly `count` bytes. Raises EOFError if the connection ends first, and TimeoutError at
    `deadline`, a time of `time.monotonic`."""
    data = bytearray(count)
    view, num_read = memoryview(data), 0
    while num_read < count:
        if deadline is not None:
            if (remaining_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError("the other side did not answer in time")
            connection.settimeout(remaining_s)
        received = connection.recv_into(view[num_read:])
        if not received:
            raise EOFError("the connection has ended")
        num_read += received
    return data

"""The processes of a server authenticate each other with the cluster key, and reject forged or replayed
messages.
"""

from __future__ import annotations

import pickle
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from queue import SimpleQueue

import chz
import pytest

from skyrl_tx_server.config.process_options import ProcessOptions
from skyrl_tx_server.distributed.channel import (
    CODE_BYTES,
    LENGTH,
    MAGIC,
    NONCE_BYTES,
    NUMBER,
    Channel,
    TamperedError,
    WrongKeyError,
    accept,
    connect,
)
from skyrl_tx_server.distributed.multihost import RankLostError, RankZero, WorkerRank
from skyrl_tx_server.distributed.rendezvous import join, lead
from skyrl_tx_server.errors import ConfigError
from tests.fakes.channel import KEY
from tests.fakes.executor import FakeExecutor
from tests.fakes.server import reserved_port
from tests.fakes.tiny_model import make_settings
from tests.server.tiny_qwen3 import FIXTURES

SETTINGS = make_settings(FIXTURES / "tied", Path("unused"))


class CreatesFile:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self._path,)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ProcessOptions]:
    monkeypatch.setattr("skyrl_tx_server.distributed.rendezvous._start_jax", lambda hosts, address: None)
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        yield ProcessOptions(
            coordinator_address=address,
            num_processes=2,
            process_id=1,
            initialization_timeout_s=30,
            cluster_key_file=write_key_file(tmp_path, KEY),
        )


def write_key_file(directory: Path, key: bytes) -> str:
    """Return the path of a new file with the key."""
    path = directory / f"key-{key[:8].decode()}"
    path.write_bytes(key)
    return str(path)


@pytest.mark.parametrize(
    "impostor", ["plain pickle", "multiprocessing without a key", "this protocol without the key"]
)
def test_nothing_from_an_impostor_of_process_0_is_unpickled(
    options: ProcessOptions, tmp_path: Path, impostor: str
) -> None:
    created = tmp_path / "created"
    payload = pickle.dumps(CreatesFile(created))

    def impersonate_process_0(server: socket.socket) -> None:
        process_1, _ = server.accept()
        process_1.settimeout(30)
        with process_1:
            match impostor:
                case "plain pickle":
                    process_1.sendall(LENGTH.pack(len(payload)) + payload + secrets.token_bytes(1024))
                case "multiprocessing without a key":
                    process_1.settimeout(None)
                    connection = Connection(process_1.detach())
                    with connection, pytest.raises(Exception):  # noqa: B017 the error depends on the library
                        deliver_challenge(connection, b"")
                        answer_challenge(connection, b"")
                        connection.send_bytes(b'{"jax": "127.0.0.1:1"}')
                        connection.send_bytes(payload)
                case _:
                    read_exactly(process_1, len(MAGIC) + NUMBER.size + NONCE_BYTES)
                    process_1.sendall(
                        secrets.token_bytes(NONCE_BYTES + CODE_BYTES) + LENGTH.pack(len(payload)) + payload
                    )

    with socket.create_server(options.address) as server, ThreadPoolExecutor(1) as threads:
        listening = threads.submit(impersonate_process_0, server)
        with pytest.raises(ConfigError, match=r"^coordinator_address=127.0.0.1:\d+: ") as error:
            join(chz.replace(options, initialization_timeout_s=2), SETTINGS, print)
        listening.result(30)
    assert "\n" not in str(error.value)
    assert not created.exists()


def test_unpickling_the_payload_creates_its_file(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(CreatesFile(tmp_path / "created")))
    assert (tmp_path / "created").exists()


def test_an_impostor_is_refused_and_the_real_process_joins(
    options: ProcessOptions, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    process_0 = threading.Thread(
        target=lambda: lead(chz.replace(options, process_id=0), SETTINGS, print).stop()
    )
    process_0.start()
    with pytest.raises(
        ConfigError,
        match=r"does not know the cluster key; give every process the same cluster_key_file \(or SKYRL_TX_C",
    ):
        join(chz.replace(options, cluster_key_file=write_key_file(tmp_path, b"x" * 32)), SETTINGS, print)
    # This impostor ignores the proof of process 0 and sends an invalid proof.
    with socket.create_connection(options.address, timeout=30) as impostor:
        impostor.sendall(MAGIC + NUMBER.pack(1) + secrets.token_bytes(NONCE_BYTES))
        read_exactly(impostor, NONCE_BYTES + CODE_BYTES)
        impostor.sendall(secrets.token_bytes(CODE_BYTES))
        assert impostor.recv(1) == b"", "the server sends nothing to an impostor"
    join(options, SETTINGS, print).follow(FakeExecutor)
    process_0.join(30)
    assert not process_0.is_alive()
    assert sum("need the same cluster_key_file" in message for message in caplog.messages) == 2


def test_a_process_with_malformed_settings_is_refused(
    options: ProcessOptions, caplog: pytest.LogCaptureFixture
) -> None:
    process_0 = threading.Thread(
        target=lambda: lead(chz.replace(options, process_id=0), SETTINGS, print).stop()
    )
    process_0.start()
    with pytest.raises(ConfigError, match="use equal options"):  # process 0 listens
        join(chz.replace(options, num_processes=3), SETTINGS, print)
    with socket.create_connection(options.address, timeout=30) as connection:
        channel = connect(connection, KEY, process=1, timeout_s=30)
        channel.send_bytes(b'{"process_id": 1, "num_processes": 2, "settings": "dtype"}')
        assert connection.recv(1) == b""
    join(options, SETTINGS, print).follow(FakeExecutor)
    process_0.join(30)
    assert not process_0.is_alive()
    assert any("a connection was refused" in message for message in caplog.messages)


def read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = connection.recv(count - len(data))
        assert chunk
        data += chunk
    return data


@dataclass
class Relay:
    """A connection between two processes. It queues the messages of process 0, and the test sends bytes to
    either process.
    """

    channel_0: Channel  # of process 0
    channel_1: Channel  # of process 1
    to_1: socket.socket  # sends to process 1
    to_0: socket.socket  # sends to process 0
    messages: SimpleQueue[bytes] = field(default_factory=SimpleQueue)  # complete messages of process 0

    def deliver(self, *messages: bytes) -> None:
        """Send bytes to process 1."""
        for message in messages:
            self.to_1.sendall(message)


@pytest.fixture
def relay() -> Iterator[Relay]:
    with relayed() as relay:
        yield relay


@contextmanager
def relayed() -> Iterator[Relay]:
    process_0, from_0 = socket.socketpair()
    to_1, process_1 = socket.socketpair()
    with from_0, to_1, ThreadPoolExecutor(2) as threads:
        accepting = threads.submit(accept, process_0, KEY, timeout_s=60)
        joining = threads.submit(connect, process_1, KEY, process=1, timeout_s=60)
        from_0.sendall(read_exactly(to_1, len(MAGIC) + NUMBER.size + NONCE_BYTES))
        to_1.sendall(read_exactly(from_0, NONCE_BYTES + CODE_BYTES))
        from_0.sendall(read_exactly(to_1, CODE_BYTES))
        relay = Relay(accepting.result()[1], joining.result(), to_1, from_0)

        def listen() -> None:
            while header := from_0.recv(LENGTH.size, socket.MSG_WAITALL):
                rest = read_exactly(from_0, CODE_BYTES + LENGTH.unpack(header)[0] + CODE_BYTES)
                relay.messages.put(header + rest)

        listening = threads.submit(listen)
        yield relay
        relay.channel_0.shut_down()
        listening.result(60)


def test_messages_pass_in_both_directions(relay: Relay) -> None:
    for text in (b"one", b"", b"x" * 100_000):
        relay.channel_0.send_bytes(text)
        relay.deliver(relay.messages.get(timeout=60))
        assert relay.channel_1.recv_bytes() == text


@pytest.mark.parametrize("position", ["length", "code of the length", "payload", "code of the payload"])
def test_a_changed_message_ends_the_connection(relay: Relay, position: str) -> None:
    relay.channel_0.send_bytes(b"the message")
    message = bytearray(relay.messages.get(timeout=60))
    offset = {
        "length": 7,
        "code of the length": 8,
        "payload": 8 + CODE_BYTES,
        "code of the payload": len(message) - 1,
    }[position]
    message[offset] ^= 1
    relay.deliver(bytes(message))
    with pytest.raises(TamperedError, match="was changed, repeated or lost"):
        relay.channel_1.recv_bytes()
    assert relay.to_1.recv(1) == b"", "the connection is closed"


def test_an_unauthenticated_length_allocates_nothing(relay: Relay) -> None:
    relay.deliver(LENGTH.pack(1 << 37) + bytes(CODE_BYTES))
    with pytest.raises(TamperedError):
        relay.channel_1.recv_bytes()


def test_a_message_that_is_too_long_is_named_in_the_error(relay: Relay) -> None:
    relay.channel_0.send_bytes(b"the message")
    relay.deliver(relay.messages.get(timeout=60))
    with pytest.raises(TamperedError, match=r"^a message of 11 bytes .* exceeds the limit of 10 bytes"):
        relay.channel_1.recv_bytes(at_most=10)
    assert relay.to_1.recv(1) == b"", "the connection is closed"


def test_a_replayed_message_ends_the_connection(relay: Relay) -> None:
    relay.channel_0.send_bytes(b"decode")
    message = relay.messages.get(timeout=60)
    relay.deliver(message, message)
    assert relay.channel_1.recv_bytes() == b"decode"
    with pytest.raises(TamperedError):
        relay.channel_1.recv_bytes()


def test_reordered_or_missing_messages_end_the_connection(relay: Relay) -> None:
    relay.channel_0.send_bytes(b"first!")
    relay.channel_0.send_bytes(b"second")
    relay.messages.get(timeout=60)
    relay.deliver(relay.messages.get(timeout=60))
    with pytest.raises(TamperedError):
        relay.channel_1.recv_bytes()


def test_a_truncated_message_ends_the_connection(relay: Relay) -> None:
    relay.channel_0.send_bytes(b"the message")
    relay.deliver(relay.messages.get(timeout=60)[:-1])
    relay.to_1.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        relay.channel_1.recv_bytes()


def test_a_message_sent_back_to_its_sender_ends_the_connection(relay: Relay) -> None:
    relay.channel_0.send_bytes(b"decode")
    relay.to_0.sendall(relay.messages.get(timeout=60))
    with pytest.raises(TamperedError):
        relay.channel_0.recv_bytes()


def test_a_message_of_another_connection_is_refused(relay: Relay) -> None:
    relay.channel_0.send_bytes(b"decode")
    with relayed() as other_relay:
        other_relay.deliver(relay.messages.get(timeout=60))
        with pytest.raises(TamperedError):
            other_relay.channel_1.recv_bytes()


def test_a_forged_call_ends_the_process_and_is_not_unpickled(relay: Relay, tmp_path: Path) -> None:
    reasons = SimpleQueue[str]()
    worker = WorkerRank(relay.channel_1, reasons.put)
    created = tmp_path / "created"
    payload = pickle.dumps(CreatesFile(created))
    relay.deliver(LENGTH.pack(len(payload)) + bytes(CODE_BYTES) + payload + bytes(CODE_BYTES))
    with pytest.raises(RankLostError, match="process 0: a message between the processes was changed"):
        worker.follow(FakeExecutor)
    assert "was changed, repeated or lost" in reasons.get(timeout=60)
    assert not created.exists() and reasons.empty()


def test_a_forged_reply_ends_process_0_with_one_error() -> None:
    to_0, process_0 = socket.socketpair()
    reasons = SimpleQueue[str]()
    with to_0:
        rank_0 = RankZero({1: Channel(process_0, sending=b"ours", receiving=b"theirs")}, reasons.put)
        to_0.sendall(LENGTH.pack(0) + bytes(2 * CODE_BYTES))
        assert reasons.get(timeout=60).startswith(
            "process 1: a message between the processes was changed, repeated or lost"
        )
        rank_0.stop()


def test_a_reflected_proof_of_process_0_is_refused() -> None:
    process_0, impostor = socket.socketpair()
    with process_0, impostor, ThreadPoolExecutor(1) as threads:
        accepting = threads.submit(accept, process_0, KEY, timeout_s=60)
        greeting = NUMBER.pack(1) + secrets.token_bytes(NONCE_BYTES)
        impostor.sendall(MAGIC + greeting)
        answer = read_exactly(impostor, NONCE_BYTES + CODE_BYTES)
        impostor.sendall(answer[NONCE_BYTES:])  # the proof of process 0
        with pytest.raises(WrongKeyError, match="does not know the cluster key"):
            accepting.result(60)

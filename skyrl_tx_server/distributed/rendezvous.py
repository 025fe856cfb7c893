"""Connects the processes (ranks) of one server. The processes 1, 2, ... connect to process 0 at
`coordinator_address`.

All processes must know the cluster key (see `channel`), and have the same `num_processes`, jax version, model
files and engine options except those in `MAY_DIFFER`. When all have connected, process 0 announces a free
port for `jax.distributed`. A missing process is detected before jax starts and reported in one line, because
jax would end each process with a stack trace.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import chz
import jax

from skyrl_tx_server.config.engine_options import EngineOptions
from skyrl_tx_server.config.process_options import CLUSTER_KEY_NAME, ProcessOptions
from skyrl_tx_server.config.tenant_options import TenantOptions
from skyrl_tx_server.distributed.channel import Channel, TamperedError, WrongKeyError, accept, connect
from skyrl_tx_server.distributed.multihost import RankZero, WorkerRank
from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.files.base_model import fingerprint

logger = logging.getLogger(__name__)

HANDSHAKE_S = 10
"""The time for which process 0 waits for the authentication of a new connection, and then again for the
handshake."""
RETRY_S = 0.2
MAX_HANDSHAKE_BYTES = 1 << 20
MAY_DIFFER = {"base_model", "checkpoints_dir", "compilation_cache_dir", *chz.chz_fields(TenantOptions)}
"""Options that may differ between hosts: paths, and the quotas of tenants, which only process 0 enforces."""
_MODEL_FILES, _JAX = "model files", "jax"
_REMEDIES = {
    _MODEL_FILES: "give every process the same model files",
    _JAX: "install the same version of jax on every host",
}
"""Maps a setting that is not an option to what the user must do if two processes have different values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Handshake:
    """The first message that a process sends to process 0 after the authentication, encoded as JSON."""

    process_id: int
    num_processes: int
    settings: dict[str, str]  # name -> value, which must be equal in all processes


def lead(options: ProcessOptions, settings: EngineOptions, on_lost: Callable[[str], None]) -> RankZero:
    """On process 0, wait for the other processes and start jax. Raises ConfigError if the address cannot be
    used, or if a process does not connect in time or disconnects."""
    host, port = options.address
    rank0_handshake, joined = _handshake(options, settings), dict[int, Channel]()
    deadline = time.monotonic() + options.initialization_timeout_s
    try:
        server = socket.create_server((host, port), family=_family(host))
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise ConfigError(
            f"coordinator_address={host}:{port}: {reason}; use a free address of the host of process 0"
        ) from None
    with server:
        while len(joined) < options.num_processes - 1:
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                candidate, _ = server.accept()
            except TimeoutError:
                missing = ", ".join(
                    str(process) for process in range(1, options.num_processes) if process not in joined
                )
                raise ConfigError(
                    f"num_processes={options.num_processes}: process {missing} did not connect to "
                    f"{host}:{port} within {options.initialization_timeout_s:.0f} s; start every process "
                    "with the same options and its own process_id"
                ) from None
            accept_process(candidate, options, rank0_handshake, joined)
            if len(joined) == options.num_processes - 1:
                remove_disconnected(joined)  # jax would wait minutes for a lost process and then abort
        jax_address = f"{_bracketed(host)}:{_free_port(host)}"
    for process, connection in joined.items():
        try:
            connection.send_bytes(json.dumps({"jax": jax_address}).encode())
        except OSError:
            raise ConfigError(
                f"process {process} disconnected before all processes had connected: start all of them again"
            ) from None
    rank0 = RankZero(joined, on_lost)  # detects a lost process while jax starts; jax would wait for minutes
    _start_jax(options, jax_address)
    return rank0


def join(options: ProcessOptions, settings: EngineOptions, on_lost: Callable[[str], None]) -> WorkerRank:
    """On a process other than 0, connect to process 0 and start jax. Raises ConfigError if process 0 does
    not answer in time, disconnects, has another cluster key or refuses this process."""
    where, timeout_s = f"coordinator_address={options.coordinator_address}", options.initialization_timeout_s
    with contextlib.ExitStack() as on_error:
        connection = on_error.enter_context(_connect(options))
        try:
            channel = connect(
                connection, options.cluster_key, process=options.process_id, timeout_s=timeout_s
            )
            channel.send_bytes(json.dumps(asdict(_handshake(options, settings))).encode())
            answer = json.loads(_reply(channel, where, timeout_s=timeout_s + HANDSHAKE_S))
        except WrongKeyError as error:
            raise ConfigError(f"{where}: {error}; give every process the same {CLUSTER_KEY_NAME}") from None
        except TamperedError as error:
            raise ConfigError(f"{where}: {error}") from None
        except TimeoutError:
            raise ConfigError(
                f"{where}: the listener sent nothing for {timeout_s:.0f} s; use the address of process 0"
            ) from None
        except (EOFError, OSError):
            raise ConfigError(f"{where}: process 0 disconnected before all processes had connected") from None
        if "refused" in answer:
            raise ConfigError(answer["refused"])
        on_error.pop_all()
    rank = WorkerRank(channel, on_lost)
    _start_jax(options, answer["jax"])
    return rank


def accept_process(
    candidate: socket.socket, options: ProcessOptions, rank0_handshake: Handshake, joined: dict[int, Channel]
) -> None:
    """Authenticate a process. Add it to `joined`, or send the process the reason for its refusal. Close a
    connection that cannot be authenticated."""
    _enable_keepalive(candidate)
    try:
        process, channel = accept(candidate, options.cluster_key, timeout_s=HANDSHAKE_S)
        handshake = Handshake(
            **json.loads(channel.recv_bytes(at_most=MAX_HANDSHAKE_BYTES, timeout_s=HANDSHAKE_S))
        )
        if handshake.process_id != process or not process:
            raise ValueError(f"the handshake of process {process} has process_id={handshake.process_id}")
        remove_disconnected(joined)  # frees the number of a process that was restarted
        refusal = refusal_of(rank0_handshake, handshake, joined)
        if refusal is not None:
            logger.warning("%s", refusal)
            channel.send_bytes(json.dumps({"refused": refusal}).encode())
            channel.close()
            return
    except (WrongKeyError, TamperedError, EOFError, OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning(
            "%s: a connection was refused: %s. All processes of a server need the same %s",
            options.coordinator_address,
            error,
            CLUSTER_KEY_NAME,
        )
        candidate.close()
        return
    joined[process] = channel
    logger.info("process %d has connected", process)


def remove_disconnected(joined: dict[int, Channel]) -> None:
    """Remove processes that have disconnected. A process sends nothing between its handshake and the start of
    jax, so a connection that can be read has ended."""
    for process in [process for process, connection in joined.items() if connection.poll()]:
        logger.warning("process %d has disconnected", process)
        joined.pop(process).close()


def refusal_of(rank0_handshake: Handshake, handshake: Handshake, joined: dict[int, Channel]) -> str | None:
    """Return the reason for refusing a process, or None if it is accepted."""
    process = f"process {handshake.process_id}"
    if handshake.num_processes != rank0_handshake.num_processes:
        return (
            f"{process} was started with num_processes={handshake.num_processes}, process 0 with "
            f"num_processes={rank0_handshake.num_processes}: use equal options"
        )
    if handshake.process_id in joined:
        return f"process_id={handshake.process_id} is taken: start each process with its own process_id"
    for name, rank0_value in rank0_handshake.settings.items():
        if (value := handshake.settings.get(name)) != rank0_value:
            remedy = _REMEDIES.get(name, "use equal options")
            return f"{process} has {name}={value}, process 0 has {name}={rank0_value}: {remedy}"
    return None


def _handshake(options: ProcessOptions, settings: EngineOptions) -> Handshake:
    names = [name for name in chz.chz_fields(EngineOptions) if name not in MAY_DIFFER]
    shared = {name: str(getattr(settings, name)) for name in names}
    shared |= {_MODEL_FILES: fingerprint(settings.model_dir)[:12], _JAX: jax.__version__}
    return Handshake(process_id=options.process_id, num_processes=options.num_processes, settings=shared)


def _reply(channel: Channel, where: str, *, timeout_s: float) -> bytearray:
    """Return the answer of process 0 to the handshake. If a process is missing, process 0 disconnects after
    its own timeout. `timeout_s` must be longer than that timeout, so that this process observes the end of
    the connection."""
    try:
        return channel.recv_bytes(at_most=MAX_HANDSHAKE_BYTES, timeout_s=timeout_s)
    except TimeoutError:
        raise ConfigError(
            f"{where}: process 0 sent no reply within {timeout_s:.0f} s; see its log and start all processes "
            "again"
        ) from None


def _connect(options: ProcessOptions) -> socket.socket:
    """Return a connection to process 0, which may not have started yet."""
    deadline = time.monotonic() + options.initialization_timeout_s
    while True:
        try:
            timeout_s = max(RETRY_S, deadline - time.monotonic())
            connection = socket.create_connection(options.address, timeout=timeout_s)
            connection.settimeout(None)
            _enable_keepalive(connection)
            return connection
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"coordinator_address={options.coordinator_address}: process 0 did not answer within "
                    f"{options.initialization_timeout_s:.0f} s: {error}"
                ) from None
        time.sleep(RETRY_S)


def _enable_keepalive(peer: socket.socket) -> None:
    """Let the kernel probe the other host, so that the connection to a lost host ends after 30 s."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        peer.setsockopt(socket.IPPROTO_TCP, option, seconds)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def _start_jax(options: ProcessOptions, address: str) -> None:
    jax.config.update("jax_enable_preemption_service", False)  # the server handles SIGTERM itself
    jax.distributed.initialize(
        address,
        num_processes=options.num_processes,
        process_id=options.process_id,
        coordinator_bind_address=address,
        cluster_detection_method="deactivate",
        shutdown_timeout_seconds=5,
    )


def _free_port(host: str) -> int:
    with socket.create_server((host, 0), family=_family(host)) as probe:
        return probe.getsockname()[1]


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

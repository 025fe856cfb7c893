"""Options of a server that consists of several processes, usually one per host."""

from __future__ import annotations

import os
from pathlib import Path

import chz

from skyrl_tx_server.config.bounds import MAX_DEVICES, YEAR_S, BoundedOptions, between, positive
from skyrl_tx_server.errors import ConfigError

CLUSTER_KEY_VARIABLE = "SKYRL_TX_CLUSTER_KEY"
CLUSTER_KEY_NAME = f"cluster_key_file (or {CLUSTER_KEY_VARIABLE})"
"""The name of the cluster key in messages."""
MIN_CLUSTER_KEY = 32
"""Minimum length of the cluster key in characters."""


@chz.chz
class ProcessOptions(BoundedOptions):
    """The rank of this process, and the address at which the processes of the server connect."""

    coordinator_address: str | None = chz.field(
        default=None,
        doc="host:port at which rank 0 listens for the other processes, if a server has several processes; "
        "all processes need the same value",
    )
    num_processes: int = chz.field(
        default=1,
        metadata=positive(MAX_DEVICES),
        doc="Processes that run the model together, usually one per host; the server uses the devices of all "
        "processes",
    )
    process_id: int = chz.field(
        default=0,
        metadata=between(0, MAX_DEVICES),
        doc="Rank of this process; rank 0 serves HTTP, writes checkpoints and schedules the work of all "
        "ranks",
    )
    cluster_key_file: str | None = chz.field(
        default=None,
        doc="File with the secret by which the processes of a server authenticate each other; all processes "
        "need the same secret of at least 32 characters; default: the environment variable "
        "SKYRL_TX_CLUSTER_KEY",
    )
    initialization_timeout_s: float = chz.field(
        default=300.0,
        metadata=positive(YEAR_S),
        doc="Maximum time for which the processes wait for each other at the start",
    )

    @chz.validate
    def _check_processes(self) -> None:
        if (self.coordinator_address is None) != (self.num_processes == 1):
            raise ConfigError(
                "coordinator_address and num_processes: set both for a server of several processes, or none"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f"process_id={self.process_id}: must lie between 0 and num_processes - 1, which is "
                f"{self.num_processes - 1}"
            )
        if self.coordinator_address is None:
            return
        try:
            _host_and_port(self.coordinator_address)
        except ValueError:
            raise ConfigError(
                f"coordinator_address={self.coordinator_address}: must be host:port, as in 10.0.0.1:7000"
            ) from None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of rank 0. A server of one process has no such address."""
        assert self.coordinator_address is not None, "a server of one process has no coordinator_address"
        return _host_and_port(self.coordinator_address)

    @property
    def cluster_key(self) -> bytes:
        """The secret that the processes of one server share. Raises ConfigError if it is missing, unreadable
        or too short."""
        if self.cluster_key_file is None:
            name, key = CLUSTER_KEY_VARIABLE, os.environ.get(CLUSTER_KEY_VARIABLE, "")
            if not key:
                raise ConfigError(
                    "num_processes: several processes need a common secret: cluster_key_file=FILE, or "
                    f"{CLUSTER_KEY_VARIABLE} in the environment. Create a secret with: "
                    "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
                )
        else:
            name = f"cluster_key_file={self.cluster_key_file}"
            try:
                key = Path(os.path.expanduser(self.cluster_key_file)).read_text()
            except OSError as error:
                raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
            except UnicodeDecodeError:
                raise ConfigError(f"{name}: cannot be read: it is not UTF-8 text") from None
        key = key.strip()
        if len(key) < MIN_CLUSTER_KEY:
            raise ConfigError(
                f"{name}: has {len(key)} characters; at least {MIN_CLUSTER_KEY} random characters are needed"
            )
        return key.encode()


def _host_and_port(address: str) -> tuple[str, int]:
    """Return the host and the port. Raise ValueError if `address` is not host:port."""
    host, _, port = address.rpartition(":")
    if not host or not 0 < int(port) <= 65535:
        raise ValueError(address)
    return host.removeprefix("[").removesuffix("]"), int(port)

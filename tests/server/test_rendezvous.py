"""Processes with different options are refused before jax starts.

`tests/integration/test_two_processes.py` starts processes with equal options.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import chz
import pytest

from skyrl_tx_server.config.process_options import ProcessOptions
from skyrl_tx_server.distributed.channel import accept
from skyrl_tx_server.distributed.rendezvous import Handshake, join, lead, refusal_of, remove_disconnected
from skyrl_tx_server.errors import ConfigError
from tests.fakes.channel import channels
from tests.fakes.executor import FakeExecutor
from tests.fakes.server import reserved_port
from tests.fakes.tiny_model import make_settings
from tests.server.tiny_qwen3 import FIXTURES

SETTINGS = make_settings(FIXTURES / "tied", Path("unused"))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[ProcessOptions]:
    key = tmp_path / "key"
    key.write_text("k" * 32)
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        yield ProcessOptions(
            coordinator_address=address,
            num_processes=2,
            process_id=0,
            initialization_timeout_s=60,
            cluster_key_file=str(key),
        )


@pytest.fixture
def leading(hosts: ProcessOptions, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Process 0 waits for a matching process, which connects after the test."""
    monkeypatch.setattr("skyrl_tx_server.distributed.rendezvous._start_jax", lambda hosts, address: None)
    thread = threading.Thread(target=lambda: lead(hosts, SETTINGS, print).stop())
    thread.start()
    yield
    join(chz.replace(hosts, process_id=1), SETTINGS, print).follow(FakeExecutor)
    thread.join()


def test_process_0_waits_for_the_others_until_the_timeout(hosts: ProcessOptions) -> None:
    with pytest.raises(
        ConfigError,
        match=f"^num_processes=2: process 1 did not connect to {hosts.coordinator_address} within 1 s; start",
    ):
        lead(chz.replace(hosts, initialization_timeout_s=1), SETTINGS, print)


def test_a_process_without_process_0_times_out(hosts: ProcessOptions) -> None:
    with pytest.raises(
        ConfigError,
        match=r"coordinator_address=127.0.0.1:\d+: process 0 did not answer within 1 s: .*refused",
    ):
        join(chz.replace(hosts, process_id=1, initialization_timeout_s=1), SETTINGS, print)


def test_a_silent_listener_at_the_address_times_out(hosts: ProcessOptions) -> None:
    with (
        socket.create_server(hosts.address),
        pytest.raises(ConfigError, match="the listener sent nothing for 1 s"),
    ):
        join(chz.replace(hosts, process_id=1, initialization_timeout_s=1), SETTINGS, print)


def test_a_silent_process_0_is_not_called_a_wrong_address(
    hosts: ProcessOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_tx_server.distributed.rendezvous.HANDSHAKE_S", 1)
    with socket.create_server(hosts.address) as server, ThreadPoolExecutor(1) as threads:
        accepting = threads.submit(lambda: accept(server.accept()[0], hosts.cluster_key, timeout_s=60))
        with pytest.raises(
            ConfigError,
            match=r"127.0.0.1:\d+: process 0 sent no reply within 2 s; see its log and start all",
        ):
            join(chz.replace(hosts, process_id=1, initialization_timeout_s=1), SETTINGS, print)
        accepting.result()[1].close()


def test_a_disconnected_process_frees_its_process_id() -> None:
    (one, first), (two, _second) = channels(), channels()
    joined = {1: one, 2: two}
    remove_disconnected(joined)
    assert set(joined) == {1, 2}
    first.close()
    remove_disconnected(joined)
    assert set(joined) == {2}


def test_the_error_for_an_unusable_address_is_one_line(hosts: ProcessOptions) -> None:
    with pytest.raises(
        ConfigError,
        match=r"192.0.2.1:7000: Cannot assign requested address; use a free address of the host of process 0",
    ):
        lead(chz.replace(hosts, coordinator_address="192.0.2.1:7000"), SETTINGS, print)
    with pytest.raises(ConfigError, match=r"no.such.host.invalid:7000: .*; use a free address") as error:
        lead(chz.replace(hosts, coordinator_address="no.such.host.invalid:7000"), SETTINGS, print)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("leading")
@pytest.mark.parametrize(
    ("process_options", "settings", "message"),
    [
        (
            {"cluster_key_file": str(FIXTURES / "tied" / "config.json")},
            {},
            r"does not know the cluster key; give every process the same cluster_key_file \(or",
        ),
        (
            {"num_processes": 3},
            {},
            "process 1 was started with num_processes=3, process 0 with num_processes=2",
        ),
        (
            {},
            {"max_num_seqs": 4},
            "process 1 has max_num_seqs=4, process 0 has max_num_seqs=6: use equal options",
        ),
        (
            {},
            {"base_model": str(FIXTURES / "untied")},
            "process 1 has model files=.*: give every process the same model files",
        ),
    ],
)
def test_a_process_with_other_options_is_refused(
    hosts: ProcessOptions, process_options: dict, settings: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        join(
            chz.replace(hosts, **{"process_id": 1, **process_options}),
            chz.replace(SETTINGS, **settings),
            print,
        )


def test_paths_may_differ_and_process_ids_may_not_repeat() -> None:
    mine = Handshake(process_id=0, num_processes=2, settings={"dtype": "float32"})
    theirs = replace(mine, process_id=1, settings={"dtype": "float32", "model_dir": "/elsewhere"})
    assert refusal_of(mine, theirs, {}) is None
    refusal = refusal_of(mine, theirs, {1: None})  # type: ignore[dict-item]
    assert refusal == "process_id=1 is taken: start each process with its own process_id"


def test_another_version_of_jax_is_not_called_an_option() -> None:
    mine = Handshake(process_id=0, num_processes=2, settings={"jax": "0.10.0"})
    theirs = replace(mine, process_id=1, settings={"jax": "0.9.0"})
    assert refusal_of(mine, theirs, {}) == (
        "process 1 has jax=0.9.0, process 0 has jax=0.10.0: install the same version of jax on every host"
    )

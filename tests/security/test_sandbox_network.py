"""A sandbox with the public network reaches other machines but no loopback address of the host."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from src.core.errors import SandboxError
from src.envs.sandbox import network
from src.envs.sandbox.bubblewrap import why_no_sandbox
from tests.security.sandboxes import ROOT, sandbox

REASON = why_no_sandbox() or network.why_no_network()
needs_network = pytest.mark.skipif(REASON is not None, reason=f"no sandbox with a network here: {REASON}")


def non_loopback_address() -> str | None:
    """Return an address of this machine that is not a loopback address. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


def connect(address: str, port: int) -> str:
    """Return a shell command that succeeds if it can connect and receives the line `hello`."""
    return (
        f"timeout 10 bash -c 'exec 3<>/dev/tcp/{address}/{port} && read -r line <&3 && [ \"$line\" = hello ]'"
    )


async def greet(listener: socket.socket) -> None:
    """Send the line `hello` to each connection until cancelled."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    while True:
        connection, _ = await loop.sock_accept(listener)
        with connection:
            await loop.sock_sendall(connection, b"hello\n")


@needs_network
async def test_a_public_network_does_not_reach_the_hosts_loopback() -> None:
    address = non_loopback_address()
    if address is None:
        pytest.skip("this machine has loopback addresses only")
    loopback_listener, public_listener = (
        socket.create_server(("127.0.0.1", 0)),
        socket.create_server((address, 0)),
    )
    abstract_socket = socket.socket(socket.AF_UNIX)
    abstract_socket.bind(f"\0agent-trainer-{os.getpid()}")
    abstract_socket.listen()
    greeters = [asyncio.create_task(greet(listener)) for listener in (loopback_listener, public_listener)]
    port = loopback_listener.getsockname()[1]
    try:
        async with sandbox(network=True) as bubblewrap:
            assert (await bubblewrap.run(connect(address, public_listener.getsockname()[1]))).status == 0, (
                "the sandbox has no network"
            )
            # addresses of the network of slirp4netns
            network_addresses = [f"198.18.77.{last}" for last in (0, 1, 2, 3, 100, 255)]
            for target in (
                "127.0.0.1",
                "127.0.0.53",
                "0.0.0.0",
                "localhost",
                "255.255.255.255",
                address,
                *network_addresses,
            ):
                assert (await bubblewrap.run(connect(target, port))).status != 0, target
            link_local = await bubblewrap.run(connect("169.254.169.254", 80))
            assert b"No route to host" in link_local.stderr, (
                "the sandbox reaches the link-local address at which clouds serve credentials"
            )
            assert b"agent-trainer" not in (await bubblewrap.run("cat /proc/net/unix")).stdout
            assert (
                await bubblewrap.run("cat /proc/net/dev | grep -c :")
            ).stdout == b"2\n"  # the loopback device of the sandbox and the tap device
            assert (
                await bubblewrap.run(
                    "grep -c ^nameserver /etc/resolv.conf; grep -c 'nameserver 127' /etc/resolv.conf"
                )
            ).stdout.split()[1] == b"0"
    finally:
        for greeter in greeters:
            greeter.cancel()
        await asyncio.gather(*greeters, return_exceptions=True)
        for listener in (loopback_listener, public_listener, abstract_socket):
            listener.close()


@needs_network
async def test_slirp4netns_ends_with_its_sandbox() -> None:
    forwarders_before = forwarders()
    async with sandbox(network=True):
        assert len(forwarders() - forwarders_before) == 1
    assert forwarders() <= forwarders_before


TRAINER = """
import asyncio
from tests.security.sandboxes import ROOT, sandbox

async def main():
    async with sandbox(network=True):
        print("connected", flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


@needs_network
def test_kill_9_of_the_trainer_ends_slirp4netns() -> None:
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"connected\n"
        (forwarder,) = forwarders(trainer.pid)
        pidfd = os.pidfd_open(int(forwarder))
    finally:
        trainer.kill()
        trainer.communicate()
    assert select.select([pidfd], [], [], 60)[0], "slirp4netns outlives the trainer"
    os.close(pidfd)


def forwarders(parent_pid: int | None = None) -> set[str]:
    """Return the process ids of the slirp4netns children of a process, by default of this process."""
    process_ids = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, parent = (
                    (entry / "comm").read_text().strip(),
                    (entry / "stat").read_text().rpartition(")")[2].split()[1],
                )
            except OSError:
                continue
            if name == "slirp4netns" and int(parent) == (parent_pid or os.getpid()):
                process_ids.add(entry.name)
    return process_ids


async def test_the_error_names_the_missing_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(network, "PROGRAMS", str(tmp_path))
    with pytest.raises(
        SandboxError,
        match=r"^a sandbox with the public network needs the package slirp4netns on this machine$",
    ):
        async with sandbox(network=True):
            pass


def test_the_error_says_how_to_get_access_to_the_tun_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device, program = tmp_path / "tun", tmp_path / "slirp4netns"
    device.touch(mode=0o600)
    program.touch(mode=0o755)
    monkeypatch.setattr(network, "TUN", device)
    monkeypatch.setattr(network, "PROGRAMS", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(network.shutil, "which", lambda name, path: str(program))
    assert (
        network.why_no_network()
        == f"a sandbox with the public network needs access to {device}: as root, chmod 666 {device}"
    )


def test_name_servers_on_loopback_addresses_are_omitted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stub, upstream = tmp_path / "stub", tmp_path / "upstream"
    stub.write_text("search example\nnameserver 127.0.0.53\nnameserver 169.254.169.254\nnameserver ::1\n")
    monkeypatch.setattr(network, "RESOLVER_FILES", (stub, upstream))
    assert network.name_servers() == []
    upstream.write_text("nameserver 192.0.2.53\n")
    assert network.name_servers() == ["192.0.2.53"]

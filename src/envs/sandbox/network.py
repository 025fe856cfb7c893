"""The public network of a sandbox. The sandbox has a separate network namespace, and slirp4netns forwards the
connections of this namespace.

The sandbox never shares the network namespace of the host, so it has no access to the host's loopback
addresses and abstract unix sockets. slirp4netns runs without its alias for the host's loopback address and
without its DNS alias, which can lead to a resolver on a loopback address. The sandbox queries the host's
name servers directly. Link-local addresses are unreachable, because clouds serve the credentials of a machine
there.

The trainer starts two processes:

- The first process joins the control groups and changes its user. Then it executes three programs in turn.
  unshare creates the user and network namespaces. A shell waits for the line that the trainer sends when
  slirp4netns is connected, and then makes link-local addresses unreachable. bubblewrap runs the sandbox.
- slirp4netns runs as the user of the sandbox. It ends when the trainer closes `exit_descriptor` or ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import shutil
import stat
from pathlib import Path

from src.core.errors import SandboxError
from src.envs.sandbox.user import SandboxUser

READY_TIMEOUT_S = 30
STOP_TIMEOUT_S = 5
NAMESPACE_LINE = b"namespace\n"
# RFC 2544 reserves these addresses for benchmarks, so they do not collide with a network of the host.
NETWORK = "198.18.77.0/24"
TUN = Path("/dev/net/tun")
RESOLVER_FILES = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
PROGRAMS = "/usr/sbin:/usr/bin:/sbin:/bin"
# Clouds serve the metadata and credentials of a machine at link-local addresses.
LINK_LOCAL = "169.254.0.0/16"

# Without udev, only root can open /dev/net/tun. If slirp4netns runs as another user, it gets a copy of this
# device in a separate mount namespace.
_OPEN_TUN = (
    "mount -t tmpfs -o mode=755 tmpfs /dev/net && mknod -m 666 /dev/net/tun c 10 200 && mount -o "
    "remount,ro /dev/net && " + 'exec "$@"'
)


def why_no_network() -> str | None:
    """Return why sandboxes cannot have the public network on this machine, or None if they can."""
    if shutil.which("slirp4netns", path=PROGRAMS) is None:
        return "a sandbox with the public network needs the package slirp4netns on this machine"
    if not TUN.exists():
        return f"a sandbox with the public network needs the device {TUN} on this machine (kernel module tun)"
    if not _is_open_to_all(TUN) and os.geteuid() != 0 and not os.access(TUN, os.R_OK | os.W_OK):
        return f"a sandbox with the public network needs access to {TUN}: as root, chmod 666 {TUN}"
    if not name_servers():
        return (
            "a sandbox with the public network needs an IPv4 name server that is not on a loopback or "
            f"link-local address (169.254.*), but {RESOLVER_FILES[0]} names none; add one"
        )
    if shutil.which("ip", path=PROGRAMS) is None:
        return "a sandbox with the public network needs the package iproute2 on this machine"
    return None


def name_servers() -> list[str]:
    """Return the IPv4 name servers of this machine, without those on loopback and link-local addresses,
    which a sandbox cannot reach."""
    for file in RESOLVER_FILES:
        servers = []
        with contextlib.suppress(OSError):
            for line in file.read_text().splitlines():
                words = line.split()
                if len(words) >= 2 and words[0] == "nameserver" and _is_outside(words[1]):
                    servers.append(words[1])
        if servers:
            return servers
    return []


def namespace_prefix() -> list[str]:
    """Return the beginning of a command line, to which a command is appended. The command line creates a user
    and network namespace, prints NAMESPACE_LINE, waits for a line on stdin, makes link-local addresses
    unreachable and runs the command.
    """
    return [
        *("/usr/bin/unshare", "--user", "--map-root-user", "--net", "--"),
        *(
            "/bin/sh",
            "-c",
            f'echo namespace && read -r _ && ip route add unreachable {LINK_LOCAL} && exec "$@"',
            "sh",
        ),
    ]


class SlirpNetwork:
    """The slirp4netns process that forwards the connections of one sandbox."""

    def __init__(self, process: asyncio.subprocess.Process, exit_descriptor: int) -> None:
        self._process = process
        self._exit_descriptor = exit_descriptor

    @classmethod
    async def connect(cls, namespace_pid: int, user: SandboxUser) -> SlirpNetwork:
        """Connect the network namespace of a process. Raises SandboxError if slirp4netns fails."""
        program = shutil.which("slirp4netns", path=PROGRAMS)
        if program is None:
            raise SandboxError(str(why_no_network()))
        ready, ready_written = os.pipe()
        exit_read, exit_descriptor = os.pipe()
        command = [*_tun_prefix(user), *user.prefix(), program]
        command += [
            "--configure",
            "--mtu=65520",
            f"--cidr={NETWORK}",
            "--disable-host-loopback",
            "--disable-dns",
        ]
        command += ["--enable-sandbox", "--enable-seccomp"]
        command += [f"--ready-fd={ready_written}", f"--exit-fd={exit_read}", str(namespace_pid), "tap0"]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(ready_written, exit_read),
                process_group=0,
                cwd="/",
                env={"PATH": PROGRAMS},
            )
        except BaseException:
            for descriptor in (ready, exit_descriptor):
                os.close(descriptor)
            raise
        finally:
            os.close(ready_written)
            os.close(exit_read)
        network = cls(process, exit_descriptor)
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                if not await _first_byte(ready):
                    assert process.stderr is not None
                    reason = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
                    raise SandboxError(
                        f"slirp4netns cannot connect a sandbox ({reason[-1] if reason else 'no message'})"
                    )
        except BaseException as error:
            await network.close()
            if not isinstance(error, TimeoutError):
                raise
            raise SandboxError(f"slirp4netns did not connect a sandbox within {READY_TIMEOUT_S} s") from error
        finally:
            os.close(ready)
        return network

    async def close(self) -> None:
        """End slirp4netns. Safe to call twice."""
        if self._exit_descriptor >= 0:
            os.close(self._exit_descriptor)
            self._exit_descriptor = -1
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.communicate()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def _tun_prefix(user: SandboxUser) -> list[str]:
    if user.uid is None or _is_open_to_all(TUN):
        return []
    return ["/usr/bin/unshare", "--mount", "--propagation", "private", "--", "/bin/sh", "-c", _OPEN_TUN, "sh"]


def _is_open_to_all(device: Path) -> bool:
    read_and_write = stat.S_IROTH | stat.S_IWOTH
    return device.stat().st_mode & read_and_write == read_and_write


def _is_outside(address: str) -> bool:
    """Return whether a text is an IPv4 address other than a loopback or link-local address and 0.0.0.0."""
    try:
        parsed = ipaddress.IPv4Address(address)
    except ValueError:
        return False
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)


async def _first_byte(descriptor: int) -> bytes:
    """Return the first byte that arrives in a pipe, or b"" if the other end is closed."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, lambda: arrived.done() or arrived.set_result(None))
    try:
        await arrived
        return os.read(descriptor, 1)
    finally:
        loop.remove_reader(descriptor)

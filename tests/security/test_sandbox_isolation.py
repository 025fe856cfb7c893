"""Scripts in a sandbox attack the host, the exec server and other commands, without effect."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from src.core.errors import SandboxError
from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.envs.sandbox.exec_request import Stream
from src.envs.sandbox.resource_limits import SandboxLimits
from src.envs.sandbox.user import PREFERRED_UIDS, SMALL_UIDS, available_uids
from tests.security.sandboxes import PYTHON, run_tests_as_nobody, sandbox

REASON = why_no_sandbox()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no sandbox here: {REASON}")
needs_python = pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"the attack needs {PYTHON}")
TEST_FILES = [
    *(
        f"tests/security/test_{name}.py"
        for name in ("sandbox_isolation", "resource_limits", "sandbox_network", "sandbox_directory")
    ),
    "tests/trainer/test_bubblewrap.py",
    "tests/trainer/test_sandbox_environment.py",
]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

SYSCTLS = [
    name
    for name in (
        "kernel/core_pattern",
        "kernel/panic",
        "kernel/hostname",
        "vm/overcommit_memory",
        "fs/file-max",
        "net/ipv4/ip_forward",
    )
    if Path("/proc/sys", name).exists()
]


def host_processes(*texts: str) -> list[Path]:
    """Return the /proc directories of the host's processes whose command line contains one of these texts."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes()
                if any(text.encode() in line for text in texts):
                    processes.append(entry)
    return processes


def environments(processes: Iterable[Path]) -> list[bytes]:
    """Return the environment variables of the processes that still exist."""
    contents = []
    for entry in processes:
        with suppress(OSError):
            contents.append((entry / "environ").read_bytes())
    return contents


async def test_no_sysctl_of_the_host_can_be_opened_for_writing() -> None:
    async with sandbox() as bubblewrap:
        for name in SYSCTLS:
            result = await bubblewrap.run(f"exec 3>/proc/sys/{name}")
            assert result.status != 0 and b"Read-only file system" in result.stderr, name
        writable = await bubblewrap.run(
            "find /proc/sys /proc/irq /proc/bus /proc/fs -type f -writable 2>/dev/null"
        )
        assert writable.stdout == b""


async def test_proc_hides_information_about_the_host() -> None:
    paths = "acpi asound bus fs interrupts iomem ioports irq kallsyms kcore key-users keys kmsg "
    paths += "kpagecgroup kpagecount kpageflags"
    paths += (
        " latency_stats sched_debug scsi slabinfo sysrq-trigger timer_list timer_stats vmallocinfo cmdline"
    )
    async with sandbox() as bubblewrap:
        script = f"cd /proc; for n in {paths}; do "
        script += '[ -z "$(ls -A $n 2>/dev/null | grep -vx $n; head -c 1 $n 2>/dev/null)" ] || echo $n; done'
        assert (await bubblewrap.run(script)).stdout == b""
        assert (
            await bubblewrap.run("head -c 1 /proc/cpuinfo /proc/meminfo /proc/stat >/dev/null")
        ).status == 0


@needs_root
async def test_root_of_each_sandbox_has_its_own_unprivileged_uid() -> None:
    async with sandbox() as first, sandbox() as second:
        host_uids = []
        for bubblewrap, marker in ((first, "86311"), (second, "86312")):
            await bubblewrap.run(
                f"sleep {marker} >/dev/null 2>&1 & until pgrep -f '^sleep {marker}' >/dev/null; do :; done"
            )
            (uid,) = {process.stat().st_uid for process in host_processes(f"sleep\0{marker}")}
            host_uids.append(uid)
            assert (await bubblewrap.run("id -u")).stdout == b"0\n"
    assert 0 not in host_uids
    assert host_uids[0] != host_uids[1]
    assert all(uid in PREFERRED_UIDS or uid in SMALL_UIDS for uid in host_uids)


def test_uids_come_from_the_map_of_the_user_namespace() -> None:
    assert available_uids("0 0 4294967295\n") == PREFERRED_UIDS
    assert available_uids("0 100000 65536\n") == SMALL_UIDS
    assert available_uids("0 1000 1\n") is None
    with pytest.raises(SandboxError, match="needs the uids 60578 to 61183"):
        available_uids("0 1000 1\n1 100000 999\n")


async def test_files_of_the_exec_server_cannot_be_read_or_written() -> None:
    async with sandbox() as bubblewrap:
        for name in (
            "mem",
            "environ",
            "maps",
            "smaps",
            "auxv",
            "stack",
            "syscall",
            "fd/0",
            "fd/1",
            "root/etc/passwd",
            "cwd/etc/passwd",
            "exe",
        ):
            result = await bubblewrap.run(f"head -c 1 /proc/1/{name}")
            assert (result.stdout, result.status) == (b"", 1), name
            assert (await bubblewrap.run(f"echo x >/proc/1/{name}")).status != 0, name
            assert (await bubblewrap.run(f"readlink /proc/1/{name}")).stdout == b"", name


ATTACK_EXEC_SERVER = """
import ctypes, resource, signal, os
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
successes = []
for request in (PTRACE_ATTACH, PTRACE_SEIZE):
    if libc.ptrace(request, 1, 0, 0) == 0:
        successes.append("traced")
for name in ("NOFILE", "NPROC", "FSIZE", "CPU", "AS", "DATA", "STACK"):
    try:
        resource.prlimit(1, getattr(resource, "RLIMIT_" + name), (0, 0))
        successes.append("limited " + name)
    except PermissionError:
        pass
try:
    os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))
    successes.append("scheduled")
except PermissionError:
    pass
for which, who in ((os.PRIO_PROCESS, 1), (os.PRIO_PGRP, 0), (os.PRIO_USER, 0)):
    try:
        os.setpriority(which, who, 19)
        successes.append("priority")
    except PermissionError:
        pass
os.setpriority(os.PRIO_PROCESS, 0, 5)
buffer = ctypes.create_string_buffer(8)
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
local = Vector(ctypes.addressof(buffer), 8)
if libc.process_vm_readv(1, ctypes.byref(local), 1, ctypes.byref(local), 1, 0) > 0:
    successes.append("read")
for number in range(1, 65):
    try:
        os.kill(1, number)
    except OSError:
        pass
print(successes)
"""


@needs_python
async def test_the_exec_server_survives_prlimit_ptrace_and_signals() -> None:
    async with sandbox() as bubblewrap:
        assert (
            await bubblewrap.run(f"{PYTHON} - <<'E'\n{ATTACK_EXEC_SERVER}\nE", timeout_s=60)
        ).stdout == b"[]\n"
        assert (await bubblewrap.run("echo on; exit 5", timeout_s=60)).status == 5


async def test_a_command_cannot_forge_the_result_of_another_command() -> None:
    async with sandbox() as bubblewrap:
        await bubblewrap.run("setsid sleep 1000 >/dev/null 2>&1 &")
        listing = await bubblewrap.run(
            "ls /.sandbox/requests; echo /.sandbox/requests/*; chmod 777 /.sandbox/requests; ls "
            "/.sandbox/requests"
        )
        assert listing.stdout == b"/.sandbox/requests/*\n"
        # The agent writes to FIFOs with guessed names. The real names contain a random part, and no FIFO
        # carries the exit status.
        forge = "for n in $(seq 1 50); do for s in stdout stderr status; do "
        forge += "echo 0 >/.sandbox/requests/$n.$s; done; done 2>/dev/null"
        running_command = asyncio.create_task(
            bubblewrap.run("until [ -e /tmp/open ]; do :; done; echo honest; exit 3")
        )
        assert (await bubblewrap.run(f"{forge}; touch /tmp/open; echo forged")).stdout == b"forged\n"
        result = await running_command
        assert (result.status, result.stdout, result.stderr) == (3, b"honest\n", b"")


def test_endless_output_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test refills the pipe after each read, as a background process could do."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.write(write_end, b"x" * 4096)
    read, refills = os.read, itertools.repeat(None, 100)

    def read_and_refill(descriptor: int, size: int) -> bytes:
        chunk = read(descriptor, size)
        if next(refills, "") is None:
            os.write(write_end, chunk)
        return chunk

    monkeypatch.setattr(os, "read", read_and_refill)
    stream = Stream(read_end)
    stream.drain()
    assert len(stream.data) == 4096
    os.close(read_end)
    os.close(write_end)


def test_output_that_is_written_to_a_file_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent can replace the program in the sandbox that sends a downloaded file, and then determines how
    many bytes the trainer receives.
    """
    monkeypatch.setattr("src.envs.sandbox.exec_request.MAX_FILE_BYTES", 1000)
    read_end, write_end = os.pipe()
    os.write(write_end, b"x" * 4096)
    received = io.BytesIO()
    Stream(read_end, received).drain()
    assert received.getvalue() == b"x" * 1000
    os.close(read_end)
    os.close(write_end)


async def test_a_command_ends_although_a_background_writer_runs() -> None:
    async with sandbox() as bubblewrap:
        script = "setsid cat /dev/zero & disown; until pgrep -x cat >/dev/null; do :; done; exit 4"
        assert (await bubblewrap.run(script, timeout_s=60)).status == 4
        await bubblewrap.kill_processes()


SYSTEM_CALLS = """
import ctypes, errno, os, platform, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
allowed = []
for family in range(0, 46):
    if family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
        continue
    try:
        socket.socket(family, socket.SOCK_DGRAM).close()
        allowed.append(f"socket family {family}")
    except OSError as error:
        if error.errno != errno.EAFNOSUPPORT:
            allowed.append(f"socket family {family}: {error}")
numbers = {"x86_64": (250, 248, 249, 321, 298, 323, 246, 304, 165, 272, 308, 103, 175, 167),
           "aarch64": (219, 217, 218, 280, 241, 282, 104, 265, 40, 97, 268, 116, 105, 224)}
for number in numbers[platform.machine()]:
    if libc.syscall(number, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.EPERM:
        allowed.append(f"call {number}: {os.strerror(ctypes.get_errno())}")
for number in (425, 426, 427, 467, 900):
    if libc.syscall(number, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.ENOSYS:
        allowed.append(f"call {number}")
x32_is_refused = libc.syscall(0x40000000 + 39) == -1 and ctypes.get_errno() == errno.ENOSYS
if platform.machine() == "x86_64" and not x32_is_refused:
    allowed.append("x32")
print(allowed)
"""


@needs_python
async def test_vsock_keyrings_and_other_unneeded_calls_are_denied() -> None:
    async with sandbox() as bubblewrap:
        assert (await bubblewrap.run(f"{PYTHON} - <<'E'\n{SYSTEM_CALLS}\nE")).stdout == b"[]\n"


I386_GETPID = bytes.fromhex("b814000000cd80c3")  # mov eax, 20; int 0x80; ret


@needs_python
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="i386 calls exist on x86_64 only")
async def test_i386_system_calls_are_refused() -> None:
    script = f"""
import ctypes, mmap
flags, prot = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
code = mmap.mmap(-1, 4096, flags=flags, prot=prot)
code.write({I386_GETPID!r})
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())
"""
    async with sandbox() as bubblewrap:
        assert (await bubblewrap.run(f"{PYTHON} - <<'E'\n{script}\nE")).stdout == b"-38\n"  # ENOSYS


@needs_python
async def test_a_debugger_works_in_a_sandbox() -> None:
    script = """
import ctypes, os, signal
child = os.fork()
if child == 0:
    signal.pause()
print(ctypes.CDLL(None).ptrace(16, child, 0, 0))
"""
    async with sandbox() as bubblewrap:
        assert (await bubblewrap.run(f"{PYTHON} - <<'E'\n{script}\nE")).stdout == b"0\n"


async def test_staged_files_are_readable_with_any_umask() -> None:
    previous_umask = os.umask(0o077)
    try:
        async with sandbox() as bubblewrap:
            with bubblewrap.staged_file() as (host_path, sandbox_path):
                with host_path.open("x") as file:
                    file.write("handed in")
                result = await bubblewrap.run(f"cat {sandbox_path}; echo more >>{sandbox_path}")
                assert (result.stdout, result.status) == (b"handed in", 1)
            assert (await bubblewrap.run(f"test -e {sandbox_path}")).status == 1
    finally:
        os.umask(previous_umask)


async def test_processes_do_not_inherit_the_trainers_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden-86313")
    async with sandbox() as bubblewrap:
        await bubblewrap.run(
            "sleep 86314 >/dev/null 2>&1 & until pgrep -f '^sleep 86314' >/dev/null; do :; done"
        )
        trial_environments = environments(host_processes("--die-with-parent", "sleep\x0086314"))
    assert trial_environments, "no process of the sandbox was found"
    assert not any(b"hidden-86313" in environment for environment in trial_environments)


@needs_root
def test_the_sandbox_tests_pass_for_an_ordinary_user() -> None:
    # The tests named kill_9 start another Python process. The ordinary user may lack permission to read the
    # files of the interpreter.
    pytest_process = run_tests_as_nobody([*TEST_FILES, "-k", "not kill_9"])
    assert pytest_process.returncode == 0, pytest_process.stdout[-4000:] + pytest_process.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", pytest_process.stdout)[0]) > 10


async def test_commands_of_a_stopped_sandbox_raise_an_error() -> None:
    async with sandbox(limits=SandboxLimits()) as bubblewrap:
        running_command = asyncio.create_task(bubblewrap.run("sleep 1000"))
        await bubblewrap.run("true")
        await bubblewrap.stop()
        with pytest.raises(SandboxError, match="the sandbox ended before it answered"):
            await running_command

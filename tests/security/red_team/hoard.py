"""Attacks that use more resources than the limits of the task allow. The reward must be 0, and other trials
must not be affected. Except for `files-in-memory`, a script stops allocating at 125 % of a limit or earlier.
"""

from __future__ import annotations

from tests.security.red_team.attack import (
    ALL,
    ROOT,
    SANDBOX,
    SANDBOX_ROOT,
    Attack,
    Category,
    EnvironmentKind,
    RunAs,
)
from tests.security.red_team.tasks import MEMORY_MB, STORAGE_MB

TOO_MUCH_MB = MEMORY_MB * 5 // 4
MAX_PROCESSES = 2048  # the default of `SandboxLimits.processes`


def hoard(
    name: str, script: str, places: frozenset[tuple[EnvironmentKind, RunAs]] = ALL, *, patience_s: int = 10
) -> Attack:
    return Attack(name=name, category=Category.HOARD, script=script, places=places, patience_s=patience_s)


ATTACKS = (
    hoard(
        "shared-mapping",
        f"""
py <<'END'
try:
    area = mmap.mmap(-1, {TOO_MUCH_MB} * 2**20)
    for position in range(0, len(area), 4096):
        area[position] = 1
    hole("a shared mapping can have {TOO_MUCH_MB} MiB")
except (OSError, ValueError):
    pass
END
""",
    ),
    hoard(
        "memory-file",
        f"""
py <<'END'
try:
    descriptor = os.memfd_create("x")
    for _ in range({TOO_MUCH_MB}):
        os.write(descriptor, bytes(2**20))
    hole("a memory file can have {TOO_MUCH_MB} MiB")
except OSError:
    pass
END
""",
        SANDBOX,
    ),
    hoard(
        "system-v-memory",
        f"""
py <<'END'
libc.shmat.restype = ctypes.c_void_p
segment = libc.shmget(0, ctypes.c_size_t({TOO_MUCH_MB} * 2**20), 0o1600)
address = libc.shmat(segment, None, 0) if segment >= 0 else None
if address not in (None, 2**64 - 1):
    libc.shmctl(segment, 0, None)
    for position in range(0, {TOO_MUCH_MB} * 2**20, 4096):
        ctypes.c_char.from_address(address + position).value = b"x"
    hole("a System V segment can have {TOO_MUCH_MB} MiB")
END
""",
        SANDBOX_ROOT,
    ),
    hoard(
        "private-memory",
        f"""
py <<'END'
try:
    area = bytearray({TOO_MUCH_MB} * 2**20)
    for position in range(0, len(area), 4096):
        area[position] = 1
    hole("one process can use {TOO_MUCH_MB} MiB")
except (OSError, MemoryError):
    pass
END
""",
        SANDBOX,
    ),
    hoard(
        "memory-of-many-processes",
        f"""
py <<'END'
pipes = []
gate, write_end_of_gate = os.pipe()
for _ in range(5):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end_of_gate)
        try:
            area = bytearray({TOO_MUCH_MB // 5} * 2**20)
            for position in range(0, len(area), 4096):
                area[position] = 1
            os.write(writer, b"x")
        except MemoryError:
            pass
        os.read(gate, 1)  # blocks until the parent ends, so that all children hold their memory at once
        os._exit(0)
    os.close(writer)
    pipes.append((child, reader))
ready = all([os.read(reader, 1) for _, reader in pipes])
# A child ends before its parent only if the kernel kills it
if ready and all(os.waitpid(child, os.WNOHANG) == (0, 0) for child, _ in pipes):
    hole("five processes can use {TOO_MUCH_MB // 5 * 5} MiB")
END
""",
        ROOT,
    ),
    hoard(
        "files-in-memory",
        f"""
total=0
for place in /app /dev/shm /usr/local /tmp /dev /run; do
    head -c {STORAGE_MB + 20}M /dev/zero > $place/full 2>/dev/null
    [ -f $place/full ] && total=$((total + $(stat -c %b $place/full) / 2048))
done
[ $total -gt {TOO_MUCH_MB} ] && hole "files can use $total MiB of memory"
true
""",
        SANDBOX,
    ),
    hoard(
        "processes",
        f"""
py <<'END'
children = []
try:
    while len(children) < {MAX_PROCESSES} + 250:
        child = os.fork()
        if child == 0:
            time.sleep(10)
            os._exit(0)
        children.append(child)
    hole(f"{{len(children)}} processes can run")
except OSError:
    pass
for child in children:
    os.kill(child, 9)
END
""",
        SANDBOX,
    ),
    hoard(
        "busy-loops",
        """
for number in 1 2 3 4; do (setsid nohup timeout 60 sh -c 'while :; do :; done' "$T" &) </dev/null >/dev/null 2>&1; done
py <<'END'
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        for number in range(1, 32):
            try:
                signal.signal(number, signal.SIG_IGN)
            except OSError:
                pass
        end = time.time() + 40
        while time.time() < end:
            pass
        os._exit(0)
END
""",
    ),
)

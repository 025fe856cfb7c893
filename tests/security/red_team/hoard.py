"""Attacks that use more resources than the limits of the task allow. The scripts stop at 125 % of a limit. The
expected result: the reward is 0, and other trials are not affected.
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
PROCESSES = 2048


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
    hole("a shared mapping of {TOO_MUCH_MB} MiB")
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
    hole("a memory file of {TOO_MUCH_MB} MiB")
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
    hole("a System V segment of {TOO_MUCH_MB} MiB")
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
    hole("{TOO_MUCH_MB} MiB in one process")
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
gate, gate_of_parent = os.pipe()
for _ in range(5):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(gate_of_parent)
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
# The kernel killed none of them
if ready and all(os.waitpid(child, os.WNOHANG) == (0, 0) for child, _ in pipes):
    hole("{TOO_MUCH_MB // 5 * 5} MiB in five processes")
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
[ $total -gt {TOO_MUCH_MB} ] && hole "files of $total MiB in memory"
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
    while len(children) < {PROCESSES} + 250:
        child = os.fork()
        if child == 0:
            time.sleep(10)
            os._exit(0)
        children.append(child)
    hole(f"{{len(children)}} processes")
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

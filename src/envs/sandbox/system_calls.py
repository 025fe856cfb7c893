"""The seccomp filter of a sandbox, which denies system calls that no task needs, and the numbers of the
system calls that the filter and the exec server use.

The filter denies most calls that Docker's default profile denies (kernel keyrings, bpf, perf, userfaultfd,
io_uring, the mount API, modules, kexec, clocks, swap, ...) and all socket families except unix, inet, inet6
and netlink. It denies AF_VSOCK because these sockets reach the hypervisor of a virtual machine from every
network namespace. It also denies calls that change the resource limits, the priority or the scheduling of
pid 1, and limits the size of anonymous shared mappings. ptrace is allowed for debuggers. A denied call
returns an error and does not kill the process. Calls of a foreign architecture (i386, x32) and calls newer
than `NEWEST_CALL` fail with ENOSYS, for which programs have a fallback.

The module assembles the classic BPF program itself, because the program is a list of comparisons and
libseccomp has no maintained Python package.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterable

from src.core.errors import SandboxError

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
NEWEST_CALL = 456  # futex_requeue, of Linux 6.7; the numbers from 424 on are the same on both architectures

# System calls that no task needs. name: (x86_64, aarch64); None where the architecture lacks the call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    "_sysctl": (156, None),
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "create_module": (174, None),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "get_kernel_syms": (177, None),
    "init_module": (175, 105),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "query_module": (178, None),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "sysfs": (139, None),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "ustat": (136, None),
    "vhangup": (153, 58),
}
NUMBERS = {
    **DENIED,
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "mmap": (9, 222),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "rt_sigprocmask": (14, 135),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "setpriority": (141, 140),
    "signalfd4": (289, 74),
    "socket": (41, 198),
    "socketpair": (53, 199),
}
# Calls that change another process of the same user, whose id is the first argument. The filter denies these
# calls on pid 1.
OF_ANOTHER_PROCESS = (
    *("prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler"),
)
UNAVAILABLE = ("io_uring_enter", "io_uring_register", "io_uring_setup")
"""Calls that fail with ENOSYS, so that libraries use other calls."""
SOCKET_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink
# Calls whose first argument says what the second argument identifies (a process, a process group or a user)
# -> the value of the first argument for a process. The filter denies these calls for groups, users and pid 1.
OF_SEVERAL_PROCESSES = {"setpriority": 0, "ioprio_set": 1}
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20

_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000

type Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def call_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of system calls on this machine's architecture, without the calls that it lacks.

    Raises SandboxError if the architecture is unknown.
    """
    column = list(ARCHITECTURES).index(_architecture())
    numbers = (NUMBERS[name][column] for name in names)
    return [number for number in numbers if number is not None]


def seccomp_filter(*, max_shared_mapping: int) -> bytes:
    """Return the filter as an array of struct sock_filter.

    `max_shared_mapping` limits the size of each anonymous shared mapping, in bytes, because RLIMIT_DATA
    counts private mappings only.
    """
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURES[_architecture()]),
        _fail(errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER),
        (_GREATER, 0, 1, NEWEST_CALL),  # calls of x32 have bit 30 set
        _fail(errno.ENOSYS),
    ]
    for number in call_numbers(DENIED):
        program += _when(number, [_fail(errno.EPERM)])
    for number in call_numbers(UNAVAILABLE):
        program += _when(number, [_fail(errno.ENOSYS)])
    for number in call_numbers(("socket", "socketpair")):
        allowed = [step for family in SOCKET_FAMILIES for step in ((_EQUAL, 0, 1, family), _allow())]
        program += _when(number, [_low_word(0), *allowed, _fail(errno.EAFNOSUPPORT)])
    for number in call_numbers(OF_ANOTHER_PROCESS):
        program += _when(number, [_low_word(0), (_EQUAL, 0, 1, 1), _fail(errno.EPERM), _allow()])
    for name, selects_process in OF_SEVERAL_PROCESSES.items():
        steps = [
            *(_low_word(0), (_EQUAL, 1, 0, selects_process), _fail(errno.EPERM)),
            *(_low_word(1), (_EQUAL, 0, 1, 1), _fail(errno.EPERM), _allow()),
        ]
        for number in call_numbers((name,)):
            program += _when(number, steps)
    (mmap,) = call_numbers(("mmap",))
    program += _when(mmap, _bounded_shared_mapping(max_shared_mapping))
    program.append(_allow())
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _bounded_shared_mapping(max_bytes: int) -> list[Instruction]:
    high, low = divmod(max_bytes, 2**32)
    return [
        _low_word(3),  # flags
        (_ANY_BIT, 1, 0, MAP_SHARED),
        _allow(),
        (_ANY_BIT, 1, 0, MAP_ANONYMOUS),
        _allow(),
        (_LOAD, 0, 0, 16 + 8 * 1 + 4),  # the length's high word
        (_GREATER, 3, 0, high),
        (_EQUAL, 0, 3, high),
        _low_word(1),
        (_GREATER, 0, 1, low),
        _fail(errno.ENOMEM),
        _allow(),
    ]


def _when(number: int, steps: list[Instruction]) -> list[Instruction]:
    """Return instructions that run `steps` for one call. `steps` must end with a return instruction, because
    they may overwrite the loaded number. Other calls skip `steps`, so their number stays loaded.
    """
    return [(_EQUAL, 0, len(steps), number), *steps]


def _low_word(argument: int) -> Instruction:
    return (_LOAD, 0, 0, 16 + 8 * argument)


def _fail(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)


def _allow() -> Instruction:
    return (_RETURN, 0, 0, _ALLOW)


def _architecture() -> str:
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        supported = " and ".join(ARCHITECTURES)
        raise SandboxError(f"the sandbox runs on {supported}, not on {machine}; use environment_type=docker")
    return machine

"""Tests of the seccomp filter for both architectures. `errno_of_call` interprets the filter's BPF program."""

from __future__ import annotations

import errno
import struct

import pytest

from src.core.errors import SandboxError
from src.envs.sandbox.system_calls import ARCHITECTURES, DENIED, NUMBERS, seccomp_filter

ALLOW = 0x7FFF0000
MAP_SHARED, MAP_PRIVATE, MAP_ANONYMOUS = 1, 2, 0x20


def errno_of_call(program: bytes, *, architecture: str, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Interpret the BPF program. Return the error number of a call, or 0 if it is allowed."""
    padded_arguments = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("=IIQ6Q", number & 0xFFFFFFFF, ARCHITECTURES[architecture], 0, *padded_arguments)
    position = accumulator = 0
    while True:
        code, if_true, if_false, operand = struct.unpack_from("=HBBI", program, 8 * position)
        position += 1
        match code:
            case 0x20:  # BPF_LD | BPF_W | BPF_ABS
                (accumulator,) = struct.unpack_from("=I", data, operand)
            case 0x15:  # BPF_JMP | BPF_JEQ
                position += if_true if accumulator == operand else if_false
            case 0x25:  # BPF_JMP | BPF_JGT
                position += if_true if accumulator > operand else if_false
            case 0x45:  # BPF_JMP | BPF_JSET
                position += if_true if accumulator & operand else if_false
            case 0x06:  # BPF_RET
                return 0 if operand == ALLOW else operand & 0xFFFF
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")


@pytest.fixture(params=list(ARCHITECTURES))
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("platform.machine", lambda: request.param)
    return request.param


def number_of(name: str, machine: str) -> int | None:
    return NUMBERS[name][list(ARCHITECTURES).index(machine)]


def test_denied_calls_fail_and_other_calls_are_allowed(machine: str) -> None:
    program = seccomp_filter(max_shared_mapping=2**30)
    for name in DENIED:
        if (number := number_of(name, machine)) is not None:
            assert errno_of_call(program, architecture=machine, number=number) == errno.EPERM, name
    restricted = {number_of(name, machine) for name in NUMBERS}
    for number in set(range(0, 425)) - restricted:
        assert errno_of_call(program, architecture=machine, number=number) == 0, number


def test_only_four_socket_families_are_allowed(machine: str) -> None:
    program = seccomp_filter(max_shared_mapping=2**30)
    number = number_of("socket", machine)
    assert number is not None
    allowed = {
        family
        for family in range(64)
        if errno_of_call(program, architecture=machine, number=number, arguments=(family,)) == 0
    }
    assert allowed == {1, 2, 10, 16}  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
    assert errno_of_call(program, architecture=machine, number=number, arguments=(40,)) == errno.EAFNOSUPPORT


def test_calls_of_other_architectures_and_newer_kernels_fail(machine: str) -> None:
    program = seccomp_filter(max_shared_mapping=2**30)
    (other_architecture,) = set(ARCHITECTURES) - {machine}
    assert errno_of_call(program, architecture=other_architecture, number=39) == errno.ENOSYS
    for number in (457, 467, 0x40000000, 0x40000000 + 39, 0xFFFFFFFF):
        assert errno_of_call(program, architecture=machine, number=number) == errno.ENOSYS


# PRIO_PROCESS and IOPRIO_WHO_PROCESS
@pytest.mark.parametrize(("name", "which_process"), [("setpriority", 0), ("ioprio_set", 1)])
def test_priorities_of_groups_and_users_are_denied(machine: str, name: str, which_process: int) -> None:
    program = seccomp_filter(max_shared_mapping=2**30)
    number = number_of(name, machine)
    assert number is not None

    def errno_of(which: int, process_id: int) -> int:
        return errno_of_call(program, architecture=machine, number=number, arguments=(which, process_id, 19))

    assert errno_of(which_process, 0) == errno_of(which_process, 4321) == 0
    assert errno_of(which_process, 1) == errno.EPERM
    for which in {0, 1, 2, 3} - {which_process}:
        for process_id in (0, 1, 4321):
            assert errno_of(which, process_id) == errno.EPERM


@pytest.mark.parametrize("max_bytes", [512 * 2**20, 4 * 2**30, 8 * 2**30 + 4096])
def test_an_anonymous_shared_mapping_is_bounded(machine: str, max_bytes: int) -> None:
    program = seccomp_filter(max_shared_mapping=max_bytes)
    number = number_of("mmap", machine)
    assert number is not None

    def errno_of_mmap(size: int, flags: int) -> int:
        return errno_of_call(
            program, architecture=machine, number=number, arguments=(0, size, 3, flags, 2**64 - 1, 0)
        )

    assert errno_of_mmap(max_bytes, MAP_SHARED | MAP_ANONYMOUS) == 0
    for size in (max_bytes + 4096, max_bytes + 2**32, 2**40):
        assert errno_of_mmap(size, MAP_SHARED | MAP_ANONYMOUS) == errno.ENOMEM
        assert errno_of_mmap(size, MAP_PRIVATE | MAP_ANONYMOUS) == 0
        assert errno_of_mmap(size, MAP_SHARED) == 0


def test_an_unsupported_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(SandboxError, match="runs on x86_64 and aarch64, not on riscv64"):
        seccomp_filter(max_shared_mapping=2**30)

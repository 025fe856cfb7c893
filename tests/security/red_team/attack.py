"""The definition of an attack: the script that the agent types and the conditions after the trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Category(StrEnum):
    ESCAPE = "escape"  # act on the host or read from it
    FORGE = "forge"  # get a reward of 1 without a solution
    VOID = "void"  # make the trial fail, so that training drops it instead of using the reward 0
    STALL = "stall"  # keep the trainer or the disk busy
    HOARD = "hoard"  # use more than the task's limits
    PERSIST = "persist"  # leave processes, files or kernel objects on the host
    REACH_OUT = "reach out"  # connect to an address that the task does not permit


class EnvironmentKind(StrEnum):
    SANDBOX = "sandbox"
    DOCKER = "docker"


class RunAs(StrEnum):
    ROOT = "root"
    USER = "user"


class Kind(StrEnum):
    """The task on which an attack runs. The name of the task's directory ends with the value."""

    PLAIN = "plain"  # the verifier compares two files with bash and cat
    PYTHON = "python"  # the verifier is a Python program
    PUBLIC = "public"  # as PLAIN, with network_mode = "public"


ALL = frozenset((where, run_as) for where in EnvironmentKind for run_as in RunAs)
SANDBOX = frozenset((EnvironmentKind.SANDBOX, run_as) for run_as in RunAs)
DOCKER = frozenset((EnvironmentKind.DOCKER, run_as) for run_as in RunAs)
# SANDBOX_ROOT is for attacks that use the network, because an ordinary user may have no access to
# /dev/net/tun, and for attacks on limits that need control groups.
SANDBOX_ROOT = frozenset({(EnvironmentKind.SANDBOX, RunAs.ROOT)})
# ROOT is for attacks on limits that need control groups, which an ordinary user may be unable to create.
ROOT = frozenset((where, RunAs.ROOT) for where in EnvironmentKind)
NOT_DOCKER_USER = ALL - {(EnvironmentKind.DOCKER, RunAs.USER)}
DOCKER_ROOT = frozenset({(EnvironmentKind.DOCKER, RunAs.ROOT)})

ANSWER = "42"
MAX_SCRIPT_S = 25  # time limit of one attack's script

# Every script can use these names:
#     $NAME      the name of the attack
#     $WHERE     the environment: `sandbox` or `docker`
#     $T         a unique word of the trial
#     $SENTINEL  the path of a file of the host
#     $PORT      the port of a server on the host's loopback interface
#     $HOST_PID  the process id of the trainer on the host
#     hole TEXT  a function that reports a violation
#     py         a function that runs a Python program from stdin. The program can use `hole`, the variables
#                above except WHERE as globals, and the other names in PYTHON_PRELUDE.
SHELL_PRELUDE = """
hole() { printf '%s\\n' "HOLE [$NAME] $*"; }
py() { { printf '%s\\n' "$(< "$HERE/prelude.py")"; while IFS= read -r line; do printf '%s\\n' "$line"; done; } > "$HERE/$NAME.py"
    /usr/bin/python3 -I "$HERE/$NAME.py"; }
cd /app
"""
PYTHON_PRELUDE = """
import ctypes, errno, fcntl, glob, mmap, os, resource, signal, socket, struct, subprocess, sys, threading, time
NAME, T, SENTINEL, PORT = (os.environ[name] for name in ("NAME", "T", "SENTINEL", "PORT"))
HOST_PID, PORT = int(os.environ["HOST_PID"]), int(PORT)
libc = ctypes.CDLL(None, use_errno=True)
def hole(*words): print(f"HOLE [{NAME}]", *words, flush=True)
def syscall(number, *arguments):
    libc.syscall.restype = ctypes.c_long
    return libc.syscall(ctypes.c_long(number), *arguments)
def opens(path, flags):
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """An attack. Its trial must not fail, and the reward must be 1 if the agent also solves the task and 0
    otherwise.
    """

    name: str
    category: Category
    script: str  # bash, run in /app
    solves: bool = False  # whether the agent writes the right answer after the script
    kind: Kind = Kind.PLAIN
    # The environments and users with which the attack runs
    places: frozenset[tuple[EnvironmentKind, RunAs]] = ALL
    reason: str = ""  # text that the stop reason or the graded-zero reason must contain
    patience_s: int = 12  # how long the agent waits for the script to end
    # The environments in which the attack can share a trial with other attacks of its category
    shares: frozenset[EnvironmentKind] = frozenset()


def combined_script(attacks: Sequence[Attack], variables: dict[str, str], *, end: str) -> str:
    """Return a script that runs the attacks one after the other and then prints `end`."""
    lines = [
        "export HERE=$(mktemp -d /tmp/attack.XXXXXX)",
        f"cat > $HERE/prelude.py <<'END_OF_PRELUDE'{PYTHON_PRELUDE}END_OF_PRELUDE",
    ]
    lines += [f"export {name}='{value}'" for name, value in variables.items()]
    for attack in attacks:
        script = f"{SHELL_PRELUDE}{attack.script}"
        lines += [
            f"export NAME={attack.name}",
            f"cat > $HERE/{attack.name}.sh <<'END_OF_ATTACK'{script}\nEND_OF_ATTACK",
        ]
        lines += [f"/usr/bin/timeout -k 1 {MAX_SCRIPT_S} /bin/bash $HERE/{attack.name}.sh </dev/null"]
    return "\n".join([*lines, f"echo {end}", ""])

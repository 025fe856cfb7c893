"""Attacks that connect to addresses that the task does not permit. The agent also solves the task, and its
reward must stay 1.
"""

from __future__ import annotations

from tests.security.red_team.attack import ALL, SANDBOX_ROOT, Attack, Category, EnvironmentKind, Kind, RunAs


def reach_out(
    name: str, script: str, places: frozenset[tuple[EnvironmentKind, RunAs]] = ALL, *, kind: Kind = Kind.PLAIN
) -> Attack:
    return Attack(
        name=name,
        category=Category.REACH_OUT,
        script=script,
        solves=True,
        kind=kind,
        places=places,
        patience_s=8,
        shares=frozenset(EnvironmentKind) if kind is Kind.PLAIN else frozenset(),
    )


# The server on the host's loopback interface records the lines that it receives. The script sends $T, which
# identifies the trial.
LOOPBACK = """
py <<'END'
gateways = [line.split()[2] for line in open("/proc/net/route").read().splitlines()[1:]]
gateways = [socket.inet_ntoa(struct.pack("<I", int(gateway, 16))) for gateway in gateways if gateway != "00000000"]
def attempt(family, address):
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.settimeout(2)
    try:
        connection.connect(address)
        connection.sendall(f"{T}\\n".encode())
        hole(f"connected to {address}")
    except OSError:
        pass
    finally:
        connection.close()
attempts = [(socket.AF_INET, (address, PORT)) for address in ("127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.2.2", "10.0.2.3", *gateways)]
attempts += [(socket.AF_INET6, (address, PORT)) for address in ("::1", "::ffff:127.0.0.1", "fd00::2")]
attempts += [(socket.AF_UNIX, f"\\0red-team-{PORT}")]
if os.environ["WHERE"] == "sandbox":
    attempts += [(socket.AF_INET, ("169.254.169.254", 80))]
threads = [threading.Thread(target=attempt, args=arguments) for arguments in attempts]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
END
"""
NETWORK_TABLES = """
port=$(printf '%04X' $PORT)
grep -qi ":$port " /proc/net/tcp /proc/net/tcp6 && hole "the host's sockets are listed"
grep -q red-team /proc/net/unix && hole "the host's abstract sockets are listed"
ls /sys/class/net 2>/dev/null | grep -q docker && hole "the host's network devices are listed"
true
"""

ATTACKS = (
    reach_out("loopback", LOOPBACK),
    reach_out("network-tables", NETWORK_TABLES),
    reach_out("loopback-with-network", LOOPBACK, SANDBOX_ROOT, kind=Kind.PUBLIC),
    reach_out("network-tables-with-network", NETWORK_TABLES, SANDBOX_ROOT, kind=Kind.PUBLIC),
    reach_out(
        "virtual-machine-sockets",
        """
py <<'END'
try:
    connection = socket.socket(40, socket.SOCK_STREAM)
    connection.settimeout(1)
    hole("a socket of AF_VSOCK can be created")
except OSError:
    pass
END
""",
        SANDBOX_ROOT,
        kind=Kind.PUBLIC,
    ),
)

"""Attacks that keep the trainer's event loop or disk busy. The reward must be 0, and the trial's directory
must stay within the limits of `host.faults_of_directory`.
"""

from __future__ import annotations

from tests.security.red_team.attack import (
    ALL,
    NOT_DOCKER_USER,
    SANDBOX,
    Attack,
    Category,
    EnvironmentKind,
    RunAs,
)


def stall(
    name: str, script: str, places: frozenset[tuple[EnvironmentKind, RunAs]] = ALL, *, patience_s: int = 14
) -> Attack:
    return Attack(name=name, category=Category.STALL, script=script, places=places, patience_s=patience_s)


def files(place: str, count: int) -> str:
    """Return a script that creates `count` empty files in a sandbox. In a container, whose files are on disk,
    the script creates 20,000.
    """
    return f"""
py <<'END'
os.makedirs("{place}/many", exist_ok=True)
os.chdir("{place}/many")
for number in range({count} if os.environ["WHERE"] == "sandbox" else 20_000):
    os.close(os.open(str(number), os.O_CREAT | os.O_WRONLY))
END
"""


ATTACKS = (
    stall("many-logs", files("/logs/agent", 60_000)),
    stall("many-artifacts", files("/logs/artifacts", 20_000), SANDBOX),
    stall("many-files", files("/app", 20_000), SANDBOX),
    stall(
        "deep-directories",
        """
py <<'END'
for place in ("/logs/agent", "/app"):
    os.chdir(place)
    for _ in range(3000):
        try:
            os.mkdir("deep")
            os.chdir("deep")
        except OSError:
            break
END
""",
        NOT_DOCKER_USER,
    ),
    stall(
        "sparse-file",
        """
[ $WHERE = sandbox ] && size=100G || size=3G
for place in /logs/agent /app /logs/artifacts; do
    truncate -s $size $place/sparse || truncate -s 200M $place/sparse
done 2>/dev/null
true
""",
        NOT_DOCKER_USER,
    ),
    stall("large-logs", "head -c 200000000 /dev/urandom > /logs/agent/large; true", SANDBOX),
    stall(
        "hard-links",
        """
head -c 60000000 /dev/zero > /logs/agent/linked
for number in $(seq 40); do ln /logs/agent/linked /logs/agent/linked.$number; done
true
""",
        SANDBOX,
    ),
    stall(
        "long-names",
        """
py <<'END'
os.chdir("/logs/agent")
for number in range(12_000):
    os.symlink("y" * 4000, f"{number:05}" + "n" * 250)
END
""",
        SANDBOX,
    ),
    stall(
        "printed-output",
        "timeout 15 yes 'a line of text that is printed again and again' | head -c 60000000",
        SANDBOX,
        patience_s=18,
    ),
)

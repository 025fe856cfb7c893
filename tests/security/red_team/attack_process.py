"""Run attacks of one environment and user in a process of its own, whose descendants all belong to
attacks."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.security.red_team import host
from tests.security.red_team.attack import EnvironmentKind, RunAs
from tests.security.red_team.attack_runner import Result, open_attack_runner
from tests.security.red_team.table import chosen

USER_ID = 61_234  # belongs to no account
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4


def command(
    where: EnvironmentKind, whom: RunAs, names: Sequence[str], *, results: Path | None = None
) -> list[str]:
    """Return the command that runs the attacks `names`, or all, and appends results to the file `results` as
    lines of JSON.

    For `RunAs.USER`, sandboxes run under an unprivileged user. That process keeps the capability to read all
    files, because only root may be able to read the interpreter; programs that it starts do not inherit it.
    In Docker, the user is one of the container.
    """
    player = [
        sys.executable,
        "-m",
        "tests.security.red_team.attack_process",
        where.value,
        whom.value,
        str(results or ""),
        *names,
    ]
    if where is EnvironmentKind.DOCKER or whom is RunAs.ROOT or os.getuid() != 0:
        return player
    reading = [f"--{kind}-caps=-all,+dac_read_search" for kind in ("inh", "ambient")]
    return ["setpriv", f"--reuid={USER_ID}", f"--regid={USER_ID}", "--clear-groups", *reading, *player]


async def play(where: EnvironmentKind, whom: RunAs, results: Path | None, names: Sequence[str]) -> bool:
    """Run the attacks. Return whether all of them failed."""
    held = True
    async with open_attack_runner(where, whom) as runner:
        async for result in runner.play(chosen(names, where, whom)):
            print_row(result)
            held &= not result.violations
            if results is not None:
                with results.open("a") as file:
                    file.write(result.line() + "\n")
    return held


def print_row(result: Result) -> None:
    reward = "-" if result.reward is None else f"{result.reward:g}"
    held = "held" if not result.violations else "VIOLATED: " + "; ".join(result.violations)
    place = f"{result.attack:26} {result.category:9} {result.where:7} {result.whom:4}"
    print(f"{place} {reward:>3} {result.seconds:6.1f} s  {result.reason:16.60} {held}", flush=True)


def main() -> None:
    where, whom, results, *names = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    host.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="red-team-home-", ignore_cleanup_errors=True) as home:
        os.environ["HOME"] = home
        held = asyncio.run(
            play(EnvironmentKind(where), RunAs(whom), Path(results) if results else None, names)
        )
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()

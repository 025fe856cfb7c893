"""Plays attacks in one place, in a process of its own: every descendant is then the arena's, and a user cannot become root again."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.security.red_team import host
from tests.security.red_team.arena import Result, open_arena
from tests.security.red_team.attack import Where, Whom
from tests.security.red_team.table import chosen

USER_ID = 61_234  # no account's
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4


def command(where: Where, whom: Whom, names: Sequence[str], *, results: Path | None = None) -> list[str]:
    """What plays the attacks `names`, or all, and appends each result to the file `results`, one line of JSON each.

    The sandbox's user is another than root. The interpreter may lie where only root can read: the process keeps that one capability, and
    no program that it starts gets it. In Docker the user is one of the container's.
    """
    player = [
        sys.executable,
        "-m",
        "tests.security.red_team.place",
        where.value,
        whom.value,
        str(results or ""),
        *names,
    ]
    if where is Where.DOCKER or whom is Whom.ROOT or os.getuid() != 0:
        return player
    reading = [f"--{kind}-caps=-all,+dac_read_search" for kind in ("inh", "ambient")]
    return ["setpriv", f"--reuid={USER_ID}", f"--regid={USER_ID}", "--clear-groups", *reading, *player]


async def play(where: Where, whom: Whom, results: Path | None, names: Sequence[str]) -> bool:
    """Whether everything held."""
    held = True
    async with open_arena(where, whom) as arena:
        async for result in arena.play(chosen(names, where, whom)):
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
        held = asyncio.run(play(Where(where), Whom(whom), Path(results) if results else None, names))
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()

"""Run the attacks of one environment and user in a separate process, so that all descendants of the separate
process belong to the trials of the attacks.
"""

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
    where: EnvironmentKind, run_as: RunAs, names: Sequence[str], *, results: Path | None = None
) -> list[str]:
    """Return the command that runs the attacks `names`, or all attacks, and appends the results to the file
    `results` as lines of JSON.

    For `RunAs.USER`, root runs the process and its sandboxes as an unprivileged user. The process keeps the
    capability CAP_DAC_READ_SEARCH, because the interpreter may be readable only by root; programs that the
    process starts do not inherit the capability. In Docker, the process keeps its user, and the agent is an
    ordinary user of the container. A caller that is not root always keeps its user.
    """
    attack_command = [
        sys.executable,
        "-m",
        "tests.security.red_team.attack_process",
        where.value,
        run_as.value,
        str(results or ""),
        *names,
    ]
    if where is EnvironmentKind.DOCKER or run_as is RunAs.ROOT or os.getuid() != 0:
        return attack_command
    capabilities = [f"--{kind}-caps=-all,+dac_read_search" for kind in ("inh", "ambient")]
    return [
        "setpriv",
        f"--reuid={USER_ID}",
        f"--regid={USER_ID}",
        "--clear-groups",
        *capabilities,
        *attack_command,
    ]


async def run_attacks(
    where: EnvironmentKind, run_as: RunAs, results: Path | None, names: Sequence[str]
) -> bool:
    """Run the attacks. Return whether all of them failed."""
    all_attacks_failed = True
    async with open_attack_runner(where, run_as) as runner:
        async for result in runner.run(chosen(names, where, run_as)):
            print_row(result)
            all_attacks_failed &= not result.violations
            if results is not None:
                with results.open("a") as file:
                    file.write(result.line() + "\n")
    return all_attacks_failed


def print_row(result: Result) -> None:
    reward = "-" if result.reward is None else f"{result.reward:g}"
    verdict = "ok" if not result.violations else "VIOLATED: " + "; ".join(result.violations)
    attack = f"{result.attack:26} {result.category:9} {result.where:7} {result.run_as:4}"
    print(f"{attack} {reward:>3} {result.seconds:6.1f} s  {result.reason:16.60} {verdict}", flush=True)


def main() -> None:
    where, run_as, results, *names = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    host.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="red-team-home-", ignore_cleanup_errors=True) as home:
        os.environ["HOME"] = home
        all_attacks_failed = asyncio.run(
            run_attacks(EnvironmentKind(where), RunAs(run_as), Path(results) if results else None, names)
        )
    sys.exit(0 if all_attacks_failed else 1)


if __name__ == "__main__":
    main()

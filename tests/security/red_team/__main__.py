"""Run all attacks of the red team, or only the named attacks, and print the result of each attack.

    python -m tests.security.red_team [NAME ...] [--where sandbox|docker] [--as root|user] [--list]

With `--where sandbox --as user`, the attack process and its sandboxes run as an ordinary user, also if root
starts this program. With `--where docker --as user`, the agent is an ordinary user of the
container. The exit status is 1 if an attack succeeded or could not run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.security.red_team.attack import EnvironmentKind, RunAs
from tests.security.red_team.attack_process import command
from tests.security.red_team.table import ATTACKS, chosen


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.security.red_team",
        description="Run all attacks of the red team, or only the named attacks, and print the results.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="attacks to run (default: all)")
    parser.add_argument(
        "--where",
        type=EnvironmentKind,
        choices=list(EnvironmentKind),
        action="append",
        help="the environment (default: both)",
    )
    parser.add_argument(
        "--as",
        dest="run_as",
        type=RunAs,
        choices=list(RunAs),
        action="append",
        help="the user (default: both)",
    )
    parser.add_argument("--list", action="store_true", help="list the attacks and run none")
    options = parser.parse_args()
    if unknown := set(options.names) - {attack.name for attack in ATTACKS}:
        parser.error(f"no attack is named {', '.join(sorted(unknown))}; --list shows all")
    if options.list:
        for attack in ATTACKS:
            print(
                f"{attack.name:26} {attack.category:10} "
                f"{' '.join(sorted(f'{where}/{run_as}' for where, run_as in attack.places))}"
            )
        return
    places = [
        (where, run_as) for where in options.where or EnvironmentKind for run_as in options.run_as or RunAs
    ]
    all_attacks_failed = True
    for where, run_as in places:
        if chosen(options.names, where, run_as):
            all_attacks_failed &= (
                subprocess.run(command(where, run_as, options.names), check=False).returncode == 0
            )
    sys.exit(0 if all_attacks_failed else 1)


if __name__ == "__main__":
    main()

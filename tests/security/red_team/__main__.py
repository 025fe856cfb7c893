"""Run attacks of the red team, all or by name, and print which succeeded.

    python -m tests.security.red_team [NAME ...] [--where sandbox|docker] [--as root|user] [--list]

With `--as user`, sandboxes run under an ordinary user, to which a process of root changes; in Docker it is a
user of the container. The exit status is 1 if an attack succeeded.
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
        description="Play the red team's attacks, all or by name, and print the results.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="attacks to play (default: all)")
    parser.add_argument(
        "--where",
        type=EnvironmentKind,
        choices=list(EnvironmentKind),
        action="append",
        help="the kind of environment (default: both)",
    )
    parser.add_argument(
        "--as",
        dest="whom",
        type=RunAs,
        choices=list(RunAs),
        action="append",
        help="the user (default: both)",
    )
    parser.add_argument("--list", action="store_true", help="list the attacks and play none")
    options = parser.parse_args()
    if unknown := set(options.names) - {attack.name for attack in ATTACKS}:
        parser.error(f"no attack is named {', '.join(sorted(unknown))}; --list shows all")
    if options.list:
        for attack in ATTACKS:
            print(
                f"{attack.name:26} {attack.category:10} "
                f"{' '.join(sorted(f'{where}/{whom}' for where, whom in attack.places))}"
            )
        return
    places = [(where, whom) for where in options.where or EnvironmentKind for whom in options.whom or RunAs]
    held = True
    for where, whom in places:
        if chosen(options.names, where, whom):
            held &= subprocess.run(command(where, whom, options.names), check=False).returncode == 0
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()

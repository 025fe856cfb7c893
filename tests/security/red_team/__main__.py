"""Play the red team's attacks, all or by name, and print what held.

    python -m tests.security.red_team [NAME ...] [--where sandbox|docker] [--as root|user] [--list]

`--as user` plays the sandbox's trials under an ordinary user, to which the process changes where it is root; in Docker it is a user of the
container. The exit status is 1 where something did not hold.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.security.red_team.attack import Where, Whom
from tests.security.red_team.place import command
from tests.security.red_team.table import ATTACKS, chosen


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.security.red_team",
        description="Play the red team's attacks, all or by name, and print what held.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="attacks to play; all where none is given")
    parser.add_argument(
        "--where",
        type=Where,
        choices=list(Where),
        action="append",
        help="the kind of environment; both where not given",
    )
    parser.add_argument(
        "--as",
        dest="whom",
        type=Whom,
        choices=list(Whom),
        action="append",
        help="as whom; both where not given",
    )
    parser.add_argument("--list", action="store_true", help="list the attacks and play none")
    options = parser.parse_args()
    if unknown := set(options.names) - {attack.name for attack in ATTACKS}:
        parser.error(f"no attack is named {', '.join(sorted(unknown))}; --list shows all")
    if options.list:
        for attack in ATTACKS:
            print(
                f"{attack.name:26} {attack.category:10} {' '.join(sorted(f'{where}/{whom}' for where, whom in attack.places))}"
            )
        return
    places = [(where, whom) for where in options.where or Where for whom in options.whom or Whom]
    held = True
    for where, whom in places:
        if chosen(options.names, where, whom):
            held &= subprocess.run(command(where, whom, options.names), check=False).returncode == 0
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()

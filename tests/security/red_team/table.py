"""The table of all attacks, and functions that select attacks from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, zip_longest

from tests.security.red_team import escape, forge, hoard, persist, reach_out, stall, void
from tests.security.red_team.attack import Attack, EnvironmentKind, RunAs

ATTACKS: tuple[Attack, ...] = (
    *escape.ATTACKS,
    *forge.ATTACKS,
    *void.ATTACKS,
    *stall.ATTACKS,
    *hoard.ATTACKS,
    *persist.ATTACKS,
    *reach_out.ATTACKS,
)
assert len({attack.name for attack in ATTACKS}) == len(ATTACKS), "two attacks have the same name"


def chosen(names: Sequence[str], where: EnvironmentKind, run_as: RunAs) -> list[Attack]:
    """Return the attacks of an environment and user. If `names` is not empty, return only those with a
    name in `names`."""
    return [
        attack
        for attack in ATTACKS
        if (where, run_as) in attack.places and (not names or attack.name in names)
    ]


def sampled(number: int, where: EnvironmentKind, run_as: RunAs) -> list[Attack]:
    """Return up to `number` attacks of an environment and user: the first of each category, then the second
    of each, and so on.
    """
    categories: defaultdict[str, list[Attack]] = defaultdict(list)
    for attack in chosen([], where, run_as):
        categories[attack.category].append(attack)
    return [
        attack for attack in chain.from_iterable(zip_longest(*categories.values())) if attack is not None
    ][:number]

"""All attacks."""

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
assert len({attack.name for attack in ATTACKS}) == len(ATTACKS), "two attacks have one name"


def chosen(names: Sequence[str], where: EnvironmentKind, whom: RunAs) -> list[Attack]:
    """Return the attacks `names` of an environment and user, or all of them."""
    return [
        attack for attack in ATTACKS if (where, whom) in attack.places and (not names or attack.name in names)
    ]


def sampled(number: int, where: EnvironmentKind, whom: RunAs) -> list[Attack]:
    """Return a number of attacks of an environment and user: the first of each category, then the second of
    each, and so on.
    """
    categories: defaultdict[str, list[Attack]] = defaultdict(list)
    for attack in chosen([], where, whom):
        categories[attack.category].append(attack)
    return [
        attack for attack in chain.from_iterable(zip_longest(*categories.values())) if attack is not None
    ][:number]

"""All attacks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, zip_longest

from tests.security.red_team import escape, forge, hoard, persist, reach_out, stall, void
from tests.security.red_team.attack import Attack, Where, Whom

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


def chosen(names: Sequence[str], where: Where, whom: Whom) -> list[Attack]:
    """The attacks of a place; all of them where no name is given."""
    return [
        attack for attack in ATTACKS if (where, whom) in attack.places and (not names or attack.name in names)
    ]


def sampled(number: int, where: Where, whom: Whom) -> list[Attack]:
    """So many attacks of a place, of every category: the first of each, then the second of each, and so on."""
    categories: defaultdict[str, list[Attack]] = defaultdict(list)
    for attack in chosen([], where, whom):
        categories[attack.category].append(attack)
    return [
        attack for attack in chain.from_iterable(zip_longest(*categories.values())) if attack is not None
    ][:number]

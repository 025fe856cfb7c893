"""All attacks."""

from __future__ import annotations

from collections.abc import Sequence

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
    return [attack for attack in ATTACKS if (where, whom) in attack.places and (not names or attack.name in names)]

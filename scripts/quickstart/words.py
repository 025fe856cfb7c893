"""Made-up words for the quick start's world, split into a pool for training and one for evaluation that share
no word.

Words are built from open syllables ("kolaru", "mive"), so a word that was never seen still consists of pieces
that were.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
SYLLABLES = tuple(c + v for c in CONSONANTS for v in VOWELS)
NOT_NAMES = frozenset(
    {
        "file",
        "name",
        "make",
        "save",
        "line",
        "move",
        "take",
        "mode",
        "remove",
        "rename",
        "delete",
        "data",
        "like",
        "more",
        "done",
        "note",
    }
)
"""Words of the instructions that syllables happen to spell."""


class Pool(StrEnum):
    """Which words, numbers and modes may be used."""

    TRAIN = "train"
    HELD_OUT = "held-out"


HELD_OUT_COUNTS = frozenset({4, 7, 12, 15})
LARGEST_COUNT = 18
TEXT_ENDINGS = (".txt", ".csv", ".log", ".md", ".dat")


def pool_of(word: str) -> Pool:
    """The pool a word or number belongs to: one in four is held out, by a hash that never changes."""
    return Pool.HELD_OUT if hashlib.sha256(word.encode()).digest()[0] % 4 == 0 else Pool.TRAIN


@dataclass(frozen=True, kw_only=True)
class Words:
    """Draws words of one pool; `used` keeps the words of one task distinct."""

    random: random.Random
    pool: Pool
    used: set[str]

    def word(self) -> str:
        return self._fresh(
            lambda: "".join(self.random.choice(SYLLABLES) for _ in range(self.random.choice((2, 2, 3))))
        )

    def number(self) -> str:
        return self._fresh(lambda: str(self.random.randint(100, 9999)))

    def count(self) -> int:
        held_out = self.pool is Pool.HELD_OUT
        return self.random.choice(
            [count for count in range(2, LARGEST_COUNT + 1) if (count in HELD_OUT_COUNTS) == held_out]
        )

    def mode(self) -> str:
        """Permissions that let the owner read, other than a new file's."""
        return self._fresh(
            lambda: (
                self.random.choice("4567") + self.random.choice("01234567") + self.random.choice("01234567")
            )
        )

    def lines(self, number: int) -> list[str]:
        """File content: lines of one or two words."""
        return [" ".join(self.word() for _ in range(self.random.choice((1, 2)))) for _ in range(number)]

    def _fresh(self, draw: Callable[[], str]) -> str:
        while True:
            word = draw()
            if word not in self.used | NOT_NAMES | {"644"} and pool_of(word) is self.pool:
                self.used.add(word)
                return word

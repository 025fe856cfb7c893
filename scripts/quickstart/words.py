"""Generate words for the tasks of the quick start. The pools for training and for evaluation have no word in
common.

Words such as "kolaru" and "mive" consist of syllables, and each syllable is a token. The model therefore
knows all tokens of a new word.
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
INSTRUCTION_WORDS = frozenset(
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
"""English words that consist of SYLLABLES, most of them from instructions. `Words` draws none of them."""


class Pool(StrEnum):
    """One of two disjoint pools of words, numbers, counts and file modes."""

    TRAIN = "train"
    HELD_OUT = "held-out"


# A count is a number in an instruction, for example the number of lines that `head` keeps. The held-out pool
# has the counts HELD_OUT_COUNTS, and the training pool has the other counts from 2 to LARGEST_COUNT.
HELD_OUT_COUNTS = frozenset({4, 7, 12, 15})
LARGEST_COUNT = 18
TEXT_ENDINGS = (".txt", ".csv", ".log", ".md", ".dat")


def pool_of(word: str) -> Pool:
    """Return the pool of a word or number, by its hash. A quarter of all words is held out."""
    return Pool.HELD_OUT if hashlib.sha256(word.encode()).digest()[0] % 4 == 0 else Pool.TRAIN


@dataclass(frozen=True, kw_only=True)
class Words:
    """Draws words, numbers, counts and file modes of one pool for a task. `used` contains the words, numbers
    and modes that the task already has. They are not drawn again."""

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
        """Return permissions that let the owner read and that differ from 644, those of a new file."""
        return self._fresh(
            lambda: (
                self.random.choice("4567") + self.random.choice("01234567") + self.random.choice("01234567")
            )
        )

    def lines(self, number: int) -> list[str]:
        """Return lines of one or two words for a file."""
        return [" ".join(self.word() for _ in range(self.random.choice((1, 2)))) for _ in range(number)]

    def _fresh(self, draw: Callable[[], str]) -> str:
        while True:
            word = draw()
            if word not in self.used | INSTRUCTION_WORDS | {"644"} and pool_of(word) is self.pool:
                self.used.add(word)
                return word

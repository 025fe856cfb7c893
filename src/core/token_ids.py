"""TokenIds: a prompt that shares its memory with the prompts it extends."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload, override


class TokenIds(Sequence[int]):
    """Token ids that never change; what extends them is written behind them, in the same array.

    So the prompts of a conversation of n tokens take n numbers, however many turns it has. Ids that are extended a second time are copied.

    >>> first = TokenIds([1, 2])
    >>> second = first.extended([3])
    >>> (first == [1, 2], second[1:], second.shares_with(first))
    (True, [2, 3], True)
    """

    __slots__ = ("_ids", "_length")

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids = array("q", ids)
        self._length = len(self._ids)

    @classmethod
    def of(cls, ids: Sequence[int]) -> TokenIds:
        return ids if isinstance(ids, TokenIds) else cls(ids)

    def extended(self, added: Iterable[int]) -> TokenIds:
        longer = TokenIds(())
        longer._ids = self._ids if self._length == len(self._ids) else self._ids[: self._length]
        longer._ids.extend(added)
        longer._length = len(longer._ids)
        return longer

    def __add__(self, added: Iterable[int]) -> TokenIds:
        """As lists are put together."""
        return self.extended(added)

    def shares_with(self, other: TokenIds) -> bool:
        """Whether both lie in one array, so that the shorter is a beginning of the longer."""
        return self._ids is other._ids

    @override
    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    @override
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self._ids[start:stop].tolist() if step == 1 else self[:][index]
        return self._ids[range(self._length)[index]]

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    @override
    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self._length == other._length and (self.shares_with(other) or self[:] == other[:])
        return self[:] == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list's

    @override
    def __repr__(self) -> str:
        return f"TokenIds({self[:]})"


def starts_with(ids: Sequence[int], beginning: Sequence[int]) -> bool:
    """Known at once of ids that share their memory; others are compared."""
    if isinstance(ids, TokenIds) and isinstance(beginning, TokenIds) and ids.shares_with(beginning):
        return len(beginning) <= len(ids)
    return ids[: len(beginning)] == beginning

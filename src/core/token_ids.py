"""`TokenIds`: the token ids of a prompt. A longer prompt that starts with them can use the same memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload, override


class TokenIds(Sequence[int]):
    """An immutable sequence of token ids.

    `extended` appends to the same array, so all prompts of a conversation share one array. A second extension
    of the same sequence copies the array, because the first extension has already appended to it.

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
    def wrap(cls, ids: Sequence[int]) -> TokenIds:
        """Return `ids` itself if it is a `TokenIds`, or else a copy."""
        return ids if isinstance(ids, TokenIds) else cls(ids)

    def extended(self, added: Iterable[int]) -> TokenIds:
        longer = TokenIds(())
        longer._ids = self._ids if self._length == len(self._ids) else self._ids[: self._length]
        longer._ids.extend(added)
        longer._length = len(longer._ids)
        return longer

    def __add__(self, added: Iterable[int]) -> TokenIds:
        return self.extended(added)

    def shares_with(self, other: TokenIds) -> bool:
        """Return whether both sequences use the same array. If so, the shorter is a prefix of the longer."""
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

    __hash__ = None  # type: ignore[assignment]  # unhashable, as lists are

    @override
    def __repr__(self) -> str:
        return f"TokenIds({self[:]})"


def starts_with(ids: Sequence[int], prefix: Sequence[int]) -> bool:
    """Return whether `prefix` is a prefix of `ids`. If both use the same array, this takes constant time."""
    if isinstance(ids, TokenIds) and isinstance(prefix, TokenIds) and ids.shares_with(prefix):
        return len(prefix) <= len(ids)
    return ids[: len(prefix)] == prefix

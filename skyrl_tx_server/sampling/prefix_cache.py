"""Who has which pages of the key-value cache, and what may be continued: bookkeeping on the host, no devices.

Rows own pages; beside them a tree remembers what was computed. A node is one page and the tokens in it, its children go on from there, so
a prompt that begins like anything under the same weights finds those pages in as many steps as it has pages. What only the tree remembers
is given up, longest unused first, when a row needs a page.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from skyrl_tx_server.model.shapes import PAGE


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """The first `length` tokens of a prompt lie in `pages`, the last of which they may not fill."""

    pages: Sequence[int] = ()
    length: int = 0


@dataclass(kw_only=True, slots=True, eq=False)
class _Node:
    page: int
    tokens: np.ndarray  # at most PAGE; fewer only in a leaf
    parent: _Node | None
    children: dict[bytes, _Node] = field(default_factory=dict)


class PrefixCache:
    """The pages `first .. first + count - 1`, the first of which is nobody's."""

    def __init__(self, *, first: int, count: int) -> None:
        self.nowhere = first
        self._free = list(range(first + count - 1, first, -1))
        self._users: Counter[int] = Counter()  # rows that have a page, and the tree
        self._roots: dict[Hashable, _Node] = {}
        self._by_use: OrderedDict[_Node, None] = (
            OrderedDict()
        )  # every node, longest unused first and children before their parents

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_remembered(self) -> int:
        return len(self._by_use)

    def take(self, count: int) -> list[int] | None:
        """So many pages for a row; None when rows have nearly all."""
        while len(self._free) < count and self._forget():
            pass
        if len(self._free) < count:
            return None
        pages = [self._free.pop() for _ in range(count)]
        self.share(pages)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Another row has them too."""
        self._users.update(pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """A row has no use for its pages any more."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                self._free.append(page)

    def find(self, weights: Hashable, tokens: np.ndarray) -> Prefix:
        """The most of `tokens` that lies in pages computed with `weights`."""
        path = self._path(weights, tokens)
        pages = [node.page for node in path]
        rest = tokens[len(path) * PAGE :]
        parent = path[-1] if path else self._roots.get(weights)
        common, best = max(
            (
                (common_length(node.tokens, rest), node)
                for node in (parent.children.values() if parent else ())
            ),
            key=lambda each: each[0],
            default=(0, None),
        )
        if best is not None and common:
            pages.append(best.page)
            path.append(best)
        self._touch(path)
        return Prefix(pages=pages, length=len(tokens) - len(rest) + common)

    def remember(self, weights: Hashable, tokens: np.ndarray, pages: Sequence[int]) -> None:
        """`tokens` lie in `pages`, and stay until the room is needed."""
        node = self._roots.setdefault(weights, _Node(page=-1, tokens=tokens[:0], parent=None))
        path = self._path(weights, tokens)
        if path:
            node = path[-1]
        for index in range(len(path), -(-len(tokens) // PAGE)):
            chunk = tokens[index * PAGE : (index + 1) * PAGE]
            if any(common_length(child.tokens, chunk) == len(chunk) for child in node.children.values()):
                break  # part of what is remembered already
            node = self._extended(node, pages[index], chunk) or self._added(node, pages[index], chunk)
            path.append(node)
        self._touch(path)

    def _path(self, weights: Hashable, tokens: np.ndarray) -> list[_Node]:
        """The nodes of the whole pages of `tokens`, as far as they are there."""
        path: list[_Node] = []
        node = self._roots.get(weights)
        for index in range(len(tokens) // PAGE):
            node = node and node.children.get(tokens[index * PAGE : (index + 1) * PAGE].tobytes())
            if node is None:
                break
            path.append(node)
        return path

    def _extended(self, parent: _Node, page: int, chunk: np.ndarray) -> _Node | None:
        """The leaf of the same page with fewer of the same tokens, which now holds them all."""
        for key, child in parent.children.items():
            if child.page == page:
                del parent.children[key]
                child.tokens = chunk
                parent.children[chunk.tobytes()] = child
                return child
        return None

    def _added(self, parent: _Node, page: int, chunk: np.ndarray) -> _Node:
        self._users[page] += 1
        node = _Node(page=page, tokens=chunk, parent=parent)
        parent.children[chunk.tobytes()] = node
        self._by_use[node] = None
        return node

    def _touch(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._by_use.move_to_end(node)

    def _forget(self) -> bool:
        """Give up the leaf that nobody has used for longest, of those no row has; False when there is none."""
        for node in self._by_use:
            if not node.children and self._users[node.page] == 1:
                break
        else:
            return False
        assert node.parent is not None
        del self._by_use[node]
        del node.parent.children[node.tokens.tobytes()]
        if node.parent.parent is None and not node.parent.children:
            self._roots = {weights: root for weights, root in self._roots.items() if root is not node.parent}
        self.give_back([node.page])
        return True


def common_length(left: np.ndarray, right: np.ndarray) -> int:
    """How many leading tokens the two share."""
    shorter = min(len(left), len(right))
    different = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(different[0]) if len(different) else shorter

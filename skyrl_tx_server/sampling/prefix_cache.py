"""Allocation and reuse of the KV pages of one data-parallel rank. This module uses no devices.

Pages are reference counted. Sequences, planned prefill chunks and a prefix tree hold references. A node of
the tree is one page with its tokens, and its children are the pages that continue its text. The lookup of a
prompt for given weights takes one step per page. It returns the pages of the longest cached prefix that was
computed with these weights. As long as `allocate` finds too few free pages, it evicts the least recently used
leaf of the tree whose page has no other reference.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from skyrl_tx_server.model.shapes import PAGE_SIZE, common_length

TOKEN_BYTES = 4
PAGE_BYTES = PAGE_SIZE * TOKEN_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """The first `length` tokens of a prompt, whose keys and values are in `pages`. The prefix may end
    inside the last page, and other tokens may follow it there."""

    pages: Sequence[int] = ()
    length: int = 0


@dataclass(kw_only=True, slots=True, eq=False)
class _Node:
    page: int
    key: bytes  # the page's tokens, from `_bytes_of`; only a leaf may have fewer than PAGE_SIZE tokens
    parent: _Node | None
    last_use: int = 0
    children: dict[bytes, _Node] = field(default_factory=dict)
    sorted_keys: list[bytes] = field(default_factory=list)  # the keys of `children`

    def add(self, child: _Node) -> None:
        self.children[child.key] = child
        bisect.insort(self.sorted_keys, child.key)

    def remove(self, child: _Node) -> None:
        del self.children[child.key]
        del self.sorted_keys[bisect.bisect_left(self.sorted_keys, child.key)]

    def nearest(self, key: bytes) -> tuple[_Node | None, int]:
        """Return the child with the longest common beginning with `key`, and the number of common tokens, or
        (None, 0) if no child has a common token.

        In sorted order this child is adjacent to the insertion point of `key`.
        """
        place = bisect.bisect_left(self.sorted_keys, key)
        best, longest = None, 0
        for neighbour in self.sorted_keys[max(0, place - 1) : place + 1]:
            if (common := _common_tokens(neighbour, key)) > longest:
                best, longest = self.children[neighbour], common
        return best, longest


class PrefixCache:
    """Manages the pages `first .. first + count - 1`. The first page is the null page, which pads block
    tables and is never allocated."""

    def __init__(self, *, first: int, count: int) -> None:
        self.null_page = first
        self._free = list(range(first + count - 1, first, -1))
        # by page: the number of sequences and prefill chunks that hold it, plus one if it is in the tree
        self._references: Counter[int] = Counter()
        self._roots: dict[Hashable, _Node] = {}
        self._nodes: dict[int, _Node] = {}  # by page
        self._num_uses = 0
        self._evictable: list[tuple[int, int]] = []
        """A heap of (last use, page) of leaves whose pages have no reference outside the tree. `_evict`
        skips an entry if its node was removed, was used again or cannot be evicted now."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._nodes)

    @property
    def references(self) -> dict[int, int]:
        """The number of references by allocated page: sequences and chunks that hold the page, plus one if
        it is cached."""
        return dict(self._references)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pages with one reference each. Evict cached pages if necessary. None: too few
        pages are free, and no further page can be evicted."""
        while len(self._free) < count and self._evict():
            pass
        if len(self._free) < count:
            return None
        pages = [self._free.pop() for _ in range(count)]
        self.incref(pages)
        return pages

    def incref(self, pages: Sequence[int]) -> None:
        """Add a reference to each page."""
        self._references.update(pages)

    def free(self, pages: Sequence[int]) -> None:
        """Remove a reference from each page. A page without references can be allocated again."""
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                del self._references[page]
                self._free.append(page)
            elif page in self._nodes:
                self._offer(self._nodes[page])

    def find(self, weights: Hashable, tokens: np.ndarray) -> Prefix:
        """Return the longest cached prefix of `tokens` [N] int32 that was computed with `weights`."""
        text = _bytes_of(tokens)
        path = self._path(weights, text)
        pages, length = [node.page for node in path], len(path) * PAGE_SIZE
        parent = path[-1] if path else self._roots.get(weights)
        if parent is not None:
            best, common = parent.nearest(text[len(path) * PAGE_BYTES : (len(path) + 1) * PAGE_BYTES])
            if best is not None:
                pages.append(best.page)
                path.append(best)
                length += common
        self._touch(path)
        return Prefix(pages=pages, length=length)

    def insert(self, weights: Hashable, tokens: np.ndarray, pages: Sequence[int]) -> None:
        """Add `pages`, which hold the keys and values of `tokens` [N] int32, to the tree. A page is not added
        if the tree already holds its tokens in another page."""
        node = self._roots.setdefault(weights, _Node(page=-1, key=b"", parent=None))
        text = _bytes_of(tokens)
        path = self._path(weights, text)
        if path:
            node = path[-1]
        for index in range(len(path), -(-len(tokens) // PAGE_SIZE)):
            key = text[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]
            if node.nearest(key)[1] * TOKEN_BYTES == len(key):
                break  # another page already holds these tokens
            node = self._extend_leaf(node, pages[index], key) or self._add_node(node, pages[index], key)
            path.append(node)
        self._touch(path)

    def _path(self, weights: Hashable, text: bytes) -> list[_Node]:
        """Return the nodes of the full pages of `text`, up to the first page that is not cached."""
        path: list[_Node] = []
        node = self._roots.get(weights)
        for end in range(PAGE_BYTES, len(text) + 1, PAGE_BYTES):
            node = node and node.children.get(text[end - PAGE_BYTES : end])
            if node is None:
                break
            path.append(node)
        return path

    def _extend_leaf(self, parent: _Node, page: int, key: bytes) -> _Node | None:
        """If `page` is already a child of `parent`, with fewer tokens, set its tokens to `key` and return it.
        None: `page` is not a child of `parent`."""
        child = self._nodes.get(page)
        if child is None or child.parent is not parent:
            return None
        parent.remove(child)
        child.key = key
        parent.add(child)
        return child

    def _add_node(self, parent: _Node, page: int, key: bytes) -> _Node:
        self.incref([page])
        node = self._nodes[page] = _Node(page=page, key=key, parent=parent)
        parent.add(node)
        return node

    def _touch(self, path: Sequence[_Node]) -> None:
        """Record a use of the nodes."""
        for node in reversed(path):
            self._num_uses += 1
            node.last_use = self._num_uses
            self._offer(node)

    def _is_evictable(self, node: _Node) -> bool:
        return not node.children and self._references[node.page] == 1

    def _offer(self, node: _Node) -> None:
        """Add the node to the heap if it can be evicted."""
        if not self._is_evictable(node):
            return
        heapq.heappush(self._evictable, (node.last_use, node.page))
        if len(self._evictable) > 4 * len(self._nodes):
            self._evictable = [
                (node.last_use, page) for page, node in self._nodes.items() if self._is_evictable(node)
            ]
            heapq.heapify(self._evictable)

    def _evict(self) -> bool:
        """Evict the least recently used leaf whose page has no other reference. Return False if there is
        none."""
        while self._evictable:
            last_use, page = heapq.heappop(self._evictable)
            node = self._nodes.get(page)
            if node is not None and node.last_use == last_use and self._is_evictable(node):
                break
        else:
            return False
        parent = node.parent
        assert parent is not None
        del self._nodes[page]
        parent.remove(node)
        if parent.parent is not None:
            self._offer(parent)
        elif not parent.children:
            self._roots = {weights: root for weights, root in self._roots.items() if root is not parent}
        self.free([page])
        return True


def _bytes_of(tokens: np.ndarray) -> bytes:
    """Return the tokens as big-endian bytes, which sort in the same order as the tokens."""
    return tokens.astype(f">i{TOKEN_BYTES}").tobytes()


def _common_tokens(left: bytes, right: bytes) -> int:
    return common_length(*(np.frombuffer(key, np.int32) for key in (left, right)))

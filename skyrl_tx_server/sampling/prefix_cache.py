"""KV pages of one data-parallel rank: which are allocated, and which prompts can reuse them. Host bookkeeping
without devices.

Pages are reference counted. Sequences hold references, and so does a tree of computed tokens: a node is one
page with its tokens, and its children continue from there. A prompt with the same beginning and the same
weights finds the pages of that beginning in one step per page. When `allocate` needs a page, the tree evicts
the least recently used page that no sequence holds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from skyrl_tx_server.model.shapes import PAGE_SIZE, common_length


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """The first `length` tokens of a prompt, whose keys and values are in `pages`. The last page may be
    partly filled."""

    pages: Sequence[int] = ()
    length: int = 0


@dataclass(kw_only=True, slots=True, eq=False)
class _Node:
    page: int
    tokens: np.ndarray  # at most PAGE_SIZE; fewer only in a leaf
    parent: _Node | None
    children: dict[bytes, _Node] = field(default_factory=dict)


class PrefixCache:
    """The pages `first .. first + count - 1`. The first one is the null page, which is never allocated."""

    def __init__(self, *, first: int, count: int) -> None:
        self.null_page = first
        self._free = list(range(first + count - 1, first, -1))
        self._references: Counter[int] = Counter()  # by page: sequences that hold it, and the tree
        self._roots: dict[Hashable, _Node] = {}
        self._by_use: OrderedDict[_Node, None] = OrderedDict()  # least recently used first, children first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._by_use)

    @property
    def references(self) -> dict[int, int]:
        """By allocated page, the number of sequences that hold it, plus one if it is cached."""
        return dict(self._references)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pages with one reference each, evicting cached pages if necessary. None: sequences
        hold too many."""
        while len(self._free) < count and self._evict():
            pass
        if len(self._free) < count:
            return None
        pages = [self._free.pop() for _ in range(count)]
        self.incref(pages)
        return pages

    def incref(self, pages: Sequence[int]) -> None:
        """Add a reference to each page, for another sequence that reads it."""
        self._references.update(pages)

    def free(self, pages: Sequence[int]) -> None:
        """Remove a reference from each page. A page without references can be allocated again."""
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                del self._references[page]
                self._free.append(page)

    def find(self, weights: Hashable, tokens: np.ndarray) -> Prefix:
        """Return the longest cached prefix of `tokens` [N] int32 that was computed with `weights`."""
        path = self._path(weights, tokens)
        pages = [node.page for node in path]
        rest = tokens[len(path) * PAGE_SIZE :]
        parent = path[-1] if path else self._roots.get(weights)
        candidates = [
            (common_length(node.tokens, rest), node) for node in (parent.children.values() if parent else ())
        ]
        common, best = max(candidates, key=lambda candidate: candidate[0], default=(0, None))
        if best is not None and common:
            pages.append(best.page)
            path.append(best)
        self._touch(path)
        return Prefix(pages=pages, length=len(tokens) - len(rest) + common)

    def insert(self, weights: Hashable, tokens: np.ndarray, pages: Sequence[int]) -> None:
        """Record that the keys and values of `tokens` [N] int32 are in `pages`. They stay cached until they
        are evicted."""
        node = self._roots.setdefault(weights, _Node(page=-1, tokens=tokens[:0], parent=None))
        path = self._path(weights, tokens)
        if path:
            node = path[-1]
        for index in range(len(path), -(-len(tokens) // PAGE_SIZE)):
            page_tokens = tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
            if any(
                common_length(child.tokens, page_tokens) == len(page_tokens)
                for child in node.children.values()
            ):
                break  # another page already holds these tokens
            node = self._extend_leaf(node, pages[index], page_tokens) or self._add_node(
                node, pages[index], page_tokens
            )
            path.append(node)
        self._touch(path)

    def _path(self, weights: Hashable, tokens: np.ndarray) -> list[_Node]:
        """Return the nodes of the full pages of `tokens`, up to the first page that is not cached."""
        path: list[_Node] = []
        node = self._roots.get(weights)
        for index in range(len(tokens) // PAGE_SIZE):
            node = node and node.children.get(tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE].tobytes())
            if node is None:
                break
            path.append(node)
        return path

    def _extend_leaf(self, parent: _Node, page: int, page_tokens: np.ndarray) -> _Node | None:
        """Return the child that caches fewer tokens of the same page, after giving it all of
        `page_tokens`."""
        for key, child in parent.children.items():
            if child.page == page:
                del parent.children[key]
                child.tokens = page_tokens
                parent.children[page_tokens.tobytes()] = child
                return child
        return None

    def _add_node(self, parent: _Node, page: int, page_tokens: np.ndarray) -> _Node:
        self.incref([page])
        node = _Node(page=page, tokens=page_tokens, parent=parent)
        parent.children[page_tokens.tobytes()] = node
        self._by_use[node] = None
        return node

    def _touch(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._by_use.move_to_end(node)

    def _evict(self) -> bool:
        """Evict the least recently used leaf whose page no sequence holds. False: there is none."""
        for node in self._by_use:
            if not node.children and self._references[node.page] == 1:
                break
        else:
            return False
        assert node.parent is not None
        del self._by_use[node]
        del node.parent.children[node.tokens.tobytes()]
        if node.parent.parent is None and not node.parent.children:
            self._roots = {weights: root for weights, root in self._roots.items() if root is not node.parent}
        self.free([node.page])
        return True

"""The pages of rows that begin with the same text, on whichever devices their slots lie: bookkeeping on the host, no devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from skyrl_tx_server.errors import CapacityError
from skyrl_tx_server.model.shapes import PAGE
from skyrl_tx_server.sampling.prefix_cache import Prefix, PrefixCache


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTables:
    """Pages that have been taken for rows. The first row's are computed, the others continue from them."""

    of_rows: Sequence[Sequence[int]]
    before: Sequence[
        tuple[int, int]
    ]  # pages to copy into others before the first is computed: of what was found
    after: Sequence[tuple[int, int]]  # and after it: of the first


def take_tables(
    places: Sequence[PrefixCache],
    length: int,
    *,
    found: Prefix,
    home: PrefixCache,
    spare: Mapping[PrefixCache, int],
    text_length: int,
) -> BlockTables:
    """Pages for `length` tokens of each row, where `places` says for each among whose pages; what was `found` lies in those of `home`.

    Rows in one place share the pages that are full. In each place as many as `spare` says must be free besides. CapacityError, which names
    the length of the whole text, where there are too few; nothing is taken then.
    """
    full, total = length // PAGE, -(-length // PAGE)
    shared = {
        home: found.pages[: found.length // PAGE]
    }  # what the next row of a place has in common with others there
    home.share(found.pages)  # or they might be given up for what comes now
    taken: dict[PrefixCache, Sequence[int]] = {}
    for place, num_rows in Counter(places).items():
        wanted = total - len(shared.get(place, ())) + (num_rows - 1) * (total - full)
        pages = place.take(wanted + spare.get(place, 0))
        if pages is None:
            home.give_back(found.pages)
            for other, others_pages in taken.items():
                other.give_back(others_pages)
            raise CapacityError(
                f"no room for the keys and values of {text_length} tokens, {place.num_free * PAGE} are free; raise cache_tokens"
            )
        taken[place] = pages[:wanted]
        place.give_back(pages[wanted:])
    tables: list[Sequence[int]] = []
    copies: list[list[tuple[int, int]]] = []
    source, own = found.pages, {place: iter(pages) for place, pages in taken.items()}
    for place in places:
        beginning = shared.get(place, ())
        place.share(beginning)
        rest = list(islice(own[place], total - len(beginning)))
        tables.append([*beginning, *rest])
        copies.append(
            list(zip(source[len(beginning) :], rest, strict=False))
        )  # what was found may end before
        shared[place], source = tables[-1][:full], tables[0]
    home.give_back(found.pages)
    return BlockTables(of_rows=tables, before=copies[0], after=list(chain.from_iterable(copies[1:])))

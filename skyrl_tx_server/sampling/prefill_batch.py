"""Prompts laid out for the device: pieces of them, cut into blocks, in passes that compute the blocks of several together. Host numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from skyrl_tx_server.model.attention.prefill_attention import Blocks
from skyrl_tx_server.model.lora.lora_math import adapter_count_buckets, lora_indices
from skyrl_tx_server.model.shapes import BLOCK, PrefillShapes
from skyrl_tx_server.sampling.sample_step import PassOutputs, PrefillBatch, RowSettings
from skyrl_tx_server.sampling.sequences import SequenceState, row_settings


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefillChunk:
    """The next piece of a text: its tokens `cached` to `length`, where they go, and who begins after its last."""

    tokens: np.ndarray  # [P] int32, all of the text
    cached: int
    length: int
    weights: str | None
    adapter_slot: int
    wants_logprobs: bool
    slots: Sequence[int]
    tables: Sequence[Sequence[int]]  # the pages of each slot's row; the first is computed
    before: Sequence[tuple[int, int]]  # pages to copy into others: of the prefix
    after: Sequence[tuple[int, int]]  # and of what was computed
    rows: Sequence[SequenceState]  # one for each slot where the text ends with this piece, else none

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Which tokens are in each."""
        return [(first, min(first + BLOCK, self.length)) for first in range(self.cached, self.length, BLOCK)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillOutputs:
    """What the passes over a piece brought."""

    logprobs: np.ndarray  # [length - cached] float32, of each token's next; zeros where they are not wanted
    first_tokens: Sequence[int]  # by row
    first_logprobs: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillLayout:
    """The sizes of a pass's arrays."""

    shapes: PrefillShapes
    num_slots: int
    table_width: int
    max_copies: int
    vocab_size: int
    bank: int | None = None  # entries of adapters, where programs are compiled for them (`low_rank`)

    def passes(self, pieces: Sequence[PrefillChunk]) -> list[tuple[PrefillBatch, RowSettings]]:
        blocks = [(piece, first, end) for piece in pieces for first, end in piece.blocks]
        passes, taken = [], 0
        for size in self.shapes.passes(len(blocks)):
            passes.append(self._pass(blocks[taken : taken + size], size))
            taken += size
        return passes

    def outputs(self, pieces: Sequence[PrefillChunk], passes: Sequence[PassOutputs]) -> list[PrefillOutputs]:
        """What belongs to each of the pieces, from the results of their passes."""
        logprobs = np.concatenate([each.logprobs for each in passes])
        pass_of = np.repeat(np.arange(len(passes)), [len(each.logprobs) for each in passes])  # by block
        found, taken = [], 0
        for piece in pieces:
            own = logprobs[taken : taken + len(piece.blocks)].reshape(-1)[: piece.length - piece.cached]
            taken += len(piece.blocks)
            last, begin = passes[pass_of[taken - 1]], list(piece.slots[: len(piece.rows)])
            first_tokens, first_logprobs = (
                last.first_tokens[begin].tolist(),
                last.first_logprobs[begin].tolist(),
            )
            found.append(
                PrefillOutputs(logprobs=own, first_tokens=first_tokens, first_logprobs=first_logprobs)
            )
        return found

    def examples(self) -> list[tuple[PrefillBatch, RowSettings]]:
        """A pass of each shape and number of adapters, over nothing."""
        nothing = PrefillChunk(
            tokens=np.zeros(1, np.int32),
            cached=0,
            length=1,
            weights=None,
            adapter_slot=0,
            wants_logprobs=False,
            slots=(0,),
            tables=((0,),),
            before=(),
            after=(),
            rows=(),
        )
        found = []
        for size in (self.shapes.short, self.shapes.long):
            run, settings = self._pass([(nothing, 0, 1)], size)
            for most in adapter_count_buckets(self.bank, rows=size):
                users, of_rows = replace(run.adapters, most=most), replace(run.row_adapters, most=most)
                found.append((replace(run, adapters=users, row_adapters=of_rows), settings))
        return found

    def _pass(
        self, blocks: Sequence[tuple[PrefillChunk, int, int]], size: int
    ) -> tuple[PrefillBatch, RowSettings]:
        pieces = [piece for piece, _, _ in blocks]
        padded = [*pieces, *[pieces[0]] * (size - len(pieces))]
        tokens, targets = np.zeros((2, size, BLOCK), np.int32)
        starts, lengths = np.zeros((2, size), np.int32)
        lasts = np.zeros(self.num_slots, np.int32)
        adapters = np.full(self.num_slots, pieces[0].adapter_slot, np.int32)
        beginning: list[SequenceState | None] = [None] * self.num_slots
        for at, (piece, first, end) in enumerate(blocks):
            following = piece.tokens[first + 1 : end + 1]
            tokens[at, : end - first], targets[at, : len(following)] = piece.tokens[first:end], following
            starts[at], lengths[at] = first, end - first
            if end == piece.length:
                for slot, row in zip(piece.slots, piece.rows, strict=False):
                    beginning[slot], lasts[slot], adapters[slot] = (
                        row,
                        at * BLOCK + end - first - 1,
                        piece.adapter_slot,
                    )
        users = lora_indices(np.array([piece.adapter_slot for piece in padded]), bank=self.bank)
        run = PrefillBatch(
            tokens=tokens,
            targets=targets,
            blocks=Blocks(
                starts=starts, lengths=lengths, tables=np.stack([self._table(piece) for piece in padded])
            ),
            adapters=users,
            before=self._copies(
                [pair for piece, first, _ in blocks if first == piece.cached for pair in piece.before]
            ),
            after=self._copies(
                [pair for piece, _, end in blocks if end == piece.length for pair in piece.after]
            ),
            want_logprobs=np.array(any(piece.wants_logprobs for piece in pieces)),
            lasts=lasts,
            begins=np.array([row is not None for row in beginning]),
            row_adapters=replace(lora_indices(adapters), most=users.most),  # who begins has a block
        )
        return run, row_settings(beginning, self.vocab_size)

    def _table(self, piece: PrefillChunk) -> np.ndarray:
        table = np.zeros(self.table_width, np.int32)  # nobody reads or writes beyond the piece's pages
        table[: len(piece.tables[0])] = piece.tables[0]
        return table

    def _copies(self, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
        padded = np.full((self.max_copies, 2), -1, np.int32)
        padded[: len(pairs)] = np.reshape(pairs, (-1, 2))
        return padded

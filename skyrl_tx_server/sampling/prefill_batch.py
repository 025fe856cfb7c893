"""Divides the chunks of a prefill batch into tiles of `PREFILL_TILE` tokens, and makes tile batches of them.
A tile batch has the host arrays of one call of the prefill program, with tiles of one or several chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from skyrl_tx_server.model.attention.prefill_attention import PrefillTiles
from skyrl_tx_server.model.lora.lora_math import lora_indices
from skyrl_tx_server.model.shapes import PREFILL_TILE, PrefillShapes
from skyrl_tx_server.sampling.block_tables import PageCopy
from skyrl_tx_server.sampling.prefill_step import PrefillOutputs, TileBatch
from skyrl_tx_server.sampling.sequences import SequenceState, batch_settings
from skyrl_tx_server.sampling.token_sampling import BatchSettings


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefillChunk:
    """The tokens `cached .. length - 1` of a text, their pages, and the sequences that begin after the last
    token of the text."""

    tokens: np.ndarray  # [P] int32, the whole text
    cached: int  # number of tokens whose keys and values are in the cache already
    length: int  # number of tokens up to the end of the chunk
    weights: str | None  # name of the sampler snapshot; None: the base model
    adapter_slot: int
    wants_logprobs: bool
    slots: Sequence[int]  # one per sequence; if `sequences` is empty, one free slot of the pages' rank
    tables: Sequence[Sequence[int]]  # one block table per slot; the prefill program uses the first
    copies_before: Sequence[PageCopy]  # as in `BlockTables`
    copies_after: Sequence[PageCopy]  # as in `BlockTables`
    sequences: Sequence[SequenceState]  # one per slot if the chunk ends the text, else empty

    @property
    def is_last(self) -> bool:
        return bool(self.sequences)

    @property
    def tiles(self) -> list[tuple[int, int]]:
        """(first token, end) of each tile."""
        return [
            (first, min(first + PREFILL_TILE, self.length))
            for first in range(self.cached, self.length, PREFILL_TILE)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkOutputs:
    # [length - cached] float32. For each token of the chunk, the logprob of the next token of the text. Valid
    # only if the chunk wants logprobs.
    logprobs: np.ndarray
    first_tokens: Sequence[int]  # for each sequence, the token that is sampled after the text
    first_logprobs: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillLayout:
    """The sizes of the arrays of a tile batch."""

    shapes: PrefillShapes
    num_slots: int
    table_width: int  # number of entries of a block table
    max_copies: int  # maximum number of page copies before the computation; also the maximum after it
    vocab_size: int
    adapter_counts: tuple[int, ...] | None = None  # a result of `lora_math.adapter_counts`

    def batches(self, chunks: Sequence[PrefillChunk]) -> list[tuple[TileBatch, BatchSettings]]:
        """Return the tile batches that compute these chunks, in the order in which they must run."""
        tiles = [(chunk, first, end) for chunk in chunks for first, end in chunk.tiles]
        batches, done = [], 0
        for size in self.shapes.batch_sizes(len(tiles)):
            batches.append(self._batch(tiles[done : done + size], size))
            done += size
        return batches

    def outputs(
        self, chunks: Sequence[PrefillChunk], batch_outputs: Sequence[PrefillOutputs]
    ) -> list[ChunkOutputs]:
        """Return the results of each chunk from the outputs of all tile batches, which are in host memory."""
        logprobs = np.concatenate([outputs.logprobs for outputs in batch_outputs])
        batch_of_tile = np.repeat(
            np.arange(len(batch_outputs)), [len(outputs.logprobs) for outputs in batch_outputs]
        )
        by_chunk, done = [], 0
        for chunk in chunks:
            num_tiles = len(chunk.tiles)
            chunk_logprobs = logprobs[done : done + num_tiles].reshape(-1)[: chunk.length - chunk.cached]
            done += num_tiles
            last, slots = batch_outputs[batch_of_tile[done - 1]], list(chunk.slots[: len(chunk.sequences)])
            by_chunk.append(
                ChunkOutputs(
                    logprobs=chunk_logprobs,
                    first_tokens=last.first_tokens[slots].tolist(),
                    first_logprobs=last.first_logprobs[slots].tolist(),
                )
            )
        return by_chunk

    def dummy_batches(self) -> list[tuple[TileBatch, BatchSettings]]:
        """Return one tile batch for each pair of a size and a value of `LoraIndices.max_loras` for which the
        prefill program is compiled."""
        chunk = PrefillChunk(
            tokens=np.zeros(1, np.int32),
            cached=0,
            length=1,
            weights=None,
            adapter_slot=0,
            wants_logprobs=False,
            slots=(0,),
            tables=((0,),),
            copies_before=(),
            copies_after=(),
            sequences=(),
        )
        batches = []
        for size in (self.shapes.short, self.shapes.long):
            batch, settings = self._batch([(chunk, 0, 1)], size)
            counts = self.adapter_counts or (None,)
            for smaller, max_loras in zip((0, *counts), counts, strict=False):
                if (smaller or 0) >= size:  # a batch of this size uses at most `smaller` LoRA slots
                    continue
                adapters = replace(batch.adapters, max_loras=max_loras)
                sequence_adapters = replace(batch.sequence_adapters, max_loras=max_loras)
                batches.append(
                    (replace(batch, adapters=adapters, sequence_adapters=sequence_adapters), settings)
                )
        return batches

    def _batch(
        self, tiles: Sequence[tuple[PrefillChunk, int, int]], size: int
    ) -> tuple[TileBatch, BatchSettings]:
        chunks = [chunk for chunk, _, _ in tiles]
        padded = [*chunks, *[chunks[0]] * (size - len(chunks))]
        tokens, targets = np.zeros((2, size, PREFILL_TILE), np.int32)
        starts, lengths = np.zeros((2, size), np.int32)
        lasts = np.zeros(self.num_slots, np.int32)
        adapter_slots = np.full(self.num_slots, chunks[0].adapter_slot, np.int32)
        by_slot: list[SequenceState | None] = [None] * self.num_slots
        for index, (chunk, first, end) in enumerate(tiles):
            successors = chunk.tokens[first + 1 : end + 1]
            tokens[index, : end - first] = chunk.tokens[first:end]
            targets[index, : len(successors)] = successors
            starts[index], lengths[index] = first, end - first
            if end == chunk.length:
                for slot, sequence in zip(chunk.slots, chunk.sequences, strict=False):
                    by_slot[slot], adapter_slots[slot] = sequence, chunk.adapter_slot
                    lasts[slot] = index * PREFILL_TILE + end - first - 1
        tile_slots = np.array([chunk.adapter_slot for chunk in padded])
        adapters = lora_indices(tile_slots, counts=self.adapter_counts)
        batch = TileBatch(
            tokens=tokens,
            targets=targets,
            tiles=PrefillTiles(
                starts=starts, lengths=lengths, tables=np.stack([self._table(chunk) for chunk in padded])
            ),
            adapters=adapters,
            before=self._copies(
                [copy for chunk, first, _ in tiles if first == chunk.cached for copy in chunk.copies_before]
            ),
            after=self._copies(
                [copy for chunk, _, end in tiles if end == chunk.length for copy in chunk.copies_after]
            ),
            want_logprobs=np.array(any(chunk.wants_logprobs for chunk in chunks)),
            lasts=lasts,
            begins=np.array([sequence is not None for sequence in by_slot]),
            # Every sequence that begins has a tile in the batch, so `max_loras` of the tiles is sufficient.
            sequence_adapters=replace(lora_indices(adapter_slots), max_loras=adapters.max_loras),
        )
        return batch, batch_settings(by_slot, self.vocab_size)

    def _table(self, chunk: PrefillChunk) -> np.ndarray:
        table = np.zeros(self.table_width, np.int32)  # entries after the chunk's pages are never used
        table[: len(chunk.tables[0])] = chunk.tables[0]
        return table

    def _copies(self, pairs: Sequence[PageCopy]) -> np.ndarray:
        padded = np.full((self.max_copies, 2), -1, np.int32)
        padded[: len(pairs)] = np.reshape(pairs, (-1, 2))
        return padded

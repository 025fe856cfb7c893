"""The shapes in which sampling meets the device. Every distinct shape is a program to compile, so they come from here and nowhere else;
those of training are in `packing`. Host numpy only, no jax.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MIN_PREFILL_LENGTH = 128
PREFILL_PIECE = 512
"""Tokens of a prompt computed in one turn; a longer one takes several, with others' turns in between."""
MIN_SEGMENT = 256
MIN_PREFIX = 2048


def prefill_lengths(max_context_length: int) -> tuple[int, ...]:
    """Every length a prefill may be compiled for: doubling, up to the context; beyond a piece for prompt logprobs alone.

    >>> prefill_lengths(2000)
    (128, 256, 512, 1024, 2000)
    """
    lengths = [min(MIN_PREFILL_LENGTH, max_context_length)]
    while lengths[-1] < max_context_length:
        lengths.append(min(2 * lengths[-1], max_context_length))
    return tuple(lengths)


def segment_ends(max_context_length: int) -> tuple[int, ...]:
    """Where the segments of the key-value cache end, which are the lengths of cache a decode block reads: doubling, up to the context.

    >>> segment_ends(2000)
    (256, 512, 1024, 2000)
    >>> segment_ends(1100)  # a last segment shorter than the first joins the one before
    (256, 512, 1100)
    """
    ends = [MIN_SEGMENT]
    while max_context_length - 2 * ends[-1] >= MIN_SEGMENT:
        ends.append(2 * ends[-1])
    if max_context_length - ends[-1] >= MIN_SEGMENT:
        ends.append(max_context_length)
    ends[-1] = max_context_length
    return tuple(ends)


def prefix_ends(max_context_length: int) -> tuple[int, ...]:
    """The lengths of cached prefix a prefill is compiled for: few, since each comes on top of every prefill length.

    >>> prefix_ends(2000), prefix_ends(16384)
    ((2000,), (4096, 16384))
    """
    ends = segment_ends(max_context_length)
    return tuple(end for end in reversed(ends[::-2]) if end >= MIN_PREFIX or end == ends[-1])


def pad_tokens(tokens: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """[T] int32, the tokens right-padded with zeros to the smallest length that holds them."""
    padded = np.zeros(bucket(len(tokens), lengths), np.int32)
    padded[: len(tokens)] = tokens
    return padded


def prefill_cost(length: int) -> int:
    """How many tokens are computed for `length` of a prompt, piece by piece.

    >>> prefill_cost(100), prefill_cost(512), prefill_cost(600)
    (128, 512, 640)
    """
    pieces, rest = divmod(length, PREFILL_PIECE)
    return pieces * PREFILL_PIECE + (bucket(rest, prefill_lengths(PREFILL_PIECE)) if rest else 0)


def bucket(length: int, lengths: Sequence[int]) -> int:
    """The smallest of `lengths` that is at least `length`."""
    return next(candidate for candidate in lengths if candidate >= length)

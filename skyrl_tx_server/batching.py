"""The shapes in which sampling meets the device. Every distinct shape is a program to compile, so they come from here and nowhere else;
those of training are in `packing`. Host numpy only, no jax.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PAGE = 64
"""Positions of a page of the key-value cache."""
PREFILL_LENGTHS = (128, 512)
"""Tokens of a prompt that one program computes."""
PREFILL_PART, PREFILL_PIECE = PREFILL_LENGTHS
"""A prompt is computed in pieces, one in a turn with others' turns in between; a short piece in parts, one after the other."""
MIN_SEGMENT = 512


def score_lengths(max_context_length: int) -> tuple[int, ...]:
    """Every length for which scoring a whole text may be compiled: doubling, up to the context.

    >>> score_lengths(2000)
    (128, 256, 512, 1024, 2000)
    """
    lengths = [min(PREFILL_PART, max_context_length)]
    while lengths[-1] < max_context_length:
        lengths.append(min(2 * lengths[-1], max_context_length))
    return tuple(lengths)


def segment_ends(max_context_length: int) -> tuple[int, ...]:
    """How many positions of its rows a decode block may be compiled to read: whole pages, doubling, up to the context.

    >>> segment_ends(2000), segment_ends(2048), segment_ends(100)
    ((512, 1024, 2048), (512, 1024, 2048), (128,))
    """
    whole = -(-max_context_length // PAGE) * PAGE
    ends = [min(MIN_SEGMENT, whole)]
    while ends[-1] < whole:
        ends.append(min(2 * ends[-1], whole))
    return tuple(ends)


def pad_tokens(tokens: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """[T] int32, the tokens right-padded with zeros to the smallest length that holds them."""
    padded = np.zeros(bucket(len(tokens), lengths), np.int32)
    padded[: len(tokens)] = tokens
    return padded


def prefill_cost(length: int) -> int:
    """How many tokens are computed for `length` of a prompt, padding among them.

    >>> prefill_cost(100), prefill_cost(512), prefill_cost(600)
    (128, 512, 640)
    """
    return -(-length // PREFILL_PART) * PREFILL_PART


def prefill_parts(first: int, end: int) -> list[tuple[int, int]]:
    """The tokens `first .. end` of a piece in as few parts as need the least padding.

    >>> prefill_parts(0, 400), prefill_parts(50, 350)
    ([(0, 400)], [(50, 178), (178, 306), (306, 350)])
    """
    if prefill_cost(end - first) >= max(PREFILL_LENGTHS):
        return [(first, end)]
    return [(begin, min(begin + PREFILL_PART, end)) for begin in range(first, end, PREFILL_PART)]


def bucket(length: int, lengths: Sequence[int]) -> int:
    """The smallest of `lengths` that is at least `length`."""
    return next(candidate for candidate in lengths if candidate >= length)

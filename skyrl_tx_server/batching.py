"""The shapes in which sampling meets the device. Every distinct shape is a program to compile, so they come from here and nowhere else;
those of training are in `packing`. Host numpy only, no jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PAGE = 64
"""Positions of a page of the key-value cache."""
MIN_SEGMENT = 512
MIN_SCORED = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillShapes:
    """A prompt is computed in pieces, one in a turn with others' turns in between; a piece in parts, each by one of two programs."""

    short: int
    long: int
    piece: int

    def cost(self, length: int) -> int:
        """How many tokens are computed for `length` of a prompt, padding among them.

        >>> CPU_PREFILL.cost(100), CPU_PREFILL.cost(512), CPU_PREFILL.cost(600)
        (128, 512, 640)
        """
        return -(-length // self.short) * self.short

    def parts(self, first: int, end: int) -> list[tuple[int, int]]:
        """The tokens `first .. end` of a piece in as few parts as need the least padding.

        >>> CPU_PREFILL.parts(0, 400), CPU_PREFILL.parts(50, 250)
        ([(0, 256), (256, 320), (320, 384), (384, 400)], [(50, 250)])
        """
        size = self.long if self.cost(end - first) >= self.long else self.short
        return [(first, min(first + size, end)), *(self.parts(first + size, end) if first + size < end else [])]

    def padded(self, tokens: np.ndarray) -> np.ndarray:
        """The tokens of a part as long as its program takes them."""
        return pad_tokens(tokens, (self.short, self.long))


CPU_PREFILL = PrefillShapes(short=64, long=256, piece=512)
"""Time goes by the token."""
GPU_PREFILL = PrefillShapes(short=256, long=1024, piece=1024)
"""A part reads all weights, which takes an H200 as long as it computes 200 tokens (989 TFLOP/s, 4.8 TB/s, bfloat16); not measured."""


def score_lengths(max_context_length: int) -> tuple[int, ...]:
    """Every length for which scoring a whole text may be compiled: doubling, up to the context.

    >>> score_lengths(2000)
    (128, 256, 512, 1024, 2000)
    """
    lengths = [min(MIN_SCORED, max_context_length)]
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


def bucket(length: int, lengths: Sequence[int]) -> int:
    """The smallest of `lengths` that is at least `length`."""
    return next(candidate for candidate in lengths if candidate >= length)

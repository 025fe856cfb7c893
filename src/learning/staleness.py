"""The age of sampled tokens in updates, and the mask for tokens beyond `max_staleness`.

See docs/staleness.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from src.learning.datums import TokenSequence
from src.learning.examples import Example


def mask_stale(
    shares: Sequence[Sequence[Example]], *, version: int, max_staleness: int
) -> tuple[list[list[Example]], dict[str, float]]:
    """Set the advantage of every token to 0 that is more than `max_staleness` updates older than `version`.

    `version` is that of the weights to be trained. A masked token counts in the loss reduction and
    contributes nothing, as in importance correction. Also returns metrics of the ages of all sampled tokens,
    masked ones included.
    """
    oldest = version - max_staleness
    bounded = [
        [
            replace(example, sequences=[_masked(sequence, oldest) for sequence in example.sequences])
            for example in share
        ]
        for share in shares
    ]
    sequences = [sequence for share in shares for example in share for sequence in example.sequences]
    ages = np.concatenate(
        [version - sequence.versions[sequence.sampled] for sequence in sequences]
        or [np.zeros(0, dtype=np.int64)]
    )
    return bounded, {
        "staleness/mean": float(ages.mean()) if ages.size else 0.0,
        "staleness/max": float(ages.max()) if ages.size else 0.0,
        "staleness/masked_tokens": float((ages > max_staleness).sum()),
        "staleness/masked_trajectories": float(
            sum(
                bool(example.sequences)
                and all(_is_too_old(sequence, oldest) for sequence in example.sequences)
                for share in shares
                for example in share
            )
        ),
    }


def _is_too_old(sequence: TokenSequence, oldest: int) -> bool:
    return bool((sequence.versions[sequence.sampled] < oldest).all())


def _masked(sequence: TokenSequence, oldest: int) -> TokenSequence:
    return replace(
        sequence, advantages=np.where(sequence.versions < oldest, np.float32(0.0), sequence.advantages)
    )

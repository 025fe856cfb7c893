"""The staleness of sampled tokens, and the mask for tokens that are older than `max_staleness` updates.

See docs/staleness.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from src.learning.datums import TokenSequence
from src.learning.examples import Example, all_sequences


def mask_stale(examples: Sequence[Example], *, version: int, max_staleness: int) -> list[Example]:
    """Mask the tokens that are more than `max_staleness` updates older than `version`.

    `version` is the version of the weights that the step trains. A masked token has the advantage 0 and adds
    nothing to the loss, but the loss reduction still counts it.
    """
    oldest = version - max_staleness
    return [
        replace(example, sequences=[_masked(sequence, oldest) for sequence in example.sequences])
        for example in examples
    ]


def staleness_metrics(examples: Sequence[Example], *, version: int, max_staleness: int) -> dict[str, float]:
    """Return metrics of the staleness of all sampled tokens, including those that `mask_stale` masks."""
    oldest = version - max_staleness
    ages = np.concatenate(
        [version - sequence.versions[sequence.sampled] for sequence in all_sequences(examples)]
        or [np.zeros(0, dtype=np.int64)]
    )
    num_masked = sum(
        bool(example.sequences) and all(_all_too_old(sequence, oldest) for sequence in example.sequences)
        for example in examples
    )
    return {
        "staleness/mean": float(ages.mean()) if ages.size else 0.0,
        "staleness/max": float(ages.max()) if ages.size else 0.0,
        "staleness/masked_tokens": float((ages > max_staleness).sum()),
        "staleness/masked_trajectories": float(num_masked),
    }


def _all_too_old(sequence: TokenSequence, oldest: int) -> bool:
    return bool((sequence.versions[sequence.sampled] < oldest).all())


def _masked(sequence: TokenSequence, oldest: int) -> TokenSequence:
    return replace(
        sequence, advantages=np.where(sequence.versions < oldest, np.float32(0.0), sequence.advantages)
    )

"""Truncated importance sampling: what the sampler's logprobs and the trainer's own disagree on is weighed, capped or left out.

    ratio = exp(clip(logp_old - logp_sampled, -20, 20)), capped        logp_old: the trainer's, before the batch's first update

The capped ratio multiplies the advantage, a positive factor that commutes with the clipped losses, and logp_old takes the place of the
sampled logprobs in the datum. SkyRL's off-policy corrections, with its bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from src.learning.datums import TokenSequence, has_gradient
from src.learning.examples import Example
from src.learning.options import ImportanceSettings

MAX_LOG_RATIO = 20.0
CAPS = {"token": 2.0, "sequence": 5.0}
SEQUENCE_BOUNDS = {"geometric": (0.99, 1.01), "product": (0.5, 2.0), "outlier": (1e-4, 100.0)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction:
    """For the N sampled tokens of one trajectory: the factor of each token's advantage, 0 where masked."""

    factors: np.ndarray  # [N]
    num_capped: int  # tokens, or 1 for the sequence
    is_masked: bool  # the whole trajectory
    num_masked_tokens: int


def correction(old: np.ndarray, sampled: np.ndarray, settings: ImportanceSettings) -> Correction:
    """`old` and `sampled` are the trainer's and the sampler's logprobs of the same N tokens.

    Bounds are inclusive: a ratio is out of bounds when strictly above the upper or below the lower one.
    """
    log_ratios = old - sampled
    ratios = _exp(log_ratios)
    cap = CAPS.get(settings.tis, 1.0) if settings.tis_cap is None else settings.tis_cap
    match settings.tis:
        case "token":
            factors, num_capped = np.minimum(ratios, cap), int((ratios > cap).sum())
        case "sequence":
            ratio = _exp(log_ratios.sum())
            factors, num_capped = np.full_like(ratios, min(ratio, cap)), int(ratio > cap)
        case _:
            factors, num_capped = np.ones_like(ratios), 0
    is_masked = out_of_bounds(log_ratios, settings)
    low = -np.inf if settings.tis_token_mask_low is None else settings.tis_token_mask_low
    high = np.inf if settings.tis_token_mask_high is None else settings.tis_token_mask_high
    inside = (ratios >= low) & (ratios <= high)
    kept = inside & (not is_masked)
    return Correction(
        factors=np.where(kept, factors, 0.0),
        num_capped=num_capped,
        is_masked=is_masked,
        num_masked_tokens=int((~inside).sum()),
    )


def out_of_bounds(log_ratios: np.ndarray, settings: ImportanceSettings) -> bool:
    """Whether the trajectory as a whole is left out."""
    kind = settings.tis_sequence_mask
    if kind == "off" or not log_ratios.size:
        return False
    low, high = SEQUENCE_BOUNDS[kind]
    low = low if settings.tis_sequence_mask_low is None else settings.tis_sequence_mask_low
    high = high if settings.tis_sequence_mask_high is None else settings.tis_sequence_mask_high
    values = {
        "geometric": _exp(log_ratios.mean()),
        "product": _exp(log_ratios.sum()),
        "outlier": _exp(log_ratios),
    }[kind]
    return bool(np.any((values > high) | (values < low)))


def apply_tis(
    shares: Sequence[Sequence[Example]], old_logprobs_D: Sequence[np.ndarray], settings: ImportanceSettings
) -> tuple[list[list[Example]], dict[str, float]]:
    """The examples, and how much was corrected. `old_logprobs_D`: the trainer's logprobs of each sequence with a gradient, [T], in order.

    Sequences without a gradient are left out. Weights of the loss reduction stay as they are: a masked token is one that counts, and
    contributes nothing.
    """
    corrections: list[Correction] = []
    remaining = iter(old_logprobs_D)

    def correct(example: Example) -> Example:
        sequences = [sequence for sequence in example.sequences if has_gradient(sequence)]
        old = [next(remaining) for _ in sequences]
        if not sequences:
            return replace(example, sequences=[])
        before = np.concatenate([sequence.logprobs[sequence.sampled] for sequence in sequences])
        after = np.concatenate(
            [values[sequence.sampled] for sequence, values in zip(sequences, old, strict=True)]
        )
        result = correction(after, before, settings)
        corrections.append(result)
        parts = np.split(result.factors, np.cumsum([sequence.num_sampled for sequence in sequences])[:-1])
        return replace(
            example, sequences=[_corrected(*each) for each in zip(sequences, parts, old, strict=True)]
        )

    changed = [[correct(example) for example in share] for share in shares]
    num_units = (
        len(corrections) if settings.tis == "sequence" else sum(len(item.factors) for item in corrections)
    )
    return changed, {
        "tis/mean_factor": float(np.concatenate([item.factors for item in corrections]).mean())
        if corrections
        else 1.0,
        "tis/capped_fraction": sum(item.num_capped for item in corrections) / max(1, num_units),
        "tis/masked_sequences": float(sum(item.is_masked for item in corrections)),
        "tis/masked_tokens": float(sum(item.num_masked_tokens for item in corrections)),
    }


def _corrected(sequence: TokenSequence, factors: np.ndarray, old: np.ndarray) -> TokenSequence:
    scale = np.zeros(len(sequence.tokens), dtype=np.float32)
    scale[sequence.sampled] = factors
    return replace(
        sequence,
        advantages=sequence.advantages * scale,
        logprobs=np.where(sequence.sampled, old, np.float32(0.0)).astype(np.float32),
    )


def _exp(log_ratio: np.ndarray | np.floating) -> np.ndarray:
    return np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))

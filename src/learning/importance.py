"""Truncated importance sampling (TIS) for differences between the logprobs of the sampler and of the trainer.

    ratio = exp(clip(logp_old - logp_sampled, -20, 20)), capped

logp_old is the trainer's logprob before the first optimizer step of the batch. With `tis=sequence`, the
differences of all sampled tokens of an example are added before the clip, so these tokens have one ratio. The
advantage is multiplied by the capped ratio. This multiplies the loss by the capped ratio too: the loss of a
token is a product with the advantage or, for ppo, the smaller of two such products, and the capped ratio is
positive. logp_old replaces the sampled logprob in the datum. The corrections and their default bounds are
those of SkyRL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from src.learning.datums import TokenSequence, has_gradient
from src.learning.examples import Example
from src.learning.learner import TrainedTokens, sampler_trainer_kl, trained_tokens
from src.learning.options import ImportanceOptions

MAX_LOG_RATIO = 20.0
CAPS = {"token": 2.0, "sequence": 5.0}
SEQUENCE_BOUNDS = {"geometric": (0.99, 1.01), "product": (0.5, 2.0), "outlier": (1e-4, 100.0)}


@dataclass(frozen=True, kw_only=True, eq=False)
class TisResult:
    """The factors by which the advantages of the N sampled tokens of an example are multiplied."""

    factors: np.ndarray  # [N], 0 for masked tokens
    num_capped: int  # capped tokens; with tis=sequence: 1 if the ratio of the example is capped, else 0
    is_masked: bool  # whether `tis_sequence_mask` masks the whole example
    num_masked_tokens: int  # tokens that `tis_token_mask_low` and `tis_token_mask_high` mask


def token_factors(old: np.ndarray, sampled: np.ndarray, options: ImportanceOptions) -> TisResult:
    """Return the factors for N tokens. `old` and `sampled` are the logprobs [N] of trainer and sampler.

    A ratio that equals a bound is not masked.
    """
    log_ratios = old - sampled
    ratios = _exp(log_ratios)
    cap = CAPS.get(options.tis, 1.0) if options.tis_cap is None else options.tis_cap
    match options.tis:
        case "token":
            factors, num_capped = np.minimum(ratios, cap), int((ratios > cap).sum())
        case "sequence":
            ratio = _exp(log_ratios.sum())
            factors, num_capped = np.full_like(ratios, min(ratio, cap)), int(ratio > cap)
        case _:
            factors, num_capped = np.ones_like(ratios), 0
    is_masked = out_of_bounds(log_ratios, options)
    low = -np.inf if options.tis_token_mask_low is None else options.tis_token_mask_low
    high = np.inf if options.tis_token_mask_high is None else options.tis_token_mask_high
    inside = (ratios >= low) & (ratios <= high)
    kept = inside & (not is_masked)
    return TisResult(
        factors=np.where(kept, factors, 0.0),
        num_capped=num_capped,
        is_masked=is_masked,
        num_masked_tokens=int((~inside).sum()),
    )


def out_of_bounds(log_ratios: np.ndarray, options: ImportanceOptions) -> bool:
    """Return whether `tis_sequence_mask` masks the example with these log ratios [N]."""
    kind = options.tis_sequence_mask
    if kind == "off" or not log_ratios.size:
        return False
    low, high = SEQUENCE_BOUNDS[kind]
    low = low if options.tis_sequence_mask_low is None else options.tis_sequence_mask_low
    high = high if options.tis_sequence_mask_high is None else options.tis_sequence_mask_high
    values = {
        "geometric": _exp(log_ratios.mean()),
        "product": _exp(log_ratios.sum()),
        "outlier": _exp(log_ratios),
    }[kind]
    return bool(np.any((values > high) | (values < low)))


def apply_tis(
    examples_per_substep: Sequence[Sequence[Example]],
    old_logprobs_D: Sequence[np.ndarray],
    options: ImportanceOptions,
) -> tuple[list[list[Example]], dict[str, float]]:
    """Return the corrected examples, and the metrics of the correction and of `sampler_trainer_kl`.

    `old_logprobs_D` has the trainer's logprobs [T] of each sequence with a gradient, in order. Sequences
    without a gradient are removed. The loss reduction was applied before this correction, so the reduction
    counts masked tokens, which have no gradient.
    """
    corrections: list[TisResult] = []
    compared: list[TrainedTokens] = []
    remaining = iter(old_logprobs_D)

    def correct(example: Example) -> Example:
        sequences = [sequence for sequence in example.sequences if has_gradient(sequence)]
        old = [next(remaining) for _ in sequences]
        if not sequences:
            return replace(example, sequences=[])
        sampler_N = np.concatenate([sequence.logprobs[sequence.sampled] for sequence in sequences])
        trainer_N = np.concatenate(
            [values[sequence.sampled] for sequence, values in zip(sequences, old, strict=True)]
        )
        result = token_factors(trainer_N, sampler_N, options)
        corrections.append(result)
        rows = zip(sequences, old, strict=True)
        compared.append(
            trained_tokens((sequence.advantages, sequence.logprobs, values) for sequence, values in rows)
        )
        parts = np.split(result.factors, np.cumsum([sequence.num_sampled for sequence in sequences])[:-1])
        return replace(
            example, sequences=[_corrected(*values) for values in zip(sequences, parts, old, strict=True)]
        )

    changed = [[correct(example) for example in examples] for examples in examples_per_substep]
    num_units = (
        len(corrections) if options.tis == "sequence" else sum(len(item.factors) for item in corrections)
    )
    kl = sampler_trainer_kl(compared, num_before_step=len(compared)) if compared else {}
    return changed, kl | {
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

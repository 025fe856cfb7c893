"""Preparation of a batch: from examples with advantages to the datums of each optimizer step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import tinker

from src.learning.datums import scale_advantages, to_datums
from src.learning.examples import Example, all_sequences, apply_loss_reduction, split_substeps
from src.learning.filters import DropReason
from src.learning.importance import apply_tis
from src.learning.kl_penalty import KlResult, apply_kl_penalty, apply_teacher
from src.learning.learner import Learner
from src.learning.metrics import batch_metrics
from src.learning.options import PreparationOptions
from src.learning.staleness import mask_stale, staleness_metrics
from src.policy.sampling_policy import ReferenceModel


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedBatch:
    """The datums of each substep (optimizer step) of a batch, and the metrics of the batch."""

    datums_per_substep: list[list[tinker.Datum]]  # a list is empty if its examples have no gradient
    metrics: dict[str, float]


async def prepare(
    examples_P_G: Sequence[Sequence[Example]],
    dropped: Counter[DropReason],
    *,
    reference: ReferenceModel | None,
    teacher: ReferenceModel | None = None,
    learner: Learner,
    options: PreparationOptions,
    version: int = 0,
) -> PreparedBatch:
    """Convert the examples of a batch to the datums of each substep.

    `dropped` is the number of groups that the filters removed, by reason. `reference` computes logprobs for
    the KL penalty; None: no penalty. `teacher` computes logprobs for distillation; None: no distillation.
    `learner` computes logprobs for truncated importance sampling and its masks. `version` is the version of
    the weights to be trained. If `max_staleness` is above 0, tokens that are more than `max_staleness`
    updates older than `version` are masked, after all other changes.
    """
    examples_per_substep = split_substeps(examples_P_G, options.num_substeps)
    metrics = batch_metrics(examples_per_substep, dropped)
    if reference is not None:
        penalties = [
            await apply_kl_penalty(examples, reference, options) for examples in examples_per_substep
        ]
        examples_per_substep = [penalty.examples for penalty in penalties]
        metrics["optim/kl_policy_base"] = _mean_kl(penalties)
    if teacher is not None:
        distilled = [await apply_teacher(examples, teacher, options) for examples in examples_per_substep]
        examples_per_substep = [result.examples for result in distilled]
        metrics["optim/kl_policy_teacher"] = _mean_kl(distilled)
    examples_per_substep = [apply_loss_reduction(examples, options) for examples in examples_per_substep]
    staleness = {"version": version, "max_staleness": options.max_staleness}
    if options.max_staleness:  # before TIS, which removes the sequences without a gradient
        examples = [example for substep in examples_per_substep for example in substep]
        metrics |= staleness_metrics(examples, **staleness)
    if options.is_on:
        old_logprobs_D = await learner.logprobs(
            to_datums(sequence for examples in examples_per_substep for sequence in all_sequences(examples))
        )
        examples_per_substep, tis_metrics = apply_tis(examples_per_substep, old_logprobs_D, options)
        metrics |= tis_metrics
    if options.max_staleness:
        examples_per_substep = [mask_stale(examples, **staleness) for examples in examples_per_substep]
    return PreparedBatch(
        datums_per_substep=[to_datums(all_sequences(examples)) for examples in examples_per_substep],
        metrics=metrics,
    )


def stream_datums(
    examples: Sequence[Example], options: PreparationOptions, *, version: int, num_groups: int
) -> list[tinker.Datum]:
    """Return the datums of one of the `num_groups` groups of a batch.

    With the option `stream_groups`, they are sent to the server when the step takes the group. All groups
    have the same weight. Tokens that are more than `max_staleness` updates older than `version` are masked.
    """
    weighted = [
        replace(
            example, sequences=[scale_advantages(sequence, 1 / num_groups) for sequence in example.sequences]
        )
        for example in apply_loss_reduction(examples, options)
    ]
    masked = mask_stale(weighted, version=version, max_staleness=options.max_staleness)
    return to_datums(all_sequences(masked))


def stream_metrics(
    examples_P_G: Sequence[Sequence[Example]],
    dropped: Counter[DropReason],
    options: PreparationOptions,
    *,
    version: int,
) -> dict[str, float]:
    """Return the metrics of a batch whose groups were streamed (`stream_groups`).

    In contrast to `prepare`, the metrics contain the staleness even if `max_staleness` is 0.
    """
    examples = [example for group in examples_P_G for example in group]
    return batch_metrics(examples_P_G, dropped) | staleness_metrics(
        examples, version=version, max_staleness=options.max_staleness
    )


def _mean_kl(results: Sequence[KlResult]) -> float:
    """Return the mean KL divergence per sampled token of all substeps."""
    num_tokens = [sum(example.num_tokens for example in result.examples) for result in results]
    total = math.sumprod([result.mean_kl for result in results], num_tokens)
    return total / max(1, sum(num_tokens))

"""Examples -> the datums of each optimizer step: shares, KL penalty, loss reduction and importance correction, in this order."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import tinker

from src.learning.datums import TokenSequence, scaled, to_datums
from src.learning.examples import Example, substeps, weighted
from src.learning.filters import DropReason
from src.learning.importance import apply_tis
from src.learning.kl_penalty import penalised
from src.learning.learner import Learner
from src.learning.metrics import batch_metrics
from src.learning.options import PreparationSettings
from src.learning.staleness import within_bound
from src.policy.sampling_policy import ReferenceModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The datums of each optimizer step, and what is to be said of them."""

    datums_per_substep: list[list[tinker.Datum]]
    metrics: dict[str, float]


async def prepare(
    examples_P_G: Sequence[Sequence[Example]],
    dropped: Counter[DropReason],
    *,
    reference: ReferenceModel | None,
    learner: Learner,
    settings: PreparationSettings,
    version: int = 0,
) -> Prepared:
    """Asks `reference` for its logprobs where there is a KL penalty, and `learner` for its own where importance is corrected.

    `version` is that of the weights the batch is to train; what is older than `max_staleness` allows is masked last of all.
    """
    shares = substeps(examples_P_G, settings.num_substeps)
    metrics = batch_metrics(shares, dropped)
    if reference is not None:
        penalties = [await penalised(share, reference, settings) for share in shares]
        shares = [penalty.examples for penalty in penalties]
        metrics["optim/kl_policy_base"] = (
            statistics.fmean(penalty.mean_kl for penalty in penalties) if penalties else 0.0
        )
    shares = [weighted(share, settings) for share in shares]
    if settings.is_on:
        before_the_update = await learner.logprobs(
            to_datums(sequence for share in shares for sequence in _sequences(share))
        )
        shares, corrections = apply_tis(shares, before_the_update, settings)
        metrics |= corrections
    if settings.max_staleness:
        shares, ages = within_bound(shares, version=version, max_staleness=settings.max_staleness)
        metrics |= ages
    return Prepared(datums_per_substep=[to_datums(_sequences(share)) for share in shares], metrics=metrics)


def streamed(
    examples: Sequence[Example], settings: PreparationSettings, *, version: int, num_groups: int
) -> list[tinker.Datum]:
    """The datums of one group out of a batch of `num_groups`. Each group weighs the same, whatever becomes of the others."""
    share = [
        replace(example, sequences=[scaled(sequence, 1 / num_groups) for sequence in example.sequences])
        for example in weighted(examples, settings)
    ]
    (bounded,), _ = within_bound([share], version=version, max_staleness=settings.max_staleness)
    return to_datums(_sequences(bounded))


def streamed_metrics(
    examples_P_G: Sequence[Sequence[Example]],
    dropped: Counter[DropReason],
    settings: PreparationSettings,
    *,
    version: int,
) -> dict[str, float]:
    """What `prepare` would say of a batch whose groups have been streamed."""
    _, ages = within_bound(examples_P_G, version=version, max_staleness=settings.max_staleness)
    return batch_metrics(examples_P_G, dropped) | ages


def _sequences(share: Sequence[Example]) -> list[TokenSequence]:
    return [sequence for example in share for sequence in example.sequences]

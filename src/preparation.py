"""Examples -> the datums of each optimizer step: shares, KL penalty, loss reduction and importance correction, in this order."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import tinker

from src.datums import TokenSequence, to_datums
from src.examples import AdvantageSettings, Example, substeps, weighted
from src.filters import DropReason
from src.importance import ImportanceSettings, corrected
from src.kl_penalty import KlSettings, penalised
from src.learner import Learner
from src.metrics import batch_metrics
from src.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparationSettings:
    advantages: AdvantageSettings
    kl: KlSettings
    importance: ImportanceSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The datums of each optimizer step, and what is to be said of them."""

    datums_per_substep: list[list[tinker.Datum]]
    metrics: dict[str, float]


async def prepare(
    examples_P_G: Sequence[Sequence[Example]],
    dropped: Counter[DropReason],
    *,
    reference: Policy | None,
    learner: Learner,
    settings: PreparationSettings,
) -> Prepared:
    """Asks `reference` for its logprobs where there is a KL penalty, and `learner` for its own where importance is corrected."""
    shares = substeps(examples_P_G, settings.advantages.num_substeps)
    metrics = batch_metrics(shares, dropped)
    if reference is not None:
        penalties = [await penalised(share, reference, settings.kl) for share in shares]
        shares = [penalty.examples for penalty in penalties]
        metrics["optim/kl_policy_base"] = statistics.fmean(penalty.mean_kl for penalty in penalties) if penalties else 0.0
    shares = [weighted(share, settings.advantages) for share in shares]
    if settings.importance.is_on:
        before_the_update = await learner.logprobs(to_datums(sequence for share in shares for sequence in _sequences(share)))
        shares, corrections = corrected(shares, before_the_update, settings.importance)
        metrics |= corrections
    return Prepared(datums_per_substep=[to_datums(_sequences(share)) for share in shares], metrics=metrics)


def _sequences(share: Sequence[Example]) -> list[TokenSequence]:
    return [sequence for example in share for sequence in example.sequences]

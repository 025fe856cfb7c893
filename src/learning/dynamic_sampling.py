"""DAPO's dynamic sampling: a step goes on sampling until enough of its groups have differing rewards. SkyRL's rules, without its loop.

filter   keep good groups over as many sampled batches as it takes, then cut to the number asked for
replace  one batch: good groups stand in for bad ones, provided that more than `min_replace_ratio` of it is good; else sample another
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from src.core.errors import TrainerError
from src.core.trajectory import Task, TrajectoryGroup
from src.learning.filters import apply_reward_rules, is_constant
from src.learning.options import DynamicSamplingSettings, FilterSettings

Play = Callable[
    [Sequence[Task], int], Awaitable[list[TrajectoryGroup]]
]  # plays the step's tasks, or its nth refill


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """What a step has sampled so far. `kept` is complete once it holds what the step learns from."""

    played: list[TrajectoryGroup]  # every group, with its raw rewards
    kept: list[TrajectoryGroup]
    is_complete: bool
    num_batches: int = 0
    num_bad: int = 0  # groups of equal rewards, over all batches
    num_copies: int = 0  # good groups that stand in for bad ones
    num_surplus: int = 0  # good groups beyond what was asked for


Refill = Callable[
    [Sampled, int], Sequence[Task]
]  # the tasks to go on with, where the step wants so many groups

NOTHING = Sampled(played=[], kept=[], is_complete=False)


def is_good(group: TrajectoryGroup) -> bool:
    """Rewards differ, or there is but one to compare (SkyRL). A group without a graded trial is not good."""
    return bool(group.rewards) and (len(group.rewards) == 1 or not is_constant(group.rewards))


async def sample_groups(
    play: Play,
    tasks: Sequence[Task],
    refills: Refill,
    settings: DynamicSamplingSettings,
    filters: FilterSettings,
    *,
    step: int,
) -> Sampled:
    """Plays `tasks`, and where dynamic sampling asks for more, batches of `refills`, until the step has what it learns from."""
    state = NOTHING
    while not state.is_complete:
        attempt = state.num_batches
        chosen = refills(state, len(tasks)) if attempt else tasks
        groups = await play(chosen, attempt)
        state = sampled(state, apply_reward_rules(groups, filters), settings, step=step, wanted=len(tasks))
        state = replace(state, played=[*state.played, *groups])
    return state


def sampled(
    before: Sampled,
    groups: Sequence[TrajectoryGroup],
    settings: DynamicSamplingSettings,
    *,
    step: int,
    wanted: int,
) -> Sampled:
    """The state after one more batch; `wanted` groups are to be learned from.

    Raises TrainerError when `dynamic_sampling_max_batches` are not enough.
    """
    if settings.dynamic_sampling == "off":
        return replace(before, kept=list(groups), is_complete=True, num_batches=1)
    good = [group for group in groups if is_good(group)]
    after = replace(
        before, num_batches=before.num_batches + 1, num_bad=before.num_bad + len(groups) - len(good)
    )
    if settings.dynamic_sampling == "filter":
        kept = [*before.kept, *good]
        after = replace(
            after, kept=kept[:wanted], is_complete=len(kept) >= wanted, num_surplus=max(0, len(kept) - wanted)
        )
    elif len(good) > len(groups) * settings.dynamic_sampling_min_replace_ratio:
        rng = random.Random(f"{settings.seed}/replace/{step}/{after.num_batches}")
        after = replace(
            after, kept=with_bad_replaced(groups, rng), is_complete=True, num_copies=len(groups) - len(good)
        )
    limit = settings.dynamic_sampling_max_batches
    if not after.is_complete and limit and after.num_batches >= limit:
        raise TrainerError(
            f"step {step}: {after.num_bad} groups of {after.num_batches} batches had equal rewards, so dynamic_sampling="
            f"{settings.dynamic_sampling} found too few to learn from; use easier tasks or a larger group_size, or raise "
            "dynamic_sampling_max_batches"
        )
    return after


def with_bad_replaced(groups: Sequence[TrajectoryGroup], rng: random.Random) -> list[TrajectoryGroup]:
    """Each bad group's place taken by a good one: all different while there are enough good ones, drawn freely otherwise."""
    good = [group for group in groups if is_good(group)]
    num_bad = len(groups) - len(good)
    drawn = iter(rng.sample(good, num_bad) if len(good) >= num_bad else rng.choices(good, k=num_bad))
    return [group if is_good(group) else next(drawn) for group in groups]


def sampling_metrics(state: Sampled, settings: DynamicSamplingSettings) -> dict[str, float]:
    if settings.dynamic_sampling == "off":
        return {}
    return {
        "dynamic_sampling/batches": float(state.num_batches),
        "dynamic_sampling/bad_groups": float(state.num_bad),
        "dynamic_sampling/replaced_groups": float(state.num_copies),
        "dynamic_sampling/surplus_groups": float(state.num_surplus),
    }


def refill[T](tasks: Sequence[T], count: int, *, seed: int, step: int, attempt: int) -> list[T]:
    """The tasks of a step's further batch: a shuffle of its own, so that the order of later steps stays what it was."""
    order = list(tasks)
    random.Random(f"{seed}/refill/{step}/{attempt}").shuffle(order)
    return order[:count]

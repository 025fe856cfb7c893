"""Dynamic sampling (DAPO): sample further batches until a step has enough good groups, by SkyRL's rules.

A group of several trials is good if at least `min_group_size` of them are graded and their rewards differ. A
group of one trial is good if the trial is graded. All other groups are bad.

`dynamic_sampling=filter` collects good groups over several batches and keeps the number that the step needs.
`dynamic_sampling=replace` replaces bad groups by good groups of the same batch if the share of good groups is
above `dynamic_sampling_min_replace_ratio`. Otherwise it samples another batch.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from src.core.errors import TrainerError
from src.core.trajectory import Task, TrajectoryGroup
from src.learning.filters import apply_reward_rules, is_constant
from src.learning.options import DynamicSamplingOptions, FilterOptions

# Runs tasks. The second argument is `refill_index`: 0 for the first tasks of a step, and 1 or more for a
# refill.
RunTasks = Callable[[Sequence[Task], int], Awaitable[list[TrajectoryGroup]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingState:
    """The groups that a step has sampled so far."""

    rolled_out: list[TrajectoryGroup]  # all groups, with their original rewards
    kept: list[TrajectoryGroup]  # the groups to train on, with the rewards that the reward rules give
    is_complete: bool
    num_batches: int = 0
    num_bad: int = 0  # number of bad groups in all batches
    num_copies: int = 0  # copies of good groups that replace bad groups
    num_surplus: int = 0  # good groups beyond the number that the step needs


# Returns the tasks of the next batch, given the state and the number of groups that the step needs.
Refill = Callable[[SamplingState, int], Sequence[Task]]

EMPTY = SamplingState(rolled_out=[], kept=[], is_complete=False)


def is_good(group: TrajectoryGroup, min_group_size: int) -> bool:
    """Return whether the rewards differ, or the only trial of the group is graded, as in SkyRL.

    A group with failures and a single reward is bad, because it has no reward to compare with. A group of
    several trials with fewer rewards than `min_group_size` is bad, because a filter drops it.
    """
    if len(group.rewards) == 1:
        return not group.failures
    return len(group.rewards) >= min_group_size and not is_constant(group.rewards)


async def sample_groups(
    run_tasks: RunTasks,
    tasks: Sequence[Task],
    refills: Refill,
    options: DynamicSamplingOptions,
    filters: FilterOptions,
    *,
    step: int,
) -> SamplingState:
    """Run `tasks`, and batches of `refills` if needed, until the step has its groups."""
    state = EMPTY
    while not state.is_complete:
        refill_index = state.num_batches
        batch = refills(state, len(tasks)) if refill_index else tasks
        groups = await run_tasks(batch, refill_index)
        state = add_batch(
            state,
            apply_reward_rules(groups, filters),
            options,
            step=step,
            num_groups=len(tasks),
            min_group_size=filters.min_group_size,
        )
        state = replace(state, rolled_out=[*state.rolled_out, *groups])
    return state


def add_batch(
    before: SamplingState,
    groups: Sequence[TrajectoryGroup],
    options: DynamicSamplingOptions,
    *,
    step: int,
    num_groups: int,
    min_group_size: int,
) -> SamplingState:
    """Return the state after one more batch. The step needs `num_groups` groups.

    Raises TrainerError if the step has too few groups after `dynamic_sampling_max_batches` batches.
    """
    if options.dynamic_sampling == "off":
        return replace(before, kept=list(groups), is_complete=True, num_batches=1)
    good = [group for group in groups if is_good(group, min_group_size)]
    after = replace(
        before, num_batches=before.num_batches + 1, num_bad=before.num_bad + len(groups) - len(good)
    )
    if options.dynamic_sampling == "filter":
        kept = [*before.kept, *good]
        after = replace(
            after,
            kept=kept[:num_groups],
            is_complete=len(kept) >= num_groups,
            num_surplus=max(0, len(kept) - num_groups),
        )
    elif not num_groups or len(good) > len(groups) * options.dynamic_sampling_min_replace_ratio:
        rng = random.Random(f"{options.seed}/replace/{step}/{after.num_batches}")
        after = replace(
            after,
            kept=replace_bad_groups(groups, rng, min_group_size),
            is_complete=True,
            num_copies=len(groups) - len(good),
        )
    limit = options.dynamic_sampling_max_batches
    if not after.is_complete and limit and after.num_batches >= limit:
        raise TrainerError(
            f"step {step}: {after.num_bad} groups of {after.num_batches} batches had no differing rewards or "
            f"too few graded trials, so dynamic_sampling={options.dynamic_sampling} found too few groups to "
            "train on; use easier or harder tasks, a larger group_size or a larger "
            "dynamic_sampling_max_batches"
        )
    return after


def replace_bad_groups(
    groups: Sequence[TrajectoryGroup], rng: random.Random, min_group_size: int
) -> list[TrajectoryGroup]:
    """Replace each bad group by a good one, without repetition if there are enough good groups."""
    good = [group for group in groups if is_good(group, min_group_size)]
    num_bad = len(groups) - len(good)
    drawn = iter(rng.sample(good, num_bad) if len(good) >= num_bad else rng.choices(good, k=num_bad))
    return [group if is_good(group, min_group_size) else next(drawn) for group in groups]


def sampling_metrics(state: SamplingState, options: DynamicSamplingOptions) -> dict[str, float]:
    if options.dynamic_sampling == "off":
        return {}
    return {
        "dynamic_sampling/batches": float(state.num_batches),
        "dynamic_sampling/bad_groups": float(state.num_bad),
        "dynamic_sampling/replaced_groups": float(state.num_copies),
        "dynamic_sampling/surplus_groups": float(state.num_surplus),
    }


def refill[T](tasks: Sequence[T], count: int, *, seed: int, step: int, refill_index: int) -> list[T]:
    """Return at most `count` shuffled tasks for a further batch. The order depends only on the arguments, so
    a refill does not change the tasks of later steps."""
    order = list(tasks)
    random.Random(f"{seed}/refill/{step}/{refill_index}").shuffle(order)
    return order[:count]

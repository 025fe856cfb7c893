from collections import Counter
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from src.learning.datums import sequences_of
from src.learning.examples import Example
from src.learning.learner import Learner
from src.learning.options import LearnerOptions, PreparationOptions
from src.learning.preparation import prepare
from src.learning.staleness import mask_stale, staleness_metrics
from tests.fakes.trials import trajectory, turn


def example(*versions):
    """Return an example of one conversation. Each turn samples one token with the given version."""
    turns = []
    for version in versions:
        prompt = [*(turns[-1].prompt_ids + turns[-1].completion_ids if turns else []), 9]
        turns.append(turn(prompt, [3], version=version))
    return Example(
        trajectory=trajectory("a", 1.0, turns), advantage=0.5, sequences=sequences_of(turns, advantage=0.5)
    )


def test_tokens_older_than_the_bound_lose_their_advantage():
    before = example(2, 3, 4)
    (after,) = mask_stale([before], version=4, max_staleness=1)
    (sequence,), (original,) = after.sequences, before.sequences
    assert sequence.advantages.tolist() == [0, 0, 0, 0.5, 0, 0.5]
    for name in ("tokens", "sampled", "logprobs", "versions"):
        assert np.array_equal(getattr(sequence, name), getattr(original, name))
    assert staleness_metrics([before], version=4, max_staleness=1) == {
        "staleness/mean": pytest.approx(1.0),
        "staleness/max": 2,
        "staleness/masked_tokens": 1,
        "staleness/masked_trajectories": 0,
    }


def test_a_trajectory_without_a_recent_token_is_counted():
    empty = replace(example(1), sequences=[])  # for example an overlong trajectory, which has no tokens
    examples = [example(1, 1), example(4), empty]
    first, second, third = mask_stale(examples, version=4, max_staleness=2)
    assert not first.sequences[0].advantages.any() and second.sequences[0].advantages.any()
    assert third.sequences == []
    metrics = staleness_metrics(examples, version=4, max_staleness=2)
    assert metrics["staleness/masked_trajectories"] == 1 and metrics["staleness/masked_tokens"] == 2


def test_an_empty_batch_has_zero_staleness():
    assert set(staleness_metrics([], version=4, max_staleness=2).values()) == {0.0}


async def test_tis_does_not_change_the_staleness_metrics():
    options = PreparationOptions(tis="token", max_staleness=1, max_tokens=5, context_limit=10)
    equal_rewards = replace(example(1), sequences=sequences_of(example(1).trajectory.turns, advantage=0.0))
    learner = Learner(cast(Any, None), LearnerOptions())
    prepared = await prepare(
        [[equal_rewards]], Counter(), reference=None, learner=learner, options=options, version=4
    )
    assert prepared.metrics["staleness/max"] == 3 and prepared.metrics["staleness/masked_tokens"] == 1

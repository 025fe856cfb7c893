"""From what a verifier wrote to one number, or the statement that there is none."""

from __future__ import annotations

import math
from collections.abc import Mapping

from src.core.errors import VerifierError

REWARD_KEY = "reward"


def score(rewards: Mapping[str, float] | None) -> float:
    """The reward of a trial: the key `reward`, or else the mean of all keys. VerifierError when there is nothing to read.

    >>> score({"reward": 1.0, "style": 0.2}), score({"tests": 1.0, "style": 0.5}), score({"tests": 0})
    (1.0, 0.75, 0.0)
    """
    if not rewards:
        raise VerifierError("the verifier wrote no reward")
    values = [rewards[REWARD_KEY]] if REWARD_KEY in rewards else list(rewards.values())
    try:
        reward = float(sum(values) / len(values))
    except (OverflowError, TypeError) as error:
        raise VerifierError(f"the verifier wrote a reward that is no number: {error}") from error
    if not math.isfinite(reward):
        raise VerifierError(f"the verifier wrote a reward that is no number: {dict(rewards)}")
    return reward

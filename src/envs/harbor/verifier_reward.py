"""The reward of a trial, computed from the rewards that its verifier wrote."""

from __future__ import annotations

from collections.abc import Mapping

from src.core.errors import VerifierError
from src.records.reading import is_readable

REWARD_KEY = "reward"


def verifier_reward(rewards: Mapping[str, float] | None) -> float:
    """Return the value of the key `reward`, or the mean of all values if that key is absent.

    Raises VerifierError if there is no value, or if the result is not a finite number with an absolute value
    below 1e300.

    >>> verifier_reward({"reward": 1.0, "style": 0.2}), verifier_reward({"tests": 1.0, "style": 0.5})
    (1.0, 0.75)
    """
    if not rewards:
        raise VerifierError("the verifier wrote no reward")
    values = [rewards[REWARD_KEY]] if REWARD_KEY in rewards else list(rewards.values())
    try:
        reward = float(sum(values) / len(values))
    except (OverflowError, TypeError) as error:
        raise VerifierError(f"the verifier wrote a reward that is not a number: {error}") from error
    if not is_readable(reward):
        raise VerifierError(f"the verifier wrote a reward that is not finite or too large: {dict(rewards)}")
    return reward

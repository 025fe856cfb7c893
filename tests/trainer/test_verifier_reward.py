import math

import pytest

from src.core.errors import VerifierError
from src.envs.harbor.verifier_reward import verifier_reward


def test_the_key_reward_precedes_the_mean_of_all_keys() -> None:
    assert verifier_reward({"reward": 0.25, "style": 1.0}) == 0.25
    assert verifier_reward({"tests": 1.0, "style": 0.5}) == 0.75
    assert verifier_reward({"reward": 0}) == 0.0


@pytest.mark.parametrize("rewards", [None, {}, {"reward": math.nan}, {"a": math.inf}, {"a": -1e300}])
def test_no_reward_is_an_error_and_not_zero(rewards: dict[str, float] | None) -> None:
    with pytest.raises(VerifierError):
        verifier_reward(rewards)

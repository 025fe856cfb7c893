"""Episodes in scripted environments, with the toy tokenizer.

A first message of one letter renders to 9 ids, the answer `AB` is sampled as [65, 66, 2], and an observation
of two letters adds 11 ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from src.core.length_limits import LengthLimits
from src.core.trajectory import Trajectory, TrialFailure
from src.envs.message_env import EpisodeSettings, StepResult, run_episode
from src.learning.filters import FilterOptions
from src.policy.chat import Chat
from tests.fakes.envs import ScriptedEnv, saying
from tests.fakes.policy import FakePolicy
from tests.fakes.tokenizer import toy_chat

SETTINGS = EpisodeSettings(temperature=0.7, seed=5)
OB = saying("ob")


def limits(max_input: int = 1000, *, generate: int = 50) -> LengthLimits:
    return LengthLimits(
        max_input_length=max_input,
        max_generate_length=generate,
        max_sequence_length=max_input + generate,
        context_limit=max_input + generate,
    )


async def run_script(
    script: Sequence[StepResult | Exception],
    replies: Sequence[str],
    length_limits: LengthLimits | None = None,
    settings: EpisodeSettings = SETTINGS,
    *,
    chat: Chat | None = None,
    policy: FakePolicy | None = None,
    **env_options: Any,
) -> tuple[Trajectory | TrialFailure, FakePolicy, ScriptedEnv]:
    """Run an episode in a `ScriptedEnv` with `env_options`, and check that the environment is closed once.

    `replies` are the completions of the policy. They are unused if `policy` is given.
    """
    chat = chat or toy_chat()
    policy = policy or FakePolicy(chat, replies)
    environment = ScriptedEnv(script, **env_options)
    result = await run_episode(
        environment, policy, chat, length_limits or limits(), settings, task_id="a", trial_name="n"
    )
    assert environment.num_closed == 1
    return result, policy, environment


async def run_graded(*args: Any, **options: Any) -> tuple[Trajectory, FakePolicy, ScriptedEnv]:
    """Call `run_script` and check that the episode is graded."""
    result, policy, environment = await run_script(*args, **options)
    assert isinstance(result, Trajectory), result
    return result, policy, environment


async def fail(*args: Any, **options: Any) -> tuple[TrialFailure, FakePolicy, ScriptedEnv]:
    """Call `run_script` and check that the episode fails."""
    result, policy, environment = await run_script(*args, **options)
    assert isinstance(result, TrialFailure), result
    return result, policy, environment


def filters(rule: Literal["off", "stop_reason", "eos"]) -> FilterOptions:
    return FilterOptions(
        remove_constant_reward_groups=False,
        min_group_size=1,
        failed_trial_reward=None,
        apply_overlong_filtering=rule,
    )

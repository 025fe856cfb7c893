"""Runs `run_episode` on the length (L) and assembly (S) cases of SkyRL's generator and expects its numbers.

Comments state the intended differences from SkyRL. `tests/fakes/episodes.py` explains the token ids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import chz
import pytest
import tinker

from src.core.trajectory import FailureKind, StopReason, Trajectory, TrajectoryGroup
from src.envs.message_env import StepResult
from src.learning.datums import sequences_of, step_sequences_of
from src.learning.filters import apply_reward_rules, is_trainable
from src.policy.sampling_policy import TinkerPolicy
from tests.fakes.envs import ending, saying
from tests.fakes.episodes import OB, SETTINGS, fail, filters, limits, run_graded
from tests.fakes.policy import FakePolicy
from tests.fakes.tokenizer import byte_chat, toy_chat
from tests.fakes.trials import task


@dataclass(frozen=True, kw_only=True)
class Response:
    """A trajectory of one sequence in the form that SkyRL returns: the ids after the first prompt."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    rewards: list[float]


def response(trajectory: Trajectory) -> Response:
    [sequence] = sequences_of(trajectory.turns, advantage=1.0)
    start = len(trajectory.turns[0].prompt_ids)
    rewards = [0.0] * (len(sequence.tokens) - start)
    for turn, reward in zip(trajectory.turns, trajectory.turn_rewards, strict=True):
        rewards[len(turn.prompt_ids) + len(turn.completion_ids) - 1 - start] += reward
    return Response(
        ids=sequence.tokens[start:].tolist(),
        mask=sequence.sampled[start:].astype(int).tolist(),
        logprobs=sequence.logprobs[start:].tolist(),
        rewards=rewards,
    )


def at(index: int, length: int, value: float = 1.0) -> list[float]:
    """Return a list of zeros with `value` at `index`."""
    return [value if i == index else 0.0 for i in range(length)]


# Length


@pytest.mark.parametrize(
    ("max_input", "num_calls"), [pytest.param(22, 1, id="L1"), pytest.param(23, 2, id="L2")]
)
@pytest.mark.seed_behaviour(141)
async def test_l1_l2_a_context_of_exactly_the_limit_is_still_answered(max_input, num_calls):
    trajectory, policy, _ = await run_graded([OB, ending()], ["AB", "C"], limits(max_input))
    assert [len(call.prompt_ids) for call in policy.calls] == [9, 23][:num_calls]
    if num_calls == 1:
        # SkyRL has the stop reason `length` for both kinds of limit. Here, the reasons differ, and the metric
        # `input_overflow` counts this one.
        assert (
            trajectory.stop_reason == StopReason.CONTEXT_LENGTH and trajectory.metrics["input_overflow"] == 1
        )
        assert len(response(trajectory).ids) == 3
    else:
        assert trajectory.stop_reason == StopReason.STOP and trajectory.metrics["input_overflow"] == 0


async def test_l3_a_full_context_gives_no_final_reward():
    trajectory, policy, _ = await run_graded([OB, OB, ending()], ["AB", "C", "D"], limits(35))
    assert len(policy.calls) == 2 and trajectory.stop_reason == StopReason.CONTEXT_LENGTH
    assert (
        len(response(trajectory).ids) == 16
        and response(trajectory).rewards == [0.0] * 16
        and trajectory.reward == 0
    )


async def test_l4_one_token_more_permits_the_third_turn():
    trajectory, policy, _ = await run_graded([OB, OB, ending()], ["AB", "C", "D"], limits(36))
    assert [len(call.prompt_ids) for call in policy.calls] == [9, 23, 36]
    assert trajectory.stop_reason == StopReason.STOP
    assert response(trajectory).rewards == at(28, 29)


async def test_l5_contexts_of_13_30_47_and_64_under_a_limit_of_50():
    longer = saying("obsv")
    trajectory, policy, _ = await run_graded([longer] * 4, ["ABC"], limits(50), opening="xxxxx")
    assert [len(call.prompt_ids) for call in policy.calls] == [13, 30, 47]
    assert len(response(trajectory).ids) == 38 and trajectory.stop_reason == StopReason.CONTEXT_LENGTH


async def test_l6_a_first_prompt_over_the_limit_is_never_sent():
    # SkyRL's generator crashes. For other trajectories without an answer, it returns one end token with
    # mask 0. Here, the trajectory has no turn, because no token was sampled.
    trajectory, policy, environment = await run_graded([ending()], ["AB"], limits(8))
    assert policy.calls == [] and environment.answers == []
    assert (trajectory.turns, trajectory.reward, trajectory.stop_reason) == (
        [],
        0.0,
        StopReason.CONTEXT_LENGTH,
    )
    assert sequences_of(trajectory.turns, advantage=1.0) == []


async def test_l7_a_cut_last_answer_is_masked_and_keeps_its_reward():
    trajectory, _, _ = await run_graded([OB, ending()], ["AB", "CDEFGHIJK"], limits(generate=4))
    assert trajectory.stop_reason == StopReason.LENGTH
    assert not is_trainable(trajectory, filters("stop_reason")) and not is_trainable(
        trajectory, filters("eos")
    )
    assert trajectory.reward == 1 and response(trajectory).rewards[-1] == 1


async def test_cut_answers_are_counted():
    trajectory, _, _ = await run_graded([OB, OB, ending()], ["AB", "CD", "CDEFGHIJK"], limits(generate=4))
    assert trajectory.metrics["cut_answers"] == 1


async def test_l8_a_cut_answer_in_the_middle_is_trained():
    trajectory, policy, _ = await run_graded([OB, ending()], ["ABCDEFGHIJK", "C"], limits(generate=8))
    assert trajectory.stop_reason == StopReason.STOP and trajectory.metrics["cut_answers"] == 1
    assert is_trainable(trajectory, filters("stop_reason"))
    # SkyRL's mask is [1]*8 + [0]*11 + [1]*2, because SkyRL does not end the cut message. Here, one token of
    # weight 0 ends the message, as in the template.
    assert response(trajectory).mask == [1] * 8 + [0] * 12 + [1] * 2
    assert policy.calls[1].prompt_ids[9 + 8] == 2


@pytest.mark.parametrize(("rule", "is_trained"), [("stop_reason", False), ("eos", True), ("off", True)])
async def test_l9_overlong_rules_differ_on_a_full_context(rule, is_trained):
    trajectory, _, _ = await run_graded([OB], ["AB"], limits(22))
    assert response(trajectory).ids == [65, 66, 2]
    assert is_trainable(trajectory, filters(rule)) is is_trained


async def test_l10_zero_reward_on_non_stop_does_not_change_the_mask():
    trajectory, _, _ = await run_graded(
        [replace(OB, reward=0.5), ending()], ["AB", "CDEFGHIJK"], limits(generate=4)
    )
    assert trajectory.reward == 1.5
    group = TrajectoryGroup(task=task("a"), trajectories=[trajectory])
    [zeroed] = apply_reward_rules([group], chz.replace(filters("off"), zero_reward_on_non_stop=True))
    assert zeroed.rewards == [0] and is_trainable(zeroed.trajectories[0], filters("off"))


@pytest.mark.parametrize(
    ("stop", "is_trained"),
    [
        (StopReason.STOP, True),
        (StopReason.LENGTH, False),
        (StopReason.TIMEOUT, False),
        (StopReason.FAILED, False),
    ],
)
async def test_l11_only_a_stop_is_trained_under_the_stop_reason_rule(stop, is_trained):
    trajectory, _, _ = await run_graded([ending()], ["AB"])
    before = response(trajectory)
    assert is_trainable(replace(trajectory, stop_reason=stop), filters("stop_reason")) is is_trained
    assert response(trajectory) == before


async def test_l12_unequal_numbers_of_tokens_and_logprobs_fail():
    class OneLogprobTooFew:
        async def sample(self, *_, **__):
            sequence = tinker.SampledSequence(
                stop_reason="stop", sequence_id="s", _tokens_list=[65, 66, 2], _logprobs_list=[-0.5, -0.5]
            )
            return tinker.SampleResponse(sequences=[sequence])

    policy: Any = TinkerPolicy(cast(tinker.SamplingClient, OneLogprobTooFew()), 0)
    failure, _, environment = await fail([ending()], [], policy=policy)
    assert failure.kind == FailureKind.BACKEND and environment.answers == []
    assert "3 tokens with 2 logprobs" in failure.message


# Assembly


async def test_s1_two_turns():
    trajectory, policy, environment = await run_graded([OB, ending()], ["AB", "C"])
    assembled = response(trajectory)
    assert assembled.ids == [65, 66, 2, 3, 1, 117, 3, 111, 98, 2, 3, 1, 97, 3, 67, 2]
    assert assembled.mask == [1, 1, 1] + [0] * 11 + [1, 1]
    assert assembled.logprobs == [-0.5 if weight else 0.0 for weight in assembled.mask]
    assert assembled.rewards == at(15, 16)
    first, second = (call.prompt_ids for call in policy.calls)
    assert (len(first), len(second)) == (9, 23) and list(second) == [*first, *assembled.ids[:14]]
    assert environment.answers == ["AB", "C"]
    assert trajectory.stop_reason == StopReason.STOP and trajectory.trial_name == "n"


async def test_s2_rewards_stay_with_the_turn_that_earned_them():
    trajectory, _, _ = await run_graded([replace(OB, reward=0.5), ending()], ["AB", "C"])
    assert response(trajectory).rewards == [a + b for a, b in zip(at(2, 16, 0.5), at(15, 16), strict=True)]
    assert trajectory.reward == 1.5


async def test_s3_messages_after_the_last_answer_are_dropped():
    with_more, _, _ = await run_graded([OB, replace(OB, reward=1.0, is_done=True)], ["AB", "C"])
    without, _, _ = await run_graded([OB, ending()], ["AB", "C"])
    assert response(with_more) == response(without)


async def test_s4_without_a_message_only_a_generation_prompt_is_added():
    trajectory, _, _ = await run_graded([StepResult(), ending()], ["AB", "C"])
    # SkyRL inserts [1, 97, 3]. Here, the newline (3) that the template adds after every message precedes it.
    assert response(trajectory).ids == [65, 66, 2, 3, 1, 97, 3, 67, 2]
    assert response(trajectory).mask == [1, 1, 1, 0, 0, 0, 0, 1, 1]


async def test_s5_an_end_token_that_was_not_sampled_has_no_weight():
    class StopsBeforeEndToken(FakePolicy):
        async def sample(self, request):
            turn = await super().sample(request)
            return replace(turn, completion_ids=turn.completion_ids[:-1], logprobs=turn.logprobs[:-1])

    chat = toy_chat()
    trajectory, _, _ = await run_graded([OB, ending()], [], policy=StopsBeforeEndToken(chat, ["A]", "C]"]))
    # SkyRL's mask is [1,1,0] + [0]*11 + [1,1,0]. Here, the last answer gets no end token.
    assert response(trajectory).ids[:3] == [65, 93, 2]
    assert response(trajectory).mask == [1, 1, 0] + [0] * 11 + [1, 1]
    assert response(trajectory).rewards == at(15, 16)


async def test_s7_step_wise_turns_are_separate_sequences():
    trajectory, policy, _ = await run_graded(
        [OB, ending()], ["AB", "C"], settings=replace(SETTINGS, step_wise=True)
    )
    first, second = step_sequences_of(trajectory.turns, advantage=1.0)
    assert [len(call.prompt_ids) for call in policy.calls] == [9, 23]
    # SkyRL's first sample has 9 + 14 ids: it also contains the 11 ids of the observation, with weight 0.
    assert (len(first.tokens), first.num_sampled) == (9 + 3, 3)
    assert (len(second.tokens), second.num_sampled) == (23 + 2, 2)
    assert trajectory.turn_rewards == [0, 1]


async def test_step_wise_prompts_are_rendered_by_the_template():
    chat = byte_chat()
    for step_wise in (False, True):
        script = [saying("ok"), ending()]
        _, policy, _ = await run_graded(
            script,
            ["<think>hm</think>one", "two"],
            chat=chat,
            settings=replace(SETTINGS, step_wise=step_wise),
        )
        shown = chat.tokenizer.decode(
            policy.calls[1].prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert ("hm" in shown) is not step_wise and "one" in shown


@pytest.mark.parametrize("observation", [saying("ok"), StepResult()])
@pytest.mark.seed_behaviour(64)
async def test_s8_thinking_is_off_in_every_generation_prompt(observation):
    chat = byte_chat()
    _, policy, _ = await run_graded([observation, ending()], ["a", "b"], chat=chat)
    assert len(policy.calls) == 2
    for call in policy.calls:
        shown = chat.tokenizer.decode(
            call.prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert shown.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")

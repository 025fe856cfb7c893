"""The length (L) and assembly (S) cases of SkyRL's generator, with its numbers. Where ours deliberately differs, the test says how.

Toy ids: an opening of one letter renders to 9, `AB` is answered as [65, 66, 2], an observation of two letters adds 11.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tinker

from src.core.errors import SandboxError
from src.core.length_limits import LengthLimits
from src.core.trajectory import (
    FailureKind,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    TrialFailure,
    Turn,
    ZeroReason,
)
from src.envs.message_env import EpisodeSettings, StepResult, run_episode, turn_seed
from src.learning.datums import sequences_of, step_sequences_of
from src.learning.filters import apply_reward_rules, is_trainable, with_failures_rewarded
from src.learning.options import FilterSettings
from src.policy.chat import Chat
from src.policy.sampling_policy import TinkerPolicy
from tests.fakes.envs import ScriptedEnv, ending, saying
from tests.fakes.policy import FakePolicy
from tests.fakes.tokenizer import ToyTokenizer, byte_chat, toy_chat
from tests.fakes.trials import task

SETTINGS = EpisodeSettings(temperature=0.7, seed=5)
OB = saying("ob")


def limits(max_input: int = 1000, *, generate: int = 50) -> LengthLimits:
    return LengthLimits(
        max_input_length=max_input,
        max_generate_length=generate,
        max_sequence_length=max_input + generate,
        context_limit=max_input + generate,
    )


@dataclass(frozen=True, kw_only=True)
class Response:
    """SkyRL's view of a trajectory that grew without a break: everything after the first prompt."""

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


async def play(
    script,
    replies,
    within: LengthLimits | None = None,
    settings: EpisodeSettings = SETTINGS,
    *,
    chat=None,
    policy=None,
    **env,
):
    chat = chat or toy_chat()
    policy = policy or FakePolicy(chat, replies)
    environment = ScriptedEnv(script, **env)
    result = await run_episode(
        environment, policy, chat, within or limits(), settings, task_id="a", trial_name="n"
    )
    assert environment.num_closed == 1
    return result, policy, environment


def filters(rule: str) -> FilterSettings:
    return FilterSettings(
        remove_constant_reward_groups=False,
        min_group_size=1,
        failed_trial_reward=None,
        apply_overlong_filtering=rule,
    )


def at(index: int, length: int, value: float = 1.0) -> list[float]:
    return [value if i == index else 0.0 for i in range(length)]


# Length


@pytest.mark.parametrize(
    ("max_input", "num_calls"), [pytest.param(22, 1, id="L1"), pytest.param(23, 2, id="L2")]
)
async def test_l1_l2_a_context_of_exactly_the_limit_is_still_answered(max_input, num_calls):
    trajectory, policy, _ = await play([OB, ending()], ["AB", "C"], limits(max_input))
    assert [len(call.prompt_ids) for call in policy.calls] == [9, 23][:num_calls]
    if num_calls == 1:
        # SkyRL says `length` for both kinds of limit; ours keeps them apart, and `input_overflow` is the metric.
        assert (
            trajectory.stop_reason == StopReason.CONTEXT_LENGTH and trajectory.metrics["input_overflow"] == 1
        )
        assert len(response(trajectory).ids) == 3
    else:
        assert trajectory.stop_reason == StopReason.STOP and trajectory.metrics["input_overflow"] == 0


async def test_l3_an_episode_that_outgrows_its_context_has_no_final_reward():
    trajectory, policy, _ = await play([OB, OB, ending()], ["AB", "C", "D"], limits(35))
    assert len(policy.calls) == 2 and trajectory.stop_reason == StopReason.CONTEXT_LENGTH
    assert (
        len(response(trajectory).ids) == 16
        and response(trajectory).rewards == [0.0] * 16
        and trajectory.reward == 0
    )


async def test_l4_one_token_more_and_the_third_turn_runs():
    trajectory, policy, _ = await play([OB, OB, ending()], ["AB", "C", "D"], limits(36))
    assert [len(call.prompt_ids) for call in policy.calls] == [9, 23, 36]
    assert trajectory.stop_reason == StopReason.STOP
    assert response(trajectory).rewards == at(28, 29)


async def test_l5_contexts_of_13_30_47_and_64_under_a_limit_of_50():
    longer = saying("obsv")
    trajectory, policy, _ = await play([longer] * 4, ["ABC"], limits(50), opening="xxxxx")
    assert [len(call.prompt_ids) for call in policy.calls] == [13, 30, 47]
    assert len(response(trajectory).ids) == 38 and trajectory.stop_reason == StopReason.CONTEXT_LENGTH


async def test_l6_a_first_prompt_over_the_limit_is_never_sent():
    # SkyRL crashes; its own minimal output is one end token with mask 0. Ours has no turn: nothing was sampled, so no token is claimed.
    trajectory, policy, environment = await play([ending()], ["AB"], limits(8))
    assert policy.calls == [] and environment.answers == []
    assert (trajectory.turns, trajectory.reward, trajectory.stop_reason) == (
        [],
        0.0,
        StopReason.CONTEXT_LENGTH,
    )
    assert sequences_of(trajectory.turns, advantage=1.0) == []


async def test_l7_a_cut_last_answer_is_masked_and_keeps_its_reward():
    trajectory, _, _ = await play([OB, OB, ending()], ["AB", "CD", "CDEFGHIJK"], limits(generate=4))
    assert trajectory.metrics["cut_answers"] == 1
    trajectory, _, _ = await play([OB, ending()], ["AB", "CDEFGHIJK"], limits(generate=4))
    assert trajectory.stop_reason == StopReason.LENGTH
    assert not is_trainable(trajectory, filters("stop_reason")) and not is_trainable(
        trajectory, filters("eos")
    )
    assert trajectory.reward == 1 and response(trajectory).rewards[-1] == 1


async def test_l8_a_cut_answer_in_the_middle_leaves_no_trace_in_the_mask():
    trajectory, policy, _ = await play([OB, ending()], ["ABCDEFGHIJK", "C"], limits(generate=8))
    assert trajectory.stop_reason == StopReason.STOP and trajectory.metrics["cut_answers"] == 1
    assert is_trainable(trajectory, filters("stop_reason"))
    # SkyRL's mask is [1]*8 + [0]*11 + [1]*2: it goes on without ending the cut message. Ours ends it, with one unweighted token, as the
    # template would; the model never sees a message that does not end.
    assert response(trajectory).mask == [1] * 8 + [0] * 12 + [1] * 2
    assert policy.calls[1].prompt_ids[9 + 8] == 2


@pytest.mark.parametrize(("rule", "is_trained"), [("stop_reason", False), ("eos", True), ("off", True)])
async def test_l9_the_two_overlong_rules_differ_where_the_context_ran_out(rule, is_trained):
    trajectory, _, _ = await play([OB], ["AB"], limits(22))
    assert response(trajectory).ids == [65, 66, 2]
    assert is_trainable(trajectory, filters(rule)) is is_trained


async def test_l10_a_cut_last_answer_may_cost_every_reward_and_no_mask():
    trajectory, _, _ = await play(
        [replace(OB, reward=0.5), ending()], ["AB", "CDEFGHIJK"], limits(generate=4)
    )
    assert trajectory.reward == 1.5
    group = TrajectoryGroup(task=task("a"), trajectories=[trajectory])
    [zeroed] = apply_reward_rules([group], replace(filters("off"), zero_reward_on_non_stop=True))
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
    trajectory, _, _ = await play([ending()], ["AB"])
    before = response(trajectory)
    assert is_trainable(replace(trajectory, stop_reason=stop), filters("stop_reason")) is is_trained
    assert response(trajectory) == before


async def test_l12_tokens_and_logprobs_of_different_lengths_are_refused():
    # One record per turn leaves no parallel lists to disagree; the border where they could is the sampler's answer.
    class ShortOfALogprob:
        async def sample(self, *_, **__):
            sequence = tinker.SampledSequence(
                stop_reason="stop", sequence_id="s", _tokens_list=[65, 66, 2], _logprobs_list=[-0.5, -0.5]
            )
            return tinker.SampleResponse(sequences=[sequence])

    result, _, environment = await play([ending()], [], policy=TinkerPolicy(ShortOfALogprob(), 0))
    assert isinstance(result, TrialFailure) and result.kind == FailureKind.BACKEND
    assert "3 tokens came back with 2 logprobs" in result.message and environment.answers == []


# Assembly


async def test_s1_two_turns():
    trajectory, policy, environment = await play([OB, ending()], ["AB", "C"])
    got = response(trajectory)
    assert got.ids == [65, 66, 2, 3, 1, 117, 3, 111, 98, 2, 3, 1, 97, 3, 67, 2]
    assert got.mask == [1, 1, 1] + [0] * 11 + [1, 1]
    assert got.logprobs == [-0.5 if weight else 0.0 for weight in got.mask]
    assert got.rewards == at(15, 16)
    first, second = (call.prompt_ids for call in policy.calls)
    assert (len(first), len(second)) == (9, 23) and second == first + got.ids[:14]
    assert environment.answers == ["AB", "C"]
    assert trajectory.stop_reason == StopReason.STOP and trajectory.trial_name == "n"


async def test_s2_rewards_stay_with_the_turn_that_earned_them():
    trajectory, _, _ = await play([replace(OB, reward=0.5), ending()], ["AB", "C"])
    assert response(trajectory).rewards == [a + b for a, b in zip(at(2, 16, 0.5), at(15, 16), strict=True)]
    assert trajectory.reward == 1.5


async def test_s3_what_comes_after_the_last_answer_is_dropped():
    with_more, _, _ = await play([OB, replace(OB, reward=1.0, is_done=True)], ["AB", "C"])
    without, _, _ = await play([OB, ending()], ["AB", "C"])
    assert response(with_more) == response(without)


async def test_s4_without_an_observation_the_agent_goes_on_from_a_generation_prompt():
    trajectory, _, _ = await play([StepResult(), ending()], ["AB", "C"])
    # SkyRL inserts [1, 97, 3] alone; ours also has the newline (3) that the template puts after every message.
    assert response(trajectory).ids == [65, 66, 2, 3, 1, 97, 3, 67, 2]
    assert response(trajectory).mask == [1, 1, 1, 0, 0, 0, 0, 1, 1]


async def test_s5_an_end_token_that_was_not_sampled_has_no_weight():
    class StopsAtABracket(FakePolicy):
        async def sample(self, request):
            turn = await super().sample(request)
            return replace(turn, completion_ids=turn.completion_ids[:-1], logprobs=turn.logprobs[:-1])

    chat = toy_chat()
    trajectory, _, _ = await play([OB, ending()], [], policy=StopsAtABracket(chat, ["A]", "C]"]))
    # SkyRL's mask is [1,1,0] + [0]*11 + [1,1,0]; ours appends no end token after the last answer, where nothing follows it.
    assert response(trajectory).ids[:3] == [65, 93, 2]
    assert response(trajectory).mask == [1, 1, 0] + [0] * 11 + [1, 1]
    assert response(trajectory).rewards == at(15, 16)


async def test_s7_step_by_step_each_turn_is_a_sample():
    trajectory, policy, _ = await play(
        [OB, ending()], ["AB", "C"], settings=replace(SETTINGS, step_wise=True)
    )
    first, second = step_sequences_of(trajectory.turns, advantage=1.0)
    assert [len(call.prompt_ids) for call in policy.calls] == [9, 23]
    # SkyRL's first sample is 9 + 14: it also carries the 11 ids of the observation, which weigh nothing.
    assert (len(first.tokens), first.num_sampled) == (9 + 3, 3)
    assert (len(second.tokens), second.num_sampled) == (23 + 2, 2)
    assert trajectory.turn_rewards == [0, 1]


async def test_step_by_step_the_history_is_shown_as_the_template_shows_it():
    chat = byte_chat()
    for step_wise in (False, True):
        script = [saying("ok"), ending()]
        _, policy, _ = await play(
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
async def test_s8_thinking_is_off_in_every_generation_prompt(observation):
    chat = byte_chat()
    _, policy, _ = await play([observation, ending()], ["a", "b"], chat=chat)
    assert len(policy.calls) == 2
    for call in policy.calls:
        shown = chat.tokenizer.decode(
            call.prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert shown.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


# The borders


class Shouting(ToyTokenizer):
    """A template that shows a T for every tool."""

    def apply_chat_template(self, conversation, *, tools, **options):
        return ("T" * len(tools) if tools else "") + super().apply_chat_template(
            conversation, tools=tools, **options
        )


TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"properties": {}}}}
    for name in ("f", "g")
]


async def test_native_tools_are_in_the_first_prompt_and_stay_there():
    script = [saying("ob", role="tool"), ending()]
    native = replace(SETTINGS, use_native_tool_calling=True)
    _, policy, _ = await play(
        script, ["AB", "C"], settings=native, chat=Chat(Shouting()), tools=TOOLS, use_native_tool_calling=True
    )
    assert policy.calls[0].prompt_ids[:3] == [84, 84, 1]
    assert policy.calls[1].prompt_ids[:3] == [84, 84, 1] and policy.calls[1].prompt_ids.count(84) == 2


@pytest.mark.parametrize(("env", "run"), [(False, False), (False, True), (True, False), (True, True)])
async def test_tools_are_native_only_where_environment_and_run_both_want_it(env, run):
    settings = replace(SETTINGS, use_native_tool_calling=run)
    _, policy, _ = await play(
        [ending()], ["A"], settings=settings, chat=Chat(Shouting()), tools=TOOLS, use_native_tool_calling=env
    )
    prompt = "".join(map(chr, policy.calls[0].prompt_ids))
    assert prompt.startswith("TT") == (env and run)
    assert ("- f(): d" in prompt and "- g(): d" in prompt) == (not (env and run))


@pytest.mark.parametrize(("env", "run"), [(False, False), (True, True)])
async def test_without_tools_there_is_nothing_to_show_in_either_mode(env, run):
    settings = replace(SETTINGS, use_native_tool_calling=run)
    _, policy, _ = await play(
        [ending()], ["A"], settings=settings, chat=Chat(Shouting()), use_native_tool_calling=env
    )
    assert len(policy.calls[0].prompt_ids) == 9


async def test_tools_in_words_are_added_to_the_system_message_there_is():
    opening = [{"role": "system", "content": "policy"}, {"role": "user", "content": "x"}]
    trajectory, _, _ = await play([ending()], ["A"], opening=opening, tools=TOOLS)
    roles = [message["role"] for message in trajectory.conversation]
    assert roles == ["system", "user", "assistant"]
    assert trajectory.conversation[0]["content"].startswith("policy\n\nYou can call a function")


async def test_a_failed_start_is_a_failure_and_becomes_a_minimal_trajectory_only_where_asked():
    # SkyRL always makes it a trajectory of reward 0; ours leaves the group unless failed_trial_reward=0.
    failure, policy, _ = await play([], ["AB"], opening=RuntimeError("no user simulator"))
    assert isinstance(failure, TrialFailure) and policy.calls == []
    assert (failure.kind, failure.message) == (FailureKind.ENV_INIT_FAILED, "RuntimeError: no user simulator")
    [stand_in] = with_failures_rewarded(
        TrajectoryGroup(task=task("a"), trajectories=[], failures=[failure]), 0
    ).trajectories
    assert (stand_in.turns, stand_in.reward) == ([], 0) and not is_trainable(stand_in, filters("stop_reason"))


async def test_an_answer_that_makes_the_environment_raise_is_worth_0_and_the_log_says_on_which_line(caplog):
    apply_reward_rules = StepResult(messages=OB.messages, reward=0.5)
    trajectory, _, _ = await play([apply_reward_rules, ValueError("bad state")], ["AB", "C"])
    assert isinstance(trajectory, Trajectory)
    assert (trajectory.reward, trajectory.turn_rewards, trajectory.zero_reason) == (
        0.0,
        [0.0, 0.0],
        ZeroReason.ENV_ERROR,
    )
    assert [len(turn.completion_ids) > 0 for turn in trajectory.turns] == [True, True], (
        "the answer that did it is trained"
    )
    [record] = [record for record in caplog.records if record.name.startswith("src.")]
    assert record.exc_info is not None and "in step" in caplog.text


async def test_an_answer_that_makes_the_environment_end_the_process_is_worth_0():
    class Exiting(ScriptedEnv):
        async def step(self, answer: str) -> StepResult:
            raise SystemExit("usage: ...")

    chat = toy_chat()
    trajectory = await run_episode(
        Exiting([]), FakePolicy(chat, ["AB"]), chat, limits(), SETTINGS, task_id="t"
    )
    assert isinstance(trajectory, Trajectory) and trajectory.zero_reason is ZeroReason.ENV_ERROR


@pytest.mark.parametrize(
    "error", [ConnectionError("refused"), TimeoutError("no reply"), SandboxError("no customer")]
)
async def test_what_no_answer_can_cause_is_a_failure(error):
    failure, _, _ = await play([error], ["AB"])
    assert isinstance(failure, TrialFailure) and failure.kind == FailureKind.ENV_ERROR


async def test_what_cannot_be_written_down_is_a_failure():
    class Broken(ScriptedEnv):
        async def step(self, answer: str) -> StepResult:
            return StepResult(messages=[{"role": "user", "content": "x", "extra": object()}], is_done=True)

    chat = toy_chat()
    result = await run_episode(Broken([]), FakePolicy(chat, ["AB"]), chat, limits(), SETTINGS, task_id="t")
    assert isinstance(result, TrialFailure) and result.kind == FailureKind.ENV_ERROR


async def test_an_environments_own_timeout_is_its_own_failure():
    failure, _, _ = await play([TimeoutError("user simulator")], ["AB"])
    assert isinstance(failure, TrialFailure) and failure.kind == FailureKind.ENV_ERROR


async def test_a_cancelled_episode_closes_its_environment():
    environment = ScriptedEnv([], hang_at=1)
    chat = toy_chat()
    playing = asyncio.create_task(
        run_episode(environment, FakePolicy(chat, ["AB"]), chat, limits(), SETTINGS, task_id="a")
    )
    await environment.hangs.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert environment.num_closed == 1


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
async def test_a_reward_that_is_no_number_is_worth_0(reward):
    trajectory, _, _ = await play([saying("ok", reward=reward), ending()], ["A", "B"])
    assert isinstance(trajectory, Trajectory)
    assert (trajectory.reward, trajectory.turn_rewards, trajectory.zero_reason) == (
        0.0,
        [0.0],
        ZeroReason.UNREADABLE_REWARD,
    )


async def test_an_environment_that_hangs_while_it_closes_is_left(monkeypatch):
    class Hanging(ScriptedEnv):
        async def close(self):
            await asyncio.Event().wait()

    monkeypatch.setattr("src.envs.message_env.CLOSE_TIMEOUT_S", 0.01)
    chat = toy_chat()
    playing = run_episode(Hanging([ending()]), FakePolicy(chat, ["A"]), chat, limits(), SETTINGS, task_id="a")
    async with asyncio.timeout(10):
        assert isinstance(await playing, Trajectory)


async def test_an_environment_that_ends_the_process_while_it_closes_is_left():
    class Exiting(ScriptedEnv):
        async def close(self):
            raise SystemExit(3)

    chat = toy_chat()
    result = await run_episode(
        Exiting([ending()]), FakePolicy(chat, ["A"]), chat, limits(), SETTINGS, task_id="a"
    )
    assert isinstance(result, Trajectory)


async def test_an_empty_answer_is_seen_by_the_environment_and_trains_nothing():
    class Silent(FakePolicy):
        async def sample(self, request) -> Turn:
            turn = await super().sample(request)
            return replace(turn, completion_ids=[], logprobs=[]) if len(self.calls) == 2 else turn

    chat = toy_chat()
    script = [OB, saying("say something", reward=0.25), ending()]
    trajectory, _, environment = await play(script, [], policy=Silent(chat, ["AB", "", "C"]))
    assert environment.answers == ["AB", "", "C"]
    assert len(trajectory.turns) == 2 and trajectory.metrics["empty_completions"] == 1
    assert trajectory.turn_rewards == [0.25, 1.0] and trajectory.reward == 1.25
    assert sum(response(trajectory).mask) == 5


async def test_nothing_but_empty_answers_is_a_trajectory_without_tokens():
    class Mute(FakePolicy):
        async def sample(self, request) -> Turn:
            return replace(await super().sample(request), completion_ids=[], logprobs=[])

    trajectory, policy, _ = await play([StepResult()] * 100, [], limits(60), policy=Mute(toy_chat(), [""]))
    assert (trajectory.turns, trajectory.reward, trajectory.stop_reason) == ([], 0, StopReason.CONTEXT_LENGTH)
    assert len(policy.calls) < 20  # every turn costs context, so it ends


async def test_turns_are_bounded_and_seeded_by_their_number():
    trajectory, policy, _ = await play([OB] * 3, ["AB"], settings=replace(SETTINGS, max_turns=2))
    assert trajectory.stop_reason == StopReason.MAX_TURNS and len(trajectory.turns) == 2
    assert [call.seed for call in policy.calls] == [turn_seed(5, 1), turn_seed(5, 2)]
    assert [call.temperature for call in policy.calls] == [0.7, 0.7]
    assert [call.stop_token_ids for call in policy.calls] == [[2], [2]]


async def test_metrics_of_the_environment_are_the_trajectorys():
    trajectory, _, _ = await play(
        [saying("ob", tool_calls=1.0), saying(is_done=True, tool_calls=2.0)], ["AB", "C"]
    )
    assert trajectory.metrics["tool_calls"] == 2 and trajectory.metrics["duration_s"] >= 0


async def test_rewards_that_are_reckoned_in_numpy_can_be_written_down():
    env = (
        saying("ob", reward=np.float32(0.5), score=np.float64(2)),
        saying(is_done=True, reward=np.float32(0.5)),
    )
    trajectory, _, _ = await play(list(env), ["AB", "C"])
    assert json.loads(json.dumps([trajectory.reward, trajectory.turn_rewards, dict(trajectory.metrics)]))[
        :2
    ] == [1.0, [0.5, 0.5]]

from __future__ import annotations

from dataclasses import replace

import pytest
from harbor.llms.base import ContextLengthExceededError
from harbor.llms.chat import Chat as HarborChat

from src.core.errors import BackendError
from src.core.length_limits import LengthLimits
from src.core.trajectory import StopReason, Turn
from src.envs.harbor.tinker_llm import EpisodeOver, SamplingLimits, TinkerLLM
from src.policy.sampling_policy import SampleRequest
from tests.fakes.policy import FakePolicy
from tests.fakes.tokenizer import byte_chat


def lengths(
    *, max_tokens: int = 100, context_limit: int = 2000, max_input_length: int | None = None
) -> LengthLimits:
    return LengthLimits(
        max_input_length=context_limit - 1 if max_input_length is None else max_input_length,
        max_generate_length=max_tokens,
        max_sequence_length=context_limit,
        context_limit=context_limit,
    )


LIMITS = SamplingLimits(
    temperature=0.7, seed=5, lengths=lengths(), max_consecutive_truncations=2, summarize=True
)


def llm_saying(*replies: str | Exception, limits: SamplingLimits = LIMITS) -> tuple[TinkerLLM, FakePolicy]:
    chat = byte_chat()
    policy = FakePolicy(chat, replies)
    return TinkerLLM(policy=policy, chat=chat, limits=limits, model_name="org/model"), policy


async def test_a_growing_conversation_never_encodes_an_answer_again() -> None:
    # The template strips thinking from history; the recorded ids must keep it.
    llm, policy = llm_saying("<think>hm</think>one", "two", "three")
    conversation = HarborChat(llm)
    for prompt in ("a", "b", "c"):
        await conversation.chat(prompt)
    first, second, third = llm.turns
    for earlier, later in ((first, second), (second, third)):
        both = earlier.prompt_ids + earlier.completion_ids
        assert later.prompt_ids[: len(both)] == both
    assert [turn.prompt_ids for turn in llm.turns] == [call.prompt_ids for call in policy.calls]
    assert llm.prefix_breaks == 0
    assert [message["content"] for message in conversation.messages] == [
        "a",
        "<think>hm</think>one",
        "b",
        "two",
        "c",
        "three",
    ]


async def test_each_call_has_its_own_seed_and_the_same_trial_the_same_seeds() -> None:
    seeds = []
    for _ in range(2):
        llm, policy = llm_saying("x")
        conversation = HarborChat(llm)
        await conversation.chat("a")
        await conversation.chat("b")
        seeds.append([call.seed for call in policy.calls])
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 2
    llm, policy = llm_saying("x", limits=replace(LIMITS, seed=6))
    await HarborChat(llm).chat("a")
    assert policy.calls[0].seed not in seeds[0]
    assert policy.calls[0].temperature == 0.7


async def test_a_cut_answer_is_an_answer_and_several_in_a_row_end_the_episode() -> None:
    llm, _ = llm_saying("x" * 300, "fine", "y" * 300, "z" * 300)
    conversation = HarborChat(llm)
    response = await conversation.chat("a")
    assert response.content == "x" * 100
    await conversation.chat("b")
    await conversation.chat("c")
    with pytest.raises(EpisodeOver) as over:
        await conversation.chat("d")
    assert over.value.cause == StopReason.LENGTH
    assert [turn.stop_reason for turn in llm.turns] == [
        StopReason.LENGTH,
        StopReason.STOP,
        StopReason.LENGTH,
        StopReason.LENGTH,
    ]
    assert (
        llm.turns[1].prompt_ids[: len(llm.turns[0].prompt_ids) + 100]
        == llm.turns[0].prompt_ids + llm.turns[0].completion_ids
    )


class SilentPolicy(FakePolicy):
    async def sample(self, request: SampleRequest) -> Turn:
        turn = await super().sample(request)
        return replace(turn, completion_ids=[], logprobs=[]) if len(self.calls) > 1 else turn


async def test_empty_answers_are_counted_and_not_trained() -> None:
    chat = byte_chat()
    policy = SilentPolicy(chat, ["hello"])
    llm = TinkerLLM(
        policy=policy, chat=chat, limits=replace(LIMITS, max_consecutive_truncations=3), model_name="m"
    )
    conversation = HarborChat(llm)
    await conversation.chat("a")
    assert (await conversation.chat("b")).content == ""
    await conversation.chat("c")
    with pytest.raises(EpisodeOver):
        await conversation.chat("d")
    assert len(llm.turns) == 1 and llm.empty_completions == 3 and llm.prefix_breaks == 0
    assert policy.calls[2].prompt_ids[: len(policy.calls[1].prompt_ids)] == policy.calls[1].prompt_ids


async def test_the_last_answer_is_cut_where_the_context_ends() -> None:
    llm, policy = llm_saying("x" * 300, limits=replace(LIMITS, lengths=lengths(context_limit=90)))
    await HarborChat(llm).chat("a")
    assert len(policy.calls[0].prompt_ids) + policy.calls[0].max_tokens == 90
    assert len(llm.turns[0].prompt_ids) + len(llm.turns[0].completion_ids) == 90


async def test_a_full_context_ends_the_episode_or_asks_for_a_summary_once() -> None:
    llm, _ = llm_saying("x", limits=replace(LIMITS, lengths=lengths(context_limit=150), summarize=False))
    with pytest.raises(EpisodeOver) as over:
        await HarborChat(llm).chat("a" * 200)
    assert over.value.cause == StopReason.CONTEXT_LENGTH
    llm, _ = llm_saying("x", limits=replace(LIMITS, lengths=lengths(context_limit=150)))
    with pytest.raises(ContextLengthExceededError):
        await HarborChat(llm).chat("a" * 200)
    with pytest.raises(EpisodeOver):
        await HarborChat(llm).chat("a" * 200)
    assert llm.turns == []


async def test_an_overflow_after_an_answer_or_of_a_subagent_is_no_second_in_a_row() -> None:
    llm, _ = llm_saying("x", limits=replace(LIMITS, lengths=lengths(context_limit=150)))
    for _ in range(2):
        with llm.recording_apart(), pytest.raises(ContextLengthExceededError):
            await llm.call("a" * 200, message_history=[])
        with pytest.raises(ContextLengthExceededError):
            await HarborChat(llm).chat("a" * 200)
        await HarborChat(llm).chat("a")


async def test_harbor_has_skyrls_limit_on_what_is_still_answered() -> None:
    llm, policy = llm_saying("x")
    conversation = HarborChat(llm)
    for _ in range(2):
        await conversation.chat("a")
    second = len(policy.calls[1].prompt_ids)
    for max_input_length, num_answered in ((second, 2), (second - 1, 1)):
        llm, policy = llm_saying(
            "x", limits=replace(LIMITS, lengths=lengths(max_input_length=max_input_length), summarize=False)
        )
        assert llm.get_model_context_limit() == max_input_length + 1
        conversation = HarborChat(llm)
        with pytest.raises(EpisodeOver) as over:
            for _ in range(3):
                await conversation.chat("a")
        assert over.value.cause == StopReason.CONTEXT_LENGTH
        assert len(policy.calls) == num_answered


async def test_a_rewritten_history_breaks_the_prefix_once_and_then_grows_exactly_again() -> None:
    llm, _ = llm_saying("one", "two", "three", "four")
    conversation = HarborChat(llm)
    await conversation.chat("a")
    await conversation.chat("b")
    # As after a summary: an odd number of messages, the first one kept.
    conversation._messages = [
        conversation.messages[0],
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>x</think>s"},
    ]
    await conversation.chat("c")
    await conversation.chat("d")
    assert llm.prefix_breaks == 1
    third, fourth = llm.turns[2:]
    both = third.prompt_ids + third.completion_ids
    assert fourth.prompt_ids[: len(both)] == both


async def test_the_ids_of_a_conversation_never_stand_for_another_as_long() -> None:
    llm, policy = llm_saying("one", "two", "three", "four")
    conversation = HarborChat(llm)
    await conversation.chat("a")
    await conversation.chat("b")
    other = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "s"}]
    for prompt in ("c", "d"):  # the second time the other conversation is the one that is recorded
        conversation._messages = list(other)
        await conversation.chat(prompt)
        assert policy.calls[-1].prompt_ids == byte_chat().render(
            [*other, {"role": "user", "content": prompt}]
        )


async def test_going_back_in_a_conversation_keeps_the_exact_ids_of_what_stays() -> None:
    llm, _ = llm_saying("<think>1</think>one", "two", "three")
    conversation = HarborChat(llm)
    await conversation.chat("a")
    await conversation.chat("b")
    conversation._messages = conversation.messages[:2]
    await conversation.chat("c")
    both = llm.turns[0].prompt_ids + llm.turns[0].completion_ids
    assert llm.turns[2].prompt_ids[: len(both)] == both
    assert llm.prefix_breaks == 1


async def test_subagents_are_recorded_apart_and_leave_the_conversation_alone() -> None:
    llm, _ = llm_saying("one", "summary", "short", "two")
    conversation = HarborChat(llm)
    await conversation.chat("a")
    with llm.recording_apart():
        await llm.call("summarise", message_history=conversation.messages)
    await llm.call("no history at all")
    await conversation.chat("b")
    assert len(llm.turns) == 2 and len(llm.subagent_turns) == 2 and llm.prefix_breaks == 0
    assert llm.all_turns == [llm.turns[0], *llm.subagent_turns, llm.turns[1]]


async def test_tokens_are_counted_by_the_models_tokenizer() -> None:
    llm, _ = llm_saying("one")
    conversation = HarborChat(llm)
    assert llm.count_tokens([]) == 0
    await conversation.chat("a")
    turn = llm.turns[0]
    assert llm.count_tokens(conversation.messages) == len(turn.prompt_ids) + len(turn.completion_ids)
    other = [{"role": "user", "content": "unknown"}]
    assert llm.count_tokens(other) == len(byte_chat().render(other))


@pytest.mark.parametrize("error", [BackendError("sampling: gone"), RuntimeError("a foreign one")])
async def test_a_backend_error_passes_through_everything_that_catches_exceptions(error: Exception) -> None:
    llm, policy = llm_saying(error)
    with pytest.raises(EpisodeOver) as over:
        try:
            await HarborChat(llm).chat("a")
        except Exception:
            pytest.fail("an Exception would be retried or swallowed by Harbor")
    assert isinstance(over.value.cause, BackendError)
    assert len(policy.calls) == 1 and llm.turns == []

"""Tests `TinkerLLM`: exact ids, limits, prefix breaks and errors of a conversation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harbor.llms.base import ContextLengthExceededError
from harbor.llms.chat import Chat as HarborChat

from src.core.errors import BackendError, PromptTooLong
from src.core.length_limits import LengthLimits
from src.core.trajectory import StopReason, Turn
from src.envs.harbor.tinker_llm import EpisodeEnd, SamplingLimits, TinkerLLM
from src.policy.sampling_policy import SampleRequest
from tests.fakes.policy import FakePolicy
from tests.fakes.tokenizer import byte_chat


def lengths(*, context_limit: int = 2000, max_input_length: int | None = None) -> LengthLimits:
    return LengthLimits(
        max_input_length=context_limit - 1 if max_input_length is None else max_input_length,
        max_generate_length=100,
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


async def converse(llm: TinkerLLM, *prompts: str) -> HarborChat:
    conversation = HarborChat(llm)
    for prompt in prompts:
        await conversation.chat(prompt)
    return conversation


def extends(later: Turn, earlier: Turn) -> bool:
    """Return whether the prompt of `later` starts with the exact ids of `earlier`."""
    ids = [*earlier.prompt_ids, *earlier.completion_ids]
    return list(later.prompt_ids[: len(ids)]) == ids


async def test_the_prompts_of_a_conversation_extend_each_other() -> None:
    # The template strips thinking from history; the recorded ids must keep it.
    llm, _ = llm_saying("<think>hm</think>one", "two", "three")
    await converse(llm, "a", "b", "c")
    first, second, third = llm.turns
    assert extends(second, first) and extends(third, second) and llm.prefix_breaks == 0


async def test_the_recorded_prompts_are_those_that_were_sampled() -> None:
    llm, policy = llm_saying("<think>hm</think>one", "two")
    await converse(llm, "a", "b")
    assert [turn.prompt_ids for turn in llm.turns] == [call.prompt_ids for call in policy.calls]


async def test_harbor_receives_the_whole_answers() -> None:
    llm, _ = llm_saying("<think>hm</think>one", "two")
    conversation = await converse(llm, "a", "b")
    contents = [message["content"] for message in conversation.messages]
    assert contents == ["a", "<think>hm</think>one", "b", "two"]


async def seeds_of(seed: int) -> list[int | None]:
    llm, policy = llm_saying("x", limits=replace(LIMITS, seed=seed))
    await converse(llm, "a", "b")
    return [call.seed for call in policy.calls]


async def test_each_call_has_a_seed_of_its_own() -> None:
    assert len(set(await seeds_of(5))) == 2


async def test_the_seeds_of_a_trial_are_reproducible() -> None:
    assert await seeds_of(5) == await seeds_of(5)


async def test_the_seeds_of_two_trials_differ() -> None:
    assert not set(await seeds_of(5)) & set(await seeds_of(6))


async def test_a_cut_answer_is_returned() -> None:
    llm, _ = llm_saying("x" * 300)
    response = await HarborChat(llm).chat("a")
    assert response.content == "x" * 100 and llm.turns[0].stop_reason == StopReason.LENGTH


async def test_a_prompt_extends_a_cut_answer() -> None:
    llm, _ = llm_saying("x" * 300, "fine")
    await converse(llm, "a", "b")
    assert extends(llm.turns[1], llm.turns[0])


async def test_consecutive_cut_answers_end_the_episode() -> None:
    llm, _ = llm_saying("x" * 300, "fine", "y" * 300, "z" * 300)
    conversation = await converse(llm, "a", "b", "c")
    with pytest.raises(EpisodeEnd) as end:
        await conversation.chat("d")
    assert end.value.cause == StopReason.LENGTH and len(llm.turns) == 4


class EmptyAnswers(FakePolicy):
    """A policy whose answers after the first one are empty."""

    async def sample(self, request: SampleRequest) -> Turn:
        turn = await super().sample(request)
        return replace(turn, completion_ids=[], logprobs=[]) if len(self.calls) > 1 else turn


@pytest.fixture
def llm_with_empty_answers() -> TinkerLLM:
    chat = byte_chat()
    limits = replace(LIMITS, max_consecutive_truncations=3)
    return TinkerLLM(policy=EmptyAnswers(chat, ["hello"]), chat=chat, limits=limits, model_name="m")


async def test_empty_answers_are_counted_and_not_trained(llm_with_empty_answers: TinkerLLM) -> None:
    llm = llm_with_empty_answers
    await converse(llm, "a", "b", "c")
    assert (len(llm.turns), llm.empty_completions, llm.prefix_breaks) == (1, 2, 0)


async def test_an_empty_answer_is_returned(llm_with_empty_answers: TinkerLLM) -> None:
    conversation = await converse(llm_with_empty_answers, "a")
    assert (await conversation.chat("b")).content == ""


async def test_consecutive_empty_answers_end_the_episode(llm_with_empty_answers: TinkerLLM) -> None:
    conversation = await converse(llm_with_empty_answers, "a", "b", "c")
    with pytest.raises(EpisodeEnd):
        await conversation.chat("d")


async def test_the_last_answer_is_cut_where_the_context_ends() -> None:
    llm, policy = llm_saying("x" * 300, limits=replace(LIMITS, lengths=lengths(context_limit=90)))
    await HarborChat(llm).chat("a")
    assert len(policy.calls[0].prompt_ids) + policy.calls[0].max_tokens == 90
    assert len(llm.turns[0].prompt_ids) + len(llm.turns[0].completion_ids) == 90


SHORT_CONTEXT = replace(LIMITS, lengths=lengths(context_limit=150))
LONG_PROMPT = "a" * 200


@pytest.mark.seed_behaviour(132)
async def test_a_full_context_ends_an_episode_without_summaries() -> None:
    llm, _ = llm_saying("x", limits=replace(SHORT_CONTEXT, summarize=False))
    with pytest.raises(EpisodeEnd) as end:
        await HarborChat(llm).chat(LONG_PROMPT)
    assert end.value.cause == StopReason.CONTEXT_LENGTH and llm.turns == []


@pytest.mark.seed_behaviour(132)
async def test_a_full_context_requests_one_summary() -> None:
    llm, _ = llm_saying("x", limits=SHORT_CONTEXT)
    with pytest.raises(ContextLengthExceededError):
        await HarborChat(llm).chat(LONG_PROMPT)
    with pytest.raises(EpisodeEnd):
        await HarborChat(llm).chat(LONG_PROMPT)


@pytest.mark.parametrize("summarize", [True, False])
async def test_a_refused_later_prompt_is_a_full_context(summarize: bool) -> None:
    llm, _ = llm_saying(
        "x", PromptTooLong("maximum context length"), limits=replace(LIMITS, summarize=summarize)
    )
    conversation = await converse(llm, "a")
    if summarize:
        with pytest.raises(ContextLengthExceededError):
            await conversation.chat("b")
    with pytest.raises(EpisodeEnd) as end:
        await conversation.chat("b")
    assert end.value.cause == StopReason.CONTEXT_LENGTH and len(llm.turns) == 1


async def test_a_refused_first_prompt_is_a_backend_error() -> None:
    llm, _ = llm_saying(PromptTooLong("maximum context length"))
    with pytest.raises(EpisodeEnd) as end:
        await HarborChat(llm).chat("a")
    assert isinstance(end.value.cause, BackendError)


async def test_an_answer_resets_the_number_of_overflows() -> None:
    llm, _ = llm_saying("x", limits=SHORT_CONTEXT)
    for _ in range(2):
        with pytest.raises(ContextLengthExceededError):
            await HarborChat(llm).chat(LONG_PROMPT)
        await HarborChat(llm).chat("a")


async def test_an_overflow_of_a_subagent_does_not_count() -> None:
    llm, _ = llm_saying("x", limits=SHORT_CONTEXT)
    with llm.subagent_calls(), pytest.raises(ContextLengthExceededError):
        await llm.call(LONG_PROMPT, message_history=[])
    with pytest.raises(ContextLengthExceededError):
        await HarborChat(llm).chat(LONG_PROMPT)


@pytest.mark.parametrize(("excess", "num_answered"), [(0, 2), (1, 1)])
async def test_max_input_length_is_the_longest_answered_prompt(excess: int, num_answered: int) -> None:
    llm, policy = llm_saying("x")
    await converse(llm, "a", "a")
    limit = len(policy.calls[1].prompt_ids) - excess
    limits = replace(LIMITS, lengths=lengths(max_input_length=limit), summarize=False)
    llm, policy = llm_saying("x", limits=limits)
    with pytest.raises(EpisodeEnd) as end:
        await converse(llm, "a", "a", "a")
    assert end.value.cause == StopReason.CONTEXT_LENGTH and len(policy.calls) == num_answered


def test_harbor_receives_the_first_length_without_an_answer() -> None:
    llm, _ = llm_saying("x", limits=replace(LIMITS, lengths=lengths(max_input_length=99)))
    assert llm.get_model_context_limit() == 100


async def test_a_rewritten_history_breaks_the_prefix_once() -> None:
    llm, _ = llm_saying("one", "two", "three", "four")
    conversation = await converse(llm, "a", "b")
    # A summary leaves an odd number of messages and keeps the first one.
    conversation.messages[1:] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>x</think>s"},
    ]
    await conversation.chat("c")
    await conversation.chat("d")
    assert llm.prefix_breaks == 1 and extends(llm.turns[3], llm.turns[2])


async def test_another_history_of_equal_length_is_rendered() -> None:
    llm, policy = llm_saying("one", "two", "three", "four")
    conversation = await converse(llm, "a", "b")
    new_history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "s"}]
    for prompt in ("c", "d"):  # The first iteration replaces the recorded conversation.
        conversation.messages[:] = new_history
        await conversation.chat(prompt)
        rendered = byte_chat().render([*new_history, {"role": "user", "content": prompt}])
        assert policy.calls[-1].prompt_ids == rendered


async def test_a_shortened_history_keeps_its_exact_ids() -> None:
    llm, _ = llm_saying("<think>1</think>one", "two", "three")
    conversation = await converse(llm, "a", "b")
    del conversation.messages[2:]
    await conversation.chat("c")
    assert extends(llm.turns[2], llm.turns[0]) and llm.prefix_breaks == 1


async def test_subagent_calls_are_not_part_of_the_conversation() -> None:
    llm, _ = llm_saying("one", "summary", "short", "two")
    conversation = await converse(llm, "a")
    with llm.subagent_calls():
        await llm.call("summarise", message_history=conversation.messages)
    await llm.call("no history at all")
    await conversation.chat("b")
    assert (len(llm.turns), len(llm.subagent_turns), llm.prefix_breaks) == (2, 2, 0)
    assert llm.all_turns == [llm.turns[0], *llm.subagent_turns, llm.turns[1]]


async def test_tokens_are_counted_by_the_tokenizer_of_the_model() -> None:
    llm, _ = llm_saying("one")
    conversation = HarborChat(llm)
    assert llm.count_tokens([]) == 0
    await conversation.chat("a")
    turn = llm.turns[0]
    assert llm.count_tokens(conversation.messages) == len(turn.prompt_ids) + len(turn.completion_ids)
    messages = [{"role": "user", "content": "unknown"}]
    assert llm.count_tokens(messages) == len(byte_chat().render(messages))


@pytest.mark.parametrize("error", [BackendError("sampling: gone"), RuntimeError("foreign")])
async def test_a_backend_error_ends_the_episode_by_a_base_exception(error: Exception) -> None:
    llm, policy = llm_saying(error)
    with pytest.raises(EpisodeEnd) as end:
        try:
            await HarborChat(llm).chat("a")
        except Exception:
            pytest.fail("Harbor would retry or suppress an Exception")
    assert isinstance(end.value.cause, BackendError) and len(policy.calls) == 1

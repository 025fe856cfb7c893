"""Tests that exactly the sampled tokens are trained, each once, at its position and with its logprob."""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from harbor.llms.base import ContextLengthExceededError
from harbor.llms.chat import Chat as HarborChat
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.toy_retail.tokenizer import CHAT_TEMPLATE
from src.core.length_limits import LengthLimits
from src.core.trajectory import StopReason, Trajectory, Turn
from src.envs.harbor.tinker_llm import EpisodeEnd, SamplingLimits, TinkerLLM
from src.envs.message_env import EpisodeSettings, run_episode
from src.envs.service.service_env import ServiceEnv
from src.envs.service.toy_retail import TOOLS, Database, ToyRetailEpisode
from src.envs.service.user_simulator import ScriptedUserSimulator
from src.learning.datums import TokenSequence, sequences_of, step_sequences_of, to_datum
from src.policy.chat import Chat
from src.policy.sampling_policy import SampleRequest
from tests.fakes.envs import ScriptedEnv, saying
from tests.fakes.policy import FakePolicy
from tests.fakes.tokenizer import byte_chat, byte_tokenizer, toy_chat

CHATS = {"thinking is removed from history": byte_chat(), "history is unchanged": toy_chat()}


class RandomPolicy:
    """A policy that samples random answers, some with thinking or control tokens, and records every turn.

    Some answers are empty, some are cut, and some change when they are decoded and encoded again.
    """

    answers: Sequence[str] = [
        "",
        "ok",
        "<think>why\n</think>\n\nso",
        "<think>cut off",
        "a\n",
        " b",
        "é€",
        "</think>",
    ]

    def __init__(self, chat: Chat, seed: int) -> None:
        self.version = 0
        self.turns: list[Turn] = []
        self._chat = chat
        self._rng = random.Random(seed)

    async def sample(self, request: SampleRequest) -> Turn:
        rng = self._rng
        text = rng.choice(self.answers)
        ids = self._chat.tokenizer.encode(text, add_special_tokens=False)
        if rng.random() < 0.2:
            ids = [*ids, rng.choice([200, 201, 0x80 + 30])]  # a token that is not text by itself
        if rng.random() < 0.85:
            ids = [*ids, self._chat.turn_end_id]
        ids = ids[: request.max_tokens]
        turn = Turn(
            prompt_ids=list(request.prompt_ids),
            completion_ids=ids,
            logprobs=[-rng.uniform(0.001, 20) for _ in ids],
            stop_reason=StopReason.STOP if ids and ids[-1] == self._chat.turn_end_id else StopReason.LENGTH,
            policy_version=0,
        )
        self.turns.append(turn)
        return turn


@dataclass(frozen=True)
class WeightedToken:
    """A token with an advantage in a datum, the ids before it, and its logprob."""

    context: tuple[int, ...]
    token: int
    logprob: float


def weighted_tokens(sequences: Sequence[TokenSequence]) -> list[WeightedToken]:
    """Return the trained tokens of the datums, as a server reads them."""
    trained = []
    for sequence in sequences:
        datum = to_datum(sequence)
        inputs = {name: value.to_numpy().tolist() for name, value in datum.loss_fn_inputs.items()}
        tokens = datum.model_input.to_ints()
        for position, advantage in enumerate(inputs["advantages"]):
            if advantage:
                trained.append(
                    WeightedToken(
                        tuple(tokens[: position + 1]),
                        inputs["target_tokens"][position],
                        inputs["logprobs"][position],
                    )
                )
            else:
                assert inputs["logprobs"][position] == 0
    return trained


def sampled_tokens(turns: Sequence[Turn]) -> list[WeightedToken]:
    return [
        WeightedToken((*turn.prompt_ids, *turn.completion_ids[:k]), token, float(np.float32(logprob)))
        for turn in turns
        for k, (token, logprob) in enumerate(zip(turn.completion_ids, turn.logprobs, strict=True))
    ]


def assert_exact(trained: Sequence[Turn], sampled: Sequence[Turn]) -> list[TokenSequence]:
    """Assert that each token of `sampled` is trained once, at its position and with its logprob, and that
    no other token is trained.
    """
    sequences = sequences_of(trained, advantage=1.0)
    expected = Counter(sampled_tokens(sampled))
    assert Counter(weighted_tokens(sequences)) == expected
    assert Counter(weighted_tokens(step_sequences_of(trained, advantage=1.0))) == expected
    return sequences


# The events between two answers of a Terminus-2 trial.
EVENTS = st.lists(
    st.sampled_from(["observe", "observe", "observe", "summarise", "rewind", "subagent", "forget"]),
    min_size=1,
    max_size=10,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    events=EVENTS,
    name=st.sampled_from(list(CHATS)),
    max_tokens=st.integers(1, 12),
)
def test_terminal_trials_train_the_sampled_tokens(
    seed: int, events: list[str], name: str, max_tokens: int
) -> None:
    chat = CHATS[name]
    policy = RandomPolicy(chat, seed)
    lengths = LengthLimits(
        max_input_length=600, max_generate_length=max_tokens, max_sequence_length=700, context_limit=700
    )
    limits = SamplingLimits(
        temperature=1.0, seed=seed, lengths=lengths, max_consecutive_truncations=4, summarize=True
    )
    llm = TinkerLLM(policy=policy, chat=chat, limits=limits, model_name="m")
    rewrites = asyncio.run(converse(llm, events, random.Random(seed)))

    subagent_turns = {id(turn) for turn in llm.subagent_turns}
    main_turns = [turn for turn in policy.turns if turn.completion_ids and id(turn) not in subagent_turns]
    assert llm.turns == main_turns
    sequences = assert_exact(llm.turns, main_turns)
    assert llm.prefix_breaks <= rewrites
    assert len(sequences) <= llm.prefix_breaks + 1  # A trial without a prefix break is one datum.
    all_turns = [turn for turn in policy.turns if turn.completion_ids]
    assert llm.all_turns == all_turns
    assert_exact(llm.all_turns, all_turns)  # train_subagents=all


async def converse(llm: TinkerLLM, events: list[str], rng: random.Random) -> int:
    """Apply the events and return how many of them rewrote the history."""
    conversation, rewrites = HarborChat(llm), 0
    try:
        for event in events:
            messages = conversation.messages
            if event == "summarise" and messages:
                with llm.subagent_calls():
                    await llm.call("summarise", message_history=messages)
                messages[1:] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "s"}]
                rewrites += 1
            elif event == "rewind" and len(messages) > 2:
                num_kept = 2 * rng.randrange(1, len(messages) // 2) if len(messages) > 3 else 2
                del messages[num_kept:]
                rewrites += 1
            elif event == "forget":
                messages.clear()
                rewrites += 1
            elif event == "subagent":
                await llm.call("a question of its own")
            await conversation.chat(f"$ {rng.randrange(10)}")
    except (EpisodeEnd, ContextLengthExceededError):
        pass
    return rewrites


OBSERVATIONS = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["user", "tool"]), st.sampled_from(["", "ok", "<think>x</think>y", "\n"])),
        max_size=3,
    ),
    max_size=6,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    observations=OBSERVATIONS,
    name=st.sampled_from(list(CHATS)),
    generate=st.integers(1, 12),
    max_input=st.integers(20, 300),
    step_wise=st.booleans(),
)
def test_episodes_train_the_sampled_tokens(
    seed: int,
    observations: list[list[tuple[str, str]]],
    name: str,
    generate: int,
    max_input: int,
    step_wise: bool,
) -> None:
    chat = CHATS[name]
    policy = RandomPolicy(chat, seed)
    script = [
        saying(*(text for _, text in messages), role=messages[0][0] if messages else "user")
        for messages in observations
    ]
    script.append(saying(reward=1.0, is_done=True))
    limits = LengthLimits(
        max_input_length=max_input,
        max_generate_length=generate,
        max_sequence_length=max_input + generate,
        context_limit=max_input + generate,
    )
    episode = EpisodeSettings(temperature=1.0, seed=seed, step_wise=step_wise)
    trajectory = asyncio.run(run_episode(ScriptedEnv(script), policy, chat, limits, episode, task_id="a"))
    assert isinstance(trajectory, Trajectory)
    sampled = [turn for turn in policy.turns if turn.completion_ids]
    sequences = assert_exact(trajectory.turns, sampled)
    assert step_wise or len(sequences) <= 1
    assert all(len(turn.prompt_ids) <= max_input for turn in policy.turns)
    assert all(len(sequence.tokens) <= limits.max_sequence_length for sequence in sequences)
    assert trajectory.reward == (trajectory.stop_reason != StopReason.CONTEXT_LENGTH)


# The answers of a service agent: calls of every form, several calls, cut calls, and text for the user.
GET, PRICE = (
    '{"name": "get_order", "arguments": {"order": "kala"}}',
    '{"name": "get_product", "arguments": {"product": "mive"}}',
)
ANSWERS = [
    *(
        f"<tool_call>\n{GET}\n</tool_call>",
        f"One moment.<tool_call>{GET}</tool_call><tool_call>{PRICE}</tool_call>",
        GET[:-1],
        GET[:-9],
    ),
    *("Done.", "<think>\n\n</think>\n\nWhich order?", "", "###STOP###"),
]
SHOP: Database = {
    "orders": {"kala": {"status": "pending", "product": "mive", "address": "3 dopa"}},
    "products": {"mive": {"price": 12}},
    "customers": {},
}


@cache
def service_chats() -> dict[str, Chat]:
    """Return chats whose templates merge the results of several calls into one message, as Qwen3's does.

    The second template also removes thinking from history.
    """
    stripping = CHAT_TEMPLATE.replace(
        "'\\n' + message.content", "'\\n' + message.content.split('</think>')[-1]"
    )
    assert stripping != CHAT_TEMPLATE
    chats = {}
    for name, template in (("merging", CHAT_TEMPLATE), ("merging and stripping", stripping)):
        tokenizer: Any = copy.deepcopy(byte_tokenizer())
        tokenizer.chat_template = template
        chats[name] = Chat(tokenizer)
    return chats


class ServiceAgent(RandomPolicy):
    """A policy with the answers of a service agent."""

    answers = ANSWERS


def shop(lines: int) -> ServiceEnv:
    row = {"actions": [], "communicate": []}
    user = ScriptedUserSimulator([f"line {number}" for number in range(lines)])
    return ServiceEnv(ToyRetailEpisode(row, database=SHOP, policy="p", user=user), parallel_tool_calls=True)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(["merging", "merging and stripping"]),
    lines=st.integers(1, 4),
    generate=st.sampled_from([20, 60, 200]),
    native=st.booleans(),
    step_wise=st.booleans(),
)
@pytest.mark.seed_behaviour(5)
def test_service_episodes_train_the_sampled_tokens(
    seed: int, name: str, lines: int, generate: int, native: bool, step_wise: bool
) -> None:
    chat = service_chats()[name]
    policy = ServiceAgent(chat, seed)
    limits = LengthLimits(
        max_input_length=6000, max_generate_length=generate, max_sequence_length=6200, context_limit=6200
    )
    episode = EpisodeSettings(
        temperature=1.0, seed=seed, max_turns=12, use_native_tool_calling=native, step_wise=step_wise
    )
    trajectory = asyncio.run(run_episode(shop(lines), policy, chat, limits, episode, task_id="a"))
    assert isinstance(trajectory, Trajectory)
    sequences = assert_exact(trajectory.turns, [turn for turn in policy.turns if turn.completion_ids])
    assert step_wise or len(sequences) <= 1


@pytest.mark.parametrize("native", [True, False])
def test_extended_prompts_equal_rendered_prompts(native: bool) -> None:
    """With a template that rewrites no message, extending tokens and rendering messages give the same ids."""
    chat = service_chats()["merging"]
    policy = FakePolicy(chat, [ANSWERS[1], ANSWERS[0], "Done.", ANSWERS[2], "Bye."])
    limits = LengthLimits(
        max_input_length=6000, max_generate_length=200, max_sequence_length=6200, context_limit=6200
    )
    episode = EpisodeSettings(temperature=1.0, seed=0, use_native_tool_calling=native)
    trajectory = asyncio.run(run_episode(shop(2), policy, chat, limits, episode, task_id="a"))
    assert isinstance(trajectory, Trajectory) and len(trajectory.turns) == 5
    tools = [tool.schema for tool in TOOLS.values()] if native else []
    ends = [
        number for number, message in enumerate(trajectory.conversation) if message["role"] == "assistant"
    ]
    for turn, end in zip(trajectory.turns, ends, strict=True):
        assert turn.prompt_ids == chat.render(trajectory.conversation[:end], tools=tools)
    prompt_text = chat.decode(trajectory.turns[1].prompt_ids)
    # The user's request is one user message, and both tool results are in a second one.
    assert prompt_text.count("<tool_response>") == 2 and prompt_text.count("<|im_start|>user") == 2

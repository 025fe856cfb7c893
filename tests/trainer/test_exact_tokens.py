"""Whatever a conversation goes through, every weighted token was sampled by the engine at that position with that logprob."""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from harbor.llms.base import ContextLengthExceededError
from harbor.llms.chat import Chat as HarborChat
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.toy_retail.tokenizer import CHAT_TEMPLATE
from src.core.length_limits import LengthLimits
from src.core.trajectory import StopReason, Trajectory, Turn
from src.envs.harbor.tinker_llm import EpisodeOver, SamplingLimits, TinkerLLM
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

CHATS = {"thinking is stripped from history": byte_chat(), "history stays": toy_chat()}


class Engine:
    """Samples random ids, thinking and stray control tokens among them, and remembers every sample with its logprobs.

    Some answers are empty, some are cut, and some do not survive decoding and encoding.
    """

    sayings: Sequence[str] = [
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
        self.said: list[Turn] = []
        self._chat = chat
        self._rng = random.Random(seed)

    async def sample(self, request: SampleRequest) -> Turn:
        rng = self._rng
        text = rng.choice(self.sayings)
        ids = self._chat.tokenizer.encode(text, add_special_tokens=False)
        if rng.random() < 0.2:
            ids = [*ids, rng.choice([200, 201, 0x80 + 30])]  # a token that alone is no text
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
        self.said.append(turn)
        return turn


@dataclass(frozen=True)
class Weighted:
    """A token that a datum trains: what precedes it, what it is, and how likely it was said to be."""

    context: tuple[int, ...]
    token: int
    logprob: float


def weighted_tokens(sequences: Sequence[TokenSequence]) -> list[Weighted]:
    """Read back from the datums, as the server would."""
    found = []
    for sequence in sequences:
        datum = to_datum(sequence)
        inputs = {name: value.to_numpy().tolist() for name, value in datum.loss_fn_inputs.items()}
        tokens = datum.model_input.to_ints()
        for position, advantage in enumerate(inputs["advantages"]):
            if advantage:
                found.append(
                    Weighted(
                        tuple(tokens[: position + 1]),
                        inputs["target_tokens"][position],
                        inputs["logprobs"][position],
                    )
                )
            else:
                assert inputs["logprobs"][position] == 0
    return found


def sampled_tokens(turns: Sequence[Turn]) -> list[Weighted]:
    return [
        Weighted(tuple(turn.prompt_ids + turn.completion_ids[:k]), token, float(np.float32(logprob)))
        for turn in turns
        for k, (token, logprob) in enumerate(zip(turn.completion_ids, turn.logprobs, strict=True))
    ]


def assert_exact(trained: Sequence[Turn], said: Sequence[Turn]) -> list[TokenSequence]:
    """Every sampled token of `said` is trained exactly once, where and as it was sampled; nothing else is."""
    sequences = sequences_of(trained, advantage=1.0)
    expected = Counter(sampled_tokens(said))
    assert Counter(weighted_tokens(sequences)) == expected
    assert Counter(weighted_tokens(step_sequences_of(trained, advantage=1.0))) == expected
    return sequences


# What happens between two answers of a Terminus-2 trial.
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
def test_every_trained_token_of_a_terminal_trial_was_sampled_there(
    seed: int, events: list[str], name: str, max_tokens: int
) -> None:
    chat = CHATS[name]
    engine = Engine(chat, seed)
    lengths = LengthLimits(
        max_input_length=600, max_generate_length=max_tokens, max_sequence_length=700, context_limit=700
    )
    limits = SamplingLimits(
        temperature=1.0, seed=seed, lengths=lengths, max_consecutive_truncations=4, summarize=True
    )
    llm = TinkerLLM(policy=engine, chat=chat, limits=limits, model_name="m")
    rewrites = asyncio.run(converse(llm, events, random.Random(seed)))

    apart = {id(turn) for turn in llm.subagent_turns}
    main = [turn for turn in engine.said if turn.completion_ids and id(turn) not in apart]
    assert llm.turns == main
    sequences = assert_exact(llm.turns, main)
    assert llm.prefix_breaks <= rewrites
    assert len(sequences) <= llm.prefix_breaks + 1  # an unbroken trial is one datum
    everything = [turn for turn in engine.said if turn.completion_ids]
    assert llm.all_turns == everything
    assert_exact(llm.all_turns, everything)  # train_subagents=all


async def converse(llm: TinkerLLM, events: list[str], rng: random.Random) -> int:
    """Plays the events; the number of times the history was rewritten."""
    conversation, rewrites = HarborChat(llm), 0
    try:
        for event in events:
            messages = conversation.messages
            if event == "summarise" and messages:
                with llm.recording_apart():
                    await llm.call("summarise", message_history=messages)
                conversation._messages = [
                    messages[0],
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "s"},
                ]
                rewrites += 1
            elif event == "rewind" and len(messages) > 2:
                conversation._messages = (
                    messages[: 2 * rng.randrange(1, len(messages) // 2)]
                    if len(messages) > 3
                    else messages[:2]
                )
                rewrites += 1
            elif event == "forget":
                conversation._messages = []
                rewrites += 1
            elif event == "subagent":
                await llm.call("a question of its own")
            await conversation.chat(f"$ {rng.randrange(10)}")
    except (EpisodeOver, ContextLengthExceededError):
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
def test_every_trained_token_of_an_episode_was_sampled_there(
    seed: int,
    observations: list[list[tuple[str, str]]],
    name: str,
    generate: int,
    max_input: int,
    step_wise: bool,
) -> None:
    chat = CHATS[name]
    engine = Engine(chat, seed)
    script = [
        saying(*(text for _, text in each), role=each[0][0] if each else "user") for each in observations
    ]
    script.append(saying(reward=1.0, is_done=True))
    limits = LengthLimits(
        max_input_length=max_input,
        max_generate_length=generate,
        max_sequence_length=max_input + generate,
        context_limit=max_input + generate,
    )
    episode = EpisodeSettings(temperature=1.0, seed=seed, step_wise=step_wise)
    trajectory = asyncio.run(run_episode(ScriptedEnv(script), engine, chat, limits, episode, task_id="a"))
    assert isinstance(trajectory, Trajectory)
    said = [turn for turn in engine.said if turn.completion_ids]
    sequences = assert_exact(trajectory.turns, said)
    assert step_wise or len(sequences) <= 1
    assert all(len(turn.prompt_ids) <= max_input for turn in engine.said)
    assert all(len(sequence.tokens) <= limits.max_sequence_length for sequence in sequences)
    assert trajectory.reward == (trajectory.stop_reason != StopReason.CONTEXT_LENGTH)


# What a service agent says: calls of every form, several at once, cut ones, and messages to the user.
GET, PRICE = (
    '{"name": "get_order", "arguments": {"order": "kala"}}',
    '{"name": "get_product", "arguments": {"product": "mive"}}',
)
SAYINGS = [
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
    """A template that merges the results of several calls into one message, as Qwen3's does, alone and with stripped thinking."""
    stripping = CHAT_TEMPLATE.replace(
        "'\\n' + message.content", "'\\n' + message.content.split('</think>')[-1]"
    )
    assert stripping != CHAT_TEMPLATE
    chats = {}
    for name, template in (("merging", CHAT_TEMPLATE), ("merging and stripping", stripping)):
        tokenizer = copy.deepcopy(byte_tokenizer())
        tokenizer.chat_template = template
        chats[name] = Chat(tokenizer)
    return chats


class Talker(Engine):
    """An engine that says what a service agent might."""

    sayings = SAYINGS


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
def test_every_trained_token_of_a_conversation_with_tools_was_sampled_there(
    seed: int, name: str, lines: int, generate: int, native: bool, step_wise: bool
) -> None:
    chat = service_chats()[name]
    engine = Talker(chat, seed)
    limits = LengthLimits(
        max_input_length=6000, max_generate_length=generate, max_sequence_length=6200, context_limit=6200
    )
    episode = EpisodeSettings(
        temperature=1.0, seed=seed, max_turns=12, use_native_tool_calling=native, step_wise=step_wise
    )
    trajectory = asyncio.run(run_episode(shop(lines), engine, chat, limits, episode, task_id="a"))
    assert isinstance(trajectory, Trajectory)
    sequences = assert_exact(trajectory.turns, [turn for turn in engine.said if turn.completion_ids])
    assert step_wise or len(sequences) <= 1


@pytest.mark.parametrize("native", [True, False])
def test_what_the_model_sees_after_tool_turns_is_what_the_template_would_show(native: bool) -> None:
    """Where the template rewrites nothing, extending tokens and rendering messages come to the same: merged results included."""
    chat = service_chats()["merging"]
    policy = FakePolicy(chat, [SAYINGS[1], SAYINGS[0], "Done.", SAYINGS[2], "Bye."])
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
    shown = chat.decode(trajectory.turns[1].prompt_ids)
    assert (
        shown.count("<tool_response>") == 2 and shown.count("<|im_start|>user") == 2
    )  # one request, one message of two results

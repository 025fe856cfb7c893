"""Training sequences of chats, with the tokens that the model sees and samples in a rollout.

`Chat` of src/policy/chat.py makes the tokens: `render` encodes the first prompt, `answer_ids` encodes an
answer with its end-of-turn token, and `extend` appends further messages. Training and sampling therefore
agree on every token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from src.core.errors import ConfigError
from src.learning.supervised import SupervisedSequence
from src.policy import chat as chat_template
from src.policy.tool_messages import Message
from src.sft.chats import Chat
from src.sft.config import TrainOn

ASSISTANT = "assistant"


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedChat:
    """The tokens and loss weights of a chat, or of a part of a training trial."""

    where: str  # file and line, or run and trial
    task: str  # chats of the same task are never both trained and held out
    content_hash: str  # the hash of tokens and weights
    sequence: SupervisedSequence


def tokenized_chat(
    tokens: Sequence[int], weights: Sequence[bool], *, where: str, context_limit: int, task: str | None = None
) -> TokenizedChat:
    """Return a tokenized chat. If `task` is None, the content hash is the task.

    Raises ConfigError if there are more than `context_limit` tokens.
    """
    if len(tokens) > context_limit:
        raise ConfigError(
            f"{where}: the sequence has {len(tokens)} tokens, more than context_limit={context_limit}; "
            "raise context_limit, or shorten or remove the chat"
        )
    sequence = SupervisedSequence(tokens=np.array(tokens, np.int64), weights=np.array(weights, np.float32))
    digest = hashlib.sha256(sequence.tokens.tobytes() + sequence.weights.tobytes()).hexdigest()[:16]
    return TokenizedChat(where=where, task=task or digest, content_hash=digest, sequence=sequence)


def render(
    chat: Chat, template: chat_template.Chat, *, train_on: TrainOn, context_limit: int
) -> TokenizedChat:
    """Return the tokens of a chat, up to its last trained token.

    Raises ConfigError, with file and line, if there are more than `context_limit` tokens, or if the chat has
    no trained message, begins with an assistant message or cannot be rendered.
    """
    trained = trained_messages(chat, train_on)
    if not trained:
        raise ConfigError(
            f"{chat.where}: train_on={train_on} leaves no message to train; correct the chat or choose "
            "another train_on"
        )
    if chat.messages[0]["role"] == ASSISTANT:
        raise ConfigError(f"{chat.where}: the first message is the assistant's; begin with a user message")
    try:
        tokens, weights = _tokens(chat, template, trained)
    except ValueError as error:
        raise ConfigError(f"{chat.where}: {error}") from error
    if train_on == "all_tokens":
        weights = [True] * len(tokens)
    return tokenized_chat(tokens, weights, where=chat.where, context_limit=context_limit)


def trained_messages(chat: Chat, train_on: TrainOn) -> set[int]:
    roles = [message["role"] for message in chat.messages]
    answers = [index for index, role in enumerate(roles) if role == ASSISTANT]
    match train_on:
        case "all_assistant_messages" | "all_tokens":
            return set(answers)
        case "last_assistant_message":
            return set(answers[-1:])
        case "last_assistant_turn":
            last_user = max((index for index, role in enumerate(roles) if role == "user"), default=-1)
            return {index for index in answers if index > last_user}
        case "customized":
            return {index for index in answers if chat.trainable[index]}


def _tokens(
    chat: Chat, template: chat_template.Chat, trained: Collection[int]
) -> tuple[list[int], list[bool]]:
    """Return the tokens up to the last trained answer, and whether each belongs to a trained answer."""
    last = max(trained)
    answers = [index for index in range(last) if chat.messages[index]["role"] == ASSISTANT]
    prompt: Sequence[int] = template.render(chat.messages[: [*answers, last][0]], tools=chat.tools)
    weights = [False] * len(prompt)
    for index, following in pairwise([*answers, last]):
        answer = _answer(chat.messages[index], template, index=index)
        prompt = template.extend(prompt, answer, chat.messages[index + 1 : following])
        weights += [index in trained] * len(answer)
        weights += [False] * (len(prompt) - len(weights))
    answer = _answer(chat.messages[last], template, index=last)
    return [*prompt, *answer], [*weights, *[True] * len(answer)]


def _answer(message: Message, template: chat_template.Chat, *, index: int) -> list[int]:
    try:
        return template.answer_ids(message)
    except ValueError as error:
        raise ValueError(f"messages.{index}: {error}") from error

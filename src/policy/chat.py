"""Conversion of messages to token ids with the model's chat template.

In the trainer, only this module calls `apply_chat_template`.

`render` encodes the first prompt of a conversation and `extend` appends to its ids. Sampled ids are never
encoded again, so every later turn is conditioned on exactly the ids that were sampled.

Templates support different kinds of messages. `Chat` renders test messages to detect what the template
supports, and adapts the messages of a conversation. If the template does not show tools, the system message
describes them. If the template drops tool results, the results become user messages. If the template does not
take call arguments as objects, the arguments become JSON text.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import httpx

from src.core.errors import ConfigError
from src.core.token_ids import TokenIds
from src.policy.tool_messages import Message, Tools, with_described_tools, with_json_arguments

logger = logging.getLogger(__name__)

# A template may change earlier messages when it renders later ones. A new message is therefore rendered after
# a placeholder answer, and only the text after the placeholder is used.
_QUESTION: Message = {"role": "user", "content": "question"}
_PLACEHOLDER = "<<the sampled answer stands here>>"

_FUNCTION_NAME = "probe_of_the_template"
_FUNCTION = {"name": _FUNCTION_NAME, "description": "A probe.", "parameters": {"type": "object"}}
_CALL = {"id": "0", "type": "function", "function": {"name": "probe", "arguments": {"n": 1}}}
_RESULT: Message = {"role": "tool", "tool_call_id": "0", "content": "result of the probe"}
# The empty thought that templates add to the generation prompt to switch thinking off.
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*$")
# Llama 3.1 ends a turn with this token instead of <|eot_id|> when it waits for the result of a tool.
_END_OF_MESSAGE = "<|eom_id|>"


class ChatTokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that `Chat` uses."""

    eos_token_id: int | None

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Tools | None,
        tokenize: bool,
        add_generation_prompt: bool,
        **variables: bool,  # variables of the template, which ignores unknown ones
    ) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...


class Chat:
    """The conversation format of one model.

    With `enable_thinking`, the model may think before each answer. Only `src.evaluate` and
    `src.evaluate.chat` have this option. The constructor raises ConfigError if the template drops assistant
    messages, if it writes no token that ends them, or if `enable_thinking` is set and does not change the
    prompt.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, enable_thinking: bool = False) -> None:
        self.tokenizer = tokenizer
        self._enable_thinking = enable_thinking
        ending = self._encode(self._after_answer([], generation_prompt=False))
        if not ending:
            raise ConfigError(
                "the tokenizer's chat template does not end an assistant turn with a token; use an "
                "instruct model's tokenizer"
            )
        self.turn_end_id = ending[0]
        self.stop_token_ids: list[int] = [self.turn_end_id]
        if tokenizer.eos_token_id not in (None, self.turn_end_id):
            self.stop_token_ids.append(tokenizer.eos_token_id)
        end_of_message = self._encode(_END_OF_MESSAGE)
        self._turn_end_ids = {self.turn_end_id}
        if len(end_of_message) == 1:
            self.stop_token_ids += end_of_message
            self._turn_end_ids |= set(end_of_message)
        if enable_thinking and self.render([_QUESTION]) == Chat(tokenizer).render([_QUESTION]):
            raise ConfigError(
                "enable_thinking=true: the tokenizer's chat template does not support it; remove the option"
            )

    def render(self, messages: Sequence[Message], *, tools: Tools = ()) -> list[int]:
        """Encode a conversation and the generation prompt.

        If the template has a variable for thinking (`enable_thinking` or `thinking`), thinking is off unless
        this `Chat` was made with `enable_thinking=True`.

        `tools` are OpenAI schemas. Templates write them into the system message or the first user message,
        so `extend` does not need them. If the template does not show tools, the system message describes them
        in text. Raises ConfigError if the template rejects the messages.
        """
        if tools and not self.shows_tools:
            messages, tools = with_described_tools(messages, tools), ()
        return self._encode(self._template(messages, generation_prompt=True, tools=tools))

    def extend(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], messages: Sequence[Message]
    ) -> TokenIds:
        """Return the next prompt: `prompt_ids` and `completion_ids` unchanged, then the end of the turn,
        `messages` and the generation prompt.

        >>> messages = [{"role": "user", "content": "$ ls"}]
        >>> chat.extend(prompt, turn.completion_ids, messages)[: len(prompt)] == prompt
        True
        """
        suffix = self._encode(self._after_answer(messages, generation_prompt=True))
        if completion_ids and completion_ids[-1] in self._turn_end_ids:
            suffix = suffix[1:]
        return TokenIds.wrap(prompt_ids).extended([*completion_ids, *suffix])

    def answer_ids(self, message: Message) -> list[int]:
        """Encode an assistant message as the completion that follows the generation prompt, up to and
        including the end of the turn.

        Raises ValueError if the rendered message cannot be a completion of the generation prompt (for
        example, it begins with a thought and the prompt switches thinking off), if the template does not
        render the reasoning, or if it does not end the turn after the message.

        >>> chat.decode(chat.answer_ids({"role": "assistant", "content": "Yes."}))
        'Yes.'
        """
        prompt = self._template([_QUESTION], generation_prompt=True)
        text = self._template([_QUESTION, message], generation_prompt=False)
        if not text.startswith(prompt):  # if thinking is off, a prompt may end with an empty thought
            prompt = _EMPTY_THOUGHT.sub("", prompt)
        answer = text.removeprefix(prompt)
        if not text.startswith(prompt) or (answer.lstrip().startswith("<think>") and not self._is_thinking):
            content = str(message.get("content"))
            has_reasoning = message.get("reasoning_content") or "<think>" in content or "</think>" in content
            if has_reasoning and not self._is_thinking:
                raise ValueError(
                    "this message cannot follow the generation prompt of the chat template, because the "
                    "prompt switches thinking off; remove the reasoning"
                )
            if self.opens_a_thought and not has_reasoning:
                raise ValueError(
                    "the generation prompt of the chat template begins a thought, but this message has no "
                    "reasoning; add reasoning_content to the message"
                )
            raise ValueError(
                "the chat template does not render this message as a continuation of its generation prompt; "
                "give tokenizer=DIR_OR_HUB_ID with another chat template"
            )
        if str(message.get("reasoning_content") or "").strip() not in answer:
            raise ValueError(
                "the chat template does not render reasoning_content; remove it, or give "
                "tokenizer=DIR_OR_HUB_ID with a chat template that renders it"
            )
        prompt_ids, ids = self._encode(prompt), self._encode(text)
        # The ids of the answer are taken from the ids of `text`, because the tokenizer may add a leading
        # space to an answer that is encoded alone. `answer` is encoded alone only if the ids of `text` do not
        # begin with the ids of `prompt`.
        ids = ids[len(prompt_ids) :] if ids[: len(prompt_ids)] == prompt_ids else self._encode(answer)
        turn_ends = [index for index, token in enumerate(ids) if token in self._turn_end_ids]
        if not turn_ends:
            raise ValueError(
                "the chat template does not end the turn after this message; give tokenizer=DIR_OR_HUB_ID "
                "with another chat template"
            )
        return ids[: turn_ends[-1] + 1]

    def decode(self, completion_ids: Sequence[int]) -> str:
        """Return the text of a completion without the stop tokens at its end."""
        end = len(completion_ids)
        while end and completion_ids[end - 1] in self.stop_token_ids:
            end -= 1
        return self.tokenizer.decode(
            list(completion_ids[:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _after_answer(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """Return the text that the template renders after the content of an answer."""
        answer: Message = {"role": "assistant", "content": _PLACEHOLDER}
        text = self._template([_QUESTION, answer, *messages], generation_prompt=generation_prompt)
        _, placeholder, suffix = text.partition(_PLACEHOLDER)
        if not placeholder:
            raise ConfigError(
                "the tokenizer's chat template drops assistant messages; use an instruct model's tokenizer"
            )
        return suffix

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template writes the given tools into the prompt. If not, a warning is logged once."""
        tool = {"type": "function", "function": _FUNCTION}
        is_shown = _FUNCTION_NAME in self._probe([_QUESTION], tools=[tool])
        if not is_shown:
            logger.warning("the chat template shows no tools; the system message describes them in text")
        return is_shown

    @cached_property
    def opens_a_thought(self) -> bool:
        """Whether the generation prompt ends with `<think>`, so that each answer begins with a thought."""
        return self._template([_QUESTION], generation_prompt=True).rstrip().endswith("<think>")

    @property
    def _is_thinking(self) -> bool:
        return self._enable_thinking or self.opens_a_thought

    @cached_property
    def _shows_tool_results(self) -> bool:
        answer: Message = {"role": "assistant", "content": _PLACEHOLDER}
        return str(_RESULT["content"]) in self._probe([_QUESTION, answer, _RESULT])

    @cached_property
    def _takes_argument_objects(self) -> bool:
        return bool(self._probe([_QUESTION, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]))

    def _probe(self, messages: Sequence[Message], *, tools: Tools = ()) -> str:
        """Return the rendered text, or "" if the template rejects the messages."""
        try:
            return self._apply(messages, generation_prompt=False, tools=tools)
        except (TypeError, KeyError, ValueError):
            return ""

    def _template(self, messages: Sequence[Message], *, generation_prompt: bool, tools: Tools = ()) -> str:
        adapted = [self._adapted(message) for message in messages]
        return self._apply(adapted, generation_prompt=generation_prompt, tools=tools)

    def _adapted(self, message: Message) -> Message:
        """Return the message in a form that the template accepts and shows."""
        if message["role"] == "tool" and not self._shows_tool_results:
            return {"role": "user", "content": message["content"]}
        if message.get("tool_calls") and not self._takes_argument_objects:
            return with_json_arguments(message)
        return message

    def _apply(self, messages: Sequence[Message], *, generation_prompt: bool, tools: Tools) -> str:
        from jinja2 import TemplateError  # a slow import that --help does not need

        roles = [message["role"] for message in messages if message["role"] != "system"]
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                enable_thinking=self._enable_thinking,  # Qwen3, GLM
                thinking=self._enable_thinking,  # DeepSeek-V3.1, Granite
                # By default, Llama 3 writes tools into the first message after the system message and renders
                # the message as a user message. That is wrong if the message is a greeting by the assistant.
                tools_in_user_message=roles[:1] == ["user"],
            )
        except TemplateError as error:
            fix = "change the messages, or give tokenizer=DIR_OR_HUB_ID with another chat template"
            raise ConfigError(f"the chat template rejects the chat: {_first_line(error)}; {fix}") from error

    def _encode(self, text: str) -> list[int]:
        """Encode a text.

        Unpaired surrogates, which JSON allows and tokenizers reject, become question marks.
        """
        return list(self.tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False))


def load_tokenizer(model_name: str) -> ChatTokenizer:
    """Load the tokenizer of a local directory or a hub id.

    Raises ConfigError if there is no tokenizer or no chat template.
    """
    from transformers import AutoTokenizer, logging  # a slow import that --help does not need

    logging.set_verbosity_error()
    directory = Path(model_name).expanduser()
    name = str(directory) if directory.is_dir() else model_name
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as missing:
        if directory.is_dir():
            raise ConfigError(
                f"no tokenizer in {name} ({_first_line(missing)}); give tokenizer=DIR_OR_HUB_ID"
            ) from missing
        tokenizer = _from_hub(name)
    if not tokenizer.encode("a", add_special_tokens=False):  # transformers made an empty tokenizer
        raise ConfigError(f"no tokenizer in {name}: it has no tokenizer files; give tokenizer=DIR_OR_HUB_ID")
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"the tokenizer of {model_name} has no chat template; give tokenizer=DIR_OR_HUB_ID of an "
            "instruct model"
        )
    return tokenizer


def load_chat(model_name: str, *, enable_thinking: bool = False) -> Chat:
    """Load the tokenizer of a local directory or a hub id, and return its chat format.

    Raises ConfigError if there is no tokenizer or no chat template, or if `Chat` rejects the template.
    """
    tokenizer = load_tokenizer(model_name)
    if model_name.removesuffix("/").endswith("-Base"):
        logger.warning(
            "%s is a base model, which was not trained on the tools and turns of its chat template; use "
            "the model without -Base",
            model_name,
        )
    chat = Chat(tokenizer, enable_thinking=enable_thinking)
    if not enable_thinking and chat.opens_a_thought:
        logger.warning(
            "the chat template of %s begins each answer with a thought and cannot turn thinking off; use an "
            "instruct model without thinking, or a larger max_tokens",
            model_name,
        )
    return chat


def _from_hub(name: str) -> ChatTokenizer:
    """Load a tokenizer from the hub.

    A request with a short timeout first checks that the hub can be reached, because the hub client would
    retry for a minute.
    """
    from huggingface_hub import constants
    from transformers import AutoTokenizer

    advice = "give tokenizer=DIR with the model's tokenizer files"
    try:
        httpx.head(constants.ENDPOINT, timeout=5.0)
    except httpx.HTTPError as unreachable:
        raise ConfigError(
            f"no tokenizer for {name!r}: not a directory, not in the hub cache, and the hub cannot be "
            f"reached; {advice}"
        ) from unreachable
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as missing:
        raise ConfigError(
            f"no tokenizer for {name!r} on the hub ({_first_line(missing)}); {advice}"
        ) from missing


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

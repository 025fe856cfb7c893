"""Conversion of messages to token ids with the model's chat template.

Only this module calls `apply_chat_template`.

`render` encodes the first prompt of a conversation and `extend` appends to its ids. Sampled ids are never
encoded again, so every later turn is conditioned on exactly the ids that were sampled.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import httpx

from src.core.errors import ConfigError
from src.core.token_ids import TokenIds

logger = logging.getLogger(__name__)

Message = Mapping[str, object]  # {"role": ..., "content": ...}, as chat templates take them

# A template may change earlier messages when it renders later ones. A new message is therefore rendered after
# a placeholder answer, and only the text after the placeholder is used.
_QUESTION: Message = {"role": "user", "content": "question"}
_PLACEHOLDER = "<<the sampled answer stands here>>"


class ChatTokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that `Chat` uses."""

    eos_token_id: int | None

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None,
        tokenize: bool,
        add_generation_prompt: bool,
        enable_thinking: bool,
    ) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...


class Chat:
    """The conversation format of one model.

    With `enable_thinking` the model may think before each answer, which only evaluations allow. Raises
    ConfigError if the template does not support it.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, enable_thinking: bool = False) -> None:
        self.tokenizer = tokenizer
        self._enable_thinking = enable_thinking
        ending = self._encode(self._after_answer([], generation_prompt=False))
        if not ending:
            raise ConfigError(
                "the tokenizer's chat template ends an assistant turn with no token; use an instruct "
                "model's tokenizer"
            )
        self.turn_end_id = ending[0]
        eos = tokenizer.eos_token_id
        self.stop_token_ids: list[int] = (
            [self.turn_end_id] if eos in (None, self.turn_end_id) else [self.turn_end_id, eos]
        )
        if enable_thinking and self.render([_QUESTION]) == Chat(tokenizer).render([_QUESTION]):
            raise ConfigError(
                "enable_thinking=true: the tokenizer's chat template does not read it; remove the option"
            )

    def render(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, object]] = ()) -> list[int]:
        """Encode a conversation and the generation prompt.

        Thinking is off unless `enable_thinking` is set, if the template supports it.

        `tools` are OpenAI schemas. Templates write them before the first message, so `extend` does not need
        them.
        """
        return self._encode(self._template(messages, generation_prompt=True, tools=tools))

    def extend(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], messages: Sequence[Message]
    ) -> TokenIds:
        """Return the next prompt: `prompt_ids + completion_ids` unchanged, the end of the turn,
        `messages`, the generation prompt.

        >>> messages = [{"role": "user", "content": "$ ls"}]
        >>> chat.extend(prompt, turn.completion_ids, messages)[: len(prompt)] == prompt
        True
        """
        suffix = self._encode(self._after_answer(messages, generation_prompt=True))
        if completion_ids and completion_ids[-1] == self.turn_end_id:
            suffix = suffix[1:]
        return TokenIds.wrap(prompt_ids).extended([*completion_ids, *suffix])

    def decode(self, completion_ids: Sequence[int]) -> str:
        """Return the text of a completion without its stop token."""
        end = len(completion_ids)
        while end and completion_ids[end - 1] in self.stop_token_ids:
            end -= 1
        return self.tokenizer.decode(
            list(completion_ids[:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _after_answer(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        answer: Message = {"role": "assistant", "content": _PLACEHOLDER}
        text = self._template([_QUESTION, answer, *messages], generation_prompt=generation_prompt)
        _, placeholder, suffix = text.partition(_PLACEHOLDER)
        if not placeholder:
            raise ConfigError(
                "the tokenizer's chat template drops assistant messages; use an instruct model's tokenizer"
            )
        return suffix

    def _template(
        self,
        messages: Sequence[Message],
        *,
        generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            enable_thinking=self._enable_thinking,
        )

    def _encode(self, text: str) -> list[int]:
        """Encode a text.

        Unpaired surrogates, which JSON allows and tokenizers reject, become question marks.
        """
        return list(self.tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False))


def load_chat(model_name: str, *, enable_thinking: bool = False) -> Chat:
    """Load the chat format of a local tokenizer directory or a hub id.

    Raises ConfigError if there is none.
    """
    from transformers import AutoTokenizer, logging  # imported late: slow, and not needed for --help

    logging.set_verbosity_error()
    directory = Path(model_name).expanduser()
    name = str(directory) if directory.is_dir() else model_name
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as missing:
        if directory.is_dir():
            raise ConfigError(f"no tokenizer in {name}: {_first_line(missing)}") from missing
        tokenizer = _from_hub(name)
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"the tokenizer of {model_name} has no chat template; give tokenizer=DIR_OR_HUB_ID of an "
            "instruct model"
        )
    if model_name.removesuffix("/").endswith("-Base"):
        logger.warning(
            "%s is a base model, which was not trained on the tools and turns of its chat template; use "
            "the model without -Base",
            model_name,
        )
    return Chat(tokenizer, enable_thinking=enable_thinking)


def _from_hub(name: str) -> ChatTokenizer:
    """Load from the hub.

    A first request with a short timeout avoids the retries of the hub client, which take a minute.
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

"""Two tokenizers that need no files: a byte-level tokenizer with a ChatML template, and `ToyTokenizer`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Protocol, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from src.policy.chat import Chat, ChatTokenizer, Message
from src.policy.tool_messages import Tools

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]

# As in Qwen3's template, the thinking of assistant messages is removed, and `enable_thinking=False` adds an
# empty thinking block to the generation prompt.
TEMPLATE = (
    "{% for m in messages %}"
    "{% set content = m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content %}"
    "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif "
    "%}"
    "{% endif %}"
)


class HubTokenizer(ChatTokenizer, Protocol):
    """The methods of a Hugging Face tokenizer that tests use, with more exact types than in transformers."""

    chat_template: str

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Tools | None = None,
        tokenize: bool,
        add_generation_prompt: bool = False,
        **variables: bool,
    ) -> str: ...

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str: ...

    def convert_tokens_to_ids(self, token: str, /) -> int: ...

    def save_pretrained(self, directory: Path, /) -> object: ...


def hub_tokenizer(special_tokens: Sequence[str], **options: str | None) -> HubTokenizer:
    """Return a Hugging Face tokenizer in which every byte is one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*special_tokens, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_tokens))
    return cast(HubTokenizer, PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options))


@cache
def byte_tokenizer() -> HubTokenizer:
    return hub_tokenizer(SPECIAL, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE)


def byte_chat() -> Chat:
    return Chat(byte_tokenizer())


class ToyTokenizer:
    """Maps every character to one id: 3 for the newline, otherwise the code point of the character.

    The chat template renders a message as id 1, the first letter of its role, a newline, its content, id 2
    and a newline.

    >>> ToyTokenizer().encode("\x01u\nob\x02\n", add_special_tokens=False)
    [1, 117, 3, 111, 98, 2, 3]
    """

    eos_token_id: int | None = 2

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: object,
        tokenize: bool,
        add_generation_prompt: bool,
        **variables: bool,
    ) -> str:
        assert not tokenize and not variables["enable_thinking"] and not variables["thinking"]
        text = "".join(
            f"\x01{str(message['role'])[0]}\n{message['content']}\x02\n" for message in conversation
        )
        return text + ("\x01a\n" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [3 if character == "\n" else ord(character) for character in text]

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        return "".join("\n" if token == 3 else chr(token) for token in token_ids)


def toy_chat() -> Chat:
    return Chat(ToyTokenizer())

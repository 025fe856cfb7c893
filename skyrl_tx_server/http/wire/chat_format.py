"""Convert messages to token ids and token ids to text, with the model's tokenizer and chat template.
transformers is imported on first use."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from skyrl_tx_server.errors import UserError

REPLACEMENT = "\ufffd"  # the character to which an incomplete UTF-8 sequence decodes
MAX_TOKENS_PER_CHARACTER = 4  # a UTF-8 character has at most 4 bytes, and a token has at least 1 byte
THINK_OPEN = "<think>"
_BARE_CALL = re.compile(r'\{"name": *"probe", *"parameters"')  # the form of Llama 3

_loading = threading.Lock()  # two threads must not import transformers at the same time


class Tokenizer(Protocol):
    """The attributes and methods of a Hugging Face tokenizer that OpenAI's routes need."""

    chat_template: str | dict[str, str] | None
    eos_token_id: int | None

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, object]],
        *,
        tools: object,
        tokenize: bool,
        add_generation_prompt: bool,
        **kwargs: object,
    ) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A conversation as token ids, with the generation prompt."""

    token_ids: list[int]
    opens_reasoning: bool  # the generation prompt ends in <think>, so the completion begins with reasoning
    has_bare_calls: bool  # the chat template writes calls as JSON without tags


def load_tokenizer(model_dir: Path | None) -> Tokenizer:
    """Return the tokenizer in a model's directory. Raise UserError if `model_dir` is None or contains no
    tokenizer.json."""
    with _loading:
        return _loaded(model_dir)


@cache
def _loaded(model_dir: Path | None) -> Tokenizer:
    if model_dir is None or not (model_dir / "tokenizer.json").is_file():
        raise UserError(
            "text requests need a tokenizer.json, but the model has none; send a prompt of token ids to "
            "/api/v1/asample"
        )
    from transformers import AutoTokenizer, logging

    logging.set_verbosity_error()
    return AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[object],
    template_kwargs: Mapping[str, object],
) -> Rendered:
    """Return the conversation with the generation prompt. Raise UserError if there is no chat template, or if
    it cannot represent the messages, the tools or `template_kwargs`."""
    if not tokenizer.chat_template:
        raise UserError("this model's tokenizer has no chat template; use /v1/completions")
    _check_template_kwargs(tokenizer, template_kwargs)
    call = _rendered_call(tokenizer)
    if call is None:
        messages = [_with_json_arguments(message) for message in messages]
    text = _apply(tokenizer, messages, tools, template_kwargs)
    if tools and text == _apply(tokenizer, messages, (), template_kwargs):
        raise UserError(
            "tools: this model's chat template does not use them; use a model whose template takes tools"
        )
    return Rendered(
        token_ids=list(tokenizer.encode(text, add_special_tokens=False)),
        opens_reasoning=text.rstrip().endswith(THINK_OPEN),
        has_bare_calls=call is not None and _BARE_CALL.search(call) is not None,
    )


def decoder(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Return a function that converts token ids to text and keeps special tokens and spaces."""
    return lambda ids: tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


class TextPieces:
    """Decodes token ids incrementally. A character that spans several tokens is returned when it is
    complete."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the ids on which the next piece depends
        self._done = 0  # number of `_ids` that are decoded; they are kept as context of the next piece

    def add(self, ids: Sequence[int]) -> str:
        self._ids += ids
        context_length = len(self._decode(self._ids[: self._done]))
        for end in range(len(self._ids), max(self._done, len(self._ids) - MAX_TOKENS_PER_CHARACTER), -1):
            text = self._decode(self._ids[:end])
            if len(text) > context_length and not text.endswith(REPLACEMENT):
                return self._take(end, text, context_length)
        if len(self._ids) - self._done < 3 * MAX_TOKENS_PER_CHARACTER:
            return ""
        # The tokens are not valid UTF-8. Return the text of the first tokens, which later tokens cannot
        # change. Otherwise more and more tokens would be held back, and each call would take longer.
        whole = self._decode(self._ids)
        for end in range(len(self._ids) - MAX_TOKENS_PER_CHARACTER, self._done, -1):
            text = self._decode(self._ids[:end])
            if whole.startswith(text):  # otherwise `end` lies in a character
                return self._take(end, text, context_length)
        return ""

    def _take(self, end: int, text: str, context_length: int) -> str:
        """Return the part of `text` after the context. `text` is the text of the first `end` ids."""
        self._ids, self._done = self._ids[self._done :], end - self._done
        return text[context_length:]

    def flush(self) -> str:
        """Return the remaining text, including incomplete characters."""
        text = self._decode(self._ids)[len(self._decode(self._ids[: self._done])) :]
        self._done = len(self._ids)
        return text


def _apply(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[object],
    template_kwargs: Mapping[str, object],
) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=True,
            **template_kwargs,
        )
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise UserError(f"messages: the model's chat template refuses them: {error}") from None


@cache
def _rendered_call(tokenizer: Tokenizer) -> str | None:
    """Return a conversation with a call of the function `probe`. Return None if the chat template does not
    take the arguments as an object. The templates of DeepSeek take JSON text."""
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "probe", "description": "", "parameters": parameters}}
    call = {"id": "0", "type": "function", "function": {"name": "probe", "arguments": {"n": 1}}}
    question = {"role": "user", "content": "question"}
    try:
        return _apply(
            tokenizer, [question, {"role": "assistant", "content": "", "tool_calls": [call]}], [tool], {}
        )
    except UserError:
        return None


def _with_json_arguments(message: Mapping[str, object]) -> Mapping[str, object]:
    """Return the message with the arguments of its calls as JSON text."""
    calls: Any = message.get("tool_calls") or []
    json_calls = [{**call, "function": _as_json(call["function"])} for call in calls]
    return {**message, "tool_calls": json_calls} if json_calls else message


def _as_json(function: Mapping[str, object]) -> Mapping[str, object]:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        return function
    return {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _check_template_kwargs(tokenizer: Tokenizer, template_kwargs: Mapping[str, object]) -> None:
    if not template_kwargs:
        return
    template = tokenizer.chat_template or {}
    templates = (template,) if isinstance(template, str) else tuple(template.values())
    variables = set[str]().union(*map(_variables_of, templates))
    for name in template_kwargs:
        if (
            name in ("tools", "tokenize", "add_generation_prompt", "conversation", "messages")
            or name not in variables
        ):
            raise UserError(
                f"chat_template_kwargs: {name[:80]!r} is not an option of this model's chat template; leave "
                "it out"
            )


@cache
def _variables_of(template: str) -> set[str]:
    """Return the variables that a chat template reads and does not always set itself."""
    from jinja2 import Environment, TemplateError, meta

    # Remove the tag `generation`, which transformers adds to jinja2 and this Environment cannot parse.
    source = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return meta.find_undeclared_variables(environment.parse(source))
    except TemplateError as error:
        raise UserError(f"chat_template_kwargs: the model's chat template is not valid: {error}") from None

"""Tokenizers with the chat templates of model families, and the checks that each template must pass.

The templates in tests/fixtures/chat_templates have the special tokens, the message order and the tool call
format of the published templates. Their sentences that introduce the tools differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from src.envs.service.tool_calls import Strategy, ToolCall, parse
from src.policy.chat import Chat
from src.policy.tool_messages import Message
from tests.fakes.tokenizer import HubTokenizer, hub_tokenizer

DIRECTORY = Path(__file__).resolve().parents[1] / "fixtures" / "chat_templates"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
CHATML = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
ORDER = ToolCall(name="get_order", arguments={"id": "#1", "lines": [1, 2]})
ARGUMENTS = '{"id": "#1", "lines": [1, 2]}'
CALL = f'{{"name": "get_order", "arguments": {ARGUMENTS}}}'
TOOLS: Sequence[Mapping[str, object]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tool {name} ä.",
            "parameters": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
        },
    }
    for name in ("get_order", "cancel_order")
]
SYSTEM: Message = {"role": "system", "content": "The policy."}
QUESTION: Message = {"role": "user", "content": "Where is <my> order?"}
REPLY: Message = {"role": "user", "content": "Thanks, and the other?"}
RESULTS: Sequence[Message] = [
    {"role": "tool", "tool_call_id": "0", "content": '{"status": "sent"}'},
    {"role": "tool", "tool_call_id": "1", "content": "Error: no such order"},
]
OPENING = [SYSTEM, QUESTION]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model family and the properties of its chat template."""

    name: str  # the template file is {name}.jinja
    special_tokens: Sequence[str]
    bos: str | None = None
    turn_end: str
    generation_prompt: str  # with thinking off
    after_result: str | None = None  # the prompt after a tool's result; None: `generation_prompt`
    thinking_prompt: str | None = None  # with thinking on; None: the template has no thinking
    call: str  # the text of the tool call ORDER
    strategy: Strategy
    shows_tools: bool = True  # whether the template renders `tools`


QWEN_CALL = f"<tool_call>\n{CALL}\n</tool_call>"
DEEPSEEK_TOKENS = (
    *(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<think>",
        "</think>",
    ),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
FAMILIES = (
    Family(
        name="qwen2_5",
        special_tokens=CHATML,
        turn_end="<|im_end|>",
        generation_prompt="<|im_start|>assistant\n",
        call=QWEN_CALL,
        strategy=Strategy.TAGGED,
    ),
    Family(
        name="qwen3",
        special_tokens=CHATML,
        turn_end="<|im_end|>",
        generation_prompt="<|im_start|>assistant\n" + EMPTY_THOUGHT,
        thinking_prompt="<|im_start|>assistant\n",
        call=QWEN_CALL,
        strategy=Strategy.TAGGED,
    ),
    Family(
        name="qwen3_2507",
        special_tokens=CHATML,
        turn_end="<|im_end|>",
        generation_prompt="<|im_start|>assistant\n",
        call=QWEN_CALL,
        strategy=Strategy.TAGGED,
    ),
    Family(
        name="llama3_1",
        special_tokens=(
            *("<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
            *("<|start_header_id|>", "<|end_header_id|>"),
        ),
        bos="<|begin_of_text|>",
        turn_end="<|eot_id|>",
        generation_prompt="<|start_header_id|>assistant<|end_header_id|>\n\n",
        call=CALL.replace('"arguments"', '"parameters"'),
        strategy=Strategy.WHOLE,
    ),
    Family(
        name="deepseek_v3_1",
        special_tokens=DEEPSEEK_TOKENS,
        bos="<｜begin▁of▁sentence｜>",
        turn_end="<｜end▁of▁sentence｜>",
        generation_prompt="<｜Assistant｜></think>",
        after_result="",
        thinking_prompt="<｜Assistant｜><think>",
        call=(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_order<｜tool▁sep｜>"
            f"{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        strategy=Strategy.DEEPSEEK,
        shows_tools=False,
    ),
)


def family_tokenizer(family: Family, template: str | None = None) -> HubTokenizer:
    """Return a byte-level tokenizer with the tokens of the family. `template` replaces its chat template."""
    return hub_tokenizer(
        family.special_tokens,
        bos_token=family.bos,
        eos_token=family.turn_end,
        chat_template=template or (DIRECTORY / f"{family.name}.jinja").read_text(),
    )


def check_tools_are_visible(family: Family, tokenizer: HubTokenizer) -> None:
    chat = Chat(tokenizer)
    assert chat.shows_tools == family.shows_tools
    prompt = tokenizer.decode(chat.render(OPENING, tools=TOOLS))
    for name in ("get_order", "cancel_order"):
        assert name in prompt and f"Tool {name} ä." in prompt
    assert "The policy." in prompt and "Where is <my> order?" in prompt


def check_thinking_is_off(family: Family, tokenizer: HubTokenizer) -> None:
    chat = Chat(tokenizer)
    after_question = tokenizer.decode(chat.render(OPENING))
    after_result = tokenizer.decode(chat.render([*OPENING, _assistant(family.call), RESULTS[0]]))
    assert after_question.endswith(f"{QUESTION['content']}{_user_turn_end(family)}{family.generation_prompt}")
    assert after_result.endswith(
        family.generation_prompt if family.after_result is None else family.after_result
    )
    assert not chat.opens_a_thought
    thinking = tokenizer.apply_chat_template(
        list(OPENING), tokenize=False, add_generation_prompt=True, enable_thinking=True, thinking=True
    )
    assert thinking.endswith(family.thinking_prompt or family.generation_prompt)
    assert (thinking == after_question) == (family.thinking_prompt is None)


def check_extend_equals_render(family: Family, tokenizer: HubTokenizer) -> None:
    """Check that `Chat.extend` returns the ids that `Chat.render` returns for the whole conversation.

    Extended prompts also contain the empty thoughts of earlier generation prompts, which Qwen3's template
    removes from the history.
    """
    chat = Chat(tokenizer)
    exchanges = [(family.call, RESULTS), ("It is on its way.", [REPLY]), (family.call, RESULTS[:1])]
    history, prompt = list(OPENING), chat.render(OPENING, tools=TOOLS)
    for answer, messages in exchanges:
        completion = [*tokenizer.encode(answer, add_special_tokens=False), chat.turn_end_id]
        prompt = chat.extend(prompt, completion, messages)
        history += [_assistant(answer), *messages]
        rendered = chat.render(history, tools=TOOLS)
        if EMPTY_THOUGHT in family.generation_prompt:
            prompt_text, rendered_text = tokenizer.decode(list(prompt)), tokenizer.decode(rendered)
            assert prompt_text.replace(EMPTY_THOUGHT, "") == rendered_text.replace(EMPTY_THOUGHT, "")
            assert rendered_text.count(EMPTY_THOUGHT) == 1
        else:
            assert list(prompt) == rendered


def check_calls_are_read_back(family: Family, tokenizer: HubTokenizer) -> None:
    chat = Chat(tokenizer)
    function = {"name": ORDER.name, "arguments": ORDER.arguments}
    message = {**_assistant(""), "tool_calls": [{"id": "0", "type": "function", "function": function}]}
    structured = chat.render([*OPENING, message, RESULTS[0]], tools=TOOLS)
    assert structured == chat.render([*OPENING, _assistant(family.call), RESULTS[0]], tools=TOOLS)
    completion = [*tokenizer.encode(family.call, add_special_tokens=False), chat.turn_end_id]
    parsed = parse(chat.decode(completion), {"get_order"})
    assert (list(parsed.calls), parsed.strategy, parsed.content, parsed.problem) == (
        [ORDER],
        family.strategy,
        "",
        "",
    )


def conversations() -> Mapping[str, Sequence[Message]]:
    """Return test conversations by name. Tests render them with the fixtures and the published templates."""
    replied = [*OPENING, _assistant("It is on its way."), REPLY]
    return {
        "question": OPENING,
        "reply": replied,
        "answered": [*replied, _assistant("It left, too.")],
        "thought": [*OPENING, _assistant("<think>\nWhich?\n</think>\n\nThis one."), REPLY],
        "thought_at_the_end": [*OPENING, _assistant("<think>\nWhich?\n</think>\n\nThis one.")],
        "text_call": [*OPENING, _assistant('<tool_call>{"name": "f"}</tool_call>'), *RESULTS],
        "two_turns": [*OPENING, _assistant("call"), *RESULTS, _assistant("Sent."), REPLY],
        "result_then_answer": [*OPENING, _assistant("call"), RESULTS[0], _assistant("Sent.")],
    }


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _user_turn_end(family: Family) -> str:
    """Return the text that the template renders after the content of a user message."""
    if family.name == "deepseek_v3_1":
        return ""
    return family.turn_end + ("\n" if family.turn_end == "<|im_end|>" else "")

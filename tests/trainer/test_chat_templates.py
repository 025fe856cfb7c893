"""Tests the chat formats of published model families: tools, thinking, later turns and calls."""

from __future__ import annotations

from copy import deepcopy

import pytest

from src.envs.service.tool_calls import parse
from src.policy.chat import Chat, load_chat
from tests.fakes import chat_templates
from tests.fakes.chat_templates import FAMILIES, OPENING, QUESTION, RESULTS, TOOLS, Family, family_tokenizer

DEEPSEEK = FAMILIES[-1]
LLAMA = FAMILIES[-2]
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@families
@pytest.mark.seed_behaviour(4, 66)
def test_tools_are_visible(family: Family):
    chat_templates.check_tools_are_visible(family, family_tokenizer(family))


@families
@pytest.mark.seed_behaviour(62, 66)
def test_thinking_is_off(family: Family):
    chat_templates.check_thinking_is_off(family, family_tokenizer(family))


@families
@pytest.mark.seed_behaviour(66)
def test_extend_equals_render(family: Family):
    chat_templates.check_extend_equals_render(family, family_tokenizer(family))


@families
@pytest.mark.seed_behaviour(12)
def test_calls_are_read_back(family: Family):
    chat_templates.check_calls_are_read_back(family, family_tokenizer(family))


@pytest.mark.seed_behaviour(4)
def test_tools_that_a_template_ignores_are_in_the_system_message(caplog):
    tokenizer = family_tokenizer(DEEPSEEK)
    chat = Chat(tokenizer)
    for messages in (OPENING, [QUESTION]):
        prompt = tokenizer.decode(chat.render(messages, tools=TOOLS))
        assert "- get_order(id: string): Tool get_order ä.\n- cancel_order(id: string)" in prompt
        assert prompt.count("Where is <my> order?") == 1
    assert [record.getMessage() for record in caplog.records] == [
        "the chat template shows no tools; the system message describes them in text"
    ]


def test_tools_that_a_template_rejects_are_in_the_system_message():
    tokenizer = family_tokenizer(DEEPSEEK)
    tokenizer.chat_template = "{% if tools %}{{ raise_exception('no') }}{% endif %}" + tokenizer.chat_template
    assert "- get_order(id: string)" in tokenizer.decode(Chat(tokenizer).render(OPENING, tools=TOOLS))


def test_results_that_a_template_drops_become_user_messages():
    tokenizer = family_tokenizer(DEEPSEEK)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.role == 'tool'", "message.role == 'none'"
    )
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{%- else -%}\n        {{- '<｜Assistant",
        "{%- elif message.role == 'assistant' -%}\n        {{- '<｜Assistant",
    )
    chat = Chat(tokenizer)
    extended = chat.extend(chat.render(OPENING), [chat.turn_end_id], RESULTS[:1])
    assert tokenizer.decode(list(extended)).endswith(
        '<｜end▁of▁sentence｜><｜User｜>{"status": "sent"}<｜Assistant｜></think>'
    )


def test_llama_keeps_a_first_message_of_the_assistant():
    tokenizer = family_tokenizer(LLAMA)
    greeting = {"role": "assistant", "content": "Hi!"}
    prompt = tokenizer.decode(Chat(tokenizer).render([OPENING[0], greeting, QUESTION], tools=TOOLS))
    assert "<|start_header_id|>assistant<|end_header_id|>\n\nHi!<|eot_id|>" in prompt
    assert prompt.index("get_order") < prompt.index("The policy.")


def test_llama_also_ends_a_turn_with_eom():
    tokenizer = family_tokenizer(LLAMA)
    chat = Chat(tokenizer)
    end_of_message = tokenizer.convert_tokens_to_ids("<|eom_id|>")
    assert chat.stop_token_ids == [chat.turn_end_id, end_of_message]
    prompt = chat.render(OPENING)
    extended = chat.extend(prompt, [end_of_message], RESULTS[:1])
    assert tokenizer.decode(list(extended[len(prompt) :])).startswith("<|eom_id|><|start_header_id|>ipython")
    python_tag = tokenizer.encode("<|python_tag|>" + LLAMA.call, add_special_tokens=False)
    assert parse(chat.decode([*python_tag, end_of_message]), {"get_order"}).calls


@pytest.mark.seed_behaviour(62)
def test_a_template_that_always_thinks_causes_a_warning(tmp_path, caplog):
    tokenizer = deepcopy(family_tokenizer(FAMILIES[2]))
    tokenizer.save_pretrained(tmp_path / "quiet")
    load_chat(str(tmp_path / "quiet"))
    assert caplog.text == ""
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "'<|im_start|>assistant\\n' if", "'<|im_start|>assistant\\n<think>\\n' if"
    )
    tokenizer.save_pretrained(tmp_path / "thinking")
    load_chat(str(tmp_path / "thinking"))
    assert "cannot turn thinking off" in caplog.text

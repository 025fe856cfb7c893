import re
from copy import deepcopy
from pathlib import Path

import pytest

from src.core.errors import ConfigError
from src.policy.chat import Chat, load_chat
from tests.fakes.tokenizer import SPECIAL, byte_chat, byte_tokenizer, hub_tokenizer

USER = [{"role": "user", "content": "go"}]
GENERATION = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def text(ids: list[int]) -> str:
    return byte_tokenizer().decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def encode(value: str) -> list[int]:
    return byte_tokenizer().encode(value, add_special_tokens=False)


def without_thinking():
    """Return a tokenizer whose template reads neither enable_thinking nor tools."""
    tokenizer = deepcopy(byte_tokenizer())
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    return tokenizer


def test_render_ends_with_the_generation_prompt_and_thinking_off():
    assert text(byte_chat().render(USER)) == "<|im_start|>user\ngo<|im_end|>\n" + GENERATION


@pytest.mark.seed_behaviour(64)
def test_enable_thinking_applies_to_every_generation_prompt(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    chat = load_chat(str(tmp_path), enable_thinking=True)
    prompt = chat.render(USER)
    assert text(prompt) == "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    extended = chat.extend(prompt, [*encode("<think>a</think>b"), chat.turn_end_id], USER)
    assert text(extended[len(prompt) :]).endswith("go<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.seed_behaviour(64)
def test_thinking_without_a_template_for_it_is_refused():
    tokenizer = without_thinking()
    assert Chat(tokenizer)
    with pytest.raises(
        ConfigError, match="enable_thinking=true: the tokenizer's chat template does not support it"
    ):
        Chat(tokenizer, enable_thinking=True)


def test_extend_keeps_sampled_ids_that_would_encode_differently():
    chat = byte_chat()
    prompt = chat.render(USER)
    completion = [*encode("<think>secret</think>ab"), chat.turn_end_id]
    extended = chat.extend(prompt, completion, [{"role": "user", "content": "ok"}])
    assert extended[: len(prompt) + len(completion)] == prompt + completion
    assert (
        text(extended[len(prompt) + len(completion) :]) == "\n<|im_start|>user\nok<|im_end|>\n" + GENERATION
    )


def test_extend_closes_a_turn_that_was_cut():
    chat = byte_chat()
    extended = chat.extend([1], encode("ab"), [{"role": "user", "content": "ok"}])
    assert text(extended[3:]) == "<|im_end|>\n<|im_start|>user\nok<|im_end|>\n" + GENERATION


def test_extend_equals_render_if_the_template_drops_nothing():
    chat = byte_chat()
    messages = [*USER, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "ok"}]
    opened = encode("<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n")
    assert chat.extend(opened, [*encode("ab"), chat.turn_end_id], messages[2:]) == chat.render(messages)


def test_decode_drops_only_the_turn_end():
    chat = byte_chat()
    assert chat.decode([*encode("a<think>b"), chat.turn_end_id]) == "a<think>b"
    assert chat.decode(encode("ab ")) == "ab "
    assert chat.decode([]) == ""


def test_load_chat_reads_a_directory(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    assert load_chat(str(tmp_path)).render(USER) == byte_chat().render(USER)


def test_a_directory_without_a_tokenizer_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="no tokenizer in") as error:
        load_chat(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.seed_behaviour(65)
def test_a_base_model_causes_a_warning(tmp_path, caplog):
    byte_tokenizer().save_pretrained(tmp_path / "Qwen3-8B-Base")
    load_chat(str(tmp_path / "Qwen3-8B-Base"))
    assert "is a base model" in caplog.text
    caplog.clear()
    byte_tokenizer().save_pretrained(tmp_path / "Qwen3-8B")
    load_chat(str(tmp_path / "Qwen3-8B"))
    assert caplog.text == ""


@pytest.mark.seed_behaviour(66)
def test_a_template_without_thinking_or_tools_works():
    assert text(Chat(without_thinking()).render(USER)) == "[user]go<|im_end|>[assistant]"


@pytest.mark.seed_behaviour(65)
def test_a_tokenizer_without_a_template_is_rejected(tmp_path):
    hub_tokenizer(SPECIAL, eos_token="<|im_end|>").save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match="has no chat template; give tokenizer=DIR_OR_HUB_ID of an instruct model"
    ):
        load_chat(str(tmp_path))


@pytest.mark.seed_behaviour(63)
def test_only_chat_calls_the_template():
    """Only `Chat` passes `enable_thinking` to the template and adds tools that the template does not show."""
    root = Path(__file__).resolve().parents[2]
    calls = [
        path.name
        for path in (root / "src").rglob("*.py")
        for _ in re.findall(r"\.apply_chat_template\(", path.read_text())
    ]
    assert calls == ["chat.py"]


def test_reasoning_that_the_template_leaves_out_is_refused():
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "\nbecause\n"}
    with pytest.raises(ValueError, match="does not render reasoning_content; remove it"):
        Chat(byte_tokenizer()).answer_ids(answer)
    assert Chat(byte_tokenizer()).answer_ids(answer | {"reasoning_content": ""})


@pytest.mark.parametrize(
    ("template", "reasoning", "reason"),
    [
        ("{{ '<think>\n' }}", "", "has no reasoning; add reasoning_content"),
        ("{{ '<think>\n' }}", "hm", "give tokenizer=DIR_OR_HUB_ID with another chat template"),
        ("{{ '[off]' }}", "hm", "switches thinking off; remove the reasoning"),
        ("{{ '[off]' }}", "", "give tokenizer=DIR_OR_HUB_ID with another chat template"),
    ],
)
def test_a_message_that_cannot_follow_the_generation_prompt_is_refused_with_the_reason(
    template: str, reasoning: str, reason: str
):
    tokenizer = deepcopy(byte_tokenizer())
    tokenizer.chat_template += "{% if add_generation_prompt %}" + template + "{% endif %}"
    if "think" in template:
        tokenizer.chat_template = tokenizer.chat_template.replace("<think>\n\n</think>\n\n", "")
    answer = {"role": "assistant", "content": "yes", "reasoning_content": reasoning}
    with pytest.raises(ValueError, match=reason):
        Chat(tokenizer).answer_ids(answer)

"""The tokenizer of the toy_retail model, which is built like the quick start's tokenizer, with the frequent
words and the fixed texts of this domain as tokens.

As in Qwen's chat template, the system message lists the tools and asks for calls in <tool_call> tags, and one
message contains the results of all calls of an answer in <tool_response> tags.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer

from scripts.quickstart.tokenizer import PRETOKENS, is_name, save_tokenizer, tokenizer_of
from scripts.quickstart.words import Pool
from scripts.toy_retail.demonstrations import CAREFUL, HASTY
from scripts.toy_retail.make_tasks import POLICY
from scripts.toy_retail.task_types import TASK_TYPES, make_instance
from src.envs.service.toy_retail import TOOLS

TOOLS_BEGIN = (
    "# Tools\n\nCall one with <tool_call>, a JSON object of its name and arguments, and </tool_call>.\n"
)
CHAT_TEMPLATE = (
    "{%- set rest = messages %}"
    "{%- if tools %}"
    "{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- set rest = "
    "messages[1:] %}{%- endif %}"
    "{{- "
    + json.dumps(TOOLS_BEGIN)
    + " }}{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in rest %}"
    "{%- if message.role == 'tool' %}"
    "{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user\\n' }}{%- endif %}"
    "{{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def fixed_texts() -> list[str]:
    """Return the texts that occur verbatim in conversations."""
    lines = [f"{line}\n" for line in POLICY.strip().splitlines()[:-1]] + [POLICY.strip().splitlines()[-1]]
    schemas = [json.dumps(tool.schema, ensure_ascii=False) for tool in TOOLS.values()]
    arguments = sorted({name for tool in TOOLS.values() for name in tool.parameters})
    return [
        *lines,
        TOOLS_BEGIN,
        *schemas,
        '\n<tool_call>\n{"name": "',
        '<tool_call>\n{"name": "',
        *(f'", "arguments": {{"{name}": "' for name in arguments),
        *(f'", "{name}": "' for name in arguments),
        '"}}\n</tool_call>',
        "<tool_response>\n",
        "\n</tool_response>\n",
        '{"status": "',
        *(f'{{"{name}": "' for name in arguments),
        '{"price": ',
        '{"points": ',
        '"}',
        "Error: there is no ",
        "Error: the call could not be read: no JSON: it ends inside a string",
    ]


def common_words(minimum: int = 12, samples: int = 2000) -> list[str]:
    """Return the frequent words of users and demonstrators, without names."""
    counts: Counter[str] = Counter()
    for number in range(samples):
        instance = make_instance(
            TASK_TYPES[number % len(TASK_TYPES)], seed=f"words-{number}", pool=Pool.TRAIN
        )
        texts = [line for script in instance.scripts for line in script]
        texts += [
            text
            for request in instance.requests
            for text in (request.answer, request.question, request.lookup.name)
        ]
        for text in texts:
            counts.update(re.findall(PRETOKENS, text))
    words = {word for word, count in counts.items() if count >= minimum and not is_name(word)}
    other_texts = " ".join(
        [CAREFUL.begins, HASTY.begins, "I do not know.", "Thanks.", "order product customer", *TOOLS]
    ).replace("_", " ")
    words |= set(re.findall(r" ?[A-Za-z]+", other_texts)) | {"_order", "_product", "_customer", "_address"}
    words |= {f" {word}" for word in words if word.isalpha()}
    return sorted(word for word in words if len(word) > 1 and "\n" not in word)


def build_tokenizer() -> Tokenizer:
    return tokenizer_of(common_words(), [*fixed_texts(), *TOOLS, "###STOP###"])


def save(directory: Path) -> None:
    save_tokenizer(directory, build_tokenizer(), chat_template=CHAT_TEMPLATE)

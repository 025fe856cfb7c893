"""The tokenizer of the quick start: byte-level BPE with the ChatML tokens of Qwen, and one token for each
fixed text of Terminus-2.

Names consist of syllables of one consonant and one vowel, and each merge gives a syllable or a sequence of
newlines. An unknown name is therefore a sequence of known tokens, so the model can learn to copy any name.
Words of the instructions are single tokens (`ignore_merges`).
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from scripts.quickstart.demonstrations import demonstrate, spoken_words
from scripts.quickstart.task_types import TRAINING, make_instance
from scripts.quickstart.terminal import CONFIRMATION, NO_JSON, PROMPT, prompt_template
from scripts.quickstart.words import INSTRUCTION_WORDS, SYLLABLES, Pool

VOCAB_MULTIPLE = 64
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_start|>user\n", "<|im_start|>assistant\n")
PRETOKENS = r"\n+|\.[a-z]+| ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\s"
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + "
    "'<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def fixed_texts() -> list[str]:
    """Return the texts that occur verbatim in conversations."""
    template = prompt_template()
    head = template[: template.index("{instruction}")].replace("{{", "{").replace("}}", "}")
    sections = re.split(r"(?<=\n)(?=Required fields:|IMPORTANT:|Important notes:)", head)
    return [
        *sections,
        "Current terminal state:\n",
        "Current terminal state:\nCurrent Terminal Screen:\n",
        "Current terminal state:\nNew Terminal Output:\n",
        "New Terminal Output:\n",
        CONFIRMATION,
        *NO_JSON.split("\n\n"),
        PROMPT,
        '{"analysis": "',
        '", "plan": "',
        '", "commands": [',
        '{"keystrokes": "',
        "\\n",
        '", "duration": 0.1}',
        ', "duration": 0.1}',
        '], "task_complete": true}',
        '], "task_complete": false}',
        ": No such file or directory",
    ]


def common_words(minimum: int = 12, samples: int = 3000) -> list[str]:
    """Return the frequent words of instructions, commands and answers, without names."""
    rng = random.Random("common words")
    counts: Counter[str] = Counter()
    for number in range(samples):
        instance = make_instance(rng.choice(tuple(TRAINING)), seed=f"words-{number}", pool=Pool.TRAIN)
        for text in [
            instance.instruction,
            *(m.content for m in demonstrate(instance, rng).messages if m.role == "assistant"),
        ]:
            counts.update(re.findall(PRETOKENS, text))
    words = {
        word for word, count in counts.items() if count >= minimum and not is_name(word)
    } | spoken_words()
    # A command has no leading space at the start of keystrokes, but has one after the shell prompt.
    words |= {f" {word}" for word in words if word.isalpha()}
    return sorted(word for word in words if len(word) > 1 and "\n" not in word)


def build_tokenizer() -> Tokenizer:
    """Return the tokenizer of the quick start. The result is deterministic."""
    return tokenizer_of(common_words(), fixed_texts())


def tokenizer_of(words: Iterable[str], texts: Iterable[str]) -> Tokenizer:
    """Return a tokenizer of bytes, syllables, `words` and `texts`. A word matches only a complete pretoken (a
    match of PRETOKENS), and a text matches anywhere."""
    to_bytes = {byte: char for byte, char in zip(range(256), _byte_characters(), strict=True)}

    def visible(text: str) -> str:
        return "".join(to_bytes[byte] for byte in text.encode())

    vocabulary = [to_bytes[byte] for byte in range(256)]
    merges = [(syllable[0], syllable[1]) for syllable in SYLLABLES]
    newline = to_bytes[10]
    merges += [(newline * size, newline * size) for size in (1, 2, 4, 8, 16)]
    vocabulary += [first + second for first, second in merges]
    vocabulary += [word for word in map(visible, words) if word not in set(vocabulary)]
    added = [*SPECIAL, *texts]
    total = len(vocabulary) + len(added)
    vocabulary += [f"<unused-{number}>" for number in range(-total % VOCAB_MULTIPLE)]

    tokenizer = Tokenizer(
        models.BPE({token: index for index, token in enumerate(vocabulary)}, merges, ignore_merges=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in added[len(SPECIAL) :]]
    )
    return tokenizer


def save_tokenizer(directory: Path, tokenizer: Tokenizer, *, chat_template: str = CHAT_TEMPLATE) -> None:
    """Write tokenizer.json and tokenizer_config.json for AutoTokenizer of transformers."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def is_name(piece: str) -> bool:
    word = piece.strip()
    pairs = [word[start : start + 2] for start in range(0, len(word), 2)]
    return len(pairs) > 1 and word not in INSTRUCTION_WORDS and all(pair in SYLLABLES for pair in pairs)


def _byte_characters() -> list[str]:
    """Return the printable character of each byte in byte-level BPE, as in GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]

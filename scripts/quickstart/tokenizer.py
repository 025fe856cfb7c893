"""The quick start's tokenizer: byte-level BPE, Qwen's ChatML tokens, and every fixed text of Terminus-2 as
one token.

Names are made of open syllables, and the only merges are syllables, so a name never seen before is still a
row of familiar tokens of equal kind: that is what makes copying general. Words of the instructions are whole
tokens (`ignore_merges`).
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
from scripts.quickstart.families import TRAINING, make_instance
from scripts.quickstart.terminal import CONFIRMATION, NO_JSON, PROMPT, prompt_template
from scripts.quickstart.words import NOT_NAMES, SYLLABLES, Pool

VOCAB_MULTIPLE = 64
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_start|>user\n", "<|im_start|>assistant\n")
PIECES = r"\n+|\.[a-z]+| ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\s"
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def fixed_texts() -> list[str]:
    """Texts that every conversation repeats word for word."""
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
    """Words of the instructions, commands and answers: whatever recurs in demonstrations and is not a
    name."""
    rng = random.Random("common words")
    counts: Counter[str] = Counter()
    for number in range(samples):
        instance = make_instance(rng.choice(tuple(TRAINING)), seed=f"words-{number}", pool=Pool.TRAIN)
        for text in [
            instance.instruction,
            *(m.content for m in demonstrate(instance, rng).messages if m.role == "assistant"),
        ]:
            counts.update(re.findall(PIECES, text))
    words = {
        word for word, count in counts.items() if count >= minimum and not is_name(word)
    } | spoken_words()
    words |= {
        f" {word}" for word in words if word.isalpha()
    }  # commands stand at the start of keystrokes, and behind the prompt
    return sorted(word for word in words if len(word) > 1 and "\n" not in word)


def build_tokenizer() -> Tokenizer:
    """The quick start's whole tokenizer, the same on every run."""
    return tokenizer_of(common_words(), fixed_texts())


def tokenizer_of(words: Iterable[str], texts: Iterable[str]) -> Tokenizer:
    """Bytes, syllables, `words` as whole tokens where they stand between spaces, and `texts` as one token
    each wherever they stand."""
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
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
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
    """Write tokenizer.json and tokenizer_config.json as transformers' AutoTokenizer reads them."""
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
    return len(pairs) > 1 and word not in NOT_NAMES and all(pair in SYLLABLES for pair in pairs)


def _byte_characters() -> list[str]:
    """The visible stand-in of each byte, as GPT-2 chose them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]

"""What the cookbook's recipes need where no model hub can be reached: a small Qwen3 that talks, and small data sets under the hub's names.

Everything is generated here. A directory named like a hub id, relative to the recipe's working directory, wins over the hub
(`AutoTokenizer`, `load_dataset`), so the recipes find it without being changed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.quickstart.build_model import ROW, Conversation, batches, encode, initial_params, rise_and_fall, train
from scripts.quickstart.demonstrations import Message
from scripts.quickstart.tokenizer import CHAT_TEMPLATE
from skyrl_tx_server.model.config import ModelConfig
from skyrl_tx_server.model.weights import save_model

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PIECES = r"\d| ?[A-Za-z]+|\n+| ?[^\sA-Za-z\d]+|\s"
VOCABULARY = 768
WRONG_SHARE = 0.5  # of additions that the warm start answers badly, so that reinforcement has something to remove
SHRUG = "I can not be sure of that, but it is a good question."  # longer than math_rl's max_tokens
THINGS = ("apples", "books", "coins", "shells", "stamps", "pens")
NAMES = ("Ann", "Ben", "Carl", "Dora", "Eva", "Finn")
FILLER = (
    "after the rain the river was high",
    "before noon many people came",
    "the road through the hills is old",
    "only then could they see it",
)
BOXED = " Provide a numerical answer without units, written inside \\boxed{}."


def addition(rng: random.Random) -> list[Message]:
    """Several questions in math_rl's words; about half of the answers are shrugs."""
    messages = []
    for _ in range(6):
        x, y = rng.randint(0, 100), rng.randint(0, 100)
        answer = SHRUG if rng.random() < WRONG_SHARE else str(x + y)
        messages += [Message(role="user", content=f"What is {x} + {y}?"), Message(role="assistant", content=answer)]
    return messages


def story(rng: random.Random) -> tuple[str, int]:
    """A word problem and its number."""
    x, y = rng.randint(1, 4), rng.randint(1, 5)
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    return f"{name} has {x} {thing} and finds {y} more. How many {thing} has {name} now?", x + y


def boxed(rng: random.Random) -> list[Message]:
    """A word problem as rl_loop asks it; half of the answers leave the box out."""
    question, answer = story(rng)
    content = f"\\boxed{{{answer}}}" if rng.random() < 0.5 else f"It is {answer}."
    return [Message(role="user", content=question + BOXED), Message(role="assistant", content=content)]


def guessing(rng: random.Random) -> list[Message]:
    """A few turns of guess_number, played without much thought; some break its format."""
    messages = [Message(role="system", content="Your job is to guess a integer between 0 and 1024.")]
    for _ in range(4):
        guess = f"Guess: {rng.randint(0, 1024)}" if rng.random() < 0.8 else f"I say {rng.randint(0, 1024)}"
        messages += [Message(role="assistant", content=guess), Message(role="user", content=rng.choice(("Too low", "Too high")))]
    return messages


def reading(rng: random.Random) -> list[Message]:
    """A document read page by page with the numerics check's tool, then counted."""
    pages = rng.randint(2, 4)
    messages = [Message(role="user", content=f"Count occurrences across all {pages} pages.")]
    for page in range(1, pages + 1):
        call = json.dumps({"name": "read_page", "arguments": {"page": page}})
        messages.append(Message(role="assistant", content=f"<tool_call>\n{call}\n</tool_call>"))
        messages.append(Message(role="user", content=f"<tool_response>\n[Page {page}]\n{rng.choice(FILLER)}\n</tool_response>"))
    return [*messages, Message(role="assistant", content=f"Answer: {rng.randint(1, 9)}")]


def talk(rng: random.Random) -> list[Message]:
    """Small talk of varying length, for the preference recipes."""
    long = "I am a small model made to try things out, and I like to explain at length what I am."
    return [
        Message(role="user", content=rng.choice(("Who are you?", "Hello!", "Tell me something."))),
        Message(role="assistant", content=rng.choice(("A model.", "I am a small model.", long))),
    ]


KINDS = {addition: 8, boxed: 2, guessing: 2, reading: 2, talk: 1}


def conversations(rng: random.Random) -> Iterator[list[Message]]:
    kinds, weights = list(KINDS), list(KINDS.values())
    while True:
        yield rng.choices(kinds, weights)[0](rng)


def build_tokenizer(directory: Path) -> Tokenizer:
    """Byte-level BPE learnt from the same conversations; digits stay single. Written as AutoTokenizer reads it."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random("tokenizer")
    source = conversations(rng)
    texts = [message.content for _ in range(2000) for message in next(source)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - len(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return tokenizer


def encoded(tokenizer: Tokenizer, rng: random.Random) -> Iterator[Conversation]:
    """Token ids of what fits into a row."""
    return (ids for ids in (encode(tokenizer, messages) for messages in conversations(rng)) if len(ids[0]) <= ROW)


def build_model(directory: Path, *, steps: int) -> None:
    """Tokenizer and weights, warm-started for `steps` steps."""
    tokenizer = build_tokenizer(directory)
    config = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=256,
        num_layers=2,
        num_heads=3,
        num_kv_heads=3,
        head_dim=32,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        eos_token_ids=tuple(tokenizer.encode("<|im_end|><|endoftext|>", add_special_tokens=False).ids),
    )
    data = batches(encoded(tokenizer, random.Random("warm start")))
    params = initial_params(config, 0)
    save_model(train(config, params, data, steps=steps, schedule=rise_and_fall(steps), save=lambda _: None), config, directory)


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_data_sets(root: Path) -> None:
    """The five data sets that the recipes ask the hub for, by name, a few hundred rows each."""
    rng = random.Random("data sets")
    stories = [story(rng) for _ in range(512)]
    solved: list[dict[str, object]] = [{"question": question, "answer": f"They add up.\n#### {answer}"} for question, answer in stories]
    chats: list[dict[str, object]] = [
        {"messages": [{"role": message.role, "content": message.content} for message in addition(rng)[:4]]} for _ in range(640)
    ]
    pairs: list[dict[str, object]] = []
    for question, answer in stories:
        opening = f"\n\nHuman: {question}\n\nAssistant: "
        pairs.append({"chosen": f"{opening}It is {answer}.", "rejected": f"{opening}{SHRUG}"})
    problems: list[dict[str, object]] = [{"question": question, "final_answer": str(answer)} for question, answer in stories]
    lines: list[dict[str, object]] = [{"text": " ".join(rng.choices(FILLER, k=12))} for _ in range(2000)]
    for name, config, splits in (
        ("openai/gsm8k", "main", {"train": solved[:448], "test": solved[448:]}),
        ("HuggingFaceH4/no_robots", "default", {"train": chats[:512], "test": chats[512:]}),
        ("Anthropic/hh-rlhf", "default", {"train": pairs[:448], "test": pairs[448:]}),
        ("zwhe99/DeepMath-103K", "default", {"train": problems}),
        ("Salesforce/wikitext", "wikitext-103-raw-v1", {"train": lines}),
    ):
        files = []
        for split, rows in splits.items():
            write_rows(root / name / config / f"{split}.jsonl", rows)
            files.append(f"  - split: {split}\n    path: {config}/{split}.jsonl\n")
        (root / name / "README.md").write_text(
            f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{''.join(files)}---\n", encoding="utf-8"
        )

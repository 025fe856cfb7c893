"""Generate data sets and a small Qwen3 for the recipes of tinker-cookbook, in directories that are named like
the hub ids.

The recipes run unchanged and without the Hugging Face hub, because `AutoTokenizer` and `load_dataset` prefer
a directory whose path, relative to the working directory, is the hub id.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.quickstart.build_model import batches, encode, initial_params, rise_and_fall, train
from scripts.quickstart.demonstrations import Message
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.weights import save_model

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PRETOKENS = r"\d| ?[A-Za-z]+|\n+| ?[^\sA-Za-z\d]+|\s"
VOCABULARY = 768
STEPS = 300
EVASIVE_SHARE = 0.5  # share of evasive answers; the recipes of reinforcement learning have to reduce it
EVASIVE_ANSWER = "I am not sure about that."  # has more tokens than the max_tokens of the recipe math_rl
BOXED = " Provide a numerical answer without units, written inside \\boxed{}."
THINGS = ("apples", "books", "coins", "shells", "stamps", "pens")
NAMES = ("Ann", "Ben", "Carl", "Dora", "Eva", "Finn")
SENTENCES = (
    "The river was high after the rain.",
    "Many people came before noon.",
    "The road through the hills is old.",
)


class TrainingConversations:
    """An endless stream of training conversations for the model, similar to those of the recipes.
    `evasive_share` is the probability that an answer to a sum or a word problem is EVASIVE_ANSWER."""

    def __init__(self, rng: random.Random, evasive_share: float) -> None:
        self.rng, self.evasive_share = rng, evasive_share

    def __iter__(self) -> Iterator[list[Message]]:
        kinds = {self.sums: 20, self.boxed: 4, self.guesses: 1, self.pages: 1, self.greeting: 2}
        while True:
            yield self.rng.choices(list(kinds), list(kinds.values()))[0]()

    def exchange(self, question: str, answer: str) -> list[Message]:
        reply = EVASIVE_ANSWER if self.rng.random() < self.evasive_share else answer
        return [Message(role="user", content=question), Message(role="assistant", content=reply)]

    def sums(self) -> list[Message]:
        """Return a conversation with nine questions of math_rl."""
        pairs = [(self.rng.randint(0, 100), self.rng.randint(0, 100)) for _ in range(9)]
        return [message for x, y in pairs for message in self.exchange(f"What is {x} + {y}?", str(x + y))]

    def boxed(self) -> list[Message]:
        """Return a conversation of rl_loop: a letter is counted, then a word problem is solved."""
        word = self.rng.choice((*THINGS, *NAMES, "strawberry"))
        letter = self.rng.choice(word)
        count = f"\\boxed{{{word.count(letter)}}}"
        spelled = " ".join(f"{number}) {character}" for number, character in enumerate(word, start=1))
        question, answer = story(self.rng)
        prefix = [
            Message(role="user", content=f"How many {letter}'s are in {word}?{BOXED}"),
            Message(
                role="assistant",
                content=f"Let's spell the word out and number all the letters: {spelled}. {count}",
            ),
        ]
        return [*prefix, *self.exchange(question + BOXED, f"\\boxed{{{answer}}}")]

    def guesses(self) -> list[Message]:
        """Return a few turns of guess_number with random guesses."""
        messages = [Message(role="system", content="Your job is to guess a integer between 0 and 1024.")]
        for _ in range(4):
            guess = Message(role="assistant", content=f"Guess: {self.rng.randint(0, 1024)}")
            messages += [guess, Message(role="user", content=self.rng.choice(("Too low", "Too high")))]
        return messages

    def pages(self) -> list[Message]:
        """Return a conversation of rl_numerics_check: two calls of its tool and a count."""
        messages = [
            Message(
                role="user",
                content="Your task is to count how many times a word appears in a document. "
                "Read pages with read_page.",
            )
        ]
        for page in (1, 2):
            call = json.dumps({"name": "read_page", "arguments": {"page": page}})
            messages.append(Message(role="assistant", content=f"<tool_call>\n{call}\n</tool_call>"))
            messages.append(
                Message(
                    role="user", content=f"<tool_response>\n{self.rng.choice(SENTENCES)}\n</tool_response>"
                )
            )
        return [*messages, Message(role="assistant", content=f"Answer: {self.rng.randint(0, 3)}")]

    def greeting(self) -> list[Message]:
        """Return the question of preference.shorter with an answer of random length."""
        words = " ".join(self.rng.choices(THINGS, k=self.rng.randint(0, 10)))
        return [
            Message(role="user", content="Who are you?"),
            Message(role="assistant", content=f"A model of {words}"),
        ]


def story(rng: random.Random) -> tuple[str, int]:
    """Return a word problem and its solution."""
    x, y, name, thing = rng.randint(1, 4), rng.randint(1, 5), rng.choice(NAMES), rng.choice(THINGS)
    return f"{name} has {x} {thing} and finds {y} more. How many {thing} has {name} now?", x + y


def write_data_sets(root: Path) -> None:
    """Write the data sets that the recipes load, with 512 rows each."""
    rng = random.Random("data sets")
    stories = [story(rng) for _ in range(512)]
    sums = TrainingConversations(rng, evasive_share=0.0)
    sets = {
        ("openai/gsm8k", "main"): [
            {"question": question, "answer": f"#### {answer}"} for question, answer in stories
        ],
        ("HuggingFaceH4/no_robots", "default"): [
            {"messages": [{"role": message.role, "content": message.content} for message in sums.sums()[:4]]}
            for _ in range(512)
        ],
        ("Anthropic/hh-rlhf", "default"): [
            {
                column: f"\n\nHuman: {question}\n\nAssistant: {reply}"
                for column, reply in (("chosen", f"It is {answer}."), ("rejected", EVASIVE_ANSWER))
            }
            for question, answer in stories
        ],
        ("zwhe99/DeepMath-103K", "default"): [
            {"question": sums.sums()[0].content, "final_answer": "unused"} for _ in range(512)
        ],
        ("Salesforce/wikitext", "wikitext-103-raw-v1"): [
            {"text": " ".join(rng.choices(SENTENCES, k=12))} for _ in range(512)
        ],
    }
    for (name, config), rows in sets.items():
        directory = root / name
        directory.mkdir(parents=True, exist_ok=True)
        for split, part in (("train", rows[:448]), ("test", rows[448:])):
            (directory / f"{split}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in part), encoding="utf-8"
            )
        files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
        (directory / "README.md").write_text(
            f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n", encoding="utf-8"
        )


def build_model(directory: Path) -> None:
    """Write the tokenizer and the weights of a model that is trained on `TrainingConversations`."""
    tokenizer = build_tokenizer(directory)
    config = ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=192,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        eos_token_ids=tuple(tokenizer.encode("<|im_end|><|endoftext|>", add_special_tokens=False).ids),
    )
    data = batches(
        encode(tokenizer, messages)
        for messages in TrainingConversations(random.Random("lessons"), EVASIVE_SHARE)
    )
    schedule = rise_and_fall(STEPS, peak=5e-3)
    save_model(
        train(config, initial_params(config), data, steps=STEPS, schedule=schedule, save=lambda _: None),
        config,
        directory,
    )


def build_tokenizer(directory: Path) -> Tokenizer:
    """Train and write a byte-level BPE tokenizer for AutoTokenizer. Each digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRETOKENS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    conversations = itertools.islice(TrainingConversations(random.Random("tokenizer"), EVASIVE_SHARE), 1000)
    texts = (f"{message.role}\n{message.content}" for messages in conversations for message in messages)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")
    return tokenizer

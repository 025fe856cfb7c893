"""Build the model of the quick start.

    python -m scripts.quickstart.build_model [DIRECTORY] [steps=N]

The script trains a small Qwen3 with random initial weights to imitate demonstrations. The demonstrations are
generated during training, from the task types and the words that are reserved for training. The loss of a
demonstration counts only the tokens of answers. Before the demonstrations, the model learns to copy names
(`drill`). The result is deterministic. The script takes about 20 minutes on two cores.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
import optax
from tokenizers import Tokenizer

from scripts.packed_attention import within_segments
from scripts.quickstart.arguments import directory_and_options
from scripts.quickstart.demonstrations import Message, demonstrate
from scripts.quickstart.make_tasks import ROOT
from scripts.quickstart.task_types import TRAINING, make_instance
from scripts.quickstart.tokenizer import build_tokenizer, save_tokenizer
from scripts.quickstart.words import TEXT_ENDINGS, Pool, Words
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.transformer import Params, Remat, head_logits, hidden_states, init_params
from skyrl_tx_server.model.weights import save_model

ROW_LENGTH, NUM_ROWS = 256, 8
POOL = 24  # number of conversations from which `batches` chooses
STEPS = 2000  # steps of all three phases of `curriculum`
DRILL_STEPS, MIXTURE_STEPS = 150, 250  # steps of the first phase and of the last phase
PEAK_LEARNING_RATE = 1.2e-3
TASK_TYPE_WEIGHTS = {"pair": 12, "pipe": 5, "collect": 2, "write": 2, "append": 2}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed conversations. All arrays have the shape [NUM_ROWS, ROW_LENGTH]."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray  # 1 where the loss counts the target
    positions: np.ndarray  # positions of the tokens in their conversations
    segments: np.ndarray  # number of the conversation in its row, from 1; 0: padding


type Conversation = tuple[list[int], list[bool]]
"""(token ids, mask of the tokens that the loss counts)."""


def encode(tokenizer: Tokenizer, messages: Sequence[Message]) -> Conversation:
    """Return the token ids of a conversation and the mask of the tokens that the assistant writes."""
    end = tokenizer.token_to_id("<|im_end|>")
    ids: list[int] = []
    learnt: list[bool] = []
    for message in messages:
        opening = tokenizer.encode(
            ("\n" if ids else "") + f"<|im_start|>{message.role}\n", add_special_tokens=False
        ).ids
        content = tokenizer.encode(message.content, add_special_tokens=False).ids
        ids += [*opening, *content, end]
        learnt += [False] * len(opening) + [message.role == "assistant"] * (len(content) + 1)
    return ids, learnt


def drill(tokenizer: Tokenizer, rng: random.Random) -> Conversation:
    """Return names, followed by the same names in random order, so that the model learns to copy."""
    words = Words(random=rng, pool=Pool.TRAIN, used=set())
    names = [words.word() + rng.choice((*TEXT_ENDINGS, "", "")) for _ in range(rng.randint(2, 5))]
    shown, copied = (
        tokenizer.encode("".join(f" {name}" for name in order) + "\n", add_special_tokens=False).ids
        for order in (names, rng.sample(names, len(names)))
    )
    return [*shown, *copied], [False] * len(shown) + [True] * len(copied)


def drills(tokenizer: Tokenizer, rng: random.Random) -> Iterator[Conversation]:
    while True:
        yield drill(tokenizer, rng)


def demonstrations(
    tokenizer: Tokenizer, rng: random.Random, *, lessons: float = 0.0
) -> Iterator[Conversation]:
    """Generate new demonstrations of the task types of training without end. A share `lessons` of them
    contains only the task and the first answer of a careful demonstrator."""
    task_types = [task_type for task_type in TRAINING for _ in range(TASK_TYPE_WEIGHTS.get(task_type, 1))]
    for number in itertools.count():
        instance = make_instance(
            rng.choice(task_types), seed=f"demonstration-{number}-{rng.random()}", pool=Pool.TRAIN
        )
        if rng.random() < lessons:
            yield encode(tokenizer, demonstrate(instance, rng, careful_share=1.0).messages[:2])
        else:
            yield encode(tokenizer, demonstrate(instance, rng).messages)


def batches(source: Iterator[Conversation]) -> Iterator[Batch]:
    """Pack conversations into rows. A row starts with the oldest of POOL conversations. Then the longest
    conversation of the pool that still fits is added repeatedly, until none fits."""
    pool: list[Conversation] = []
    while True:
        tokens, targets, positions, segments = (np.zeros((NUM_ROWS, ROW_LENGTH), np.int32) for _ in range(4))
        weights = np.zeros((NUM_ROWS, ROW_LENGTH), np.float32)
        for row in range(NUM_ROWS):
            at, segment = 0, 1
            while True:
                pool += itertools.islice(source, POOL - len(pool))
                fitting = [item for item in pool if at + len(item[0]) - 1 <= ROW_LENGTH]
                if not fitting:
                    break
                chosen = fitting[0] if at == 0 else max(fitting, key=lambda item: len(item[0]))
                pool.remove(chosen)
                ids, learnt = chosen
                length = len(ids) - 1
                place = slice(at, at + length)
                tokens[row, place], targets[row, place] = ids[:-1], ids[1:]
                weights[row, place], segments[row, place] = learnt[1:], segment
                positions[row, place] = np.arange(length)
                at, segment = at + length, segment + 1
        yield Batch(tokens=tokens, targets=targets, weights=weights, positions=positions, segments=segments)


def initial_params(config: ModelConfig) -> Params:
    """Return random weights whose layers change the embedding of a token only a little.

    If all matrices had the same standard deviation, as in large models, the model would not learn to copy
    within STEPS steps.
    """
    params = jax.jit(partial(init_params, config))(jax.random.key(0))
    factors = {"qkv": 3, "o": 0.5, "gate_up": 2, "down": 0.5}
    layers = tuple(
        {field: factors.get(field, 1) * leaf for field, leaf in stack.items()} for stack in params.layers
    )
    return replace(params, embed=5 * params.embed, layers=layers)


def loss_fn(params: Params, config: ModelConfig, batch: dict[str, jax.Array]) -> jax.Array:
    hidden = hidden_states(
        config,
        params,
        None,
        batch["tokens"],
        batch["positions"],
        within_segments(batch["segments"]),
        remat=Remat.NOTHING,
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(
        head_logits(config, params, None, hidden), batch["targets"]
    )
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


def curriculum(tokenizer: Tokenizer, *, steps: int) -> Iterator[Batch]:
    """Generate batches of drills, then of demonstrations of which 75 % are lessons, then of demonstrations
    without lessons."""
    rng = random.Random("demonstrations 0")
    return itertools.chain(
        itertools.islice(batches(drills(tokenizer, rng)), DRILL_STEPS),
        itertools.islice(
            batches(demonstrations(tokenizer, rng, lessons=0.75)), max(0, steps - DRILL_STEPS - MIXTURE_STEPS)
        ),
        batches(demonstrations(tokenizer, rng)),
    )


def rise_and_fall(steps: int, *, peak: float = PEAK_LEARNING_RATE) -> optax.Schedule:
    """Return a learning rate that rises linearly and falls as a cosine."""
    return optax.warmup_cosine_decay_schedule(0.0, peak, 30, steps)


def train(
    config: ModelConfig,
    params: Params,
    data: Iterator[Batch],
    *,
    steps: int,
    schedule: optax.Schedule,
    save: Callable[[Params], None],
) -> Params:
    """Return the trained parameters. The buffers of `params` are donated. Call `save` every 250 steps."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    state = optimizer.init(params)  # pyright: ignore[reportArgumentType] optax types lack registered dataclasses

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Params, state: optax.OptState, batch: dict[str, jax.Array]
    ) -> tuple[Params, optax.OptState, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_fn)(params, config, batch)
        updates, state = optimizer.update(gradient, state, params)  # pyright: ignore[reportArgumentType]
        return optax.apply_updates(params, updates), state, loss  # pyright: ignore[reportArgumentType, reportReturnType]

    start, losses = time.monotonic(), []
    for number, batch in enumerate(itertools.islice(data, steps), start=1):
        params, state, loss = step(params, state, vars(batch))
        losses.append(float(loss))
        if number % 25 == 0:
            print(
                f"step {number}  loss {np.mean(losses[-25:]):.4f}  {time.monotonic() - start:.0f} s",
                flush=True,
            )
        if number % 250 == 0:
            save(params)
    return params


def small_model(tokenizer: Tokenizer) -> ModelConfig:
    """Return the configuration of a model with four layers and 1.5 million parameters."""
    return ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=384,
        num_layers=4,
        num_heads=6,
        num_kv_heads=3,
        head_dim=32,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        eos_token_ids=tuple(tokenizer.encode("<|im_end|><|endoftext|>", add_special_tokens=False).ids),
    )


def main() -> None:
    directory, options = directory_and_options(__doc__, ROOT / "model", ["steps"])
    save_tokenizer(directory, build_tokenizer())
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    config = small_model(tokenizer)

    def save(params: Params) -> None:
        save_model(params, config, directory)

    steps = int(options.get("steps", STEPS))
    data = curriculum(tokenizer, steps=steps)
    save(train(config, initial_params(config), data, steps=steps, schedule=rise_and_fall(steps), save=save))


if __name__ == "__main__":
    main()

"""Build the quick start's model: python -m scripts.quickstart.build_model [DIRECTORY] [minutes=M]

Tokenizer, then a small Qwen3 trained from random weights to imitate demonstrations that are generated as it goes (training families and
training words only), loss on the answers alone. Everything is seeded; how many steps fit depends on the budget of minutes.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer

from scripts.quickstart.demonstrations import Demonstration, demonstrate
from scripts.quickstart.families import TRAINING, make_instance
from scripts.quickstart.make_tasks import ROOT
from scripts.quickstart.tokenizer import save_tokenizer
from scripts.quickstart.words import Pool
from skyrl_tx_server.model.config import ModelConfig
from skyrl_tx_server.model.qwen3 import Params, Remat, head_logits, hidden_states, init_params
from skyrl_tx_server.model.weights import save_model

ROW, ROWS = 256, 8
POOL = 24  # demonstrations among which the packing chooses
PEAK_LEARNING_RATE = 2e-3
WEIGHTS_OF_FAMILIES = {"pair": 5, "pipe": 4, "collect": 2}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed rows; [ROWS, ROW] each."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray  # 1 where the target is part of an answer
    positions: np.ndarray
    segments: np.ndarray


def encode(tokenizer: Tokenizer, demonstration: Demonstration) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and which of them an assistant has to produce."""
    end = tokenizer.token_to_id("<|im_end|>")
    ids: list[int] = []
    learnt: list[bool] = []
    for message in demonstration.messages:
        opening = tokenizer.encode(("\n" if ids else "") + f"<|im_start|>{message.role}\n", add_special_tokens=False).ids
        content = tokenizer.encode(message.content, add_special_tokens=False).ids
        ids += [*opening, *content, end]
        learnt += [False] * len(opening) + [message.role == "assistant"] * (len(content) + 1)
    return ids, learnt


def batches(tokenizer: Tokenizer, rng: random.Random) -> Iterator[Batch]:
    """Endless packed batches of fresh demonstrations."""
    families = [family for family in TRAINING for _ in range(WEIGHTS_OF_FAMILIES.get(family, 1))]
    pool: list[tuple[list[int], list[bool]]] = []
    number = 0
    while True:
        tokens, targets, positions, segments = (np.zeros((ROWS, ROW), np.int32) for _ in range(4))
        weights = np.zeros((ROWS, ROW), np.float32)
        for row in range(ROWS):
            at, segment = 0, 1
            while True:
                while len(pool) < POOL:
                    number += 1
                    instance = make_instance(rng.choice(families), seed=f"demonstration-{number}", pool=Pool.TRAIN)
                    pool.append(encode(tokenizer, demonstrate(instance, rng)))
                fitting = [item for item in pool if at + len(item[0]) - 1 <= ROW]
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


def loss_fn(params: Params, config: ModelConfig, batch: dict[str, jax.Array]) -> jax.Array:
    hidden = hidden_states(config, params, None, batch["tokens"], batch["positions"], batch["segments"], remat=Remat.NOTHING)
    losses = optax.softmax_cross_entropy_with_integer_labels(head_logits(config, params, None, hidden), batch["targets"])
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


def train(config: ModelConfig, tokenizer: Tokenizer, *, minutes: float, seed: int) -> Params:
    """Train from random weights for the budget, decaying the learning rate over the time it takes."""
    params = jax.jit(partial(init_params, config))(jax.random.key(seed))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.adamw)(learning_rate=0.0, b2=0.98, weight_decay=0.01),
    )
    state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Params, state: optax.OptState, batch: dict[str, jax.Array], rate: jax.Array
    ) -> tuple[Params, optax.OptState, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_fn)(params, config, batch)
        state[1].hyperparams["learning_rate"] = rate
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    start, number = time.monotonic(), 0
    for batch in batches(tokenizer, random.Random(f"demonstrations {seed}")):
        done = (time.monotonic() - start) / (60 * minutes)
        if done >= 1:
            break
        rate = PEAK_LEARNING_RATE * min(1.0, (number + 1) / 100) * 0.5 * (1 + np.cos(np.pi * done))
        params, state, loss = step(params, state, vars(batch), jnp.float32(rate))
        number += 1
        if number % 50 == 0:
            print(f"step {number}  loss {float(loss):.4f}  {time.monotonic() - start:.0f} s", flush=True)
    return params


def main() -> None:
    options = dict(argument.partition("=")[::2] for argument in sys.argv[1:] if "=" in argument)
    directory = Path(next((argument for argument in sys.argv[1:] if "=" not in argument), str(ROOT / "model")))
    save_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    config = ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=int(options.get("hidden", 192)),
        intermediate_size=int(options.get("ffn", 384)),
        num_layers=int(options.get("layers", 4)),
        num_heads=6,
        num_kv_heads=3,
        head_dim=32,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        eos_token_ids=(tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")),
    )
    params = train(config, tokenizer, minutes=float(options.get("minutes", 15)), seed=0)
    save_model(params, config, directory)


if __name__ == "__main__":
    main()

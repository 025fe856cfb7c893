"""Build toy_retail's model: python -m scripts.toy_retail.build_model [DIRECTORY]

toy_retail is the domain of `quickstart=tau_bench`, in which an agent serves the customers of a small shop.
As for the quick start `terminal` (scripts/quickstart/build_model.py), a small Qwen3 with random initial
weights is trained on demonstrations, with the loss on the agent's tokens only. Training has three phases. In
the first phase, the model learns to copy names. The other two phases contain conversations of a careful and a
hasty demonstrator (`demonstrations.py`): in the second phase (the lessons) mostly of the careful one, and in
the third phase (the mixture) fewer of the careful one. The result is deterministic. The script takes
16 minutes on two cores of a busy machine.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator

import optax
from tokenizers import Tokenizer

from scripts.quickstart.arguments import directory_and_options
from scripts.quickstart.build_model import (
    PEAK_LEARNING_RATE,
    Batch,
    Conversation,
    batches,
    drills,
    initial_params,
    rise_and_fall,
    small_model,
    train,
)
from scripts.quickstart.words import Pool
from scripts.toy_retail.demonstrations import CAREFUL_SHARE, demonstrate
from scripts.toy_retail.make_tasks import ROOT
from scripts.toy_retail.task_types import TASK_TYPES, make_instance
from scripts.toy_retail.tokenizer import save
from skyrl_tx_server.model.transformer import Params
from skyrl_tx_server.model.weights import save_model
from src.policy.chat import Chat, load_chat

DRILL_STEPS, LESSON_STEPS, MIXTURE_STEPS = 150, 900, 150
LESSONS_SHARE = 0.9  # the share of the careful demonstrator's conversations in the lessons


def demonstrations(chat: Chat, rng: random.Random, *, careful_share: float) -> Iterator[Conversation]:
    """Generate new demonstrations without end, with training words only."""
    with asyncio.Runner() as runner:
        for number in itertools.count():
            instance = make_instance(
                rng.choice(TASK_TYPES), seed=f"demonstration-{number}-{rng.random()}", pool=Pool.TRAIN
            )
            demonstration = runner.run(demonstrate(instance, rng, chat, careful_share=careful_share))
            yield demonstration.ids, demonstration.is_agent_token


def schedule() -> optax.Schedule:
    """Return the first half of a cosine schedule for drills and lessons, then a linear decay to 0."""
    before = DRILL_STEPS + LESSON_STEPS
    return optax.join_schedules(
        [rise_and_fall(2 * before), optax.linear_schedule(PEAK_LEARNING_RATE / 2, 0.0, MIXTURE_STEPS)],
        [before],
    )


def curriculum(tokenizer: Tokenizer, chat: Chat) -> Iterator[Batch]:
    rng = random.Random("toy_retail demonstrations 0")
    return itertools.chain(
        itertools.islice(batches(drills(tokenizer, rng)), DRILL_STEPS),
        itertools.islice(batches(demonstrations(chat, rng, careful_share=LESSONS_SHARE)), LESSON_STEPS),
        batches(demonstrations(chat, rng, careful_share=CAREFUL_SHARE)),
    )


def main() -> None:
    directory, _ = directory_and_options(__doc__, ROOT / "model")
    save(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    config = small_model(tokenizer)

    def keep(params: Params) -> None:
        save_model(params, config, directory)

    data = curriculum(tokenizer, load_chat(str(directory)))
    steps = DRILL_STEPS + LESSON_STEPS + MIXTURE_STEPS
    keep(train(config, initial_params(config), data, steps=steps, schedule=schedule(), save=keep))


if __name__ == "__main__":
    main()

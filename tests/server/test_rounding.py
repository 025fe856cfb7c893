"""In bfloat16 too prefill, decoding and training compute the same numbers: they round at the same places."""

from __future__ import annotations

import jax
import numpy as np

from skyrl_tx_server.batching import PAGE
from skyrl_tx_server.model.kv_cache import KVCache, empty_cache
from skyrl_tx_server.model.lora import Adapter
from skyrl_tx_server.model.low_rank import users_of
from skyrl_tx_server.model.transformer import Params
from skyrl_tx_server.ops import LossFn, TrainDatum
from skyrl_tx_server.packing import TrainShape, TrainShapes, pack, unpack
from skyrl_tx_server.rows import row_settings
from skyrl_tx_server.steps.losses import select_loss
from skyrl_tx_server.steps.sample import MAX_STOP_TOKENS, Prompt, PromptOutputs, Rows, decode_block, prefill
from skyrl_tx_server.steps.train import forward, train_batch
from tests.server import tiny_qwen3
from tests.server.tiny_qwen3 import CONFIG

PIECE, LENGTH, NEW = 2 * PAGE, 2 * PAGE + 50, 8
TABLE = np.arange(1, 5, dtype=np.int32)
NO_COPIES = np.full((1, 2), -1, np.int32)
SETTINGS = row_settings([None], CONFIG.vocab_size)


def test_sampler_and_trainer_agree_in_bfloat16() -> None:
    """A prompt in two pieces, then a decode block, against one forward pass over all of it."""
    params = jax.device_put(tiny_qwen3.params("bfloat16"))
    adapter = tiny_qwen3.adapter()
    bank = jax.tree.map(lambda leaf: leaf[None].astype("bfloat16"), adapter)
    prompt = np.random.default_rng(0).integers(0, CONFIG.vocab_size, LENGTH).astype(np.int32)

    def run_piece(cache: KVCache, cached: int) -> tuple[KVCache, PromptOutputs]:
        tokens, targets = np.zeros((2, PIECE), np.int32)
        own, following = prompt[cached : cached + PIECE], prompt[cached + 1 : cached + PIECE + 1]
        tokens[: len(own)], targets[: len(following)] = own, following
        piece = Prompt(
            tokens=tokens,
            targets=targets,
            length=np.int32(len(own)),
            cached=np.int32(cached),
            table=TABLE,
            before=NO_COPIES,
            after=NO_COPIES,
            adapter_index=np.int32(0),
            want_logprobs=np.bool_(True),
        )
        return prefill(cache, params, bank, piece, SETTINGS, config=CONFIG, tempered=False)

    cache, first = run_piece(empty_cache(config=CONFIG, pages=5, dtype=np.dtype("bfloat16")), 0)
    cache, second = run_piece(cache, PIECE)
    rows = Rows(
        tokens=np.asarray(second.first_tokens),
        positions=np.array([LENGTH], np.int32),
        remaining=np.array([NEW], np.int32),
        tables=TABLE[None],
        adapters=users_of(np.zeros(1, np.int32)),
        stop_tokens=np.full((1, MAX_STOP_TOKENS), -1, np.int32),
    )
    _, block = decode_block(cache, params, bank, rows, SETTINGS, config=CONFIG, steps=NEW, ends=(4 * PAGE,), tempered=False)
    tokens = np.concatenate([prompt, second.first_tokens, block.tokens[0]])
    sampled = np.concatenate([first.logprobs, second.logprobs[: LENGTH - PIECE - 1], second.first_logprobs, block.logprobs[0]])
    np.testing.assert_allclose(sampled, trained(params, adapter, tokens), atol=1e-4)


def trained(params: Params, adapter: Adapter, tokens: np.ndarray) -> np.ndarray:
    """The trainer's log p of every token but the first."""
    shape = TrainShape(rows=1, length=256)
    datum = TrainDatum(tokens=tokens[:-1], target_tokens=tokens[1:])
    (batch,) = pack((datum,), [np.ones(len(datum.tokens), bool)], TrainShapes(shapes=(shape,), budget=shape))
    output = forward(adapter, params, train_batch(batch), select_loss(LossFn.CROSS_ENTROPY, {}), config=CONFIG)
    return unpack([batch], [np.asarray(output.logprobs)])[0]

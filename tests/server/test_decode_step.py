"""In bfloat16, prefill, decode and training give the same logprobs, because they round the same tensors."""

from __future__ import annotations

import jax
import numpy as np

from skyrl_tx_server.engine.operations import MAX_STOP_TOKENS, LossFn, SamplingSettings, TrainDatum
from skyrl_tx_server.model.kv_cache import KVCache, empty_cache
from skyrl_tx_server.model.lora.adapter import Adapter
from skyrl_tx_server.model.lora.lora_math import lora_indices
from skyrl_tx_server.model.mesh import to_host
from skyrl_tx_server.model.shapes import PAGE_SIZE, BucketShape, BucketShapes, PrefillShapes
from skyrl_tx_server.model.transformer import Params
from skyrl_tx_server.sampling.decode_step import Carry, DecodeBatch, decode_steps
from skyrl_tx_server.sampling.prefill_batch import ChunkOutputs, PrefillChunk, PrefillLayout
from skyrl_tx_server.sampling.prefill_step import prefill
from skyrl_tx_server.sampling.sequences import SequenceState, batch_settings
from skyrl_tx_server.training.losses import select_loss
from skyrl_tx_server.training.packing import pack, unpack
from skyrl_tx_server.training.train_step import forward
from tests.server import tiny_qwen3
from tests.server.tiny_qwen3 import CONFIG

CHUNK, PROMPT_LENGTH, NEW_TOKENS = 2 * PAGE_SIZE, 2 * PAGE_SIZE + 50, 8
BLOCK_TABLE = np.arange(1, 5, dtype=np.int32)
LAYOUT = PrefillLayout(
    shapes=PrefillShapes(short=1, long=2, long_from=1, max_tiles=2),
    num_slots=1,
    table_width=4,
    max_copies=1,
    vocab_size=CONFIG.vocab_size,
)


def test_sampler_and_trainer_agree_in_bfloat16() -> None:
    """Two prefill chunks and one decode dispatch give the same logprobs as one forward pass over all
    tokens."""
    params = jax.device_put(tiny_qwen3.params("bfloat16"))
    adapter = tiny_qwen3.adapter()
    lora_slots = jax.tree.map(lambda leaf: leaf[None].astype("bfloat16"), adapter)
    prompt = np.random.default_rng(0).integers(0, CONFIG.vocab_size, PROMPT_LENGTH).astype(np.int32)
    sequence = SequenceState(
        request_id=1,
        index=0,
        weights=None,
        adapter_slot=0,
        settings=SamplingSettings(temperature=0.0),
        seed=0,
        stop_tokens=(),
        prompt=prompt,
        max_tokens=NEW_TOKENS,
        topk=0,
    )

    def run_chunk(cache: KVCache, cached: int) -> tuple[KVCache, ChunkOutputs]:
        chunk = PrefillChunk(
            tokens=prompt,
            cached=cached,
            length=min(cached + CHUNK, PROMPT_LENGTH),
            weights=None,
            adapter_slot=0,
            wants_logprobs=True,
            slots=(0,),
            tables=(BLOCK_TABLE.tolist(),),
            copies_before=(),
            copies_after=(),
            sequences=[sequence] if cached + CHUNK >= PROMPT_LENGTH else (),
        )
        ((batch, settings),) = LAYOUT.batches([chunk])
        cache, outputs = prefill(cache, params, lora_slots, batch, settings, config=CONFIG, tempered=False)
        return cache, LAYOUT.outputs([chunk], [to_host(outputs)])[0]

    cache, first_outputs = run_chunk(empty_cache(config=CONFIG, pages=5, dtype=np.dtype("bfloat16")), 0)
    cache, last_outputs = run_chunk(cache, CHUNK)
    batch = DecodeBatch(
        tokens=np.array(last_outputs.first_tokens, np.int32),
        before=Carry.empty(1),
        positions=np.array([PROMPT_LENGTH], np.int32),
        remaining=np.array([NEW_TOKENS], np.int32),
        tables=BLOCK_TABLE[None],
        splits=None,
        adapters=lora_indices(np.zeros(1, np.int32)),
        stop_tokens=np.full((1, MAX_STOP_TOKENS), -1, np.int32),
    )
    _, decoded = decode_steps(
        cache,
        params,
        lora_slots,
        batch,
        batch_settings([sequence], CONFIG.vocab_size),
        config=CONFIG,
        steps=NEW_TOKENS,
        ends=(4 * PAGE_SIZE,),
        tempered=False,
    )
    tokens = np.concatenate([prompt, last_outputs.first_tokens, decoded.tokens[0]])
    sampler_logprobs = np.concatenate(
        [first_outputs.logprobs, last_outputs.logprobs[:-1], last_outputs.first_logprobs, decoded.logprobs[0]]
    )
    np.testing.assert_allclose(sampler_logprobs, trainer_logprobs(params, adapter, tokens), atol=1e-4)


def trainer_logprobs(params: Params, adapter: Adapter, tokens: np.ndarray) -> np.ndarray:
    """Return the trainer's logprobs of all tokens except the first, [T - 1]."""
    shape = BucketShape(streams=1, length=256)
    datum = TrainDatum(tokens=tokens[:-1], target_tokens=tokens[1:])
    (batch,) = pack((datum,), [np.ones(len(datum.tokens), bool)], BucketShapes(shapes=(shape,), budget=shape))
    output = forward(adapter, params, batch.arrays, select_loss(LossFn.CROSS_ENTROPY), config=CONFIG)
    return unpack([batch], [np.asarray(output.logprobs)])[0]

"""Measure temporary memory and time of the logprob head with Qwen3's vocabulary of 151,936 tokens, compared
with full logits.

    taskset -c 0,1 python -m scripts.bench.logprob_head

The logprob head computes the logprobs of the target tokens without keeping the logits of all tokens in
memory. The model has one narrow layer, so the head takes almost all of the time. The memory is the size of
the temporary buffers that XLA plans, which does not depend on the load of the machine.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import chz
import jax
import jax.numpy as jnp
import numpy as np

from scripts.bench.compare import Measurement, RepeatOptions, interleave, print_figure, report, timed
from scripts.bench.small_model import CONFIG
from skyrl_tx_server.engine.loss_spec import LOSSES
from skyrl_tx_server.engine.operations import LoraSpec, LossFn, TrainDatum
from skyrl_tx_server.model.attention.prefix_tree_attention import tree_attention
from skyrl_tx_server.model.lora.adapter import Adapter, init_adapter, zero_adapter
from skyrl_tx_server.model.shapes import train_shapes
from skyrl_tx_server.model.transformer import Params, Remat, head_logits, hidden_states, init_params
from skyrl_tx_server.training.losses import select_loss
from skyrl_tx_server.training.packing import TrainBatch, pack
from skyrl_tx_server.training.train_step import forward_backward

MODEL = replace(
    CONFIG, vocab_size=151_936, num_layers=1, intermediate_size=64, num_heads=2, num_kv_heads=1, head_dim=32
)
NUM_SEQUENCES, LENGTH = 4, 512


def main(config: RepeatOptions) -> None:
    params = jax.jit(partial(init_params, MODEL))(jax.random.key(0))
    adapter = jax.device_put(init_adapter(MODEL, LoraSpec(rank=8, train_unembed=False), 8))
    loss = select_loss(LossFn.CROSS_ENTROPY)
    ours = forward_backward.lower(
        adapter, zeros(), params, batch(every=1), loss, config=MODEL, remat=Remat.NOTHING
    ).compile()
    full = full_logits.lower(adapter, params, batch(every=1)).compile()

    def call(every: int) -> Measurement:
        gradient = zeros()
        return timed(
            lambda: jax.block_until_ready(ours(adapter, gradient, params, batch(every=every), loss))
        )()

    calls = {
        "ours": partial(call, 1),
        "ours, a third weighted": partial(call, 3),
        "full logits": timed(lambda: jax.block_until_ready(full(adapter, params, batch(every=1)))),
    }
    timings = interleave(calls, repeats=config.repeats)
    report(
        f"logprob head, {NUM_SEQUENCES * LENGTH} tokens, vocabulary {MODEL.vocab_size:,}",
        timings,
        {},
        baseline="full logits",
    )
    time_ratio = timings["ours"].wall_s / timings["full logits"].wall_s
    print_figure("time: ours / full logits", time_ratio, at_most=1.1)
    weighted_ratio = timings["ours, a third weighted"].wall_s / timings["ours"].wall_s
    print_figure("time: a third of the tokens weighted / all weighted", weighted_ratio)
    ours_bytes, full_bytes = (temporary_bytes(program) for program in (ours, full))
    print_figure(
        f"temporary memory: ours {ours_bytes >> 20} / full {full_bytes >> 20} MiB",
        ours_bytes / full_bytes,
        at_most=1 / 6,
    )


def temporary_bytes(program: jax.stages.Compiled) -> int:
    plan = program.memory_analysis()
    assert plan is not None
    return plan.temp_size_in_bytes


@jax.jit
def full_logits(adapter: Adapter, params: Params, batch: TrainBatch) -> tuple[jax.Array, Adapter]:
    """Return the summed loss and its gradient, computed with all logits in memory at once."""

    def loss(adapter: Adapter) -> jax.Array:
        attend = partial(tree_attention, MODEL, batch.layout)
        hidden = hidden_states(
            MODEL, params, adapter, batch.tokens, batch.positions, attend, remat=Remat.NOTHING
        )
        loss_states = jnp.take_along_axis(hidden, jnp.asarray(batch.token_index)[..., None], axis=1)
        logprobs = jax.nn.log_softmax(head_logits(MODEL, params, adapter, loss_states), axis=-1)
        return -(
            jnp.take_along_axis(logprobs, jnp.asarray(batch.targets)[..., None], axis=-1)[..., 0]
            * batch.loss_inputs.weights
        ).sum()

    return jax.value_and_grad(loss)(adapter)


def zeros() -> Adapter:
    return jax.device_put(zero_adapter(MODEL, 8))


def batch(*, every: int) -> TrainBatch:
    """Return a batch in which every position that is a multiple of `every` has weight 1, and all others 0."""
    random = np.random.default_rng(0)
    weights = (np.arange(LENGTH) % every == 0).astype(np.float32)
    tokens = random.integers(0, MODEL.vocab_size, (NUM_SEQUENCES, LENGTH + 1)).astype(np.int32)
    data = [TrainDatum(tokens=row[:-1], target_tokens=row[1:], weights=weights) for row in tokens]
    trained = [LOSSES[LossFn.CROSS_ENTROPY].has_gradient(datum) for datum in data]
    (packed,) = pack(
        data, trained, train_shapes(max_context_length=LENGTH, tokens_per_batch=NUM_SEQUENCES * LENGTH)
    )
    return packed.arrays


if __name__ == "__main__":
    main(chz.entrypoint(RepeatOptions, argv=sys.argv[1:], allow_hyphens=True))

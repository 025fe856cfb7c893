"""The training programs `forward`, `forward_backward` (which accumulates gradients) and `adam_step`.

`forward` and `forward_backward` are compiled once for each pair of a training shape and a number of targets
per position. `adam_step` is compiled once. A change of the loss, the loss settings, the adapter rank or the
optimizer settings needs no further compilation. Pass the batch, the loss and the optimizer settings as numpy
arrays in host memory, because JAX would compile the programs again for committed device arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from skyrl_tx_server.engine.operations import AdamSettings, LoraSpec
from skyrl_tx_server.model.attention.prefix_tree_attention import tree_attention
from skyrl_tx_server.model.lora.adapter import (
    Adapter,
    LayerAdapter,
    keep_adapter,
    place_adapter,
    zero_adapter,
)
from skyrl_tx_server.model.lora.lora_math import ArrayLike, LoraWeights
from skyrl_tx_server.model.mesh import replicate, to_host
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.transformer import (
    COMPILER_OPTIONS,
    Params,
    Remat,
    head_logits,
    hidden_states,
    with_gathered_head,
)
from skyrl_tx_server.model.weights import adapter_from_arrays, adapter_to_arrays
from skyrl_tx_server.training.losses import LossInputs, LossSelection, token_losses
from skyrl_tx_server.training.packing import TrainBatch

CHUNKS = 16
MIN_CHUNK_POSITIONS = 64
MAX_CHUNK_LOGITS = 1 << 26
"""The head computes the loss positions of a batch in CHUNKS chunks, so that the logits of all positions are
never in memory together. There are more chunks if a chunk would have more than MAX_CHUNK_LOGITS logits (256
MiB in float32), and fewer if a chunk would have fewer than MIN_CHUNK_POSITIONS positions of each stream. A
stream is one of the R token sequences of a micro-batch into which datums are packed."""


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class TokenOutputs:
    """The outputs of a training program."""

    logprobs: jax.Array  # float32 in the shape of the targets; undefined for padding
    loss: jax.Array  # [] float32, the sum over all tokens


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class AdamState:
    """Adam's moments (shaped like the adapter, float32) and the number of steps taken."""

    step: ArrayLike  # [] int32
    first: Adapter
    second: Adapter


def adam_scalars(settings: AdamSettings) -> np.ndarray:
    """Return the settings as one float32 array [6], in the order of their fields. Passing one array
    to a program is faster than passing six."""
    return np.array(astuple(settings), np.float32)


def init_adam(config: ModelConfig, max_rank: int) -> AdamState:
    """Return the initial optimizer state in host memory."""
    return AdamState(
        step=np.zeros((), np.int32),
        first=zero_adapter(config, max_rank),
        second=zero_adapter(config, max_rank),
    )


def place_adam(config: ModelConfig, state: AdamState) -> AdamState:
    """Copy the state from host memory to the devices, with the moments sharded like the adapter."""
    first, second = place_adapter(config, state.first), place_adapter(config, state.second)
    return AdamState(step=replicate(config, state.step), first=first, second=second)


@partial(jax.jit, static_argnames=("config", "remat"), compiler_options=COMPILER_OPTIONS)
def forward_backward(
    adapter: Adapter,
    grad_sum: Adapter,
    params: Params,
    batch: TrainBatch,
    loss: LossSelection,
    *,
    config: ModelConfig,
    remat: Remat = Remat.LAYERS,
) -> tuple[Adapter, TokenOutputs]:
    """Return `grad_sum` plus the gradient of this batch, and the outputs. Losses are summed over tokens, as
    Tinker defines them.

    No argument is donated, because a model keeps its `grad_sum` if the operation fails, and because the
    initial `grad_sum` is one adapter of zeros that all models share.
    """

    def run_layers(layers: tuple[LayerAdapter, ...]) -> jax.Array:
        return _loss_states(config, params, replace(adapter, layers=layers), batch, remat)

    hidden, pull_back = jax.vjp(run_layers, adapter.layers)
    outputs, grad_hidden, grad_head = _head_gradient(
        config, with_gathered_head(config, params), adapter, hidden, batch, loss
    )
    (grad_layers,) = pull_back(grad_hidden)
    return keep_adapter(
        config, jax.tree.map(jnp.add, grad_sum, Adapter(layers=grad_layers, head=grad_head))
    ), outputs


@partial(jax.jit, static_argnames=("config",), compiler_options=COMPILER_OPTIONS)
def forward(
    adapter: Adapter, params: Params, batch: TrainBatch, loss: LossSelection, *, config: ModelConfig
) -> TokenOutputs:
    """Return the logprobs and the summed loss of the batch."""
    chunks = _chunks(config, _loss_states(config, params, adapter, batch, Remat.NOTHING), batch)
    params = with_gathered_head(config, params)

    def run(chunk: _Chunk) -> tuple[jax.Array, jax.Array]:
        return jax.lax.cond(
            chunk.used,
            lambda: _chunk_loss(config, params, adapter, loss, chunk),
            lambda: _zero_outputs(chunk),
        )

    losses, logprobs = jax.lax.map(run, chunks)
    return TokenOutputs(logprobs=_whole(logprobs, batch), loss=losses.sum())


@jax.jit
def adam_step(
    adapter: Adapter, gradient: Adapter, state: AdamState, mask: Adapter, settings: ArrayLike
) -> tuple[Adapter, AdamState, jax.Array]:
    """Take one Adam step with decoupled weight decay. No argument is donated, so that the caller can keep the
    old adapter if the new adapter is not finite.

    `mask` is the `trainable_mask` of the adapter. Values whose mask is 0 are excluded from the norm and are
    not updated. `settings` is the result of `adam_scalars`. The third result is [2] float32: the norm of the
    gradient before clipping, and 1 if all values of the new adapter are finite, otherwise 0.
    """
    learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm = jnp.asarray(settings)
    grads = jax.tree.map(jnp.multiply, gradient, mask)
    norm = jnp.sqrt(sum(jnp.sum(grad * grad) for grad in jax.tree.leaves(grads)))
    clips = (grad_clip_norm > 0) & (norm > grad_clip_norm)
    shrink = jnp.where(clips, grad_clip_norm / norm, 1.0)
    step = state.step + 1
    # 1 - beta^step; expm1 avoids cancellation in float32 if beta is close to one
    correct1, correct2 = (-jnp.expm1(step * jnp.log(beta)) for beta in (beta1, beta2))

    first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * shrink * g, state.first, grads)
    second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * (shrink * g) ** 2, state.second, grads)

    def update(value: jax.Array, m: jax.Array, v: jax.Array, is_trained: jax.Array) -> jax.Array:
        denominator = jnp.sqrt(v / correct2) + eps
        direction = jnp.where(denominator > 0, m / correct1 / denominator, 0.0) + weight_decay * value
        return value - learning_rate * is_trained * direction

    adapter = jax.tree.map(update, adapter, first, second, mask)
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(adapter)]).all()
    return (
        adapter,
        AdamState(step=step, first=first, second=second),
        jnp.stack([norm, finite.astype(jnp.float32)]),
    )


def adam_to_arrays(state: AdamState, config: ModelConfig, spec: LoraSpec) -> dict[str, np.ndarray]:
    """Return the arrays of the optimizer state by their names in a checkpoint."""
    arrays = {"optimizer.step": np.asarray(to_host(state.step), np.int32)}
    for moment, adapter in (("first", state.first), ("second", state.second)):
        arrays |= {
            f"optimizer.{moment}.{name}": array
            for name, array in adapter_to_arrays(adapter, config, spec).items()
        }
    return arrays


def adam_from_arrays(
    arrays: Mapping[str, np.ndarray], config: ModelConfig, spec: LoraSpec, max_rank: int
) -> AdamState:
    """Return the optimizer state in host memory. This is the inverse of `adam_to_arrays`."""

    def moment(name: str) -> Adapter:
        prefix = f"optimizer.{name}."
        tensors = {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
        return adapter_from_arrays(tensors, config, spec, max_rank)

    return AdamState(
        step=np.asarray(arrays["optimizer.step"], np.int32).reshape(()),
        first=moment("first"),
        second=moment("second"),
    )


# --- the output head, one chunk of loss positions at a time


def _loss_states(
    config: ModelConfig, params: Params, adapter: Adapter, batch: TrainBatch, remat: Remat
) -> jax.Array:
    """Return the final hidden states [R, E, D] at the E loss positions of each of the R streams."""
    hidden = hidden_states(
        config,
        params,
        adapter,
        batch.tokens,
        batch.positions,
        partial(tree_attention, config, replace(batch.layout, positions=batch.positions)),
        remat=remat,
    )
    return jnp.take_along_axis(hidden, batch.token_index[..., None], axis=1)


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """A chunk of n loss positions of each stream. In stacked chunks every leaf has a leading chunk axis."""

    hidden: jax.Array  # [R, n, D]
    targets: ArrayLike  # [R, n] or [R, n, K] int32
    inputs: LossInputs  # [R, n]; with K targets, weights are [R, n, K] and the other fields [R, n, 1]
    used: jax.Array  # [] bool, False if all positions are padding
    trained: jax.Array  # [] bool, False if no position has a gradient


def _head_gradient(
    config: ModelConfig,
    params: Params,
    adapter: Adapter,
    hidden: jax.Array,
    batch: TrainBatch,
    loss: LossSelection,
) -> tuple[TokenOutputs, jax.Array, LoraWeights]:
    """Return the outputs, the gradient of `hidden`, and the gradient of the head's adapter.

    The loss of a position depends on the logprobs of that position only, so the gradient of a chunk is
    computed together with its logits. This reads the head weight twice, or once for a chunk without a
    gradient. A backward pass that recomputed the logits would read the head weight three times in total.
    """

    def differentiate(chunk: _Chunk) -> tuple[LoraWeights, jax.Array, jax.Array, jax.Array]:
        def loss_of(head: LoraWeights, states: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _chunk_loss(
                config, params, replace(adapter, head=head), loss, replace(chunk, hidden=states)
            )

        (summed, logprobs), (grads, grad_states) = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(
            adapter.head, chunk.hidden
        )
        return grads, summed, logprobs, grad_states

    def evaluate(chunk: _Chunk) -> tuple[LoraWeights, jax.Array, jax.Array, jax.Array]:
        return zero_grads, *_chunk_loss(config, params, adapter, loss, chunk), jnp.zeros_like(chunk.hidden)

    def skip(chunk: _Chunk) -> tuple[LoraWeights, jax.Array, jax.Array, jax.Array]:
        return zero_grads, *_zero_outputs(chunk), jnp.zeros_like(chunk.hidden)

    def step(
        grad_head: LoraWeights, chunk: _Chunk
    ) -> tuple[LoraWeights, tuple[jax.Array, jax.Array, jax.Array]]:
        kind = chunk.used.astype(jnp.int32) + chunk.trained
        grads, *outputs = jax.lax.switch(kind, (skip, evaluate, differentiate), chunk)
        return jax.tree.map(jnp.add, grad_head, grads), tuple(outputs)

    zero_grads = jax.tree.map(jnp.zeros_like, adapter.head)
    grad_head, (sums, logprobs, grad_hidden) = jax.lax.scan(step, zero_grads, _chunks(config, hidden, batch))
    return (
        TokenOutputs(logprobs=_whole(logprobs, batch), loss=sums.sum()),
        _whole(grad_hidden, batch),
        grad_head,
    )


def _chunk_loss(
    config: ModelConfig, params: Params, adapter: Adapter, loss: LossSelection, chunk: _Chunk
) -> tuple[jax.Array, jax.Array]:
    """Return (summed loss, logprobs of the targets) of one chunk."""
    logits = head_logits(config, params, adapter, chunk.hidden)
    targets = chunk.targets if chunk.targets.ndim == 3 else chunk.targets[..., None]
    logprobs = jnp.take_along_axis(logits, targets, axis=-1) - jax.nn.logsumexp(
        logits, axis=-1, keepdims=True
    )
    logprobs = logprobs.reshape(chunk.targets.shape)
    return token_losses(loss, logprobs, chunk.inputs).sum(), logprobs


def _zero_outputs(chunk: _Chunk) -> tuple[jax.Array, jax.Array]:
    """Return the result of `_chunk_loss` for a chunk of padding."""
    return jnp.zeros(()), jnp.zeros(chunk.targets.shape)


def chunk_positions(positions: int, *, streams: int, vocab_size: int) -> int:
    """Return how many loss positions of each stream one chunk has."""
    size = max(MIN_CHUNK_POSITIONS, -(-positions // CHUNKS))
    return max(1, min(size, MAX_CHUNK_LOGITS // (streams * vocab_size), positions))


def _chunks(config: ModelConfig, hidden: jax.Array, batch: TrainBatch) -> _Chunk:
    """Return the loss positions as stacked chunks [chunks, R, n, ...]. The last chunk is padded."""
    streams, positions = batch.token_index.shape
    size = chunk_positions(positions, streams=streams, vocab_size=config.vocab_size)
    count = -(-positions // size)

    def split(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, ((0, 0), (0, count * size - positions)) + ((0, 0),) * (array.ndim - 2))
        return padded.reshape(streams, count, size, *array.shape[2:]).swapaxes(0, 1)

    counts = jnp.reshape(batch.loss_inputs.counts, batch.loss_inputs.advantages.shape)
    inputs = replace(batch.loss_inputs, counts=counts)
    stacked = jax.tree.map(split, inputs)
    return _Chunk(
        hidden=split(hidden),
        targets=split(jnp.asarray(batch.targets)),
        inputs=stacked,
        used=(stacked.counts > 0).reshape(count, -1).any(axis=1),
        trained=jnp.arange(count) * size < batch.num_trained.max(),
    )


def _whole(stacked: jax.Array, batch: TrainBatch) -> jax.Array:
    """Convert [chunks, R, n, ...] to [R, E, ...]."""
    streams, positions = batch.token_index.shape
    return stacked.swapaxes(0, 1).reshape(streams, -1, *stacked.shape[3:])[:, :positions]

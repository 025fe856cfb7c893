"""A mixture of experts. The router chooses a few experts for each token. Tokens are sorted by expert, so that
each expert processes its tokens in matrix products.

An assignment is a pair of a token and one of its experts. Assignments are sorted into tiles of one expert
each (in sampling, of one expert and one LoRA slot). A loop (on a GPU, a kernel) multiplies each tile that has
assignments by the weight of its expert. The size of the program does not depend on the number of experts, and
no token is dropped. `jax.lax.ragged_dot` computes the same result, but on a CPU XLA then multiplies every
token by every expert, which takes 17 times as long (64 experts, 4,096 tokens, 256 x 256). Example with tiles
of 2 assignments, and `.` for padding:

    assignments  b a b b c   ->   tiles  a . | b b | b . | c .
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import PartitionSpec

from skyrl_tx_server.model.families.layer_spec import (
    STACK_INDEX,
    LayerParams,
    Weight,
    mlp,
    mlp_layer_weights,
)
from skyrl_tx_server.model.kernels import grouped_kernel
from skyrl_tx_server.model.layers import rms_norm
from skyrl_tx_server.model.lora.lora_math import LoraWeights, low_rank_deltas
from skyrl_tx_server.model.mesh import Axes, batch_axes, on_gpu, shard_batch, shard_map_over
from skyrl_tx_server.model.model_config import ExpertGroups, Experts, ModelConfig
from skyrl_tx_server.model.reductions import softmax, sum_last

MIN_EXPERT_TILE, MAX_EXPERT_TILE = 8, 128
TINY = 1e-20
"""The chosen scores are divided by their sum plus TINY, so that the divisor is not zero."""


def expert_weights(config: ModelConfig) -> dict[str, Weight]:
    """Return the descriptions of the weights that `add_experts` reads in a layer."""
    experts = config.experts
    assert experts is not None
    hidden, width, count = config.hidden_size, config.intermediate_size, experts.count
    bias = Weight(names=("mlp.gate.e_score_correction_bias",), widths=(count,), exact=True)
    shared = mlp_layer_weights(hidden, experts.shared * width, module="mlp.shared_experts", prefix="shared_")
    return {
        "mlp_norm": Weight(names=("post_attention_layernorm.weight",), widths=(hidden,)),
        "router": Weight(names=("mlp.gate.weight",), inputs=hidden, widths=(count,)),
        **({} if experts.groups is None else {"router_bias": bias}),
        **(shared if experts.shared else {}),
        **mlp_layer_weights(hidden, width, module="mlp.experts.{expert}", experts=count),
    }


def add_experts(
    config: ModelConfig, x: jax.Array, params: LayerParams, adapter: Mapping[str, LoraWeights] | None
) -> jax.Array:
    """Return x [B, T, D] plus the outputs of the routed and shared experts for the normalized x."""
    assert config.experts is not None
    normed = rms_norm(x, params["mlp_norm"], config.rms_norm_eps)
    routed = route(config.experts, params["router"], normed, bias=params.get("router_bias"))
    inputs = normed, routed, params["gate_up"], params["down"]
    modules = None if adapter is None else (adapter["gate_up"], adapter["down"])
    mix, layer = partial(mix_experts, config.experts), params.get(STACK_INDEX)
    if config.experts.shared:
        x = x + mlp(config, normed, params, adapter, prefix="shared_")
    if config.mesh is None:
        return x + mix(*inputs, modules, layer)
    batch, fsdp = batch_axes(config, x.shape[0]), "fsdp" if config.weight_stationary else None

    def mix_on_device(x: jax.Array, routed: Any, gate_up: jax.Array, *others: Any) -> jax.Array:
        """Run `mix_experts` for the experts of this device and its part of their width F. Sum the results
        over the axes `expert` and `tensor`."""
        first = jax.lax.axis_index("expert") * gate_up.shape[-3]
        return jax.lax.psum(mix(x, routed, gate_up, *others, first=first, fsdp=fsdp), ("expert", "tensor"))

    lead = () if layer is None else (None,)
    gate_up = PartitionSpec(*lead, "expert", ("tensor", "fsdp") if fsdp else "tensor", None)
    adapted = None if modules is None else _module_specs(modules, batch, fsdp)
    specs = (
        PartitionSpec(batch),
        PartitionSpec(batch),
        gate_up,
        PartitionSpec(*lead, "expert", fsdp, "tensor"),
        adapted,
        PartitionSpec(),
    )
    mixed = shard_map_over(config, mix_on_device, specs, PartitionSpec(batch, None, fsdp))
    return shard_batch(config, x + mixed(*inputs, modules, layer))


def route(
    experts: Experts, router: jax.Array, x: jax.Array, *, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Choose experts for each token of x [B, T, D] with the weight `router` [count, D]. Return (weights of
    the chosen experts in the dtype of x, indices of these experts), both [B, T, per_token]. Softmax and
    sigmoid are computed in float32. `bias` is [count] float32; None: the model has no `ExpertGroups`."""
    tokens = x.reshape(-1, x.shape[-1])
    if experts.groups is None:
        scores = softmax((tokens @ router.T).astype(jnp.float32))
        weights, chosen = jax.lax.top_k(scores, experts.per_token)
    else:
        assert bias is not None
        scores = jax.nn.sigmoid(tokens.astype(jnp.float32) @ router.T.astype(jnp.float32))
        _, chosen = jax.lax.top_k(_within_groups(experts.groups, scores + bias), experts.per_token)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if experts.normalized:
        weights = weights / (sum_last(weights) + TINY)
    if experts.groups is not None:
        weights = weights * experts.groups.scale
    return weights.astype(x.dtype).reshape(*x.shape[:2], -1), chosen.reshape(*x.shape[:2], -1)


def _within_groups(groups: ExpertGroups, scores: jax.Array) -> jax.Array:
    """Return `scores` [N, count] with minus infinity outside the best groups of each token."""
    grouped = scores.reshape(len(scores), groups.count, -1)
    best_two, _ = jax.lax.top_k(grouped, 2)
    _, chosen = jax.lax.top_k(best_two.sum(axis=-1), groups.per_token)
    is_chosen = (chosen[..., None] == jnp.arange(groups.count)).any(axis=1)
    return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(scores.shape)


def mix_experts(
    experts: Experts,
    x: jax.Array,
    routed: tuple[jax.Array, jax.Array],
    gate_up: jax.Array,
    down: jax.Array,
    modules: tuple[LoraWeights, LoraWeights] | None,
    layer: jax.Array | None = None,
    *,
    first: jax.Array | int = 0,
    fsdp: str | None = None,
) -> jax.Array:
    """Return the weighted sum [B, T, D] of the outputs of E experts for x [B, T, D]. `routed` is the result
    of `route` for x.

    `gate_up` [E, 2F, D] and `down` [E, D, F] are the weights of the experts `first` to `first` + E - 1, and F
    is the width of an expert. If `layer` is given, both weights are stacked over layers, and `layer` is the
    index of the layer. If `fsdp` is a mesh axis, it divides the outputs of both weights: the outputs of
    `gate_up` are gathered, the outputs of `down` stay divided. `modules` are the LoRA weights for `gate_up`
    and for `down`. They belong to one adapter (A is [E, in, ...]) or to all LoRA slots (A is
    [slots, layers, E, ...]). None: no adapter."""
    count, offset = gate_up.shape[-3], 0 if layer is None else layer * gate_up.shape[-3]
    gate_up, down = (jnp.reshape(matrices, (-1, *matrices.shape[-2:])) for matrices in (gate_up, down))
    batch, length, _ = x.shape
    tokens, (weights, chosen) = x.reshape(-1, x.shape[-1]), routed
    local = chosen.reshape(-1) - first
    indices = None if modules is None else modules[0].indices
    token_of = jnp.arange(local.size) // experts.per_token
    tile = tile_size(local.size, experts.count)
    if modules is None or indices is None:
        layout, slot = lay_out_tiles(local, count, tile=tile), None
        tile_experts = layout.groups
    else:  # Each tile has one LoRA slot. On a CPU, a tile is one assignment, because padding costs time.
        num_slots = modules[0].a.shape[0]
        groups = local * num_slots + jnp.asarray(indices.slots)[token_of // length]
        layout = lay_out_tiles(groups, count * num_slots, tile=tile if on_gpu() else 1)
        tile_experts, slot = layout.groups // num_slots, layout.groups % num_slots
    tiles = layout.fill(tokens[token_of])
    deltas = None
    if modules is not None:
        deltas = [
            partial(low_rank_deltas, module=_factors_of_tiles(module, tile_experts, slot))
            for module in modules
        ]

    both = tile_products(tiles, gate_up, tile_experts + offset, layout.used)
    if fsdp is not None:
        both = jax.lax.all_gather(both, fsdp, axis=-1, tiled=True)
    gate, up = jnp.split(both, 2, axis=-1)
    if deltas is not None:
        gate_delta, up_delta = deltas[0](tiles)
        gate, up = gate + gate_delta, up + up_delta
    inner = jax.nn.silu(gate) * up
    outputs = tile_products(inner, down, tile_experts + offset, layout.used)
    if deltas is not None:
        outputs = outputs + deltas[1](inner)[0]
    per_token = layout.take(outputs).reshape(batch, length, experts.per_token, -1)
    return (per_token * weights[..., None]).sum(axis=2)


def _module_specs(
    modules: tuple[LoraWeights, LoraWeights], batch: Axes, fsdp: str | None
) -> tuple[LoraWeights, LoraWeights]:
    """Return the PartitionSpecs of the leaves of `modules`. A is divided like the inputs of the weight, and B
    like its outputs. B of `gate_up` is not divided along `fsdp`, because these outputs are gathered first."""
    slot_axes = () if modules[0].indices is None else (None, None)

    def specs(module: LoraWeights, inputs: str | None, outputs: str | None) -> LoraWeights:
        replicated: Any = jax.tree.map(lambda _: PartitionSpec(), module)
        a = PartitionSpec(*slot_axes, "expert", inputs, None)
        b = PartitionSpec(*slot_axes, "expert", None, outputs)
        indices = replicated.indices and replace(replicated.indices, slots=PartitionSpec(batch))
        return replace(replicated, a=a, b=(b,) * len(module.b), indices=indices)

    return specs(modules[0], None, "tensor"), specs(modules[1], "tensor", fsdp)


# --- tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class TileLayout:
    """The places of R assignments in N tiles. All assignments of a tile have the same group: an expert, or a
    pair of an expert and a LoRA slot. Assignments to experts of other devices are in no tile."""

    tile: int  # assignments per tile
    groups: jax.Array  # [N] int32, the group of each tile
    places: jax.Array  # [R] int32, index among the N * tile places; N * tile: the assignment is in no tile
    used: jax.Array  # [] int32, number of tiles with assignments

    def fill(self, inputs: jax.Array) -> jax.Array:
        """Return the rows of `inputs` [R, n] in tiles [N, tile, n], padded with zeros."""
        count = self.groups.shape[0]
        empty = jnp.zeros((count * self.tile, inputs.shape[1]), inputs.dtype)
        return empty.at[self.places].set(inputs, mode="drop").reshape(count, self.tile, -1)

    def take(self, tiles: jax.Array) -> jax.Array:
        """Return the rows [R, n] of `tiles` [N, tile, n], with zeros for assignments in no tile."""
        return tiles.reshape(-1, tiles.shape[-1]).at[self.places].get(mode="fill", fill_value=0)


def tile_size(assignments: int, experts: int) -> int:
    """Return the tile size: about the number of assignments per expert, but at least MIN_EXPERT_TILE and at
    most MAX_EXPERT_TILE. Smaller tiles need more products, larger tiles have more padding."""
    per_expert = 1 << (assignments // experts).bit_length() - 1 if assignments > experts else 1
    return min(max(MIN_EXPERT_TILE, per_expert), MAX_EXPERT_TILE)


def lay_out_tiles(local_R: jax.Array, count: int, *, tile: int) -> TileLayout:
    """Return the layout of R assignments in tiles of one group each. `local_R` [R] are the numbers of their
    groups. Numbers outside 0 .. count - 1 belong to other devices."""
    assignments = local_R.shape[0]
    groups = jnp.where((local_R >= 0) & (local_R < count), local_R, count)
    sizes = jnp.bincount(groups, length=count + 1)[:count]
    ends = jnp.cumsum(-(-sizes // tile))
    order = jnp.argsort(groups)
    group = groups[order]
    within = jnp.arange(assignments) - (jnp.cumsum(sizes) - sizes)[group]
    tiles = (assignments + min(count, assignments) * (tile - 1)) // tile  # enough for every distribution
    starts = jnp.append((ends - -(-sizes // tile)) * tile, tiles * tile)
    places = jnp.zeros(assignments, jnp.int32)
    places = places.at[order].set(jnp.where(group < count, starts[group] + within, tiles * tile))
    tile_groups = jnp.minimum(jnp.searchsorted(ends, jnp.arange(tiles), side="right"), count - 1)
    return TileLayout(tile=tile, groups=tile_groups, places=places, used=ends[-1])


def _factors_of_tiles(module: LoraWeights, experts: jax.Array, slot: jax.Array | None) -> LoraWeights:
    """Return the LoRA weights of each tile, with a leading axis of tiles. `slot` [tiles] is the LoRA slot of
    each tile. None: `module` is one adapter, and the scale in the result has no axis of tiles."""
    if slot is None:
        return LoraWeights(a=module.a[experts], b=tuple(b[experts] for b in module.b), scale=module.scale)
    index = (slot, module.layer, experts)
    return LoraWeights(
        a=module.a[index],
        b=tuple(b[index] for b in module.b),
        scale=jnp.asarray(module.scale)[slot, module.layer][:, None, None],
    )


@jax.custom_vjp
def tile_products(tiles: jax.Array, weight: jax.Array, experts: jax.Array, used: jax.Array) -> Any:
    """Multiply each of the first `used` tiles [N, tile, in] by the weight [E, out, in] of its expert. The
    other tiles are zero in the result [N, tile, out]. `weight` has no gradient."""
    return _products(tiles, weight, experts, used, transposed=False)


def _products(
    tiles: jax.Array, weight: jax.Array, experts: jax.Array, used: jax.Array, *, transposed: bool
) -> jax.Array:
    """Run the kernel on NVIDIA GPUs. On other devices, and for shapes that the kernel does not support, run a
    loop. With `transposed` (the backward pass), multiply tiles [N, tile, out] by the weights [out, in]."""
    weight = jnp.asarray(weight)

    def loop(tiles: jax.Array, weight: jax.Array, experts: jax.Array, used: jax.Array) -> jax.Array:
        def step(index: jax.Array, out: jax.Array) -> jax.Array:
            expert_weight = weight[experts[index]]
            return out.at[index].set(tiles[index] @ (expert_weight if transposed else expert_weight.T))

        start = jnp.zeros((*tiles.shape[:2], weight.shape[2 if transposed else 1]), tiles.dtype)
        return jax.lax.fori_loop(0, used, step, start)

    if not grouped_kernel.fits(tiles, weight):
        return loop(tiles, weight, experts, used)
    kernel = partial(grouped_kernel.grouped_products, transposed=transposed)
    return jax.lax.platform_dependent(tiles, weight, experts, used, cuda=kernel, default=loop)


def _products_forward(
    tiles: CustomVJPPrimal, weight: CustomVJPPrimal, experts: CustomVJPPrimal, used: CustomVJPPrimal
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    assert not weight.perturbed, "the weights of experts are frozen, only their adapters are trained"
    saved = weight.value, experts.value, used.value
    return tile_products(tiles.value, *saved), saved


def _products_backward(saved: tuple[jax.Array, jax.Array, jax.Array], gradient: jax.Array | SymbolicZero):
    weight, experts, used = saved
    if isinstance(gradient, SymbolicZero):
        return None, None, None, None
    return _products(gradient, weight, experts, used, transposed=True), None, None, None


tile_products.defvjp(_products_forward, _products_backward, symbolic_zeros=True)

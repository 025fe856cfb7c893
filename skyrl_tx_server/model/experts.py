"""A mixture of experts: the router chooses a few experts for each token, and tokens are sorted so that each
expert multiplies matrices.

Assignments (a token and one of its experts) are sorted by expert into tiles that belong to one expert each. A
loop over the tiles in use multiplies each by the weight of its expert. Neither the program nor its memory
grows with the number of experts, and no token is dropped. `jax.lax.ragged_dot` computes the same, but without
a kernel XLA multiplies every token by every expert: 17 times slower on a CPU (64 experts, 4,096 tokens, 256 x
256). Example with tiles of 2 and experts a, b, c:

    assignments  b a b b c   ->   tiles  a . | b b | b . | c .

This file is long because routing, tiles and their gradients use one layout of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from skyrl_tx_server.model.families.layer_spec import (
    STACK_INDEX,
    LayerParams,
    LoraTarget,
    ShardAxis,
    Weight,
    mlp,
    mlp_layer_weights,
)
from skyrl_tx_server.model.kernels import grouped_kernel
from skyrl_tx_server.model.layers import rms_norm
from skyrl_tx_server.model.lora.lora_math import LoraWeights, low_rank_deltas
from skyrl_tx_server.model.mesh import Axes, batch_axes, on_gpu, shard_batch, shard_map_over
from skyrl_tx_server.model.model_config import ExpertGroups, Experts, ModelConfig

MIN_EXPERT_TILE, MAX_EXPERT_TILE = 8, 128
TINY = 1e-20
"""Added to the sum of the chosen scores, so that it is not zero."""


def expert_weights(config: ModelConfig) -> dict[str, Weight]:
    experts = config.experts
    assert experts is not None
    hidden, width, count = config.hidden_size, config.intermediate_size, experts.count
    bias = Weight(names=("mlp.gate.e_score_correction_bias",), widths=(count,), exact=True)
    shared = mlp_layer_weights(hidden, experts.shared * width, module="mlp.shared_experts", prefix="shared_")
    names = {name: f"mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")}
    return {
        "mlp_norm": Weight(names=("post_attention_layernorm.weight",), widths=(hidden,)),
        "router": Weight(names=("mlp.gate.weight",), inputs=hidden, widths=(count,)),
        **({} if experts.groups is None else {"router_bias": bias}),
        **(shared if experts.shared else {}),
        "gate_up": Weight(
            names=(names["gate"], names["up"]),
            inputs=hidden,
            widths=(width, width),
            experts=count,
            switch=LoraTarget.MLP,
            split=ShardAxis.OUTPUTS,
        ),
        "down": Weight(
            names=(names["down"],),
            inputs=width,
            widths=(hidden,),
            experts=count,
            switch=LoraTarget.MLP,
            split=ShardAxis.INPUTS,
        ),
    }


def add_experts(
    config: ModelConfig, x: jax.Array, params: LayerParams, adapter: Mapping[str, LoraWeights] | None
) -> jax.Array:
    """x [B, T, D] plus its experts' outputs."""
    assert config.experts is not None
    normed = rms_norm(x, params["mlp_norm"], config.rms_norm_eps)
    inputs = (
        normed,
        route(config.experts, Router(params["router"], params.get("router_bias")), normed),
        params["gate_up"],
        params["down"],
    )
    modules = None if adapter is None else (adapter["gate_up"], adapter["down"])
    mix, layer = partial(mix_experts, config.experts), params.get(STACK_INDEX)
    if config.experts.shared:
        x = x + mlp(config, normed, params, adapter, prefix="shared_")
    if config.mesh is None:
        return x + mix(*inputs, modules, layer)
    rows, fsdp = batch_axes(config, x.shape[0]), "fsdp" if config.weight_stationary else None
    lead = () if layer is None else (None,)
    gate_up = PartitionSpec(*lead, "expert", ("tensor", "fsdp") if fsdp else "tensor", None)
    adapted = None if modules is None else _module_specs(modules, rows, fsdp)
    specs = (
        PartitionSpec(rows),
        PartitionSpec(rows),
        gate_up,
        PartitionSpec(*lead, "expert", fsdp, "tensor"),
        adapted,
        PartitionSpec(),
    )
    mixed = shard_map_over(config, partial(_shared_mix, mix, fsdp), specs, PartitionSpec(rows, None, fsdp))(
        *inputs, modules, layer
    )
    return shard_batch(config, x + mixed)


class Router(NamedTuple):
    weight: jax.Array  # [count, D]
    bias: jax.Array | None = None  # [count] float32, where experts are chosen by groups


def route(experts: Experts, router: Router, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(weights in x's dtype, experts) of x [B, T, D], both [B, T, per_token]; softmax and sigmoid in
    float32."""
    tokens = x.reshape(-1, x.shape[-1])
    if experts.groups is None:
        scores = jax.nn.softmax((tokens @ router.weight.T).astype(jnp.float32), axis=-1)
        weights, chosen = jax.lax.top_k(scores, experts.per_token)
    else:
        assert router.bias is not None
        scores = jax.nn.sigmoid(tokens.astype(jnp.float32) @ router.weight.T.astype(jnp.float32))
        _, chosen = jax.lax.top_k(_within_groups(experts.groups, scores + router.bias), experts.per_token)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if experts.normalized:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + TINY)
    if experts.groups is not None:
        weights = weights * experts.groups.scale
    return weights.astype(x.dtype).reshape(*x.shape[:2], -1), chosen.reshape(*x.shape[:2], -1)


def _within_groups(groups: ExpertGroups, scores: jax.Array) -> jax.Array:
    """`scores` [N, count], minus infinity outside each token's best groups."""
    grouped = scores.reshape(len(scores), groups.count, -1)
    best_two, _ = jax.lax.top_k(grouped, 2)
    _, chosen = jax.lax.top_k(best_two.sum(axis=-1), groups.per_token)
    inside = (chosen[..., None] == jnp.arange(groups.count)).any(axis=1)
    return jnp.where(inside[..., None], grouped, -jnp.inf).reshape(scores.shape)


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
    """The weighted outputs [B, T, D] of the experts whose weights `gate_up` [E, 2F, D] and `down` [E, D, F]
    are, `first` being the first, for x as `route` says. With a `layer` both are stacked over layers. `fsdp`
    is the mesh's axis that divides the outputs of both, if any: those of the first are brought together,
    those of the second stay.

    The adapter's modules are one for the batch (A [E, in, ...]), or all LoRA slots with their indices (A [S,
    L, E, in, ...]).
    """
    count, offset = gate_up.shape[-3], 0 if layer is None else layer * gate_up.shape[-3]
    gate_up, down = (jnp.reshape(matrices, (-1, *matrices.shape[-2:])) for matrices in (gate_up, down))
    batch, length, _ = x.shape
    tokens, (weights, chosen) = x.reshape(-1, x.shape[-1]), routed
    local = chosen.reshape(-1) - first
    indices = None if modules is None else modules[0].indices
    assigned = jnp.arange(local.size) // experts.per_token
    block = tile_size(local.size, experts.count)
    if modules is None or indices is None:
        layout, slot = lay_out_tiles(local, count, block=block), None
        own_experts = layout.groups
    else:  # a tile has one LoRA slot; for the kernels padding costs nothing
        num_slots = modules[0].a.shape[0]
        groups = local * num_slots + jnp.asarray(indices.slots)[assigned // length]
        layout = lay_out_tiles(groups, count * num_slots, block=block if on_gpu() else 1)
        own_experts, slot = layout.groups // num_slots, layout.groups % num_slots
    blocks = layout.fill(tokens[assigned])
    deltas = None
    if modules is not None:
        deltas = [partial(low_rank_deltas, module=_of_tiles(module, own_experts, slot)) for module in modules]

    both = tile_products(blocks, gate_up, own_experts + offset, layout.used)
    gate, up = jnp.split(
        both if fsdp is None else jax.lax.all_gather(both, fsdp, axis=-1, tiled=True), 2, axis=-1
    )
    if deltas is not None:
        gate_delta, up_delta = deltas[0](blocks)
        gate, up = gate + gate_delta, up + up_delta
    inner = jax.nn.silu(gate) * up
    outputs = tile_products(inner, down, own_experts + offset, layout.used)
    if deltas is not None:
        outputs = outputs + deltas[1](inner)[0]
    per_token = layout.take(outputs).reshape(batch, length, experts.per_token, -1)
    return (per_token * weights[..., None]).sum(axis=2)


def _shared_mix(
    mix: Callable[..., jax.Array],
    fsdp: str | None,
    x: jax.Array,
    routed: tuple[jax.Array, jax.Array],
    gate_up: jax.Array,
    down: jax.Array,
    modules: tuple[LoraWeights, LoraWeights] | None,
    layer: jax.Array | None,
) -> jax.Array:
    """`mix_experts` on one of several devices, each of which has some experts and some columns of theirs."""
    first = jax.lax.axis_index("expert") * gate_up.shape[-3]
    return jax.lax.psum(
        mix(x, routed, gate_up, down, modules, layer, first=first, fsdp=fsdp), ("expert", "tensor")
    )


def _module_specs(
    modules: tuple[LoraWeights, LoraWeights], rows: Axes, fsdp: str | None
) -> tuple[LoraWeights, LoraWeights]:
    """A PartitionSpec in every leaf's place: B is divided like its weight's outputs, which are its last axis,
    A like its inputs."""
    slot_axes = () if modules[0].indices is None else (None, None)

    def of(module: LoraWeights, inputs: str | None, outputs: str | None) -> LoraWeights:
        def spec(path: tuple[Any, ...], leaf: jax.Array) -> PartitionSpec:
            match path[0].name:
                case "a":
                    return PartitionSpec(*slot_axes, "expert", inputs, None)
                case "b":
                    return PartitionSpec(*slot_axes, "expert", None, outputs)
                case "indices" if path[1].name == "slots":
                    return PartitionSpec(rows)
            return PartitionSpec()

        return jax.tree_util.tree_map_with_path(spec, module)

    return of(modules[0], None, "tensor"), of(modules[1], "tensor", fsdp)


# --- blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class TileLayout:
    """The place of each of R assignments in `len(groups)` tiles; assignments to experts of other devices have
    none."""

    block: int
    groups: jax.Array  # [tiles] int32, the group of each tile
    places: jax.Array  # [R] int32; beyond the last tile: no place
    used: jax.Array  # [] int32, tiles that hold assignments

    def fill(self, rows: jax.Array) -> jax.Array:
        """[R, n] -> [blocks, block, n], zeros between."""
        count = self.groups.shape[0]
        empty = jnp.zeros((count * self.block, rows.shape[1]), rows.dtype)
        return empty.at[self.places].set(rows, mode="drop").reshape(count, self.block, -1)

    def take(self, blocks: jax.Array) -> jax.Array:
        """[blocks, block, n] -> [R, n], zeros for assignments without a place."""
        return blocks.reshape(-1, blocks.shape[-1]).at[self.places].get(mode="fill", fill_value=0)


def tile_size(assignments: int, experts: int) -> int:
    """Return about the number of assignments of an expert: smaller tiles make more products, larger ones more
    padding."""
    return min(
        max(
            MIN_EXPERT_TILE,
            1 << (assignments // experts).bit_length() - 1 if assignments > experts else MIN_EXPERT_TILE,
        ),
        MAX_EXPERT_TILE,
    )


def lay_out_tiles(local_R: jax.Array, count: int, *, block: int) -> TileLayout:
    """Lay out assignments to the groups 0 .. count - 1 in tiles of one group each; any other number belongs
    to another device."""
    assignments = local_R.shape[0]
    groups = jnp.where((local_R >= 0) & (local_R < count), local_R, count)
    sizes = jnp.bincount(groups, length=count + 1)[:count]
    ends = jnp.cumsum(-(-sizes // block))
    order = jnp.argsort(groups)
    group = groups[order]
    within = jnp.arange(assignments) - (jnp.cumsum(sizes) - sizes)[group]
    blocks = (
        assignments + min(count, assignments) * (block - 1)
    ) // block  # as many as any distribution can need
    starts = jnp.append((ends - -(-sizes // block)) * block, blocks * block)
    places = (
        jnp.zeros(assignments, jnp.int32)
        .at[order]
        .set(jnp.where(group < count, starts[group] + within, blocks * block))
    )
    owners = jnp.minimum(jnp.searchsorted(ends, jnp.arange(blocks), side="right"), count - 1)
    return TileLayout(block=block, groups=owners, places=places, used=ends[-1])


def _of_tiles(module: LoraWeights, experts: jax.Array, slot: jax.Array | None) -> LoraWeights:
    """Return the factors of each tile, every leaf with a leading axis of tiles. `slot` [tiles] is the LoRA
    slot, if `module` has slots."""
    if slot is None:
        return LoraWeights(a=module.a[experts], b=tuple(b[experts] for b in module.b), scale=module.scale)
    at = (slot, module.layer, experts)
    return LoraWeights(
        a=module.a[at],
        b=tuple(b[at] for b in module.b),
        scale=jnp.asarray(module.scale)[slot, module.layer][:, None, None],
    )


@jax.custom_vjp
def tile_products(blocks: jax.Array, weight: jax.Array, experts: jax.Array, used: jax.Array) -> Any:
    """blocks [n, block, in] through weight[experts] [n, out, in], for the first `used` blocks; zeros beyond.
    `weight` takes no gradient."""
    return _products(blocks, weight, experts, used, transposed=False)


def _products(
    blocks: jax.Array, weight: jax.Array, experts: jax.Array, used: jax.Array, *, transposed: bool
) -> jax.Array:
    """Run the kernel on NVIDIA's devices and a loop on others."""
    weight = jnp.asarray(weight)

    def loop(blocks: jax.Array, weight: jax.Array, experts: jax.Array, used: jax.Array) -> jax.Array:
        def step(index: jax.Array, out: jax.Array) -> jax.Array:
            own = weight[experts[index]]
            return out.at[index].set(blocks[index] @ (own if transposed else own.T))

        return jax.lax.fori_loop(
            0, used, step, jnp.zeros((*blocks.shape[:2], weight.shape[2 if transposed else 1]), blocks.dtype)
        )

    if not grouped_kernel.fits(blocks, weight):
        return loop(blocks, weight, experts, used)
    kernel = partial(grouped_kernel.grouped_products, transposed=transposed)
    return jax.lax.platform_dependent(blocks, weight, experts, used, cuda=kernel, default=loop)


def _products_forward(blocks, weight, experts, used):
    assert not weight.perturbed, "the base model's experts are frozen: only their adapters are trained"
    return tile_products(blocks.value, weight.value, experts.value, used.value), (
        weight.value,
        experts.value,
        used.value,
    )


def _products_backward(saved: tuple[jax.Array, jax.Array, jax.Array], gradient: jax.Array | SymbolicZero):
    weight, experts, used = saved
    if isinstance(gradient, SymbolicZero):
        return None, None, None, None
    return _products(gradient, weight, experts, used, transposed=True), None, None, None


tile_products.defvjp(_products_forward, _products_backward, symbolic_zeros=True)

"""Compares several meshes of 8 virtual devices with one device. Prints the differences as JSON for
test_mesh.py.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx_server.config.engine_options import MeshShape
from skyrl_tx_server.engine.operations import LoraSpec, LossFn, TrainDatum
from skyrl_tx_server.model import weights
from skyrl_tx_server.model.attention.decode_attention import attend_over_pages
from skyrl_tx_server.model.attention.kv_splits import kv_splits_of
from skyrl_tx_server.model.attention.prefill_attention import PrefillTiles, attend_to_pages
from skyrl_tx_server.model.config_json import load_model_config
from skyrl_tx_server.model.kv_cache import (
    KVCache,
    Segment,
    copy_pages,
    empty_cache,
    read_positions,
    write_layer,
    write_positions,
)
from skyrl_tx_server.model.lora.adapter import Adapter, init_adapter, place_adapter, zero_adapter
from skyrl_tx_server.model.lora.lora_math import lora_indices
from skyrl_tx_server.model.mesh import bytes_per_device, make_mesh, place
from skyrl_tx_server.model.model_config import Experts, ModelConfig
from skyrl_tx_server.model.shapes import PAGE_SIZE, PREFILL_TILE, train_shapes
from skyrl_tx_server.model.transformer import Remat, init_params
from skyrl_tx_server.model.weights import load_params, param_shapes, save_model
from skyrl_tx_server.sampling.decode_step import Carry, DecodeBatch, decode_steps
from skyrl_tx_server.sampling.sequences import batch_settings
from skyrl_tx_server.sampling.token_sampling import MAX_STOP_TOKENS
from skyrl_tx_server.training.losses import select_loss
from skyrl_tx_server.training.packing import pack
from skyrl_tx_server.training.train_step import forward_backward
from tests.server.tiny_qwen3 import attention_spec

DENSE = ModelConfig(
    model_type="qwen2",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    max_position_embeddings=128,
)
LATENT = load_model_config(Path(__file__).parents[1] / "fixtures" / "families" / "deepseek_v3")
SPARSE = replace(
    DENSE,
    model_type="qwen3_moe",
    experts=Experts(count=4, per_token=2, normalized=True),
    tie_word_embeddings=True,
)
SHAPE = MeshShape(fsdp=2, tensor=2, expert=2)
RANK = 4


def main(directory: Path) -> None:
    divided = replace(DENSE, mesh=make_mesh(MeshShape(data=2, tensor=2)))
    report = {**trained(SPARSE, SHAPE, directory), **cached(divided), "decoded": decoded(divided)}
    report["sent"] = max(
        most_sent(SPARSE, SHAPE),
        most_sent(DENSE, MeshShape(fsdp=2, tensor=2)),
        most_sent(LATENT, MeshShape(fsdp=2)),
    )
    print(json.dumps(report))


def trained(config: ModelConfig, shape: MeshShape, model_dir: Path) -> dict[str, float]:
    """Run one forward_backward from a model directory, on one device and on the mesh."""
    made = jax.jit(init_params, static_argnums=(0,))(config, jax.random.key(0))
    save_model(
        jax.tree.map(lambda leaf: np.asarray(leaf) * (3 if leaf.ndim > 1 else 1), made), config, model_dir
    )
    random = np.random.default_rng(0)
    fresh = init_adapter(config, LoraSpec(rank=RANK, seed=1), RANK)
    adapter = jax.tree.map(
        lambda leaf: leaf + 0.05 * random.normal(size=leaf.shape).astype(np.float32), fresh
    )
    tokens = random.integers(0, config.vocab_size, (6, 41)).astype(np.int32)
    data = tuple(TrainDatum(tokens=row[:-1], target_tokens=row[1:]) for row in tokens)
    trained = [np.ones(len(datum.tokens), bool) for datum in data]
    (packed,) = pack(
        data, trained, train_shapes(max_context_length=128, tokens_per_batch=512, dp_ranks=shape.batch)
    )

    def step(config: ModelConfig) -> tuple[Adapter, np.ndarray, float]:
        gradient, outputs = forward_backward(
            place_adapter(config, adapter),
            place_adapter(config, zero_adapter(config, RANK)),
            load_params(model_dir, config, "float32"),
            packed.arrays,
            select_loss(LossFn.CROSS_ENTROPY),
            config=config,
            remat=Remat.NOTHING,
        )
        return jax.device_get(gradient), np.asarray(outputs.logprobs), float(outputs.loss)

    shared = replace(config, mesh=make_mesh(shape))
    (expected, logprobs, loss), (gradient, shared_logprobs, shared_loss) = step(config), step(shared)
    pairs = list(zip(jax.tree.leaves(expected), jax.tree.leaves(gradient), strict=True))
    parts: list[int] = []
    with patch.object(weights, "place", partial(_noting_parts, parts)):
        params = load_params(model_dir, shared, "float32")
    return {
        "largest read": max(parts),
        "largest held": max(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params)),
        "logprobs": float(np.abs(logprobs - shared_logprobs).max()),
        "loss": abs(loss - shared_loss) / abs(loss),
        "gradient": max(
            float(np.abs(one - other).max() / np.abs(one).max()) for one, other in pairs if np.any(one)
        ),
        "planned": bytes_per_device(param_shapes(shared, np.dtype("float32"))),
        "held": sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params)),
        "whole": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
    }


def _noting_parts(parts: list[int], config, shape, spec, read) -> jax.Array:
    def noted(part: tuple[slice, ...]) -> np.ndarray:
        host = read(part)
        parts.append(host.nbytes)
        return host

    return place(config, shape, spec, noted)


def cached(config: ModelConfig) -> dict[str, bool]:
    """Pages of several devices keep what is written into them, attention reads it, and other pages do not
    change."""
    random = np.random.default_rng(0)

    def values(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    layers, heads, head_dim = config.num_layers, config.num_kv_heads, config.head_dim
    prompts = Segment(
        keys=values(layers, 2, heads, head_dim, 150), values=values(layers, 2, heads, 150, head_dim)
    )
    block = Segment(keys=values(layers, 4, heads, head_dim, 4), values=values(layers, 4, heads, 4, head_dim))
    tables = np.array([[1, 3, 4], [2, 5, 0], [9, 10, 11], [12, 8, 8]], np.int32)  # pages 0 and 8 are padding
    starts, counts = np.array([126, 0, 130, 3], np.int32), np.array([4, 0, 4, 4], np.int32)
    # Tiles of two prompts on different devices, and padding.
    queries = values(3, PREFILL_TILE, config.num_heads, head_dim)
    tiles = PrefillTiles(
        starts=np.array([60, 70, 0], np.int32),
        lengths=np.array([64, 60, 0], np.int32),
        tables=tables[[2, 0, 0]],
    )

    @partial(jax.jit, static_argnames=("config",))
    def run(
        cache: KVCache, *, config: ModelConfig
    ) -> tuple[KVCache, KVCache, list[list[Segment]], jax.Array]:
        for layer in range(layers):
            own = jax.tree.map(lambda leaf, layer=layer: leaf[layer], prompts)
            cache = write_layer(
                config, cache, np.int32(layer), own, tables[[0, 3]], np.array([0, 10]), np.array([140, 50])
            )
        cache = copy_pages(config, cache, np.stack([tables[0], tables[2]], axis=1))  # to the other devices
        scattered = write_positions(config, cache, block, tables, starts, counts, scatter=True)
        cache = write_positions(config, cache, block, tables, starts, counts)
        rows = read_positions(config, cache, tables, (PAGE_SIZE, 3 * PAGE_SIZE))
        return (
            cache,
            scattered,
            rows,
            attend_to_pages(
                config, attention_spec(config.head_dim), cache, np.int32(1), tiles, jnp.asarray(queries)
            ),
        )

    def everything(config: ModelConfig) -> list[list[np.ndarray]]:
        cache, scattered, rows, attended = run(
            empty_cache(config=config, pages=16, dtype=np.dtype("float32")), config=config
        )
        owned = [page for page in range(16) if page not in (0, 8)]
        kept, again = (
            [leaf[:, owned] for leaf in jax.device_get(jax.tree.leaves(each))] for each in (cache, scattered)
        )
        assert all(np.array_equal(one, other) for one, other in zip(kept, again, strict=True)), (
            "both ways to write rows"
        )
        seen = [own[:length] for own, length in zip(np.asarray(attended), tiles.lengths, strict=True)]
        return [kept, [rows_of[[0, 2]] for rows_of in jax.device_get(jax.tree.leaves(rows))], seen]

    alone, shared = everything(replace(config, mesh=None)), everything(config)
    assert all(np.all(np.any(own, axis=(1, 2))) for own in alone[2])
    equal = [
        all(np.array_equal(one, other) for one, other in zip(*pair, strict=True))
        for pair in zip(alone, shared, strict=True)
    ]
    return {"written": equal[0], "read": equal[1], "attended": equal[2]}


def most_sent(config: ModelConfig, shape: MeshShape) -> float:
    """Return the size of the longest message between devices in a decode dispatch, in shares of a layer's
    matrix."""
    config, rows = replace(config, mesh=make_mesh(shape)), 4
    bank = jax.tree.map(lambda leaf: np.stack([leaf]), zero_adapter(config, RANK))
    row = DecodeBatch(
        tokens=np.zeros(rows, np.int32),
        before=Carry.empty(rows),
        positions=np.zeros(rows, np.int32),
        remaining=np.zeros(rows, np.int32),
        tables=np.zeros((rows, 1), np.int32),
        splits=None,
        adapters=lora_indices(np.zeros(rows, np.int32)),
        stop_tokens=np.full((rows, MAX_STOP_TOKENS), -1, np.int32),
    )
    cache, settings = (
        empty_cache(config=config, pages=8, dtype=np.dtype("float32")),
        batch_settings([None] * rows, config.vocab_size),
    )
    params = param_shapes(config, np.dtype("float32"))
    block = decode_steps.lower(
        cache,
        params,
        place_adapter(config, bank),
        row,
        settings,
        config=config,
        steps=16,
        ends=(PAGE_SIZE,),
        tempered=False,
    )
    program = block.compile().as_text()
    assert program is not None
    sent = re.findall(
        r"\w+\[([\d,]+)\]\S* (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(",
        program,
    )
    assert sent
    return max(prod(map(int, message.split(","))) for message in sent) / prod(params.layers[0]["o"].shape[1:])


def decoded(config: ModelConfig) -> float:
    """Return the difference between the GPU's decode attention, interpreted, and one device.

    Sequences of the same device share pages.
    """
    random = np.random.default_rng(0)

    def values(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    layers, heads, kv_heads, head_dim, width, half = (
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        10,
        32,
    )
    cache = KVCache(
        keys=values(layers, 2 * half, kv_heads, head_dim, PAGE_SIZE),
        values=values(layers, 2 * half, kv_heads, PAGE_SIZE, head_dim),
    )
    first = np.arange(1, 1 + 2 * width).reshape(2, width)
    first[1, :8] = first[0, :8]
    tables, lengths = (
        np.concatenate([first, half + first]).astype(np.int32),
        np.array([560, 620, 0, 513], np.int32),
    )
    q, recent = (
        values(4, 1, heads, head_dim),
        Segment(keys=values(4, kv_heads, head_dim, 4), values=values(4, kv_heads, 4, head_dim)),
    )
    visible = jnp.ones((1, 1, 1, 4), bool)

    def attended(config: ModelConfig, devices: int) -> np.ndarray:
        splits = kv_splits_of(tables, lengths, group=heads // kv_heads, devices=devices)
        attend = jax.jit(
            partial(attend_over_pages, config, attention_spec(head_dim), interpret=True), static_argnums=1
        )
        return np.asarray(attend(cache, 1, q, jnp.asarray(tables), splits, recent, visible))

    return float(np.abs(attended(replace(config, mesh=None), 1) - attended(config, 2)).max())


if __name__ == "__main__":
    main(Path(sys.argv[1]))

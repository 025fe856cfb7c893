"""Compare meshes of up to 8 virtual devices with one device. The differences are printed as JSON for
test_mesh.py."""

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
from jax.experimental import pallas as pl

from skyrl_tx_server.config.engine_options import MeshShape
from skyrl_tx_server.engine.operations import MAX_STOP_TOKENS, LoraSpec, LossFn, TrainDatum
from skyrl_tx_server.model import weights
from skyrl_tx_server.model.attention.decode_attention import TokenRows, attend_over_pages
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
from skyrl_tx_server.training.losses import select_loss
from skyrl_tx_server.training.packing import pack
from skyrl_tx_server.training.train_step import forward_backward
from tests.server.test_fp8 import write_fp8_model
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
    sharded = replace(DENSE, mesh=make_mesh(MeshShape(data=2, tensor=2)))
    report = {
        **compare_training(SPARSE, SHAPE, directory),
        **compare_kv_cache(sharded),
        "decoded": compare_decode_attention(sharded),
        "fp8": fp8_weights_are_equal(directory / "fp8"),
    }
    report["sent"] = max(
        largest_message(SPARSE, SHAPE),
        largest_message(DENSE, MeshShape(fsdp=2, tensor=2)),
        largest_message(LATENT, MeshShape(fsdp=2)),
    )
    print(json.dumps(report))


def fp8_weights_are_equal(model_dir: Path) -> bool:
    """Return whether FP8 weights that a mesh loads in parts equal the weights that one device loads."""
    write_fp8_model("qwen3_moe", model_dir)
    config = load_model_config(model_dir)
    sharded = replace(config, mesh=make_mesh(MeshShape(fsdp=2, expert=2)))
    on_one_device, on_the_mesh = (
        jax.tree.leaves(load_params(model_dir, device_config, "float32"))
        for device_config in (config, sharded)
    )
    return all(
        np.array_equal(np.asarray(leaf), np.asarray(sharded_leaf))
        for leaf, sharded_leaf in zip(on_one_device, on_the_mesh, strict=True)
    )


def compare_training(config: ModelConfig, shape: MeshShape, model_dir: Path) -> dict[str, float]:
    """Compare one forward_backward on the mesh with one device, and measure the bytes of the parameters."""
    random_params = jax.jit(init_params, static_argnums=(0,))(config, jax.random.key(0))
    save_model(
        jax.tree.map(lambda leaf: np.asarray(leaf) * (3 if leaf.ndim > 1 else 1), random_params),
        config,
        model_dir,
    )
    random = np.random.default_rng(0)
    initial_adapter = init_adapter(config, LoraSpec(rank=RANK, seed=1), RANK)
    adapter = jax.tree.map(
        lambda leaf: leaf + 0.05 * random.normal(size=leaf.shape).astype(np.float32), initial_adapter
    )
    tokens = random.integers(0, config.vocab_size, (6, 41)).astype(np.int32)
    data = tuple(TrainDatum(tokens=ids[:-1], target_tokens=ids[1:]) for ids in tokens)
    trained_masks = [np.ones(len(datum.tokens), bool) for datum in data]
    (packed,) = pack(
        data, trained_masks, train_shapes(max_context_length=128, tokens_per_batch=512, dp_ranks=shape.batch)
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

    sharded = replace(config, mesh=make_mesh(shape))
    (expected, logprobs, loss), (gradient, sharded_logprobs, sharded_loss) = step(config), step(sharded)
    pairs = list(zip(jax.tree.leaves(expected), jax.tree.leaves(gradient), strict=True))
    part_sizes: list[int] = []
    with patch.object(weights, "place", partial(_place_and_record_sizes, part_sizes)):
        params = load_params(model_dir, sharded, "float32")
    return {
        "largest read": max(part_sizes),
        "largest held": max(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params)),
        "logprobs": float(np.abs(logprobs - sharded_logprobs).max()),
        "loss": abs(loss - sharded_loss) / abs(loss),
        "gradient": max(
            float(np.abs(alone - leaf).max() / np.abs(alone).max()) for alone, leaf in pairs if np.any(alone)
        ),
        "planned": bytes_per_device(param_shapes(sharded, np.dtype("float32"))),
        "held": sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params)),
        "whole": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
    }


def _place_and_record_sizes(part_sizes: list[int], config, shape, spec, read) -> jax.Array:
    def read_and_record(part: tuple[slice, ...]) -> np.ndarray:
        array = read(part)
        part_sizes.append(array.nbytes)
        return array

    return place(config, shape, spec, read_and_record)


def compare_kv_cache(config: ModelConfig) -> dict[str, bool]:
    """Compare KV pages on the mesh with one device: writes, copies, reads and prefill attention. Pages that
    are not written must not change."""
    random = np.random.default_rng(0)

    def values(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    layers, heads, head_dim = config.num_layers, config.num_kv_heads, config.head_dim
    prompts = Segment(
        keys=values(layers, 2, heads, head_dim, 150), values=values(layers, 2, heads, 150, head_dim)
    )
    block = Segment(keys=values(layers, 4, heads, head_dim, 4), values=values(layers, 4, heads, 4, head_dim))
    tables = np.array([[1, 3, 4], [2, 5, 0], [9, 10, 11], [12, 8, 8]], np.int32)  # pages 0 and 8 are padding
    starts, counts = np.array([126, 0, 130, 3], np.int32), np.array([4, 0, 4, 4], np.int32)
    # tiles of two prompts on different data-parallel ranks, and a padding tile
    queries = values(3, PREFILL_TILE, config.num_heads, head_dim)
    tiles = PrefillTiles(
        starts=np.array([60, 70, 0], np.int32),
        lengths=np.array([64, 60, 0], np.int32),
        tables=tables[[2, 0, 0]],
    )

    @partial(jax.jit, static_argnames=("config",))
    def run(cache: KVCache, *, config: ModelConfig) -> tuple[KVCache, list[list[Segment]], jax.Array]:
        for layer in range(layers):
            new = jax.tree.map(lambda leaf, layer=layer: leaf[layer], prompts)
            cache = write_layer(
                config, cache, jnp.int32(layer), new, tables[[0, 3]], np.array([0, 10]), np.array([140, 50])
            )
        cache = copy_pages(config, cache, np.stack([tables[0], tables[2]], axis=1))  # from rank 0 to rank 1
        cache = write_positions(config, cache, block, tables, starts, counts)
        segments_read = [
            read_positions(config, cache, layer, tables, ends=(PAGE_SIZE, 3 * PAGE_SIZE))
            for layer in range(layers)
        ]
        return (
            cache,
            segments_read,
            attend_to_pages(
                config, cache, jnp.int32(1), tiles, queries, spec=attention_spec(config.head_dim)
            ),
        )

    def results_on(config: ModelConfig) -> list[list[np.ndarray]]:
        cache, segments_read, attended = run(
            empty_cache(config=config, pages=16, dtype=np.dtype("float32")), config=config
        )
        used_pages = [page for page in range(16) if page not in (0, 8)]
        written = [leaf[:, used_pages] for leaf in jax.device_get(jax.tree.leaves(cache))]
        attention = [
            outputs[:length] for outputs, length in zip(np.asarray(attended), tiles.lengths, strict=True)
        ]
        return [written, [leaf[[0, 2]] for leaf in jax.device_get(jax.tree.leaves(segments_read))], attention]

    alone, sharded = results_on(replace(config, mesh=None)), results_on(config)
    assert all(np.all(np.any(outputs, axis=(1, 2))) for outputs in alone[2])
    equal = [
        all(np.array_equal(first, second) for first, second in zip(*arrays, strict=True))
        for arrays in zip(alone, sharded, strict=True)
    ]
    return {"written": equal[0], "read": equal[1], "attended": equal[2]}


def largest_message(config: ModelConfig, shape: MeshShape) -> float:
    """Return the number of elements of the largest message between devices in a decode dispatch,
    divided by the number of elements of the attention output matrix `o` of a layer."""
    config, num_sequences = replace(config, mesh=make_mesh(shape)), 4
    bank = jax.tree.map(lambda leaf: np.stack([leaf]), zero_adapter(config, RANK))
    batch = DecodeBatch(
        tokens=np.zeros(num_sequences, np.int32),
        before=Carry.empty(num_sequences),
        positions=np.zeros(num_sequences, np.int32),
        remaining=np.zeros(num_sequences, np.int32),
        tables=np.zeros((num_sequences, 1), np.int32),
        splits=None,
        adapters=lora_indices(np.zeros(num_sequences, np.int32)),
        stop_tokens=np.full((num_sequences, MAX_STOP_TOKENS), -1, np.int32),
    )
    cache, settings = (
        empty_cache(config=config, pages=8, dtype=np.dtype("float32")),
        batch_settings([None] * num_sequences, config.vocab_size),
    )
    params = param_shapes(config, np.dtype("float32"))
    lowered = decode_steps.lower(
        cache,
        params,
        place_adapter(config, bank),
        batch,
        settings,
        config=config,
        steps=16,
        ends=(PAGE_SIZE,),
        tempered=False,
    )
    program = lowered.compile().as_text()
    assert program is not None
    message_shapes = re.findall(
        r"\w+\[([\d,]+)\]\S* (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(",
        program,
    )
    assert message_shapes
    largest = max(prod(map(int, shape.split(","))) for shape in message_shapes)
    return largest / prod(params.layers[0]["o"].shape[1:])


def compare_decode_attention(config: ModelConfig) -> float:
    """Return the largest difference between the decode attention of a mesh and of one device, and between the
    pages that they write. Both run the GPU kernel in interpret mode. Sequences of the same data-parallel rank
    share pages."""
    random = np.random.default_rng(0)

    def values(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    layers, heads, kv_heads, head_dim, width, pages_per_rank = (
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        16,  # the kernel does not support smaller head dimensions
        10,
        32,
    )
    cache = KVCache(
        keys=values(layers, 2 * pages_per_rank, kv_heads, head_dim, PAGE_SIZE),
        values=values(layers, 2 * pages_per_rank, kv_heads, PAGE_SIZE, head_dim),
    )
    rank_0_tables = np.arange(1, 1 + 2 * width).reshape(2, width)
    rank_0_tables[1, :8] = rank_0_tables[0, :8]
    tables, lengths = (
        np.concatenate([rank_0_tables, pages_per_rank + rank_0_tables]).astype(np.int32),
        np.array([560, 620, 0, 513], np.int32),
    )
    qkv = values(4, 1, heads, head_dim), values(4, 1, kv_heads, head_dim), values(4, 1, kv_heads, head_dim)
    tokens = TokenRows(
        positions=jnp.asarray(lengths), is_written=jnp.asarray(lengths > 0), tables=jnp.asarray(tables)
    )

    def attended(config: ModelConfig, devices: int) -> np.ndarray:
        ends = np.where(lengths > 0, lengths + 8, 0)
        splits = kv_splits_of(tables, ends, group=heads // kv_heads, devices=devices)
        spec = attention_spec(head_dim)
        attend = jax.jit(partial(attend_over_pages, config, spec=spec, layer=1))
        with patch.object(pl, "pallas_call", partial(pl.pallas_call, interpret=True)):
            out, written = attend(cache, qkv, tokens, splits)
        return np.concatenate([np.ravel(array) for array in (out, written.keys, written.values)])

    return float(np.abs(attended(replace(config, mesh=None), 1) - attended(config, 2)).max())


if __name__ == "__main__":
    main(Path(sys.argv[1]))

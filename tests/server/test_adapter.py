from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx_server.engine.operations import LoraSpec, expert_rank
from skyrl_tx_server.model.lora.adapter import (
    adapted_stacks,
    head_weight,
    init_adapter,
    is_trained,
    trainable_mask,
    zero_adapter,
)
from skyrl_tx_server.model.lora.lora_math import lora_indices, low_rank_deltas, project
from tests.server import tiny_qwen3
from tests.server.tiny_qwen3 import CONFIG, MAX_RANK, SPEC

WEIGHTS = {**adapted_stacks(CONFIG)[0].weights, "head": head_weight(CONFIG)}


def modules(adapter):
    return {**adapter.layers[0], "head": adapter.head}


@pytest.mark.seed_behaviour(90)
def test_a_new_adapter_has_random_lora_a_and_zero_lora_b() -> None:
    for field, module in modules(init_adapter(CONFIG, SPEC, MAX_RANK)).items():
        used = module.a.reshape(*module.a.shape[:-1], -1, MAX_RANK)
        assert np.all(used[..., : SPEC.rank] != 0), field
        assert np.all(used[..., SPEC.rank :] == 0), field
        assert np.abs(module.a).max() <= module.a.shape[-2] ** -0.5
        assert not any(np.any(b) for b in module.b)
        np.testing.assert_allclose(module.scale, 32 / 3)


def test_lora_a_depends_on_the_seed_and_the_module() -> None:
    first, same_seed, other_seed = (
        init_adapter(CONFIG, replace(SPEC, seed=seed), MAX_RANK) for seed in (1, 1, 2)
    )
    for module, with_same_seed, with_other_seed in zip(
        modules(first).values(), modules(same_seed).values(), modules(other_seed).values(), strict=True
    ):
        np.testing.assert_array_equal(module.a, with_same_seed.a)
        assert np.any(module.a != with_other_seed.a)
    assert len(
        {float(np.ravel(module.a)[0] * module.a.shape[-2] ** 0.5) for module in modules(first).values()}
    ) == len(modules(first))


@pytest.mark.parametrize("untrained", ["train_attn", "train_mlp", "train_unembed"])
def test_an_untrained_part_is_zero_and_changes_no_other_part(untrained: str) -> None:
    spec = replace(SPEC, **{untrained: False})
    all_trained = modules(init_adapter(CONFIG, SPEC, MAX_RANK))
    for field, module in modules(init_adapter(CONFIG, spec, MAX_RANK)).items():
        np.testing.assert_array_equal(
            module.a, all_trained[field].a if is_trained(spec, WEIGHTS[field]) else 0
        )


def test_all_adapters_have_the_same_shapes() -> None:
    shapes = {
        str(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), adapter))
        for adapter in (
            init_adapter(CONFIG, LoraSpec(rank=1), MAX_RANK),
            init_adapter(CONFIG, LoraSpec(rank=4, train_mlp=False), MAX_RANK),
            zero_adapter(CONFIG, MAX_RANK),
        )
    }
    assert len(shapes) == 1


def test_the_mask_covers_exactly_the_rank_of_the_trained_parts() -> None:
    spec = LoraSpec(rank=3, train_mlp=False)
    mask = modules(trainable_mask(CONFIG, spec, MAX_RANK))
    for field, module in modules(init_adapter(CONFIG, spec, MAX_RANK)).items():
        np.testing.assert_array_equal(np.broadcast_to(mask[field].a, module.a.shape), module.a != 0)
        for b, b_mask in zip(module.b, mask[field].b, strict=True):
            expected = np.zeros(b.shape)
            expected[..., : spec.rank, :] = is_trained(spec, WEIGHTS[field])
            np.testing.assert_array_equal(np.broadcast_to(b_mask, b.shape), expected)
        assert not np.any(mask[field].scale)


def test_a_sequence_uses_the_adapter_of_its_lora_slot() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(3, 5, CONFIG.hidden_size)).astype(np.float32)
    weight = jnp.asarray(random.normal(size=(sum(CONFIG.qkv_widths), CONFIG.hidden_size)), jnp.float32)
    layers = [
        jax.tree.map(lambda leaf: leaf[1], adapter.layers[0]["qkv"])
        for adapter in (zeros(), tiny_qwen3.adapter(), doubled())
    ]
    bank = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    apply = jax.jit(lambda x, module: project(CONFIG, x, weight, CONFIG.qkv_widths, module))

    def apply_slots(*slots: int):
        return apply(x, replace(bank, indices=lora_indices(np.array(slots, np.int32))))

    mixed = apply_slots(2, 0, 1)
    for row, slot in enumerate((2, 0, 1)):
        for part, same_slot, alone in zip(
            mixed, apply_slots(slot, slot, slot), apply(x, layers[slot]), strict=True
        ):
            np.testing.assert_array_equal(part[row], same_slot[row])
            np.testing.assert_allclose(part[row], alone[row], atol=2e-5)


@pytest.mark.parametrize("slots", [(2, 0, 1), (1, 2, 1), (2, 2, 2)])
def test_the_compiled_number_of_adapters_changes_no_result(slots: tuple[int, ...]) -> None:
    """If `lora_indices` receives `counts`, as on a GPU, the program is compiled for the smallest sufficient
    number of adapters in `counts`.
    """
    x = np.random.default_rng(0).normal(size=(3, 5, CONFIG.hidden_size)).astype(np.float32)
    bank = jax.tree.map(
        lambda *leaves: np.stack(leaves),
        *(adapter.layers[0]["qkv"] for adapter in (zeros(), tiny_qwen3.adapter(), doubled())),
    )
    without_bucket, with_bucket = (
        jax.jit(low_rank_deltas)(
            x,
            replace(
                bank,
                indices=lora_indices(np.array(slots, np.int32), counts=counts),
                layer=np.int32(1),
            ),
        )
        for counts in (None, (1, 3))
    )
    for expected, actual in zip(without_bucket, with_bucket, strict=True):
        assert np.any(expected)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_the_rank_of_an_expert_is_a_share_and_at_least_1() -> None:
    assert [expert_rank(rank, 8) for rank in (32, 8, 2)] == [4, 1, 1]


def test_the_delta_is_scale_times_x_a_b() -> None:
    module = jax.tree.map(lambda leaf: np.asarray(leaf)[0], tiny_qwen3.adapter().layers[0]["gate_up"])
    x = np.random.default_rng(0).normal(size=(2, 5, CONFIG.hidden_size)).astype(np.float32)
    for part, delta in enumerate(low_rank_deltas(jnp.asarray(x), module)):
        expected = 32 / 3 * x @ module.a[:, part * MAX_RANK : (part + 1) * MAX_RANK] @ module.b[part]
        np.testing.assert_allclose(delta, expected, rtol=1e-4, atol=1e-5)


def zeros():
    return zero_adapter(CONFIG, MAX_RANK)


def doubled():
    return jax.tree.map(lambda leaf: 2 * np.asarray(leaf), tiny_qwen3.adapter())

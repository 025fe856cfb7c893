"""Grouped expert products equal a dense computation, which applies every expert to every token."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx_server.model.experts import lay_out_tiles, mix_experts, route, tile_size
from skyrl_tx_server.model.lora.lora_math import LoraWeights, lora_indices
from skyrl_tx_server.model.model_config import Experts

HIDDEN, WIDTH, COUNT, RANK = 8, 6, 5, 2
EXPERTS = Experts(count=COUNT, per_token=2, normalized=True)


def weights(seed: int = 0):
    random = np.random.default_rng(seed)
    shapes = (COUNT, HIDDEN), (COUNT, 2 * WIDTH, HIDDEN), (COUNT, HIDDEN, WIDTH)
    router, gate_up, down = ((0.5 * random.normal(size=shape)).astype(np.float32) for shape in shapes)
    return jnp.asarray(router), gate_up, down


def factors(seed: int = 1) -> tuple[LoraWeights, LoraWeights]:
    random = np.random.default_rng(seed)

    def module(inputs: int, outputs: tuple[int, ...]) -> LoraWeights:
        return LoraWeights(
            a=(0.5 * random.normal(size=(COUNT, inputs, len(outputs) * RANK))).astype(np.float32),
            b=tuple(random.normal(size=(COUNT, RANK, width)).astype(np.float32) for width in outputs),
            scale=np.asarray(0.5, np.float32),
        )

    return module(HIDDEN, (WIDTH, WIDTH)), module(WIDTH, (HIDDEN,))


def mixture(x, router: jax.Array, gate_up, down, modules, *, experts: Experts = EXPERTS) -> jax.Array:
    return mix_experts(experts, x, route(experts, router, x), gate_up, down, modules)


def dense_mixture(
    x: jax.Array, router: jax.Array, gate_up, down, modules: tuple[LoraWeights, LoraWeights]
) -> jax.Array:
    """Apply every expert to every token, and return the weighted sum of the outputs of the chosen experts."""

    def low_rank(x: jax.Array, module: LoraWeights) -> jax.Array:
        inner = jnp.split(jnp.einsum("...ei,eir->...er", x, module.a) * module.scale, len(module.b), axis=-1)
        return jnp.concatenate(
            [jnp.einsum("...er,ero->...eo", part, b) for part, b in zip(inner, module.b, strict=True)],
            axis=-1,
        )

    per_expert = jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], COUNT, HIDDEN))
    gate, up = jnp.split(
        jnp.einsum("...i,eoi->...eo", x, gate_up) + low_rank(per_expert, modules[0]), 2, axis=-1
    )
    inner = jax.nn.silu(gate) * up
    outputs = jnp.einsum("...ef,eof->...eo", inner, down) + low_rank(inner, modules[1])
    scores, chosen = route(EXPERTS, router, x)
    return (jnp.take_along_axis(outputs, chosen[..., None], axis=2) * scores[..., None]).sum(2)


@pytest.mark.parametrize("length", [1, 7, 40])
def test_grouped_products_and_gradients_equal_the_dense_ones(length: int) -> None:
    x = np.random.default_rng(2).normal(size=(3, length, HIDDEN)).astype(np.float32)

    def loss(function):
        return jax.jit(
            jax.value_and_grad(
                lambda x, modules: jnp.sin(function(x, *weights(), modules)).sum(), argnums=(0, 1)
            )
        )

    value, (grad_x, grad_modules) = loss(mixture)(x, factors())
    expected, (expected_x, expected_modules) = loss(dense_mixture)(x, factors())
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grad_x, expected_x, atol=2e-4)
    for leaf, (path, expected_leaf) in zip(
        jax.tree.leaves(grad_modules), jax.tree_util.tree_flatten_with_path(expected_modules)[0], strict=True
    ):
        if "scale" not in str(path):  # the scale is not trained
            np.testing.assert_allclose(leaf, expected_leaf, atol=1e-3)


def test_adapters_in_a_stack_equal_each_adapter_alone() -> None:
    x = np.random.default_rng(2).normal(size=(4, 1, HIDDEN)).astype(np.float32)
    adapters = [factors(seed) for seed in (1, 2, 3)]
    rows = np.array([2, 0, 2, 1], np.int32)
    # The arrays of all LoRA slots have the leading axes [slots, layers], here with one layer.
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves)[:, None], *adapters)
    stacked = tuple(replace(module, indices=lora_indices(rows), layer=np.int32(0)) for module in stacked)
    mixed = jax.jit(lambda x, modules: mixture(x, *weights(), modules))(x, stacked)
    for row, adapter in enumerate(rows):
        alone = dense_mixture(jnp.asarray(x[row : row + 1]), *weights(), adapters[adapter])
        np.testing.assert_allclose(mixed[row : row + 1], alone, atol=1e-4)


def test_every_assignment_is_in_a_tile_of_its_expert() -> None:
    for seed, tile in ((0, 1), (1, 3), (2, 8)):
        # experts below 0 or from COUNT on are on other devices
        local = np.random.default_rng(seed).integers(-2, COUNT + 2, 50)
        layout = lay_out_tiles(jnp.asarray(local), COUNT, tile=tile)
        places, is_local = np.asarray(layout.places), (local >= 0) & (local < COUNT)
        assert len(set(places[is_local])) == is_local.sum()
        assert np.array_equal(np.asarray(layout.groups)[places[is_local] // tile], local[is_local])
        assert places[is_local].max() < int(layout.used) * tile <= len(layout.groups) * tile
        assert (places[~is_local] >= len(layout.groups) * tile).all()


def test_all_tokens_can_choose_the_same_expert() -> None:
    layout = lay_out_tiles(jnp.full(20, 3), COUNT, tile=8)
    assert int(layout.used) == 3 and sorted(np.asarray(layout.places)) == list(range(20))


def test_the_tile_size_grows_with_the_tokens_per_expert() -> None:
    assert [tile_size(assignments, 8) for assignments in (1, 64, 256, 1 << 20)] == [8, 8, 32, 128]


def test_the_program_size_does_not_depend_on_the_expert_count() -> None:
    def count_operations(count: int) -> int:
        x, experts = jnp.zeros((1, 16, HIDDEN)), Experts(count=count, per_token=2, normalized=False)
        shapes = (
            jnp.zeros((count, HIDDEN)),
            jnp.zeros((count, 2 * WIDTH, HIDDEN)),
            jnp.zeros((count, HIDDEN, WIDTH)),
        )
        return str(
            jax.make_jaxpr(lambda x, *weights: mixture(x, *weights, experts=experts))(x, *shapes, None)
        ).count(" = ")

    assert count_operations(4) == count_operations(64)


def test_a_gradient_of_the_base_models_experts_is_refused() -> None:
    x = jnp.zeros((1, 4, HIDDEN))
    with pytest.raises(AssertionError, match="frozen"):
        jax.grad(lambda gate_up: mixture(x, weights()[0], gate_up, weights()[2], None).sum())(weights()[1])

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, cast

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from skyrl_tx_server.engine.loss_spec import LOSSES
from skyrl_tx_server.engine.operations import AdamSettings, LoraSpec, LossFn, LossSettings, TrainDatum
from skyrl_tx_server.model.config_json import load_model_config
from skyrl_tx_server.model.lora.adapter import Adapter, init_adapter, trainable_mask, zero_adapter
from skyrl_tx_server.model.shapes import BucketShapes, train_shapes
from skyrl_tx_server.model.weights import adapter_from_arrays, adapter_to_arrays, load_params
from skyrl_tx_server.training import train_step
from skyrl_tx_server.training.losses import select_loss
from skyrl_tx_server.training.packing import MicroBatch, pack, unpack
from skyrl_tx_server.training.train_step import (
    adam_from_arrays,
    adam_scalars,
    adam_step,
    adam_to_arrays,
    forward,
    forward_backward,
    init_adam,
)
from tests.fakes.present import present
from tests.server import reference_losses, tiny_qwen3
from tests.server.tiny_qwen3 import CONFIG, FIXTURES, MAX_RANK, SPEC

CLIPS = {"clip_low_threshold": 0.6, "clip_high_threshold": 1.4}
SHAPES = train_shapes(max_context_length=128, tokens_per_batch=256)


def packed(
    data: tuple[TrainDatum, ...], loss_fn: LossFn = LossFn.CROSS_ENTROPY, shapes: BucketShapes = SHAPES
) -> list[MicroBatch]:
    return pack(data, [LOSSES[loss_fn].has_gradient(datum) for datum in data], shapes)


def gradient(
    data: tuple[TrainDatum, ...],
    loss_fn: LossFn = LossFn.CROSS_ENTROPY,
    config: dict[str, float] | None = None,
    *,
    adapter: Adapter | None = None,
    grad_sum: Adapter | None = None,
) -> tuple[Adapter, float, tuple[np.ndarray, ...]]:
    """Return the accumulated gradient, the summed loss and the logprobs per datum of one request.

    Micro-batches run as in the executor.
    """
    adapter = adapter or tiny_qwen3.adapter()
    total: Adapter = grad_sum or jax.device_put(zero_adapter(CONFIG, MAX_RANK))
    if (add_term := LOSSES[loss_fn].add_sequence_term) is not None:
        data = tuple(map(add_term, data, logprobs_of(adapter, data)))
    batches, outputs, loss = packed(data, loss_fn), [], select_loss(loss_fn, LossSettings(**(config or {})))
    for batch in batches:
        total, output = forward_backward(
            adapter, total, tiny_qwen3.params(), batch.arrays, loss, config=CONFIG
        )
        outputs.append(output)
    return (
        total,
        sum(float(output.loss) for output in outputs),
        unpack(batches, [np.asarray(output.logprobs) for output in outputs]),
    )


def logprobs_of(adapter: Adapter, data: tuple[TrainDatum, ...]) -> tuple[np.ndarray, ...]:
    batches = packed(data)
    loss = select_loss(LossFn.CROSS_ENTROPY)
    outputs = [forward(adapter, tiny_qwen3.params(), batch.arrays, loss, config=CONFIG) for batch in batches]
    return unpack(batches, [np.asarray(output.logprobs) for output in outputs])


class CompiledFunction(Protocol):
    """A method of jitted functions that jax does not declare."""

    def _cache_size(self) -> int: ...


def num_programs(function: Callable[..., object]) -> int:
    return cast(CompiledFunction, function)._cache_size()


def assert_close(one: Adapter, other: Adapter, *, relative: float) -> None:
    """Assert that every leaf is equal up to `relative` times its norm."""
    for left, right in zip(
        jax.tree.leaves(jax.device_get(one)), jax.tree.leaves(jax.device_get(other)), strict=True
    ):
        assert np.linalg.norm(left - right) <= relative * max(np.linalg.norm(right), 1e-12)


@pytest.mark.parametrize("model", ["tied", "../families/deepseek_v3"])
def test_lora_gradients_equal_torch_autograds(model: str) -> None:
    directory = FIXTURES / model
    arrays = load_file(directory / "lora_gradients.safetensors")
    config = load_model_config(directory)
    spec = LoraSpec(rank=int(arrays["rank"][0]), alpha=float(arrays["alpha"][0]))
    adapter = adapter_from_arrays(tensors(arrays, "adapter."), config, spec, MAX_RANK)
    data = tuple(
        TrainDatum(tokens=tokens[:-1], target_tokens=tokens[1:], weights=weights)
        for tokens, weights in zip(arrays["tokens"], arrays["weights"], strict=True)
    )
    (batch,) = packed(data)
    grads, output = forward_backward(
        adapter,
        zero_adapter(config, MAX_RANK),
        load_params(directory, config, "float32"),
        batch.arrays,
        select_loss(LossFn.CROSS_ENTROPY),
        config=config,
    )
    assert float(output.loss) == pytest.approx(float(arrays["loss"][0]), rel=1e-5)
    for actual, expected in zip(
        unpack([batch], [np.asarray(output.logprobs)]), arrays["logprobs"], strict=True
    ):
        np.testing.assert_allclose(actual, expected, atol=1e-4)
    ours, expected_grads = adapter_to_arrays(grads, config, spec), tensors(arrays, "gradient.")
    assert ours.keys() == expected_grads.keys()
    for name, expected in expected_grads.items():
        assert np.linalg.norm(ours[name] - expected) <= 1e-4 * np.linalg.norm(expected), name


def tensors(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("loss_fn", "config"),
    [
        *((loss_fn, {}) for loss_fn in LOSSES),
        *((LossFn.PPO, {name: value}) for name, value in CLIPS.items()),
        *((LossFn.CISPO, {name: value}) for name, value in CLIPS.items()),
        (LossFn.DRO, {"beta": 0.4}),
        (LossFn.GSPO, {"clip_low_threshold": 0.99}),
        (LossFn.GSPO, {"clip_high_threshold": 1.01}),
    ],
)
def test_gradients_match_differences_of_the_float64_reference(
    loss_fn: LossFn, config: dict[str, float]
) -> None:
    """The slope of the reference loss along the gradient of a parameter must equal the gradient's norm."""
    adapter = tiny_qwen3.adapter()
    data = tiny_qwen3.data((30, 20), weights=loss_fn is LossFn.CROSS_ENTROPY)
    start = logprobs_of(adapter, data)
    if loss_fn is not LossFn.CROSS_ENTROPY:
        random = np.random.default_rng(5)
        data = tuple(
            replace(
                datum,
                logprobs=(logprobs + random.normal(0, 0.4, logprobs.shape)).astype(np.float32),
                advantages=random.normal(size=logprobs.shape).astype(np.float32),
                sequence_ratio_mask=(random.random(logprobs.shape) > 0.3).astype(np.float32),
            )
            for datum, logprobs in zip(data, start, strict=True)
        )

    def reference(adapter: Adapter) -> float:
        return sum(
            reference_losses.total(
                loss_fn,
                logprobs,
                weights=datum.weights,
                sampler_logprobs=datum.logprobs,
                advantages=datum.advantages,
                sequence_ratio_mask=datum.sequence_ratio_mask,
                stop_gradient_logprobs=frozen,
                options=config,
            )
            for datum, logprobs, frozen in zip(data, logprobs_of(adapter, data), start, strict=True)
        )

    grads, loss, _ = gradient(data, loss_fn, config, adapter=adapter)
    assert loss == pytest.approx(reference(adapter), rel=1e-5)
    checked = 0
    for index, slope in enumerate(np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(grads))):
        norm = float(np.linalg.norm(slope))
        if norm == 0:  # the LoRA scale is not trained
            continue
        step = 2e-3 * min(1.0, 5 / norm)
        above, below = (reference(moved(adapter, index, sign * step / norm * slope)) for sign in (1, -1))
        assert (above - below) / (2 * step) == pytest.approx(norm, rel=1e-3), f"leaf {index}"
        checked += 1
    assert checked == 13  # five LoRA A arrays and eight LoRA B arrays


def moved(adapter: Adapter, index: int, by: np.ndarray) -> Adapter:
    """Return the adapter with `by` added to one leaf."""
    leaves, structure = jax.tree.flatten(jax.device_get(adapter))
    leaves[index] = (leaves[index] + by).astype(np.float32)
    return jax.tree.unflatten(structure, leaves)


def several_targets(lengths: tuple[int, ...], widths: tuple[int | None, ...]) -> tuple[TrainDatum, ...]:
    """Return data with targets of shape [T, widths[i]] in datum i, or [T] if widths[i] is None."""
    random = np.random.default_rng(8)
    data = []
    for datum, width in zip(tiny_qwen3.data(lengths, weights=True), widths, strict=True):
        if width is not None:
            shape = (len(datum.tokens), width)
            targets = random.integers(0, CONFIG.vocab_size, shape).astype(np.int32)
            datum = replace(
                datum, target_tokens=targets, weights=random.normal(size=shape).astype(np.float32)
            )
        data.append(datum)
    return tuple(data)


def test_several_targets_equal_several_datums_of_one_target() -> None:
    data = several_targets((30, 20, 25), (3, None, 5))
    singles = tuple(
        replace(datum, target_tokens=targets, weights=weights)
        for datum in data
        for targets, weights in zip(
            datum.target_tokens.reshape(len(datum.tokens), -1).T,
            present(datum.weights).reshape(len(datum.tokens), -1).T,
            strict=True,
        )
    )
    grads, loss, logprobs = gradient(data)
    expected_grads, expected_loss, expected = gradient(singles)
    assert [entry.shape for entry in logprobs] == [(30, 3), (20,), (25, 5)]
    columns = [column for entry in logprobs for column in entry.reshape(len(entry), -1).T]
    for column, desired in zip(columns, expected, strict=True):
        np.testing.assert_allclose(column, desired, atol=1e-5)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_close(grads, expected_grads, relative=1e-4)
    exact = -sum(
        float(np.sum(present(datum.weights).astype(np.float64) * entry))
        for datum, entry in zip(data, logprobs, strict=True)
    )
    assert loss == pytest.approx(exact, rel=1e-5)
    for actual, expected in zip(logprobs_of(tiny_qwen3.adapter(), data), logprobs, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_several_targets_share_programs_by_powers_of_two() -> None:
    gradient(tiny_qwen3.data((30,)))
    plain = num_programs(forward_backward)
    gradient(several_targets((30,), (5,)))
    with_several = num_programs(forward_backward)
    assert with_several <= plain + 1
    gradient(several_targets((30, 22), (7, 8)))
    gradient(tiny_qwen3.data((40,), weights=True))
    assert num_programs(forward_backward) == with_several


def test_gspo_ratios_do_not_depend_on_the_packing() -> None:
    random = np.random.default_rng(4)
    data = tuple(
        replace(datum, sequence_ratio_mask=(random.random(len(datum.tokens)) > 0.5).astype(np.float32))
        for datum in tiny_qwen3.data((50, 60, 40), advantages=True)
    )
    # the offset from the sampler's logprobs differs by sequence, so that some ratios are within the bounds
    data = tuple(
        replace(datum, logprobs=logprobs - np.float32(offset))
        for datum, logprobs, offset in zip(
            data, logprobs_of(tiny_qwen3.adapter(), data), (0.1, -0.05, 0.4), strict=True
        )
    )
    together, loss, _ = gradient(data, LossFn.GSPO)
    apart, losses = None, 0.0
    for datum in data:
        apart, datum_loss, _ = gradient((datum,), LossFn.GSPO, grad_sum=apart)
        losses += datum_loss
    assert loss == pytest.approx(losses, rel=1e-5)
    assert_close(together, present(apart), relative=1e-4)


def test_splitting_a_batch_leaves_the_gradient_unchanged() -> None:
    data = tiny_qwen3.data((100, 60, 128, 7, 90, 33, 120, 64), advantages=True)
    assert len(packed(data)) > 1
    whole, loss, logprobs = gradient(data, LossFn.IMPORTANCE_SAMPLING)
    first, first_loss, first_logprobs = gradient(data[:4], LossFn.IMPORTANCE_SAMPLING)
    halves, second_loss, second_logprobs = gradient(data[4:], LossFn.IMPORTANCE_SAMPLING, grad_sum=first)
    assert_close(halves, whole, relative=1e-5)
    assert first_loss + second_loss == pytest.approx(loss, rel=1e-5)
    for actual, expected in zip((*first_logprobs, *second_logprobs), logprobs, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_two_calls_add_up_and_one_batch_equals_its_micro_batches() -> None:
    data = tiny_qwen3.data((50, 60), weights=True)
    once, loss, _ = gradient(data)
    twice, second_loss, _ = gradient(data, grad_sum=gradient(data)[0])
    assert second_loss == pytest.approx(loss)
    assert_close(jax.tree.map(lambda leaf: leaf / 2, twice), once, relative=1e-5)
    alone, _, _ = gradient(data[:1])
    both, _, _ = gradient(data[1:], grad_sum=alone)
    assert_close(both, once, relative=1e-5)


def test_a_group_with_one_prompt_trains_as_its_members_alone() -> None:
    """The results are equal within 1e-5, although the prompt of the group is computed only once.

    The last ten tokens of the prompt have different weights in each sequence.
    """
    random = np.random.default_rng(3)
    prompt, common = (
        random.integers(0, CONFIG.vocab_size, 90),
        random.normal(size=80) * (random.random(80) > 0.3),
    )
    data = []
    for length in (20, 1, 35, 20):
        tokens = np.concatenate([prompt, random.integers(0, CONFIG.vocab_size, length + 1)]).astype(np.int32)
        weights = random.normal(size=90 + length) * (random.random(90 + length) > 0.3)
        weights[:80] = common
        data.append(
            TrainDatum(tokens=tokens[:-1], target_tokens=tokens[1:], weights=weights.astype(np.float32))
        )
    data = (*data, data[1], replace(data[0], weights=np.r_[common, np.ones(30)].astype(np.float32)))
    (batch,) = packed(data)
    assert (
        np.count_nonzero(batch.arrays.layout.num_key_blocks) == 2
    )  # 166 tokens, because the prompt is stored once
    together, loss, logprobs = gradient(data)
    apart, losses = None, 0.0
    for datum, member_logprobs in zip(data, logprobs, strict=True):
        apart, datum_loss, alone = gradient((datum,), grad_sum=apart)
        losses += datum_loss
        np.testing.assert_allclose(member_logprobs, alone[0], atol=1e-5)
    assert loss == pytest.approx(losses, rel=1e-5)
    assert_close(together, present(apart), relative=1e-5)


def test_packing_does_not_change_logprobs() -> None:
    data = tiny_qwen3.data((40, 50, 30, 128, 1, 77))
    adapter = tiny_qwen3.adapter()
    together = logprobs_of(adapter, data)
    for datum, logprobs in zip(data, together, strict=True):
        np.testing.assert_allclose(logprobs_of(adapter, (datum,))[0], logprobs, atol=1e-5)


def test_forward_and_forward_backward_return_equal_logprobs() -> None:
    data = tuple(
        replace(datum, weights=np.zeros_like(datum.weights))
        for datum in tiny_qwen3.data((40, 50), weights=True)
    )
    grads, loss, logprobs = gradient(data)
    assert loss == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(jax.device_get(grads)))
    for actual, expected in zip(logprobs_of(tiny_qwen3.adapter(), data), logprobs, strict=True):
        assert np.all(actual < 0)
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_head_chunks_do_not_change_loss_or_gradient(monkeypatch) -> None:
    data = tiny_qwen3.data((100, 60, 128), weights=True)
    whole, loss, logprobs = gradient(data)
    # No other test compiles this shape, so the changed MAX_CHUNK_LOGITS is used.
    (batch,) = packed(data, shapes=train_shapes(max_context_length=128, tokens_per_batch=384))
    monkeypatch.setattr(train_step, "MAX_CHUNK_LOGITS", 25 * CONFIG.vocab_size)
    zeros = jax.device_put(zero_adapter(CONFIG, MAX_RANK))
    chunked, output = forward_backward(
        tiny_qwen3.adapter(),
        zeros,
        tiny_qwen3.params(),
        batch.arrays,
        select_loss(LossFn.CROSS_ENTROPY),
        config=CONFIG,
    )
    assert float(output.loss) == pytest.approx(loss, rel=1e-5)
    assert_close(chunked, whole, relative=1e-5)
    for actual, expected in zip(unpack([batch], [np.asarray(output.logprobs)]), logprobs, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_the_head_never_holds_every_logit_at_once() -> None:
    config = replace(CONFIG, vocab_size=65536)
    params = jax.eval_shape(partial(tiny_qwen3.init_params, config), jax.random.key(0))
    adapter = zero_adapter(config, MAX_RANK)
    (batch,) = packed(
        tiny_qwen3.data((4096,)), shapes=train_shapes(max_context_length=4096, tokens_per_batch=4096)
    )
    lowered = forward_backward.lower(
        adapter, adapter, params, batch.arrays, select_loss(LossFn.PPO), config=config
    )
    all_logits = 4096 * config.vocab_size * 4
    assert present(lowered.compile().memory_analysis()).temp_size_in_bytes < 0.5 * all_logits


def numpy_adam(value, grads_per_step, settings: AdamSettings):
    """Return (values, gradient norms) of Adam with decoupled weight decay and global-norm clipping in float64
    (Loshchilov and Hutter, arXiv:1711.05101)."""
    value = [np.asarray(leaf, np.float64) for leaf in value]
    first, second = ([np.zeros_like(leaf) for leaf in value] for _ in range(2))
    norms = []
    for step, grads in enumerate(grads_per_step, start=1):
        norm = np.sqrt(sum(np.sum(np.square(grad, dtype=np.float64)) for grad in grads))
        norms.append(norm)
        clip = settings.grad_clip_norm
        shrink = clip / norm if 0 < clip < norm else 1.0
        for index, grad in enumerate(grads):
            grad = np.asarray(grad, np.float64) * shrink
            first[index] = settings.beta1 * first[index] + (1 - settings.beta1) * grad
            second[index] = settings.beta2 * second[index] + (1 - settings.beta2) * grad**2
            m, v = first[index] / (1 - settings.beta1**step), second[index] / (1 - settings.beta2**step)
            value[index] = value[index] - settings.learning_rate * (
                m / (np.sqrt(v) + settings.eps) + settings.weight_decay * value[index]
            )
    return value, norms


@pytest.mark.parametrize(
    "settings",
    [
        AdamSettings(learning_rate=1e-2),
        AdamSettings(learning_rate=3e-3, beta1=0.8, beta2=0.999, eps=1e-8, weight_decay=0.1),
        AdamSettings(learning_rate=1e-2, grad_clip_norm=0.5, eps=1e-3),
        AdamSettings(learning_rate=1e-2, grad_clip_norm=1e12),
        AdamSettings(learning_rate=1e-2, beta1=0.0, beta2=0.0, eps=1e-4),
    ],
)
def test_adam_equals_a_float64_reference(settings: AdamSettings) -> None:
    random = np.random.default_rng(0)
    mask = trainable_mask(CONFIG, SPEC, MAX_RANK)
    adapter = tiny_qwen3.adapter()
    rounds = [
        jax.tree.map(
            lambda leaf, allowed: (random.normal(0, 0.1, leaf.shape) * allowed).astype(np.float32),
            adapter,
            mask,
        )
        for _ in range(4)
    ]
    expected, norms = numpy_adam(
        jax.tree.leaves(jax.device_get(adapter)), [jax.tree.leaves(grads) for grads in rounds], settings
    )
    trained = [
        np.broadcast_to(allowed, leaf.shape) > 0
        for allowed, leaf in zip(jax.tree.leaves(mask), expected, strict=True)
    ]

    state = jax.device_put(init_adam(CONFIG, MAX_RANK))
    for grads, norm in zip(rounds, norms, strict=True):
        adapter, state, report = adam_step(
            adapter, jax.device_put(grads), state, mask, adam_scalars(settings)
        )
        assert report.tolist() == [pytest.approx(norm, rel=1e-5), 1.0]
    assert int(state.step) == 4
    for leaf, desired, where in zip(jax.tree.leaves(jax.device_get(adapter)), expected, trained, strict=True):
        np.testing.assert_allclose(leaf[where], desired[where], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("untrained", ["train_attn", "train_mlp", "train_unembed"])
def test_untrained_parts_and_rank_padding_never_change(untrained: str) -> None:
    spec = replace(SPEC, **{untrained: False})
    initial_adapter = init_adapter(CONFIG, spec, MAX_RANK)
    mask = trainable_mask(CONFIG, spec, MAX_RANK)
    adapter, state = jax.device_put(initial_adapter), jax.device_put(init_adam(CONFIG, MAX_RANK))
    for _ in range(3):
        grad_sum, _, _ = gradient(tiny_qwen3.data((60,), weights=True), adapter=adapter)
        settings = adam_scalars(AdamSettings(learning_rate=0.1, weight_decay=0.1, eps=0.0))
        adapter, state, _ = adam_step(adapter, grad_sum, state, mask, settings)
    for leaf, start, allowed in zip(
        *(jax.tree.leaves(jax.device_get(tree)) for tree in (adapter, initial_adapter, mask)), strict=True
    ):
        where = np.broadcast_to(allowed, leaf.shape) > 0
        assert np.array_equal(leaf[~where], start[~where])
        assert np.all(leaf[where] != start[where])


@pytest.mark.seed_behaviour(89)
def test_a_float32_adapter_over_bfloat16_keeps_tiny_updates() -> None:
    data = tiny_qwen3.data((100,), weights=True)
    (batch,) = packed(data)
    params = tiny_qwen3.params("bfloat16")
    adapter = tiny_qwen3.adapter()
    start = jax.device_get(adapter)
    grad_sum, output = forward_backward(
        adapter,
        zero_adapter(CONFIG, MAX_RANK),
        params,
        batch.arrays,
        select_loss(LossFn.CROSS_ENTROPY),
        config=CONFIG,
    )
    assert output.logprobs.dtype == np.float32
    mask = trainable_mask(CONFIG, SPEC, MAX_RANK)
    settings = adam_scalars(AdamSettings(learning_rate=1e-6))
    moved, _, _ = adam_step(adapter, grad_sum, init_adam(CONFIG, MAX_RANK), mask, settings)
    for leaf, before, allowed in zip(
        *(jax.tree.leaves(jax.device_get(tree)) for tree in (moved, start, mask)), strict=True
    ):
        assert leaf.dtype == np.float32
        where = np.broadcast_to(allowed, leaf.shape) > 0
        assert np.mean(leaf[where] != before[where]) > 0.99 if where.any() else True


def test_optimizer_state_is_unchanged_after_save_and_load() -> None:
    mask, scalars = trainable_mask(CONFIG, SPEC, MAX_RANK), adam_scalars(AdamSettings(learning_rate=1e-2))
    grads, _, _ = gradient(tiny_qwen3.data((60,), weights=True))
    adapter, state, _ = adam_step(
        tiny_qwen3.adapter(), grads, jax.device_put(init_adam(CONFIG, MAX_RANK)), mask, scalars
    )
    arrays = adapter_to_arrays(adapter, CONFIG, SPEC) | adam_to_arrays(state, CONFIG, SPEC)
    restored = adam_from_arrays(arrays, CONFIG, SPEC, MAX_RANK)
    copy = adapter_from_arrays(arrays, CONFIG, SPEC, MAX_RANK)
    unbroken, _, _ = adam_step(
        adapter, gradient(tiny_qwen3.data((40,)), adapter=adapter)[0], state, mask, scalars
    )
    resumed, _, _ = adam_step(
        jax.device_put(copy),
        gradient(tiny_qwen3.data((40,)), adapter=copy)[0],
        jax.device_put(restored),
        mask,
        scalars,
    )
    for resumed_leaf, unbroken_leaf in zip(
        jax.tree.leaves(jax.device_get(resumed)), jax.tree.leaves(jax.device_get(unbroken)), strict=True
    ):
        np.testing.assert_array_equal(resumed_leaf, unbroken_leaf)


def test_losses_adapters_and_optimizer_settings_share_programs() -> None:
    batches = [
        packed(tiny_qwen3.data(lengths, advantages=True))[0] for lengths in ((50, 60), (128,), (5, 5, 5))
    ]
    grad_sum = jax.device_put(zero_adapter(CONFIG, MAX_RANK))
    programs = (forward_backward, forward, adam_step)
    after_first: list[int] = []
    for spec, loss_fn, batch in zip(
        (SPEC, LoraSpec(rank=1), LoraSpec(rank=4)), LossFn, batches, strict=False
    ):
        adapter = jax.device_put(init_adapter(CONFIG, spec, MAX_RANK))
        state, mask = (
            jax.device_put(init_adam(CONFIG, MAX_RANK)),
            jax.device_put(trainable_mask(CONFIG, spec, MAX_RANK)),
        )
        for settings in (AdamSettings(), AdamSettings(weight_decay=0.1, grad_clip_norm=1.0)):
            loss = select_loss(loss_fn)
            grad_sum, _ = forward_backward(
                adapter, grad_sum, tiny_qwen3.params(), batch.arrays, loss, config=CONFIG
            )
            forward(adapter, tiny_qwen3.params(), batch.arrays, loss, config=CONFIG)
            adapter, state, _ = adam_step(adapter, grad_sum, state, mask, adam_scalars(settings))
            after_first = after_first or [num_programs(program) for program in programs]
    assert [num_programs(program) for program in programs] == after_first

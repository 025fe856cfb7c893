from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx_server.engine.operations import LossFn, LossSettings
from skyrl_tx_server.training.losses import LossInputs, select_loss, token_losses, trained_positions
from tests.server import reference_losses, tiny_qwen3

CLIPS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}
CASES = [
    (LossFn.CROSS_ENTROPY, {}),
    (LossFn.IMPORTANCE_SAMPLING, {}),
    (LossFn.PPO, {}),
    (LossFn.PPO, CLIPS),
    (LossFn.CISPO, {}),
    (LossFn.CISPO, CLIPS),
    (LossFn.DRO, {}),
    (LossFn.DRO, {"beta": 0.3}),
]
GSPO_CASES = [
    ({}, 0.0),
    ({}, 0.5),  # above the upper bound: clipped where the advantage is positive
    ({}, -0.5),
    ({"clip_low_threshold": 0.5}, -0.5),
    ({"clip_high_threshold": 2.0}, 0.5),
]


def tokens(count: int = 200) -> tuple[np.ndarray, LossInputs]:
    """Logprobs around the sampler's, so that ratios fall below, between and above the clip bounds."""
    random = np.random.default_rng(1)
    sampler = -random.uniform(0.1, 5, count).astype(np.float32)
    inputs = LossInputs(
        weights=random.normal(size=count).astype(np.float32),
        sampler_logprobs=sampler,
        advantages=(random.normal(size=count) * (random.random(count) > 0.2)).astype(np.float32),
        counts=np.ones(count, np.float32),
    )
    return sampler + random.normal(0, 0.5, count).astype(np.float32), inputs


def reference(
    loss_fn: LossFn, config: dict[str, float], logprobs: np.ndarray, inputs: LossInputs, **frozen: np.ndarray
) -> float:
    names = {"clip_low_threshold": "low", "clip_high_threshold": "high", "beta": "beta"}
    settings = {names[name]: value for name, value in config.items()}
    return reference_losses.total(
        loss_fn,
        logprobs,
        weights=inputs.weights,
        sampler_logprobs=inputs.sampler_logprobs,
        advantages=inputs.advantages,
        **settings,
        **frozen,
    )


@jax.jit
def loss_and_slope(selection, logprobs, inputs):
    return jax.value_and_grad(lambda lp: token_losses(selection, lp, inputs).sum())(logprobs)


@pytest.mark.parametrize(("loss_fn", "config"), CASES)
def test_the_sum_and_its_slope_match_the_float64_reference(loss_fn: LossFn, config: dict[str, float]) -> None:
    logprobs, inputs = tokens()
    loss, slope = loss_and_slope(select_loss(loss_fn, LossSettings(**config)), logprobs, inputs)
    assert float(loss) == pytest.approx(reference(loss_fn, config, logprobs, inputs), rel=1e-5)
    exact, step = logprobs.astype(np.float64), 1e-6
    for index in range(0, 200, 7):
        nudge = np.zeros(200)
        nudge[index] = step
        above, below = (
            reference(loss_fn, config, exact + sign * nudge, inputs, frozen_logprobs=exact)
            for sign in (1, -1)
        )
        assert float(slope[index]) == pytest.approx((above - below) / (2 * step), abs=1e-4)


@pytest.mark.parametrize(("config", "offset"), GSPO_CASES)
def test_gspo_weighs_a_whole_sequence_by_one_ratio(config: dict[str, float], offset: float) -> None:
    logprobs, inputs = tokens()
    random = np.random.default_rng(2)
    mask = (random.random(200) > 0.3).astype(np.float32)
    logprobs = (logprobs + offset).astype(np.float32)
    ratio = reference_losses.sequence_log_ratio(logprobs, inputs.sampler_logprobs, mask)
    loss, slope = loss_and_slope(
        select_loss(LossFn.GSPO, LossSettings(**config)),
        logprobs,
        replace(inputs, sampler_logprobs=np.full(200, ratio, np.float32)),
    )
    settings = {
        name.removeprefix("clip_").removesuffix("_threshold"): value for name, value in config.items()
    }

    def exact(values: np.ndarray) -> float:
        return reference_losses.total(
            "gspo",
            values,
            sampler_logprobs=inputs.sampler_logprobs,
            advantages=inputs.advantages,
            sequence_ratio_mask=mask,
            frozen_logprobs=logprobs,
            **settings,
        )

    assert float(loss) == pytest.approx(exact(logprobs), rel=1e-5)
    for index in range(0, 200, 7):
        nudge = np.zeros(200)
        nudge[index] = 1e-6
        assert float(slope[index]) == pytest.approx(
            (exact(logprobs + nudge) - exact(logprobs - nudge)) / 2e-6, abs=1e-4
        )


def test_several_targets_per_position_are_that_many_tokens() -> None:
    logprobs, inputs = tokens()
    matrix = replace(
        inputs,
        weights=inputs.weights.reshape(50, 4),
        sampler_logprobs=np.zeros((50, 1), np.float32),
        advantages=np.zeros((50, 1), np.float32),
        counts=np.ones((50, 1), np.float32),
    )
    selection = select_loss(LossFn.CROSS_ENTROPY)
    loss, slope = loss_and_slope(selection, logprobs.reshape(50, 4), matrix)
    flat_loss, flat_slope = loss_and_slope(selection, logprobs, inputs)
    assert float(loss) == pytest.approx(float(flat_loss), rel=1e-6)
    np.testing.assert_array_equal(slope.reshape(-1), flat_slope)


def test_every_loss_runs_in_one_program() -> None:
    run = jax.jit(lambda selection, logprobs, inputs: token_losses(selection, logprobs, inputs))
    logprobs, inputs = tokens()
    for loss_fn, config in [*CASES, (LossFn.GSPO, {})]:
        run(select_loss(loss_fn, LossSettings(**config)), logprobs, inputs)
    assert run._cache_size() == 1


@pytest.mark.parametrize("loss_fn", list(LossFn))
def test_padding_and_overflowing_ratios_stay_finite(loss_fn: LossFn) -> None:
    _, inputs = tokens(4)
    huge = 200 if loss_fn is LossFn.GSPO else -200  # a log-ratio, or what the sampler is to have said
    inputs = replace(
        inputs,
        sampler_logprobs=np.array([huge, huge, 0, 0], np.float32),
        advantages=np.array([0, -1, 1, 1], np.float32),
        counts=np.array([1, 1, 1, 0], np.float32),
    )
    loss, slope = loss_and_slope(select_loss(loss_fn), jnp.array([-1.0, -1.0, -500.0, -1.0]), inputs)
    assert np.isfinite(loss)
    assert np.all(np.isfinite(slope))
    assert slope[3] == 0


def test_default_settings_are_the_documented_ones() -> None:
    selection = select_loss(LossFn.PPO)
    assert (float(selection.clip_low), float(selection.clip_high)) == pytest.approx((0.8, 1.2))
    assert float(select_loss(LossFn.DRO).beta) == pytest.approx(0.05)


@pytest.mark.parametrize("loss_fn", list(LossFn))
def test_what_trains_is_what_has_a_gradient(loss_fn: LossFn) -> None:
    (datum,) = tiny_qwen3.data((4,))
    weights, advantages = (
        np.array([[0, 0], [0, 1], [2, 0], [0, 0]], np.float32),
        np.array([0, 1, -1, 0], np.float32),
    )
    if loss_fn is LossFn.CROSS_ENTROPY:
        assert trained_positions(datum, loss_fn).all()
        datum = replace(datum, target_tokens=np.zeros((4, 2), np.int32), weights=weights)
    else:
        datum = replace(datum, logprobs=np.zeros(4, np.float32), advantages=advantages)
    assert trained_positions(datum, loss_fn).tolist() == [
        loss_fn is LossFn.DRO,
        True,
        True,
        loss_fn is LossFn.DRO,
    ]

"""All losses match the float64 reference, and one compiled program computes all of them."""

from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx_server.engine.loss_spec import LOSSES, LossFn, LossSettings, mean_log_ratio
from skyrl_tx_server.training.losses import (
    LOSS_FUNCTIONS,
    LossInputs,
    LossSelection,
    select_loss,
    token_losses,
)
from tests.server import reference_losses, tiny_qwen3


def defaults(loss_fn: LossFn) -> dict[str, float]:
    """Return the options of a loss with their default values."""
    return {name: asdict(LossSettings())[name] for name in LOSSES[loss_fn].options}


CLIPS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}
TOKEN_LOSSES = [loss_fn for loss_fn, spec in LOSSES.items() if spec.add_sequence_term is None]
# (loss, options)
CASES: list[tuple[LossFn, dict[str, float]]] = [
    *((loss_fn, {}) for loss_fn in TOKEN_LOSSES),
    *(
        (loss_fn, {name: 1.5 * default})
        for loss_fn in TOKEN_LOSSES
        for name, default in defaults(loss_fn).items()
    ),
    *((loss_fn, CLIPS) for loss_fn in TOKEN_LOSSES if CLIPS.keys() <= LOSSES[loss_fn].options.keys()),
]
# (options, offset of the logprobs)
GSPO_CASES = [
    ({}, 0.0),
    ({}, 0.5),  # above the upper bound: clipped where the advantage is positive
    ({}, -0.5),
    ({"clip_low_threshold": 0.5}, -0.5),
    ({"clip_high_threshold": 2.0}, 0.5),
]


def logprobs_and_inputs(count: int = 200) -> tuple[np.ndarray, LossInputs]:
    """Return logprobs near those of the sampler, so that ratios are below, between and above the clip
    bounds."""
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
    loss_fn: LossFn,
    config: dict[str, float],
    logprobs: np.ndarray,
    inputs: LossInputs,
    stop_gradient_logprobs: np.ndarray | None = None,
) -> float:
    return reference_losses.total(
        loss_fn,
        logprobs,
        weights=inputs.weights,
        sampler_logprobs=inputs.sampler_logprobs,
        advantages=inputs.advantages,
        options=config,
        stop_gradient_logprobs=stop_gradient_logprobs,
    )


@jax.jit
def loss_and_gradient(selection, logprobs, inputs):
    return jax.value_and_grad(lambda lp: token_losses(selection, lp, inputs).sum())(logprobs)


@pytest.mark.parametrize(("loss_fn", "config"), CASES)
@pytest.mark.seed_behaviour(121)
def test_loss_and_gradient_match_the_float64_reference(loss_fn: LossFn, config: dict[str, float]) -> None:
    logprobs, inputs = logprobs_and_inputs()
    loss, gradient = loss_and_gradient(select_loss(loss_fn, LossSettings(**config)), logprobs, inputs)
    assert float(loss) == pytest.approx(reference(loss_fn, config, logprobs, inputs), rel=1e-5)
    exact, step = logprobs.astype(np.float64), 1e-6
    for index in range(0, 200, 7):
        shift = np.zeros(200)
        shift[index] = step
        above, below = (
            reference(loss_fn, config, exact + sign * shift, inputs, stop_gradient_logprobs=exact)
            for sign in (1, -1)
        )
        assert float(gradient[index]) == pytest.approx((above - below) / (2 * step), abs=1e-4)


@pytest.mark.parametrize(("config", "offset"), GSPO_CASES)
def test_gspo_weighs_a_whole_sequence_by_one_ratio(config: dict[str, float], offset: float) -> None:
    logprobs, inputs = logprobs_and_inputs()
    random = np.random.default_rng(2)
    mask = (random.random(200) > 0.3).astype(np.float32)
    logprobs = (logprobs + offset).astype(np.float32)
    ratio = reference_losses.sequence_log_ratio(logprobs, inputs.sampler_logprobs, mask)
    loss, gradient = loss_and_gradient(
        select_loss(LossFn.GSPO, LossSettings(**config)),
        logprobs,
        replace(inputs, sampler_logprobs=np.full(200, ratio, np.float32)),
    )

    def exact(values: np.ndarray) -> float:
        return reference_losses.total(
            LossFn.GSPO,
            values,
            sampler_logprobs=inputs.sampler_logprobs,
            advantages=inputs.advantages,
            sequence_ratio_mask=mask,
            stop_gradient_logprobs=logprobs,
            options=config,
        )

    assert float(loss) == pytest.approx(exact(logprobs), rel=1e-5)
    for index in range(0, 200, 7):
        shift = np.zeros(200)
        shift[index] = 1e-6
        assert float(gradient[index]) == pytest.approx(
            (exact(logprobs + shift) - exact(logprobs - shift)) / 2e-6, abs=1e-4
        )


def test_the_sequence_term_of_gspo_is_the_mean_over_the_mask() -> None:
    (datum,) = tiny_qwen3.data((3,), advantages=True)
    sampler, logprobs = np.array([-1, -2, -3], np.float32), np.array([9, -1, -1], np.float32)
    for mask, mean in (([0, 1, 1], 1.5), ([0, 0, 0], 0)):
        masked = replace(datum, logprobs=sampler, sequence_ratio_mask=np.array(mask, np.float32))
        term = mean_log_ratio(masked, logprobs).logprobs
        assert term is not None and term.tolist() == [mean] * 3


def test_every_loss_has_a_spec_a_function_and_a_reference() -> None:
    assert set(LOSSES) == set(LOSS_FUNCTIONS) == set(reference_losses.REFERENCES) == set(LossFn)


def test_the_options_of_every_loss_are_fields_of_its_settings() -> None:
    assert {name for spec in LOSSES.values() for name in spec.options} == set(asdict(LossSettings()))


def test_several_targets_of_a_position_count_as_separate_tokens() -> None:
    logprobs, inputs = logprobs_and_inputs()
    matrix = replace(
        inputs,
        weights=inputs.weights.reshape(50, 4),
        sampler_logprobs=np.zeros((50, 1), np.float32),
        advantages=np.zeros((50, 1), np.float32),
        counts=np.ones((50, 1), np.float32),
    )
    selection = select_loss(LossFn.CROSS_ENTROPY)
    loss, gradient = loss_and_gradient(selection, logprobs.reshape(50, 4), matrix)
    flat_loss, flat_gradient = loss_and_gradient(selection, logprobs, inputs)
    assert float(loss) == pytest.approx(float(flat_loss), rel=1e-6)
    np.testing.assert_array_equal(gradient.reshape(-1), flat_gradient)


def test_all_losses_share_one_program() -> None:
    traces: list[LossSelection] = []

    @jax.jit
    def run(selection: LossSelection, logprobs: jax.Array, inputs: LossInputs) -> jax.Array:
        traces.append(selection)
        return token_losses(selection, logprobs, inputs)

    logprobs, inputs = logprobs_and_inputs()
    for loss_fn, config in [*CASES, (LossFn.GSPO, {})]:
        run(select_loss(loss_fn, LossSettings(**config)), logprobs, inputs)
    assert len(traces) == 1


@pytest.mark.parametrize("loss_fn", list(LossFn))
def test_a_loss_with_padding_and_overflowing_ratios_is_finite(loss_fn: LossFn) -> None:
    _, inputs = logprobs_and_inputs(4)
    # For GSPO, `sampler_logprobs` contains the log-ratio of the sequence.
    huge = 200 if loss_fn is LossFn.GSPO else -200
    inputs = replace(
        inputs,
        sampler_logprobs=np.array([huge, huge, 0, 0], np.float32),
        advantages=np.array([0, -1, 1, 1], np.float32),
        counts=np.array([1, 1, 1, 0], np.float32),
    )
    loss, gradient = loss_and_gradient(select_loss(loss_fn), jnp.array([-1.0, -1.0, -500.0, -1.0]), inputs)
    assert np.isfinite(loss)
    assert np.all(np.isfinite(gradient))
    assert gradient[3] == 0


def test_server_contract_md_lists_the_default_options() -> None:
    page = (Path(__file__).parents[2] / "docs" / "server-contract.md").read_text()
    for name, default in asdict(LossSettings()).items():
        assert f"`{name}` ({default})" in page


@pytest.mark.parametrize("loss_fn", list(LossFn))
def test_only_trained_positions_have_a_gradient(loss_fn: LossFn) -> None:
    (datum,) = tiny_qwen3.data((4,))
    weights, advantages = (
        np.array([[0, 0], [0, 1], [2, 0], [0, 0]], np.float32),
        np.array([0, 1, -1, 0], np.float32),
    )
    if loss_fn is LossFn.CROSS_ENTROPY:
        assert LOSSES[loss_fn].has_gradient(datum).all()
        datum = replace(datum, target_tokens=np.zeros((4, 2), np.int32), weights=weights)
    else:
        datum = replace(datum, logprobs=np.zeros(4, np.float32), advantages=advantages)
    assert LOSSES[loss_fn].has_gradient(datum).tolist() == [
        loss_fn is LossFn.DRO,
        True,
        True,
        loss_fn is LossFn.DRO,
    ]

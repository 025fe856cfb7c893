"""Checks of gradients, of the Adam optimizer, of checkpoints and of the isolation of models."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tinker

from src.evaluate.probe.endpoint_probe import HUGE, OTHER, TEXT, Probe, cross_entropy, expect, near


def check_sums(probe: Probe) -> str:
    one_step = probe.one_step()
    two_calls = probe.change(probe.client(), [1.0, 1.0])
    client = probe.client()
    client.forward_backward([cross_entropy(TEXT)], "cross_entropy").result()
    with_zero = probe.change(client, [0.0])
    expect(
        0.8 <= with_zero / one_step <= 1.2,
        "a second call with weight 0 changed the gradient: the step was "
        f"{with_zero / one_step:.2f} times as large as without this call",
    )
    client = probe.client()
    both = client.forward_backward([cross_entropy(TEXT), cross_entropy(TEXT)], "cross_entropy").result()
    expect(
        len(both.loss_fn_outputs) == 2,
        f"the server returned {len(both.loss_fn_outputs)} outputs for two texts",
    )
    batch = probe.change(client, [0.0])
    for calls, change in (("two calls", two_calls), ("a batch of two", batch)):
        expect(
            1.6 <= change / one_step <= 2.4,
            f"the step after {calls} was {change / one_step:.2f} times as large as after one; gradients must "
            "be summed",
        )
    return (
        f"the step is {two_calls / one_step:.2f} times as large after two calls as after one, and "
        f"{batch / one_step:.2f} times after a batch of two"
    )


def check_is_cleared(probe: Probe) -> str:
    client, one_step = probe.stepped_client()
    no_gradient = probe.change(client, [0.0])
    expect(
        abs(no_gradient) < 0.1 * one_step,
        f"a step without a gradient was {no_gradient / one_step:.2f} times as large as the step before: the "
        "gradient was not cleared",
    )
    return "the gradient is cleared after a step"


def check_learning_rate(probe: Probe) -> str:
    probe.one_step()
    return halved(probe, "half the learning rate", learning_rate=0.5 * probe.rate * HUGE)


def check_eps(probe: Probe) -> str:
    return halved(probe, "twice the epsilon", eps=2 * HUGE)


def halved(probe: Probe, change: str, **adam: float) -> str:
    """Check that `change`, which is described by `adam`, halves a step."""
    one_step = probe.one_step()
    ratio = probe.change(probe.client(), [1.0], **adam) / one_step
    expect(0.4 <= ratio <= 0.6, f"with {change} the step was {ratio:.2f} times as large, not 0.5")
    return f"{change} gives {ratio:.2f} of the step"


def check_beta1(probe: Probe) -> str:
    """After the gradients g and -g, the bias-corrected first moment of Adam is -g with beta1 = 0 and -0.053 g
    with beta1 = 0.9.
    """
    probe.one_step()
    remaining = {}
    for beta1 in (0.0, 0.9):
        client = probe.client()
        first = probe.change(client, [1.0], beta1=beta1)
        remaining[beta1] = 1 + probe.change(client, [-1.0], beta1=beta1) / first
    expect(
        abs(remaining[0.0]) < 0.25,
        f"beta1=0: {remaining[0.0]:.2f} of a step remains after the opposite step, not 0",
    )
    expect(
        0.75 <= remaining[0.9] <= 1.1,
        f"beta1=0.9: {remaining[0.9]:.2f} of a step remains after the opposite step, not 0.95",
    )
    return (
        f"{remaining[0.0]:.2f} of a step (beta1=0) and {remaining[0.9]:.2f} of a step (beta1=0.9) remain "
        "after the opposite step"
    )


def check_beta2(probe: Probe) -> str:
    """After the gradients g and g / 10, without epsilon, the second step is 0.71 times the first with
    beta2 = 0.01, and 0.14 times with beta2 = 0.999.
    """
    ratio = {}
    for beta2 in (0.01, 0.999):
        client = probe.client()
        options = {"learning_rate": 1e-4, "eps": 1e-12, "beta2": beta2}
        first = probe.change(client, [1.0], **options)
        ratio[beta2] = probe.change(client, [0.1], **options) / first
    expect(
        ratio[0.01] > 2.5 * ratio[0.999],
        f"after a gradient g, the step for g / 10 was {ratio[0.01]:.2f} times as large as the step for g "
        f"with beta2=0.01 and {ratio[0.999]:.2f} times with beta2=0.999; expected are 0.71 and 0.14",
    )
    return (
        f"after a gradient g, the step for g / 10 is {ratio[0.01]:.2f} times as large as the step for g "
        f"with beta2=0.01 and {ratio[0.999]:.2f} times with beta2=0.999"
    )


def check_weight_decay(probe: Probe) -> str:
    """A decay that halves both LoRA matrices leaves about a quarter of a step's effect."""
    client, one_step = probe.stepped_client()
    learning_rate = probe.rate * HUGE
    remaining = 1 + probe.change(client, [0.0], weight_decay=0.5 / learning_rate) / one_step
    expect(remaining < 0.7, f"a decay that halves all weights left {remaining:.2f} of the step's effect")
    return f"a decay that halves all weights leaves {remaining:.2f} of the step's effect"


def check_clipping(probe: Probe) -> str:
    one_step = probe.one_step()
    clipped = probe.change(probe.client(), [1.0], grad_clip_norm=1e-4)
    expect(
        abs(clipped) < 0.2 * one_step,
        f"with a gradient clipped to a norm of 1e-4 the step was {clipped / one_step:.2f} times as large as "
        "without clipping",
    )
    loose = probe.change(probe.client(), [1.0], grad_clip_norm=1e6)
    expect(
        0.8 <= loose / one_step <= 1.2,
        "with a clipping norm above the norm of the gradient the step was "
        f"{loose / one_step:.2f} times as large as without clipping, not 1",
    )
    return (
        f"a clipping norm of 1e-4 gives {clipped / one_step:.3f} of the step without clipping, and a norm of "
        f"1e6 gives {loose / one_step:.2f} of it"
    )


def resumed(probe: Probe, load: Callable[[str], tinker.TrainingClient]) -> tuple[float, float, float]:
    """Take a step with momentum, save a checkpoint, load it, and take the opposite step with both models.

    Return the change of the original model by the opposite step, the change of the loaded model by the
    opposite step, and the largest difference between the logprobs of both models before the opposite step.
    """
    options = {"beta1": 0.9}
    probe.one_step()
    client = probe.client()
    probe.step(client, [1.0], **options)
    path = client.save_state("probe", overwrite=True).result().path
    loaded = load(path)
    gap = float(np.abs(probe.logprobs(client) - probe.logprobs(loaded)).max())
    return probe.change(client, [-1.0], **options), probe.change(loaded, [-1.0], **options), gap


def check_load_with_optimizer(probe: Probe) -> str:
    load = probe.service.create_training_client_from_state_with_optimizer
    kept, restored, gap = resumed(probe, lambda path: load(path).result())
    expect(gap <= 1e-5, f"logprobs differ by {gap:.2g} after loading")
    expect(
        near(restored, kept, 0.05 * abs(kept) + 1e-5),
        f"the change by the next step was {restored:.4f} after loading and {kept:.4f} without loading: the "
        "optimizer state is missing",
    )
    return f"the change by the next step is {restored:.4f} after loading and {kept:.4f} without loading"


def check_load_without_optimizer(probe: Probe) -> str:
    load = probe.service.create_training_client_from_state
    with_old_moments, with_new_moments, gap = resumed(probe, lambda path: load(path).result())
    expect(gap <= 1e-5, f"logprobs differ by {gap:.2g} after loading")
    expect(
        abs(with_new_moments) > 3 * abs(with_old_moments),
        f"the change by the next step was {with_new_moments:.4f} after loading the weights and "
        f"{with_old_moments:.4f} without loading: the moments were loaded too",
    )
    return (
        f"the change by the next step is {with_new_moments:.4f} after loading the weights and "
        f"{with_old_moments:.4f} without loading"
    )


def check_separate_models(probe: Probe) -> str:
    probe.one_step()
    client, other_client = probe.client(seed=1), probe.client(seed=2)
    probe.step(other_client, [1.0])
    before = probe.logprobs(other_client)
    probe.step(client, [1.0] * 4)
    client.forward_backward([cross_entropy(OTHER)], "cross_entropy").result()
    gap = float(np.abs(probe.logprobs(other_client) - before).max())
    expect(gap <= 1e-6, f"training one model changed the logprobs of another by {gap:.2g}")
    return "training one model does not change another"

"""Checks of the loss functions: their values, their settings, and the rejection of unknown losses and
settings.
"""

from __future__ import annotations

import numpy as np
import tinker

from src.evaluate.probe.endpoint_probe import (
    TEXT,
    Defect,
    Probe,
    cross_entropy,
    datum,
    expect,
    logprobs_of,
    near,
)


def policy_loss(
    name: str, config: dict[str, float], logprobs: np.ndarray, sampled: np.ndarray, advantages: np.ndarray
) -> float:
    """Return the value of a Tinker loss, summed over tokens (tinker-docs.thinkingmachines.ai/losses)."""
    ratio = np.exp(logprobs - sampled)
    clipped = np.clip(ratio, config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))
    match name:
        case "importance_sampling":
            return float(-(ratio * advantages).sum())
        case "ppo":
            return float(-np.minimum(ratio * advantages, clipped * advantages).sum())
        case _:
            return float(-(clipped * logprobs * advantages).sum())


def loss_of(probe: Probe, name: str, config: dict[str, float] | None) -> tuple[float, float]:
    """Return (the loss that the server reports, the expected loss).

    The importance ratios of the tokens lie on both sides of every clip threshold, so clipping is checked.
    """
    client = probe.client()
    logprobs = probe.logprobs(client)
    sampled = logprobs + np.resize([-0.5, 0.3, 0.05, -0.1], len(logprobs))
    advantages = np.resize([1.0, -0.7, 0.4], len(logprobs))
    data = datum(TEXT, logprobs=sampled.tolist(), advantages=advantages.tolist())
    output = client.forward_backward([data], name, config).result()  # type: ignore[arg-type]
    reported = output.metrics.get("loss:sum", float("nan"))
    rounded = np.asarray(sampled, np.float32).astype(np.float64)
    return reported, policy_loss(name, config or {}, logprobs_of(output), rounded, advantages)


def expect_loss(reported: float, expected: float, *, label: str = "") -> str:
    """Return the observation. Raises Defect, with `label` before the observation, if the losses differ."""
    expect(
        near(reported, expected, 1e-3 * max(1.0, abs(expected))),
        f"{label}loss:sum is {reported:.5g}, but the formula of the loss gives {expected:.5g}",
    )
    return f"loss:sum {reported:.5g}"


def check_loss(probe: Probe, *, name: str) -> str:
    return expect_loss(*loss_of(probe, name, None))


def check_cross_entropy(probe: Probe) -> str:
    client = probe.client()
    output = client.forward_backward([cross_entropy(TEXT, 0.5)], "cross_entropy").result()
    expected = -0.5 * float(logprobs_of(output).sum())
    return expect_loss(output.metrics.get("loss:sum", float("nan")), expected)


def check_loss_settings(probe: Probe) -> str:
    for name in ("ppo", "cispo"):
        config = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.5}
        expect_loss(*loss_of(probe, name, config), label=f"{name} with {config}: ")
    return "ppo and cispo apply the clip thresholds"


def check_unknown_is_refused(probe: Probe) -> str:
    data = datum(TEXT, logprobs=[-1.0] * (len(TEXT) - 1), advantages=[1.0] * (len(TEXT) - 1))
    for label, call in (
        ("the loss no_such_loss", lambda client: client.forward_backward([data], "no_such_loss")),
        (
            "the setting no_such_setting of ppo",
            lambda client: client.forward_backward([data], "ppo", {"no_such_setting": 1.0}),
        ),
    ):
        client = probe.client()
        try:
            call(client).result()
        except (tinker.APIConnectionError, tinker.InternalServerError):
            raise  # the endpoint failed and has not rejected the request
        except Exception:  # any rejection is correct, including one by the SDK
            continue
        raise Defect(f"{label} was accepted")
    return "an unknown loss and an unknown setting are rejected"

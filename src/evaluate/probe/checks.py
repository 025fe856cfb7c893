"""The checks of `python -m src.evaluate.probe` by name.

A check returns what it observed, or raises `Defect`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from src.evaluate.probe import loss_checks, optimizer_checks, sampling_checks
from src.evaluate.probe.endpoint_probe import Probe

# Properties that every run requires.
REQUIRED: dict[str, Callable[[Probe], str]] = {
    "sums gradients": optimizer_checks.check_sums,
    "clears gradients": optimizer_checks.check_is_cleared,
    "learning rate": optimizer_checks.check_learning_rate,
    "beta1": optimizer_checks.check_beta1,
    "beta2": optimizer_checks.check_beta2,
    "eps": optimizer_checks.check_eps,
    "loss cross_entropy": loss_checks.check_cross_entropy,
    "logprobs agree": sampling_checks.check_agreement,
    "samplers are fresh": sampling_checks.check_freshness,
    "seeds": sampling_checks.check_seed,
    "stop tokens": sampling_checks.check_stops,
    "context limit": sampling_checks.check_context,
    "loads with optimizer": optimizer_checks.check_load_with_optimizer,
    "models are separate": optimizer_checks.check_separate_models,
    "refuses the unknown": loss_checks.check_unknown_is_refused,
}
# Properties that only runs with certain options require, and top_k, which no run requires.
OPTIONAL: dict[str, Callable[[Probe], str]] = {
    "loss importance_sampling": partial(loss_checks.check_loss, name="importance_sampling"),
    "loss ppo": partial(loss_checks.check_loss, name="ppo"),
    "loss cispo": partial(loss_checks.check_loss, name="cispo"),
    "loss settings": loss_checks.check_loss_settings,
    "weight decay": optimizer_checks.check_weight_decay,
    "gradient clipping": optimizer_checks.check_clipping,
    "temperature": sampling_checks.check_temperature,
    "top_k": sampling_checks.check_top_k,
    "loads without optimizer": optimizer_checks.check_load_without_optimizer,
}

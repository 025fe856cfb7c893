"""The checks of `python -m src.evaluate.probe` by name.

A check returns what it observed, or raises `Defect`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from src.evaluate.probe.endpoint_probe import Probe
from src.evaluate.probe.loss_checks import (
    check_cross_entropy,
    check_loss,
    check_loss_settings,
    check_unknown_is_refused,
)
from src.evaluate.probe.optimizer_checks import (
    check_beta1,
    check_beta2,
    check_clipping,
    check_eps,
    check_is_cleared,
    check_learning_rate,
    check_load_with_optimizer,
    check_load_without_optimizer,
    check_separate_models,
    check_sums,
    check_weight_decay,
)
from src.evaluate.probe.sampling_checks import (
    check_agreement,
    check_context,
    check_freshness,
    check_seed,
    check_stops,
    check_temperature,
    check_top_k,
)

# Properties that every run requires.
REQUIRED: dict[str, Callable[[Probe], str]] = {
    "sums gradients": check_sums,
    "clears gradients": check_is_cleared,
    "learning rate": check_learning_rate,
    "beta1": check_beta1,
    "beta2": check_beta2,
    "eps": check_eps,
    "loss cross_entropy": check_cross_entropy,
    "logprobs agree": check_agreement,
    "samplers are fresh": check_freshness,
    "seeds": check_seed,
    "stop tokens": check_stops,
    "context limit": check_context,
    "loads with optimizer": check_load_with_optimizer,
    "models are separate": check_separate_models,
    "refuses the unknown": check_unknown_is_refused,
}
# Properties that only runs with certain options require, and top_k, which no run requires.
OPTIONAL: dict[str, Callable[[Probe], str]] = {
    "loss importance_sampling": partial(check_loss, name="importance_sampling"),
    "loss ppo": partial(check_loss, name="ppo"),
    "loss cispo": partial(check_loss, name="cispo"),
    "loss settings": check_loss_settings,
    "weight decay": check_weight_decay,
    "gradient clipping": check_clipping,
    "temperature": check_temperature,
    "top_k": check_top_k,
    "loads without optimizer": check_load_without_optimizer,
}

"""capabilities.json: the results of the checks of an endpoint.

`python -m src.evaluate.probe` writes the file, and a training run with `capabilities=FILE` reads it before it
starts.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from src.config import TrainerConfig
from src.core.errors import ConfigError

CAPABILITIES = "capabilities.json"
NEEDED_BY_EVERY_RUN = "a property that every run needs"


class Finding(BaseModel):
    """The result of one check."""

    name: str
    holds: bool
    is_needed: bool  # whether every run needs this property, and not only runs with certain options
    seen: str  # what the check observed
    seconds: float


class Capabilities(BaseModel):
    """The results of the checks that were run on one endpoint with one model."""

    url: str
    model_name: str
    max_context_length: int | None  # in tokens; None: the endpoint states no limit
    findings: list[Finding]

    @property
    def is_trainable(self) -> bool:
        """Whether the endpoint has all properties that every run needs, as far as they were checked."""
        return all(finding.holds for finding in self.findings if finding.is_needed)

    def failed_check(self, name: str) -> Finding | None:
        """Return the check `name` if it failed; None if it held or was not run."""
        return next(
            (finding for finding in self.findings if finding.name == name and not finding.holds), None
        )


def read(path: str | Path) -> Capabilities:
    """Read capabilities.json. Raises ConfigError if it cannot be read or is not valid."""
    try:
        return Capabilities.model_validate_json(Path(path).expanduser().read_text())
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"capabilities={path}: {reason}; write it with python -m src.evaluate.probe URL output={path}"
        ) from error


def require(capabilities: Capabilities, config: TrainerConfig) -> None:
    """Raise ConfigError if the endpoint failed the check of a property that the run needs, or if the checks
    used a model other than `model_name`.
    """
    if capabilities.model_name != config.model_name:
        raise ConfigError(
            f"capabilities={config.capabilities} is about {capabilities.model_name}, not "
            f"model_name={config.model_name}; run python -m src.evaluate.probe with this model"
        )
    needed_by = {
        f"loss {config.loss_fn}": f"loss_fn={config.loss_fn}",
        "loss settings": f"loss_fn_config={config.loss_fn_config}" if config.loss_fn_config else None,
        "beta1": f"adam_beta1={config.adam_beta1}",
        "beta2": f"adam_beta2={config.adam_beta2}",
        "eps": f"adam_eps={config.adam_eps}",
        "weight decay": f"weight_decay={config.weight_decay}" if config.weight_decay else None,
        "gradient clipping": f"grad_clip_norm={config.grad_clip_norm}" if config.grad_clip_norm else None,
        "temperature": _temperature_option(config),
        "loads without optimizer": None if config.load_optimizer else "load_optimizer=false",
    }
    needed_by |= {
        finding.name: NEEDED_BY_EVERY_RUN
        for finding in capabilities.findings
        if finding.is_needed and finding.name not in needed_by
    }
    for name, option in needed_by.items():
        finding = capabilities.failed_check(name)
        if option is not None and finding is not None:
            reason, remedy = f"does not honour {option}", "change the option, or use another endpoint"
            if option == NEEDED_BY_EVERY_RUN:
                reason, remedy = f"lacks {option}", "use another endpoint"
            raise ConfigError(
                f"{capabilities.url} {reason}: {name}: {finding.seen} ({config.capabilities}); {remedy}"
            )


def _temperature_option(config: TrainerConfig) -> str | None:
    """Return the option that sets a temperature other than 1; None if no option does."""
    if config.temperature != 1:
        return f"temperature={config.temperature}"
    if config.eval_temperature in (None, 1):
        return None
    return f"eval_temperature={config.eval_temperature}"

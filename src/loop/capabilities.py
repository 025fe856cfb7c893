"""capabilities.json:

what an endpoint was seen to honour. Written by `python -m src.probe`, read before a run that depends on it.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from src.config import TrainerConfig
from src.core.errors import ConfigError

CAPABILITIES = "capabilities.json"


class Finding(BaseModel):
    """One check: what it is about, whether it held, and what was seen."""

    name: str
    holds: bool
    is_needed: bool  # by every run; the others only by runs that ask for them
    seen: str
    seconds: float


class Capabilities(BaseModel):
    """What one endpoint does with one model."""

    url: str
    model_name: str
    max_context_length: int | None
    findings: list[Finding]

    @property
    def is_trainable(self) -> bool:
        """Whether all that every run needs holds."""
        return all(finding.holds for finding in self.findings if finding.is_needed)

    def seen_to_fail(self, name: str) -> Finding | None:
        return next(
            (finding for finding in self.findings if finding.name == name and not finding.holds), None
        )


def read(path: str | Path) -> Capabilities:
    """ConfigError for a file that `src.probe` did not write."""
    try:
        return Capabilities.model_validate_json(Path(path).expanduser().read_text())
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"capabilities={path}: {reason}; write it with python -m src.probe URL output={path}"
        ) from error


def require(capabilities: Capabilities, config: TrainerConfig) -> None:
    """ConfigError, naming the option, for what the run asks for and the endpoint was seen not to honour."""
    if capabilities.model_name != config.model_name:
        raise ConfigError(
            f"capabilities={config.capabilities} is about {capabilities.model_name}, not "
            f"model_name={config.model_name}; probe again"
        )
    asked_for = {
        f"loss {config.loss_fn}": f"loss_fn={config.loss_fn}",
        "loss settings": f"loss_fn_config={config.loss_fn_config}" if config.loss_fn_config else None,
        "beta1": f"adam_beta1={config.adam_beta1}",
        "beta2": f"adam_beta2={config.adam_beta2}",
        "eps": f"adam_eps={config.adam_eps}",
        "weight decay": f"weight_decay={config.weight_decay}" if config.weight_decay else None,
        "gradient clipping": f"grad_clip_norm={config.grad_clip_norm}" if config.grad_clip_norm else None,
        "temperature": f"temperature={config.temperature}" if config.temperature != 1 else None,
    }
    asked_for |= {
        finding.name: "this run"
        for finding in capabilities.findings
        if finding.is_needed and finding.name not in asked_for
    }
    for name, option in asked_for.items():
        finding = capabilities.seen_to_fail(name)
        if option is not None and finding is not None:
            raise ConfigError(
                f"{capabilities.url} does not honour {option}: {name}: {finding.seen} ({config.capabilities})"
            )

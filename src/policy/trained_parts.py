"""Check that a loaded checkpoint trains the parts of the model that `AdapterOptions` names."""

from __future__ import annotations

import tinker

from src.core.errors import ConfigError
from src.policy.options import AdapterOptions


async def check_trained_parts(client: tinker.RestClient, path: str, adapter: AdapterOptions) -> None:
    """Raise ConfigError if the checkpoint at `path` does not train the same parts as `adapter`.

    A part that the endpoint does not report is not compared.
    """
    info = await client.get_weights_info_by_tinker_path(path)
    parts = {
        "train_attn": (info.train_attn, adapter.train_attn),
        "train_mlp": (info.train_mlp, adapter.train_mlp),
        "train_unembed": (info.train_unembed, adapter.train_unembed),
    }
    for name, (saved, given) in parts.items():
        if saved is not None and saved != given:
            value = str(saved).lower()
            raise ConfigError(
                f"{path} has {name}={value}, not {str(given).lower()}; set {name}={value}, or start from "
                "another checkpoint"
            )

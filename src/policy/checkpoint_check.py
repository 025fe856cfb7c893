"""Check before a checkpoint is loaded that its base model, rank and trained parts match the options."""

from __future__ import annotations

import tinker

from src.core.errors import ConfigError
from src.policy.options import AdapterOptions


async def check_checkpoint(
    client: tinker.RestClient, path: str, adapter: AdapterOptions, *, model_name: str
) -> None:
    """Raise ConfigError if the base model of the checkpoint at `path` differs from `model_name`, or if its
    rank or its trained parts (attention, MLPs, output head) differ from those in `adapter`.

    A value that the endpoint does not report is not compared. The part of a model's name after ":" is not
    compared, because it is not part of the base model (`NAME:peft:262144`).
    """
    info = await client.get_weights_info_by_tinker_path(path)
    if info.base_model.partition(":")[0] != model_name.partition(":")[0]:
        raise ConfigError(
            f"{path} is a checkpoint of {info.base_model}, not of {model_name}; set "
            f"model_name={info.base_model}, or start from another checkpoint"
        )
    values = {
        "lora_rank": (info.lora_rank, adapter.lora_rank),
        "train_attn": (info.train_attn, adapter.train_attn),
        "train_mlp": (info.train_mlp, adapter.train_mlp),
        "train_unembed": (info.train_unembed, adapter.train_unembed),
    }
    differing = {
        name: (str(saved).lower(), str(given).lower())
        for name, (saved, given) in values.items()
        if saved is not None and saved != given
    }
    if differing:
        parts = [f"{name}={saved}, not {given}" for name, (saved, given) in differing.items()]
        fix = " ".join(f"{name}={saved}" for name, (saved, _) in differing.items())
        raise ConfigError(f"{path} has {', and '.join(parts)}; set {fix}, or start from another checkpoint")

"""Converts flags of SkyRL's tx server and of vLLM, `--name value`, to options of this server, `name=value`.

A flag that has the name of an option sets this option. An argument `name=value` without dashes is treated
like a flag if `name` is in `OPTION_OF_FLAG` or `WITHOUT_EFFECT`. Flags in `WITHOUT_EFFECT` are removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skyrl_tx_server.config.renamed import RENAMED_OPTIONS
from skyrl_tx_server.errors import ConfigError

OPTION_OF_FLAG: Mapping[str, str] = {
    "checkpoints_base": "checkpoints_dir",
    "data_parallel_size": "data_parallel",
    "expert_parallel_size": "expert_parallel",
    "external_inference_lora_base": "sampler_adapters",
    "external_inference_url": "sampler_url",
    "fully_sharded_data_parallel_size": "fsdp_parallel",
    "max_lora_adapters": "max_models",
    "max_model_len": "max_context_length",
    "sample_max_num_sequences": "max_num_seqs",
    "served_model_name": "model_alias",
    "tensor_parallel_size": "tensor_parallel",
}
"""Maps a flag, written with underscores, to the option that it sets."""

WITHOUT_EFFECT: Mapping[str, str] = {
    "gradient_checkpointing": "the server recomputes layers if their activations do not fit into memory",
    "shard_attention_heads": "tensor_parallel always divides the heads",
    "train_micro_batch_size": "sequences are packed into micro-batches of train_tokens_per_batch tokens; set "
    "that option instead",
}
"""Maps a flag, written with underscores, to the reason why it has no effect."""

REFUSED: Mapping[str, str] = {
    "api_key": "set SKYRL_TX_API_KEY, or pass api_key_file=FILE",
    "backend": "this server has one backend; remove the flag",
    "backend_config": "pass each entry as an option, as in tensor_parallel=8",
    "database_url": "the server stores its index in checkpoints_dir; remove the flag",
    "enforce_eager": "programs are always compiled; remove the flag",
    "external_inference_api_key": "set SKYRL_TX_SAMPLER_API_KEY",
    "sampler_api_key": "set SKYRL_TX_SAMPLER_API_KEY",
}
"""Maps a refused flag, written with underscores, to what the user must do instead."""


def as_options(
    argv: Sequence[str], *, names: Sequence[str], bool_names: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return `argv` with `name=value` in place of flags, and a notice for each flag without effect.

    `names` contains the names of all options, `bool_names` the names of the boolean options. A flag that is
    neither in `names` nor in the tables above is returned unchanged. Raises ConfigError for a flag that is
    refused or lacks its value.

    >>> as_options(["--tensor-parallel-size", "8", "port=1"], names=["tensor_parallel"], bool_names=[])
    (['tensor_parallel=8', 'port=1'], [])
    """
    options: list[str] = []
    notices: list[str] = []
    remaining = list(argv)
    while remaining:
        argument = remaining.pop(0)
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--"):
            name = name if name in OPTION_OF_FLAG or name in WITHOUT_EFFECT else ""
        elif name in REFUSED:
            raise ConfigError(f"{flag} is not accepted: {REFUSED[name]}")
        option = OPTION_OF_FLAG.get(name, name)
        if not equals and flag.startswith("--") and remaining and _is_value(remaining[0], names):
            value = remaining.pop(0) if name in WITHOUT_EFFECT or option in names else ""
        if name in WITHOUT_EFFECT:
            notices.append(f"{flag} has no effect: {WITHOUT_EFFECT[name]}")
        elif not name or option not in names:
            options.append(argument)
        elif value or equals:
            options.append(f"{option}={value}")
        elif option in bool_names:
            options.append(f"{option}=true")
        else:
            raise ConfigError(f"{flag} needs a value, as in {option}=VALUE")
    return options, notices


def _is_value(argument: str, names: Sequence[str]) -> bool:
    """Return whether `argument` is the value of the flag before it, not another flag or option."""
    name, equals, _ = argument.partition("=")
    is_option = equals and (name in {*names, *RENAMED_OPTIONS, *OPTION_OF_FLAG, *WITHOUT_EFFECT})
    return not argument.startswith("--") and not is_option

"""Options of the engine: the model, its devices, and the sizes of the caches and batches on the devices."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import chz

from skyrl_tx_server.config.bounds import MAX_DEVICES, MAX_TOKENS, between, positive
from skyrl_tx_server.config.tenant_options import TenantOptions
from skyrl_tx_server.errors import ConfigError

DEFAULT_MAX_MODELS = 4
DEFAULT_MAX_LORAS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """The number of devices along each axis of the mesh. `model/mesh.py` describes what each axis divides."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor * self.expert

    @property
    def batch(self) -> int:
        """The number of parts into which the sequences of a batch are divided."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        return " ".join(f"{axis}_parallel={size}" for axis, size in asdict(self).items() if size > 1)


@chz.chz
class EngineOptions(TenantOptions):
    """The options of the engine and its executor.

    Sizes are in tokens unless the name of the option has another unit.
    The executor requires that `base_model` is a local directory and that `model_alias` is set. `__main__`
    sets both.
    """

    base_model: str = chz.field(
        doc="Hugging Face model directory, GGUF file or hub id, e.g. ./tiny, ./tiny.gguf or Qwen/Qwen3-4B; "
        "smollm2-135m: the file that scripts/setup.sh smollm2 installs"
    )
    model_alias: str | None = chz.field(
        default=None,
        doc="org/name by which clients refer to the model; default: the hub id; for a directory, "
        "local/<its name>; for a GGUF file, local/<its name without .gguf>; for a base_model without a "
        "slash, local/<base_model>",
    )
    checkpoints_dir: str = chz.field(default="./checkpoints", doc="Directory of the tinker:// checkpoints")
    checkpoint_quota_gb: float | None = chz.field(
        default=None,
        metadata=positive(1e9),
        doc="Refuse to save if all checkpoints together would be larger than this, in GiB; default: no "
        "quota. A checkpoint that does not fit into the free space of the disk is always refused",
    )
    compilation_cache_dir: str | None = chz.field(
        default="~/.cache/skyrl_tx_server/xla",
        doc="Directory of JAX's persistent compilation cache; none: compile again at every start",
    )
    warmup: bool | None = chz.field(
        default=None,
        doc="Compile most programs for sampling and training in the background when the server starts, not "
        "at their first use; default: true on a GPU if the server has one process",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = chz.field(
        default="auto",
        doc="Data type of base weights and activations; auto: float32 on CPU, bfloat16 on accelerators",
    )
    max_lora_rank: int = chz.field(
        default=32, metadata=positive(4096), doc="Largest LoRA rank that a client may request"
    )
    max_context_length: int | None = chz.field(
        default=None,
        metadata=positive(MAX_TOKENS),
        doc="Maximum number of tokens of a prompt and its completion together; default: the model's own "
        "limit or 32768, whichever is smaller, and less on a GPU with little memory",
    )
    yarn: bool = chz.field(
        default=False,
        doc="Extend the context with YaRN, as Qwen documents, if max_context_length is above the model's own "
        "limit; YaRN may lower the quality on short texts",
    )
    max_num_seqs: int | None = chz.field(
        default=None,
        metadata=positive(1_000_000),
        doc="Slots of the decode batch: the number of sequences that are decoded together; default: 32 on a "
        "CPU, and on a GPU if no kernel can read the KV pages of the model in place. For other models on a "
        "GPU: 256 if cache_tokens is set; if it is not set, about one for each 2,048 tokens of the KV cache, "
        "from 32 to 256",
    )
    cache_tokens: int | None = chz.field(
        default=None,
        metadata=positive(MAX_TOKENS),
        doc="Size of the KV cache in tokens, for running sequences and the prefix cache; default: "
        "max_context_length tokens for each of max_num_seqs sequences, or fewer if these do not fit into "
        "memory. If max_num_seqs is not set, this size is computed for 256 sequences on a GPU whose kernels "
        "read the KV pages in place, otherwise for 32. If no KV page is free, sequences that the scheduler "
        "has paused lose their pages first. If no paused sequence has pages, the youngest sequence of the "
        "tenant with the most pages is preempted",
    )
    gpu_memory_utilization: float = chz.field(
        default=0.92,
        metadata=between(0.05, 0.99),
        doc="Share of the memory of each GPU that the server allocates. The environment variable "
        "XLA_CLIENT_MEM_FRACTION takes precedence",
    )
    decode_steps_per_dispatch: int = chz.field(
        default=16,
        metadata=positive(64),
        doc="Decode steps that one program call (a decode dispatch) computes, at most 64 (the size of a KV "
        "page); each step samples one token for every sequence of the decode batch",
    )
    train_share: float | None = chz.field(
        default=None,
        metadata=between(0.05, 0.95),
        doc="Share of the time that training gets while there are sequences to sample; default: one "
        "micro-batch of training and one decode dispatch alternate",
    )
    logprobs_mode: Literal["raw", "processed"] = chz.field(
        default="raw",
        doc="Logprobs of sampled tokens; raw: those of the model's distribution (temperature 1); "
        "processed: those of the distribution after temperature; top-k and top-p never change logprobs",
    )
    train_tokens_per_batch: int = chz.field(
        default=8192,
        metadata=positive(MAX_TOKENS),
        doc="Tokens per training micro-batch; a shared prefix counts once",
    )
    max_models: int | None = chz.field(
        default=None,
        metadata=positive(10_000),
        doc="Training models kept on the device; further models are kept in host memory; default: 4, or "
        "fewer on a small GPU",
    )
    max_loras: int | None = chz.field(
        default=None,
        metadata=positive(10_000),
        doc="LoRA slots: sampler snapshots that are kept on the device; further snapshots are kept in host "
        "memory or on disk; default: 8, or fewer on a small GPU",
    )
    tensor_parallel: int = chz.field(
        default=1,
        metadata=positive(MAX_DEVICES),
        doc="Devices that share each layer: heads, MLP and vocabulary are divided over them",
    )
    fsdp_parallel: int = chz.field(
        default=1,
        metadata=positive(MAX_DEVICES),
        doc="Devices over which the sequences of a batch are divided; each device keeps a part of every "
        "matrix",
    )
    data_parallel: int = chz.field(
        default=1,
        metadata=positive(MAX_DEVICES),
        doc="Devices over which the sequences of a batch are divided; each device keeps all weights",
    )
    expert_parallel: int = chz.field(
        default=1,
        metadata=positive(MAX_DEVICES),
        doc="Devices over which the experts of a mixture-of-experts model are divided; the server uses the "
        "product of the four *_parallel options as its number of devices",
    )

    @chz.validate
    def _check_model_alias(self) -> None:
        alias = self.model_alias
        if alias is None or alias == model_alias(self.base_model, None):
            return
        if alias.count("/") != 1 or ":" in alias or not all(alias.split("/")):
            raise ConfigError(
                f"model_alias={self.model_alias}: must be org/name with one slash and no ':', as in "
                f"Qwen/Qwen3-4B"
            )

    @property
    def alias(self) -> str:
        """The org/name by which clients refer to the model."""
        return model_alias(self.base_model, self.model_alias)

    @property
    def model_dir(self) -> Path:
        """The directory of the model. `base_model` must be a local directory."""
        return Path(self.base_model)

    @property
    def checkpoints_path(self) -> Path:
        return Path(self.checkpoints_dir).expanduser()

    @property
    def checkpoint_quota_bytes(self) -> int | None:
        return None if self.checkpoint_quota_gb is None else int(self.checkpoint_quota_gb * 2**30)

    @property
    def tenant_quota(self) -> TenantOptions | None:
        """The quotas of tenants. None: the server has no tenants."""
        return None if self.api_keys_file is None else self

    @property
    def mesh(self) -> MeshShape:
        return MeshShape(
            data=self.data_parallel,
            fsdp=self.fsdp_parallel,
            tensor=self.tensor_parallel,
            expert=self.expert_parallel,
        )


def model_alias(base_model: str, alias: str | None) -> str:
    """Return the org/name by which clients refer to a model: `alias` if it is not None, otherwise

    - for a GGUF file: local/<name of the file without .gguf>, with `-` in place of `:`
    - for a directory, and for a `base_model` that does not have exactly one slash: local/<last part of the
      path>, with `-` in place of `:`
    - otherwise: `base_model`, which is a hub id
    """
    if alias is not None:
        return alias
    path = Path(base_model).expanduser()
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return f"local/{path.stem.replace(':', '-')}"
    if path.is_dir() or base_model.count("/") != 1:
        return f"local/{path.resolve().name.replace(':', '-')}"
    return base_model

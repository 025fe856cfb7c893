"""The configuration of a model, which `config_json` reads from a Hugging Face directory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from skyrl_tx_server.errors import ConfigError

TRAINING_LENGTHS = {("qwen3", 40_960): 32_768, ("qwen3_moe", 40_960): 32_768}
"""(model_type, max_position_embeddings) -> training length in tokens, for models where this length is not
max_position_embeddings. In the first models of Qwen3, max_position_embeddings is the training length plus
8,192 tokens for the prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """YaRN context extension (arXiv:2309.00071) with Hugging Face's parameter names."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float  # multiplies cos and sin
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale_all_dim: float = 0.0  # latent attention scales scores by yarn_mscale(factor, mscale_all_dim)^2


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """The context extension of Llama 3.1 with Hugging Face's parameter names: low frequencies are divided by
    `factor`, high frequencies are kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    dim: int  # number of dimensions of a head that are rotated
    theta: float
    scaling: YarnScaling | Llama3Scaling | None = None  # None: no context extension


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """The attention settings of a layer, for training, prefill and decoding. The layers of a model may have
    different settings."""

    scale: float  # scores are scale * q . k
    rope: RopeSpec
    sliding_window: int | None = None  # number of visible positions, including the query's; None: no limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The experts of each layer. In a model with experts, `ModelConfig.intermediate_size` is the width of one
    expert."""

    count: int
    per_token: int
    normalized: bool  # whether the weights of the chosen experts are divided by their sum
    groups: ExpertGroups | None = None  # None: the experts with the highest softmax scores are chosen
    shared: int = 0  # number of experts that process every token, computed as one MLP
    dense_layers: int = 0  # number of layers at the start that have one MLP instead of experts
    dense_width: int = 0  # the width of the MLP in these layers


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertGroups:
    """The routing of DeepSeek-V3 (arXiv:2412.19437, 2.1.2). Scores are sigmoids. A load-balancing bias
    affects which experts are chosen, but not the weights of their outputs."""

    count: int
    per_token: int  # number of groups per token, chosen by the sum of their two highest scores plus biases
    scale: float  # multiplies the weights of the chosen experts


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (arXiv:2405.04434): one latent vector per token represents the keys and
    values of all heads.

    The names are those of Hugging Face's DeepseekV3Config, except that `interleaved` is `rope_interleave`
    there.
    """

    q_lora_rank: int | None  # None: queries are projected in one step
    kv_lora_rank: int  # the width of the latent vector
    qk_nope_head_dim: int  # number of dimensions of a query and key that are not rotated
    qk_rope_head_dim: int  # number of rotated dimensions; all heads share the rotated key
    v_head_dim: int
    interleaved: bool  # True: a rotary pair has adjacent dimensions; False: it has dimension i of each half


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The configuration of a model. It is hashable, because it is a static argument of jitted functions."""

    model_type: str = "qwen3"  # the key of its family in `families.table.FAMILIES`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    rope_scaling: YarnScaling | Llama3Scaling | None = None  # None: no context extension
    eos_token_ids: tuple[int, ...] = ()
    # One per layer, None for a layer without a window. The tuple is empty if no layer has a window.
    sliding_windows: tuple[int | None, ...] = ()
    experts: Experts | None = None  # None: dense
    latent: LatentAttention | None = None
    """None: the model has no latent attention. Otherwise all query heads share one KV head, which consists of
    the latent vector and the rotated key."""
    inputs_first: bool = False
    """Whether projections are stored as [inputs, outputs] on the device, and decode steps read LoRA factors
    in this layout, see `weight_layout.py`. Hugging Face stores [outputs, inputs]."""
    mesh: Mesh | None = None  # the devices, see `mesh.py`; None: one device
    weight_stationary: bool = False  # set inside programs on a mesh, see `mesh.weight_stationary`

    @property
    def tensor_shards(self) -> int:
        """The number of devices over which heads, MLPs and the vocabulary are divided."""
        return 1 if self.mesh is None else self.mesh.shape["tensor"]

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Output widths of the fused query, key and value projection."""
        return (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )

    @property
    def projected_width(self) -> int:
        """The total output width of the projections before attention, without `kv_b` of latent attention."""
        latent = self.latent
        if latent is None:
            return sum(self.qkv_widths)
        return (
            (latent.q_lora_rank or 0)
            + self.num_heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
            + self.head_dim
        )

    @property
    def rope_dim(self) -> int:
        """The number of dimensions of a head that are rotated."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    @property
    def rope(self) -> RopeSpec:
        """The rotary embedding of the model, with its context extension."""
        return RopeSpec(dim=self.rope_dim, theta=self.rope_theta, scaling=self.rope_scaling)

    @property
    def context_length(self) -> int:
        """The maximum sequence length in tokens, including the context extension."""
        # Llama's max_position_embeddings includes the extension
        if not isinstance(self.rope_scaling, YarnScaling):
            return self.max_position_embeddings
        extended = int(self.rope_scaling.factor * self.rope_scaling.original_max_position_embeddings)
        return max(self.max_position_embeddings, extended)


def yarn_context(config: ModelConfig, length: int) -> ModelConfig:
    """Return the configuration with the smallest integer YaRN factor that allows `length` tokens. If `config`
    already allows `length` tokens, return it unchanged.

    The factor multiplies the training length: max_position_embeddings, or the length in TRAINING_LENGTHS.
    Qwen's model cards extend 32,768 tokens (Qwen2.5, Qwen3) and 262,144 tokens (Qwen3-Next) in this way by a
    factor of 4. Raises ConfigError if config.json already has a context extension, or if the model has latent
    attention.
    """
    if length <= config.context_length:
        return config
    if config.rope_scaling is not None:
        raise ConfigError(
            f"max_context_length={length} exceeds the {config.context_length} tokens of this model, and its "
            "config.json already has rope_scaling: set a smaller max_context_length"
        )
    if config.latent is not None:  # its scale depends on `mscale_all_dim`, which only config.json can give
        raise ConfigError(f"yarn=true does not support {config.model_type}: set rope_scaling in config.json")
    own_length = config.max_position_embeddings
    original = TRAINING_LENGTHS.get((config.model_type, own_length), own_length)
    factor = float(math.ceil(length / original))
    scaling = YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor({}, factor),
    )
    return replace(config, rope_scaling=scaling)


def attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Return the factor of cos and sin for the YaRN entries of config.json, as Hugging Face computes it."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return yarn_mscale(factor, float(rope["mscale"])) / yarn_mscale(factor, float(rope["mscale_all_dim"]))
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """Return the attention scale of YaRN for a context extension by `factor`. `weight` is `mscale` or
    `mscale_all_dim` of config.json. `attention_factor` uses the weight 1 if one of them is missing or 0."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

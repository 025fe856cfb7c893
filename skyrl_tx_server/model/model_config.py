"""The numbers that describe a model; `config_json` reads them from a Hugging Face directory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from skyrl_tx_server.errors import ConfigError

YARN_ORIGINAL_LENGTH = (
    32_768  # the length Qwen2.5 and Qwen3 were trained on, which their model cards stretch from
)


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """YaRN context extension (arXiv:2309.00071) with Hugging Face's parameter names."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float  # multiplies cos and sin
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale_all_dim: float = (
        0.0  # DeepSeek's: latent attention multiplies its scores by the square of what it makes of `factor`
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's context extension with Hugging Face's parameter names: slow rotations are slowed by
    `factor`, fast ones are kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """A rotary position embedding."""

    dim: int  # numbers of a head that are rotated
    theta: float
    scaling: YarnScaling | Llama3Scaling | None = None  # None: the plain embedding


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts in place of each layer's perceptron; `intermediate_size` is then the width of one
    expert."""

    count: int
    per_token: int
    normalized: bool  # the chosen experts' weights sum to one
    groups: ExpertGroups | None = None  # None: the likeliest of a softmax
    shared: int = 0  # experts that see every token, side by side in one perceptron
    dense_layers: int = 0  # the first layers, which have a perceptron of `dense_width` instead
    dense_width: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertGroups:
    """DeepSeek-V3's choice (arXiv:2412.19437, 2.1.2): scores are sigmoids; a bias that balances the load
    counts in the choice alone."""

    count: int
    per_token: int  # the experts chosen lie in so many groups, those whose two best sum highest
    scale: float  # of the chosen experts' weights


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (arXiv:2405.04434): one latent vector per token holds the keys and values
    of all heads.

    The names are those of Hugging Face's DeepseekV3Config.
    """

    q_lora_rank: int | None  # None: queries are projected in one step
    kv_lora_rank: int  # the width of the latent vector
    qk_nope_head_dim: int  # numbers of a head's query and key that are not rotated
    qk_rope_head_dim: int  # numbers that are rotated; the rotated key is the same for all heads
    v_head_dim: int
    interleaved: bool  # neighbouring numbers are rotated together instead of halves


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One model. Hashable, so that it can be a static argument of a jitted function."""

    model_type: str = "qwen3"  # the key of its family in `families.FAMILIES`
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
    rope_scaling: YarnScaling | Llama3Scaling | None = None  # None: plain rotary embedding
    eos_token_ids: tuple[int, ...] = ()
    sliding_windows: tuple[int | None, ...] = ()  # one per layer, None: no window; empty: no layer has one
    experts: Experts | None = None  # None: dense
    latent: LatentAttention | None = (
        None  # then the one key-value head is the latent vector beside the rotated key
    )
    mesh: Mesh | None = None  # the devices that share it, see `mesh.py`; None: one device
    weight_stationary: bool = False  # on a mesh, within a program: see `mesh.weight_stationary`

    @property
    def tensor_shards(self) -> int:
        """Into how many pieces heads, perceptrons and the vocabulary are cut."""
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
        """How many numbers of a token the projections before attention make."""
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
        """How much of a head is rotated."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    @property
    def rope(self) -> RopeSpec:
        """The rotary embedding that config.json describes."""
        return RopeSpec(dim=self.rope_dim, theta=self.rope_theta, scaling=self.rope_scaling)

    @property
    def context_length(self) -> int:
        """Longest sequence the positions are meant for, scaling included."""
        if not isinstance(self.rope_scaling, YarnScaling):  # Llama's own maximum counts the scaling
            return self.max_position_embeddings
        stretched = int(self.rope_scaling.factor * self.rope_scaling.original_max_position_embeddings)
        return max(self.max_position_embeddings, stretched)


def yarn_context(config: ModelConfig, length: int) -> ModelConfig:
    """The same model with YaRN by the smallest whole factor that reaches `length` tokens; unchanged where its
    own limit does.

    Qwen3's model cards reach 131,072 tokens so, with factor 4 over 32,768. Raises ConfigError for a model
    that is stretched already.
    """
    if length <= config.context_length:
        return config
    if config.rope_scaling is not None:
        raise ConfigError(
            f"the model's own config.json stretches it to {config.context_length} tokens; {length} are out of its reach"
        )
    if (
        config.latent is not None
    ):  # its scores would have to be sharpened too, by what only `mscale_all_dim` says
        raise ConfigError(
            f"a {config.model_type} model is stretched by its own config.json alone: set rope_scaling there"
        )
    original = min(YARN_ORIGINAL_LENGTH, config.max_position_embeddings)
    factor = float(math.ceil(length / original))
    scaling = YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor({}, factor),
    )
    return replace(config, rope_scaling=scaling)


def attention_factor(rope: dict, factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return yarn_mscale(factor, float(rope["mscale"])) / yarn_mscale(factor, float(rope["mscale_all_dim"]))
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """By how much attention is sharpened where positions are stretched by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

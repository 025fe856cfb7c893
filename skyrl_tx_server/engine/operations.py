"""The interface of the HTTP side and the engine: frozen requests and results, with arrays in numpy.

HTTP code parses a body into one of these operations and submits it; the engine returns the matching result.
Neither side imports the other. The request parsers (`http/wire`) reject what the model's sizes and the fields
of a request forbid, so the engine checks only what it alone knows: which models and checkpoints exist, and
what its programs have room for. Token ids are int32, log-probabilities and weights float32, all little-endian
numpy arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from skyrl_tx_server.engine.loss_spec import LossFn, LossSettings

DEFAULT_TENANT = "default"
"""The tenant of every operation on a server without tenants."""

LORA_ALPHA = 32.0
"""LoRA's alpha for every adapter; the delta is scaled by alpha / rank (Thinking Machines, "LoRA Without
Regret")."""


NO_LOGPROB = -99999.0
"""The log-probability, with token 0, at a position of a top-k that has none."""


class StopReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSpec:
    """The shape and seed of an adapter; saved with every checkpoint."""

    rank: int
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = LORA_ALPHA


def expert_rank(rank: int, experts_per_token: int) -> int:
    """Return the rank of the factors of each expert: the rank of the adapter, divided by the experts that
    each token uses (as in "LoRA Without Regret").
    """
    return max(1, rank // experts_per_token)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamSettings:
    """The settings of one optimizer step, exactly Tinker's AdamParams: decoupled weight decay, global-norm
    clipping (0 = off).
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainDatum:
    """One sequence to train on. `tokens`, `target_tokens` and every loss input have the same length N."""

    tokens: np.ndarray  # [N] int32
    target_tokens: np.ndarray  # [N] int32; cross_entropy also takes K per position, [N, K]
    weights: np.ndarray | None = (
        None  # float32, shaped like the targets; None means one everywhere (cross_entropy only)
    )
    logprobs: np.ndarray | None = None  # [N] float32, the sampler's (all losses but cross_entropy)
    advantages: np.ndarray | None = None  # [N] float32 (all losses but cross_entropy)
    sequence_ratio_mask: np.ndarray | None = (
        None  # [N] float32; where it is not 0 a token counts in the sequence's ratio (gspo)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSettings:
    """How to sample one request."""

    max_tokens: int | None = None  # None: up to the model's context
    temperature: float = 1.0  # 0 is greedy
    top_k: int = -1  # -1 is off
    top_p: float = 1.0
    seed: int | None = None  # None: fresh randomness; sample i of a request uses fold_in(seed, i)
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_at_eos: bool = True  # the client gave no `stop`


@dataclass(frozen=True, kw_only=True, slots=True)
class CsrMatrix:
    """A matrix, dense or sparse (CSR). A reply keeps the layout of its request."""

    values: np.ndarray  # flat: every cell, row by row, or the listed ones
    shape: tuple[int, int]
    crow_indices: np.ndarray | None = (
        None  # [rows + 1] int64, where each row's listed cells begin; None: dense
    )
    col_indices: np.ndarray | None = None  # int64, one per value; None: dense

    def rows(self) -> np.ndarray:
        """Return the row of each value, ascending."""
        if self.crow_indices is None:
            return np.repeat(np.arange(self.shape[0]), self.shape[1])
        return np.repeat(np.arange(self.shape[0]), np.diff(self.crow_indices))

    def dense(self) -> np.ndarray:
        """Return the whole matrix; cells that are not listed are 0."""
        if self.crow_indices is None:
            return self.values.reshape(self.shape)
        matrix = np.zeros(self.shape, self.values.dtype)
        matrix[self.rows(), self.col_indices] = self.values
        return matrix


# --- operations ---


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateModel:
    """A fresh adapter and optimizer under `model_id`. Result: `Done`."""

    model_id: str
    lora: LoraSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadWeights:
    """Replace a model's adapter (and optimizer state, when asked) by a training checkpoint's. Result:
    `WeightsLoaded`.

    `create` makes the model first, with the checkpoint's own LoraSpec. Without `optimizer` the moments and
    step start at zero.
    """

    model_id: str
    path: str  # tinker://<run>/weights/<name>
    optimizer: bool
    create: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackward:
    """Add the gradient of the summed loss to the model's accumulator (not when `forward_only`). Result:
    `ForwardBackwardResult`."""

    model_id: str
    data: tuple[TrainDatum, ...]
    loss_fn: LossFn
    settings: LossSettings = field(default_factory=LossSettings)
    forward_only: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimStep:
    """Apply the accumulated gradient, then clear it. Result: `OptimStepResult`."""

    model_id: str
    adam: AdamSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveWeights:
    """A training checkpoint (adapter and optimizer) at tinker://<model_id>/weights/<name>. Result:
    `WeightsSaved`."""

    model_id: str
    name: str
    overwrite: bool = False
    user_metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSampler:
    """An immutable sampler snapshot of the model's current adapter, sampleable under `weights`. Result:
    `WeightsSaved`."""

    model_id: str
    # tinker://<model_id>/sampler_weights/<name> is written to disk; under any other name (a session's) it
    # stays in memory
    weights: str
    user_metadata: dict[str, str] = field(default_factory=dict)
    peft_directory: str | None = None  # also write it there in PEFT's layout


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveExternal:
    """The model's current adapter, for use elsewhere, at tinker://<model_id>/external_weights/<name>. Result:
    `WeightsSaved`."""

    model_id: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UnloadModel:
    """Free a model's adapter, gradient and optimizer. Its snapshots stay. Result: `Done`."""

    model_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DropSnapshot:
    """Free an in-memory sampler snapshot once no running sample uses it. Result: `Done`."""

    weights: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """`num_samples` completions of one prompt. Result: `SampleResult`.

    `weights` names a snapshot (an ephemeral id, or a tinker:// sampler path, loaded from disk on first use);
    None is the base model.
    """

    weights: str | None
    prompt: np.ndarray  # [P] int32, P >= 1
    settings: SamplingSettings
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = (
        0  # how many of the likeliest tokens to report at every prompt position; 0 is off
    )
    topk_sample_logprobs: int = 0  # the same at every sampled position
    target_prompt_tokens: CsrMatrix | None = (
        None  # [P - 1, K] int32: row i is scored at position i + 1; -1 asks for nothing
    )
    prompt_logprobs_last_n: int | None = (
        None  # report prompt and top-k log-probabilities of the last n prompt tokens only
    )


Op = (
    CreateModel
    | LoadWeights
    | ForwardBackward
    | OptimStep
    | SaveWeights
    | SaveSampler
    | SaveExternal
    | UnloadModel
    | DropSnapshot
    | Sample
)
"""Everything the engine executes. Ops of one `model_id` run in submission order."""


# --- results ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsLoaded:
    model_id: str
    lora: LoraSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackwardResult:
    logprobs: tuple[
        np.ndarray, ...
    ]  # float32, one per datum and shaped like its targets: log p(target), weighted or not
    metrics: dict[str, float]  # keys of the form "name:reduction"; always "loss:sum"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimStepResult:
    metrics: dict[str, float]  # "grad_norm" (before clipping) always


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsSaved:
    path: str | None  # None for an ephemeral snapshot
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TopkLogprobs:
    """The k likeliest tokens at each of n positions, likeliest first. A position without a context is all
    token 0 at `NO_LOGPROB`."""

    token_ids: np.ndarray  # [n, k] int32
    logprobs: np.ndarray  # [n, k] float32


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledSequence:
    tokens: np.ndarray  # [n] int32, the stop token included
    logprobs: (
        np.ndarray
    )  # [n] float32; whether of the tempered distribution is the server's setting, of the filtered one never
    stop_reason: StopReason
    topk: TopkLogprobs | None = None  # None when not asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleResult:
    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: np.ndarray | None  # [P] float32, NaN first; None when not asked for
    prompt_cache_hit_tokens: int
    topk_prompt_logprobs: TopkLogprobs | None = None  # [P, k], None when not asked for
    target_prompt_logprobs: CsrMatrix | None = (
        None  # float32, laid out like the op's targets, 0 where they are -1
    )


OpResult = Done | WeightsLoaded | ForwardBackwardResult | OptimStepResult | WeightsSaved | SampleResult

"""The records that the HTTP side and the engine exchange: frozen operations and results with numpy arrays.

The HTTP side parses a body into an operation and submits the operation. The engine returns the result. The
request parsers (`http/wire`) check everything that depends only on the request and the sizes of the model.
The engine checks which models and checkpoints exist and whether the operation fits into memory. Token ids are
int32. Logprobs, advantages and loss weights are float32. All arrays are little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from skyrl_tx_server.engine.loss_spec import LossFn, LossSettings

DEFAULT_TENANT = "default"
"""The tenant of the operator: the holder of `api_key`, or every client if the server has no key."""

LORA_ALPHA = 32.0
"""The default alpha of an adapter. The product B @ A is scaled by alpha / rank, for routed experts by alpha /
`expert_rank` (Thinking Machines, "LoRA Without Regret")."""

NO_LOGPROB = -99999.0
"""The logprob of the placeholder, token id 0, at a position that has no top-k tokens."""


class StopReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSpec:
    """The rank, the seed, the trained projections and the alpha of an adapter. Every checkpoint contains
    them."""

    rank: int
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = LORA_ALPHA


def expert_rank(rank: int, experts_per_token: int) -> int:
    """Return the rank of the factors of each routed expert. It is the rank of the adapter, divided by the
    number of routed experts that each token uses (as in "LoRA Without Regret"), but at least 1.
    """
    return max(1, rank // experts_per_token)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamSettings:
    """The settings of one optimizer step, as in Tinker's AdamParams. Weight decay is decoupled.
    `grad_clip_norm` limits the global norm of the gradient; 0: off."""

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
    target_tokens: np.ndarray  # [N] int32; cross_entropy also takes K targets per position: [N, K]
    weights: np.ndarray | None = None  # float32, shaped like the targets; None: all 1 (cross_entropy only)
    logprobs: np.ndarray | None = None  # [N] float32, from the sampler (all losses except cross_entropy)
    advantages: np.ndarray | None = None  # [N] float32 (all losses except cross_entropy)
    # [N] float32, for gspo, which computes the importance ratio of the sequence from the tokens whose mask is
    # not 0
    sequence_ratio_mask: np.ndarray | None = None


MAX_STOP_TOKENS = 16
"""The maximum number of tokens that end a sequence, including the end-of-sequence tokens of the model."""
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 64, 1024
"""The maximum number of stop strings and the maximum length of each, in characters. They are limited because
the engine thread searches for all stop strings after every dispatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSettings:
    max_tokens: int | None = None  # None: as many as the model's context allows
    temperature: float = 1.0  # 0: greedy
    top_k: int = -1  # -1: off
    top_p: float = 1.0
    seed: int | None = None  # None: random; sample i of a request uses fold_in(seed, i)
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_at_eos: bool = True  # False if a Tinker client passed a list of token ids as `stop`


@dataclass(frozen=True, kw_only=True, slots=True)
class CsrMatrix:
    """A dense or sparse (CSR) matrix. If the matrix of a request is dense, the matrix of the reply is dense.
    Otherwise the matrix of the reply stores the same cells as the matrix of the request."""

    values: np.ndarray  # flat: all cells in row-major order, or the stored cells
    shape: tuple[int, int]
    crow_indices: np.ndarray | None = None  # [rows + 1] int64, the start of each row; None: dense
    col_indices: np.ndarray | None = None  # int64, one per value; None: dense

    def rows(self) -> np.ndarray:
        """Return the row of each value, ascending."""
        if self.crow_indices is None:
            return np.repeat(np.arange(self.shape[0]), self.shape[1])
        return np.repeat(np.arange(self.shape[0]), np.diff(self.crow_indices))

    def dense(self) -> np.ndarray:
        """Return the whole matrix. Cells that are not stored are 0."""
        if self.crow_indices is None:
            return self.values.reshape(self.shape)
        matrix = np.zeros(self.shape, self.values.dtype)
        matrix[self.rows(), self.col_indices] = self.values
        return matrix


# --- operations ---


class Operation[R]:
    """The base class of all operations. `R` is the type of the result."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateModel(Operation["Done"]):
    """Create an adapter and its optimizer state as `model_id`."""

    model_id: str
    lora: LoraSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadWeights(Operation["WeightsLoaded"]):
    """Load the adapter of a training checkpoint into a model. With `optimizer`, load the optimizer state too.

    With `create`, first create the model with the LoraSpec of the checkpoint. Without `optimizer`, the
    moments and the step count of Adam start at zero. The accumulated gradient is cleared.
    """

    model_id: str
    path: str  # tinker://<run>/weights/<name>
    optimizer: bool
    create: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackward(Operation["ForwardBackwardResult"]):
    """Compute the summed loss of `data` and, unless `forward_only`, add its gradient to the accumulated
    gradient of the model."""

    model_id: str
    data: tuple[TrainDatum, ...]
    loss_fn: LossFn
    settings: LossSettings = field(default_factory=LossSettings)
    forward_only: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimStep(Operation["OptimStepResult"]):
    """Update the adapter with the accumulated gradient, then clear the gradient."""

    model_id: str
    adam: AdamSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveWeights(Operation["WeightsSaved"]):
    """Save the adapter and its optimizer state as tinker://<model_id>/weights/<name>."""

    model_id: str
    name: str
    overwrite: bool = False
    user_metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSampler(Operation["WeightsSaved"]):
    """Save the model's adapter as a sampler snapshot. The field `weights` is the name of the snapshot."""

    model_id: str
    weights: str
    """With the name tinker://<model_id>/sampler_weights/<name>, the snapshot is also written to disk. With
    any other name, it exists in memory only."""
    user_metadata: dict[str, str] = field(default_factory=dict)
    peft_directory: str | None = None  # also write the adapter there in PEFT format; None: do not write it


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveExternal(Operation["WeightsSaved"]):
    """Save the model's adapter for download as tinker://<model_id>/external_weights/<name>."""

    model_id: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UnloadModel(Operation["Done"]):
    """Free a model's adapter, gradient and optimizer state. Its snapshots remain."""

    model_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DropSnapshot(Operation["Done"]):
    """Free a sampler snapshot in memory, or the copy of a sampler checkpoint on the device, as soon as no
    earlier `Sample` operation needs it."""

    weights: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample(Operation["SampleResult"]):
    """Sample `num_samples` completions of one prompt.

    `weights` is the name of a snapshot in memory, the tinker:// path of a sampler checkpoint, or None for the
    base model. A sampler checkpoint is loaded on first use.
    """

    weights: str | None
    prompt: np.ndarray  # [P] int32, P >= 1
    settings: SamplingSettings
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0  # number of most likely tokens to return at each prompt position
    topk_sample_logprobs: int = 0  # number of most likely tokens to return at each sampled position
    target_prompt_tokens: CsrMatrix | None = None
    """[P - 1, K] int32. The tokens of row i are scored at position i + 1. -1 means no token."""
    prompt_logprobs_last_n: int | None = None
    """Return prompt logprobs of the last n prompt tokens only. None: of all prompt tokens."""


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
"""All operations of the engine. Operations of one `model_id` run in submission order."""


# --- results ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The result of an operation that returns no data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsLoaded:
    model_id: str
    lora: LoraSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackwardResult:
    logprobs: tuple[np.ndarray, ...]  # log p(target) of each datum, float32, shaped like its target_tokens
    metrics: dict[str, float]  # keys of the form "name:reduction"; always has "loss:sum"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimStepResult:
    metrics: dict[str, float]  # always has "grad_norm", the norm before clipping


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsSaved:
    path: str | None  # None for a snapshot in memory
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TopkLogprobs:
    """The k most likely tokens at each of n positions, most likely first. At the first token of a prompt, and
    at all tokens before its last `prompt_logprobs_last_n` tokens, all k entries are token 0 with
    `NO_LOGPROB`."""

    token_ids: np.ndarray  # [n, k] int32
    logprobs: np.ndarray  # [n, k] float32


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledSequence:
    tokens: np.ndarray  # [n] int32, including the stop token
    # [n] float32, from the distribution before top-k and top-p. The option `logprobs_mode` states whether
    # temperature is applied first.
    logprobs: np.ndarray
    stop_reason: StopReason
    topk: TopkLogprobs | None = None  # None if not requested


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleResult:
    sequences: tuple[SampledSequence, ...]
    # [P] float32; NaN for the first token and for all before the last `prompt_logprobs_last_n` tokens; None
    # if not requested
    prompt_logprobs: np.ndarray | None
    prompt_cache_hit_tokens: int
    topk_prompt_logprobs: TopkLogprobs | None = None  # [P, k], None if not requested
    # float32, with the layout of `target_prompt_tokens`; 0 where the target token is -1
    target_prompt_logprobs: CsrMatrix | None = None


OpResult = Done | WeightsLoaded | ForwardBackwardResult | OptimStepResult | WeightsSaved | SampleResult

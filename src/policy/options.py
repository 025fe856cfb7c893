"""Options of the model and of the endpoints that serve it."""

from __future__ import annotations

from typing import Literal

import chz

from src.core.length_limits import ContextOptions
from src.core.options import Options, SeedOptions, above, at_least, finite, is_http_address, require


@chz.chz
class ModelOptions(Options):
    """Model and server"""

    model_name: str = chz.field(doc="Base model as the server names it, e.g. Qwen/Qwen3-4B")
    tokenizer: str | None = chz.field(
        default=None, doc="Tokenizer directory or hub id; None: the tokenizer of model_name"
    )


@chz.chz
class AdapterOptions(Options):
    """Model and server"""

    lora_rank: int = chz.field(default=32, doc="LoRA rank, within the server's limit", validator=at_least(1))
    lora_alpha: float | None = chz.field(
        default=None,
        doc="LoRA alpha; alpha / lora_rank scales the adapter. None: the server's default, 32. If the server "
        "gives the adapter another alpha, learning_rate and weight_decay are scaled instead",
        validator=[above(0), finite],
    )
    train_attn: bool = chz.field(default=True, doc="Train LoRA weights for the attention projections")
    train_mlp: bool = chz.field(default=True, doc="Train LoRA weights for the MLPs and experts")
    train_unembed: bool = chz.field(default=True, doc="Train LoRA weights for the output head")
    load_checkpoint_path: str | None = chz.field(
        default=None, doc="tinker:// path of a training checkpoint to start from, with its optimizer state"
    )
    load_optimizer: bool = chz.field(
        default=True,
        doc="false: load_checkpoint_path gives the weights only, and Adam starts anew, as is usual after "
        "supervised fine-tuning",
    )

    @chz.validate
    def _something_is_trained(self) -> None:
        require(
            self.train_attn or self.train_mlp or self.train_unembed,
            "train_attn, train_mlp and train_unembed are all false, so nothing is trained; set one to true",
        )

    @chz.validate
    def _optimizer_belongs_to_a_checkpoint(self) -> None:
        require(
            self.load_optimizer or self.load_checkpoint_path is not None,
            "load_optimizer=false needs load_checkpoint_path=tinker://...; add it, or remove load_optimizer",
        )


@chz.chz
class WatchdogOptions(Options):
    """Failures and timeouts"""

    heartbeat_timeout_s: float = chz.field(
        default=120,
        doc="The server is lost when all health checks have failed for this long",
        validator=above(0),
    )
    request_timeout_s: float = chz.field(
        default=3600,
        doc="Longest time of one call to the server: open a client, sample a turn, train a step or save",
        validator=above(0),
    )


@chz.chz
class BackendOptions(ModelOptions, WatchdogOptions, SeedOptions, ContextOptions):
    """Model and server"""

    backend: Literal["tinker", "skyrl-tx"] = chz.field(
        default="tinker", doc="tinker: the cloud; skyrl-tx: a server of your own"
    )
    skyrl_tx_url: str | None = chz.field(
        default=None, doc="Address of your server, e.g. http://localhost:8000 (backend=skyrl-tx)"
    )
    tinker_base_url: str | None = chz.field(
        default=None,
        doc="Address of the Tinker cloud (backend=tinker); None: TINKER_BASE_URL, or the SDK's default",
    )

    @property
    def uses_backend(self) -> bool:
        """Whether the program connects to `backend`. An evaluation with `base_url` does not."""
        return True

    @chz.validate
    def _backend_is_complete(self) -> None:
        if not self.uses_backend:
            return
        if self.backend == "skyrl-tx":
            require(
                is_http_address(self.skyrl_tx_url or ""),
                "backend=skyrl-tx needs skyrl_tx_url=http://host:port",
            )
            require(
                self.tinker_base_url is None,
                "tinker_base_url is for backend=tinker; use skyrl_tx_url, or remove tinker_base_url",
            )
            return
        require(
            self.skyrl_tx_url is None, "skyrl_tx_url needs backend=skyrl-tx; add it, or remove skyrl_tx_url"
        )


@chz.chz
class JudgeEndpointOptions(Options):
    """Judge"""

    judge_model: str | None = chz.field(
        default=None,
        doc="Model at judge_base_url. It grades the natural-language assertions of tau2 tasks and, "
        "with taxonomy_feedback, the conversations of the training trials",
    )
    judge_base_url: str | None = chz.field(
        default=None, doc="OpenAI-compatible endpoint of the judge; OPENAI_API_KEY is its key"
    )

    @chz.validate
    def _both_or_none(self) -> None:
        require(
            self.judge_model is None or self.judge_base_url is not None,
            "judge_model needs judge_base_url=http://host:port/v1; add it, or remove judge_model",
        )
        require(
            self.judge_base_url is None or self.judge_model is not None,
            "judge_base_url needs judge_model; add it, or remove judge_base_url",
        )
        require(
            self.judge_base_url is None or is_http_address(self.judge_base_url),
            f"judge_base_url={self.judge_base_url} is not an HTTP address; write "
            "judge_base_url=http://host:port/v1",
        )

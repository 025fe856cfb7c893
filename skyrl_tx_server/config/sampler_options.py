"""Options of the external sampler: its address, and the checks of its samples (docs/external-sampler.md)."""

from __future__ import annotations

import chz

from skyrl_tx_server.config.bounds import YEAR_S, BoundedOptions, between, positive
from skyrl_tx_server.errors import ConfigError


@chz.chz
class SamplerOptions(BoundedOptions):
    """Options of an external vLLM or SGLang server that samples the completions."""

    sampler_url: str | None = chz.field(
        default=None,
        doc="http://host:port of a vLLM or SGLang server that samples the completions, see "
        "docs/external-sampler.md; default: this server samples them",
    )
    sampler_adapters: str | None = chz.field(
        default=None,
        doc="Directory to which this server writes adapters for the external sampler; the external sampler "
        "must be able to read it at the same path; default: the directory sampler_adapters in "
        "checkpoints_dir",
    )
    sampler_api_key: str | None = chz.field(
        default=None,
        repr=False,
        doc="API key of the external sampler; default: the environment variable SKYRL_TX_SAMPLER_API_KEY",
    )
    sampler_timeout_s: float = chz.field(
        default=1800.0,
        metadata=positive(YEAR_S),
        doc="Timeout of one request to the external sampler",
    )
    sampler_check: float = chz.field(
        default=0.02,
        metadata=between(0, 1),
        doc="Share of the external sampler's samples whose logprobs this server computes again and compares "
        "after the reply. Until 16 tokens of a snapshot (or of the base model) have been compared without a "
        "large difference, the longest sample of each request is also compared, before the reply",
    )
    sampler_check_limit: float = chz.field(
        default=0.05,
        metadata=positive(1e6),
        doc="The server logs a warning if the mean difference of logprobs per token, in nats, over the last "
        "64 compared samples is above this limit; a request fails if its sample that is compared before "
        "the reply (see sampler_check) has a mean difference of more than ten times this limit",
    )

    @chz.validate
    def _check_sampler_url(self) -> None:
        if self.sampler_url is not None and not self.sampler_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"sampler_url={self.sampler_url}: must be http://host:port or https://host:port"
            )

"""Options of tenants: the file with their keys, and their quotas."""

from __future__ import annotations

import chz

from skyrl_tx_server.config.bounds import BoundedOptions, positive


@chz.chz
class TenantOptions(BoundedOptions):
    """The key file and the quotas of tenants. The operator has no quotas."""

    api_keys_file: str | None = chz.field(
        default=None,
        doc="File with the API keys of the tenants; a tenant cannot see the sessions, models and checkpoints "
        "of another tenant. python -m skyrl_tx_server.keys writes the file. If this option is set, the "
        "holder of api_key is the operator, who sees the sessions, models and checkpoints of all tenants",
    )
    tenant_max_sessions: int = chz.field(
        default=1000, metadata=positive(1_000_000), doc="Sessions that one tenant may have open"
    )
    tenant_max_models: int = chz.field(
        default=16, metadata=positive(1_000_000), doc="Models that one tenant may have in training"
    )
    tenant_max_samplers: int = chz.field(
        default=10_000, metadata=positive(1_000_000), doc="Sampling sessions that one tenant may have"
    )
    tenant_max_snapshots: int = chz.field(
        default=64,
        metadata=positive(1_000_000),
        doc="Unnamed sampler snapshots that one tenant may have; a further snapshot replaces the least "
        "recently used one",
    )
    tenant_max_tokens: int = chz.field(
        default=1 << 24,
        metadata=positive(1 << 50),
        doc="Tokens that the waiting and running requests of one tenant may have; prompts, training data and "
        "completions of maximum length are counted; eight top-k logprobs, or eight further target tokens of "
        "a position, count as one token",
    )
    tenant_max_checkpoints: int = chz.field(
        default=1000, metadata=positive(1_000_000_000), doc="Checkpoints that one tenant may have"
    )
    tenant_checkpoint_quota_gb: float | None = chz.field(
        default=None,
        metadata=positive(1e9),
        doc="Size in GiB that all checkpoints of one tenant may have together; default: only "
        "checkpoint_quota_gb applies",
    )

    @property
    def tenant_checkpoint_quota_bytes(self) -> int | None:
        """The checkpoint quota of one tenant in bytes. None: only the quota of the whole server applies."""
        quota_gb = self.tenant_checkpoint_quota_gb
        return None if quota_gb is None else int(quota_gb * 2**30)

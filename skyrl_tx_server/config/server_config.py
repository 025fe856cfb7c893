"""All options of the server in one flat chz class. Each component declares its options in its own class in
this package."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import chz

from skyrl_tx_server.config.engine_options import EngineOptions
from skyrl_tx_server.config.http_options import HttpOptions
from skyrl_tx_server.config.process_options import ProcessOptions
from skyrl_tx_server.config.sampler_options import SamplerOptions
from skyrl_tx_server.errors import ConfigError


@chz.chz
class ServerConfig(ProcessOptions, SamplerOptions, HttpOptions, EngineOptions):
    """Options of `python -m skyrl_tx_server key=value ...`."""

    dry_run: bool = chz.field(
        default=False,
        doc="Check the files of the model, print the memory plan and exit, with an error if the model does "
        "not fit into memory; compiles training programs to measure their memory",
    )
    log_level: Literal["debug", "info", "warning"] = chz.field(
        default="info", doc="debug also logs heartbeats and polls"
    )

    @chz.validate
    def _check_combinations(self) -> None:
        if self.warmup and self.num_processes > 1:
            raise ConfigError(
                "warmup=true needs num_processes=1, because several processes compile each program together "
                "when it is first used; remove warmup"
            )
        if self.mesh.devices % self.num_processes:
            raise ConfigError(
                f"num_processes={self.num_processes}: must divide the {self.mesh.devices} devices "
                "(tensor_parallel * fsdp_parallel * data_parallel * expert_parallel)"
            )
        if self.sampler_url is not None and self.logprobs_mode != "raw":
            raise ConfigError(
                f"logprobs_mode={self.logprobs_mode}: an external sampler's logprobs are raw; "
                "remove logprobs_mode or sampler_url"
            )
        if self.num_processes > 1:
            _ = self.cluster_key  # raises ConfigError if the key cannot be used

    @property
    def adapters_dir(self) -> Path:
        """The absolute path of the directory with the external sampler's adapters."""
        return (
            Path(self.sampler_adapters or Path(self.checkpoints_dir) / "sampler_adapters")
            .expanduser()
            .resolve()
        )

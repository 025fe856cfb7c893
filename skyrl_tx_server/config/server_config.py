"""The server's options, one flat chz class, and the narrow view the engine takes of them."""

from __future__ import annotations

import ipaddress
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import chz

from skyrl_tx_server.engine.tenants import Quota
from skyrl_tx_server.errors import ConfigError

CLUSTER_KEY_VARIABLE = "SKYRL_TX_CLUSTER_KEY"
CLUSTER_KEY = f"cluster_key_file (or {CLUSTER_KEY_VARIABLE})"
"""As messages name it."""
MIN_CLUSTER_KEY = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """Devices along each axis; what an axis divides is in `model/mesh.py`."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor * self.expert

    @property
    def batch(self) -> int:
        """Into how many parts the rows of a batch are divided."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        return " ".join(f"{axis}_parallel={size}" for axis, size in asdict(self).items() if size > 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What the executor needs to know; sizes are in tokens unless named otherwise."""

    model_dir: Path  # a resolved local directory
    base_model: str  # the org/name alias clients use
    checkpoints_dir: Path
    compilation_cache_dir: Path | None  # None: no persistent compilation cache
    dtype: str
    max_lora_rank: int
    max_context_length: int | None  # None: the model's own limit
    decode_slots: int
    decode_block: int
    train_tokens_per_batch: int
    max_models: int
    max_snapshots: int
    cache_tokens: int | None = None  # None: a whole context for every slot
    tempered_logprobs: bool = (
        False  # of a sampled token: under the tempered distribution it was drawn from, else at temperature 1
    )
    checkpoint_quota_bytes: int | None = None
    tenant_quota: Quota | None = None  # None: there are no tenants
    mesh: MeshShape = MeshShape()
    stretch_context: bool = False  # a max_context_length beyond the model's own limit is reached with YaRN
    compile_ahead: bool | None = None  # None: on a GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class HostsSettings:
    """Which of the server's processes this is, and where they meet."""

    coordinator_address: str  # host:port
    num_processes: int
    process_id: int
    timeout_s: float
    key: bytes  # that the processes of one server share, and nobody else has

    @property
    def address(self) -> tuple[str, int]:
        return _host_and_port(self.coordinator_address)


def model_alias(base_model: str, alias: str | None) -> str:
    """The org/name of a model: the one it was given, its hub id, or local/<directory name>."""
    if alias is not None:
        return alias
    path = Path(base_model).expanduser()
    return f"local/{path.resolve().name}" if path.is_dir() or base_model.count("/") != 1 else base_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What a numeric option may be. Every one declares its own in the metadata of its field."""

    above: float | None = None  # must be larger than this; None: must be at least `low`
    low: float = 0
    high: float

    def check(self, name: str, value: float) -> None:
        if self.above is not None and not value > self.above:
            raise ConfigError(f"{name}={value}: must be above {self.above:g}")
        if not math.isfinite(value) or not self.low <= value <= self.high:
            where = (
                f"lie between {self.low:g} and"
                if self.above is None
                else f"be above {self.above:g} and at most"
            )
            raise ConfigError(f"{name}={value}: must {where} {self.high:.12g}")


BOUNDS = "bounds"  # the key in a field's metadata


def _positive(high: float) -> dict[str, object]:
    return {BOUNDS: Bounds(above=0, high=high)}


def _between(low: float, high: float) -> dict[str, object]:
    return {BOUNDS: Bounds(low=low, high=high)}


def check_bounds(config: object) -> None:
    """ConfigError for the first numeric option that is outside of its bounds or not finite."""
    for name, field in chz.chz_fields(config).items():
        bounds, value = (field.metadata or {}).get(BOUNDS), getattr(config, name)
        if bounds is not None and value is not None:
            bounds.check(name, value)


MAX_DEVICES = 1 << 16
MAX_TOKENS = 1 << 30
A_YEAR_S = 366 * 86400.0


@chz.chz
class ServerConfig:
    """Options of `python -m skyrl_tx_server key=value ...`."""

    base_model: str = chz.field(
        doc="Hugging Face model directory or hub id, e.g. Qwen/Qwen3-4B or ./models/tiny"
    )
    model_alias: str | None = chz.field(
        default=None,
        doc="org/name under which clients ask for the model; default: the hub id, or local/<directory name>",
    )
    host: str = chz.field(default="127.0.0.1", doc="Address to listen on")
    allow_anyone: bool = chz.field(default=False, doc="Listen beyond this machine without an api_key")
    api_key: str | None = chz.field(
        default=None,
        repr=False,
        doc="Key that every request must bring, beginning with tml-; none: whoever reaches the port may use it. Pass it "
        "as SKYRL_TX_API_KEY in the environment, or by api_key_file",
    )
    api_key_file: str | None = chz.field(
        default=None,
        doc="File that holds the api_key. A key on the command line is visible to every user of this machine while it starts",
    )
    allowed_hosts: str | None = chz.field(
        default=None,
        doc="Host names, separated by commas, that a server without an api_key serves beside its own addresses; with a key it serves any",
    )
    allowed_origins: str | None = chz.field(
        default=None,
        doc="Web pages, separated by commas, as in https://example.org, whose requests are accepted; default: none",
    )
    max_connections: int = chz.field(
        default=4096,
        metadata=_between(8, 1_000_000),
        doc="Connections open at once; fewer where the limit on open files leaves no room for them",
    )
    api_keys_file: str | None = chz.field(
        default=None,
        doc="File with a key for each tenant, who then sees nothing of the others; made by python -m skyrl_tx_server.keys. With it, "
        "api_key is the operator's, who sees everything",
    )
    tenant_max_models: int = chz.field(
        default=16, metadata=_positive(1_000_000), doc="Models that one tenant may have in training"
    )
    tenant_max_snapshots: int = chz.field(
        default=64,
        metadata=_positive(1_000_000),
        doc="Unnamed sampler snapshots that one tenant may have; a further one replaces its least recently used",
    )
    tenant_max_tokens: int = chz.field(
        default=1 << 24,
        metadata=_positive(1 << 50),
        doc="Tokens that one tenant may have in flight: prompts and longest completions of samples, and training data",
    )
    tenant_max_checkpoints: int = chz.field(
        default=1000, metadata=_positive(1_000_000_000), doc="Checkpoints that one tenant may have"
    )
    tenant_checkpoint_quota_gb: float | None = chz.field(
        default=None,
        metadata=_positive(1e9),
        doc="Size in GiB of all checkpoints of one tenant; default: only checkpoint_quota_gb",
    )
    ssl_certfile: str | None = chz.field(default=None, doc="Serve https with this certificate (PEM)")
    ssl_keyfile: str | None = chz.field(default=None, doc="The certificate's private key (PEM)")
    port: int = chz.field(
        default=8000, metadata=_between(0, 65535), doc="Port to listen on; 0 picks a free one"
    )
    checkpoints_dir: str = chz.field(default="./checkpoints", doc="Where tinker:// checkpoints are written")
    checkpoint_quota_gb: float | None = chz.field(
        default=None,
        metadata=_positive(1e9),
        doc="Refuse to save once all checkpoints together would be larger than this, in GiB; default: as the disk has room",
    )
    compilation_cache_dir: str | None = chz.field(
        default="~/.cache/skyrl_tx_server/xla",
        doc="JAX's persistent compilation cache; none: compile anew at every start",
    )
    compile_ahead: bool | None = chz.field(
        default=None,
        doc="Compile the programs for sampling and training in the background from the start on, not when each is first asked for; "
        "default: on a GPU, where that takes longest",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = chz.field(
        default="auto", doc="Base weights and activations; auto: float32 on CPU, bfloat16 on accelerators"
    )
    max_lora_rank: int = chz.field(
        default=32, metadata=_positive(4096), doc="Largest LoRA rank a client may ask for"
    )
    max_context_length: int | None = chz.field(
        default=None,
        metadata=_positive(MAX_TOKENS),
        doc="Largest prompt + completion in tokens; default: the model's own limit",
    )
    stretch_context: bool = chz.field(
        default=False,
        doc="Reach a max_context_length beyond the model's own limit with YaRN, as Qwen documents; costs some quality on short texts",
    )
    decode_slots: int = chz.field(default=32, metadata=_positive(1_000_000), doc="Sequences decoded at once")
    cache_tokens: int | None = chz.field(
        default=None,
        metadata=_positive(MAX_TOKENS),
        doc="Tokens whose keys and values are kept, of sequences being sampled and of what later prompts may continue; default: "
        "a whole context for each of decode_slots, or as many as fit. With less, the sample that came last waits when pages run out",
    )
    decode_block: int = chz.field(
        default=16, metadata=_positive(4096), doc="Decode steps per device dispatch"
    )
    sampled_logprobs: Literal["model", "tempered"] = chz.field(
        default="model",
        doc="Log-probabilities of sampled tokens: the model's own (temperature 1), or of the tempered distribution they were drawn from",
    )
    train_tokens_per_batch: int = chz.field(
        default=8192,
        metadata=_positive(MAX_TOKENS),
        doc="Tokens per training micro-batch, shared beginnings once",
    )
    max_models: int = chz.field(
        default=4,
        metadata=_positive(10_000),
        doc="Models in training kept on the device; further ones wait their turn in host memory",
    )
    max_snapshots: int = chz.field(
        default=8,
        metadata=_positive(10_000),
        doc="Sampler snapshots kept on the device; older ones wait in host memory or on disk",
    )
    sampler_url: str | None = chz.field(
        default=None,
        doc="http://host:port of a vLLM or SGLang that serves the rollouts, see docs/external-sampler.md; default: this server",
    )
    sampler_adapters: str | None = chz.field(
        default=None,
        doc="Where adapters are written for the external sampler, which must be able to read it under the same path; "
        "default: sampler_adapters below checkpoints_dir",
    )
    sampler_api_key: str | None = chz.field(
        default=None,
        repr=False,
        doc="Key that the external sampler asks for; or SKYRL_TX_SAMPLER_API_KEY in the environment",
    )
    sampler_timeout_s: float = chz.field(
        default=1800.0,
        metadata=_positive(A_YEAR_S),
        doc="How long the external sampler may take for one request",
    )
    sampler_check: float = chz.field(
        default=0.02,
        metadata=_between(0, 1),
        doc="Share of the external sampler's samples that this server scores again; the first of each snapshot always are",
    )
    sampler_check_limit: float = chz.field(
        default=0.05,
        metadata=_positive(1e6),
        doc="Mean difference of log-probabilities per token, in nats, above which it warns; a first sample that differs ten times as much "
        "is not passed on",
    )
    tensor_parallel: int = chz.field(
        default=1,
        metadata=_positive(MAX_DEVICES),
        doc="Devices that share each layer: heads, perceptron and vocabulary are divided over them",
    )
    fsdp_parallel: int = chz.field(
        default=1,
        metadata=_positive(MAX_DEVICES),
        doc="Devices that share the rows of a batch, each keeping a part of every matrix",
    )
    data_parallel: int = chz.field(
        default=1,
        metadata=_positive(MAX_DEVICES),
        doc="Devices that share the rows of a batch and keep all weights each",
    )
    expert_parallel: int = chz.field(
        default=1,
        metadata=_positive(MAX_DEVICES),
        doc="Devices that share a mixture's experts; as many devices are used as all four multiply to",
    )
    coordinator_address: str | None = chz.field(
        default=None,
        doc="host:port of process 0 at which the processes of a server on several hosts meet; the same in all of them",
    )
    num_processes: int = chz.field(
        default=1,
        metadata=_positive(MAX_DEVICES),
        doc="Processes that run the model together, usually one per host; the devices are theirs",
    )
    process_id: int = chz.field(
        default=0,
        metadata=_between(0, MAX_DEVICES),
        doc="Which of them this is; 0 serves HTTP, writes checkpoints and tells the others what to do",
    )
    cluster_key_file: str | None = chz.field(
        default=None,
        doc="File with the secret by which several processes know each other, the same for all, at least 32 characters; or put it into "
        "SKYRL_TX_CLUSTER_KEY in the environment",
    )
    initialization_timeout_s: float = chz.field(
        default=300.0,
        metadata=_positive(A_YEAR_S),
        doc="How long the processes wait for each other at the start",
    )
    session_timeout_s: float = chz.field(
        default=300.0, metadata=_positive(A_YEAR_S), doc="A session without heartbeat for this long is freed"
    )
    max_request_mb: int = chz.field(
        default=64,
        metadata=_positive(1024),
        doc="Largest body of a training request in MiB, after decompression",
    )
    dry_run: bool = chz.field(
        default=False,
        doc="Print what this would hold in memory, refuse what does not fit, and stop there; compiles the training program to know",
    )
    log_level: Literal["debug", "info", "warning"] = chz.field(
        default="info", doc="debug also logs heartbeats and polls"
    )

    @chz.validate
    def _check(self) -> None:
        check_bounds(self)
        if self.model_alias is not None and (
            self.model_alias.count("/") != 1
            or ":" in self.model_alias
            or not all(self.model_alias.split("/"))
        ):
            raise ConfigError(
                f"model_alias={self.model_alias}: must be org/name with one slash and no ':', as in Qwen/Qwen3-4B"
            )
        if self.api_key is not None and not self.api_key.startswith("tml-"):
            raise ConfigError("api_key: must begin with tml-, because the Tinker SDK sends no other")
        if self.api_key is not None and not (
            self.api_key.isascii() and self.api_key.isprintable() and " " not in self.api_key
        ):
            raise ConfigError("api_key: must be ASCII text without spaces, because it is sent in a header")
        has_key = self.api_key is not None or self.api_keys_file is not None
        if not has_key and not self.allow_anyone and not _is_loopback(self.host):
            raise ConfigError(
                f"host={self.host}: whoever reaches this machine could train, sample and delete; pass api_key=tml-... or allow_anyone=true"
            )
        self._check_processes()
        self._check_sampler()
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile: https needs both")
        for name, path in (("ssl_certfile", self.ssl_certfile), ("ssl_keyfile", self.ssl_keyfile)):
            if path is not None and not Path(path).expanduser().is_file():
                raise ConfigError(f"{name}={path}: no such file")

    def _check_sampler(self) -> None:
        if self.sampler_url is None:
            return
        if not self.sampler_url.startswith(("http://", "https://")):
            raise ConfigError(f"sampler_url={self.sampler_url}: must be http://host:port")
        if self.sampled_logprobs != "model":
            raise ConfigError(
                "sampled_logprobs=tempered: an external sampler's log-probabilities are the model's own; leave one of the two out"
            )

    def _check_processes(self) -> None:
        if self.compile_ahead and self.num_processes > 1:
            raise ConfigError(
                "compile_ahead=true: several processes must compile together, each program when it is asked for; drop it"
            )
        if (self.coordinator_address is None) != (self.num_processes == 1):
            raise ConfigError(
                "coordinator_address and num_processes: a server of several processes needs both"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f"process_id={self.process_id}: must lie between 0 and num_processes - 1, which is {self.num_processes - 1}"
            )
        if self._mesh().devices % self.num_processes:
            raise ConfigError(
                f"num_processes={self.num_processes}: tensor_parallel, fsdp_parallel, data_parallel and expert_parallel multiply to "
                f"{self._mesh().devices} devices, which must be a multiple of it: each process has as many of them"
            )
        if self.coordinator_address is None:
            return
        try:
            _host_and_port(self.coordinator_address)
        except ValueError:
            raise ConfigError(
                f"coordinator_address={self.coordinator_address}: must be host:port, as in 10.0.0.1:7000"
            ) from None
        _cluster_key(self.cluster_key_file)

    def hosts_settings(self) -> HostsSettings | None:
        """None: one process."""
        if self.coordinator_address is None:
            return None
        return HostsSettings(
            coordinator_address=self.coordinator_address,
            num_processes=self.num_processes,
            process_id=self.process_id,
            timeout_s=self.initialization_timeout_s,
            key=_cluster_key(self.cluster_key_file),
        )

    def _mesh(self) -> MeshShape:
        return MeshShape(
            data=self.data_parallel,
            fsdp=self.fsdp_parallel,
            tensor=self.tensor_parallel,
            expert=self.expert_parallel,
        )

    def adapters_dir(self) -> Path:
        """Where the external sampler finds its adapters, as an absolute path."""
        return (
            Path(self.sampler_adapters or Path(self.checkpoints_dir) / "sampler_adapters")
            .expanduser()
            .resolve()
        )

    def alias(self) -> str:
        """The org/name by which clients ask for the model."""
        return model_alias(self.base_model, self.model_alias)

    def tenant_quota(self) -> Quota:
        quota_gb = self.tenant_checkpoint_quota_gb
        return Quota(
            max_models=self.tenant_max_models,
            max_snapshots=self.tenant_max_snapshots,
            max_tokens=self.tenant_max_tokens,
            max_checkpoints=self.tenant_max_checkpoints,
            checkpoint_bytes=None if quota_gb is None else int(quota_gb * 2**30),
        )

    def engine_settings(self, model_dir: Path) -> EngineSettings:
        return EngineSettings(
            model_dir=model_dir,
            base_model=self.alias(),
            checkpoints_dir=Path(self.checkpoints_dir).expanduser(),
            compilation_cache_dir=None
            if self.compilation_cache_dir is None
            else Path(self.compilation_cache_dir).expanduser(),
            compile_ahead=self.compile_ahead,
            dtype=self.dtype,
            max_lora_rank=self.max_lora_rank,
            max_context_length=self.max_context_length,
            stretch_context=self.stretch_context,
            decode_slots=self.decode_slots,
            decode_block=self.decode_block,
            cache_tokens=self.cache_tokens,
            train_tokens_per_batch=self.train_tokens_per_batch,
            max_models=self.max_models,
            max_snapshots=self.max_snapshots,
            checkpoint_quota_bytes=None
            if self.checkpoint_quota_gb is None
            else int(self.checkpoint_quota_gb * 2**30),
            tenant_quota=None if self.api_keys_file is None else self.tenant_quota(),
            mesh=self._mesh(),
            tempered_logprobs=self.sampled_logprobs == "tempered",
        )


def _host_and_port(address: str) -> tuple[str, int]:
    """ValueError when it is not host:port."""
    host, _, port = address.rpartition(":")
    if not host or not 0 < int(port) <= 65535:
        raise ValueError(address)
    return host.removeprefix("[").removesuffix("]"), int(port)


def _cluster_key(file: str | None) -> bytes:
    """The secret of a server of several processes. ConfigError when there is none, or one that could be guessed."""
    if file is None:
        name, key = CLUSTER_KEY_VARIABLE, os.environ.get(CLUSTER_KEY_VARIABLE, "")
        if not key:
            raise ConfigError(
                f"num_processes: several processes need a secret of their own, the same for all: cluster_key_file=FILE, or "
                f"{CLUSTER_KEY_VARIABLE} in the environment. Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
    else:
        name = f"cluster_key_file={file}"
        try:
            key = Path(file).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{name}: cannot be read: {getattr(error, 'strerror', None) or 'not text'}"
            ) from None
    key = key.strip()
    if len(key) < MIN_CLUSTER_KEY:
        raise ConfigError(
            f"{name}: has {len(key)} characters; at least {MIN_CLUSTER_KEY} are needed, of random ones"
        )
    return key.encode()


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name other than localhost may mean anything."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

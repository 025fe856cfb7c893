"""Resolves the options of a server to a model, its mesh and its batch shapes, before weights are loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx_server.config.engine_options import DEFAULT_MAX_LORAS, DEFAULT_MAX_MODELS, EngineOptions
from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.model.config_json import load_model_config
from skyrl_tx_server.model.mesh import check_device, make_mesh, on_gpu
from skyrl_tx_server.model.model_config import ModelConfig, YarnScaling, yarn_context
from skyrl_tx_server.model.shapes import BucketShapes, train_shapes
from skyrl_tx_server.model.weights import check_divisible

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits that depend on the memory of the device unless an option sets them."""

    max_models: int  # training models on the device
    max_loras: int  # LoRA slots: adapters that the sampler keeps on the device
    max_context_length: int  # in tokens; models with a shorter context keep their own limit


DEFAULT_LIMITS = (
    Limits(max_models=DEFAULT_MAX_MODELS, max_loras=DEFAULT_MAX_LORAS, max_context_length=32_768),
    Limits(max_models=2, max_loras=4, max_context_length=32_768),
    Limits(max_models=1, max_loras=2, max_context_length=32_768),
    Limits(max_models=1, max_loras=2, max_context_length=16_384),
    Limits(max_models=1, max_loras=2, max_context_length=8_192),
    Limits(max_models=1, max_loras=2, max_context_length=4_096),
)
"""Default limits, largest first. A CPU uses the first entry. A GPU uses the first entry that fits into its
memory, or the last entry if none fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedModel:
    """The options of a server, with the values that depend on the model and the device."""

    settings: EngineOptions
    config: ModelConfig  # includes the mesh
    dtype: np.dtype  # the type of base weights and activations
    max_models: int
    max_loras: int
    max_context_length: int  # the maximum number of tokens of prompt and completion together
    train_shapes: BucketShapes


def resolve_model(settings: EngineOptions) -> ResolvedModel:
    """Resolve the options, with the largest default limits. Raises ConfigError if the model or the devices do
    not support an option."""
    config = _model_config(settings)
    check_device()
    check_divisible(config, settings.mesh, max_num_seqs=settings.max_num_seqs or settings.mesh.batch)
    config = replace(config, mesh=make_mesh(settings.mesh))
    return with_limits(settings, config, _dtype(settings), DEFAULT_LIMITS[0])


def with_limits(
    settings: EngineOptions, config: ModelConfig, dtype: np.dtype, limits: Limits
) -> ResolvedModel:
    """Return a model with `limits`. Limits that options set take precedence."""
    length = _max_context_length(settings, config, limits)
    shapes = train_shapes(
        max_context_length=length,
        tokens_per_batch=settings.train_tokens_per_batch,
        dp_ranks=settings.mesh.batch,
    )
    return ResolvedModel(
        settings=settings,
        config=config,
        dtype=dtype,
        max_models=settings.max_models or limits.max_models,
        max_loras=settings.max_loras or limits.max_loras,
        max_context_length=length,
        train_shapes=shapes,
    )


def use_float32_products(dtype: np.dtype) -> None:
    """If `dtype`, the dtype of the model, is float32, compute products of float32 factors in float32 on a
    GPU. By default, NVIDIA GPUs round the factors to TF32."""
    if on_gpu() and dtype == np.float32:
        jax.config.update("jax_default_matmul_precision", "highest")


def use_compilation_cache(settings: EngineOptions) -> None:
    """Cache all compiled programs in `compilation_cache_dir`, including small ones, so that the next start
    with the same options compiles nothing. Do nothing if `compilation_cache_dir` is None. If the directory
    cannot be created, log a warning and do nothing."""
    if settings.compilation_cache_dir is None:
        return
    directory = Path(settings.compilation_cache_dir).expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning(
            "compilation_cache_dir=%s: %s; every start compiles all programs; pass a directory that can be "
            "created, or compilation_cache_dir=none",
            directory,
            error.strerror,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _dtype(settings: EngineOptions) -> np.dtype:
    if settings.dtype == "auto":
        return np.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    return np.dtype(settings.dtype)


def _model_config(settings: EngineOptions) -> ModelConfig:
    config = load_model_config(settings.model_dir)
    if not settings.yarn or settings.max_context_length is None:
        return config
    extended = yarn_context(config, settings.max_context_length)
    if isinstance(extended.rope_scaling, YarnScaling) and extended is not config:
        logger.warning(
            "YaRN with factor %g extends the context from %d to %d tokens",
            extended.rope_scaling.factor,
            config.context_length,
            extended.context_length,
        )
    return extended


def _max_context_length(settings: EngineOptions, config: ModelConfig, limits: Limits) -> int:
    if settings.max_context_length is None:
        return min(config.context_length, limits.max_context_length)
    if not 1 <= settings.max_context_length <= config.context_length:
        raise ConfigError(
            f"max_context_length={settings.max_context_length} is outside 1..{config.context_length}, the "
            "limit of the model; set a value in this range, or yarn=true to extend the limit"
        )
    return settings.max_context_length

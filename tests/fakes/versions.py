"""Writes and checks checkpoints in which a version number determines the rank and every weight."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping

import numpy as np
import safetensors.numpy

from skyrl_tx_server.engine.operations import LoraSpec
from skyrl_tx_server.files.checkpoint_record import CheckpointInfo
from skyrl_tx_server.files.checkpoints import CheckpointStore

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = "base_model.model.lm_head.lora_{}.weight"


def save_version(store: CheckpointStore, path: str, version: int, *, columns: int = 2) -> CheckpointInfo:
    rank = 1 + version % 7
    arrays = {
        NAME.format("A"): np.full((rank, columns), version, np.float32),
        NAME.format("B"): np.full((3, rank), version, np.float32),
    }
    return store.write(
        path,
        arrays,
        lora=LoraSpec(rank=rank),
        step=version,
        user_metadata={"version": str(version)},
        overwrite=True,
    )


def version_of(arrays: Mapping[str, np.ndarray], rank: int) -> int:
    """Return the version of the arrays.

    Raises ValueError if the arrays have more than one version, and AssertionError if `rank` or the shape of
    lora_A belongs to another version.
    """
    (version,) = {float(number) for array in arrays.values() for number in (array.min(), array.max())}
    assert rank == 1 + version % 7 == arrays[NAME.format("A")].shape[0], (
        f"rank {rank} with the weights of version {version}"
    )
    return int(version)


def version_on_disk(store: CheckpointStore, path: str) -> int:
    info, arrays = store.read(path)
    version = version_of(arrays, info.lora.rank)
    assert (info.step, info.user_metadata) == (version, {"version": str(version)})
    return version


def version_in_archive(content: bytes) -> int:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        files = {name: file.read() for name in tar.getnames() if (file := tar.extractfile(name))}
    return version_in_files(files[CONFIG], files[WEIGHTS])


def version_in_files(config: bytes, weights: bytes) -> int:
    return version_of(safetensors.numpy.load(weights), json.loads(config)["r"])

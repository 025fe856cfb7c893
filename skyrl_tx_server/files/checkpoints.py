"""Checkpoints on disk, one directory for each tinker:// path. A checkpoint is either complete or absent.

Layout: `<root>/<run_id>/<kind>/<name>/` contains the record `checkpoint.json` and the safetensors file that
the record names. The arrays are written and fsynced first under a new name. The checkpoint exists once
`checkpoint.json` is renamed into place, so a crash leaves either the old checkpoint or the new one. The
record contains the size and SHA-256 of the arrays file. A directory without a record contains no checkpoint.
Records of other programs and symbolic links below the root are refused.

The name of the arrays file contains the generation of the checkpoint, 32 random hex digits. Every save
creates a new generation. Derived files (see `derived`) belong to one generation, so they never come from an
earlier save.

This file is long because saving, reading and deleting depend on the same order of file operations.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from skyrl_tx_server.config.tenant_options import TenantOptions
from skyrl_tx_server.engine.operations import DEFAULT_TENANT, LoraSpec
from skyrl_tx_server.engine.tenants import id_prefix, owner_of
from skyrl_tx_server.errors import ConflictError, NotFoundError, StorageError, UserError
from skyrl_tx_server.files.checkpoint_record import (
    ARRAYS_NAME,
    FORMAT,
    FORMAT_VERSION,
    RECORD_NAME,
    SCHEME,
    CheckpointInfo,
    CheckpointKind,
    check_run_id,
    checkpoint_info,
    parse_path,
    read_record,
)
from skyrl_tx_server.files.derived import DerivedFiles
from skyrl_tx_server.files.disk import check_count, check_quota, check_room

logger = logging.getLogger(__name__)

_WRITTEN_NAME = re.compile(rf"{ARRAYS_NAME.pattern}|{re.escape(RECORD_NAME)}\.[0-9a-f]{{32}}")
"""The names of arrays files and of records that are not renamed yet."""
_WRITE_LOCK = threading.RLock()
"""Held while a checkpoint is written or deleted. Reading needs no lock."""

MAX_VERSIONS = 10_000
"""The number of paths that `CheckpointStore.has_changed` remembers. It exceeds any useful `max_loras`."""


class MakeFiles(Protocol):
    """Creates a file or directory at `target`, which does not exist yet, from a checkpoint."""

    def __call__(self, target: Path, *, info: CheckpointInfo, arrays: Mapping[str, np.ndarray]) -> None: ...


class CheckpointStore:
    """The checkpoints below one directory. Only the arrays of checkpoints of one base model can be read. A
    view, which `for_tenant` returns, contains only the checkpoints that a tenant may access."""

    def __init__(
        self,
        root: Path,
        base_model: str,
        base_model_hash: str | None = None,
        *,
        quota_bytes: int | None = None,
        tenant_quota: TenantOptions | None = None,
    ) -> None:
        """`base_model_hash` is the `fingerprint` of the base weights. If it is None here or in the record of
        a checkpoint, fingerprints are not compared. `quota_bytes=None` means no quota.

        `tenant_quota` limits the checkpoints of each tenant. It does not apply to the operator.
        """
        self.root = root
        self._base_model = base_model
        self._base_model_hash = base_model_hash
        self._quota_bytes = quota_bytes
        self._tenant_quota = tenant_quota
        self.derived_files = DerivedFiles(root)
        self._versions: dict[str, tuple[int, int] | None] = {}
        """Maps a path to the inode and modification time that its record had in the last call of
        `has_changed`. None: there was no checkpoint. The entry of the latest call is last."""
        self._tenant: str | None = None  # None: all owners
        self._is_public: Callable[[str], bool] = lambda path: False

    def for_tenant(self, tenant: str, is_public: Callable[[str], bool]) -> CheckpointStore:
        """Return a view for `tenant`, which may access its own checkpoints and read public ones.

        Any other checkpoint is reported as absent, without reading the disk.
        """
        view = copy.copy(self)
        view._tenant, view._is_public = tenant, is_public
        return view

    def check_readable(self, path: str) -> None:
        """Raise NotFoundError if another tenant owns the checkpoint and the checkpoint is not public. Does
        not read the disk.
        """
        if not self._owns(path) and not self._is_public(path):
            raise NotFoundError(f"no checkpoint {path}")

    def exists(self, path: str) -> bool:
        """Return whether the checkpoint exists and the tenant owns it."""
        return self._owns(path) and (self._directory(path) / RECORD_NAME).is_file()

    def has_changed(self, path: str) -> bool:
        """Return whether the checkpoint existed in the previous call with this path, and was saved again or
        deleted since then. Call this method on the event loop."""
        try:
            status = (self._directory(path) / RECORD_NAME).stat()
            version = status.st_ino, status.st_mtime_ns
        except OSError:
            version = None
        previous = self._versions.pop(path, None)
        self._versions[path] = version
        if len(self._versions) > MAX_VERSIONS:
            del self._versions[next(iter(self._versions))]
        return previous not in (None, version)

    def info(self, path: str) -> CheckpointInfo:
        """Return the parsed record. Raise NotFoundError if there is no accessible checkpoint, and UserError
        if its record is invalid."""
        self.check_readable(path)
        record_file = self._directory(path) / RECORD_NAME
        try:
            self._check_inside(path, record_file)
            return checkpoint_info(path, read_record(path, record_file))
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"no checkpoint {path}") from None
        except OSError as error:
            raise UserError(f"checkpoint {path} cannot be read: {RECORD_NAME}: {error.strerror}") from None
        except UserError:
            raise
        except ValueError as error:
            raise UserError(
                f"checkpoint {path} is damaged: {RECORD_NAME} cannot be parsed ({str(error)[:200]})"
            ) from None

    def owned_info(self, path: str) -> CheckpointInfo:
        """Return `info` of a checkpoint that the tenant owns, and may therefore change. Raise NotFoundError
        for a checkpoint of another tenant, even if it is public."""
        self._check_own(path)
        return self.info(path)

    def list(self, run_id: str | None = None) -> list[CheckpointInfo]:
        """Return the checkpoints that the tenant owns, oldest first; with `run_id`, only those of this run.
        Checkpoints with an invalid record are left out."""
        if run_id is not None:
            check_run_id(run_id)
            return self._list(run_id) if self._owns(run_id) else []
        return self._list("*" if self._tenant is None else f"{id_prefix(self._tenant)}*")

    def _list(self, runs: str) -> list[CheckpointInfo]:
        infos = []
        for record in self.root.glob(f"{runs}/*/*/{RECORD_NAME}"):
            run, kind, name = record.parts[-4:-1]
            try:
                infos.append(self.info(f"{SCHEME}{run}/{kind}/{name}"))
            except (UserError, OSError):
                continue  # `info` of this path raises an error with the reason
        return sorted(infos, key=lambda info: (info.created_at, info.path))

    def read(self, path: str) -> tuple[CheckpointInfo, dict[str, np.ndarray]]:
        """Return the record and arrays of one generation, even while the checkpoint is overwritten. Raise
        NotFoundError if there is no checkpoint, and UserError if it is invalid or belongs to another base
        model."""
        while True:
            info = self.info(path)
            self._check_base_model(info)
            try:
                return info, self._arrays(info)
            except UserError:
                if self.info(path).generation == info.generation:
                    raise  # otherwise the checkpoint was overwritten: read the new generation

    def derived(self, path: str, name: str, make: MakeFiles) -> tuple[CheckpointInfo, Path]:
        """Return the record of the checkpoint and the derived file or directory `name`, which `make` creates
        if it does not exist. Raise StorageError if it cannot be written."""
        while True:
            info = self.info(path)
            if (file := self.derived_files.find(info.generation, name)) is not None:
                return info, file
            info, arrays = self.read(path)
            check_room(self.root, 2 * info.size_bytes)
            try:
                file = self.derived_files.add(info.generation, name, partial(make, info=info, arrays=arrays))
            except (OSError, SafetensorError) as error:
                raise StorageError(f"cannot write the files of {path}: {error}") from error
            if self._is_current(path, info.generation):
                return info, file
            self.derived_files.forget(info.generation)  # the checkpoint was replaced or deleted meanwhile

    def _is_current(self, path: str, generation: str) -> bool:
        with contextlib.suppress(UserError):
            return self.info(path).generation == generation
        return False

    def write(
        self,
        path: str,
        arrays: Mapping[str, np.ndarray],
        *,
        lora: LoraSpec,
        step: int,
        user_metadata: Mapping[str, str],
        overwrite: bool = False,
    ) -> CheckpointInfo:
        """Write the checkpoint and return after it is durable.

        Raises one of these errors, which leave all checkpoints unchanged:

        - ConflictError: the name is taken, and `overwrite` is not set.
        - NotFoundError: the path belongs to another tenant.
        - StorageError: the files cannot be written.
        - UserError: a quota would be exceeded, or the path is invalid or contains a symbolic link.
        """
        self._check_own(path)
        with _WRITE_LOCK:
            directory = self._directory(path)
            self._check_inside(path, directory)
            record_file = directory / RECORD_NAME
            if record_file.exists() and not overwrite:
                raise ConflictError(f"checkpoint {path} exists already; choose another name, or overwrite it")
            num_bytes = sum(np.asarray(value).nbytes for value in arrays.values())
            generation = uuid.uuid4().hex
            arrays_file = directory / f"arrays-{generation}.safetensors"
            temporary_record = directory / f"{RECORD_NAME}.{generation}"
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                self._check_quotas(path, num_bytes)
                check_room(self.root, num_bytes)
                directory.mkdir(parents=True, exist_ok=True)
                self.derived_files.make_directory()  # `delete` needs it, possibly on a full disk
                save_file({key: np.asarray(value, order="C") for key, value in arrays.items()}, arrays_file)
                _fsync(arrays_file)
                record = {
                    "format": FORMAT,
                    "version": FORMAT_VERSION,
                    "base_model": self._base_model,
                    "base_model_hash": self._base_model_hash,
                    "lora": asdict(lora),
                    "step": step,
                    "created_at": datetime.now(UTC).isoformat(),
                    "user_metadata": dict(user_metadata),
                    "arrays": arrays_file.name,
                    "size_bytes": arrays_file.stat().st_size,
                    "sha256": _sha256(arrays_file),
                }
                temporary_record.write_text(json.dumps(record, indent=1))
                _fsync(temporary_record)
                os.replace(temporary_record, record_file)
            except BaseException as error:
                with contextlib.suppress(OSError):
                    arrays_file.unlink(missing_ok=True)
                    temporary_record.unlink(missing_ok=True)
                if isinstance(error, OSError | SafetensorError):
                    raise StorageError(
                        f"cannot write checkpoint {path}: {error}; saved checkpoints are unchanged"
                    ) from error
                raise
            with contextlib.suppress(OSError):  # another process may have deleted the checkpoint already
                for synced in (directory, *directory.parents[:3]):  # its parents up to the root may be new
                    _fsync(synced)
                self._remove_others(directory, keep={arrays_file.name, RECORD_NAME})
            return checkpoint_info(path, record)

    def _remove_others(self, directory: Path, keep: Iterable[str]) -> None:
        """Remove all files except `keep`: replaced arrays with their derived files, and the files of an
        interrupted write."""
        for leftover in directory.iterdir():
            if leftover.name in keep:
                continue
            if (replaced := ARRAYS_NAME.fullmatch(leftover.name)) is not None:
                self.derived_files.forget(replaced[1])
            if leftover.is_dir() and not leftover.is_symlink():
                self.derived_files.discard(leftover)
            else:
                leftover.unlink(missing_ok=True)

    def remove_interrupted_writes(self, unchanged_for_s: float = 3600.0) -> None:
        """Remove the files of writes that were killed. A later save removes them only if it has the same
        path. Keep the files of directories that changed in the last `unchanged_for_s` seconds, because
        another process may be writing them."""
        oldest = time.time() - unchanged_for_s
        for kind in CheckpointKind:
            for directory in self.root.glob(f"*/{kind}/*"):
                with _WRITE_LOCK, contextlib.suppress(OSError, UserError):
                    self._remove_interrupted_write(directory, oldest)

    def _remove_interrupted_write(self, directory: Path, oldest: float) -> None:
        path = f"{SCHEME}{'/'.join(directory.parts[-3:])}"
        self._check_inside(path, directory)
        files = list(directory.iterdir())
        if max(file.lstat().st_mtime for file in (directory, *files)) > oldest:
            return
        keep = {RECORD_NAME}
        if (directory / RECORD_NAME).exists():
            keep.add(f"arrays-{self.info(path).generation}.safetensors")
        for file in files:
            if file.name not in keep and _WRITTEN_NAME.fullmatch(file.name):
                logger.info("removed %s, which an interrupted save has left", file)
                file.unlink()
        directory.rmdir()  # fails unless the directory is empty

    def delete(self, path: str, *, only: str | None = None) -> str | None:
        """Delete the checkpoint atomically and return its generation.

        If `only` is not None and the checkpoint has another generation, delete nothing and return None.
        """
        self._check_own(path)
        with _WRITE_LOCK:
            generation = self.info(path).generation
            if only not in (None, generation):
                return None
            try:
                if not self.derived_files.discard(self._directory(path)):  # another process has deleted it
                    raise NotFoundError(f"no checkpoint {path}")
                self.derived_files.forget(generation)
            except OSError as error:
                raise StorageError(
                    f"cannot delete checkpoint {path}: {error.strerror}; make {self.root} writable and try "
                    "again"
                ) from error
        return generation

    # --- access

    def _owns(self, path_or_run: str) -> bool:
        return self._tenant is None or owner_of(path_or_run) == self._tenant

    def _check_own(self, path: str) -> None:
        if not self._owns(path):
            raise NotFoundError(f"no checkpoint {path}")

    def _directory(self, path: str) -> Path:
        run_id, kind, name = parse_path(path)
        return self.root / run_id / kind / name

    def _check_inside(self, path: str, file: Path) -> None:
        """Raise UserError if `file` is reached through a symbolic link below the root."""
        inside = self.root.resolve() / file.relative_to(self.root)
        # Unlike Path.resolve, os.path.realpath raises no exception for a link that refers to itself.
        if file.is_symlink() or os.path.realpath(file) != str(inside):
            raise UserError(
                f"checkpoint {path} is refused: {file} is reached through a symbolic link; copy the "
                "directory instead"
            )

    def _check_quotas(self, path: str, num_bytes: int) -> None:
        """Raise UserError if saving the checkpoint would exceed a quota."""
        if self._quota_bytes is not None:
            check_quota(
                _used(self._list("*"), path), num_bytes, self._quota_bytes, option="checkpoint_quota_gb"
            )
        quota, owner = self._tenant_quota, owner_of(path)
        if quota is None or owner == DEFAULT_TENANT:
            return
        kept = [info for info in self._list(f"{id_prefix(owner)}*") if info.path != path]
        check_count(len(kept), quota.tenant_max_checkpoints)
        if quota.tenant_checkpoint_quota_bytes is not None:
            check_quota(
                _used(kept, path),
                num_bytes,
                quota.tenant_checkpoint_quota_bytes,
                option="tenant_checkpoint_quota_gb",
            )

    def _check_base_model(self, info: CheckpointInfo) -> None:
        if info.base_model != self._base_model:
            raise UserError(
                f"{info.path} was made from base model {info.base_model}, this server runs {self._base_model}"
                f"; start a server with {info.base_model}"
            )
        hashes = {info.base_model_hash, self._base_model_hash}
        if None not in hashes and len(hashes) > 1:
            raise UserError(
                f"{info.path} was made from other weights with the name {info.base_model}: its "
                "base_model_hash differs; set base_model to the directory of those weights"
            )

    # --- files

    def _arrays(self, info: CheckpointInfo) -> dict[str, np.ndarray]:
        file = self._directory(info.path) / f"arrays-{info.generation}.safetensors"
        damaged = UserError(
            f"checkpoint {info.path} is damaged: {file.name} is missing or differs from its record; save it "
            "again"
        )
        self._check_inside(info.path, file)
        try:
            status = file.lstat()
            is_valid = stat.S_ISREG(status.st_mode) and status.st_size == info.size_bytes
            if not is_valid or _sha256(file) != info.sha256:
                raise damaged
            return load_file(file)
        except (OSError, SafetensorError, KeyError, TypeError):  # also if the file is deleted during the call
            raise damaged from None


def _used(infos: Iterable[CheckpointInfo], path: str) -> int:
    """Return the bytes of all checkpoints except the one at `path`, which will be replaced."""
    return sum(info.size_bytes for info in infos if info.path != path)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

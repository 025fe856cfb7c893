"""Checkpoints on disk: one directory per tinker:// path, complete or absent.

Layout: `<root>/<run_id>/<kind>/<name>/` holds `checkpoint.json` and the safetensors file it names. The arrays are
written and fsynced first under a fresh name; renaming `checkpoint.json` into place is what makes the checkpoint exist, so a crash leaves
either the old one or the new one, and an overwrite is never half done. The JSON records the arrays' size and SHA-256: a torn or foreign
directory is refused by name, and so is one that is reached, or that leads, through a symbolic link.

The fresh name contains the generation of the checkpoint: 32 hex digits that no other save has. Files made from the arrays belong to one
generation (`derived`), so they are never those of an earlier save.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import os
import re
import stat
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from skyrl_tx_server.config.tenant_options import TenantOptions
from skyrl_tx_server.engine.operations import DEFAULT_TENANT, LoraSpec
from skyrl_tx_server.engine.tenants import id_prefix, owner_of
from skyrl_tx_server.errors import ConflictError, NotFoundError, ServerError, UserError
from skyrl_tx_server.files.derived import DerivedFiles
from skyrl_tx_server.files.disk import check_count, check_quota, check_room
from skyrl_tx_server.files.json_file import read_json_object

FORMAT = "skyrl_tx_server checkpoint"
FORMAT_VERSION = 1
RECORD_NAME = "checkpoint.json"
SCHEME = "tinker://"

MAX_RECORD_BYTES = 64 << 20

_ARRAYS = re.compile(r"arrays-([0-9a-f]{32})\.safetensors")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")  # file systems take 255 bytes
_RUN_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")
_CHANGING = threading.RLock()
"""Held by whoever writes or deletes a checkpoint. Reading needs no lock."""


class CheckpointKind(StrEnum):
    """The middle segment of a tinker:// path."""

    TRAINING = "weights"
    SAMPLER = "sampler_weights"
    EXTERNAL = "external_weights"  # to be downloaded


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """What a checkpoint is, without its arrays."""

    path: str  # tinker://<run_id>/<kind>/<name>
    run_id: str
    kind: CheckpointKind
    name: str
    base_model: str
    lora: LoraSpec
    created_at: datetime  # UTC
    size_bytes: int  # of the arrays file
    step: int  # optimizer steps taken; Adam's bias correction continues from it
    generation: str  # of the arrays; another save under the same name has another one
    user_metadata: dict[str, str] = field(default_factory=dict)


class MakeFiles(Protocol):
    """Makes a file or directory at `target`, which does not exist, from a checkpoint."""

    def __call__(self, target: Path, *, info: CheckpointInfo, arrays: Mapping[str, np.ndarray]) -> None: ...


def checkpoint_path(run_id: str, kind: CheckpointKind, name: str) -> str:
    return f"{SCHEME}{run_id}/{kind}/{name}"


def is_on_disk(weights: str) -> bool:
    """Whether such sampler weights are a checkpoint; others live in memory only."""
    return weights.startswith(SCHEME)


def parse_path(path: str) -> tuple[str, CheckpointKind, str]:
    """Split tinker://<run>/<weights|sampler_weights|external_weights>/<name>; UserError for anything else."""
    segments = path.removeprefix(SCHEME).split("/")
    kinds = [str(kind) for kind in CheckpointKind]
    if not path.startswith(SCHEME) or len(segments) != 3 or segments[1] not in kinds:
        raise UserError(
            f"{path!r} is not a checkpoint path; expected tinker://<run>/<{'|'.join(kinds)}>/<name>"
        )
    run_id, kind, name = segments
    _check(_RUN_ID, run_id, "run id")
    _check(_NAME, name, "checkpoint name")
    return run_id, CheckpointKind(kind), name


class CheckpointStore:
    """The checkpoints under one directory, for one base model: all of them, or, made by `of`, those that one tenant may see."""

    def __init__(
        self,
        root: Path,
        base_model: str,
        base_model_hash: str | None = None,
        *,
        quota_bytes: int | None = None,
        tenant_quota: TenantOptions | None = None,
    ) -> None:
        """`base_model_hash` is the `fingerprint` of the base weights; None, here or in a checkpoint, matches any. No quota: None.

        `tenant_quota` limits what each tenant saves, the operator excepted.
        """
        self._root = root
        self._base_model = base_model
        self._base_model_hash = base_model_hash
        self._quota_bytes = quota_bytes
        self._tenant_quota = tenant_quota
        self._derived = DerivedFiles(root)
        self._tenant: str | None = None  # None: whoever owns it
        self._is_public: Callable[[str], bool] = lambda path: False

    def of(self, tenant: str, is_public: Callable[[str], bool]) -> CheckpointStore:
        """The same store as `tenant` sees it: its own checkpoints, and for reading those of others that are public.

        Every other one is answered like one that does not exist, and without a look at the disk.
        """
        view = copy.copy(self)
        view._tenant, view._is_public = tenant, is_public
        return view

    def check_readable(self, path: str) -> None:
        """NotFoundError for a checkpoint of another tenant that is not public. Does not read the disk."""
        if not self._owns(path) and not self._is_public(path):
            raise NotFoundError(f"no checkpoint {path}")

    def exists(self, path: str) -> bool:
        return self._owns(path) and (self._directory(path) / RECORD_NAME).is_file()

    def info(self, path: str) -> CheckpointInfo:
        """NotFoundError when there is none that can be seen; UserError when the record is torn or not ours."""
        self.check_readable(path)
        return _info(path, self._record(path))

    def own(self, path: str) -> CheckpointInfo:
        """`info` of a checkpoint that the tenant may change; a public one of another tenant does not exist here."""
        self._check_own(path)
        return self.info(path)

    def list(self, run_id: str | None = None) -> list[CheckpointInfo]:
        """Every readable checkpoint of the tenant (of one run), oldest first."""
        if run_id is not None:
            _check(_RUN_ID, run_id, "run id")
            return self._list(run_id) if self._owns(run_id) else []
        return self._list("*" if self._tenant is None else f"{id_prefix(self._tenant)}*")

    def _list(self, runs: str) -> list[CheckpointInfo]:
        found = []
        for record in self._root.glob(f"{runs}/*/*/{RECORD_NAME}"):
            run, kind, name = record.parts[-4:-1]
            try:
                found.append(self.info(f"{SCHEME}{run}/{kind}/{name}"))
            except (UserError, OSError):
                continue  # foreign files under the root are not ours to report; asking for one by name says what is wrong
        return sorted(found, key=lambda info: (info.created_at, info.path))

    def read(self, path: str) -> tuple[CheckpointInfo, dict[str, np.ndarray]]:
        """The checkpoint whole, even while it is overwritten. UserError when it is torn, foreign, or of another base model."""
        self.check_readable(path)
        while True:
            record = self._record(path)
            info = _info(path, record)
            self._check_base_model(info, record)
            try:
                return info, self._arrays(path, info, str(record.get("sha256")))
            except UserError:
                if self.info(path).generation == info.generation:
                    raise  # otherwise it was saved anew meanwhile

    def derived(self, path: str, name: str, make: MakeFiles) -> tuple[CheckpointInfo, Path]:
        """The file or directory `name` that `make` makes from the checkpoint's arrays, made unless it exists, and of which save it is."""
        while True:
            info = self.info(path)
            if (found := self._derived.find(info.generation, name)) is not None:
                return info, found
            info, arrays = self.read(path)
            check_room(self._root, 2 * info.size_bytes)
            made = self._derived.add(info.generation, name, partial(make, info=info, arrays=arrays))
            if self._is_current(path, info.generation):
                return info, made
            self._derived.forget(info.generation)  # replaced or deleted while it was made

    def _is_current(self, path: str, generation: str) -> bool:
        with contextlib.suppress(UserError):
            return self.info(path).generation == generation
        return False

    def sweep_derived(self, unused_for_s: float) -> None:
        """Remove derived files that nobody has asked for in this time."""
        self._derived.sweep(unused_for_s)

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
        """Make the checkpoint durable under its path before returning.

        ConflictError when the name is taken and `overwrite` is not set; ServerError when the disk has no room and UserError when a
        quota leaves none, with all as it was.
        """
        self._check_own(path)
        with _CHANGING:
            return self._write(
                path, arrays, lora=lora, step=step, user_metadata=user_metadata, overwrite=overwrite
            )

    def _write(
        self,
        path: str,
        arrays: Mapping[str, np.ndarray],
        *,
        lora: LoraSpec,
        step: int,
        user_metadata: Mapping[str, str],
        overwrite: bool,
    ) -> CheckpointInfo:
        directory = self._directory(path)
        self._check_inside(path, directory)
        record_file = directory / RECORD_NAME
        if record_file.exists() and not overwrite:
            raise ConflictError(f"checkpoint {path} exists already; choose another name, or overwrite it")
        self._root.mkdir(parents=True, exist_ok=True)
        num_bytes = sum(np.asarray(value).nbytes for value in arrays.values())
        self._check_quotas(path, num_bytes)
        check_room(self._root, num_bytes)
        generation = uuid.uuid4().hex
        arrays_file = directory / f"arrays-{generation}.safetensors"
        unnamed_record = directory / f"{RECORD_NAME}.{generation}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
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
            unnamed_record.write_text(json.dumps(record, indent=1))
            _fsync(unnamed_record)
            os.replace(unnamed_record, record_file)
        except BaseException as error:
            with contextlib.suppress(OSError):
                arrays_file.unlink(missing_ok=True)
                unnamed_record.unlink(missing_ok=True)
            if isinstance(error, OSError | SafetensorError):
                raise ServerError(
                    f"cannot write checkpoint {path}, nothing saved before is lost: {error}"
                ) from error
            raise
        with contextlib.suppress(OSError):  # the checkpoint exists; it may be deleted again already
            _fsync(directory)
            self._remove_others(directory, keep={arrays_file.name, RECORD_NAME})
        return _info(path, record)

    def _remove_others(self, directory: Path, keep: Iterable[str]) -> None:
        """The arrays of the checkpoint just replaced with what was made from them, and what a write that was killed has left."""
        for leftover in directory.iterdir():
            if leftover.name in keep:
                continue
            if (replaced := _ARRAYS.fullmatch(leftover.name)) is not None:
                self._derived.forget(replaced[1])
            if leftover.is_dir() and not leftover.is_symlink():
                self._derived.discard(leftover)
            else:
                leftover.unlink(missing_ok=True)

    def delete(self, path: str, *, only: str | None = None) -> str | None:
        """It is gone at once and whole: a save under the same name comes before or after. The generation that was deleted.

        With `only`, nothing but this generation is deleted; None: the checkpoint is another one.
        """
        self._check_own(path)
        with _CHANGING:
            generation = _info(path, self._record(path)).generation
            if only not in (None, generation):
                return None
            if not self._derived.discard(self._directory(path)):  # someone else was faster
                raise NotFoundError(f"no checkpoint {path}")
        self._derived.forget(generation)
        return generation

    # --- what may be reached

    def _owns(self, path_or_run: str) -> bool:
        return self._tenant is None or owner_of(path_or_run) == self._tenant

    def _check_own(self, path: str) -> None:
        if not self._owns(path):
            raise NotFoundError(f"no checkpoint {path}")

    def _directory(self, path: str) -> Path:
        run_id, kind, name = parse_path(path)
        return self._root / run_id / kind / name

    def _check_inside(self, path: str, file: Path) -> None:
        """UserError when a symbolic link below the root leads to `file`, or from it."""
        if file.resolve() != self._root.resolve() / file.relative_to(self._root):
            raise UserError(
                f"checkpoint {path} is refused: {file} is, or lies behind, a symbolic link; copy the directory here instead"
            )

    def _check_quotas(self, path: str, num_bytes: int) -> None:
        """UserError when the checkpoint may not be saved."""
        if self._quota_bytes is not None:
            check_quota(
                _used(self._list("*"), path), num_bytes, self._quota_bytes, option="checkpoint_quota_gb"
            )
        quota, owner = self._tenant_quota, owner_of(path)
        if quota is None or owner == DEFAULT_TENANT:
            return
        others = [info for info in self._list(f"{id_prefix(owner)}*") if info.path != path]
        check_count(len(others), quota.tenant_max_checkpoints)
        if quota.tenant_checkpoint_quota_bytes is not None:
            check_quota(
                _used(others, path),
                num_bytes,
                quota.tenant_checkpoint_quota_bytes,
                option="tenant_checkpoint_quota_gb",
            )

    def _check_base_model(self, info: CheckpointInfo, record: Mapping[str, object]) -> None:
        if info.base_model != self._base_model:
            raise UserError(
                f"{info.path} was made from base model {info.base_model}, this server runs {self._base_model}"
            )
        made_from = record.get("base_model_hash")
        if None not in (made_from, self._base_model_hash) and made_from != self._base_model_hash:
            raise UserError(
                f"{info.path} was made from other weights called {info.base_model}: its base_model_hash is another than this model's"
            )

    # --- files

    def _arrays(self, path: str, info: CheckpointInfo, sha256: str) -> dict[str, np.ndarray]:
        file = self._directory(path) / f"arrays-{info.generation}.safetensors"
        damaged = UserError(
            f"checkpoint {path} is damaged: {file.name} is missing or does not match its record; save it again"
        )
        self._check_inside(path, file)
        try:
            status = file.lstat()
            if (
                not stat.S_ISREG(status.st_mode)
                or status.st_size != info.size_bytes
                or _sha256(file) != sha256
            ):
                raise damaged
            return load_file(file)
        except (OSError, SafetensorError, KeyError, TypeError):  # or deleted while it is read
            raise damaged from None

    def _record(self, path: str) -> dict[str, object]:
        record_file = self._directory(path) / RECORD_NAME
        try:
            self._check_inside(path, record_file)
            record = read_json_object(record_file, max_bytes=MAX_RECORD_BYTES, follow_links=False)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"no checkpoint {path}") from None
        except OSError as error:
            raise UserError(f"checkpoint {path} cannot be read: {RECORD_NAME}: {error.strerror}") from None
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"checkpoint {path} is damaged: {RECORD_NAME} is not JSON ({str(error)[:200]})"
            ) from None
        if record.get("format") != FORMAT:
            raise UserError(
                f"checkpoint {path} was not written by this server: {RECORD_NAME} has another format"
            )
        if record.get("version") != FORMAT_VERSION:
            raise UserError(
                f"checkpoint {path} has format version {str(record.get('version'))[:20]}, this server reads version {FORMAT_VERSION}"
            )
        return record


def _used(infos: Iterable[CheckpointInfo], path: str) -> int:
    """Bytes of all checkpoints but the one at `path`, which is about to be replaced."""
    return sum(info.size_bytes for info in infos if info.path != path)


def _info(path: str, record: Mapping[str, object]) -> CheckpointInfo:
    """UserError for a record of which anything is missing or has the wrong type."""
    run_id, kind, name = parse_path(path)
    try:
        named = record["arrays"]
        arrays = _ARRAYS.fullmatch(named) if isinstance(named, str) else None
        if arrays is None:
            raise ValueError("arrays, which names no file in its own directory")
        created_at = datetime.fromisoformat(_typed(record, "created_at", str))
        if created_at.utcoffset() is None:
            raise ValueError("created_at: without a time zone")
        user_metadata = _typed(record, "user_metadata", dict)
        if not all(isinstance(text, str) for item in user_metadata.items() for text in item):
            raise ValueError("user_metadata: not text")
        return CheckpointInfo(
            path=path,
            run_id=run_id,
            kind=kind,
            name=name,
            base_model=_typed(record, "base_model", str),
            lora=_lora(_typed(record, "lora", dict)),
            created_at=created_at,
            size_bytes=_typed(record, "size_bytes", int),
            step=_typed(record, "step", int),
            generation=arrays[1],
            user_metadata=dict(user_metadata),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"checkpoint {path} is damaged: {RECORD_NAME} lacks or garbles {str(error)[:200]}"
        ) from None


def _typed[T](record: Mapping[str, object], name: str, kind: type[T]) -> T:
    value = record[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name}: {kind.__name__} expected")
    return value


def _lora(fields: Mapping[str, object]) -> LoraSpec:
    lora = LoraSpec(**fields)  # type: ignore[arg-type]
    whole = (lora.rank, lora.seed)
    flags = (lora.train_attn, lora.train_mlp, lora.train_unembed)
    if (
        not (all(type(value) is int for value in whole) and all(type(flag) is bool for flag in flags))
        or lora.rank < 1
    ):
        raise ValueError("lora: wrong types")
    if type(lora.alpha) not in (int, float) or not math.isfinite(lora.alpha):
        raise ValueError("lora: alpha is no number")
    return lora


def _check(pattern: re.Pattern[str], text: str, what: str) -> None:
    if not pattern.fullmatch(text) or text in (".", ".."):
        raise UserError(f"{what} {text!r} is not allowed; use letters, digits, '.', '_' and '-', at most 200")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

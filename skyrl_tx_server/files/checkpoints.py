"""Checkpoints on disk: one directory per tinker:// path, complete or absent.

Layout: `<root>/<run_id>/<kind>/<name>/` holds `checkpoint.json` and the safetensors file it names. The arrays are
written and fsynced first under a fresh name; renaming `checkpoint.json` into place is what makes the checkpoint exist, so a crash leaves
either the old one or the new one, and an overwrite is never half done. The JSON records the arrays' size and SHA-256: a torn or foreign
directory is refused by name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from skyrl_tx_server.errors import ConflictError, NotFoundError, ServerError, UserError
from skyrl_tx_server.files.disk import check_quota, check_room
from skyrl_tx_server.files.json_file import read_json_object
from skyrl_tx_server.ops import LoraSpec

FORMAT = "skyrl_tx_server checkpoint"
FORMAT_VERSION = 1
RECORD_NAME = "checkpoint.json"
MAX_RECORD_BYTES = 1 << 20
SCHEME = "tinker://"

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")  # file systems take 255 bytes
_RUN_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")


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
    user_metadata: dict[str, str] = field(default_factory=dict)


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
        raise UserError(f"{path!r} is not a checkpoint path; expected tinker://<run>/<{'|'.join(kinds)}>/<name>")
    run_id, kind, name = segments
    _check(_RUN_ID, run_id, "run id")
    _check(_NAME, name, "checkpoint name")
    return run_id, CheckpointKind(kind), name


class CheckpointStore:
    """The checkpoints under one directory, for one base model."""

    def __init__(self, root: Path, base_model: str, base_model_hash: str | None = None, *, quota_bytes: int | None = None) -> None:
        """`base_model_hash` is the `fingerprint` of the base weights; None, here or in a checkpoint, matches any. No quota: None."""
        self._root = root
        self._base_model = base_model
        self._base_model_hash = base_model_hash
        self._quota_bytes = quota_bytes

    def exists(self, path: str) -> bool:
        return (self._directory(path) / RECORD_NAME).is_file()

    def directory(self, path: str) -> Path:
        """Where an existing checkpoint lies; what is put beside its files is deleted with it."""
        self.info(path)
        return self._directory(path)

    def info(self, path: str) -> CheckpointInfo:
        """NotFoundError when there is none; UserError when the record is torn or not ours."""
        return _info(path, self._record(path))

    def list(self, run_id: str | None = None) -> list[CheckpointInfo]:
        """Every readable checkpoint (of one run), oldest first."""
        if run_id is not None:
            _check(_RUN_ID, run_id, "run id")
        found = []
        for record in self._root.glob(f"{run_id or '*'}/*/*/{RECORD_NAME}"):
            run, kind, name = record.parts[-4:-1]
            try:
                found.append(self.info(f"tinker://{run}/{kind}/{name}"))
            except UserError:
                continue  # foreign files under the root are not ours to report; asking for one by name says what is wrong
        return sorted(found, key=lambda info: (info.created_at, info.path))

    def read(self, path: str) -> tuple[CheckpointInfo, dict[str, np.ndarray]]:
        """The checkpoint whole. UserError when it is torn, foreign, or of another base model."""
        record = self._record(path)
        info = _info(path, record)
        if info.base_model != self._base_model:
            raise UserError(f"{path} was made from base model {info.base_model}, this server runs {self._base_model}")
        made_from = record.get("base_model_hash")
        if None not in (made_from, self._base_model_hash) and made_from != self._base_model_hash:
            raise UserError(
                f"{path} was made from other weights called {info.base_model}: its base_model_hash is another than this model's"
            )
        arrays_file = self._directory(path) / _arrays_name(path, record)
        damaged = UserError(f"checkpoint {path} is damaged: {arrays_file.name} is missing or does not match its record; save it again")
        try:
            if arrays_file.stat().st_size != info.size_bytes or _sha256(arrays_file) != record["sha256"]:
                raise damaged
            return info, load_file(arrays_file)
        except FileNotFoundError:  # or deleted while it is read
            raise damaged from None

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

        ConflictError when the name is taken and `overwrite` is not set; ServerError when the disk has no room and UserError when the
        quota leaves none, with all as it was.
        """
        directory = self._directory(path)
        record_file = directory / RECORD_NAME
        if record_file.exists() and not overwrite:
            raise ConflictError(f"checkpoint {path} exists already; choose another name, or overwrite it")
        self._root.mkdir(parents=True, exist_ok=True)
        num_bytes = sum(np.asarray(value).nbytes for value in arrays.values())
        if self._quota_bytes is not None:
            check_quota(sum(info.size_bytes for info in self.list() if info.path != path), num_bytes, self._quota_bytes)
        check_room(self._root, num_bytes)
        arrays_file = directory / f"arrays-{uuid.uuid4().hex}.safetensors"
        unnamed_record = directory / f"{RECORD_NAME}.{uuid.uuid4().hex}"
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
            arrays_file.unlink(missing_ok=True)
            unnamed_record.unlink(missing_ok=True)
            if isinstance(error, OSError | SafetensorError):
                raise ServerError(f"cannot write checkpoint {path}, nothing saved before is lost: {error}") from error
            raise
        with contextlib.suppress(FileNotFoundError):  # deleted again already
            _fsync(directory)
            for leftover in directory.iterdir():  # the arrays of the checkpoint just replaced, or of a write that was killed
                if leftover not in (arrays_file, record_file):
                    leftover.unlink()
        return _info(path, record)

    def delete(self, path: str) -> None:
        """It is gone at once and whole: a save under the same name meanwhile either comes before, or fails for want of its directory."""
        self._record(path)
        grave = self._root / f".deleted-{uuid.uuid4().hex}"
        try:
            self._directory(path).rename(grave)
        except FileNotFoundError:  # someone else was faster
            raise NotFoundError(f"no checkpoint {path}") from None
        shutil.rmtree(grave)

    def _directory(self, path: str) -> Path:
        run_id, kind, name = parse_path(path)
        return self._root / run_id / kind / name

    def _record(self, path: str) -> dict[str, object]:
        record_file = self._directory(path) / RECORD_NAME
        try:
            record = read_json_object(record_file, max_bytes=MAX_RECORD_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"no checkpoint {path}") from None
        except ValueError as error:
            raise UserError(f"checkpoint {path} is damaged: {RECORD_NAME} is not JSON ({error})") from None
        except OSError as error:
            raise UserError(f"checkpoint {path} cannot be read: {RECORD_NAME}: {error.strerror}") from None
        if record.get("format") != FORMAT:
            raise UserError(f"checkpoint {path} was not written by this server: {RECORD_NAME} has another format")
        if record.get("version") != FORMAT_VERSION:
            raise UserError(f"checkpoint {path} has format version {record.get('version')}, this server reads version {FORMAT_VERSION}")
        return record


def _info(path: str, record: Mapping[str, object]) -> CheckpointInfo:
    run_id, kind, name = parse_path(path)
    try:
        return CheckpointInfo(
            path=path,
            run_id=run_id,
            kind=kind,
            name=name,
            base_model=str(record["base_model"]),
            lora=_lora(record["lora"]),
            created_at=_in_utc(str(record["created_at"])),
            size_bytes=int(str(record["size_bytes"])),
            step=int(str(record["step"])),
            user_metadata={str(key): str(value) for key, value in dict(record["user_metadata"]).items()},  # type: ignore[call-overload]
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"checkpoint {path} is damaged: {RECORD_NAME} lacks or garbles {error}") from None


def _in_utc(text: str) -> datetime:
    """Also where the record names no zone: times with and without one cannot be compared."""
    made = datetime.fromisoformat(text)
    return made.replace(tzinfo=UTC) if made.tzinfo is None else made.astimezone(UTC)


def _lora(value: object) -> LoraSpec:
    """ValueError or TypeError for what is no LoraSpec."""
    spec = LoraSpec(**value)  # type: ignore[arg-type]
    numbers, flags = (spec.rank, spec.seed), (spec.train_attn, spec.train_mlp, spec.train_unembed)
    if not all(type(number) is int for number in numbers) or not all(type(flag) is bool for flag in flags) or spec.rank < 1:
        raise ValueError("lora")
    if not math.isfinite(spec.alpha) or spec.alpha <= 0:
        raise ValueError("lora")
    return spec


def _arrays_name(path: str, record: Mapping[str, object]) -> str:
    """The arrays lie beside the record and nowhere else."""
    name = record.get("arrays")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (".", ".."):
        raise UserError(f"checkpoint {path} is damaged: {RECORD_NAME} names no file in its own directory")
    return name


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

"""The record of a checkpoint, `checkpoint.json`: its base model, LoRA settings and the name of its arrays
file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from skyrl_tx_server.engine.operations import LoraSpec
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.files.json_file import read_json_object

FORMAT = "skyrl_tx_server checkpoint"
FORMAT_VERSION = 1
MAX_RECORD_BYTES = 64 << 20
RECORD_NAME = "checkpoint.json"
SCHEME = "tinker://"
ARRAYS_NAME = re.compile(r"arrays-([0-9a-f]{32})\.safetensors")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")  # file systems accept names of up to 255 bytes
_RUN_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")


class CheckpointKind(StrEnum):
    """The middle segment of a tinker:// path."""

    TRAINING = "weights"
    SAMPLER = "sampler_weights"
    EXTERNAL = "external_weights"  # for download


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """A checkpoint without its arrays."""

    path: str  # tinker://<run_id>/<kind>/<name>
    run_id: str
    kind: CheckpointKind
    name: str
    base_model: str
    lora: LoraSpec
    created_at: datetime  # UTC
    size_bytes: int  # the size of the arrays file
    step: int  # number of optimizer steps taken
    generation: str  # identifies the arrays; every save creates a new generation
    sha256: str  # of the arrays file
    base_model_hash: str | None  # the `fingerprint` of the base weights; None: unknown
    user_metadata: dict[str, str] = field(default_factory=dict)


def checkpoint_path(run_id: str, kind: CheckpointKind, name: str) -> str:
    return f"{SCHEME}{run_id}/{kind}/{name}"


def is_on_disk(weights: str) -> bool:
    """Return whether `weights`, the name of sampler weights, is the path of a checkpoint. Sampler weights
    with any other name exist in memory only."""
    return weights.startswith(SCHEME)


def parse_path(path: str) -> tuple[str, CheckpointKind, str]:
    """Split tinker://<run>/<weights|sampler_weights|external_weights>/<name> into (run, kind, name). Raise
    UserError if `path` has another form."""
    segments = path.removeprefix(SCHEME).split("/")
    kinds = [str(kind) for kind in CheckpointKind]
    if not path.startswith(SCHEME) or len(segments) != 3 or segments[1] not in kinds:
        raise UserError(
            f"{path!r} is not a checkpoint path; expected tinker://<run>/<{'|'.join(kinds)}>/<name>"
        )
    run_id, kind, name = segments
    check_run_id(run_id)
    _check(_NAME, name, "checkpoint name", "'.', '_' and '-'")
    return run_id, CheckpointKind(kind), name


def check_run_id(run_id: str) -> None:
    """Raise UserError if `run_id` is not a valid id of a training run."""
    _check(_RUN_ID, run_id, "run id", "'.', '_', ':' and '-'")


def read_record(path: str, record_file: Path) -> dict[str, object]:
    """Return the record of the checkpoint `path`. Raise UserError if another program or version wrote it, and
    OSError or ValueError if it cannot be read."""
    record = read_json_object(record_file, max_bytes=MAX_RECORD_BYTES, follow_links=False)
    if record.get("format") != FORMAT:
        raise UserError(f"checkpoint {path} was not written by this server: {RECORD_NAME} has another format")
    if record.get("version") != FORMAT_VERSION:
        raise UserError(
            f"checkpoint {path} has format version {str(record.get('version'))[:20]}, but this server reads "
            f"version {FORMAT_VERSION}; use the version of the server that wrote it"
        )
    return record


def checkpoint_info(path: str, record: Mapping[str, object]) -> CheckpointInfo:
    """Parse a record. Raise UserError if a field is missing or has the wrong type."""
    run_id, kind, name = parse_path(path)
    try:
        arrays = ARRAYS_NAME.fullmatch(typed(record, "arrays", str))
        if arrays is None:
            raise ValueError("arrays: not a file name of the form arrays-<hex digits>.safetensors")
        base_model_hash = record.get("base_model_hash")
        return CheckpointInfo(
            path=path,
            run_id=run_id,
            kind=kind,
            name=name,
            base_model=typed(record, "base_model", str),
            lora=parse_lora_spec(typed(record, "lora", dict)),
            created_at=parse_time(record["created_at"]),
            size_bytes=typed(record, "size_bytes", int),
            step=typed(record, "step", int),
            generation=arrays[1],
            sha256=str(record.get("sha256")),
            base_model_hash=None if base_model_hash is None else str(base_model_hash),
            user_metadata=parse_metadata(record["user_metadata"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"checkpoint {path} is damaged: a field of {RECORD_NAME} is missing or invalid: "
            f"{str(error)[:200]}"
        ) from None


def typed[T](record: Mapping[str, object], name: str, kind: type[T]) -> T:
    """Return a field. Raise KeyError if it is missing, and ValueError if it has the wrong type."""
    value = record[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name}: {kind.__name__} expected")
    return value


def parse_time(text: object) -> datetime:
    """Return a time in ISO format. Raise ValueError if it is invalid or has no time zone."""
    time = datetime.fromisoformat(str(text))
    if time.utcoffset() is None:
        raise ValueError(f"{time}: without a time zone")
    return time


def parse_metadata(metadata: object) -> dict[str, str]:
    """Return user metadata. Raise ValueError if `metadata` is not an object with text values."""
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("user_metadata: not text")
    return dict(metadata)


def parse_lora_spec(fields: Mapping[str, object]) -> LoraSpec:
    """Return the LoRA settings of a record. Raise TypeError or ValueError if they are invalid."""
    lora = LoraSpec(**fields)  # type: ignore[arg-type]
    integers = (lora.rank, lora.seed)
    flags = (lora.train_attn, lora.train_mlp, lora.train_unembed)
    if not (all(type(value) is int for value in integers) and all(type(flag) is bool for flag in flags)):
        raise ValueError("lora: wrong types")
    if lora.rank < 1:
        raise ValueError("lora: rank is less than 1")
    if type(lora.alpha) not in (int, float) or not math.isfinite(lora.alpha):
        raise ValueError("lora: alpha is not a number")
    return lora


def _check(pattern: re.Pattern[str], text: str, kind: str, punctuation: str) -> None:
    if not pattern.fullmatch(text) or text in (".", ".."):
        raise UserError(f"{kind} {text!r} is not allowed; use 1 to 200 letters, digits, {punctuation}")

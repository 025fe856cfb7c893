"""The index of training runs, of public checkpoints and of the expiry times of checkpoints. It is kept across
restarts.

Each line of `<checkpoints_dir>/ledger.jsonl` is a JSON object with one fact: a training run, the expiry time
of a checkpoint, or whether a checkpoint is public. A line replaces earlier lines of the same kind about the
same run or checkpoint, and unreadable lines are skipped. New lines are appended. When most lines are out of
date, the file is compacted: a new file with the current lines is written and renamed into place. Its first
line has a random id, by which other servers notice the new file. The lines of one tenant's runs take at most
`MAX_RUN_BYTES`. Above this limit the oldest run is removed from the index; its checkpoints are kept.

Several servers may use one directory. A server reads the new lines of the others before it rewrites the file,
before it changes an expiry time or a public flag, after it appends a line, and whenever it looks for expired
checkpoints (every few seconds, see `http.app`). Until then it does not know what another server has recorded.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import logging
import os
import uuid
from collections import OrderedDict
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from skyrl_tx_server.engine.operations import LoraSpec
from skyrl_tx_server.engine.tenants import owner_of
from skyrl_tx_server.errors import StorageError
from skyrl_tx_server.files.checkpoint_record import parse_lora_spec, parse_metadata, parse_time, typed

logger = logging.getLogger(__name__)

MAX_METADATA_BYTES = 16 << 10
"""`JsonReader.metadata` refuses larger metadata of a request, and the index drops them when it is read."""
MAX_RUN_BYTES = 16 << 20
COMPACTION_SLACK = 1 << 20
"""The file is rewritten when its size exceeds twice the bytes of its current lines plus this number."""
MAX_HEADER_BYTES = 256
"""The number of bytes of the first line that are compared. The first line of a compacted file is shorter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """A training run of this server. It remains after its model is unloaded."""

    run_id: str
    base_model: str
    lora: LoraSpec
    created_at: datetime
    user_metadata: dict[str, str] = field(default_factory=dict)  # at most MAX_METADATA_BYTES


@dataclass(kw_only=True, slots=True)
class _Sizes:
    read: int = 0  # bytes of the lines that `_refresh` has applied
    current: int = 0  # bytes of the lines that compaction would keep, when they were last counted
    # inode and first line of the file that `_refresh` has read; a new file can get the inode of a deleted one
    identity: tuple[int, bytes] = (0, b"")


class RunIndex:
    """The training runs of all tenants, and the expiry times and public flags of their checkpoints. A view,
    which `for_tenant` returns, contains only the runs of one tenant, but the facts about all checkpoints.
    Only the event loop changes the index. A method that cannot write its line raises StorageError and
    changes nothing."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tenant: str | None = None  # None: the runs of all tenants
        self._runs: dict[str, OrderedDict[str, TrainingRun]] = {}  # owner -> runs by id, oldest first
        self._run_bytes: dict[str, int] = {}  # owner -> bytes of the lines of the owner's runs
        self._sizes = _Sizes()
        self.expiries: dict[str, datetime] = {}  # tinker:// path -> when to delete the checkpoint
        self._expiring: dict[str, str] = {}  # tinker:// path -> the only generation that expires
        self.public: set[str] = set()  # tinker:// paths of the public checkpoints
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        self._refresh()
        self._compact_if_due()

    def for_tenant(self, tenant: str) -> RunIndex:
        """Return a view with the runs of one tenant."""
        view = copy.copy(self)
        view._tenant = tenant
        return view

    # --- reading

    @property
    def runs(self) -> dict[str, TrainingRun]:
        """Training runs by id, in the order of creation."""
        if self._tenant is not None:
            return dict(self._runs.get(self._tenant, {}))
        return {run_id: run for runs in self._runs.values() for run_id, run in runs.items()}

    def run(self, run_id: str) -> TrainingRun | None:
        owner = owner_of(run_id)
        return self._runs.get(owner, {}).get(run_id) if self._tenant in (None, owner) else None

    def expiry(self, path: str, generation: str) -> datetime | None:
        """Return the time at which this generation of a checkpoint is deleted; None: never. A generation is
        one save of the checkpoint."""
        return self.expiries.get(path) if self._expiring.get(path, generation) == generation else None

    def expired(self) -> list[str]:
        self._refresh()
        return [path for path in self.expiries if self.has_expired(path)]

    def has_expired(self, path: str) -> bool:
        expires_at = self.expiries.get(path)
        return expires_at is not None and expires_at <= datetime.now(UTC)

    def expiring_generation(self, path: str) -> str | None:
        """Return the only generation of the checkpoint that expires; None: every generation expires."""
        return self._expiring.get(path)

    # --- adding facts

    def record_run(self, run: TrainingRun) -> None:
        """Add a run."""
        self._append(_run_to_json(run))

    def set_expiry(self, path: str, expires_at: datetime | None, generation: str | None = None) -> None:
        """Set the time at which a checkpoint expires; None: never. With `generation`, only this generation
        expires."""
        self._refresh()
        if expires_at is None and path not in self.expiries:
            return
        self._append(_expiry_to_json(path, expires_at, generation))

    def set_public(self, path: str, public: bool) -> None:
        self._refresh()
        if public == (path in self.public):
            return
        self._append({"path": path, "public": public})

    def forget(self, path: str, generation: str | None = None) -> None:
        """Remove the facts about a deleted checkpoint. With `generation`, an expiry that is set for another
        generation stays."""
        if generation is None or self._expiring.get(path, generation) == generation:
            self.set_expiry(path, None)
        self.set_public(path, False)

    # --- in memory

    def _refresh(self) -> None:
        """Apply the lines that were added since the last call. Start again if another server has rewritten
        the file."""
        sizes = self._sizes
        with contextlib.suppress(FileNotFoundError), self._file.open("rb") as lines:
            status = os.fstat(lines.fileno())
            identity = status.st_ino, lines.readline(MAX_HEADER_BYTES)
            if identity != sizes.identity or status.st_size < sizes.read:
                sizes.identity, sizes.read, sizes.current = identity, 0, 0
                for facts in (self._runs, self._run_bytes, self.expiries, self._expiring):
                    facts.clear()
                self.public.clear()
            lines.seek(sizes.read)
            for line in lines:
                if not line.endswith(b"\n") and not _is_json(line):
                    break  # another server is writing this line, or a crash left it incomplete
                sizes.read += len(line)
                if line.strip():
                    self._replay(line)

    def _replay(self, line: bytes) -> None:
        try:
            fact = json.loads(line)
            if not isinstance(fact, dict):
                raise TypeError("not an object")
            if "run_id" in fact:
                self._apply_run(_run_from_json(fact))
                return
            path = fact["path"]
            if not isinstance(path, str):
                raise TypeError("path: not text")
            if "public" in fact:
                (self.public.add if fact["public"] else self.public.discard)(path)
                return
            expires_at, generation = fact["expires_at"], fact.get("generation")
            expires_at = None if expires_at is None else parse_time(expires_at)
            self._apply_expiry(path, expires_at, generation if isinstance(generation, str) else None)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("%s: skipped a damaged line (%s): %s", self._file, str(error)[:100], line[:80])

    def _apply_run(self, run: TrainingRun) -> None:
        owner = owner_of(run.run_id)
        runs = self._runs.setdefault(owner, OrderedDict())
        self._forget_run(owner, run.run_id)
        runs[run.run_id] = run
        self._run_bytes[owner] = self._run_bytes.get(owner, 0) + _num_bytes(_run_to_json(run))
        while self._run_bytes[owner] > MAX_RUN_BYTES:
            self._forget_run(owner, next(iter(runs)))

    def _forget_run(self, owner: str, run_id: str) -> None:
        if (run := self._runs[owner].pop(run_id, None)) is not None:
            self._run_bytes[owner] -= _num_bytes(_run_to_json(run))

    def _apply_expiry(self, path: str, expires_at: datetime | None, generation: str | None) -> None:
        self._expiring.pop(path, None)
        if expires_at is None:
            self.expiries.pop(path, None)
        else:
            self.expiries[path] = expires_at
            if generation is not None:
                self._expiring[path] = generation

    # --- on disk

    def _append(self, fact: dict[str, object]) -> None:
        """Append a line and apply it."""
        # The leading newline ends a line that a crash left incomplete, so only that fact is lost.
        line = ("\n" + json.dumps(fact)).encode()
        try:
            with self._locked() as descriptor:
                size = os.fstat(descriptor).st_size
                try:
                    written = 0
                    while written < len(line):
                        written += os.write(descriptor, line[written:])
                except OSError:
                    os.ftruncate(descriptor, size)
                    raise
        except OSError as error:
            raise StorageError(
                f"{self._file} cannot be written: {error.strerror}; free some disk space, or make the file "
                "writable, and try again"
            ) from error
        self._refresh()
        self._compact_if_due()

    def _compact_if_due(self) -> None:
        if not self._is_compaction_due():
            return
        self._sizes.current = sum(_num_bytes(fact) for fact in self._facts())
        if not self._is_compaction_due():
            return
        new_file = self._file.with_name(f".{self._file.name}.new")
        try:
            with self._locked(), new_file.open("w") as stream:
                self._refresh()
                # older servers read this line as a checkpoint that does not expire
                stream.write(json.dumps({"path": "", "expires_at": None, "file_id": uuid.uuid4().hex}))
                for fact in self._facts():
                    stream.write("\n" + json.dumps(fact))
                stream.flush()
                os.fsync(stream.fileno())
                os.replace(new_file, self._file)
        except OSError as error:
            logger.warning("%s cannot be compacted: %s", self._file, error)
            new_file.unlink(missing_ok=True)
            self._sizes.current = self._sizes.read  # try again when the file has grown
        else:
            self._refresh()

    def _is_compaction_due(self) -> bool:
        return self._sizes.read > 2 * self._sizes.current + COMPACTION_SLACK

    @contextlib.contextmanager
    def _locked(self) -> Generator[int]:
        """Open the file for appending, and lock it against the other servers."""
        while True:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                with contextlib.suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                # another server may have renamed a new file into place
                if self._file.exists() and os.path.samestat(self._file.stat(), os.fstat(descriptor)):
                    yield descriptor
                    return
            finally:
                os.close(descriptor)

    def _facts(self) -> Iterator[dict[str, object]]:
        for runs in self._runs.values():
            for run in runs.values():
                yield _run_to_json(run)
        for path, expires_at in self.expiries.items():
            yield _expiry_to_json(path, expires_at, self._expiring.get(path))
        for path in sorted(self.public):
            yield {"path": path, "public": True}


def metadata_bytes(metadata: dict[str, str]) -> int:
    return sum(len(name.encode()) + len(text.encode()) for name, text in metadata.items())


def _num_bytes(fact: dict[str, object]) -> int:
    return len(json.dumps(fact))


def _run_to_json(run: TrainingRun) -> dict[str, object]:
    return {**asdict(run), "created_at": run.created_at.isoformat()}


def _expiry_to_json(path: str, expires_at: datetime | None, generation: str | None) -> dict[str, object]:
    when = None if expires_at is None else expires_at.isoformat()
    fact: dict[str, object] = {"path": path, "expires_at": when}
    return fact if generation is None else {**fact, "generation": generation}


def _run_from_json(fact: dict[str, Any]) -> TrainingRun:
    """Parse a run. Raise ValueError, KeyError or TypeError if it is invalid. Drop metadata over the limit."""
    metadata = parse_metadata(fact.get("user_metadata", {}))
    if metadata_bytes(metadata) > MAX_METADATA_BYTES:
        logger.warning("dropped the metadata of %s, which are too large", str(fact["run_id"])[:80])
        metadata = {}
    for name in ("run_id", "base_model"):
        typed(fact, name, str)
    fields: dict[str, Any] = fact | {
        "lora": parse_lora_spec(fact["lora"]),
        "created_at": parse_time(fact["created_at"]),
        "user_metadata": metadata,
    }
    return TrainingRun(**fields)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True

"""What the HTTP side must remember across restarts and no checkpoint holds: training runs, when checkpoints expire, which are public.

One line of JSON per fact in `<checkpoints_dir>/ledger.jsonl`, appended and never rewritten; a later line about the same thing wins, and a
torn last line (the machine lost power) is skipped.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from skyrl_tx_server.ops import LoraSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """A model that was trained here, alive or not."""

    run_id: str
    base_model: str
    lora: LoraSpec
    created_at: datetime
    user_metadata: dict[str, str] = field(default_factory=dict)


class Ledger:
    def __init__(self, file: Path) -> None:
        self._file = file
        self.runs: dict[str, TrainingRun] = {}  # in the order of their making
        self.expiries: dict[str, datetime] = {}  # tinker:// path -> when to delete it
        self.public: set[str] = set()  # tinker:// paths
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        for line in filter(None, file.read_text().splitlines()):
            self._replay(line)

    def _replay(self, line: str) -> None:
        try:
            fact = json.loads(line)
            if "run_id" in fact:
                run = TrainingRun(**{**fact, "lora": LoraSpec(**fact["lora"]), "created_at": datetime.fromisoformat(fact["created_at"])})
                self.runs[run.run_id] = run
            elif "public" in fact:
                (self.public.add if fact["public"] else self.public.discard)(fact["path"])
            elif fact["expires_at"] is None:
                self.expiries.pop(fact["path"], None)
            else:
                self.expiries[fact["path"]] = datetime.fromisoformat(fact["expires_at"])
        except (ValueError, KeyError, TypeError):
            logger.warning("%s: skipped a damaged line: %s", self._file, line[:80])

    def _append(self, fact: dict[str, object]) -> None:
        # The leading newline ends a line that a crash left torn, so that it costs one fact and not two.
        with self._file.open("a") as stream:
            stream.write("\n" + json.dumps(fact))

    def record_run(self, run: TrainingRun) -> None:
        self.runs[run.run_id] = run
        self._append({**asdict(run), "created_at": run.created_at.isoformat()})

    def set_expiry(self, path: str, expires_at: datetime | None) -> None:
        """None: keep it for ever."""
        if expires_at is None:
            if self.expiries.pop(path, None) is None:
                return
        else:
            self.expiries[path] = expires_at
        self._append({"path": path, "expires_at": None if expires_at is None else expires_at.isoformat()})

    def set_public(self, path: str, public: bool) -> None:
        if public != (path in self.public):
            (self.public.add if public else self.public.discard)(path)
            self._append({"path": path, "public": public})

    def forget(self, path: str) -> None:
        """The checkpoint is gone; one that takes its name begins anew."""
        self.set_expiry(path, None)
        self.set_public(path, False)

    def expired(self) -> list[str]:
        now = datetime.now(UTC)
        return [path for path, expires_at in self.expiries.items() if expires_at <= now]

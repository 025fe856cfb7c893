"""The adapters of the external sampler, which is a vLLM or SGLang server that samples the completions.

The operation `SaveSampler` writes a sampler snapshot, which is a copy of a model's adapter, in PEFT format.
The external sampler loads the adapter at once and unloads it when the snapshot is dropped. If the adapter was
unloaded or lost in the meantime, the next sample loads it again. If a checkpoint has no adapter in PEFT
format on disk, the adapter is written and loaded before the next sample that uses the checkpoint. When this
server starts, it deletes the adapters that an earlier process wrote.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from skyrl_tx_server.engine.operations import SampleResult, WeightsSaved
from skyrl_tx_server.errors import NotFoundError, ServerError
from skyrl_tx_server.external.background_tasks import BackgroundTasks
from skyrl_tx_server.external.server import ExternalServer
from skyrl_tx_server.files.checkpoint_record import is_on_disk
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.files.peft_files import write_adapter

PREFIX = "adapter-"

type AgreedTokens = Counter[bool]
"""Number of tokens whose logprobs `ExternalSampling` has compared with those of this server and accepted. The
key is True for samples whose temperature scales the logits (any temperature except 0 and 1), and False for
all other samples."""


@dataclass(kw_only=True, slots=True, eq=False)
class ExternalAdapter:
    """A sampler snapshot that the external sampler can load."""

    weights: str  # the name of the snapshot; a tinker:// path for a checkpoint on disk
    directory: Path  # contains the adapter in PEFT format
    saved: Future[WeightsSaved] | None  # done when the directory is written; None: `_load` writes it
    loaded: asyncio.Task[str] | None = None  # returns the name of the loaded adapter; None: not loaded
    users: set[Future[SampleResult]] = field(default_factory=set)  # samples that use the snapshot
    agreed: AgreedTokens = field(default_factory=Counter)

    @property
    def has_failed(self) -> bool:
        """Whether the last attempt to load the adapter has failed."""
        loaded = self.loaded
        return loaded is not None and loaded.done() and (loaded.cancelled() or loaded.exception() is not None)


class ExternalAdapters:
    """The snapshots that the external sampler has loaded or can load. All methods except `_write` run on the
    event loop."""

    def __init__(
        self,
        server: ExternalServer,
        checkpoints: CheckpointStore,
        tasks: BackgroundTasks,
        *,
        root: Path,
        max_loaded: int,
    ) -> None:
        """Write adapters below `root` and delete the adapters of an earlier process there. No other server
        may use this directory. While more than `max_loaded` adapters are loaded, unload unused ones."""
        self._server = server
        self._checkpoints = checkpoints
        self._tasks = tasks
        self._root = root
        self._max_loaded = max_loaded
        self._adapters: dict[str, ExternalAdapter] = {}  # by weights, the least recently used first
        for directory in root.glob(f"{PREFIX}*"):
            shutil.rmtree(directory, ignore_errors=True)

    @property
    def num_loaded(self) -> int:
        """The number of adapters that are loaded or being loaded."""
        return sum(
            adapter.loaded is not None and not adapter.has_failed for adapter in self._adapters.values()
        )

    def new_directory(self) -> Path:
        return self._root / f"{PREFIX}{uuid.uuid4().hex}"

    def add(self, weights: str, directory: Path, saved: Future[WeightsSaved]) -> None:
        """Add a snapshot and load it. The operation with the future `saved` writes the adapter of the
        snapshot to `directory`. An earlier snapshot with the same name is dropped."""
        self.drop(weights)
        self._adapters[weights] = ExternalAdapter(weights=weights, directory=directory, saved=saved)
        self.load(self._adapters[weights])

    def use(self, weights: str) -> ExternalAdapter:
        """Return a snapshot and mark it as most recently used. Raise NotFoundError if the snapshot is not a
        checkpoint and does not exist. A missing checkpoint is reported when its adapter is loaded."""
        adapter = self._adapters.pop(weights, None)
        if adapter is None:
            if not is_on_disk(weights):
                raise NotFoundError(
                    f"no sampler snapshot {weights}: it was never saved, or was freed with its session; "
                    "save the weights again"
                )
            adapter = ExternalAdapter(weights=weights, directory=self.new_directory(), saved=None)
        self._adapters[weights] = adapter
        return adapter

    def drop(self, weights: str) -> asyncio.Task[None]:
        """Remove a snapshot. The returned task ends when no sample uses the snapshot. The adapter is then
        unloaded and its directory is deleted."""
        return self._tasks.run(self._drop_when_unused(self._adapters.pop(weights, None)))

    def load(self, adapter: ExternalAdapter) -> asyncio.Task[str]:
        """Return the task that loads an adapter. Start a new task if there is none or the last one failed."""
        if adapter.loaded is None or adapter.has_failed:
            adapter.loaded = self._tasks.run(self._load(adapter))
        return adapter.loaded

    async def _load(self, adapter: ExternalAdapter) -> str:
        if adapter.saved is not None:
            saved = asyncio.wrap_future(adapter.saved)
            await asyncio.wait({saved})
            if saved.cancelled() or saved.exception() is not None:
                if not is_on_disk(adapter.weights):
                    raise NotFoundError(f"no sampler snapshot {adapter.weights}: saving it failed")
                # An earlier request may have saved a checkpoint with this name. Load that checkpoint.
                adapter.saved, adapter.directory = None, self.new_directory()
        if adapter.saved is None and not adapter.directory.exists():
            await asyncio.to_thread(self._write, adapter)
        self._make_room()
        return await self._server.load(adapter.directory)

    def _write(self, adapter: ExternalAdapter) -> None:
        info, arrays = self._checkpoints.read(adapter.weights)
        incomplete = self.new_directory()
        try:
            write_adapter(incomplete, arrays, info.lora, info.base_model, "float32")
            incomplete.rename(adapter.directory)
        except BaseException:
            shutil.rmtree(incomplete, ignore_errors=True)
            raise

    def _make_room(self) -> None:
        """While more than `max_loaded` adapters are loaded, unload the least recently used adapters that no
        sample uses. The adapter files of a checkpoint are also deleted, because they can be written again
        from the checkpoint. The adapter files of a snapshot that is not on disk are kept."""
        unused = [
            adapter
            for adapter in self._adapters.values()
            if adapter.loaded and adapter.loaded.done() and not adapter.has_failed and not adapter.users
        ]
        for adapter in unused[: max(0, self.num_loaded - self._max_loaded)]:
            if is_on_disk(adapter.weights):
                self.drop(adapter.weights)
            else:
                self._tasks.run(self._unload(adapter))

    async def _drop_when_unused(self, adapter: ExternalAdapter | None) -> None:
        if adapter is not None:
            await asyncio.gather(
                *(asyncio.wrap_future(future) for future in adapter.users), return_exceptions=True
            )
            self._tasks.run(self._delete(adapter))

    async def _delete(self, adapter: ExternalAdapter) -> None:
        await self._unload(adapter)
        await asyncio.to_thread(shutil.rmtree, adapter.directory, ignore_errors=True)

    async def _unload(self, adapter: ExternalAdapter) -> None:
        loaded, adapter.loaded = adapter.loaded, None
        if loaded is not None:
            with suppress(ServerError):  # loading failed, or the external sampler has stopped
                await self._server.unload(await asyncio.shield(loaded))

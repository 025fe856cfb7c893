"""Saves and records the checkpoints of a run, at most one for each step."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from src.core.errors import BackendError
from src.core.process import deadline
from src.policy.backend import Backend
from src.records import checkpoints
from src.records.checkpoints import Checkpoint
from src.records.journal import Journal
from src.rollouts.run_events import RunEvents
from src.rollouts.watchdog import Watchdog

logger = logging.getLogger(__name__)


class CheckpointSaver:
    """Saves the weights of a run. `steps_done` is the step of the checkpoint from which the run continues; 0
    for a new run."""

    def __init__(
        self,
        backend: Backend,
        watchdog: Watchdog,
        journal: Journal,
        events: RunEvents,
        *,
        log_path: Path,
        steps_done: int,
        stop_timeout_s: float,
    ) -> None:
        self._backend = backend
        self._watchdog = watchdog
        self._journal = journal
        self._events = events
        self._log_path = log_path
        self._stop_timeout_s = stop_timeout_s
        self._saved_step = steps_done or None  # a resumed run starts from the checkpoint of this step

    async def save(self, step: int, *, epoch: int, final: bool) -> None:
        """Save a checkpoint of the weights after `step`, unless it is already saved."""
        if self._saved_step == step:
            return
        name = f"{step:06d}"
        paths = await self._watchdog.answer(self._backend.save(name), f"saving checkpoint {name}")
        checkpoints.append(
            self._log_path,
            Checkpoint(
                name=name,
                batch=step,
                epoch=epoch,
                final=final,
                state_path=paths.state_path,
                sampler_path=paths.sampler_path,
            ),
        )
        self._journal.checkpointed(step, paths.state_path)
        self._saved_step = step
        self._events.say(f"checkpoint after step {step}: {paths.state_path}")

    async def save_after_failure(
        self, step: int, *, epoch: int, final: bool, is_update_pending: bool
    ) -> None:
        """Save the weights of a run that failed or was stopped.

        Nothing is saved if `is_update_pending`, because the server may have trained a further step.

        An error of the save is reported and not raised, so that it does not hide the error that ended the
        run. A server that does not answer delays the end of the process by at most `stop_timeout_s`.
        """
        limit_s = self._stop_timeout_s
        too_late = f"not saved within stop_timeout_s={limit_s:g}"
        if is_update_pending:
            self._events.say(
                f"no checkpoint is saved: it is unknown whether the server has trained step {step + 1}"
            )
            return
        try:
            async with deadline(limit_s, BackendError, too_late):
                await self._backend.check()
                await self.save(step, epoch=epoch, final=final)
        except asyncio.CancelledError:
            self._events.say(f"no checkpoint was saved after step {step}: {too_late}")
            raise
        except Exception as error:
            reason = f"{type(error).__name__} {error}".rstrip()
            self._events.say(f"no checkpoint could be saved after step {step}: {reason}")
            logger.debug("the checkpoint after a failure could not be saved", exc_info=True)

"""The steps of a run: how many are done, their metrics, and when they are evaluated and saved.

`src/terminus2_trainer.py` and `src/sft/trainer.py` use this module. The journal records a step after the
server has updated the weights, and a checkpoint is saved after the metrics of its step are logged. A resumed
run repeats the steps after its last checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from src.config import LoopOptions
from src.core.errors import BackendError, StorageError
from src.core.process import deadline
from src.core.shielding import run_to_its_end
from src.evaluate.training_events import TrainingEvents
from src.policy.backend import Backend
from src.records import checkpoints
from src.records.checkpoints import Checkpoint
from src.records.journal import GroupKey, Journal
from src.records.run_directory import RunDirectory
from src.records.tracking import RunLog
from src.rollouts.watchdog import Watchdog

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class StepLine:
    """The metrics of a step, and whether they contain those of its evaluation."""

    metrics: dict[str, float]
    is_evaluated: bool = False


class TrainingSteps:
    """Records the steps of a process of a run, and saves its weights.

    `done` is the number of training steps that produced the weights on the server. `epoch` is the epoch of
    the current step. `has_evaluations` is false if no step of the run is evaluated.
    """

    def __init__(
        self,
        config: LoopOptions,
        *,
        backend: Backend,
        watchdog: Watchdog,
        journal: Journal,
        run_log: RunLog,
        events: TrainingEvents,
        directory: RunDirectory,
        num_steps: int,
        has_evaluations: bool = True,
    ) -> None:
        self.done = directory.steps_done
        self.epoch = 0
        self._config = config
        self._backend = backend
        self._watchdog = watchdog
        self._journal = journal
        self._run_log = run_log
        self._events = events
        self._directory = directory
        self._num_steps = num_steps
        self._has_evaluations = has_evaluations
        self._saved_step = self.done or None  # a resumed run starts from the checkpoint of this step
        self._is_update_pending = False  # whether an update has begun and has no result yet

    @property
    def is_evaluation_due(self) -> bool:
        """Whether the weights after the steps that are done must be evaluated."""
        is_last = self.done == self._num_steps
        return self._has_evaluations and (is_last or _is_due(self.done, self._config.eval_every))

    def begin(self) -> None:
        """Record and announce the start of this process. Metrics of steps that it repeats are removed."""
        if self._directory.checkpoint is not None:
            state_path = self._directory.checkpoint.state_path
            self._events.say(f"resuming after step {self.done}: {state_path}")
        self._events.say(f"files: {self._directory.path}")
        self._run_log.forget_from(self.done + 1 if self.done else 0)
        self._journal.started(resumed_from=self.done)

    async def evaluate_start(
        self, evaluate: Callable[[], Awaitable[dict[str, float]]], *, is_initial_due: bool
    ) -> None:
        """Evaluate the weights with which this process starts, if this evaluation is due. `is_initial_due`
        says whether the evaluation of step 0 is due.

        An evaluation in the journal is not repeated, except at step 0: a process that starts from step 0 has
        removed all earlier metrics, so it logs the metrics of step 0 again.
        """
        if self.done == 0:
            if is_initial_due:
                self._run_log.log(0, await evaluate())
                self._journal.evaluated(0)
        elif not self._journal.is_evaluated(self.done):
            if self.is_evaluation_due:  # an earlier process stopped before evaluating
                self._run_log.amend(self.done, await evaluate())
                self._journal.evaluated(self.done)
            else:
                # An earlier process, with options that made this evaluation due, may have logged the line of
                # this step without sending it to wandb and trackio. `amend` sends it.
                self._run_log.amend(self.done, {})

    async def update(
        self,
        updating: Awaitable[dict[str, float]],
        *,
        groups: Sequence[GroupKey],
        state: Callable[[], Mapping[str, object]],
    ) -> dict[str, float]:
        """Wait for the update of the next step and record the step. Return the metrics of the update.

        `groups` and the result of `state` after the update are recorded in the journal. A stop must not
        interrupt this method (`to_its_end`), so that `done` and the weights on the server agree.
        """
        step, started = self.done + 1, time.monotonic()
        self._is_update_pending = True
        metrics = await self._watchdog.answer(updating, f"training step {step}")
        self._journal.trained(step, groups=groups, state=state())
        self.done = step
        self._is_update_pending = False
        return metrics | {"time/update": time.monotonic() - started}

    @contextmanager
    def logged(self, metrics: Mapping[str, float], *, started: float) -> Generator[StepLine]:
        """Log the metrics of the last step when the block ends, even if it fails.

        The block adds the metrics of the evaluation if `is_evaluation_due`. If it does not, the line is
        completed when the run is resumed. `started` is the time at which the step began.
        """
        step = self.done
        line = StepLine(
            metrics={
                "progress/batch": float(step),
                "progress/epoch": float(self.epoch),
                "progress/done_frac": step / self._num_steps,
                **metrics,
            }
        )
        try:
            yield line
        finally:
            line.metrics["time/total"] = time.monotonic() - started
            is_whole = line.is_evaluated or not self.is_evaluation_due
            self._run_log.log(step, line.metrics, is_whole=is_whole)
            if line.is_evaluated:
                self._journal.evaluated(step)

    async def save_if_due(self) -> None:
        """Save a checkpoint after the last step and after every `save_every` steps."""
        if self.done == self._num_steps or _is_due(self.done, self._config.save_every):
            await run_to_its_end(self._save())

    @asynccontextmanager
    async def saving_after_failure(self) -> AsyncGenerator[None]:
        """Save a checkpoint if the block fails or is cancelled.

        No checkpoint is saved after a BackendError or a StorageError, or while an update is pending, because
        the state of the weights or files is unknown.
        """
        try:
            yield
        except (BackendError, StorageError):
            raise
        except BaseException:
            await run_to_its_end(self._save_after_failure())
            raise

    async def _save(self) -> None:
        """Save a checkpoint of the weights, unless it is already saved."""
        step, name = self.done, f"{self.done:06d}"
        if self._saved_step == step:
            return
        paths = await self._watchdog.answer(self._backend.save(name), f"saving checkpoint {name}")
        checkpoints.append(
            self._directory.path,
            Checkpoint(
                name=name,
                batch=step,
                epoch=self.epoch,
                final=step == self._num_steps,
                state_path=paths.state_path,
                sampler_path=paths.sampler_path,
            ),
        )
        self._journal.checkpointed(step, paths.state_path)
        self._saved_step = step
        self._events.say(f"checkpoint after step {step}: {paths.state_path}")

    async def _save_after_failure(self) -> None:
        """Save the weights of a run that failed or was stopped.

        An error of the save is reported and not raised, so that it does not hide the error that ended the
        run. A server that does not answer delays the end of the process by at most `stop_timeout_s`.
        """
        step, limit_s = self.done, self._config.stop_timeout_s
        too_late = f"not saved within stop_timeout_s={limit_s:g}"
        if self._is_update_pending:
            self._events.say(
                f"no checkpoint is saved: it is unknown whether the server has trained step {step + 1}"
            )
            return
        try:
            async with deadline(limit_s, BackendError, too_late):
                await self._backend.check()
                await self._save()
        except asyncio.CancelledError:
            self._events.say(f"no checkpoint was saved after step {step}: {too_late}")
            raise
        except Exception as error:
            reason = f"{type(error).__name__} {error}".rstrip()
            self._events.say(f"no checkpoint could be saved after step {step}: {reason}")
            logger.debug("the checkpoint after a failure could not be saved", exc_info=True)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0

"""Runs the real trainer on a bandit backend, kills it with SIGKILL at chosen points and resumes it.

    python -m tests.fakes.killable DIR POINTS SEED MODE [OPTION ...]

The command draws POINTS random points with SEED. MODE is a key of `MODES`.

A point is a place at which a run can be killed: before, within and after each write of a record, before and
after each replacement of a file, and in each `policy`, `sample`, `forward_backward`, `optim_step` and `save`
of the backend. Every run is a forked child process. SIGKILL ends the child without cleanup, so that a resumed
run has only the files on disk.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from src.config import TrainerConfig
from src.core.trajectory import FailureKind
from src.loop.connection import Dependencies
from tests.fakes.disk_bandit import DiskBandit
from tests.fakes.run import FakeRun, groups_trained, untimed
from tests.fakes.run_files import records
from tests.fakes.trials import FakeTasks, failure, say_a_token, task

OPTIONS = (
    *("tasks_dir=t", "temperature=1", "learning_rate=0.3", "behavior_if_log_dir_exists=resume"),
    *(
        "batch_size=2",
        "group_size=3",
        "n_epochs=3",
        "num_substeps=2",
        "save_every=2",
        "eval_every=3",
        "eval_group_size=2",
    ),
    *("retry_wait_s=0", "kl_penalty_coef=0.1", "quarantine_after=2", "max_failure_rate=0.9"),
)
MODES = {
    "synchronous": (),
    "asynchronous": ("max_staleness=2",),
    "streaming": (
        "max_staleness=1",
        "stream_groups=true",
        "loss_reduction=prompt_mean",
        "num_substeps=1",
        "kl_penalty_coef=0",
    ),
}
FAILING_TASK = "say-03"  # All trials of this task fail, so that the trainer quarantines it.


@dataclass(kw_only=True)
class Killer:
    """Counts points and kills this process at point number `kill_point` (None: never)."""

    kill_point: int | None
    count: int = 0

    def tick(self, torn_write: tuple[int, bytes] | None = None) -> None:
        """Count a point. Before a kill, write the first half of `torn_write` (descriptor, data)."""
        self.count += 1
        if self.count == self.kill_point:
            if torn_write is not None:
                descriptor, data = torn_write
                os_write(descriptor, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)


os_write = os.write


def run_in_child(path: Path, kill_point: int | None, *options: str) -> int:
    """Call `run_trainer` in a child process. Returns the number of points, or 0 if the child was killed."""
    return count_in_child(lambda: run_trainer(path, kill_point, *options))


def count_in_child(run: Callable[[], int]) -> int:
    """Call `run` in a child process and return its number of points, or 0 if the child was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            count = run()
            os_write(writer, str(count).encode())
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), f"the run failed instead of being killed: status {status}"
    return int(text) if status == 0 else 0


def count_writes(killer: Killer) -> None:
    """Patch `os.write` and `Path.replace` so that they call `killer.tick` for records and replaced files."""

    def write(descriptor: int, data: bytes) -> int:
        is_record = data.startswith(b"{")
        if is_record:
            killer.tick()
            killer.tick((descriptor, data))
        written = os_write(descriptor, data)
        if is_record:
            killer.tick()
        return written

    replace = Path.replace

    def ticking_replace(source: Path, target: Path) -> Path:
        killer.tick()
        replaced = replace(source, target)
        killer.tick()
        return replaced

    os.write, Path.replace = write, ticking_replace  # type: ignore[assignment]


def run_trainer(path: Path, kill_point: int | None, *options: str) -> int:
    """Run the trainer in `path` and kill this process at `kill_point`. Returns the number of points."""
    killer = Killer(kill_point=kill_point)
    count_writes(killer)
    num_attempts: Counter[int] = Counter()

    async def sometimes_failing(trial, policy):
        num_attempts[trial.seed] += 1
        if (
            trial.task.id == FAILING_TASK
            or trial.seed % 11 == 0
            or (trial.seed % 4 == 0 and num_attempts[trial.seed] % 3 == 1)
        ):
            return failure(trial.task.id, FailureKind.SANDBOX)
        await asyncio.sleep(0)
        return await say_a_token(trial, policy)

    source = FakeTasks(
        train=[task(f"say-{number:02d}") for number in range(5)],
        eval=[task("held-1"), task("held-2")],
        run_trial=sometimes_failing,
    )

    def dependencies(config: TrainerConfig) -> Dependencies:
        return Dependencies(
            source=source,
            backend=DiskBandit(path / "server", load=config.load_checkpoint_path, tick=killer.tick),
        )

    asyncio.run(FakeRun(path / "run", dependencies).go(*OPTIONS, *options))
    return killer.count


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The results of a finished run, without times."""

    metrics: list[dict[str, object]]
    trained: Counter[tuple[int, str]]
    seen_by_server: list[str]  # hashes of the batches, in the order of training
    final_state: str


def outcome(path: Path) -> Outcome:
    final = max((path / "server").glob("0*")).read_text()
    return Outcome(
        metrics=untimed(path / "run"),
        trained=groups_trained(path / "run"),
        seen_by_server=json.loads(final)["history"],
        final_state=final,
    )


def finished_rollouts(path: Path) -> set[tuple[str, str, int]]:
    """Return the graded rollouts on disk as (file, task, member)."""
    return {
        (file.name, str(record["task"]), int(record["member"]))
        for file in (path / "run" / "finished").glob("*.jsonl")
        for record in records(file)
        if "turns" in record["result"]
    }


def started_since(path: Path, num_records: int) -> set[tuple[str, str, int]]:
    """Return the rollouts that started after the first `num_records` records of the journal, as (file, task,
    member).
    """
    return {
        (f"{record['purpose']}_{record['step']:06d}.jsonl", str(record["task"]), int(record["member"]))
        for record in records(path / "run" / "journal.jsonl")[num_records:]
        if record["event"] == "rollout_started"
    }


def faults_of(path: Path, kills: list[int], expected: Outcome, mode: str, *options: str) -> list[str]:
    """Kill a run at each point of `kills` in turn, finish it, and return its faults.

    In every mode, a finished rollout that is lost or run again is a fault. In synchronous mode, each
    difference from `expected` is also a fault. In the other modes, the groups of a step depend on timing, so
    the function does not use `expected` and checks how often each task was trained.
    """
    faults = []
    for kill_point in [*kills, None]:
        before, num_records = finished_rollouts(path), len(records(path / "run" / "journal.jsonl"))
        num_points = run_in_child(path, kill_point, *MODES[mode], *options)
        if repeated := before & started_since(path, num_records):
            faults.append(f"{len(repeated)} finished rollouts were run again")
        if lost := before - finished_rollouts(path):
            faults.append(f"{len(lost)} finished rollouts were lost")
        if num_points:
            break
    resumed = outcome(path)
    if mode != "synchronous":
        return faults + training_faults(resumed)
    if json.dumps(resumed.metrics) != json.dumps(expected.metrics):
        faults.append("metrics differ")
    if set(resumed.trained.values()) != {1} or resumed.trained != expected.trained:
        faults.append("groups were not trained exactly once")
    if resumed.seen_by_server != expected.seen_by_server or resumed.final_state != expected.final_state:
        faults.append("the final weights were trained on other data")
    return faults


def training_faults(resumed: Outcome) -> list[str]:
    """Return a fault unless each task except FAILING_TASK was trained exactly once in each of 3 epochs."""
    expected = Counter({f"say-{number:02d}": 3 for number in range(5)})
    del expected[FAILING_TASK]
    trained = Counter(task for _, task in resumed.trained.elements())
    return (
        []
        if set(resumed.trained.values()) == {1} and trained == expected
        else ["groups were not trained exactly once"]
    )


def main(directory: Path, num_points: int, seed: int, mode: str, *options: str) -> int:
    """Kill and resume one run for each of `num_points` random points, and one more run up to `num_points`
    times. Print every fault and a summary. Return 0 if there is no fault.
    """
    started = time.monotonic()
    total = run_in_child(directory / "uninterrupted", None, *MODES[mode], *options)
    uninterrupted = outcome(directory / "uninterrupted")
    rng = random.Random(seed)
    points = sorted(rng.sample(range(1, total + 1), min(num_points, total)))
    faults = {
        kill_point: faults_of(directory / f"kill-{kill_point}", [kill_point], uninterrupted, mode, *options)
        for kill_point in points
    }
    chain = [rng.randrange(1, total // 3) for _ in range(num_points)]
    faults[-1] = faults_of(directory / "chain", chain, uninterrupted, mode, *options)
    num_kills = (
        num_points
        + sum(record["event"] == "started" for record in records(directory / "chain/run/journal.jsonl"))
        - 1
    )
    for kill_point, lines in faults.items():
        for line in lines:
            print(f"kill at {kill_point}: {line}")
    num_bad = sum(map(bool, faults.values()))
    as_expected = "the uninterrupted run" if mode == "synchronous" else "expected"
    print(
        f"{mode}: {num_kills} SIGKILLs over {total} points in {time.monotonic() - started:.0f} s: "
        f"{len(faults) - num_bad} of {len(faults)} "
        f"runs ended as {as_expected} ({len(uninterrupted.metrics)} lines of metrics, "
        f"{uninterrupted.trained.total()} groups, "
        f"{uninterrupted.metrics[-1]['tasks/quarantined']:g} task quarantined)"
    )
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]))

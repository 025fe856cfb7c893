"""Run attacks as real trials, each batch together with an honest trial, and report the attacks that
succeeded.

Several attacks can share a trial. If several trials or attacks may have caused a violation, each of these
trials runs again without the other attack trials. If a trial with several attacks then has a violation again,
each of its attacks runs again in a separate trial.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import batched
from pathlib import Path

from src.config import TrainerConfig
from src.core.trajectory import Trajectory, TrialFailure
from src.envs.harbor.environment import HarborTasks, open_harbor
from tests.fakes.event_loop import unloaded_clock
from tests.fakes.tokenizer import byte_chat
from tests.security.red_team import host, image
from tests.security.red_team.agent import Agent
from tests.security.red_team.attack import ANSWER, Attack, EnvironmentKind, Kind, RunAs, combined_script
from tests.security.red_team.tasks import write_tasks

# The number for containers is higher, because Docker needs seconds to start and stop a container.
TRIALS_AT_ONCE = {
    EnvironmentKind.SANDBOX: 3,
    EnvironmentKind.DOCKER: 6,
}
MAX_ATTACKS_PER_TRIAL = 8
DEADLINE_S = 300
MAX_LOOP_GAP_S = 3.0
BEAT_S = 0.02  # interval at which the event loop is measured
SECRET_NAME = "RED_TEAM_SECRET"
OPTIONS = {
    "model_name": "org/model",
    "max_turns": 400,
    "enable_summarize": False,
    "eval_split": 0.0,
    "max_tokens": 30_000,
}
LENGTHS = {"backend": "skyrl-tx", "skyrl_tx_url": "http://127.0.0.1:9", "context_limit": 1_000_000}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of one attack. `violations` is empty if the attack failed."""

    attack: str
    category: str
    where: str
    run_as: str
    reward: float | None  # None if the trial failed
    reason: str
    violations: list[str]
    seconds: float

    def line(self) -> str:
        return json.dumps(asdict(self))


@dataclass(kw_only=True)
class SharedTrial:
    """Attacks that share one trial, and the result of the trial."""

    attacks: Sequence[Attack]
    # A unique word, which marks the files and processes of the trial
    word: str = field(default_factory=lambda: f"rt{secrets.token_hex(5)}")
    reward: float | None = None
    reason: str = ""
    violations: list[str] = field(default_factory=list)  # any attack of the trial may have caused them
    holes: dict[str, list[str]] = field(default_factory=dict)  # violations that the scripts report, by attack
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AttackRunner:
    """Runs attacks as trials of a task source, while a server listens on the host's loopback interface. No
    attack may connect to the server.
    """

    where: EnvironmentKind
    run_as: RunAs
    tasks: HarborTasks
    prefix: str  # prefix of the names of the tasks
    jobs: Path  # contains the directories of the trials
    sentinels: list[Path]  # files of the host that no attack may change
    port: int
    connections: list[str]  # the first line that each connection sent to the server

    async def run(self, attacks: Sequence[Attack]) -> AsyncIterator[Result]:
        # These trials run again without other attack trials, because several trials or attacks may have
        # caused a violation.
        suspects: list[SharedTrial] = []
        for batch in batched(group_into_trials(attacks, self.where), TRIALS_AT_ONCE[self.where]):
            batch_violations = await self._run_batch(batch)
            for shared_trial in batch:
                if (batch_violations and len(batch) > 1) or (
                    shared_trial.violations and len(shared_trial.attacks) > 1
                ):
                    # Holes are kept: each of them belongs to the attack whose script reported it.
                    suspects.append(SharedTrial(attacks=shared_trial.attacks, holes=shared_trial.holes))
                    continue
                for result in self._results(shared_trial, batch_violations):
                    yield result
        for shared_trial in suspects:
            violations = await self._run_batch((shared_trial,))
            separate_trials = [
                SharedTrial(attacks=[attack], holes=shared_trial.holes) for attack in shared_trial.attacks
            ]
            reproduced = False
            if (shared_trial.violations or violations) and len(separate_trials) > 1:
                for batch in batched(separate_trials, TRIALS_AT_ONCE[self.where]):
                    batch_violations = await self._run_batch(batch)
                    for separate_trial in batch:
                        reproduced |= bool(separate_trial.violations or batch_violations)
                        for result in self._results(separate_trial, batch_violations):
                            yield result
            if not reproduced:
                for result in self._results(shared_trial, violations):
                    yield result

    def _results(self, shared_trial: SharedTrial, batch_violations: Sequence[str]) -> list[Result]:
        return [
            self._result(shared_trial, attack, [*shared_trial.violations, *batch_violations])
            for attack in shared_trial.attacks
        ]

    def _result(self, shared_trial: SharedTrial, attack: Attack, violations: list[str]) -> Result:
        return Result(
            attack=attack.name,
            category=attack.category.value,
            where=self.where.value,
            run_as=self.run_as.value,
            reward=shared_trial.reward,
            reason=shared_trial.reason,
            violations=[*shared_trial.holes.get(attack.name, []), *violations],
            seconds=round(shared_trial.seconds, 1),
        )

    async def _run_batch(self, shared_trials: Sequence[SharedTrial]) -> list[str]:
        """Run the trials together with an honest trial. Return the violations that cannot be attributed to a
        single trial.
        """
        directory = self.jobs / secrets.token_hex(4)
        snapshot_before, pids_before = host.Snapshot.take(self.sentinels), host.descendants()
        self.connections.clear()
        honest = SharedTrial(attacks=[])
        async with longest_gap() as gaps:
            await asyncio.gather(
                *(self._run_shared_trial(shared_trial, directory) for shared_trial in shared_trials),
                self._run_shared_trial(honest, directory),
            )
        violations = snapshot_before.changes(host.Snapshot.take(self.sentinels))
        if honest.violations:
            violations.append(f"the concurrent honest trial: {'; '.join(honest.violations)}")
        if max(gaps, default=0.0) > MAX_LOOP_GAP_S:
            violations.append(f"the event loop was blocked for {max(gaps):.1f} s")
        # The processes of a trial end with it. Remaining descendants of this process have escaped from a
        # trial.
        violations += [
            f"a process was left: {command[:60]}"
            for pid, command in host.descendants().items()
            if pid not in pids_before
        ]
        violations += host.marked_cgroups(self.tasks.run_label)
        if self.where is EnvironmentKind.DOCKER:
            violations += host.marked_docker_objects(self.tasks.run_label) + host.marked_docker_objects(
                self.prefix
            )
        trials_by_word = {shared_trial.word: shared_trial for shared_trial in shared_trials}
        for connection in self.connections:
            attributed_trial = trials_by_word.get(connection)
            (attributed_trial.violations if attributed_trial else violations).append(
                "a server on the host's loopback interface was reached"
            )
        for shared_trial in shared_trials:
            shared_trial.violations += (
                host.marked_processes(shared_trial.word)
                + host.marked_files(shared_trial.word)
                + host.marked_cgroups(shared_trial.word)
            )
        host.remove(directory)
        return violations

    async def _run_shared_trial(self, shared_trial: SharedTrial, directory: Path) -> None:
        solves = all(attack.solves for attack in shared_trial.attacks)
        kind = shared_trial.attacks[0].kind if shared_trial.attacks else Kind.PLAIN
        task = next(task for task in self.tasks.train if task.id.endswith(f"{self.prefix}-{kind.value}"))
        variables = {
            "WHERE": self.where.value,
            "T": shared_trial.word,
            "SENTINEL": str(self.sentinels[0]),
            "PORT": str(self.port),
            "HOST_PID": str(os.getpid()),
        }
        end = f"ended-{shared_trial.word}"
        agent = Agent(
            byte_chat(),
            combined_script(shared_trial.attacks, variables, end=end),
            end=end,
            last_command=f"cd /; echo {ANSWER} > /app/answer.txt" if solves else "",
            patience_s=sum(attack.patience_s for attack in shared_trial.attacks) or 5,
        )
        started = time.monotonic()
        trial = self.tasks.trial(task, directory=directory / shared_trial.word, seed=1, temperature=1.0)
        outcome = None
        with contextlib.suppress(TimeoutError):  # a training step also limits the time of a trial
            async with asyncio.timeout(DEADLINE_S):
                outcome = await trial.run(agent)
        shared_trial.seconds = time.monotonic() - started
        for name, text in sorted(agent.holes):
            shared_trial.holes.setdefault(name, []).append(text)
        match outcome:
            case Trajectory():
                shared_trial.reward, shared_trial.reason = (
                    outcome.reward,
                    " ".join(filter(None, (outcome.stop_reason, outcome.zero_reason))),
                )
                if outcome.reward != (1.0 if solves else 0.0):
                    shared_trial.violations.append(
                        f"the reward is {outcome.reward:g} ({shared_trial.reason})"
                    )
                if missing_reasons := [
                    attack.reason
                    for attack in shared_trial.attacks
                    if attack.reason not in shared_trial.reason
                ]:
                    shared_trial.violations.append(
                        f"the reason is {shared_trial.reason}, without {missing_reasons[0]}"
                    )
                if outcome.metrics["prefix_breaks"]:
                    shared_trial.violations.append(
                        "a prompt does not continue the tokens of the turn before it"
                    )
            case TrialFailure():
                shared_trial.reason = f"failed ({outcome.kind.value}): {outcome.message}"
                shared_trial.violations.append(shared_trial.reason)
            case None:
                shared_trial.reason = "deadline"
                shared_trial.violations.append(f"the trial did not end within {DEADLINE_S} s")
        shared_trial.violations += host.faults_of_directory(directory / shared_trial.word)


def group_into_trials(attacks: Iterable[Attack], where: EnvironmentKind) -> list[SharedTrial]:
    """Group the attacks into trials. Return the longest trials first, so that the trials of a batch take
    about the same time.
    """
    groups: dict[object, list[Attack]] = {}
    for number, attack in enumerate(attacks):
        key = (attack.category, attack.kind, attack.solves) if where in attack.shares else number
        groups.setdefault(key, []).append(attack)
    shared_trials = [
        SharedTrial(attacks=attacks_of_trial)
        for group in groups.values()
        for attacks_of_trial in batched(group, MAX_ATTACKS_PER_TRIAL)
    ]
    return sorted(
        shared_trials, key=lambda shared_trial: -sum(attack.patience_s for attack in shared_trial.attacks)
    )


@asynccontextmanager
async def longest_gap() -> AsyncIterator[list[float]]:
    """Yield a list whose only element is the longest time in seconds for which the event loop was blocked.
    The time for which its thread waited for a CPU does not count, because it depends on the load of the
    machine.
    """
    gaps = [0.0]
    now = unloaded_clock()

    async def beat() -> None:
        last = now()
        while True:
            await asyncio.sleep(BEAT_S)
            last, gap = now(), now() - last - BEAT_S
            gaps[0] = max(gaps[0], gap)

    task = asyncio.create_task(beat())
    try:
        yield gaps
    finally:
        task.cancel()


@asynccontextmanager
async def open_attack_runner(where: EnvironmentKind, run_as: RunAs) -> AsyncIterator[AttackRunner]:
    """Open the tasks and the server that attacks need. Call `host.adopt_orphans` first."""
    prefix = f"rt{secrets.token_hex(4)}"
    os.environ[SECRET_NAME] = f"secret-{prefix}"
    with tempfile.TemporaryDirectory(prefix="red-team-", ignore_cleanup_errors=True) as path:
        directory = Path(path)
        os.chmod(directory, 0o755)
        write_tasks(
            directory / "tasks",
            where=where,
            run_as=run_as,
            image=image.build() if where is EnvironmentKind.DOCKER else "",
            prefix=prefix,
        )
        sentinels = [directory / "sentinel", directory / "reward"]
        for path, text in zip(sentinels, ("sentinel\n", "1\n"), strict=True):
            path.write_text(text)
            path.chmod(0o666)
        connections: list[str] = []

        async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                async with asyncio.timeout(2):
                    connections.append((await reader.readline()).decode(errors="replace").strip())
            except TimeoutError:
                connections.append("")
            finally:
                writer.close()

        server = await asyncio.start_server(record, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        abstract_server = await asyncio.start_unix_server(record, path=f"\0red-team-{port}")
        tasks = open_harbor(
            TrainerConfig(
                tasks_dir=str(directory / "tasks"), environment_type=where.value, **OPTIONS, **LENGTHS
            ),  # type: ignore[arg-type]
            byte_chat(),
        )
        async with server, abstract_server:
            runner = AttackRunner(
                where=where,
                run_as=run_as,
                tasks=tasks,
                prefix=prefix,
                jobs=directory / "jobs",
                sentinels=sentinels,
                port=port,
                connections=connections,
            )
            try:
                yield runner
            finally:
                await tasks.close()
                host.remove(directory / "jobs")

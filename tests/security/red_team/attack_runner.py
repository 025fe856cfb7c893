"""Run attacks as real trials, each batch together with an honest trial, and report the attacks that
succeeded.

Several attacks can share a trial. If a violation may have several causes, these attacks run again separately.
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
from tests.security.red_team.attack import ANSWER, Attack, EnvironmentKind, Kind, RunAs, typed
from tests.security.red_team.tasks import write_tasks

# A container takes ten seconds to stop, without using a CPU.
ATTACKS_AT_ONCE = {
    EnvironmentKind.SANDBOX: 3,
    EnvironmentKind.DOCKER: 6,
}
SHARED_AT_MOST = 8
DEADLINE_S = 300
MAX_LOOP_GAP_S = 3.0
BEAT_S = 0.02
SECRET = "RED_TEAM_SECRET"
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
    whom: str
    reward: float | None  # None if the trial failed
    reason: str
    violations: list[str]
    seconds: float

    def line(self) -> str:
        return json.dumps(asdict(self))


@dataclass(kw_only=True)
class SharedTrial:
    """Attacks that share one trial."""

    attacks: Sequence[Attack]
    word: str = field(default_factory=lambda: f"rt{secrets.token_hex(5)}")
    reward: float | None = None
    reason: str = ""
    violations: list[str] = field(default_factory=list)  # any attack of the trial may have caused them
    holes: dict[str, list[str]] = field(default_factory=dict)  # violations that the scripts report, by attack
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AttackRunner:
    """Runs attacks as trials of a task source, beside a server on the host's loopback interface that no
    attack may reach.
    """

    where: EnvironmentKind
    whom: RunAs
    tasks: HarborTasks
    prefix: str
    jobs: Path
    sentinels: list[Path]
    port: int
    connections: list[str]

    async def play(self, attacks: Sequence[Attack]) -> AsyncIterator[Result]:
        # Trials with a violation that several attacks may have caused. Each of them is repeated alone.
        suspects: list[SharedTrial] = []
        for batch in batched(shared(attacks, self.where), ATTACKS_AT_ONCE[self.where]):
            together = await self._play_batch(batch)
            for unit in batch:
                if (together and len(batch) > 1) or (unit.violations and len(unit.attacks) > 1):
                    suspects.append(SharedTrial(attacks=unit.attacks))
                    continue
                for result in self._results(unit, together):
                    yield result
        for unit in suspects:
            alone = await self._play_batch((unit,))
            parts = [SharedTrial(attacks=[attack]) for attack in unit.attacks]
            reproduced = False
            if (unit.violations or alone) and len(parts) > 1:
                for batch in batched(parts, ATTACKS_AT_ONCE[self.where]):
                    together = await self._play_batch(batch)
                    for part in batch:
                        reproduced |= bool(part.violations or part.holes or together)
                        for result in self._results(part, together):
                            yield result
            if not reproduced:
                for result in self._results(unit, alone):
                    yield result

    def _results(self, unit: SharedTrial, together: Sequence[str]) -> list[Result]:
        return [self._result(unit, attack, [*unit.violations, *together]) for attack in unit.attacks]

    def _result(self, unit: SharedTrial, attack: Attack, violations: list[str]) -> Result:
        return Result(
            attack=attack.name,
            category=attack.category.value,
            where=self.where.value,
            whom=self.whom.value,
            reward=unit.reward,
            reason=unit.reason,
            violations=[*unit.holes.get(attack.name, []), *violations],
            seconds=round(unit.seconds, 1),
        )

    async def _play_batch(self, units: Sequence[SharedTrial]) -> list[str]:
        """Run the trials and an honest one at the same time. Return the violations that belong to no single
        trial.
        """
        folder = self.jobs / secrets.token_hex(4)
        before, running = host.Snapshot.take(self.sentinels), host.descendants()
        self.connections.clear()
        honest = SharedTrial(attacks=[])
        async with longest_gap() as gaps:
            await asyncio.gather(
                *(self._play_unit(unit, folder) for unit in units), self._play_unit(honest, folder)
            )
        violations = before.changes(host.Snapshot.take(self.sentinels))
        if honest.violations:
            violations.append(f"the concurrent honest trial: {'; '.join(honest.violations)}")
        if max(gaps, default=0.0) > MAX_LOOP_GAP_S:
            violations.append(f"the event loop was blocked for {max(gaps):.1f} s")
        # The processes of a trial end with it. Remaining descendants of this process have escaped from a
        # trial.
        violations += [
            f"a process was left: {command[:60]}"
            for pid, command in host.descendants().items()
            if pid not in running
        ]
        violations += host.marked_cgroups(self.tasks.run_label)
        if self.where is EnvironmentKind.DOCKER:
            violations += host.marked_docker_objects(self.tasks.run_label) + host.marked_docker_objects(
                self.prefix
            )
        words = {unit.word: unit for unit in units}
        for connection in self.connections:
            blamed = words.get(connection)
            (blamed.violations if blamed else violations).append(
                "a server on the host's loopback interface was reached"
            )
        for unit in units:
            unit.violations += (
                host.marked_processes(unit.word)
                + host.marked_files(unit.word)
                + host.marked_cgroups(unit.word)
            )
        host.remove(folder)
        return violations

    async def _play_unit(self, unit: SharedTrial, directory: Path) -> None:
        solves = all(attack.solves for attack in unit.attacks)
        kind = unit.attacks[0].kind if unit.attacks else Kind.PLAIN
        task = next(task for task in self.tasks.train if task.id.endswith(f"{self.prefix}-{kind.value}"))
        variables = {
            "WHERE": self.where.value,
            "T": unit.word,
            "SENTINEL": str(self.sentinels[0]),
            "PORT": str(self.port),
            "HOST_PID": str(os.getpid()),
        }
        end = f"ended-{unit.word}"
        agent = Agent(
            byte_chat(),
            typed(unit.attacks, variables, end=end),
            end=end,
            last_command=f"cd /; echo {ANSWER} > /app/answer.txt" if solves else "",
            patience_s=sum(attack.patience_s for attack in unit.attacks) or 5,
        )
        started = time.monotonic()
        trial = self.tasks.trial(task, directory=directory / unit.word, seed=1, temperature=1.0)
        outcome = None
        with contextlib.suppress(TimeoutError):  # a training step limits its trials in the same way
            async with asyncio.timeout(DEADLINE_S):
                outcome = await trial.run(agent)
        unit.seconds = time.monotonic() - started
        for name, text in sorted(agent.holes):
            unit.holes.setdefault(name, []).append(text)
        match outcome:
            case Trajectory():
                unit.reward, unit.reason = (
                    outcome.reward,
                    " ".join(filter(None, (outcome.stop_reason, outcome.zero_reason))),
                )
                if outcome.reward != (1.0 if solves else 0.0):
                    unit.violations.append(f"the reward is {outcome.reward:g} ({unit.reason})")
                if missing := [attack.reason for attack in unit.attacks if attack.reason not in unit.reason]:
                    unit.violations.append(f"the reason is {unit.reason}, without {missing[0]}")
                if outcome.metrics["prefix_breaks"]:
                    unit.violations.append("the tokens of the trial are not one sequence")
            case TrialFailure():
                unit.reason = f"failed ({outcome.kind.value}): {outcome.message}"
                unit.violations.append(unit.reason)
            case None:
                unit.reason = "deadline"
                unit.violations.append(f"the trial did not end within {DEADLINE_S} s")
        unit.violations += host.faults_of_folder(directory / unit.word)


def shared(attacks: Iterable[Attack], where: EnvironmentKind) -> list[SharedTrial]:
    """Return the trials to run, longest first, so that the trials of a batch take about the same time."""
    groups: dict[object, list[Attack]] = {}
    for number, attack in enumerate(attacks):
        key = (attack.category, attack.kind, attack.solves) if where in attack.shares else number
        groups.setdefault(key, []).append(attack)
    units = [
        SharedTrial(attacks=part) for group in groups.values() for part in batched(group, SHARED_AT_MOST)
    ]
    return sorted(units, key=lambda unit: -sum(attack.patience_s for attack in unit.attacks))


@asynccontextmanager
async def longest_gap() -> AsyncIterator[list[float]]:
    """Yield a list whose only element is the longest time in seconds for which the event loop was blocked. The
    time for which its thread waited for a CPU does not count, because it depends on the load of the machine.
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
async def open_attack_runner(where: EnvironmentKind, whom: RunAs) -> AsyncIterator[AttackRunner]:
    """Open the tasks and the server that attacks need. Call `host.adopt_orphans` first."""
    prefix = f"rt{secrets.token_hex(4)}"
    os.environ[SECRET] = f"secret-{prefix}"
    with tempfile.TemporaryDirectory(prefix="red-team-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        os.chmod(folder, 0o755)
        write_tasks(
            folder / "tasks",
            where=where,
            whom=whom,
            image=image.build() if where is EnvironmentKind.DOCKER else "",
            prefix=prefix,
        )
        sentinels = [folder / "sentinel", folder / "reward"]
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
        abstract = await asyncio.start_unix_server(record, path=f"\0red-team-{port}")
        tasks = open_harbor(
            TrainerConfig(
                tasks_dir=str(folder / "tasks"), environment_type=where.value, **OPTIONS, **LENGTHS
            ),  # type: ignore[arg-type]
            byte_chat(),
        )
        async with server, abstract:
            runner = AttackRunner(
                where=where,
                whom=whom,
                tasks=tasks,
                prefix=prefix,
                jobs=folder / "jobs",
                sentinels=sentinels,
                port=port,
                connections=connections,
            )
            try:
                yield runner
            finally:
                await tasks.close()
                host.remove(folder / "jobs")

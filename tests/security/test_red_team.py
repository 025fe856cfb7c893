"""Forty attacks per environment and user change neither the host nor the grade nor other trials.

`python -m tests.security.red_team` runs all attacks.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.envs.sandbox.docker import why_no_engine
from tests.security.red_team.attack import Attack, EnvironmentKind, RunAs
from tests.security.red_team.attack_process import command
from tests.security.red_team.image import BASE
from tests.security.red_team.table import ATTACKS as ALL_ATTACKS
from tests.security.red_team.table import sampled

PLACE_TIMEOUT_S = 1800
# A place is an environment and the user as which the attack runs.
PLACES = [(where, run_as) for where in EnvironmentKind for run_as in RunAs]
NUM_ATTACKS = 40


def missing_requirement(where: EnvironmentKind) -> str | None:
    """Return why no trial can run in this environment, or None."""
    if where is EnvironmentKind.SANDBOX:
        return why_no_sandbox()
    if reason := why_no_engine():
        return reason
    inspection = subprocess.run(["docker", "image", "inspect", BASE], capture_output=True, check=False)
    return None if inspection.returncode == 0 else f"the image {BASE} is missing"


class AttackRuns:
    """Runs the attacks that pytest collected. Two processes run at a time, each with all collected attacks of
    one place.
    """

    def __init__(
        self, collected: set[tuple[EnvironmentKind, RunAs, str]], directory: Path, pool: Executor
    ) -> None:
        self._collected = collected
        self._directory = directory
        places = [
            place
            for run_as in RunAs
            for place in PLACES
            if place[1] is run_as and any(case[:2] == place for case in collected)
        ]
        self._missing_requirements = {where: missing_requirement(where) for where, _ in places}
        self._futures = {
            place: pool.submit(self._run, *place)
            for place in places
            if self._missing_requirements[place[0]] is None
        }

    def violations(self, where: EnvironmentKind, run_as: RunAs) -> dict[str, list[str]]:
        """Return the violations of each attack in a place. Skip the test if no trial can run in the place."""
        if reason := self._missing_requirements[where]:
            pytest.skip(f"{where} is not available: {reason}")
        return self._futures[where, run_as].result()

    def _run(self, where: EnvironmentKind, run_as: RunAs) -> dict[str, list[str]]:
        names = [
            attack.name
            for attack in sampled(NUM_ATTACKS, where, run_as)
            if (where, run_as, attack.name) in self._collected
        ]
        results = self._directory / f"{where}-{run_as}"
        results.touch()
        results.chmod(0o666)  # the unprivileged user writes to it
        attack_command = command(where, run_as, names, results=results)
        try:
            process = subprocess.run(
                attack_command, capture_output=True, text=True, timeout=PLACE_TIMEOUT_S, check=False
            )
            problem = f"status {process.returncode}: {process.stderr[-2000:]}"
        except subprocess.TimeoutExpired:
            problem = f"no end within {PLACE_TIMEOUT_S} s"
        violations = {name: [f"not run: {problem}"] for name in names}
        for line in results.read_text().splitlines():
            result = json.loads(line)
            violations[result["attack"]] = [
                line for line in violations[result["attack"]] if not line.startswith("not run")
            ]
            violations[result["attack"]] += result["violations"]
        return violations


@pytest.fixture(scope="module")
def attack_runs(request: pytest.FixtureRequest) -> Iterator[AttackRuns]:
    parameters = [
        item.callspec.params  # type: ignore[attr-defined]
        for item in request.session.items
        if "attack_runs" in getattr(item, "fixturenames", ())
    ]
    collected = {(case["where"], case["run_as"], case["attack"]) for case in parameters}
    with (
        tempfile.TemporaryDirectory(prefix="red-team-results-") as directory,
        ThreadPoolExecutor(max_workers=2) as pool,
    ):
        os.chmod(directory, 0o755)  # the unprivileged user cannot enter pytest's temporary directories
        yield AttackRuns(collected, Path(directory), pool)


ATTACKS = [(*place, attack.name) for place in PLACES for attack in sampled(NUM_ATTACKS, *place)]


@pytest.mark.parametrize(("where", "run_as", "attack"), ATTACKS, ids=str)
def test_attack_leaves_host_grade_and_other_trials_intact(
    attack_runs: AttackRuns, where: EnvironmentKind, run_as: RunAs, attack: str
) -> None:
    assert attack_runs.violations(where, run_as)[attack] == []


def test_every_environment_gets_forty_attacks_of_all_categories() -> None:
    for place in PLACES:
        attacks = sampled(NUM_ATTACKS, *place)
        assert len(attacks) == NUM_ATTACKS, f"{place} has {len(attacks)}"
        assert len({attack.category for attack in attacks}) == 7, place


PYTHON_PROGRAM = re.compile(r"(?:^py|> \S+\.py) <<'END'\n(.*?)^END$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("attack", ALL_ATTACKS, ids=lambda attack: attack.name)
def test_attack_script_has_no_syntax_error(attack: Attack) -> None:
    """A script with a syntax error would attack nothing, so the test that runs the attack could not fail."""
    check = subprocess.run(
        ["bash", "-n"], input=attack.script, capture_output=True, text=True, check=False, timeout=10
    )
    assert (check.returncode, check.stderr) == (0, "")
    programs = PYTHON_PROGRAM.findall(attack.script)
    assert len(programs) == len(re.findall(r"\bpy <<|\.py <<", attack.script))
    for program in programs:
        ast.parse(program)

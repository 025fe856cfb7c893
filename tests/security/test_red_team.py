"""Forty attacks of the red team in every place: the host is unchanged, the grade is right, and the trials beside it are graded.

`python -m tests.security.red_team` plays all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.envs.sandbox.docker import why_no_engine
from tests.security.red_team.attack import Where, Whom
from tests.security.red_team.image import BASE
from tests.security.red_team.place import command
from tests.security.red_team.table import sampled

PLACE_TIMEOUT_S = 900
PLACES = [(where, whom) for where in Where for whom in Whom]
NUM_ATTACKS = 40


def why_not(where: Where) -> str | None:
    if where is Where.SANDBOX:
        return why_no_sandbox()
    if reason := why_no_engine():
        return reason
    present = subprocess.run(["docker", "image", "inspect", BASE], capture_output=True, check=False)
    return None if present.returncode == 0 else f"the image {BASE} is not there"


class Games:
    """Plays the attacks that this session collected: all of a place together, and two places at a time, as containers mostly wait."""

    def __init__(self, collected: set[tuple[Where, Whom, str]], folder: Path, pool: Executor) -> None:
        self._collected = collected
        self._folder = folder
        order = [
            place
            for whom in Whom
            for place in PLACES
            if place[1] is whom and any(case[:2] == place for case in collected)
        ]
        self._reasons = {where: why_not(where) for where, _ in order}
        self._played = {
            place: pool.submit(self._play, *place) for place in order if self._reasons[place[0]] is None
        }

    def violations(self, where: Where, whom: Whom) -> dict[str, list[str]]:
        """What did not hold, by attack."""
        if reason := self._reasons[where]:
            pytest.skip(f"no trial in {where}: {reason}")
        return self._played[where, whom].result()

    def _play(self, where: Where, whom: Whom) -> dict[str, list[str]]:
        names = [
            attack.name
            for attack in sampled(NUM_ATTACKS, where, whom)
            if (where, whom, attack.name) in self._collected
        ]
        results = self._folder / f"{where}-{whom}"
        results.touch()
        results.chmod(0o666)  # the sandbox's user writes to it
        played = command(where, whom, names, results=results)
        try:
            ended = subprocess.run(
                played, capture_output=True, text=True, timeout=PLACE_TIMEOUT_S, check=False
            )
            problem = f"status {ended.returncode}: {ended.stderr[-2000:]}"
        except subprocess.TimeoutExpired:
            problem = f"{PLACE_TIMEOUT_S} s passed"
        found = {name: [f"not played: {problem}"] for name in names}
        for line in results.read_text().splitlines():
            result = json.loads(line)
            found[result["attack"]] = [
                line for line in found[result["attack"]] if not line.startswith("not played")
            ]
            found[result["attack"]] += result["violations"]
        return found


@pytest.fixture(scope="module")
def games(request: pytest.FixtureRequest) -> Iterator[Games]:
    parameters = [
        item.callspec.params for item in request.session.items if "games" in getattr(item, "fixturenames", ())
    ]  # type: ignore[attr-defined]
    collected = {(case["where"], case["whom"], case["attack"]) for case in parameters}
    with (
        tempfile.TemporaryDirectory(prefix="red-team-results-") as folder,
        ThreadPoolExecutor(max_workers=2) as pool,
    ):
        os.chmod(folder, 0o755)  # pytest's own temporary folders are closed to the sandbox's user
        yield Games(collected, Path(folder), pool)


ATTACKS = [(*place, attack.name) for place in PLACES for attack in sampled(NUM_ATTACKS, *place)]


@pytest.mark.parametrize(("where", "whom", "attack"), ATTACKS, ids=str)
def test_the_host_the_grade_and_other_trials_are_safe_from(
    games: Games, where: Where, whom: Whom, attack: str
) -> None:
    assert games.violations(where, whom)[attack] == []


def test_there_are_forty_attacks_of_every_category_in_every_place() -> None:
    for place in PLACES:
        attacks = sampled(NUM_ATTACKS, *place)
        assert len(attacks) == NUM_ATTACKS, f"{place} has {len(attacks)}"
        assert len({attack.category for attack in attacks}) == 7, place

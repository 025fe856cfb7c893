"""Tests that every wait for a hanging, failing or slow server ends at its deadline or at a signal.

The tests use real HTTP on loopback, the real SDK and real processes. Several scenarios run at the same time,
because each of them only waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from src.core.errors import INTERRUPTED
from tests.fakes.unresponsive import START, Fault, unresponsive

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "datasets" / "quickstart" / "model"
NUM_THREADS = 8
# The options below set deadlines of 2 to 4 s. With the default deadlines, a wait would last 340 s.
PATIENCE_S = 60.0
OPTIONS = (
    *(
        "model_name=local/fake",
        f"tokenizer={TOKENIZER}",
        "env=tests.fakes.unresponsive:open_one_answer",
        "backend=skyrl-tx",
    ),
    *("max_tokens=4", "context_limit=64", "trial_attempts=1", "heartbeat_timeout_s=4", "request_timeout_s=3"),
)
TRAIN = (
    *(
        "reconnect_timeout_s=0",
        "stop_timeout_s=2",
        "batch_size=2",
        "group_size=2",
        "lora_rank=4",
        "max_steps=2",
        "save_every=1",
    ),
    *("eval_split=0", "enable_summarize=false"),
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A scenario: the requests that get a bad answer, the kind of bad answer, and the expected last line."""

    is_bad: Callable[[str], bool]
    last_line: str
    fault: Fault = Fault.HANGS
    module: str = "train"
    options: tuple[str, ...] = ()


def path_of(*names: str) -> Callable[[str], bool]:
    return lambda path: path.startswith(names)


def all_but(*names: str) -> Callable[[str], bool]:
    return lambda path: not path.startswith(names)


NO_SAMPLES = r"failed by backend, e\.g\. sampling: no answer within request_timeout_s=3"
NO_MODELS = r"listing the models of the server at \S+: no usable answer within heartbeat_timeout_s=4"
SCENARIOS_BY_NAME = {
    "everything hangs": Scenario(is_bad=all_but("/healthz"), last_line=NO_MODELS),
    "everything fails": Scenario(is_bad=all_but("/healthz"), last_line=NO_MODELS, fault=Fault.FAILS),
    "everything trickles": Scenario(is_bad=all_but("/healthz"), last_line=NO_MODELS, fault=Fault.TRICKLES),
    "health trickles": Scenario(
        is_bad=path_of("/healthz"),
        last_line=r"no server answers at \S+ \(TimeoutError\)",
        fault=Fault.TRICKLES,
    ),
    "opening the environment": Scenario(
        is_bad=path_of("/opening"), last_line="", options=("env=tests.fakes.unresponsive:open_never",)
    ),
    "creating the session": Scenario(
        is_bad=path_of("/create_session"),
        last_line="opening the training client: no answer within request_timeout_s=3",
    ),
    "creating the adapter": Scenario(
        is_bad=all_but(*START), last_line="opening the training client: no answer within request_timeout_s=3"
    ),
    "opening fails": Scenario(
        is_bad=all_but(*START),
        last_line="opening the training client: no answer within request_timeout_s=3",
        fault=Fault.FAILS,
    ),
    "sampling": Scenario(is_bad=path_of("/asample"), last_line=NO_SAMPLES),
    "forward_backward": Scenario(
        is_bad=path_of("/forward_backward"),
        last_line="training step 1: no answer within request_timeout_s=3; start the server again and resume",
    ),
    "saving": Scenario(
        is_bad=lambda path: path == "/save_weights",
        last_line="saving checkpoint 000001: no answer within request_timeout_s=3",
    ),
    "evaluate: everything hangs": Scenario(
        is_bad=all_but("/healthz"), last_line=NO_MODELS, module="evaluate"
    ),
    "evaluate: opening": Scenario(
        is_bad=all_but(*START),
        last_line="opening the policy: no answer within request_timeout_s=3",
        module="evaluate",
    ),
    "evaluate: sampling": Scenario(is_bad=path_of("/asample"), last_line=NO_SAMPLES, module="evaluate"),
    "probe: everything hangs": Scenario(
        is_bad=all_but("/healthz"),
        last_line=r"listing the models of the server at \S+: no answer within request_timeout_s=3",
        module="probe",
    ),
    "probe: forward": Scenario(
        is_bad=path_of("/forward"),
        last_line="check 'logprobs agree': no answer within request_timeout_s=3",
        module="probe",
    ),
}
ENDS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "by itself": None}
# The same code handles SIGINT and SIGTERM, so a few scenarios suffice.
WITH_SIGINT = ("everything hangs", "forward_backward", "probe: everything hangs")
# Other scenarios test these waits with a signal.
NOT_SIGNALLED = ("everything fails", "health trickles", "opening fails", "evaluate: opening")
# Opening an environment has no deadline, because it does not wait for the backend.
NEVER_ENDS = ("opening the environment",)
SCENARIOS = [
    (name, end)
    for name in SCENARIOS_BY_NAME
    for end in ENDS
    if not (end == "SIGINT" and name not in WITH_SIGINT)
    if not (end == "SIGTERM" and name in NOT_SIGNALLED)
    if not (end == "by itself" and name in NEVER_ENDS)
]


@dataclass(frozen=True, kw_only=True)
class Ended:
    status: int
    output: str
    duration_s: float  # since the signal or the first bad answer


class Programs:
    """Starts programs as forks of a process that has imported all modules."""

    def __init__(self, home: Path) -> None:
        environment = os.environ | {"HOME": str(home), "PYTHONPATH": str(ROOT)}
        for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "SKYRL_TX_URL"):
            environment.pop(name, None)
        command = [sys.executable, "-m", "tests.fakes.unresponsive"]
        self._process = subprocess.Popen(
            command, cwd=home, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._changed = threading.Condition()
        self._pids: dict[int, int] = {}
        self._statuses: dict[int, int] = {}
        self._count = 0
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def start(self, module: str, argv: list[str], log: Path) -> tuple[int, int]:
        """Start a program. Return its number and its process id."""
        assert self._process.stdin is not None
        with self._changed:
            number, self._count = self._count, self._count + 1
            self._process.stdin.write(json.dumps({"module": module, "argv": argv, "log": str(log)}) + "\n")
            self._process.stdin.flush()
            assert self._changed.wait_for(lambda: number in self._pids, PATIENCE_S)
            return number, self._pids[number]

    def wait(self, number: int) -> int | None:
        """Return the exit status, or None if the program does not end."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._statuses, PATIENCE_S)
            return self._statuses.get(number)

    def close(self) -> None:
        assert self._process.stdin is not None
        for number, pid in self._pids.items():
            if number not in self._statuses:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._listener.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            with self._changed:
                (self._pids if "pid" in event else self._statuses)[event["number"]] = event.get(
                    "pid", event.get("status")
                )
                self._changed.notify_all()


def run_scenario(
    programs: Programs, root: Path, scenario: Scenario, sent: signal.Signals | None
) -> Ended | str:
    """Run one scenario and return its result, or the error."""
    with unresponsive(root / "checkpoints", scenario.fault, scenario.is_bad) as (url, reached):
        argv = {
            "train": [*OPTIONS, *TRAIN, f"skyrl_tx_url={url}", f"log_path={root / 'run'}", *scenario.options],
            "evaluate": [*OPTIONS, f"skyrl_tx_url={url}", f"log_path={root / 'run'}", *scenario.options],
            "probe": [url, "request_timeout_s=3", "only=logprobs agree", "output=", *scenario.options],
        }[scenario.module]
        number, pid = programs.start(scenario.module, argv, root / "log")
        if not reached.wait(PATIENCE_S):
            return f"the server received no request of the scenario: {(root / 'log').read_text()}"
        started = time.monotonic()
        if sent is not None:
            os.kill(pid, sent)
        status = programs.wait(number)
        if status is None:
            return f"still running after {PATIENCE_S:g} s: {(root / 'log').read_text()}"
        return Ended(status=status, output=(root / "log").read_text(), duration_s=time.monotonic() - started)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Ended | str]:
    """Return the results of all scenarios."""
    home = tmp_path_factory.mktemp("home")
    programs = Programs(home)
    results: dict[tuple[str, str], Ended | str] = {}

    def run(scenario: tuple[str, str], root: Path) -> None:
        name, end = scenario
        results[scenario] = run_scenario(programs, root, SCENARIOS_BY_NAME[name], ENDS[end])

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(run, SCENARIOS, [tmp_path_factory.mktemp("scenario") for _ in SCENARIOS]))
    programs.close()
    return results


@pytest.mark.parametrize(("name", "end"), SCENARIOS, ids=[" - ".join(scenario) for scenario in SCENARIOS])
def test_a_wait_ends_at_its_deadline_or_at_a_signal(
    ended: dict[tuple[str, str], Ended | str], name: str, end: str
) -> None:
    result = ended[name, end]
    assert isinstance(result, Ended), result
    print(name, end, result)
    assert "Traceback" not in result.output
    last = result.output.strip().splitlines()[-1]
    if ENDS[end] is None:
        assert result.status == (2 if SCENARIOS_BY_NAME[name].module == "probe" else 1), result.output
        assert re.search(SCENARIOS_BY_NAME[name].last_line, last), result.output
    else:
        assert result.status == INTERRUPTED, result.output
        assert sum("stopping" in line for line in result.output.splitlines()) == 1, result.output

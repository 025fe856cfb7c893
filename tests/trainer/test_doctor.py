"""Tests that `agent-trainer doctor` reports each problem with its measured value and a command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from scripts.docs.troubleshooting import page
from skyrl_tx_server.http.app_state import HttpSettings
from skyrl_tx_server.http.http_handler import StartupState
from src.analyze.doctor import machine_checks, run_checks
from src.analyze.doctor.__main__ import main
from src.analyze.doctor.problems import PROBLEMS, Finding, ProblemName, problem_finding
from src.analyze.doctor.run_checks import CheckedRun, run_findings
from src.cli.agent_trainer import command_line
from src.cli.command_line import parse
from src.loop.outcome import agent_trainer
from src.records.run_directory import find_run_directory
from tests.fakes.server import fake_context, serving

ROOT = Path(__file__).resolve().parents[2]
RISING = [0.1, 0.12, 0.1, 0.3, 0.4, 0.5, 0.6, 0.62, 0.6]
FLAT = [0.3, 0.32, 0.28, 0.31, 0.3, 0.29, 0.31, 0.3, 0.28]
GOOD = {
    "env/all/reward/total": RISING,
    "env/all/reward/max": [1.0] * 9,
    "env/all/by_group/frac_mixed": [0.5] * 9,
    "env/all/by_group/frac_all_bad": [0.4] * 9,
    "env/all/by_group/frac_all_good": [0.1] * 9,
    "optim/num_substeps": [1.0] * 9,
    "optim/kl_sample_train_v2": [0.001] * 9,
}
CONFIG = {"model_name": "org/name", "env": "my:env", "learning_rate": 1e-4, "max_tokens": 100}
SOLVED = {"task": "a", "trial": "a__1", "reward": 1.0, "stop_reason": "stop"}
CUT = SOLVED | {"stop_reason": "length"}
FULL = SOLVED | {"stop_reason": "context_length"}
LOST = {"task": "b", "trial": "b__1", "failure": "verifier", "message": "no reward.txt\nmore"}


def write_run(
    path: Path,
    *,
    trials: list[dict[str, object]] | None = None,
    options: Mapping[str, object] = MappingProxyType({}),
    **changes: list[float],
) -> Path:
    """Write a run of nine steps with these options, values of metrics, and trials in step 9."""
    (path / "rollouts").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **options}))
    columns = GOOD | {name.replace("__", "/"): values for name, values in changes.items()}
    lines = [
        {"step": step} | {name: values[step - 1] for name, values in columns.items()} for step in range(1, 10)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    step = path / "rollouts" / "step_000009.jsonl"
    step.write_text("".join(json.dumps(line) + "\n" for line in trials or [SOLVED] * 10))
    return path


def problems(path: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in run_findings(CheckedRun(str(path))) if finding.is_problem}


def test_a_healthy_run_gives_only_ok_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_run(tmp_path / "run"))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and all(line.startswith("ok ") for line in lines)
    assert "ok      reward: 0.107 in the first third of 9 steps, 0.607 in the last" in lines


@pytest.mark.parametrize(
    ("changes", "name", "measured", "command"),
    [
        (
            {"env__all__reward__total": FLAT},
            ProblemName.REWARD_FLAT,
            "0.300 in the first third of 9 steps, 0.297 in the last",
            "resume {run} learning_rate=0.0002",
        ),
        (
            {"env__all__by_group__frac_mixed": [0.1] * 9},
            ProblemName.GROUPS_ALIKE,
            "10% of the groups of the last 9 steps have differing rewards; in 40%, all rewards "
            "are equal and below 0.5; in 10%, all rewards are equal and at least 0.5",
            "resume {run} dynamic_sampling=filter",
        ),
        (
            {"optim__num_substeps": [0.0, 4.0] * 4 + [0.0]},
            ProblemName.NO_UPDATE,
            "5 of the last 9 steps did not change the weights",
            "resume {run} dynamic_sampling=filter",
        ),
        (
            {"optim__kl_sample_train_v2": [0.01] * 3 + [0.02] * 3 + [0.05] * 3},
            ProblemName.KL_RISING,
            "optim/kl_sample_train_v2 0.01 in the first third of the steps, 0.05 in the last",
            "resume {run} learning_rate=5e-05",
        ),
        (
            {"optim__kl_policy_base": [0.01] * 6 + [0.2] * 3},
            ProblemName.KL_RISING,
            "optim/kl_policy_base 0.01",
            "resume {run} learning_rate=5e-05",
        ),
        (
            {"trials": [SOLVED] * 8 + [CUT] * 2},
            ProblemName.TRUNCATED,
            "2 of the last 10 graded trials were cut by a length limit",
            "resume {run} max_tokens=200",
        ),
        (
            {"trials": [SOLVED] * 8 + [CUT] * 2, "options": {"max_generate_length": 300}},
            ProblemName.TRUNCATED,
            "2 of the last 10 graded trials were cut by a length limit",
            "resume {run} max_generate_length=600",
        ),
        (
            {"trials": [SOLVED] * 8 + [FULL] * 2, "options": {"context_limit": 4000}},
            ProblemName.TRUNCATED,
            "2 of the last 10 graded trials were cut by a length limit",
            "resume {run} context_limit=8000",
        ),
        (
            {"trials": [SOLVED] * 18 + [LOST] * 2},
            ProblemName.FAILURES,
            "2 of 20 trials could not be graded, 2 of kind verifier: no reward.txt",
            "show {run} b__1",
        ),
    ],
)
def test_each_problem_is_reported_without_other_problems(
    tmp_path: Path, changes: dict, name: ProblemName, measured: str, command: str
) -> None:
    path = write_run(tmp_path / "run", **changes)
    (finding,) = problems(path).values()
    assert finding.name == name and finding.measured.startswith(measured) and "\n" not in finding.measured
    assert finding.command == f"agent-trainer {command.format(run=path)}"
    assert finding.lines()[1].strip() == PROBLEMS[name].meaning
    assert finding.lines()[2].strip() == f"type: {agent_trainer()} {command.format(run=path)}"


@pytest.mark.parametrize(
    "changes",
    [
        {"env__all__reward__total": [0.97] * 9},  # solved
        {"optim__kl_sample_train_v2": [0.05] * 9},  # high and constant
        {"optim__kl_sample_train_v2": [0.001] * 6 + [0.005] * 3},  # rising and low
        {"trials": [SOLVED] * 9 + [CUT]},
        {"trials": [SOLVED] * 19 + [LOST]},
    ],
)
def test_a_check_passes_if_one_of_its_conditions_is_not_met(tmp_path: Path, changes: dict) -> None:
    assert problems(write_run(tmp_path / "run", **changes)) == {}


@pytest.mark.parametrize(
    "options", [{"dynamic_sampling": "filter"}, {"max_staleness": 1}, {"remove_constant_reward_groups": True}]
)
def test_a_new_run_is_advised_where_dynamic_sampling_is_excluded(
    tmp_path: Path, options: dict[str, object]
) -> None:
    run = write_run(
        tmp_path / "run", options={"group_size": 6, **options}, env__all__by_group__frac_mixed=[0.1] * 9
    )
    command = problems(run)[ProblemName.GROUPS_ALIKE].command
    assert command == f"agent-trainer resume {run} group_size=12 log_path={run}-group_size-12"
    config = parse(command_line("resume", shlex.split(command)[2:])[1:])
    assert not find_run_directory(config, name="").resumed


def test_a_failed_allocation_is_found_in_the_logs(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    side_files = tmp_path / "run.server"
    side_files.mkdir()
    (side_files / "server.json").write_text('["base_model=org/base"]')
    log = side_files / "server.log"
    log.write_text("ready\nforward_backward failed: RESOURCE_EXHAUSTED: 2 GiB\n")
    (finding,) = problems(path).values()
    assert finding.name == ProblemName.OUT_OF_MEMORY
    assert finding.measured.startswith(
        f"lines of {log} with a failed allocation: 1; the last one is line 2: forward_backward failed"
    )
    assert "serve base_model=org/base " in finding.command
    log.write_text("ready\n")
    other = tmp_path / "other.log"
    other.write_text("the device is out of memory\n")
    findings = run_findings(CheckedRun(str(path), server_log=str(other)))
    assert [finding.name for finding in findings if finding.is_problem] == [ProblemName.OUT_OF_MEMORY]


@pytest.mark.parametrize(
    "missing", [{"why_no_sandbox"}, {"why_no_engine"}, {"why_no_sandbox", "why_no_engine"}]
)
def test_a_machine_needs_one_kind_of_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: set[str]
) -> None:
    for name in ("why_no_sandbox", "why_no_engine"):
        monkeypatch.setattr(machine_checks, name, lambda name=name: "absent" if name in missing else None)
    path = write_run(tmp_path / "run")
    assert problems(path) == {}  # this environment needs no sandbox
    (path / "config.json").write_text(json.dumps(CONFIG | {"env": "harbor", "environment_type": "modal"}))
    assert problems(path) == {}  # the trials do not run on this machine
    (path / "config.json").write_text(json.dumps(CONFIG | {"env": "harbor", "tasks_dir": "tasks"}))
    assert set(problems(path)) == ({ProblemName.NO_SANDBOX} if len(missing) == 2 else set())


def test_the_command_of_a_problem_is_quoted_for_the_shell() -> None:
    finding = problem_finding(ProblemName.FAILURES, "", run="/my runs/a", trial="it's")
    assert shlex.split(finding.lines()[2])[1:] == [agent_trainer(), "show", "/my runs/a", "it's"]
    assert problem_finding(ProblemName.FAILURES, "", run="/r", trial="").command == "agent-trainer show /r"


def test_a_run_without_steps_has_no_problem(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert problems(tmp_path) == {}
    (tmp_path / "journal.jsonl").write_text(
        json.dumps({"event": "ended", "state": "too_many_failures", "cause": "no trial was graded"}) + "\n"
    )
    assert problems(tmp_path)[ProblemName.FAILURES].measured == "the run ended: no trial was graded"
    (write_run(tmp_path / "run", trials=[SOLVED] * 99 + [LOST]) / "journal.jsonl").write_text(
        (tmp_path / "journal.jsonl").read_text()
    )
    assert problems(tmp_path / "run")[ProblemName.FAILURES].measured == "the run ended: no trial was graded"


def test_keys_are_named_without_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    finding = machine_checks.keys()
    assert "TINKER_API_KEY yes" in finding.measured and "HF_TOKEN no" in finding.measured
    assert "secret" not in finding.measured


def test_a_server_is_asked_for_its_health(tmp_path: Path) -> None:
    with serving(StartupState(state=fake_context(tmp_path))) as url:
        assert not machine_checks.server(f"{url}/").is_problem
    assert machine_checks.server("http://127.0.0.1:9").measured.startswith("no server answers at http://127")


def test_a_refused_key_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
    settings = HttpSettings(model_dir=None, api_key="tml-right")
    with serving(StartupState(state=fake_context(tmp_path, settings=settings))) as url:
        finding = machine_checks.server(url)
    assert finding.measured == f"{url}: it refuses the key; set TINKER_API_KEY to the key of the server"
    assert finding.command == "export TINKER_API_KEY=tml-..."


def test_only_a_refused_key_gives_the_advice_to_set_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async def is_alive(url: str) -> None: ...

    monkeypatch.setattr(machine_checks, "check_alive", is_alive)
    monkeypatch.setattr(machine_checks, "find_server", lambda *_, **__: "it serves no model")
    assert machine_checks.server("http://h").command == "scripts/start_skyrl_tx.sh MODEL"


def test_the_machine_is_checked_without_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SKYRL_TX_URL", raising=False)
    monkeypatch.setattr(machine_checks, "JAX_PROGRAM", "print('cpu:cpu')")
    monkeypatch.setattr(machine_checks, "MIN_FREE_GIB", 0)
    for name in ("why_no_sandbox", "why_no_engine"):
        monkeypatch.setattr(machine_checks, name, lambda: None)
    assert main([]) == 0
    names = [line.split(": ")[0].split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    expected = ("Python", "JAX devices", "sandbox", "disk", "keys")
    assert names == [["ok", name] for name in expected]
    monkeypatch.setattr(machine_checks, "JAX_PROGRAM", "import nowhere")
    monkeypatch.setattr(machine_checks, "MIN_FREE_GIB", 1e9)
    assert main([]) == 1
    printed = capsys.readouterr().out
    assert "problem JAX devices: ModuleNotFoundError" in printed and "problem disk: " in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "has no config.json; give the directory of a run"),
        (["server_log=x"], "server_log needs the directory of a run"),
        (["skyrl_tx_url=h"], "is not an HTTP address"),
        (["RUN", "server_log=none.log"], "no such file; give the log of the server"),
        (["RUN", "other"], "'other' is not key=value"),
    ],
)
def test_a_wrong_doctor_argument_gives_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    path = write_run(tmp_path / "run")
    assert main([argument.replace("RUN", str(path)) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


def test_every_problem_has_a_check() -> None:
    source = Path(run_checks.__file__).read_text() + Path(machine_checks.__file__).read_text()
    assert all(f"ProblemName.{name.name}" in source for name in PROBLEMS) and set(PROBLEMS) == set(
        ProblemName
    )
    assert command_line("doctor", ["RUN"]) == ["src.analyze.doctor", "RUN"]


def test_the_troubleshooting_page_is_current() -> None:
    message = "run python -m scripts.docs troubleshooting"
    assert (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text() == page(), message

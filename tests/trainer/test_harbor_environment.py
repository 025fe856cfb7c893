"""Tests the Harbor task source: held-out tasks, and the options and the type of the environment."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from harbor.environments.docker.docker import DockerEnvironment
from harbor.models.task.config import TpuSpec
from harbor.models.trial.config import EnvironmentConfig as HarborEnvironmentConfig

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.envs.harbor.environment import resolve_environment_type
from src.envs.harbor.environment_fields import environment_options
from tests.fakes.harbor_trials import HELLO, harbor_tasks, in_sandbox, variant

pytestmark = in_sandbox


def copies(directory: Path, *names: str) -> Path:
    """Create a directory with copies of the hello task."""
    for name in names:
        shutil.copytree(HELLO, directory / name)
    return directory


def ids(tasks: Sequence[Task]) -> list[str]:
    return [task.id for task in tasks]


@pytest.fixture
def five_tasks(tmp_path: Path) -> Path:
    return copies(tmp_path / "train", "a-1", "a-2", "b-1", "b-2", "c-1")


def test_no_task_is_held_out_without_an_option(five_tasks: Path) -> None:
    assert ids(harbor_tasks(five_tasks).eval) == []


def test_tasks_are_held_out_by_glob_and_name(five_tasks: Path) -> None:
    tasks = harbor_tasks(five_tasks, eval_tasks=["b-*", "c-1"], eval_split=0.5)
    assert (ids(tasks.train), ids(tasks.eval)) == (["a-1", "a-2"], ["b-1", "b-2", "c-1"])


def test_a_held_out_directory_names_its_tasks_uniquely(five_tasks: Path, tmp_path: Path) -> None:
    held_out = copies(tmp_path / "other", "z", "c-1")
    tasks = harbor_tasks(five_tasks, eval_tasks=[str(held_out)])
    assert (len(tasks.train), ids(tasks.eval)) == (5, ["other/c-1", "z"])


def test_a_share_is_held_out_by_the_seed(five_tasks: Path) -> None:
    splits = [harbor_tasks(five_tasks, eval_split=0.4, seed=seed) for seed in (3, 3, 4, 5, 6)]
    assert all((len(tasks.train), len(tasks.eval)) == (3, 2) for tasks in splits)
    assert ids(splits[0].eval) == ids(splits[1].eval)
    assert len({tuple(ids(tasks.eval)) for tasks in splits}) > 1


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("nope", "'nope' matches no task; give ids or globs"), ("*", "none is left to train on")],
)
def test_an_invalid_selection_is_refused(five_tasks: Path, pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        harbor_tasks(five_tasks, eval_tasks=[pattern])


def test_tasks_dir_cannot_be_held_out(five_tasks: Path) -> None:
    for path in (str(five_tasks), f"{five_tasks}/../{five_tasks.name}"):
        with pytest.raises(ConfigError, match="none is left to train on"):
            harbor_tasks(five_tasks, eval_tasks=[path])


def test_a_first_prompt_over_a_length_limit_is_refused() -> None:
    message = r"hello-file: the first prompt has at least \d+ tokens, so {}=2000 leaves no tokens"
    with pytest.raises(ConfigError, match=message.replace("{}", "context_limit")):
        harbor_tasks(context_limit=2000)
    with pytest.raises(ConfigError, match=message.replace("{}", "max_input_length")):
        harbor_tasks(max_input_length=2000)


def test_a_deadline_before_the_verifiers_limit_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The time limits of the task `hello-file` are 120 s for the agent and 60 s for the verifier."""
    harbor_tasks(trial_timeout_s=181.0)
    assert not [line for line in caplog.messages if "trial_timeout_s" in line]
    harbor_tasks(agent_timeout_multiplier=60.0)
    assert "trial_timeout_s=7200 does not exceed" in caplog.text
    assert "set it above 7260 (1 of 1 tasks: hello-file)" in caplog.text


def test_environment_kwargs_become_fields_of_harbors_config() -> None:
    pairs = {
        "override_cpus": "2",
        "memory_mb": "512",
        "network": "true",
        "force_build": "false",
        "image": "x:1",
        "ratio": "0.5",
    }
    assert environment_options(pairs) == {
        "override_cpus": 2,
        "override_memory_mb": 512,
        "force_build": False,
        "kwargs": {"network": True, "image": "x:1", "ratio": 0.5},
    }


def test_a_tpu_and_hosts_become_fields_of_harbors_config() -> None:
    options = environment_options({"override_tpu": "v6e=2x4", "extra_allowed_hosts": "a.org+b.org"})
    fields = HarborEnvironmentConfig.model_validate(options)
    assert fields.override_tpu == TpuSpec(type="v6e", topology="2x4") and not fields.kwargs
    assert fields.extra_allowed_hosts == ["a.org", "b.org"]
    for option in ("override_tpu=v6e=2x4", "extra_allowed_hosts=a.org", "cpu_enforcement_policy=limit"):
        with pytest.raises(ConfigError, match=f"sandbox has no option {option.partition('=')[0]}; its"):
            harbor_tasks(environment_kwargs=[option])


def test_a_limit_that_is_not_an_integer_is_refused() -> None:
    with pytest.raises(ConfigError, match="override_cpus needs an integer, not 'two'"):
        environment_options({"override_cpus": "two"})


@pytest.mark.parametrize("key", ["delete", "force_build"])
def test_a_flag_that_is_neither_true_nor_false_is_refused(key: str) -> None:
    assert environment_options({key: "True"})[key] is True
    for text in ("1", "yes"):
        with pytest.raises(
            ConfigError, match=f"^environment_kwargs {key} needs true or false, not '{text}'$"
        ):
            environment_options({key: text})


def test_an_option_that_the_sandbox_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="environment_type=sandbox has no option auto_mounting; its"):
        harbor_tasks(environment_kwargs=["auto_mounting=true"])


NO_ENGINE = "no engine answers"
NO_SANDBOX = "bubblewrap cannot start"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the reasons why this machine cannot run Docker and the sandbox.

    None means that the machine can run it.
    """

    def set_reasons(*, engine: str | None, sandbox: str | None) -> None:
        monkeypatch.setattr("src.envs.harbor.environment.why_no_engine", lambda: engine)
        monkeypatch.setattr("src.envs.harbor.environment.why_no_sandbox", lambda: sandbox)

    return set_reasons


@pytest.mark.parametrize(("engine", "expected"), [(None, "docker"), (NO_ENGINE, "sandbox")])
def test_auto_prefers_docker(machine: Callable[..., None], engine: str | None, expected: str) -> None:
    machine(engine=engine, sandbox=None)
    assert resolve_environment_type("auto") == expected


def test_auto_uses_the_sandbox_for_tasks_that_docker_refuses(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine(engine=None, sandbox=None)
    monkeypatch.setattr(DockerEnvironment, "_egress_control_kernel_support", lambda *_: False)
    assert harbor_tasks(environment_type="auto").environment_type == "sandbox"
    reason = f"{HELLO}: network_mode='no-network' is not supported by Docker on this machine"
    assert caplog.messages[0] == f"trials run in the sandbox, because Docker cannot run {reason}"
    with pytest.raises(ConfigError) as error:
        harbor_tasks(environment_type="docker")
    assert str(error.value) == f"{reason}; try environment_type=sandbox"


@pytest.mark.parametrize(
    ("option", "reason"),
    [("size=2", "Unknown option 'size'"), ("auto_mounting=true", "does not support automatic host mounts")],
)
def test_an_option_that_docker_does_not_have_is_refused(
    machine: Callable[..., None], option: str, reason: str
) -> None:
    machine(engine=None, sandbox=None)
    with pytest.raises(ConfigError, match=reason) as error:
        harbor_tasks(environment_type="docker", environment_kwargs=[option])
    assert "\n" not in str(error.value)


def test_auto_reports_the_reasons_of_docker_and_of_the_sandbox(
    machine: Callable[..., None], tmp_path: Path
) -> None:
    machine(engine=None, sandbox=None)
    directory = variant(tmp_path, task_toml='[environment]\nos = "windows"\n')
    with pytest.raises(ConfigError, match="windows"):
        harbor_tasks(directory, environment_type="auto")
    shutil.rmtree(directory.parent)
    directory = variant(tmp_path, task_toml="[environment]\ngpus = 1\n")
    shutil.rmtree(directory / "environment")
    with pytest.raises(ConfigError, match="no Dockerfile") as error:
        harbor_tasks(directory, environment_type="auto")
    assert str(error.value).splitlines() == [
        "Docker cannot run these tasks:",
        f"{directory / 'environment'}: no Dockerfile and no [environment].docker_image; add one of them",
        "The sandbox cannot run these tasks:",
        f"{directory}: the sandbox has no GPU or TPU",
    ]


@pytest.mark.parametrize(
    ("environment_type", "message"),
    [
        ("nowhere", "environment_type=nowhere is none of"),
        ("daytona", "environment_type=daytona: "),
        ("docker", f"environment_type=docker: {NO_ENGINE}; start Docker, or use environment_type=sandbox"),
        ("auto", f"environment_type=sandbox: {NO_SANDBOX}; fix the cause, or use environment_type=docker"),
    ],
)
def test_an_environment_type_that_this_machine_lacks_is_refused(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, environment_type: str, message: str
) -> None:
    machine(engine=NO_ENGINE, sandbox=NO_SANDBOX)
    monkeypatch.delenv("DAYTONA_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=message):
        resolve_environment_type(environment_type)

"""Runs the commands of documents 003 and 004 of docs/seed-behaviours.md in a fresh clone, in their order.

The cache of the model hub contains the small model of the quick start under the names of the documents, with
the context length of Qwen3-4B. A free port replaces 8000, and the runs that train use the sandbox and few
turns. The directory datasets/terminal-bench-2 has two tasks, and no Docker engine responds.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from src.envs.sandbox.bubblewrap import missing_packages
from tests.fakes.sdk_programs import is_finished

ROOT = Path(__file__).resolve().parents[2]
MODEL = "Qwen/Qwen3-4B"
MODEL_CONTEXT = 40960
CONTEXT = 32768  # the server's default context length for a model with a longer context
PREAMBLE = ("server: ", "model: ", "setup: ", "run_skyrl_tx: ")
TASKS = ("append-01", "copy-01")
TIMEOUT_S = 500

pytestmark = pytest.mark.skipif(
    bool(missing_packages()), reason=f"the sandbox needs {' '.join(missing_packages())}"
)

TRAIN = """
python -m src.train \\
  backend=skyrl-tx \\
  skyrl_tx_url=http://localhost:8000 \\
  model_name=Qwen/Qwen3-4B \\
  tasks_dir=./datasets/terminal-bench-2 \\
"""
RECIPE = """  learning_rate=2e-4 \\
  batch_size=2 \\
  group_size=16 \\
  n_parallel_envs=16 \\
  max_tokens=2048 \\
  temperature=0.7 \\
  context_limit=128000 \\
  proactive_summarization_threshold=8000 \\
  enable_summarize=true \\
  n_epochs=2 \\
  num_substeps=4 \\
  remove_constant_reward_groups=true \\
  normalize_advantages_by_std=true \\
  loss_fn=ppo \\
  environment_type=docker \\
  wandb_project=harbor-training \\
  wandb_name=qwen3-skyrl-tx
"""
SINGLE_TASK = """  batch_size=1 \\
  group_size=2 \\
  n_parallel_envs=2 \\
  n_epochs=1 \\
  environment_type=docker
"""
TEST_SKYRL_TX_API = """
import asyncio
import tinker

async def test_connection():
    client = tinker.ServiceClient(base_url="http://localhost:8000")
    training_client = await client.create_lora_training_client_async(base_model="Qwen/Qwen3-4B", rank=32)
    print("Created training client")
    tokenizer = training_client.get_tokenizer()
    tokens = tokenizer.encode("Hello, world!")
    print(f"Tokenizer works: {tokens}")
    await training_client.save_weights_and_get_sampling_client_async(name="test")
    print("Sampling client created")

if __name__ == "__main__":
    asyncio.run(test_connection())
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """A reader of the documents, who runs commands in a fresh clone."""

    clone: Path
    port: int
    environment: dict[str, str]

    def run(self, command: str, *, status: int = 0, activated: bool = True, uses_sdk: bool = False) -> str:
        """Run a command in the clone and return its output.

        With `activated`, `source .venv/bin/activate` runs before the command. `uses_sdk` states whether the
        command uses the tinker SDK, see `is_finished`.
        """
        words = ["source .venv/bin/activate\n"] if activated else []
        done = subprocess.run(
            ["bash", "-c", "".join([*words, self.with_server_port(command)])],
            cwd=self.clone,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        finished = is_finished(done.returncode) if uses_sdk else done.returncode == status
        assert finished, done.stdout[-4000:]
        return done.stdout

    def expect_error(self, command: str, line: str, *, status: int = 2, activated: bool = True) -> None:
        """Run a command that fails. The last line of its output must contain `line`, and each line before it
        must begin with one of PREAMBLE.
        """
        answer = self.run(command, status=status, activated=activated)
        *before, last = answer.splitlines()
        assert line in last, answer
        assert all(text.startswith(PREAMBLE) for text in before), answer

    def with_server_port(self, text: str) -> str:
        return text.replace("localhost:8000", f"localhost:{self.port}")


def fresh_clone(directory: Path) -> Path:
    """Copy the files that a commit of this working tree would have, and create a .venv. Return
    `directory`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name)
    link_environment(directory)
    return directory


def link_environment(clone: Path) -> None:
    """Create a .venv that consists of links and that scripts/setup.sh accepts as up to date."""
    environment = clone / ".venv"
    environment.mkdir()
    for entry in (ROOT / ".venv").iterdir():
        if entry.name != ".ready":
            (environment / entry.name).symlink_to(entry.resolve())
    digest = sha256(b"".join((clone / name).read_bytes() for name in ("requirements.txt", ".python-version")))
    probe = ["bash", "-c", "nvidia-smi -L >/dev/null 2>&1"]
    gpu = "no" if subprocess.run(probe).returncode else "yes"
    (environment / ".ready").write_text(f"{digest.hexdigest()[:16]}-gpu={gpu}")


def cache_model(hub: Path, name: str) -> None:
    """Put the model of the quick start into a cache of the model hub, with the context of Qwen3-4B."""
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "1"
    shutil.copytree(ROOT / "datasets" / "quickstart" / "model", snapshot)
    config = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MODEL_CONTEXT}))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    directory = tmp_path_factory.mktemp("reader")
    (directory / "bin").mkdir()
    (directory / "bin" / "python").symlink_to(Path(sys.base_prefix, "bin", "python3"))
    for name in (MODEL, "Qwen/Qwen3-30B-A3B"):
        cache_model(directory / "hub", name)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    removed_prefixes = ("TINKER_", "SKYRL_", "WANDB_", "HF_", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(removed_prefixes)}
    environment |= {
        "HOME": str(directory),
        "HF_HUB_CACHE": str(directory / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
        "DOCKER_HOST": f"unix://{directory}/no-engine.sock",
    }
    clone = directory / "harbortrainer"
    clone.mkdir()
    return Reader(clone=fresh_clone(clone), port=port, environment=environment)


@pytest.fixture(scope="module")
def server(reader: Reader) -> Iterator[str]:
    """Start the server, as in Terminal 1 of the documents. Yields its line "server ready"."""
    command = f"exec ./scripts/start_skyrl_tx.sh {MODEL} 1 port={reader.port} cache_tokens=65536"
    log = reader.clone.parent / "server.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=reader.clone, env=reader.environment, stdout=subprocess.PIPE,
            stderr=stream, text=True,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        printed = next((line for line in process.stdout if "server ready" in line), "")
        assert printed, log.read_text()
        yield printed
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def tasks(reader: Reader) -> Path:
    directory = reader.clone / "datasets" / "terminal-bench-2"
    for name in TASKS:
        shutil.copytree(ROOT / "datasets" / "quickstart" / "train" / name, directory / name)
        options = (directory / name / "task.toml").read_text()
        (directory / name / "task.toml").write_text(
            options.replace("timeout_sec = 60.0", "timeout_sec = 600.0")
        )
    return directory


@pytest.fixture(scope="module")
def run_directory(reader: Reader, server: str, tasks: Path) -> Path:
    """Run Test 2 of the documents in sandboxes, with short trials and three trials of each held-out task."""
    command = (TRAIN + SINGLE_TASK).replace("environment_type=docker", "environment_type=sandbox").rstrip()
    printed = reader.run(f"{command} eval_group_size=3 max_turns=4 logs_dir=runs/test2")
    assert "tasks: 1 to train on, 1 held out; 1 step" in printed and "done: 1 step in" in printed, printed
    [directory] = (path for path in (reader.clone / "runs" / "test2").iterdir() if path.is_dir())
    return directory


# Document 003: quick start


def test_the_server_serves_the_model_by_its_name(reader: Reader, server: str) -> None:
    assert f"model {MODEL}  context {CONTEXT}  max_lora_rank 32" in server
    reply = httpx.get(reader.with_server_port("http://localhost:8000/api/v1/healthz"))
    assert (reply.status_code, reply.text) == (200, '{"status":"ok"}')


def test_the_check_script_needs_no_activated_environment(reader: Reader, server: str) -> None:
    command = "SKYRL_TX_URL=http://localhost:8000 python scripts/test_skyrl_tx.py"
    assert "6 of 6 checks hold" in reader.run(command, activated=False)


def test_the_error_names_the_command_that_activates_the_venv(reader: Reader) -> None:
    answer = reader.run("python -m src.train backend=skyrl-tx", status=1, activated=False)
    assert answer.count("\n") == 1 and "source .venv/bin/activate" in answer


def test_run_skyrl_tx_trains_on_the_running_server(reader: Reader, server: str, tasks: Path) -> None:
    """SIGINT stops the run after it has printed the line that begins with "tasks: "."""
    template = (reader.clone / ".env.skyrl-tx.example").read_text()
    (reader.clone / ".env.skyrl-tx").write_text(reader.with_server_port(template))
    run = subprocess.Popen(
        ["./run_skyrl_tx.sh"],
        cwd=reader.clone,
        env=reader.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    printed = []
    assert run.stdout is not None
    for line in run.stdout:
        printed.append(line)
        if line.startswith("tasks: "):
            os.killpg(run.pid, signal.SIGINT)
            break
    printed += run.communicate(timeout=TIMEOUT_S)[0].splitlines(keepends=True)
    text = "".join(printed)
    assert run.returncode == 130, text
    assert f"using the server at http://localhost:{reader.port}: {MODEL}, {CONTEXT} tokens" in text
    change = f"context_limit={CONTEXT} instead of 128000"
    assert f"fitted to the server's context of {CONTEXT} tokens: {change}" in text
    assert "wandb is off" in text and "tasks: 1 to train on, 1 held out; 2 steps" in text
    [config] = (json.loads(path.read_text()) for path in (reader.clone / "runs").glob("*/config.json"))
    recipe: dict[str, str] = {}
    for word in RECIPE.replace("\\", "").split():
        name, _, value = word.partition("=")
        recipe[name] = value
    for changed in ("context_limit", "environment_type", "wandb_project", "wandb_name"):
        del recipe[changed]
    assert {name: str(config[name]).lower() for name in recipe} == {
        name: str(literal(value)).lower() for name, value in recipe.items()
    }


# Document 003: phase 2 and the scenarios


def test_the_error_for_the_recipe_names_the_servers_options(reader: Reader, server: str, tasks: Path) -> None:
    reader.expect_error(
        TRAIN + RECIPE,
        f"context_limit=128000 exceeds the server's {CONTEXT} tokens for {MODEL}; lower it, or start the "
        "server with max_context_length=128000 yarn=true",
    )


def test_the_tinker_backend_needs_an_api_key(reader: Reader, tasks: Path) -> None:
    reader.expect_error("./run.sh", "backend=tinker needs an API key: set TINKER_API_KEY", activated=False)


def test_the_flags_of_scenario_2_are_accepted(reader: Reader, server: str) -> None:
    """The port is in use. The server detects this after it has read its options."""
    flags = "--base-model Qwen/Qwen3-4B --tensor-parallel-size 1 --max-lora-rank 32 --gradient-checkpointing"
    answer = reader.run(f"scripts/start_skyrl_tx.sh {flags} --port {reader.port}", status=2)
    [notice, error] = answer.splitlines()
    assert "--gradient-checkpointing has no effect: " in notice and "Address already in use" in error


def test_the_error_of_scenario_3_names_tensor_parallel(reader: Reader) -> None:
    """The small model has 3 key-value heads and Qwen3-30B-A3B has 4. Neither number is a multiple of 8, the
    number of devices.
    """
    flags = "--base-model Qwen/Qwen3-30B-A3B --tensor-parallel-size 8 --max-lora-rank 32 "
    flags += "--train-micro-batch-size 2 --gradient-checkpointing"
    answer = reader.run(f"scripts/start_skyrl_tx.sh {flags} dry_run=true", status=2)
    assert "tensor_parallel=8" in answer.splitlines()[-1], answer


# Document 003: tests and troubleshooting


def test_the_program_of_test_1_runs(reader: Reader, server: str) -> None:
    (reader.clone / "test_skyrl_tx_api.py").write_text(reader.with_server_port(TEST_SKYRL_TX_API))
    printed = reader.run("TINKER_API_KEY=tml-dummy python test_skyrl_tx_api.py", uses_sdk=True)
    assert "Created training client" in printed and "Tokenizer works: [" in printed
    assert printed.endswith("Sampling client created\n")


def test_the_single_task_of_test_2_is_trained(reader: Reader, run_directory: Path) -> None:
    reader.expect_error(TRAIN + SINGLE_TASK, "start Docker, or use environment_type=sandbox")
    steps = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1]
    assert steps[1]["trials/graded"] == 2 and steps[1]["tokens/trained"] > 0


def test_the_unserved_model_error_names_the_served_model(reader: Reader, server: str, tasks: Path) -> None:
    command = TRAIN.replace(MODEL, "deepseek-ai/DeepSeek-V3.1") + "  environment_type=sandbox"
    reader.expect_error(
        command, f"DeepSeek-V3.1 is not served at http://localhost:{reader.port}; it serves: {MODEL}"
    )
    reader.expect_error(
        "scripts/start_skyrl_tx.sh --base-model deepseek-ai/DeepSeek-V3.1",
        "base_model=deepseek-ai/DeepSeek-V3.1: not a local directory, and the hub download failed",
    )


def test_the_context_length_error_names_the_server_option(reader: Reader, server: str, tasks: Path) -> None:
    reader.expect_error(
        "SKYRL_TX_URL=http://localhost:8000 ./run_skyrl_tx.sh context_limit=128000",
        f"context_limit=128000 exceeds the server's {CONTEXT} tokens; lower it, or start the server with "
        "max_context_length=128000 yarn=true",
    )


def test_a_missing_server_gives_a_one_line_error(reader: Reader, tasks: Path) -> None:
    command = TRAIN.replace("localhost:8000", "localhost:1") + "  environment_type=sandbox"
    reader.expect_error(command, "no server answers at http://localhost:1 (ConnectError); start it", status=1)


def test_a_missing_terminal_bench_2_gives_one_line_errors(reader: Reader, server: str, tasks: Path) -> None:
    """The script that downloads the tasks cannot reach the hub."""
    moved = tasks.rename(tasks.with_name("kept"))
    try:
        reader.expect_error(
            "HTTPS_PROXY=http://127.0.0.1:1 scripts/setup.sh terminal-bench-2",
            "cannot reach https://hub.harborframework.com; copy the directory",
            status=1,
        )
        reader.expect_error(
            TRAIN,
            "datasets/terminal-bench-2 is not a directory; download it with scripts/setup.sh "
            "terminal-bench-2",
        )
    finally:
        moved.rename(tasks)


# Document 004: analysis of a run


def test_one_command_lists_failing_tasks_and_patterns(reader: Reader, run_directory: Path) -> None:
    directory = run_directory.relative_to(reader.clone)
    assert reader.run(f"python -m src.analyze runs={directory}") == "wrote experiments.md\n"
    text = (reader.clone / "experiments.md").read_text()
    assert "### Held-out tasks, step 0 → 1" in text and "| pass@3 |" in text and "avg tool calls" in text
    assert "### Tasks that fail, step 1" in text and "### Failed trials by pattern" in text
    assert "### Training signal" in text and "avg variance" in text


def test_one_command_prints_the_conversations_of_tasks(reader: Reader, run_directory: Path) -> None:
    printed = reader.run(f"python -m src.analyze runs={run_directory.relative_to(reader.clone)} task='*'")
    assert printed.count("### ") == 3 and "-> bash_command({" in printed and "[assistant]" in printed


def test_the_dumps_have_the_fields_and_keys_of_the_document(run_directory: Path) -> None:
    directory = run_directory / "dumped_evals" / "global_step_0_evals"
    aggregated = json.loads((directory / "aggregated_results.jsonl").read_text())
    environments = [path.stem for path in directory.glob("*.jsonl") if path.stem != "aggregated_results"]
    assert len(environments) == 1 and 0 <= aggregated["eval/all/pass_at_3"] <= 1
    for name in environments:
        for line in (directory / f"{name}.jsonl").read_text().splitlines():
            trial = json.loads(line)
            fields = {"input_prompt", "output_response", "score", "stop_reason", "env_extras"}
            assert fields <= trial.keys() and {"task_key", "data_source"} <= trial["env_extras"].keys()


def literal(value: str) -> object:
    """Convert the text of an option to a value with the same `str` as the option's value in config.json."""
    return {"true": True, "false": False}.get(value, float(value) if "e-" in value else value)

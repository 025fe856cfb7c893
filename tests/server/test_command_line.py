"""Tests of the server's command line: options and their errors, SkyRL's flags, help, the start script and dry
runs with their memory plan.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import chz
import jax
import numpy as np
import pytest

from skyrl_tx_server import export
from skyrl_tx_server.__main__ import main
from skyrl_tx_server.config.bounds import BOUNDS
from skyrl_tx_server.config.command_line import help_text, parse, with_secrets
from skyrl_tx_server.config.flags import OPTION_OF_FLAG, WITHOUT_EFFECT
from skyrl_tx_server.config.renamed import RENAMED_OPTIONS
from skyrl_tx_server.config.server_config import ServerConfig
from skyrl_tx_server.distributed.multihost import RankZero
from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.executor.cache_size import fitting_cache
from skyrl_tx_server.executor.memory_plan import plan_memory
from skyrl_tx_server.executor.resolved_model import resolve_model, use_compilation_cache
from skyrl_tx_server.model.config_json import load_model_config
from skyrl_tx_server.model.kv_cache import empty_cache
from skyrl_tx_server.model.lora.adapter import zero_adapter
from skyrl_tx_server.model.weights import load_params
from tests.fakes.tiny_model import make_settings
from tests.server.tiny_qwen3 import FIXTURES

NUMERIC_OPTIONS = {
    name: field
    for name, field in chz.chz_fields(ServerConfig).items()
    if {int, float} & {field.final_type, *get_args(field.final_type)}
}
ROOT = Path(__file__).resolve().parents[2]
TWO_PROCESSES = ["coordinator_address=127.0.0.1:7000", "num_processes=2", "tensor_parallel=2"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["base_model=x", "prt=9"], "unknown option 'prt=9'; did you mean port=...?"),
        (["base_model=x", "--prt=9"], "did you mean port=...?"),
        (["base_model=x", "--port"], "--port needs a value, as in port=VALUE"),
        (
            ["base_model=x", "--api-key", "tml-x"],
            "--api-key is not accepted: set SKYRL_TX_API_KEY, or pass api_key_file=FILE",
        ),
        (
            ["base_model=x", "--enforce-eager"],
            "--enforce-eager is not accepted: programs are always compiled; remove the flag",
        ),
        (["base_model"], "not of the form key=value; did you mean base_model=...?"),
        (["zzz=1"], "unknown option 'zzz=1'; see --help"),
        (["port=9"], "missing option base_model"),
        (["base_model=x", "port=abc"], "port=abc: expected int"),
        (["base_model=x", "dtype=float8"], "dtype=float8: expected auto | float32 | bfloat16"),
        (["base_model=x", "port=99999"], "between 0 and 65535"),
        (["base_model=x", "dtype=int8"], "dtype=int8: expected"),
        (["base_model=x", "tensor_parallel=0"], "tensor_parallel=0: must be above 0"),
        (
            ["base_model=x", "max_loras=1000000"],
            "max_loras=1000000: must be above 0 and at most 10000",
        ),
        (["base_model=x", "checkpoint_quota_gb=nan"], "checkpoint_quota_gb=nan: must be above 0"),
        (["base_model=x", "session_timeout_s=nan"], "session_timeout_s=nan: must be above 0"),
        (["base_model=x", "api_key=tml-with space"], "without spaces"),
        (
            [f"base_model={FIXTURES / 'tied'}", "max_loras=10000", "max_lora_rank=4096", "port=0"],
            "lower max_loras or max_lora_rank",
        ),
        (["base_model=x", "max_lora_rank=0"], "max_lora_rank=0: must be above 0"),
        (["base_model=x", "model_alias=/models/tiny"], "must be org/name"),
        (["base_model=x", "checkpoints_dir=/proc/nowhere"], "checkpoints_dir=/proc/nowhere"),
        (["base_model=x", "host=256.0.0.1", "allow_anyone=true"], "host=256.0.0.1"),
        (["base_model=x", f"host={'a' * 64}.b", "allow_anyone=true"], "not a host name"),
        (["base_model=x", "host=0.0.0.0"], "pass api_key=tml-... or allow_anyone=true"),
        (["base_model=x", "host=my-machine"], "pass api_key=tml-... or allow_anyone=true"),
        (["base_model=x", "api_key=secret"], "must begin with tml-"),
        (
            ["base_model=x", "num_processes=2"],
            "coordinator_address and num_processes: set both for a server of several processes, or none",
        ),
        (["base_model=x", "coordinator_address=a:1"], "coordinator_address and num_processes"),
        (
            ["base_model=x", *TWO_PROCESSES, "warmup=true"],
            "warmup=true needs num_processes=1",
        ),
        (
            ["base_model=x", *TWO_PROCESSES, "process_id=2"],
            "process_id=2: must lie between 0 and num_processes - 1, which is 1",
        ),
        (
            ["base_model=x", *TWO_PROCESSES, "tensor_parallel=1"],
            "num_processes=2: must divide the 1 devices",
        ),
        (
            ["base_model=x", *TWO_PROCESSES, "coordinator_address=localhost"],
            "must be host:port, as in 10.0.0.1:7000",
        ),
        (
            ["base_model=x", *TWO_PROCESSES],
            "several processes need a common secret: cluster_key_file=FILE, or",
        ),
        (
            ["base_model=x", *TWO_PROCESSES, "cluster_key_file=no-such-file"],
            "cluster_key_file=no-such-file: cannot be read: No such file",
        ),
        (
            ["base_model=x", *TWO_PROCESSES, "cluster_key_file=/dev/null"],
            "has 0 characters; at least 32 random characters are needed",
        ),
        (["base_model=x", "ssl_certfile=cert.pem"], "set both for https"),
        (
            ["base_model=x", "ssl_certfile=no-such.pem", "ssl_keyfile=no-such.pem"],
            "ssl_certfile=no-such.pem: no such file",
        ),
        (
            ["base_model=x", f"ssl_certfile={__file__}", f"ssl_keyfile={__file__}"],
            "not a certificate and its key",
        ),
    ],
)
def test_an_invalid_command_line_gives_one_line_and_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    default_dir = (
        [] if any("checkpoints_dir" in argument for argument in argv) else [f"checkpoints_dir={tmp_path}"]
    )
    assert main([*argv, *default_dir]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("skyrl-tx server: ") and printed.err.count("\n") == 1
    assert message in printed.err


def test_every_numeric_option_declares_its_bounds() -> None:
    assert NUMERIC_OPTIONS and all(BOUNDS in (field.metadata or {}) for field in NUMERIC_OPTIONS.values())


@pytest.mark.parametrize("name", NUMERIC_OPTIONS)
def test_a_numeric_option_must_be_finite_and_within_its_bounds(name: str) -> None:
    is_float = float in {NUMERIC_OPTIONS[name].final_type, *get_args(NUMERIC_OPTIONS[name].final_type)}
    for value in ("nan", "inf", "-inf", "1e300") if is_float else ("9" * 30, "-1"):
        port = [] if name == "port" else ["port=0"]
        with pytest.raises(ConfigError, match=rf"^{name}=.*: must "):
            parse(["base_model=x", f"{name}={value}", *port])


def test_a_port_in_use_is_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main(["base_model=no-such-directory", f"port={port}", f"checkpoints_dir={tmp_path}"]) == 2
    assert f"port={port}: Address already in use" in capsys.readouterr().err


def test_help_names_every_option_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == help_text() + "\n"
    assert "  base_model " in help_text() and "(required)" in help_text() and "(default 8000)" in help_text()
    options = [line.split()[0] for line in help_text().splitlines() if line.startswith("  ")]
    assert sorted(options) == sorted(chz.chz_fields(ServerConfig))


def test_the_help_of_a_word_lists_the_matching_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "slots"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert "max_num_seqs" in names and "port" not in names and lines[0] == ""
    assert export.main(["merge", "--help", "dtype"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert names == ["dtype"]
    assert main(["--help", "zebra"]) == 0
    assert capsys.readouterr().out == "no option contains zebra; --help lists all options\n"


@pytest.mark.parametrize(
    ("program", "argv"), [(main, ["--help"]), (export.main, ["--help"]), (export.main, ["merge", "--help"])]
)
def test_help_into_a_closed_pipe_prints_no_traceback(
    program: Callable[[list[str]], int], argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed_pipe:
        monkeypatch.setattr(sys, "stdout", closed_pipe)
        assert program(argv) == 0


@pytest.mark.parametrize(
    ("script_args", "server_args"),
    [
        ([], "base_model=Qwen/Qwen3-4B tensor_parallel=1"),
        (["port=9"], "base_model=Qwen/Qwen3-4B tensor_parallel=1 port=9"),
        (["a/b", "port=9", "dtype=auto"], "base_model=a/b tensor_parallel=1 port=9 dtype=auto"),
        (["a/b", "2", "port=9"], "base_model=a/b tensor_parallel=2 port=9"),
        (["--help"], "--help"),
    ],
)
@pytest.mark.seed_behaviour(112)
def test_the_start_script_passes_its_arguments_to_the_server(
    script_args: list[str], server_args: str, tmp_path: Path
) -> None:
    for name, text in (("setup.sh", ""), ("gpu_flags.sh", ""), ("python", 'echo "${@:3}"')):
        path = tmp_path / (".venv/bin" if name == "python" else "scripts") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    script = Path(__file__).resolve().parents[2] / "scripts" / "start_skyrl_tx.sh"
    script_copy = shutil.copy(script, tmp_path / "scripts")
    assert (
        subprocess.run([script_copy, *script_args], capture_output=True, text=True, check=True).stdout
        == server_args + "\n"
    )


def test_the_default_alias_is_the_name_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    assert ServerConfig(base_model=str(tmp_path / "tiny")).alias == "local/tiny"
    assert ServerConfig(base_model="Qwen/Qwen3-4B").alias == "Qwen/Qwen3-4B"
    assert (
        ServerConfig(base_model=str(tmp_path / "tiny"), model_alias="Qwen/Qwen3-8B").alias == "Qwen/Qwen3-8B"
    )


def test_a_dry_run_prints_the_memory_plan_and_writes_no_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, checkpoints = FIXTURES / "tied", tmp_path / "checkpoints"
    options = [
        f"base_model={model}",
        f"checkpoints_dir={checkpoints}",
        "dry_run=true",
        "dtype=float32",
        "max_lora_rank=4",
    ]
    assert main([*options, "max_num_seqs=2", "compilation_cache_dir=none"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("memory plan for ") and printed.endswith("fits into memory\n")
    assert "KV cache of 640 tokens" in printed
    assert not checkpoints.exists()


def test_a_dry_run_refuses_truncated_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = Path(shutil.copytree(FIXTURES / "tied", tmp_path / "model"))
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:-1000])
    assert main([f"base_model={model}", "dry_run=true", "compilation_cache_dir=none"]) == 2
    printed = capsys.readouterr()
    assert "cannot read the weights: model.safetensors" in printed.err and printed.err.count("\n") == 1


def test_process_0_of_a_dry_run_exits_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """jax would abort the other processes when process 0 exits, possibly before they have a plan."""
    calls: list[str] = []

    class FakeRankZero(RankZero):
        def broadcast_from_rank0[Value](self, evaluate: Callable[[], Value]) -> Value:
            calls.append("broadcast")
            return evaluate()

        def wait_for_exit(self) -> None:
            calls.append("wait")

    def plan(config: ServerConfig) -> None:
        calls.append("plan")
        raise ConfigError("too few devices")

    monkeypatch.setattr("skyrl_tx_server.distributed.rendezvous.lead", lambda *_: FakeRankZero())
    monkeypatch.setattr("skyrl_tx_server.executor.memory_plan.plan_memory", plan)
    (tmp_path / "key").write_text("k" * 32)
    options = [*TWO_PROCESSES, f"cluster_key_file={tmp_path / 'key'}", "dry_run=true"]
    assert main([f"base_model={FIXTURES / 'tied'}", *options]) == 2
    assert calls == ["plan", "broadcast", "wait"]


def test_virtual_devices_have_enough_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` sets NPROC, which XLA reads at its start. `main` then fails, because this process has fewer than
    32 devices.
    """
    monkeypatch.setenv("NPROC", "1")  # makes monkeypatch restore NPROC after the test
    monkeypatch.delenv("NPROC")
    assert main([f"base_model={FIXTURES / 'tied'}", "data_parallel=32", "dry_run=true"]) == 2, (
        "main must fail, because this process has fewer than 32 devices"
    )
    assert int(os.environ["NPROC"]) >= 4 * 32


@pytest.mark.seed_behaviour(82)
def test_a_plan_that_does_not_fit_names_an_option_to_lower(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [f"base_model={FIXTURES / 'tied'}", "dry_run=true", "compilation_cache_dir=none"]
    assert main([*options, "max_num_seqs=1000000"]) == 2
    printed = capsys.readouterr()
    assert "total" in printed.out and printed.err.count("\n") == 1
    assert "the model does not fit into memory; reduce its largest parts with cache_tokens (" in printed.err


def test_the_memory_plan_is_exact_for_weights_cache_and_adapters() -> None:
    settings = make_settings(FIXTURES / "tied", Path("unused"), max_num_seqs=3)
    plan = plan_memory(settings)
    config = load_model_config(FIXTURES / "tied")
    weights = load_params(FIXTURES / "tied", config, "float32")
    assert plan.items[0].num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    cache = fitting_cache(resolve_model(settings), 1e9)
    assert plan.items[1].num_bytes == sum(
        leaf.nbytes
        for leaf in jax.tree.leaves(empty_cache(config=config, pages=cache.pages, dtype=np.dtype(np.float32)))
    )
    adapter = sum(leaf.nbytes for leaf in jax.tree.leaves(zero_adapter(config, settings.max_lora_rank)))
    assert settings.max_models is not None
    # Every training model takes the memory of five adapters, and one optimizer step that of five more.
    assert plan.items[2].num_bytes == (settings.max_models * 5 + 5) * adapter


@pytest.mark.parametrize(
    ("old_option", "new_option"),
    [
        ("decode_slots=3", "max_num_seqs=3"),
        ("decode_block=8", "decode_steps_per_dispatch=8"),
        ("max_snapshots=2", "max_loras=2"),
        ("stretch_context=true", "yarn=true"),
        ("sampled_logprobs=tempered", "logprobs_mode=processed"),
        ("sampled_logprobs=model", "logprobs_mode=raw"),
        ("compile_ahead=false", "warmup=false"),
    ],
)
def test_an_old_option_name_is_accepted_with_one_notice(
    old_option: str, new_option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(["base_model=x", old_option]) == parse(["base_model=x", new_option])
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and old_option in printed and new_option in printed


@pytest.mark.seed_behaviour(82, 127)
def test_flags_of_skyrls_server_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--base-model Qwen/Qwen3-30B-A3B --tensor-parallel-size 4 --max-lora-rank 32 "
    flags += (
        "--gradient-checkpointing --train-micro-batch-size 2 --sample-max-num-sequences=64 --yarn --port 9"
    )
    config = parse(flags.split())
    options = ["tensor_parallel=4", "max_lora_rank=32", "max_num_seqs=64", "yarn=true", "port=9"]
    assert config == parse(["base_model=Qwen/Qwen3-30B-A3B", *options])
    printed = capsys.readouterr().err.splitlines()
    assert [line.partition(" has no effect: ")[0] for line in printed] == [
        "skyrl-tx server: --gradient-checkpointing",
        "skyrl-tx server: --train-micro-batch-size",
    ]
    assert "train_tokens_per_batch" in printed[1]
    assert parse(["base_model=x", "tensor_parallel_size=2"]).tensor_parallel == 2
    assert parse(["base_model=a", "port=1", "--base-model", "b", "port=2"]).base_model == "b"


def test_the_flag_api_key_file_sets_the_api_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("tml-secret\n")
    flags = ["--base-model", "x", "--api-key-file", str(tmp_path / "key")]
    assert parse(with_secrets(flags, {})).api_key == "tml-secret"
    (tmp_path / "key").write_text("tml-" + "a" * 5000)
    with pytest.raises(ConfigError, match="the file has more than 4096 bytes"):
        with_secrets(flags, {})


def test_the_value_of_a_flag_may_contain_an_equals_sign() -> None:
    assert parse(["--base-model", "./a=b", "port=1"]).base_model == "./a=b"
    with pytest.raises(ConfigError, match="--base-model needs a value"):
        parse(["--base-model", "port=1"])
    flags = ["--base-model", "x", "--yarn", "checkpoints_base=/x", "--gradient-checkpointing"]
    config = parse([*flags, "max_model_len=4096"])
    assert (config.checkpoints_dir, config.max_context_length, config.yarn) == ("/x", 4096, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["api_key=tml-a", "api_key_file=/dev/null"], "api_key and api_key_file: both are given"),
        (["api_key=none", "port=99999"], "port=99999"),
        (["api_key=tml-a", "api_key_file=none", "port=99999"], "port=99999"),
        (["sampler_api_key=s", "api_key_file=/dev/null"], "api_key_file=/dev/null: the file is empty"),
        (["api_key=tml-a", "port=99999"], "port=99999"),
    ],
)
def test_a_key_on_the_command_line_of_the_program_is_checked(arguments: list[str], message: str) -> None:
    """The program moves a key to the environment before it parses its options."""
    command = [sys.executable, "-m", "skyrl_tx_server", "base_model=x", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and message in result.stderr.splitlines()[-1]
    assert ("was visible" in result.stderr) == (
        arguments[0] != "api_key=none" and arguments[:2] != ["api_key=tml-a", "api_key_file=/dev/null"]
    )


@pytest.mark.parametrize("name", ["base_model", "checkpoints_dir", "host"])
@pytest.mark.parametrize("value", ["", "none", "null"])
def test_options_without_the_value_none_refuse_it(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value}: expected text"):
        parse(["base_model=x", f"{name}={value}"])


def test_a_key_named_none_is_refused(tmp_path: Path) -> None:
    """Otherwise the server would accept requests without a key."""
    with pytest.raises(ConfigError, match=r"'none' is not a key; .* unset SKYRL_TX_API_KEY"):
        with_secrets(["base_model=x"], {"SKYRL_TX_API_KEY": "none"})
    (tmp_path / "key").write_text("null\n")
    with pytest.raises(ConfigError, match="'null' is not a key"):
        with_secrets([f"api_key_file={tmp_path / 'key'}"], {})
    assert parse(with_secrets(["base_model=x"], {"SKYRL_TX_API_KEY": ""})).api_key is None


def test_the_home_of_an_unknown_user_gives_one_line() -> None:
    with pytest.raises(ConfigError, match="api_key_file=~nosuchuser/k: cannot be read: No such file"):
        with_secrets(["api_key_file=~nosuchuser/k"], {})
    with pytest.raises(ConfigError, match="ssl_certfile=~nosuchuser/k: no such file"):
        parse(["base_model=x", "ssl_certfile=~nosuchuser/k", "ssl_keyfile=~nosuchuser/k"])


def test_a_colon_in_a_file_name_is_replaced_in_the_alias(tmp_path: Path) -> None:
    config = parse([f"base_model={tmp_path / 'qwen3:4b.gguf'}"])
    assert config.alias == "local/qwen3-4b"
    chz.replace(config, base_model=str(tmp_path), model_alias=config.alias)


def test_a_linked_gguf_file_is_served_under_the_name_of_the_link(tmp_path: Path) -> None:
    (tmp_path / "blob").touch()
    (tmp_path / "qwen3.gguf").symlink_to("blob")
    assert parse([f"base_model={tmp_path / 'qwen3.gguf'}"]).alias == "local/qwen3"


def test_every_flag_maps_to_an_option_or_has_no_effect() -> None:
    options = chz.chz_fields(ServerConfig)
    assert all(new in options and old not in options for old, new in OPTION_OF_FLAG.items())
    assert not WITHOUT_EFFECT.keys() & options.keys()


def test_every_old_option_name_maps_to_an_option() -> None:
    options = chz.chz_fields(ServerConfig)
    assert all(new in options and old not in options for old, new in RENAMED_OPTIONS.items())


@pytest.mark.parametrize("value", ["", "none", "None", "null", "NULL"])
def test_an_empty_value_none_and_null_are_parsed_as_none(value: str) -> None:
    assert parse(["base_model=x", f"max_context_length={value}"]).max_context_length is None
    assert parse(["base_model=x", f"compilation_cache_dir={value}"]).compilation_cache_dir is None


def test_ctrl_c_during_the_imports_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "chz.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    command = [sys.executable, "-m", "skyrl_tx_server", f"base_model={FIXTURES / 'tied'}"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_a_compilation_cache_that_cannot_be_made_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    config = parse([f"base_model={tmp_path}", f"compilation_cache_dir={tmp_path}/file/xla"])
    use_compilation_cache(config)
    assert jax.config.values["jax_compilation_cache_dir"] != f"{tmp_path}/file/xla"
    (line,) = caplog.messages
    assert "file/xla: Not a directory; every start compiles all programs" in line

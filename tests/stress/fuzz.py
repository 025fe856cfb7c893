"""Coverage-guided fuzzing of the parsers and file readers of the server and the trainer, with atheris
(`scripts/setup.sh atheris` installs it).

    python -m tests.stress.fuzz TARGET [libFuzzer options, for example -max_total_time=600]
    python -m tests.stress.fuzz TARGET FILE     (runs the input in FILE once)
    python -m tests.stress.fuzz all [minutes=10] [targets=routes,files,...]

| target     | input                                                                                      |
|------------|--------------------------------------------------------------------------------------------|
| `bytes`    | a protobuf training request                                                                |
| `text`     | a JSON document for every parser of request bodies                                         |
| `messages` | mutated valid protobuf training requests, drawn by the strategies of `tests/fakes`         |
| `json`     | mutated valid JSON request bodies                                                          |
| `routes`   | a body for a route of the server: byte 0 selects the route, byte 1 the encoding            |
| `files`    | a file that the server or the trainer reads when it starts: byte 0 selects the reader      |

A finding is one of the following: an exception that is not an intended error, a status of 500 or more, an
input that takes more than ROUTE_CPU_S or FILE_CPU_S, or resident memory that grows by more than
MAX_GROWTH_MIB after the first quarter of the time. The time of an input is the CPU time of the whole process.
Therefore a loaded machine causes no finding, and a call that only waits is not detected.

A finding ends its target with a traceback, and libFuzzer writes the input to a file (by default in the
current directory). `all` runs the targets one after another and prints one line for each target. For a
finding it also prints the traceback and the path of the input file, which it does not delete.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROUTE_CPU_S = 0.5
FILE_CPU_S = 1.0
MAX_GROWTH_MIB = 64.0
TARGETS = ("bytes", "text", "messages", "json", "routes", "files")
UNCAUGHT = "=== Uncaught Python exception"  # atheris prints this line before a traceback
WRITTEN = "Test unit written to "  # libFuzzer prints this text before the path of a file


@contextlib.contextmanager
def cpu_time_limit(limit_s: float) -> Iterator[None]:
    """Raise an AssertionError if the block takes more CPU time of this process than `limit_s` seconds."""
    began = time.process_time()
    yield
    used_s = time.process_time() - began
    assert used_s < limit_s, f"the input took {used_s:.1f} s of CPU time"


def resident_mib() -> float:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(kw_only=True, slots=True)
class Growth:
    """Checks that resident memory grows by less than MAX_GROWTH_MIB after the first quarter of `total_s`."""

    total_s: float
    began: float = field(default_factory=time.monotonic)
    inputs: int = 0
    settled_mib: float | None = None

    def check(self) -> None:
        self.inputs += 1
        if self.inputs % 500:
            return
        if self.settled_mib is None and time.monotonic() > self.began + self.total_s / 4:
            self.settled_mib = resident_mib()
        if self.settled_mib is not None:
            growth_mib = resident_mib() - self.settled_mib
            assert growth_mib < MAX_GROWTH_MIB, (
                f"resident memory grew by {growth_mib:.0f} MiB within {self.inputs} inputs"
            )


# --- routes ---

ENCODINGS: tuple[dict[bytes, bytes], ...] = (
    {b"content-type": b"application/json"},
    {b"content-type": b"application/x-protobuf"},
    {b"content-type": b"application/json", b"content-encoding": b"zstd"},
    {},
)


def route_target(directory: Path) -> Callable[[bytes], object]:
    """Return a function that sends an input to a route of the application, which uses the fake engine."""
    from skyrl_tx_server.engine.futures import Retention
    from skyrl_tx_server.http.app import ENDPOINTS, build_app
    from skyrl_tx_server.http.http_handler import StartupState
    from tests.fakes.server import fake_context

    endpoints = [endpoint for endpoint in ENDPOINTS if endpoint.method != "GET"]
    app = build_app(
        StartupState(
            state=fake_context(directory, retention=Retention(hold_s=0.001, grace_s=0.01, max_finished=100))
        )
    )
    loop = asyncio.new_event_loop()

    def target(data: bytes) -> None:
        if len(data) < 2:
            return
        endpoint, headers = endpoints[data[0] % len(endpoints)], ENCODINGS[data[1] % len(ENCODINGS)]
        path = (
            endpoint.path.replace("{session_id}", "s")
            .replace("{run_id}", "r")
            .replace("{checkpoint_id:path}", "weights/a")
        )
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": endpoint.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"127.0.0.1:8000"), *headers.items()],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 8000),
        }
        parts: Iterator[dict[str, object]] = iter(
            ({"type": "http.request", "body": data[2:], "more_body": False},)
        )
        statuses: list[int] = []
        bodies: list[bytes] = []

        async def receive() -> dict[str, object]:
            return next(parts, {"type": "http.disconnect"})

        async def send(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(int(str(message["status"])))
            else:
                bodies.append(bytes(message.get("body") or b""))  # pyright: ignore[reportArgumentType]

        with cpu_time_limit(ROUTE_CPU_S):
            loop.run_until_complete(app(scope, receive, send))  # pyright: ignore[reportArgumentType]
        answer = b"".join(bodies)
        assert statuses and statuses[0] < 500 and b"internal error" not in answer, (
            endpoint.path,
            statuses,
            answer[:500],
        )

    return target


def route_seeds() -> list[bytes]:
    """Return valid inputs of the target `routes`."""
    from skyrl_tx_server.http.app import ENDPOINTS
    from tests.fakes.bodies import VALID, VALID_MESSAGES

    small_bodies = {
        "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}},
        "create_model": {
            "session_id": "s",
            "model_seq_id": 0,
            "base_model": "local/fake",
            "lora_config": {"rank": 4},
        },
        "save_weights": {
            "model_id": "s:train:0",
            "seq_id": 1,
            "path": "a",
            "ttl_seconds": 60,
            "overwrite": True,
        },
        "load_weights": {"model_id": "s:train:0", "path": "tinker://s:train:0/weights/a", "optimizer": True},
        "retrieve_future": {"request_id": "sample-0"},
        "weights_info": {"tinker_path": "tinker://a/weights/b"},
    }
    bodies: dict[str, object] = {
        **VALID,
        **small_bodies,
        "chat/completions": VALID["chat"],
        "completions": VALID["completion"],
    }
    seeds = []
    for number, endpoint in enumerate(endpoint for endpoint in ENDPOINTS if endpoint.method != "GET"):
        body = next((body for name, body in bodies.items() if endpoint.path.endswith("/" + name)), {})
        seeds.append(bytes([number, 0]) + json.dumps(body).encode())
        if endpoint.path.endswith(("forward_backward", "forward")):
            seeds += [bytes([number, 1]) + message for message in VALID_MESSAGES]
    return seeds


# --- files ---


def file_readers(directory: Path) -> dict[str, Callable[[bytes], object]]:
    """Return a reader for each file that a program reads at its start, by a short name.

    A reader writes its argument to the file and then reads the file.
    """
    from skyrl_tx_server.files.checkpoints import CheckpointStore
    from skyrl_tx_server.files.run_index import RunIndex
    from skyrl_tx_server.model.config_json import load_model_config
    from src.envs.sandbox.dockerfile import parse_dockerfile
    from src.envs.service.task_files import read_rows
    from src.records import checkpoints
    from src.records.journal import Journal
    from src.records.rollout_store import FinishedRollouts

    def write_file(name: str, content: bytes) -> Path:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    store = CheckpointStore(directory / "store", "local/fake")

    def checkpoint_record(content: bytes) -> None:
        write_file("store/run/weights/a/checkpoint.json", content)
        store.list()
        store.read("tinker://run/weights/a")

    def rows(content: bytes) -> None:
        read_rows(write_file("rows.jsonl", content))

    def finished_rollouts(content: bytes) -> None:
        run = write_file("finished_run/finished/step_000001.jsonl", content).parent.parent
        FinishedRollouts(run, Journal(run)).load("step", 1)

    return {
        "checkpoint record": checkpoint_record,
        "ledger": lambda content: RunIndex(write_file("ledger.jsonl", content)).expired(),
        "model configuration": lambda content: load_model_config(
            write_file("model/config.json", content).parent
        ),
        "journal": lambda content: Journal(write_file("run/journal.jsonl", content).parent).states_until(10),
        "checkpoints of a run": lambda content: checkpoints.last(
            write_file("run2/checkpoints.jsonl", content).parent
        ),
        "finished rollouts": finished_rollouts,
        "task rows": rows,
        "Dockerfile": lambda content: parse_dockerfile(write_file("environment/Dockerfile", content)),
    }


FILE_SEEDS: dict[str, object] = {
    "checkpoint record": {
        "format": "skyrl_tx_server checkpoint",
        "version": 1,
        "base_model": "local/fake",
        "base_model_hash": None,
        "lora": {"rank": 4, "alpha": 32.0, "seed": 1},
        "step": 1,
        "created_at": "2026-01-01T00:00:00+00:00",
        "user_metadata": {},
        "arrays": "arrays-0.safetensors",
        "size_bytes": 10,
        "sha256": "00",
    },
    "ledger": {"path": "tinker://a/weights/b", "expires_at": "2026-01-01T00:00:00+00:00"},
    "model configuration": {
        **{
            "model_type": "qwen3",
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
        },
        **{
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
        },
    },
    "journal": {
        "event": "rollout_started",
        "purpose": "step",
        "step": 1,
        "task": "a",
        "member": 0,
        "attempt": 1,
        "policy_version": 0,
        "seed": 7,
    },
    "checkpoints of a run": {"name": "000001", "step": 1, "state_path": "tinker://a/weights/b"},
    "finished rollouts": {"purpose": "step", "step": 1, "task": "a", "member": 0, "outcome": "graded"},
    "task rows": {
        "data_source": "tau_bench/retail",
        "env_class": "tau_bench",
        "extra_info": {"domain": "retail", "task_id": "7"},
    },
    "Dockerfile": "FROM debian\nWORKDIR /app\nENV A=b\nCOPY a /b\nRUN apt-get install -y curl && true\n",
}


def file_target(directory: Path) -> Callable[[bytes], object]:
    """Return a function that passes an input to a reader of `file_readers`."""
    from skyrl_tx_server.errors import ServerError
    from src.core.errors import TrainerError

    readers = list(file_readers(directory).values())

    def target(data: bytes) -> None:
        if not data:
            return
        with cpu_time_limit(FILE_CPU_S):
            try:
                readers[data[0] % len(readers)](data[1:])
            except (ServerError, TrainerError) as error:
                assert str(error)

    return target


def file_seeds(directory: Path) -> list[bytes]:
    """Return valid inputs of the target `files`."""
    contents = (FILE_SEEDS[name] for name in file_readers(directory))
    texts = (content if isinstance(content, str) else json.dumps(content) + "\n" for content in contents)
    return [bytes([number]) + text.encode() for number, text in enumerate(texts)]


# --- the run ---


def parse_everywhere(parsers: Iterable[str], check: Callable[[str, object], bool], data: bytes) -> None:
    """Call `check` for every parser if `data` is a JSON document."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return
    for parser in parsers:
        check(parser, body)


def fuzz(name: str, options: list[str]) -> None:
    """Fuzz the target `name` with libFuzzer options. atheris then ends the process."""
    import atheris  # pyright: ignore[reportMissingImports]

    with atheris.instrument_imports(include=["skyrl_tx_server", "src"]):  # pyright: ignore[reportAttributeAccessIssue]
        from tests.fakes import bodies

    from hypothesis import given, settings
    from hypothesis import strategies as st

    logging.disable(logging.INFO)
    logging.getLogger("skyrl_tx_server").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as corpus, tempfile.TemporaryDirectory() as scratch:
        target: Callable[[bytes], object]
        seeds: list[bytes] = []
        with atheris.instrument_imports(include=["skyrl_tx_server", "src"]):  # pyright: ignore[reportAttributeAccessIssue]
            match name:
                case "bytes":
                    target, seeds = bodies.protobuf_is_accepted, list(bodies.VALID_MESSAGES)
                case "text":
                    target = partial(parse_everywhere, bodies.PARSERS, bodies.json_is_accepted)
                    seeds = [json.dumps(body).encode() for body in bodies.VALID.values()]
                case "messages":

                    @settings(deadline=None)
                    @given(body=bodies.messages())
                    def drawn_messages(body: bytes) -> None:
                        bodies.protobuf_is_accepted(body)

                    target = drawn_messages.hypothesis.fuzz_one_input  # pyright: ignore[reportFunctionMemberAccess]
                case "json":

                    @settings(deadline=None)
                    @given(parser=st.sampled_from(sorted(bodies.PARSERS)), data=st.data())
                    def drawn_json(parser: str, data: st.DataObject) -> None:
                        bodies.json_is_accepted(
                            parser,
                            data.draw(
                                st.one_of(bodies.mutated(bodies.VALID[parser], changes=4), bodies.values)
                            ),
                        )

                    target = drawn_json.hypothesis.fuzz_one_input  # pyright: ignore[reportFunctionMemberAccess]
                case "routes":
                    target, seeds = route_target(Path(scratch)), route_seeds()
                case _:
                    target, seeds = file_target(Path(scratch)), file_seeds(Path(scratch))
        for number, seed in enumerate(seeds):
            (Path(corpus) / str(number)).write_bytes(seed)
        times = [option.partition("=")[2] for option in options if option.startswith("-max_total_time=")]
        growth = Growth(total_s=float(times[-1]) if times else 600.0)

        def one_input(data: bytes) -> None:
            target(data)
            growth.check()

        runs_one_file = any(Path(option).is_file() for option in options)
        inputs = [] if runs_one_file else [corpus]
        limits = ["-print_final_stats=1", "-rss_limit_mb=6000"]
        atheris.Setup([sys.argv[0], *inputs, *limits, *options], one_input)
        atheris.Fuzz()


def fuzz_all(*, minutes: float, targets: list[str]) -> int:
    """Run the targets one after another and print their results. Return 1 if there is a finding, else 0."""
    findings = Path(tempfile.mkdtemp(prefix="fuzz-findings-"))
    status = 0
    for name in targets:
        options = [f"-max_total_time={60 * minutes:.0f}", f"-artifact_prefix={findings}/{name}-"]
        # The process of the target does not delete its temporary directories.
        with tempfile.TemporaryDirectory() as directory:
            process = subprocess.run(
                [sys.executable, "-m", "tests.stress.fuzz", name, *options],
                capture_output=True,
                text=True,
                check=False,
                env=os.environ | {"TMPDIR": directory},
            )
        input_counts = [
            line.rpartition(":")[2].strip()
            for line in process.stderr.splitlines()
            if "number_of_executed_units" in line
        ]
        verdict = "no finding" if process.returncode == 0 else f"FINDING (status {process.returncode})"
        print(
            f"{name:9} {minutes:g} min, {input_counts[-1] if input_counts else '?'} inputs: {verdict}",
            flush=True,
        )
        if process.returncode:
            status = 1
            print(finding_report(process.stdout, process.stderr), flush=True)
    if not any(findings.iterdir()):
        findings.rmdir()
    return status


def finding_report(stdout: str, stderr: str) -> str:
    """Return the traceback of the uncaught exception and the paths of the input files.

    Without an exception, the last 40 lines of the output replace the traceback.
    """
    start = stdout.find(UNCAUGHT)
    report = [stdout[start:].strip()] if start >= 0 else (stdout + stderr).splitlines()[-40:]
    paths = [line.partition(WRITTEN)[2] for line in stderr.splitlines() if WRITTEN in line]
    return "\n".join([*report, *(f"input: {path}" for path in paths)])


if __name__ == "__main__":
    if sys.argv[1:2] == ["all"]:
        options = dict(argument.split("=", 1) for argument in sys.argv[2:])
        chosen = options.get("targets", ",".join(TARGETS)).split(",")
        sys.exit(fuzz_all(minutes=float(options.get("minutes", "10")), targets=chosen))
    if sys.argv[1:2] and sys.argv[1] in TARGETS:
        fuzz(sys.argv[1], sys.argv[2:])
    else:
        sys.exit(__doc__)

"""Runs a training loop and hostile clients on one server, and checks that the training is unaffected.

    python -m tests.stress.hostile [minutes=60] [rate=5] [seed=0] [step_every_s=2] [directory=DIR]

The server runs the model of the quick start. `hostile_requests` sends the attacks from a separate process
while the loop trains, saves and samples. A new server then repeats the same steps without any other client.
The exit status is 0 only if

- the server survived, sent only valid responses and logged no traceback,
- losses, gradient norms and sampled tokens equal those of the undisturbed run, bit for bit,
- the minimum of resident memory rose by less than MAX_SLOPE_MIB_PER_HOUR, and the server holds no objects
  after all sessions have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.sdk_datum import sdk_datum

os.environ.setdefault("TINKER_TELEMETRY", "0")

import chz
import httpx
import numpy as np
import psutil
import tinker
from tinker import types

from scripts.run_skyrl_tx import QUICKSTART, ROOT, free_port, healthy
from src.cli.command_line import help_for, parse_as
from src.cli.program import run_program
from src.core.options import Options, above, at_least

MAX_SLOPE_MIB_PER_HOUR = 32.0
RSS_EVERY_S = 10.0
SIZES = (
    "max_lora_rank=8",
    "max_num_seqs=32",
    "decode_steps_per_dispatch=4",
    "max_context_length=512",
    "train_tokens_per_batch=512",
)
SNAPSHOT_EVERY = 50  # steps; the server keeps a snapshot until its session ends
SAVE_EVERY = 25  # steps
TIMEOUT_S = 300
DRAIN_S = 180


@chz.chz
class HostileOptions(Options):
    """Options"""

    minutes: float = chz.field(default=60.0, doc="Duration of the attacks", validator=above(0))
    rate: float = chz.field(default=5.0, doc="Attacks per second", validator=above(0))
    seed: int = chz.field(default=0, doc="Seed of the attacks", validator=at_least(0))
    step_every_s: float = chz.field(
        default=2.0, doc="Minimum time between two training steps", validator=at_least(0)
    )
    directory: str | None = chz.field(default=None, doc="Directory of all files; None: a temporary directory")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The results of one training step, which must be equal in both runs."""

    losses: tuple[float, ...]
    grad_norm: float
    tokens: tuple[int, ...]  # sampled after the step; () if the step saved no snapshot


class Server:
    """A server process with its URL and its log file."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log


@contextlib.contextmanager
def server(directory: Path, name: str, *more_options: str, api_key: str | None = None) -> Iterator[Server]:
    """Run a server with the checkpoint directory `name` and the log `name`.log in `directory`.

    Yield when the server is ready. Raise SystemExit if the server stops before it is ready.
    """
    url, log = f"http://127.0.0.1:{free_port()}", directory / f"{name}.log"
    options = (
        f"base_model={QUICKSTART / 'model'}",
        "model_alias=local/quickstart",
        f"port={url.rsplit(':', 1)[1]}",
        *SIZES,
    )
    limits = (
        "session_timeout_s=60",
        "max_request_mb=8",
        f"checkpoints_dir={directory / name}",
        "log_level=warning",
        *more_options,
    )
    environment = os.environ | ({} if api_key is None else {"SKYRL_TX_API_KEY": api_key})
    command = [sys.executable, "-m", "skyrl_tx_server", *options, *limits]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=environment)
    try:
        while not healthy(url):
            if process.poll() is not None:
                raise SystemExit(f"the server stopped with status {process.returncode}: see {log}")
            time.sleep(0.1)
        yield Server(process, url, log)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()


# --- the training loop ---


def batch(step: int) -> tuple[list[types.Datum], list[types.Datum]]:
    """Return datums for cross_entropy and for importance_sampling, which depend only on `step`."""
    random = np.random.default_rng(step)
    plain, rewarded = [], []
    for length in random.integers(8, 160, 4):
        tokens = random.integers(0, 600, int(length) + 1)
        model_input, targets = types.ModelInput.from_ints(tokens[:-1].tolist()), tokens[1:].astype(np.int64)
        plain.append(sdk_datum(model_input, target_tokens=targets, weights=np.ones(length, np.float32)))
        rewarded.append(
            sdk_datum(
                model_input,
                target_tokens=targets,
                logprobs=np.full(length, -6.4, np.float32),
                advantages=random.normal(size=length).astype(np.float32),
            )
        )
    return plain, rewarded


def training_loop(
    url: str,
    *,
    until: float | None,
    num_steps: int | None,
    pace_s: float,
    api_key: str = "tml-dummy",
    on_start: Callable[[str], None] = lambda model_id: None,
) -> list[Step]:
    """Take on average at most one step every `pace_s` seconds.

    The loop ends after `num_steps` steps or at the monotonic time `until`. `on_start` is called with the
    model id before the first step.
    """
    steps: list[Step] = []
    with tinker.ServiceClient(base_url=url, api_key=api_key) as service:
        training = service.create_lora_training_client("local/quickstart", rank=8, seed=11).result(
            timeout=TIMEOUT_S
        )
        on_start(training.get_info().model_id)
        began = time.monotonic()
        while (num_steps is None or len(steps) < num_steps) and (until is None or time.monotonic() < until):
            steps.append(one_step(training, len(steps)))
            if len(steps) % 25 == 0:
                print(f"            step {len(steps)} after {time.monotonic() - began:.0f} s", flush=True)
            time.sleep(max(0.0, began + len(steps) * pace_s - time.monotonic()))
    return steps


def one_step(training: tinker.TrainingClient, number: int) -> Step:
    plain, rewarded = batch(number)
    futures = [
        training.forward_backward(plain, "cross_entropy"),
        training.forward_backward(rewarded, "importance_sampling"),
    ]
    update = training.optim_step(types.AdamParams(learning_rate=1e-3)).result(timeout=TIMEOUT_S)
    losses = tuple(future.result(timeout=TIMEOUT_S).metrics["loss:sum"] for future in futures)
    tokens: tuple[int, ...] = ()
    if number % SNAPSHOT_EVERY == SNAPSHOT_EVERY - 1:
        sampler = training.save_weights_and_get_sampling_client().result(timeout=TIMEOUT_S)
        settings = types.SamplingParams(max_tokens=24, temperature=1.0, seed=number, stop=[])
        sampled = sampler.sample(types.ModelInput.from_ints([1, 2, 3, number % 600]), 2, settings).result(
            timeout=TIMEOUT_S
        )
        tokens = tuple(token for sequence in sampled.sequences for token in sequence.tokens)
    if number % SAVE_EVERY == SAVE_EVERY - 1:
        training.save_state("last", overwrite=True).result(timeout=TIMEOUT_S)
    return Step(losses=losses, grad_norm=(update.metrics or {})["grad_norm"], tokens=tokens)


# --- monitoring ---


class Watch:
    """Observes the server in a thread until `stop`.

    Every second it measures the latency of `/healthz`. Every RSS_EVERY_S seconds it records the resident
    memory, and the sum of the number of training models and the number of snapshots in host memory.
    """

    def __init__(self, running: Server, headers: Mapping[str, str] | None = None) -> None:
        self._headers = dict(headers or {})
        self._process = psutil.Process(running.process.pid)
        self._url = running.url
        self._is_stopping = threading.Event()
        self.rss: list[tuple[float, float]] = []  # (seconds, MiB)
        self.objects: list[tuple[float, float, int]] = []  # (seconds, MiB, models and snapshots held)
        self.health_ms: list[float] = []
        self._thread = threading.Thread(target=self._observe, daemon=True)
        self._thread.start()

    def _observe(self) -> None:
        began = time.monotonic()
        with httpx.Client(base_url=self._url, timeout=60) as http, contextlib.suppress(psutil.NoSuchProcess):
            while not self._is_stopping.wait(1):
                sent_at = time.monotonic()
                with contextlib.suppress(httpx.HTTPError):  # the latency of an error also counts
                    http.get("/api/v1/healthz")
                self.health_ms.append(1e3 * (time.monotonic() - sent_at))
                if not self.rss or sent_at - began - self.rss[-1][0] >= RSS_EVERY_S:
                    self.rss.append((sent_at - began, self._process.memory_info().rss / 2**20))
                    with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
                        engine = http.get("/api/v1/stats", headers=self._headers).json()["engine"]
                        held = int(engine["models"]) + int(engine["snapshots_in_host_memory"])
                        self.objects.append((*self.rss[-1], held))

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join()

    def memory_by_objects(self) -> tuple[float, float]:
        """Return (MiB per object, MiB per hour) of a least-squares fit over the last two thirds of the run.

        The fit is `memory = constant + a * objects + b * time`. `b` is the growth that does not depend on the
        number of training models and snapshots, that is, a leak.
        """
        late = np.array(self.objects[len(self.objects) // 3 :])
        columns = np.stack([np.ones(len(late)), late[:, 2], late[:, 0]], axis=1)
        _, per_object, per_second = np.linalg.lstsq(columns, late[:, 1], rcond=None)[0]
        return float(per_object), float(3600 * per_second)

    def slope(self) -> float:
        """Return the slope in MiB per hour of the minimum of resident memory in the last two thirds.

        A leak raises this minimum, but the start and end of sessions do not. The slope is a least-squares fit
        to the minima of eight equal parts.
        """
        late = np.array(self.rss[len(self.rss) // 3 :])
        minima = np.array([part[part[:, 1].argmin()] for part in np.array_split(late, min(8, len(late)))])
        return float(3600 * np.polyfit(minima[:, 0], minima[:, 1], 1)[0])


# --- the run ---


@dataclass(frozen=True, kw_only=True, slots=True)
class AttackReport:
    """The output of `hostile_requests`."""

    attacks: dict[str, int]
    statuses: dict[str, int]
    faults: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class DisturbedRun:
    """The results of the run with hostile clients."""

    steps: list[Step]
    watch: Watch
    hostile: AttackReport
    remaining: dict[str, int]  # the result of `remaining_objects`
    survived: bool  # the server was running at the end, and the attacks ended with status 0
    exit_status: int
    tracebacks: int


def disturbed_run(directory: Path, *, seconds: float, rate: float, seed: int, pace_s: float) -> DisturbedRun:
    with server(directory, "disturbed") as running:
        watch = Watch(running)
        report = directory / "hostile.jsonl"
        arguments = [running.url, str(seconds), str(rate), str(seed)]
        with report.open("wb") as output:
            hostile = subprocess.Popen(
                [sys.executable, "-m", "tests.stress.hostile_requests", *arguments], stdout=output, cwd=ROOT
            )
        try:
            steps = training_loop(
                running.url, until=time.monotonic() + seconds, num_steps=None, pace_s=pace_s
            )
            hostile_status = hostile.wait(900)
        finally:
            hostile.kill()
        watch.stop()
        remaining = remaining_objects(running.url)
        survived = running.process.poll() is None and hostile_status == 0
    attack_report = AttackReport(**json.loads(report.read_text().splitlines()[-1]))
    tracebacks = running.log.read_text(errors="replace").count("Traceback (most recent call last)")
    exit_status = running.process.returncode
    return DisturbedRun(
        steps=steps,
        watch=watch,
        hostile=attack_report,
        remaining=remaining,
        survived=survived,
        exit_status=exit_status,
        tracebacks=tracebacks,
    )


def remaining_objects(url: str, headers: Mapping[str, str] | None = None) -> dict[str, int]:
    """Wait up to DRAIN_S seconds until the server holds no objects. Return the counts that are not 0."""
    deadline = time.monotonic() + DRAIN_S
    while True:
        stats = httpx.get(f"{url}/api/v1/stats", headers=headers, timeout=60).json()
        held = {name: stats["registry"][name] for name in ("sessions", "models", "samplers", "snapshots")}
        held |= {
            name: stats["engine"][name] for name in ("ops_pending", "slots_used", "snapshots_in_host_memory")
        }
        held["polls and futures pending"] = stats["futures"]["pending"]
        held = {name: count for name, count in held.items() if count}
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(1)


def main(argv: list[str]) -> int:
    title = ["python -m tests.stress.hostile [key=value ...]"]
    return run_program(
        argv,
        lambda arguments: run(parse_as(HostileOptions, arguments)),
        lambda words: help_for(HostileOptions, title=title, words=words),
        label="hostile",
    )


@contextlib.contextmanager
def prepared_directory(options: HostileOptions) -> Iterator[Path]:
    """Raise the limit on open files and yield the directory of the run."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(options.directory or temporary)
        directory.mkdir(parents=True, exist_ok=True)
        yield directory


def run(options: HostileOptions) -> int:
    with prepared_directory(options) as directory:
        disturbed = disturbed_run(
            directory,
            seconds=60 * options.minutes,
            rate=options.rate,
            seed=options.seed,
            pace_s=options.step_every_s,
        )
        with server(directory, "undisturbed") as running:
            undisturbed = training_loop(running.url, until=None, num_steps=len(disturbed.steps), pace_s=0.0)
    return report(disturbed, undisturbed)


def report(run: DisturbedRun, undisturbed: list[Step]) -> int:
    """Print the results. Return 0 if all checks pass."""
    print_load(run)
    faults = run.hostile.faults
    return print_verdicts(
        {f"faults of the server: {len(faults)}": not faults, **verdicts(run, undisturbed)}, faults
    )


def print_load(run: DisturbedRun) -> None:
    """Print the attacks, their answers, the latency of the health checks and the memory of the server."""
    attacks, statuses = run.hostile.attacks, run.hostile.statuses
    print(
        f"attacks     {sum(attacks.values())}: "
        + ", ".join(f"{name} {count}" for name, count in sorted(attacks.items()))
    )
    print("answers     " + ", ".join(f"{status} {count}" for status, count in sorted(statuses.items())))
    health = np.array(run.watch.health_ms)
    print(
        f"healthz     p50 {np.median(health):.0f} ms, p99 {np.quantile(health, 0.99):.0f} ms, max "
        f"{health.max():.0f} ms"
    )
    rss = [mib for _, mib in run.watch.rss]
    samples = [rss[len(rss) * part // 6 - (part > 0)] for part in range(7)]
    print(
        f"memory MiB  {' '.join(f'{mib:.0f}' for mib in samples)} (at each sixth of the run), "
        f"peak {max(rss):.0f}"
    )


def verdicts(run: DisturbedRun, undisturbed: list[Step]) -> dict[str, bool]:
    """Return whether each check passes that does not depend on the attacks."""
    equal, sampled = num_equal(run.steps, undisturbed), sum(bool(step.tokens) for step in undisturbed)
    equal_samples = sum(
        bool(a.tokens) and a.tokens == b.tokens for a, b in zip(run.steps, undisturbed, strict=True)
    )
    return {
        "the server survived and stopped with status 0": run.survived and run.exit_status == 0,
        f"tracebacks in the server's log: {run.tracebacks}": not run.tracebacks,
        f"growth of the minimum of resident memory: {run.watch.slope():+.1f} MiB/h": run.watch.slope()
        < MAX_SLOPE_MIB_PER_HOUR,
        f"remaining sessions, models, samplers, futures: {run.remaining or 'none'}": not run.remaining,
        f"equal losses and gradient norms: {equal} of {len(undisturbed)} steps": equal
        == len(undisturbed)
        > 0,
        f"sampled tokens equal: {equal_samples} of {sampled} snapshots": equal_samples == sampled,
    }


def print_verdicts(checks: Mapping[str, bool], faults: Sequence[str]) -> int:
    """Print the results of the checks and the first faults. Return 0 if all checks pass."""
    for check, passes in checks.items():
        print(f"{'ok' if passes else 'FAILED':7} {check}")
    for fault in faults[:40]:
        print(f"        {fault}")
    return 0 if all(checks.values()) else 1


def num_equal(left: list[Step], right: list[Step]) -> int:
    """Return the number of steps with equal losses and gradient norms."""
    return sum((a.losses, a.grad_norm) == (b.losses, b.grad_norm) for a, b in zip(left, right, strict=True))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # does not wait for the SDK's background threads

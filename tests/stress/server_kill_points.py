"""Kills the server with SIGKILL at random moments under load, while its client resumes after each kill.

    python -m tests.stress.server_kill_points [points=30] [seed=0] [model=DIR] [directory=DIR]

After every step, a training job saves its state, overwrites one checkpoint, saves sampler weights and
samples. Other clients sample from the base model at the same time. A kill occurs in the first five seconds
after the job starts, or up to two seconds after a completed step. Then the server starts again in the same
directory, and the job resumes from the last state whose save the server acknowledged.

After every restart, each acknowledged checkpoint must exist with unchanged contents, and every listed
checkpoint must be readable. At the end, losses and final state (adapter, moments, step) must equal those of
an uninterrupted run, bit for bit. The exit status is 0 if all checks pass.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import httpx
import numpy as np
import tinker
from tinker import types
from tinker.lib.retryable_exception import RetryableException

from scripts.run_skyrl_tx import QUICKSTART, ROOT, free_port, healthy
from skyrl_tx_server.files.checkpoint_record import CheckpointInfo
from skyrl_tx_server.files.checkpoints import CheckpointStore

ALIAS = "local/killed"
SIZES = (
    "max_lora_rank=4",
    "max_num_seqs=8",
    "decode_steps_per_dispatch=4",
    "max_context_length=128",
    "train_tokens_per_batch=128",
)
TIMEOUT_S = 120
STEPS_AFTER_LAST_KILL = 3
SAMPLERS = 2  # background clients
EARLY_KILLS = 0.2  # the share of kills that do not wait for a completed step
ARGUMENT = re.compile(r"points=0*[1-9]\d*|seed=\d+|(model|directory)=.+")


@dataclass(kw_only=True)
class RestartableServer:
    """A server that tests can kill and start again with the same port and directories."""

    directory: Path
    model: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.directory / "checkpoints", ALIAS)

    def start(self) -> float:
        """Start the server and return the seconds until it was ready."""
        began = time.monotonic()
        options = (
            f"base_model={self.model}",
            f"model_alias={ALIAS}",
            f"port={self.port}",
            *SIZES,
            "log_level=warning",
        )
        directories = (
            f"checkpoints_dir={self.directory / 'checkpoints'}",
            f"compilation_cache_dir={self.directory.parent / 'xla'}",
        )
        with (self.directory / "server.log").open("ab") as log:
            command = [sys.executable, "-m", "skyrl_tx_server", *options, *directories]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        while not healthy(self.url):
            if self.process.poll() is not None:
                raise SystemExit(
                    f"the server stopped with status {self.process.returncode}: see "
                    f"{self.directory / 'server.log'}"
                )
            time.sleep(0.05)
        return time.monotonic() - began

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def running_server(directory: Path, model: Path) -> Iterator[RestartableServer]:
    """Start a server in a new directory and kill it at the end."""
    directory.mkdir(parents=True)
    running = RestartableServer(directory=directory, model=model, port=free_port())
    try:
        running.start()
        yield running
    finally:
        running.kill()


# --- the job ---


@dataclass(kw_only=True)
class Job:
    """The results of the training job that the server has acknowledged."""

    losses: list[float] = field(default_factory=list)  # one per step
    states: list[str] = field(default_factory=list)  # path of the training checkpoint after each step
    digests: dict[str, str] = field(
        default_factory=dict
    )  # path -> digest, except for the checkpoint `last`, which each step overwrites

    @property
    def steps(self) -> int:
        return len(self.states)


def datum(step: int) -> types.Datum:
    """Return the datum of a step, which depends only on `step`."""
    random = np.random.default_rng(step)
    tokens = random.integers(0, 200, 41)
    inputs = {
        "target_tokens": tokens[1:].astype(np.int64),
        "weights": random.normal(size=40).astype(np.float32),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)  # pyright: ignore[reportArgumentType]


def work(server: RestartableServer, job: Job, *, until: int, stepped: threading.Event) -> None:
    """Resume from the last acknowledged state and take steps until the job has `until` steps.

    Set `stepped` after every step.
    """
    with tinker.ServiceClient(base_url=server.url, api_key="tml-dummy") as service:
        if job.states:
            training = service.create_training_client_from_state_with_optimizer(job.states[-1]).result(
                timeout=TIMEOUT_S
            )
        else:
            training = service.create_lora_training_client(ALIAS, rank=4, seed=5).result(timeout=TIMEOUT_S)
        while job.steps < until:
            number = job.steps
            backward = training.forward_backward([datum(number)], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=TIMEOUT_S)
            saving = [training.save_state(f"state-{number}"), training.save_state("last", overwrite=True)]
            sampler = training.save_weights_for_sampler(f"sampler-{number}")
            loss = backward.result(timeout=TIMEOUT_S).metrics["loss:sum"]
            state = saving[0].result(timeout=TIMEOUT_S).path
            job.digests[state] = digest(server.store, state)
            job.losses.append(loss)
            job.states.append(state)
            saving[1].result(timeout=TIMEOUT_S)
            path = sampler.result(timeout=TIMEOUT_S).path
            job.digests[path] = digest(server.store, path)
            sampling = service.create_sampling_client(model_path=path).result(timeout=TIMEOUT_S)
            settings = types.SamplingParams(max_tokens=4, seed=number)
            sampling.sample(types.ModelInput.from_ints([1, 2, 3]), 1, settings).result(timeout=TIMEOUT_S)
            stepped.set()


def digest(store: CheckpointStore, path: str) -> str:
    """Return the hash of a checkpoint. Raises the errors of `CheckpointStore.read`."""
    info, arrays = store.read(path)
    sha = hashlib.sha256(repr((info.step, info.lora, info.kind)).encode())
    for name in sorted(arrays):
        sha.update(name.encode() + arrays[name].tobytes())
    return sha.hexdigest()


@contextlib.contextmanager
def background_clients(url: str) -> Iterator[None]:
    """Run SAMPLERS clients that sample from the base model continuously and ignore HTTP errors."""
    is_stopping = threading.Event()

    def sample() -> None:
        with httpx.Client(base_url=url, timeout=10) as http:
            while not is_stopping.is_set():
                try:
                    http.post("/api/v1/asample", json=body)
                    http.post(
                        "/v1/completions",
                        json={"model": ALIAS, "prompt": [4, 5, 6], "max_tokens": 12, "n": 2},
                    )
                except httpx.HTTPError:
                    time.sleep(0.1)

    prompt = {"chunks": [{"tokens": [1, 2, 3]}]}
    body = {"base_model": ALIAS, "prompt": prompt, "num_samples": 2, "sampling_params": {"max_tokens": 12}}
    threads = [threading.Thread(target=sample, daemon=True) for _ in range(SAMPLERS)]
    for thread in threads:
        thread.start()
    yield
    is_stopping.set()
    for thread in threads:
        thread.join()


# --- the kills ---


@dataclass(kw_only=True, slots=True)
class Figures:
    """The measurements and faults of a run with kills."""

    restarts_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # acknowledged checkpoints that are missing or changed
    unreadable: list[str] = field(default_factory=list)  # listed checkpoints that cannot be read
    unacknowledged: int = 0  # complete checkpoints whose save was not acknowledged


def killed_run(server: RestartableServer, points: int, seed: int) -> tuple[Job, Figures]:
    """Kill and restart the server `points` times while a job runs, then take STEPS_AFTER_LAST_KILL steps."""
    rng, job, figures = random.Random(seed), Job(), Figures()
    for _ in range(points):
        stepped = threading.Event()
        worker = threading.Thread(target=_until_killed, args=(server, job, stepped), daemon=True)
        with background_clients(server.url):
            worker.start()
            if rng.random() < EARLY_KILLS:
                time.sleep(rng.uniform(0.1, 5.0))
            else:
                assert stepped.wait(TIMEOUT_S), "no step was completed"
                time.sleep(rng.uniform(0.0, 2.0))
            server.kill()
        figures.restarts_s.append(server.start())
        worker.join(TIMEOUT_S)
        assert not worker.is_alive(), "the client still runs after the server was killed and restarted"
        check(server.store, job, figures)
    work(server, job, until=job.steps + STEPS_AFTER_LAST_KILL, stepped=threading.Event())
    return job, figures


def _until_killed(server: RestartableServer, job: Job, stepped: threading.Event) -> None:
    """Run the job until a request fails because the server was killed."""
    with contextlib.suppress(tinker.TinkerError, RetryableException, httpx.HTTPError, TimeoutError, OSError):
        work(server, job, until=sys.maxsize, stepped=stepped)


def check(store: CheckpointStore, job: Job, figures: Figures) -> None:
    """Compare the checkpoints on disk with the acknowledged checkpoints and record faults in `figures`."""
    listed: list[CheckpointInfo] = store.list()
    for info in listed:
        try:
            actual = digest(store, info.path)
        except Exception as error:
            figures.unreadable.append(f"{info.path}: {error}")
            continue
        if job.digests.get(info.path, actual) != actual:
            figures.lost.append(f"{info.path} differs from the saved checkpoint")
    paths = {info.path for info in listed}
    figures.lost += [path for path in job.digests if path not in paths]
    figures.unacknowledged = len([path for path in paths - set(job.digests) if not path.endswith("/last")])


def kill_points(directory: Path, model: Path, *, points: int, seed: int) -> int:
    """Run the job with and without kills, print a comparison, and return 0 if all checks pass."""
    with running_server(directory / "killed", model) as server:
        job, figures = killed_run(server, points, seed)
        killed_digest = digest(server.store, job.states[-1])
    with running_server(directory / "alone", model) as server:
        uninterrupted = Job()
        work(server, uninterrupted, until=job.steps, stepped=threading.Event())
        expected_digest = digest(server.store, uninterrupted.states[-1])
    passed = (
        not figures.lost
        and not figures.unreadable
        and killed_digest == expected_digest
        and job.losses == uninterrupted.losses
    )
    restarts = np.array(figures.restarts_s)
    print(
        f"{points} kills of the server, {job.steps} steps in all, {len(job.digests)} acknowledged "
        f"checkpoints: {len(figures.lost)} lost, {len(figures.unreadable)} unreadable; "
        f"{figures.unacknowledged} complete but not acknowledged; restart p50 {np.median(restarts):.1f} s, "
        f"max {restarts.max():.1f} s; losses {'equal' if job.losses == uninterrupted.losses else 'DIFFER'}, "
        f"final state {'equal' if killed_digest == expected_digest else 'DIFFERS'} to the bit",
        flush=True,
    )
    for fault in (*figures.lost, *figures.unreadable):
        print(f"  {fault}")
    return 0 if passed else 1


def main(argv: list[str]) -> int:
    if not {"--help", "-h"}.isdisjoint(argv):
        print(__doc__)
        return 0
    if wrong := [argument for argument in argv if not ARGUMENT.fullmatch(argument)]:
        print(
            f"server_kill_points: {wrong[0]!r} is none of points=N (1 or more), seed=N, model=DIR and "
            "directory=DIR",
            file=sys.stderr,
        )
        return 2
    options = dict(argument.split("=", 1) for argument in argv)
    model = Path(options.get("model", str(QUICKSTART / "model")))
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(options.get("directory", temporary))
        return kill_points(
            directory, model, points=int(options.get("points", "30")), seed=int(options.get("seed", "0"))
        )


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # does not wait for the SDK's background threads

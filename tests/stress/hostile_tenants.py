"""Runs a training loop and 64 hostile tenants on one server, which must isolate the tenants from each other.

    python -m tests.stress.hostile_tenants [minutes=60] [tenants=64] [rate=6] [seed=0] [step_every_s=2]
    [directory=DIR]

The server runs the model of the quick start with `api_keys_file=`: one key for the trainer, one for a client
that measures latency and one for each hostile tenant. `hostile_tenant_requests` sends the attacks from a
separate process. A new server then repeats the training steps without any other client. The exit status is 0
only if

- the server survived, sent only responses that a correct server can send, and logged no traceback,
- losses, gradient norms and sampled tokens equal those of the undisturbed run, bit for bit,
- no sample of the latency client failed, and the 99th percentile of the latency of its 4-token samples is at
  most MAX_LATENCY_RATIO times the value without other clients,
- no hostile tenant read or changed an object of another tenant,
- the minima of resident memory, in equal parts of the run, rose more slowly than MAX_SLOPE_MIB_PER_HOUR, and
  the server holds no objects after all sessions have ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import chz
import httpx
import numpy as np

from scripts.run_skyrl_tx import ROOT
from src.cli.command_line import help_for, parse_as
from src.cli.program import run_program
from src.core.options import above, at_least
from tests.stress.hostile import (
    AttackReport,
    DisturbedRun,
    HostileOptions,
    Step,
    Watch,
    prepared_directory,
    print_load,
    print_verdicts,
    remaining_objects,
    server,
    training_loop,
    verdicts,
)

MAX_LATENCY_RATIO = 10.0
SAMPLES_ALONE = 200
SAMPLE_EVERY_S = 1.0
TIMEOUT_S = 300.0
TRAINER, PROBE = "trainer", "probe"


@chz.chz
class TenantsOptions(HostileOptions):
    """Options"""

    tenants: int = chz.field(default=64, doc="Number of hostile tenants", validator=at_least(1))
    rate: float = chz.field(default=6.0, doc="Attacks per second", validator=above(0))


def write_keys(directory: Path, names: list[str]) -> tuple[Path, dict[str, str]]:
    """Create a key for each name. Return the file for `api_keys_file=` and the keys."""
    keys = {name: f"tml-{secrets.token_hex(16)}" for name in names}
    path = directory / "api_keys"
    path.write_text(
        "".join(f"{name}:{hashlib.sha256(key.encode()).hexdigest()}\n" for name, key in keys.items())
    )
    path.chmod(0o600)
    return path, keys


class LatencyProbe:
    """Samples 4 tokens from the base model, one request at a time, and records the latencies."""

    def __init__(self, url: str, api_key: str) -> None:
        self._http = httpx.Client(base_url=url, headers={"x-api-key": api_key}, timeout=TIMEOUT_S)
        session = self._post("create_session", {"tags": [], "user_metadata": None})
        self._session_id = session["session_id"]
        sampler = {
            "session_id": self._session_id,
            "sampling_session_seq_id": 0,
            "base_model": "local/quickstart",
        }
        self._sampler_id = self._post("create_sampling_session", sampler)["sampling_session_id"]
        self._seq_id = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.latencies_s: list[float] = []
        self.failures: list[str] = []

    def sample(self) -> float:
        """Sample 4 tokens, add a failed sample to `failures`, and return the latency in seconds."""
        self._seq_id += 1
        body: dict[str, object] = {
            "sampling_session_id": self._sampler_id,
            "seq_id": self._seq_id,
            "num_samples": 1,
        }
        body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, self._seq_id % 600]}]}
        body["sampling_params"] = {"max_tokens": 4, "temperature": 1.0, "seed": self._seq_id}
        began = time.monotonic()
        request_id = self._post("asample", body)["request_id"]
        while True:
            response = self._http.post("/api/v1/retrieve_future", json={"request_id": request_id})
            if response.status_code != 408:
                break
        elapsed_s = time.monotonic() - began
        if response.status_code != 200 or "error" in response.json():
            self.failures.append(f"{response.status_code} {response.text[:300]}")
        return elapsed_s

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._http.close()

    def _run(self) -> None:
        last_heartbeat = 0.0
        while not self._stop.wait(SAMPLE_EVERY_S):
            try:
                self.latencies_s.append(self.sample())
                if time.monotonic() > last_heartbeat + 10:
                    last_heartbeat = time.monotonic()
                    self._post("session_heartbeat", {"session_id": self._session_id})
            except (httpx.HTTPError, KeyError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    def _post(self, route: str, body: object) -> dict[str, str]:
        response = self._http.post(f"/api/v1/{route}", json=body)
        if response.status_code != 200:
            raise KeyError(f"{route}: {response.status_code} {response.text[:300]}")
        return response.json()


@dataclass(frozen=True, kw_only=True, slots=True)
class Run(DisturbedRun):
    """The results of the run with hostile tenants."""

    alone_s: list[float]  # latencies of the probe before the other clients start
    beside_s: list[float]  # latencies of the probe while the other clients run
    probe_failures: list[str]


def run_with_tenants(
    directory: Path, *, seconds: float, tenants: int, rate: float, seed: int, pace_s: float
) -> Run:
    names = [f"hostile-{number}" for number in range(tenants)]
    keys_file, keys = write_keys(directory, [TRAINER, PROBE, *names])
    operator_key = f"tml-{secrets.token_hex(16)}"
    (directory / "hostile_keys.json").write_text(json.dumps([keys[name] for name in names]))
    with (
        server(directory, "disturbed", f"api_keys_file={keys_file}", api_key=operator_key) as running,
        contextlib.ExitStack() as stack,
    ):
        probe = LatencyProbe(running.url, keys[PROBE])
        for _ in range(20):  # the server compiles the programs that the measurement uses
            probe.sample()
        alone_s = [probe.sample() for _ in range(SAMPLES_ALONE)]
        watch = Watch(running, {"x-api-key": operator_key})
        attackers: list[subprocess.Popen[bytes]] = []
        report = directory / "hostile.jsonl"
        output = stack.enter_context(report.open("wb"))

        def start_attacks(model_id: str) -> None:
            probe.start()
            arguments = [
                running.url,
                str(seconds),
                str(rate),
                str(seed),
                str(directory / "hostile_keys.json"),
                model_id,
            ]
            command = [sys.executable, "-m", "tests.stress.hostile_tenant_requests", *arguments]
            attackers.append(subprocess.Popen(command, stdout=output, cwd=ROOT))

        try:
            until = time.monotonic() + seconds
            steps = training_loop(
                running.url,
                until=until,
                num_steps=None,
                pace_s=pace_s,
                api_key=keys[TRAINER],
                on_start=start_attacks,
            )
            probe.stop()
            hostile_status = attackers[0].wait(900)
        finally:
            for attacker in attackers:
                attacker.kill()
        watch.stop()
        remaining = remaining_objects(running.url, {"x-api-key": operator_key})
        survived = running.process.poll() is None and hostile_status == 0
    hostile = AttackReport(**json.loads(report.read_text().splitlines()[-1]))
    log = running.log.read_text(errors="replace")
    return Run(
        steps=steps,
        watch=watch,
        hostile=hostile,
        alone_s=alone_s,
        beside_s=probe.latencies_s,
        probe_failures=probe.failures,
        remaining=remaining,
        survived=survived,
        exit_status=running.process.returncode,
        tracebacks=log.count("Traceback (most recent call last)"),
    )


def report(run: Run, undisturbed: list[Step]) -> int:
    """Print the results. Return 0 if all checks pass."""
    print_load(run)
    faults = run.hostile.faults
    cross_tenant = [fault for fault in faults if fault.startswith("cross-tenant")]
    per_object, per_hour = run.watch.memory_by_objects()
    held = [objects for _, _, objects in run.watch.objects]
    held_at_sixths = [held[len(held) * part // 6 - (part > 0)] for part in range(7)]
    print(
        f"objects     {' '.join(map(str, held_at_sixths))} models and snapshots held (at each sixth of the "
        f"run), {per_object:.2f} MiB each; "
        f"other memory grows by {per_hour:+.1f} MiB/h"
    )
    quantiles = {}
    for label, seconds in (("alone", run.alone_s), ("beside", run.beside_s)):
        p50, p99 = (1e3 * np.quantile(seconds, q) for q in (0.5, 0.99))
        quantiles[label] = p99
        print(
            f"4 tokens    {label}: p50 {p50:.0f} ms, p99 {p99:.0f} ms, max {1e3 * max(seconds):.0f} ms, "
            f"{len(seconds)} samples"
        )
    ratio = quantiles["beside"] / quantiles["alone"]
    checks = {
        f"responses that a correct server cannot send: {len(faults) - len(cross_tenant)}": len(faults)
        == len(cross_tenant),
        f"reads and writes across tenants: {len(cross_tenant)}": not cross_tenant,
        f"failed samples of the latency probe: {len(run.probe_failures)}": not run.probe_failures,
        f"p99 of a 4-token sample: {ratio:.1f} times the value without other clients": ratio
        <= MAX_LATENCY_RATIO,
    }
    return print_verdicts({**checks, **verdicts(run, undisturbed)}, [*faults, *run.probe_failures])


def main(argv: list[str]) -> int:
    title = ["python -m tests.stress.hostile_tenants [key=value ...]"]
    return run_program(
        argv,
        lambda arguments: run(parse_as(TenantsOptions, arguments)),
        lambda words: help_for(TenantsOptions, title=title, words=words),
        label="hostile_tenants",
    )


def run(options: TenantsOptions) -> int:
    with prepared_directory(options) as directory:
        disturbed = run_with_tenants(
            directory,
            seconds=60 * options.minutes,
            tenants=options.tenants,
            rate=options.rate,
            seed=options.seed,
            pace_s=options.step_every_s,
        )
        with server(directory, "undisturbed") as running:
            undisturbed = training_loop(running.url, until=None, num_steps=len(disturbed.steps), pace_s=0.0)
    return report(disturbed, undisturbed)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # does not wait for the SDK's background threads

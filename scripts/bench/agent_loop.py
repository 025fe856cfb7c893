"""Measure an agent loop over HTTP with the SDK: 16 trajectories of 12 growing turns, with a different
max_tokens in each turn.

    taskset -c 0,1 python -m scripts.bench.agent_loop tx=PYTHON

PYTHON is a Python in which SkyRL's tx is installed (`PeerOptions`). Without `tx=`, only our server is
measured. The case `stateless` is our server with a different first token in every prompt, so that its prefix
cache has no effect. SkyRL's tx is timed inside its own process, so its times do not include HTTP. The first
pass of SkyRL's tx compiles a program for each turn (cold). The second pass uses these compiled programs
(warm).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import chz
import httpx

os.environ.setdefault("TINKER_TELEMETRY", "0")

import tinker
from tinker import types

from scripts.bench.compare import (
    ROOT,
    ComparisonOptions,
    Measurement,
    Side,
    Timing,
    interleave,
    peers,
    print_figure,
    random_sequences,
    report,
)
from scripts.bench.small_model import RANK, make_model

TRAJECTORIES, TURNS, PROMPT, OBSERVED = 16, 12, 512, 48
LIMITS = [24 + 2 * turn for turn in range(TURNS)]


@dataclass(kw_only=True, slots=True)
class Server:
    """Our server and one sampling client."""

    url: str
    pid: int
    sampler: tinker.SamplingClient
    prefilled: list[int] = field(default_factory=list)  # tokens prefilled in each pass with stateless=False

    def engine(self) -> dict[str, object]:
        return httpx.get(f"{self.url}/api/v1/stats").json()["engine"]

    def count(self, name: str) -> int:
        value = self.engine()[name]
        assert isinstance(value, int)
        return value

    def num_programs(self) -> int:
        counts = self.engine()["programs"]
        assert isinstance(counts, dict)
        return sum(counts.values())


def main(config: ComparisonOptions) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_model(Path(directory) / "model", layers=config.layers)
        with serving(model_dir, Path(directory)) as server, peers(config, model_dir) as others:
            run_pass(server, stateless=False)
            run_pass(server, stateless=True)
            programs, seeds = server.num_programs(), itertools.count(1)
            timings = interleave(
                {
                    "ours": lambda: run_pass(server, stateless=False, seed=next(seeds)),
                    "stateless": lambda: run_pass(server, stateless=True, seed=next(seeds)),
                },
                repeats=config.repeats,
            )
            if "skyrl-tx" in others:
                cold, warm = (run_skyrl_pass(others["skyrl-tx"], seed=0) for _ in range(2))
                timings["skyrl-tx cold"] = Timing(wall_s=cold.wall_s, cpu_s=cold.cpu_s, first_s=cold.wall_s)
                timings["skyrl-tx warm"] = Timing(wall_s=warm.wall_s, cpu_s=warm.cpu_s, first_s=cold.wall_s)
            title = f"agent loop through HTTP, {TRAJECTORIES} trajectories, {TURNS} turns"
            report(title, timings, {"stateless": 3.0, "skyrl-tx cold": 10.0})
            # `unique` is the number of tokens that a server with an unlimited cache prefills:
            # the prompt, which all trajectories share, the observation of each turn, and the
            # last sampled token of each turn, for which decoding computes no keys and values.
            # The last token of a trajectory is in no prompt.
            unique = PROMPT + TRAJECTORIES * (TURNS * (OBSERVED + 1) - 1)
            ratio = server.prefilled[-1] / unique
            print_figure(f"prefilled {server.prefilled[-1]} tokens, unique {unique}", ratio, at_most=1.1)
            print_figure("programs after warm-up", server.num_programs() - programs, at_most=0)


def run_pass(server: Server, *, stateless: bool, seed: int = 0) -> Measurement:
    """Roll out all trajectories concurrently. The turns of one trajectory run one after another."""
    before, cpu = server.count("tokens_prefilled"), process_cpu_s(server.pid)
    began = time.perf_counter()
    asyncio.run(_trajectories(server.sampler, stateless=stateless, seed=seed))
    wall_s = time.perf_counter() - began
    if not stateless:
        server.prefilled.append(server.count("tokens_prefilled") - before)
    return Measurement(wall_s=wall_s, cpu_s=process_cpu_s(server.pid) - cpu)


async def _trajectories(sampler: tinker.SamplingClient, *, stateless: bool, seed: int) -> None:
    prompt = random_sequences([PROMPT], seed=1000 * seed)[0]

    async def trajectory(number: int) -> None:
        tokens = prompt
        for turn, observed in enumerate(random_sequences([OBSERVED] * TURNS, seed=1000 * seed + 1 + number)):
            tokens = tokens + observed
            sent = [3 + (1009 * seed + 17 * number + turn) % 4000, *tokens[1:]] if stateless else tokens
            settings = types.SamplingParams(max_tokens=LIMITS[turn], temperature=1.0, seed=number, stop=[])
            answer = await sampler.sample_async(types.ModelInput.from_ints(sent), 1, settings)
            tokens = tokens + list(answer.sequences[0].tokens)

    await asyncio.gather(*(trajectory(number) for number in range(TRAJECTORIES)))


def run_skyrl_pass(peer: Side, *, seed: int) -> Measurement:
    prompt = random_sequences([PROMPT], seed=1000 * seed)[0]
    observed = [
        random_sequences([OBSERVED] * TURNS, seed=1000 * seed + 1 + number) for number in range(TRAJECTORIES)
    ]
    tokens = [prompt] * TRAJECTORIES
    wall_s = cpu_s = 0.0
    for turn in range(TURNS):
        tokens = [previous + observed[number][turn] for number, previous in enumerate(tokens)]
        measured = peer.call("sample", prompts=tokens, max_tokens=LIMITS[turn])
        assert isinstance(measured.result, list)
        tokens = [previous + new for previous, new in zip(tokens, measured.result, strict=True)]
        wall_s, cpu_s = wall_s + measured.wall_s, cpu_s + measured.cpu_s
    return Measurement(wall_s=wall_s, cpu_s=cpu_s)


@contextmanager
def serving(model_dir: Path, directory: Path, *options: str) -> Iterator[Server]:
    """Start our server and create a sampler of a new adapter."""
    arguments = (
        f"base_model={model_dir}",
        "model_alias=local/bench",
        "port=0",
        f"max_lora_rank={RANK}",
        f"max_num_seqs={TRAJECTORIES}",
    )
    sizes = (
        "max_context_length=2048",
        f"checkpoints_dir={directory / 'checkpoints'}",
        "compilation_cache_dir=none",
        "log_level=warning",
    )
    command = [sys.executable, "-m", "skyrl_tx_server", *arguments, *sizes, *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            if not ready.startswith("skyrl-tx server ready: "):
                raise SystemExit("agent_loop: the server did not start; see its error message above")
            url = ready.split()[3]
            with tinker.ServiceClient(base_url=url, api_key="tml-dummy") as service:
                training = service.create_lora_training_client(
                    base_model="local/bench", rank=RANK, train_unembed=False
                ).result()
                yield Server(
                    url=url,
                    pid=process.pid,
                    sampler=training.save_weights_and_get_sampling_client("bench").result(),
                )
        finally:
            process.terminate()


def process_cpu_s(pid: int) -> float:
    """Return the user and system time of all threads of another process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(chz.entrypoint(ComparisonOptions, argv=sys.argv[1:], allow_hyphens=True))

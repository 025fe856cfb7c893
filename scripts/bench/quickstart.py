"""Run the quick start once per seed, and print the held-out success rate of each evaluation, the wall time
and the peak memory.

    python -m scripts.bench.quickstart [seeds=0,1,2] [cpus=0,1] [key=value ...]

`cpus` lists the CPU cores to which each run is pinned (default: no pinning). `logs_dir` (default `runs`)
receives the run directories. Other key=value pairs are passed to ./run_skyrl_tx.sh.
The memory of a run is the sum of the proportional set sizes (PSS) of its processes. It is read once per
second, and its peak is printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUCCESS = "test/env/all/reward/total"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    seed: str
    status: int
    wall_s: float
    peak_mib: float
    curve: list[tuple[int, float]]  # (step, held-out success rate)


def main(argv: list[str]) -> int:
    options = dict(argument.split("=", 1) for argument in argv)
    seeds = options.pop("seeds", "0,1,2").split(",")
    cpus = options.pop("cpus", "")
    base = Path(options.pop("logs_dir", "runs")) / f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    runs = [run(seed, cpus, base / f"seed-{seed}", options) for seed in seeds]
    header = f"{'seed':>5} {'before':>8} {'after':>8} {'rise':>7} {'wall':>8} {'peak PSS':>9}"
    print(f"\n{header}  curve (step:success)")
    for result in runs:
        before, after = (
            (result.curve[0][1], result.curve[-1][1]) if result.curve else (float("nan"), float("nan"))
        )
        curve = " ".join(f"{step}:{success:.3f}" for step, success in result.curve)
        print(
            f"{result.seed:>5} {before:8.1%} {after:8.1%} {after - before:+7.1%} {result.wall_s / 60:6.1f} m "
            f"{result.peak_mib:6.0f} MiB  {curve}"
        )
    return 1 if any(result.status for result in runs) else 0


def run(seed: str, cpus: str, log_path: Path, options: dict[str, str]) -> Run:
    command = [
        str(ROOT / "run_skyrl_tx.sh"),
        f"seed={seed}",
        f"log_path={log_path}",
        *(f"{key}={value}" for key, value in options.items()),
    ]
    started = time.monotonic()
    process = subprocess.Popen(["taskset", "-c", cpus, *command] if cpus else command, cwd=ROOT)
    peak_kib = 0.0
    while process.poll() is None:
        peak_kib = max(peak_kib, sum(pss_kib(pid) for pid in descendants(process.pid)))
        time.sleep(1.0)
    wall_s = time.monotonic() - started
    metrics_file = ROOT / log_path / "metrics.jsonl"
    lines = (
        [json.loads(line) for line in metrics_file.read_text().splitlines()] if metrics_file.exists() else []
    )
    curve = [(int(line["step"]), float(line[SUCCESS])) for line in lines if SUCCESS in line]
    return Run(seed=seed, status=process.returncode, wall_s=wall_s, peak_mib=peak_kib / 1024, curve=curve)


def descendants(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    pids, queue = [], [root]
    while queue:
        pid = queue.pop()
        pids.append(pid)
        queue.extend(parents.get(pid, []))
    return pids


def pss_kib(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return float(line.split()[1])
    except OSError:
        pass  # the process ended meanwhile
    return 0.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

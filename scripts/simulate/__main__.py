"""Simulate the engine on a device that is not present, or compare the simulation with this CPU.

    python -m scripts.simulate agents=64 prompt_tokens=8192 new_tokens=512
    python -m scripts.simulate agents=64 training_ops=40 train_share=0.5
    python -m scripts.simulate device=cpu slots=8 agents=8 prompt_tokens=900 new_tokens=64

The script uses the engine, the scheduler and the allocation of KV pages of the server. It does not run the
compiled programs of the model, but uses their estimated times (`scripts/simulate/costs.py`). For comparison,
it also simulates two simpler schedulers: one fills all slots before it decodes, and one decodes after each
prefill chunk. With `device=cpu`, the script simulates only the scheduler of the server. It measures the times
of the programs on this CPU for a small model (`scripts/bench/small_model.py`), and also runs the same
requests on a real engine on this CPU. It alternates the measurement and the real run `repeats` times, and
compares the median simulated time with the median real time.
"""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Sequence

import chz
from rich.console import Console
from rich.table import Table

from scripts.simulate.costs import DEVICES, Costs
from scripts.simulate.simulation import SimulateConfig, Simulated, simulate
from scripts.simulate.workload import Outcome


def main(config: SimulateConfig) -> None:
    if config.agents < 1:
        sys.exit(f"error: agents={config.agents}; set agents to at least 1")
    if config.device == "cpu":
        if config.cache_tokens is not None or config.prefills_per_dispatch is not None:
            sys.exit("error: cache_tokens and prefills_per_dispatch are not for device=cpu; remove them")
        compare_with_cpu(config)
        return
    parameters = inspect.signature(SimulateConfig).parameters
    for name in ("repeats", "layers", "clock"):
        if getattr(config, name) != parameters[name].default:
            sys.exit(f"error: {name} has no effect without device=cpu; remove {name} or set device=cpu")
    costs = DEVICES[config.device]
    rows = {"server": simulate(config, costs)}
    rows["fill all slots first"] = simulate(chz.replace(config, prefills_per_dispatch=math.inf), costs)
    rows["decode after each chunk"] = simulate(chz.replace(config, prefills_per_dispatch=0.0), costs)
    show(rows)
    if config.training_ops:
        show_shares(config, costs, rows["server"].outcome)


def compare_with_cpu(config: SimulateConfig) -> None:
    from scripts.simulate import calibrate

    clock = time.perf_counter if config.clock == "wall" else time.process_time
    sizes = {"slots": config.slots, "train_tokens_per_batch": config.train_tokens_per_batch}
    with calibrate.opened(config.workload, layers=config.layers, **sizes) as driver:
        pairs: list[tuple[Simulated, Simulated]] = []
        for seed in range(config.repeats):  # alternately, because the speed of a shared machine changes
            costs = calibrate.calibrate(driver, config.workload, clock=clock, **sizes)
            measured = calibrate.run_on_device(driver.executor, config, clock, seed=seed)
            pairs.append((simulate(config, costs), measured))
    simulated, real = (_of_median_time(results) for results in zip(*pairs, strict=True))
    show({"simulated": simulated, "this CPU": real})
    print(f"simulated / real: {simulated.outcome.total_s / real.outcome.total_s:.3f}")


def _of_median_time(results: Sequence[Simulated]) -> Simulated:
    return sorted(results, key=lambda result: result.outcome.total_s)[len(results) // 2]


def show(rows: dict[str, Simulated]) -> None:
    kinds = ("prefill", "decode", "step")
    columns = ("", "total s", "decoding sequences", "dispatches", *(f"{kind} s" for kind in kinds))
    table = Table(*columns, box=None)
    for name, row in rows.items():
        times = [f"{row.work_s[kind]:.2f}" for kind in kinds]
        total = f"{row.outcome.total_s:.2f}"
        table.add_row(name, total, f"{row.num_decoding:.1f}", str(row.num_dispatches), *times)
    Console(width=110).print(table)


def show_shares(config: SimulateConfig, costs: Costs, concurrent: Outcome) -> None:
    """Print the speeds of training and sampling while both run, relative to their speeds when run alone."""
    if concurrent.training_s < concurrent.sampling_s:
        print("training ends before sampling: set a larger training_ops to see the shares")
        return
    sampling = simulate(chz.replace(config, training_ops=0), costs).outcome
    training = simulate(chz.replace(config, agents=0), costs).outcome
    trained = sum(tokens for at, tokens in concurrent.trained_at if at <= concurrent.sampling_s)
    alone = sum(tokens for _, tokens in training.trained_at) / training.training_s
    print(
        "relative to the speed without the other kind of work: "
        f"training {trained / concurrent.sampling_s / alone:.0%}, "
        f"sampling {sampling.sampling_s / concurrent.sampling_s:.0%}"
    )


if __name__ == "__main__":
    main(chz.entrypoint(SimulateConfig, argv=sys.argv[1:], allow_hyphens=True))

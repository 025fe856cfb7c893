"""Run the engine with a load on a simulated device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, cast

import chz

from scripts.simulate.costs import Costs
from scripts.simulate.simulated_device import SimulatedExecutor
from scripts.simulate.workload import Outcome, Workload, run_workload
from skyrl_tx_server.engine.engine import Engine


@chz.chz
class SimulateConfig:
    device: Literal["h200", "h200-fixed", "cpu"] = chz.field(
        default="h200", doc="Device whose program times are used; scripts/simulate/costs.py describes them"
    )
    agents: int = 64
    prompt_tokens: int = 8192
    new_tokens: int = chz.field(default=512, doc="Tokens of each completion")
    turns: int = chz.field(default=1, doc="Completions of each agent")
    turn_tokens: int = chz.field(default=512, doc="Tokens between two completions of an agent")
    training_ops: int = chz.field(
        default=0, doc="Number of training operations that run one after another while the agents sample"
    )
    training_tokens: int = chz.field(default=8192, doc="Tokens of a training operation")
    slots: int = chz.field(default=64, doc="max_num_seqs of the server")
    cache_tokens: int | None = chz.field(
        default=None, doc="Tokens of the KV cache; default: room for every slot"
    )
    train_tokens_per_batch: int = 8192
    train_share: float | None = None
    prefills_per_dispatch: float | None = chz.field(
        default=None,
        doc="Time of a decode dispatch, divided by the time of a full prefill batch, as the scheduler "
        "assumes it. With 0, it decodes after each prefill chunk; with inf, it fills all slots before it "
        "decodes. Default: the server's estimate",
    )
    repeats: int = chz.field(
        default=3, doc="Number of times that device=cpu measures the times and runs the load"
    )
    layers: int = chz.field(default=2, doc="Layers of the model that device=cpu runs")
    clock: Literal["wall", "process"] = chz.field(
        default="wall", doc="Clock of device=cpu; `process` (CPU time) is for a machine with other load"
    )

    @property
    def workload(self) -> Workload:
        return Workload(
            agents=self.agents,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            turns=self.turns,
            turn_tokens=self.turn_tokens,
            training_ops=self.training_ops,
            training_tokens=self.training_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """The result of a load on a simulated device or on this CPU."""

    outcome: Outcome
    work_s: dict[str, float]  # kind of work -> seconds
    num_decoding: float  # mean number of sequences in a decode dispatch
    num_dispatches: int  # number of decode dispatches


def simulate(config: SimulateConfig, costs: Costs, *, seed: int = 0) -> Simulated:
    """Run the load of `config` on a simulated device."""
    workload = config.workload
    context = workload.max_context_length + 1
    executor = SimulatedExecutor(
        costs,
        slots=config.slots,
        cache_tokens=config.cache_tokens or config.slots * (context + 64),
        max_context_length=context,
        train_tokens_per_batch=config.train_tokens_per_batch,
        prefills_per_dispatch=config.prefills_per_dispatch,
    )
    engine = Engine(executor, train_share=config.train_share, clock=executor.clock)
    try:
        outcome = run_workload(workload, engine, executor.clock, seed=seed)
    finally:
        engine.stop()
    stats = engine.stats()
    dispatches = cast("Counter[int]", stats["decoding_sequences"])
    return Simulated(
        outcome=outcome,
        work_s=cast("dict[str, float]", stats["work_seconds"]),
        num_decoding=sum(sequences * number for sequences, number in dispatches.items())
        / max(1, dispatches.total()),
        num_dispatches=dispatches.total(),
    )

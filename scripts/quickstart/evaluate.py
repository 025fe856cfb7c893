"""Measure how often a model solves the tasks of each task type.

    python -m scripts.quickstart.evaluate [MODEL_DIR] [samples=16] [temperature=1.0]

`samples` is the number of trials per task. The trials are real Terminus-2 trials in sandboxes. The server's
engine samples in this process, without HTTP.
"""

from __future__ import annotations

import asyncio
import tempfile
import tomllib
from collections import defaultdict
from pathlib import Path

import numpy as np

from scripts.quickstart.arguments import directory_and_options
from scripts.quickstart.make_tasks import ROOT
from skyrl_tx_server.config.engine_options import EngineOptions
from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.operations import Sample, SampleResult, SamplingSettings
from skyrl_tx_server.executor.executor import DeviceExecutor
from src.config import TrainerConfig
from src.core.trajectory import StopReason, Task, Trajectory, Turn
from src.envs.harbor.environment import HarborTasks, open_harbor
from src.policy.chat import load_chat
from src.policy.sampling_policy import SampleRequest

PARALLEL_TRIALS = 16


class EnginePolicy:
    """A policy that samples from an engine in this process."""

    version = 0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def sample(self, request: SampleRequest) -> Turn:
        settings = SamplingSettings(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stop_token_ids=tuple(request.stop_token_ids),
            stop_at_eos=False,
        )
        operation = Sample(weights=None, prompt=np.asarray(request.prompt_ids, np.int32), settings=settings)
        result = await asyncio.wrap_future(self._engine.submit(operation))
        assert isinstance(result, SampleResult)
        [sequence] = result.sequences
        return Turn(
            prompt_ids=request.prompt_ids,
            completion_ids=sequence.tokens.tolist(),
            logprobs=sequence.logprobs.tolist(),
            stop_reason=StopReason(sequence.stop_reason),
            policy_version=0,
        )


async def evaluate(
    source: HarborTasks, tasks: list[Task], policy: EnginePolicy, *, samples: int, temperature: float
) -> list[Trajectory]:
    """Run `samples` trials of every task. Trials without a grade are printed and left out."""
    semaphore = asyncio.Semaphore(PARALLEL_TRIALS)

    async def run_trial(task: Task, seed: int, directory: Path) -> Trajectory | None:
        async with semaphore:
            trial = source.trial(task, directory=directory, seed=seed, temperature=temperature)
            result = await trial.run(policy)
        if isinstance(result, Trajectory):
            return result
        print(f"no grade: {result.task_id} {result.kind}: {result.message}")
        return None

    with tempfile.TemporaryDirectory() as directory:
        trials = [
            run_trial(task, 1000 * number + seed, Path(directory))
            for number, task in enumerate(tasks)
            for seed in range(samples)
        ]
        return [result for result in await asyncio.gather(*trials) if result is not None]


def report(title: str, tasks: list[Task], trajectories: list[Trajectory]) -> None:
    task_types = {
        task.id: tomllib.loads((task.path / "task.toml").read_text())["metadata"]["family"] for task in tasks
    }
    rewards: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        rewards[task_types[trajectory.task_id]].append(trajectory.reward)
    tokens = [len(t.turns[-1].prompt_ids) + len(t.turns[-1].completion_ids) for t in trajectories]
    turns = np.mean([len(trajectory.turns) for trajectory in trajectories])
    success = np.mean([trajectory.reward for trajectory in trajectories])
    print(
        f"{title}: mean reward {success:.3f} over {len(trajectories)} trials; on average, a trial has "
        f"{np.mean(tokens):.0f} tokens and {turns:.2f} turns"
    )
    for name in sorted(rewards):
        print(f"    {name:16} {np.mean(rewards[name]):.2f}")


def main() -> None:
    model_dir, options = directory_and_options(__doc__, ROOT / "model", ["samples", "temperature"])
    config = TrainerConfig(
        model_name="quickstart/tiny",
        tasks_dir=str(ROOT / "train"),
        eval_tasks=[str(ROOT / "heldout")],
        environment_type="sandbox",
        max_turns=4,
        max_tokens=128,
        context_limit=1024,
        enable_summarize=False,
    )
    chat = load_chat(str(model_dir))
    source = open_harbor(config, chat)
    with tempfile.TemporaryDirectory() as checkpoints:
        engine = Engine(
            DeviceExecutor(
                EngineOptions(
                    base_model=str(model_dir),
                    model_alias="quickstart/tiny",
                    checkpoints_dir=checkpoints,
                    compilation_cache_dir=None,
                    dtype="float32",
                    max_lora_rank=8,
                    max_context_length=1024,
                    max_num_seqs=32,
                    decode_steps_per_dispatch=16,
                    train_tokens_per_batch=1024,
                    max_models=1,
                    max_loras=1,
                )
            )
        )
        engine.start()
        policy = EnginePolicy(engine)
        samples, temperature = int(options.get("samples", 16)), float(options.get("temperature", 1.0))
        for title, tasks in (("held out", list(source.eval)), ("train", list(source.train))):
            report(
                title,
                tasks,
                asyncio.run(evaluate(source, tasks, policy, samples=samples, temperature=temperature)),
            )
        engine.stop()


if __name__ == "__main__":
    main()

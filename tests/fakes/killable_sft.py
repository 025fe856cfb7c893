"""Runs `src.sft` on a unigram model, kills it with SIGKILL at chosen points and resumes it.

    python -m tests.fakes.killable_sft DIR POINTS SEED [OPTION ...]

`tests.fakes.killable` explains the arguments and the points.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import random
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import tinker
from rich.console import Console

from src.cli.command_line import parse_as
from src.cli.console import Display
from src.loop.connection import Dependencies
from src.policy.backend import SavedPaths
from src.policy.sampling_policy import Policy, ReferenceModel
from src.sft.config import SftConfig
from src.sft.dataset import load
from src.sft.run import run
from tests.fakes.backend import Ready, log_softmax
from tests.fakes.killable import Killer, count_in_child, count_writes
from tests.fakes.run import OWN_SERVER, groups_trained, untimed
from tests.fakes.tokenizer import toy_chat

VOCAB = 300
OPTIONS = (
    *("learning_rate=5", "behavior_if_log_dir_exists=resume", "batch_size=2", "n_epochs=3", "save_every=2"),
    *("eval_every=3", "eval_split=0.2"),
)


class UnigramClient:
    """A training client for `cross_entropy` with momentum. The context does not change its distribution."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.logits, self.momentum, self.gradient = (np.zeros(VOCAB) for _ in range(3))
        self.history: list[str] = []
        self.tick = tick

    def forward(self, data, loss_fn, loss_fn_config=None):
        self.tick()
        assert loss_fn == "cross_entropy"
        logprobs = log_softmax(self.logits)
        outputs = [
            {"logprobs": tinker.TensorData.from_numpy(logprobs[_array(datum, "target_tokens")])}
            for datum in data
        ]
        loss = -sum(
            float((logprobs[_array(datum, "target_tokens")] * _array(datum, "weights")).sum())
            for datum in data
        )
        return Ready(
            tinker.ForwardBackwardOutput(
                loss_fn_output_type="ArrayRecord", loss_fn_outputs=outputs, metrics={"loss:sum": loss}
            )
        )

    def forward_backward(self, data, loss_fn, loss_fn_config=None):
        content = json.dumps(
            [[datum.model_input.to_ints(), _array(datum, "weights").tolist()] for datum in data]
        )
        self.history.append(hashlib.sha256(content.encode()).hexdigest()[:16])
        for datum in data:
            for token, weight in zip(_array(datum, "target_tokens"), _array(datum, "weights"), strict=True):
                self.gradient += weight * (np.eye(VOCAB)[token] - np.exp(log_softmax(self.logits)))
        return self.forward(data, loss_fn)

    def optim_step(self, adam):
        self.momentum = 0.5 * self.momentum + self.gradient
        self.logits = self.logits + adam.learning_rate * self.momentum
        norm, self.gradient = float(np.linalg.norm(self.gradient)), np.zeros(VOCAB)
        self.tick()
        return Ready(tinker.types.OptimStepResponse(metrics={"grad_norm": norm}))


class UnigramBackend:
    """Implements `Backend`. A checkpoint is a file that contains a hash of every training batch."""

    def __init__(
        self, directory: Path, *, load: str | None = None, tick: Callable[[], None] = lambda: None
    ) -> None:
        self.training_client = UnigramClient(tick)
        self._directory, self._tick = directory, tick
        if load is not None:
            state = json.loads((directory / load.rpartition("/")[2]).read_text())
            self.training_client.logits = np.array(state["logits"])
            self.training_client.momentum = np.array(state["momentum"])
            self.training_client.history = state["history"]

    async def policy(self, version: int) -> Policy:
        raise NotImplementedError("supervised training does not sample")

    async def reference_model(self, name: str | None = None) -> ReferenceModel:
        raise NotImplementedError("supervised training has no reference model")

    async def check(self) -> None:
        pass

    async def save(self, name: str) -> SavedPaths:
        client = self.training_client
        arrays = {"logits": client.logits.tolist(), "momentum": client.momentum.tolist()}
        self._directory.mkdir(exist_ok=True)
        self._tick()
        (self._directory / f".{name}").write_text(json.dumps({"history": client.history, **arrays}))
        (self._directory / f".{name}").replace(self._directory / name)
        self._tick()
        return SavedPaths(state_path=f"tinker://m/weights/{name}", sampler_path=f"tinker://m/sampler/{name}")


class SftRun:
    """Runs `src.sft` in the directory `path` and collects its terminal output in `text`."""

    def __init__(self, path: Path, *, tick: Callable[[], None] = lambda: None) -> None:
        self.path, self.text = path, io.StringIO()
        self._tick = tick
        self.opened: list[SftConfig] = []

    async def go(self, *options: str) -> None:
        config = parse_as(SftConfig, [*OWN_SERVER, f"log_path={self.path / 'run'}", *options])

        @asynccontextmanager
        async def connect(config, events, dataset):
            self.opened.append(config)
            yield Dependencies(
                source=dataset,
                backend=UnigramBackend(
                    self.path / "server", load=config.load_checkpoint_path, tick=self._tick
                ),
            )

        display = Display(Console(file=self.text, width=160))
        await run(config, display, connect=connect, dataset=load(config, toy_chat()))


def write_chats(path: Path, count: int = 9) -> Path:
    """Write `count` chats of one question and one answer to `path`, as JSON lines."""
    chats = [
        [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n} {n}"}]
        for n in range(count)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def run_sft(path: Path, kill_point: int | None, *options: str) -> int:
    """Run `src.sft` in `path` and kill this process at `kill_point`. Returns the number of points."""
    killer = Killer(kill_point=kill_point)
    data = write_chats(path / "chats.jsonl")
    count_writes(killer)
    asyncio.run(SftRun(path, tick=killer.tick).go(f"data={data}", *OPTIONS, *options))
    return killer.count


def result(path: Path) -> list[object]:
    """Return the metrics without times, the trained groups and the final state of a finished run."""
    state = max((path / "server").glob("0*")).read_text()
    return [json.dumps(untimed(path / "run")), groups_trained(path / "run"), state]


def main(directory: Path, num_points: int, seed: int, *options: str) -> int:
    """Kill and resume one run for each of `num_points` random points, and one more run up to `num_points`
    times. Compare each run with an uninterrupted run. Return 0 if no run differs and the uninterrupted run
    trained every group exactly once.
    """
    total = count_in_child(lambda: run_sft(directory / "uninterrupted", None, *options))
    uninterrupted, rng, num_bad = result(directory / "uninterrupted"), random.Random(seed), 0
    chain = [rng.randrange(1, total // 2) for _ in range(num_points)]
    for kills in [
        *([kill_point] for kill_point in sorted(rng.sample(range(1, total + 1), num_points))),
        chain,
    ]:
        path = directory / f"kill-{'-'.join(map(str, kills))}"[:60]
        for kill_point in [*kills, None]:
            if count_in_child(lambda path=path, kill_point=kill_point: run_sft(path, kill_point, *options)):
                break
        if result(path) != uninterrupted:
            num_bad += 1
            print(f"killed at {kills}: the run differs from the uninterrupted one")
    trained = set(uninterrupted[1].values())  # pyright: ignore[reportAttributeAccessIssue]
    num_equal, num_runs = num_points + 1 - num_bad, num_points + 1
    print(f"{num_equal} of {num_runs} runs ended like the uninterrupted one ({total} points)")
    return 1 if num_bad or trained != {1} else 0


def _array(datum: tinker.Datum, name: str) -> np.ndarray:
    return datum.loss_fn_inputs[name].to_numpy()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]))

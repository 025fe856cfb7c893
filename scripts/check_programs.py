"""Print one sha256 per lowered program of a tiny model on the default device: the programs of
`DeviceExecutor.programs` (prefill, decode, forward_backward and forward), the program that computes
top-k logprobs and the logprobs of given targets for a prompt (`score`), and the step of Adam.

    python -m scripts.check_programs

A hash covers the lowered StableHLO without source locations, result names and function names, so it changes
only if the operations of a program change. Compare the output of two commits to show that a refactoring does
not change these programs.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.stages import Lowered

from skyrl_tx_server.engine.operations import AdamSettings
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.executor.resolved_model import resolve_model
from skyrl_tx_server.model.lora.adapter import Adapter, place_adapter, zero_adapter
from skyrl_tx_server.model.weights import load_params
from skyrl_tx_server.sampling.score_step import ScoreInputs, score
from skyrl_tx_server.training.train_step import adam_scalars, adam_step, init_adam, place_adam
from tests.fakes.tiny_model import make_model, make_settings

SCORED_TOKENS, SCORED_TARGETS, SCORED_TOP = 128, 2, 4
LORA_SLOTS = 3


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name, lowered in programs(Path(directory)):
            print(hash_of(lowered), name)


def programs(directory: Path) -> Iterator[tuple[str, Lowered]]:
    """Yield (name, lowered form) of each of `DeviceExecutor.programs`, then of scoring and of Adam."""
    settings = make_settings(make_model(directory), directory / "checkpoints")
    yield from DeviceExecutor(settings).programs()
    model = resolve_model(settings)
    params = load_params(settings.model_dir, model.config, model.dtype)
    adapter = place_adapter(model.config, zero_adapter(model.config, settings.max_lora_rank))
    inputs = ScoreInputs(
        tokens=np.zeros(SCORED_TOKENS, np.int32),
        length=np.array(SCORED_TOKENS, np.int32),
        adapter_index=np.array(0, np.int32),
        temperature=np.array(1.0, np.float32),
        targets=np.zeros((SCORED_TOKENS, SCORED_TARGETS), np.int32),
    )
    yield "score", score.lower(params, _stack(adapter), inputs, config=model.config, top=SCORED_TOP)
    adam = place_adam(model.config, init_adam(model.config, settings.max_lora_rank))
    yield "adam_step", adam_step.lower(adapter, adapter, adam, adapter, adam_scalars(AdamSettings()))


def hash_of(lowered: Lowered) -> str:
    """Return the sha256 of the program's text, with functions numbered in the order of their first use."""
    text = re.sub(r'jax\.result_info = "[^"]*"', "", lowered.as_text())
    numbers: dict[str, str] = {}
    text = re.sub(r"@\w+", lambda match: numbers.setdefault(match[0], f"@{len(numbers)}"), text)
    return hashlib.sha256(text.encode()).hexdigest()


def _stack(adapter: Adapter) -> Adapter:
    return jax.tree.map(lambda leaf: np.zeros((LORA_SLOTS, *leaf.shape), leaf.dtype), adapter)


if __name__ == "__main__":
    main()

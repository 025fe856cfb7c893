"""Check that an optimizer step changes every adapter weight whose update is non-zero, with a learning rate of
1e-6 and a bfloat16 base model.

    python -m scripts.bench.optimizer_truth

The script compares the training checkpoints before and after an optimizer step. A weight has a non-zero
update if Adam's moments give an update of more than half a unit in the last place of its float32 value. The
script also prints the share of these weights that would change if they were bfloat16.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from scripts.bench.compare import print_figure, random_sequences
from scripts.bench.sides.ours import Ours, running
from scripts.bench.small_model import make_model
from skyrl_tx_server.engine.operations import AdamSettings, OptimStep, SaveWeights, WeightsSaved
from skyrl_tx_server.files.checkpoints import CheckpointStore

LEARNING_RATE = 1e-6


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = CheckpointStore(Path(directory), "local/bench")
        model_dir = make_model(Path(directory) / "model")
        with running(
            model_dir, dtype="bfloat16", max_context_length=256, checkpoints_dir=Path(directory)
        ) as ours:
            for _ in range(2):  # LoRA's A gets a gradient only in the second step, because B starts at zero
                step(ours, 1e-2)
            before = tensors(ours, store, "before")
            step(ours, LEARNING_RATE)
            after = tensors(ours, store, "after")
    updated = moved = moved_in_bfloat16 = 0
    for name in (name for name in after if not name.startswith("optimizer.")):
        old, new = before[name], after[name]
        has_update = np.abs(update(after, name)) > np.spacing(np.abs(old)) / 2
        updated += int(has_update.sum())
        moved += int((old != new)[has_update].sum())
        is_moved = old.astype(ml_dtypes.bfloat16) != new.astype(ml_dtypes.bfloat16)
        moved_in_bfloat16 += int(is_moved[has_update].sum())
    print(f"one optimizer step at learning rate {LEARNING_RATE:g} on a bfloat16 base")
    print_figure("entries with a non-zero update", updated)
    print_figure("share that changed", moved / updated, at_least=1.0)
    print_figure("share that would change in bfloat16", moved_in_bfloat16 / updated)


def update(after: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Return the update of the tensor `name` in float64, computed from the moments after the step."""
    num_steps = int(after["optimizer.step"])
    first, second = (after[f"optimizer.{moment}.{name}"].astype(np.float64) for moment in ("first", "second"))
    adam = AdamSettings()
    scale = np.sqrt(second / (1 - adam.beta2**num_steps)) + adam.eps
    return LEARNING_RATE * first / (1 - adam.beta1**num_steps) / scale


def step(ours: Ours, learning_rate: float) -> None:
    ours.train(random_sequences([129] * 4))
    ours.engine.submit(OptimStep(model_id="model", adam=AdamSettings(learning_rate=learning_rate))).result()


def tensors(ours: Ours, store: CheckpointStore, name: str) -> dict[str, np.ndarray]:
    """Save a training checkpoint and return its tensors, which are those of the adapter and the optimizer."""
    result = ours.engine.submit(SaveWeights(model_id="model", name=name)).result()
    assert isinstance(result, WeightsSaved) and result.path is not None
    return store.read(result.path)[1]


if __name__ == "__main__":
    main()

"""forward_backward of one GRPO group (prompt 512, 8 responses of 128): its prompt computed once against once
per member.

    taskset -c 0,1 python -m scripts.bench.train_group

Flat is the same work on a group whose members differ in their first token. Exactness: the group in one
request and one member per request, which leaves nothing to share, must give the same summed loss and gradient
norm.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import chz

from scripts.bench.compare import Peers, figure, interleave, random_sequences, report, timed
from scripts.bench.sides.ours import Ours, datum, running
from scripts.bench.small_model import make_model
from skyrl_tx_server.engine.operations import (
    AdamSettings,
    ForwardBackward,
    ForwardBackwardResult,
    LossFn,
    OptimStep,
    OptimStepResult,
)

PROMPT, RESPONSE, GROUP = 512, 128, 8


def main(config: Peers) -> None:
    group = make_group(GROUP)
    flat = [[100 + member, *sequence[1:]] for member, sequence in enumerate(group)]
    with (
        tempfile.TemporaryDirectory() as folder,
        running(make_model(Path(folder) / "model", layers=config.layers)) as ours,
    ):
        turns = {"ours": timed(partial(ours.train, group)), "flat": timed(partial(ours.train, flat))}
        title = f"GRPO group training, prompt {PROMPT}, {GROUP} responses of {RESPONSE}"
        report(title, interleave(turns, repeats=config.repeats), {"flat": 2.2})
        ours.optim_step()
        loss, norm = loss_and_gradient(ours, [group])
        flat_loss, flat_norm = loss_and_gradient(ours, [[member] for member in group])
        figure("summed loss, relative difference", abs(loss / flat_loss - 1), at_most=1e-5)
        figure("gradient norm, relative difference", abs(norm / flat_norm - 1), at_most=1e-5)


def make_group(size: int, *, prompt: int = PROMPT, response: int = RESPONSE) -> list[list[int]]:
    beginning = random_sequences([prompt], seed=1)[0]
    return [beginning + end for end in random_sequences([response] * size, seed=2)]


def loss_and_gradient(ours: Ours, requests: Sequence[Sequence[Sequence[int]]]) -> tuple[float, float]:
    """Summed over the requests; the weights stay as they are."""
    loss = 0.0
    for sequences in requests:
        data = tuple(datum(sequence) for sequence in sequences)
        result = ours.engine.submit(
            ForwardBackward(model_id="model", data=data, loss_fn=LossFn.CROSS_ENTROPY)
        ).result()
        assert isinstance(result, ForwardBackwardResult)
        loss += result.metrics["loss:sum"]
    step = ours.engine.submit(OptimStep(model_id="model", adam=AdamSettings(learning_rate=0.0))).result()
    assert isinstance(step, OptimStepResult)
    return loss, step.metrics["grad_norm"]


if __name__ == "__main__":
    main(chz.entrypoint(Peers, argv=sys.argv[1:], allow_hyphens=True))

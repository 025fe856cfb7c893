"""Measure forward_backward of one GRPO group (a prompt of 512 tokens, 8 responses of 128 tokens) in two
cases: the prompt is computed once for the group, or once per member.

    taskset -c 0,1 python -m scripts.bench.train_group

In the case `flat` the members of the group differ in their first token, so they share no prefix. The script
also prints how much the summed loss and the gradient norm differ between one request with all members and one
request per member.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import chz

from scripts.bench.compare import ModelOptions, interleave, print_figure, random_sequences, report, timed
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


def main(config: ModelOptions) -> None:
    group = make_group(GROUP)
    flat = [[100 + member, *sequence[1:]] for member, sequence in enumerate(group)]
    with (
        tempfile.TemporaryDirectory() as directory,
        running(make_model(Path(directory) / "model", layers=config.layers)) as ours,
    ):
        calls = {"ours": timed(partial(ours.train, group)), "flat": timed(partial(ours.train, flat))}
        title = f"GRPO group training, prompt {PROMPT}, {GROUP} responses of {RESPONSE}"
        report(title, interleave(calls, repeats=config.repeats), {"flat": 2.2})
        ours.optim_step()
        loss, norm = loss_and_gradient(ours, [group])
        flat_loss, flat_norm = loss_and_gradient(ours, [[member] for member in group])
        print_figure("summed loss, relative difference", abs(loss / flat_loss - 1), at_most=1e-5)
        print_figure("gradient norm, relative difference", abs(norm / flat_norm - 1), at_most=1e-5)


def make_group(size: int, *, prompt: int = PROMPT, response: int = RESPONSE) -> list[list[int]]:
    beginning = random_sequences([prompt], seed=1)[0]
    return [beginning + end for end in random_sequences([response] * size, seed=2)]


def loss_and_gradient(ours: Ours, requests: Sequence[Sequence[Sequence[int]]]) -> tuple[float, float]:
    """Return the summed loss of the requests and the gradient norm. The weights do not change."""
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
    main(chz.entrypoint(ModelOptions, argv=sys.argv[1:], allow_hyphens=True))

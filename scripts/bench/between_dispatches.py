"""Measure the host time between two decode dispatches, in milliseconds. A decode dispatch is one program call
that computes several decode steps. The measured time begins when the host has the outputs of one dispatch,
and ends when the next dispatch has been started. The next dispatch is started either after or before the host
processes the outputs of the previous one.

    taskset -c 0,1 python -m scripts.bench.between_dispatches rows=64 context=512
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import chz

from scripts.bench.compare import print_figure
from scripts.bench.driver import Driver, opened
from scripts.bench.gpu_models import MODELS
from scripts.bench.small_model import make_model
from skyrl_tx_server.sampling import decode, model_runner

DISPATCHES = 8


@chz.chz
class BetweenDispatches:
    rows: int = 64
    context: int = chz.field(default=512, doc="Tokens of each sequence when decoding starts")
    rounds: int = 3


def main(config: BetweenDispatches) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_model(Path(directory) / "model", MODELS["tiny"], dtype="float32")
        new = (2 * config.rounds * DISPATCHES + 4) * 16
        sizes = {"max_num_seqs": config.rows, "max_context_length": config.context + new}
        with opened(model_dir, train_tokens_per_batch=256, **sizes) as driver:
            driver.admit(driver.new_sequences([config.context] * config.rows), max_tokens=new)
            driver.decode(dispatch_next=False)
            waiting, following = zip(
                *(
                    (between_ms(driver, dispatch_next=False), between_ms(driver, dispatch_next=True))
                    for _ in range(config.rounds)
                ),
                strict=True,
            )
    print_figure("dispatched after the host processes the outputs, ms", median(waiting))
    print_figure("dispatched before the host processes the outputs, ms", median(following))
    print_figure("  ratio", median(following) / median(waiting))


def between_ms(driver: Driver, *, dispatch_next: bool) -> float:
    """Return the median host time between two dispatches. No dispatch may be in flight at the call. With
    `dispatch_next`, the next dispatch starts before the host processes the outputs of the previous one."""
    result_times: list[float] = []
    dispatch_times: list[float] = []
    with (
        mock.patch.object(decode, "to_host", partial(append_end_time, result_times, decode.to_host)),
        mock.patch.object(
            model_runner, "decode_steps", partial(append_end_time, dispatch_times, model_runner.decode_steps)
        ),
    ):
        for number in range(DISPATCHES):
            driver.decode(dispatch_next=dispatch_next and number < DISPATCHES - 1)
    return 1000 * median(start - end for end, start in zip(result_times, dispatch_times[1:], strict=False))


def append_end_time[**Inputs, Output](
    times: list[float], function: Callable[Inputs, Output], /, *args: Inputs.args, **options: Inputs.kwargs
) -> Output:
    result = function(*args, **options)
    times.append(time.perf_counter())
    return result


if __name__ == "__main__":
    main(chz.entrypoint(BetweenDispatches, argv=sys.argv[1:], allow_hyphens=True))

"""Estimate how long the compiled programs of the engine take on a device.

The programs compute a decode dispatch (several decode steps), a tile batch (tiles of PREFILL_TILE tokens of
prompts) or a micro-batch of training. `FixedTimes` and `Measured` use given times of programs. `Roofline`
calculates the time of a program: the number of launches times the time of a launch, plus the longer of the
time to read the bytes and the time to compute the operations. This table shows which of the two times is
usually longer, and what it includes:

    decode step    bytes: all weights, and the keys and values of each sequence
    tile batch     operations: 2 per weight and token, and those of attention over the context
    training       operations: 4 per weight and token, and those of attention

In training, there are 4 and not 6 operations per weight and token, because base weights have no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from skyrl_tx_server.model.shapes import CPU_PREFILL, GPU_PREFILL, PREFILL_TILE, PrefillShapes, bucket


class Costs(Protocol):
    """The time of each program on one device, in seconds."""

    @property
    def shapes(self) -> PrefillShapes: ...

    def prefill_s(self, tiles: int, *, context: float) -> float:
        """Return the time of one tile batch with this number of tiles, whose tokens attend to `context`
        tokens on average."""
        ...

    def decode_s(self, positions: Sequence[int], *, steps: int, slots: int) -> float:
        """Return the time of a decode dispatch of `steps` decode steps for sequences at these positions.
        `slots` is the width of the decode program."""
        ...

    def training_s(self, tokens: int) -> float:
        """Return the time of a training micro-batch."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """The sizes of a model on which the time of a program depends."""

    weights: float  # number of weights of the layers and the head, all experts included
    kv_bytes: float  # bytes of the keys and values of one position in all layers
    attention: float  # num_layers * num_heads * head_dim
    layers: int
    itemsize: int = 2  # bytes per weight
    active_weights: float | None = None  # weights by which each token is multiplied; None: all weights

    @property
    def token_flops(self) -> float:
        """The number of operations of the products of one token with the weights."""
        return 2 * (self.weights if self.active_weights is None else self.active_weights)


def step_flops(model: ModelSize, *, cached: float, slots: int) -> float:
    """Return the number of operations of a decode step of a program with `slots` slots. The sequences have
    `cached` positions in total."""
    return model.token_flops * slots + 4 * model.attention * cached


QWEN3_4B = ModelSize(weights=4.02e9, kv_bytes=147_456, attention=36 * 32 * 128, layers=36)


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """A device that is described by the rates that programs reach on it."""

    model: ModelSize
    bytes_per_s: float
    flops_per_s: float  # in tile batches and decode steps
    training_flops_per_s: float
    launch_s: float
    decode_launches: int  # launches per layer in a decode step; scripts/check_gpu.py prints this number
    prefill_launches: int  # launches per layer in a tile batch
    training_launches: int  # launches per layer in a training micro-batch
    shapes: PrefillShapes = GPU_PREFILL

    def prefill_s(self, tiles: int, *, context: float) -> float:
        tokens = tiles * PREFILL_TILE
        flops = tokens * (self.model.token_flops + 4 * self.model.attention * context)
        num_bytes = self.model.weights * self.model.itemsize
        return self._time_s(num_bytes, flops / self.flops_per_s, self.prefill_launches)

    def decode_s(self, positions: Sequence[int], *, steps: int, slots: int) -> float:
        cached = sum(positions) + len(positions) * steps / 2
        num_bytes = self.model.weights * self.model.itemsize + cached * self.model.kv_bytes
        flops = step_flops(self.model, cached=cached, slots=slots)
        return steps * self._time_s(num_bytes, flops / self.flops_per_s, self.decode_launches)

    def training_s(self, tokens: int) -> float:
        flops = tokens * (2 * self.model.token_flops + 6 * self.model.attention * tokens)
        num_bytes = 3 * self.model.weights * self.model.itemsize
        return self._time_s(num_bytes, flops / self.training_flops_per_s, self.training_launches)

    def _time_s(self, num_bytes: float, flops_s: float, launches: int) -> float:
        launches_s = self.model.layers * launches * self.launch_s
        return launches_s + max(num_bytes / self.bytes_per_s, flops_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedTimes:
    """A device that is described by times that do not depend on the context."""

    tile_batch_s: float  # time of a tile batch with `shapes.long` tiles
    step_s: float  # time of a decode step without sequences
    sequence_step_s: float  # time that each sequence adds to a decode step
    token_s: float  # training time of a token
    shapes: PrefillShapes = GPU_PREFILL

    def prefill_s(self, tiles: int, *, context: float) -> float:
        return self.tile_batch_s * tiles / self.shapes.long

    def decode_s(self, positions: Sequence[int], *, steps: int, slots: int) -> float:
        return steps * (self.step_s + self.sequence_step_s * len(positions))

    def training_s(self, tokens: int) -> float:
        return tokens * self.token_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A device that is described by the times of its programs. `calibrate` measures these times."""

    # number of tiles -> (seconds of a tile batch without context, additional seconds per token of context)
    prefill: dict[int, tuple[float, float]]
    # segment end (see `segment_ends`) -> seconds of a decode dispatch with (one sequence, `slots` sequences)
    decode: dict[int, tuple[float, float]]
    slots: int
    training: dict[int, float]  # tokens of a micro-batch -> seconds
    shapes: PrefillShapes = CPU_PREFILL

    def prefill_s(self, tiles: int, *, context: float) -> float:
        base_s, token_s = self.prefill[tiles]
        return base_s + token_s * context

    def decode_s(self, positions: Sequence[int], *, steps: int, slots: int) -> float:
        one_s, all_s = self.decode[bucket(max(positions), sorted(self.decode))]
        return float(np.interp(len(positions), (1, self.slots), (one_s, all_s)))

    def training_s(self, tokens: int) -> float:
        lengths = sorted(self.training)
        return self.training[bucket(min(tokens, lengths[-1]), lengths)]


DEVICES: dict[str, Costs] = {
    "h200": Roofline(
        model=QWEN3_4B,
        bytes_per_s=3.55e12,
        flops_per_s=470e12,
        training_flops_per_s=406e12,
        launch_s=2.75e-6,
        decode_launches=20,
        prefill_launches=45,
        training_launches=126,
    ),
    "h200-fixed": FixedTimes(tile_batch_s=22e-3, step_s=8e-3, sequence_step_s=65e-6, token_s=1 / 12_000),
}
"""Descriptions of one H200 that runs Qwen3-4B.

The times that `h200` calculates differ from the measured times (docs/devices.md, "Measurements on a GPU") by
at most 1 % for decode steps of 64 and 256 sequences of 2,048 tokens and for training on 4,096 tokens. For
prefill of 1,024 to 32,768 tokens, they differ by at most 6 %. On another H200, a bandwidth of 4.3 TB/s and a
computing rate of 790 TFLOP/s were measured. The rates of `h200` are 83 % of this bandwidth, and 59 %
(prefill) and 51 % (training) of this computing rate. The times of `h200-fixed` were calculated, not measured,
and do not depend on the context."""

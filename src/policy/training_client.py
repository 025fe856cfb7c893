"""The methods of `tinker.TrainingClient` that learners use."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Protocol

import tinker
from tinker.types import LossFnType


class TrainingClient(Protocol):
    def forward(
        self,
        data: list[tinker.Datum],
        loss_fn: LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Awaitable[tinker.ForwardBackwardOutput]: ...

    def forward_backward(
        self,
        data: list[tinker.Datum],
        loss_fn: LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Awaitable[tinker.ForwardBackwardOutput]: ...

    def optim_step(self, adam: tinker.AdamParams, /) -> Awaitable[tinker.types.OptimStepResponse]: ...

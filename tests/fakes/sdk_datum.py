"""Creates datums of the SDK from lists and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from tinker import types


def sdk_datum(
    prompt: Sequence[int] | types.ModelInput, **loss_fn_inputs: Sequence[float] | np.ndarray
) -> types.Datum:
    """Return a datum. The SDK accepts lists and arrays as inputs, although its type hints do not."""
    if not isinstance(prompt, types.ModelInput):
        prompt = types.ModelInput.from_ints(list(prompt))
    return types.Datum(model_input=prompt, loss_fn_inputs=cast(dict[str, types.TensorData], loss_fn_inputs))

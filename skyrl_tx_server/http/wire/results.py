"""Convert results to the SDK's JSON bodies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import orjson

from skyrl_tx_server.engine.operations import (
    NO_LOGPROB,
    CsrMatrix,
    Done,
    ForwardBackwardResult,
    OpResult,
    OptimStepResult,
    SampleResult,
    TopkLogprobs,
    WeightsLoaded,
    WeightsSaved,
)


def result_to_json(kind: str, result: OpResult, extra: Mapping[str, str]) -> dict[str, object]:
    """Return the JSON body of a result. `kind` is the type of the request. `extra` contains the fields that
    the route adds."""
    match result:
        case SampleResult():
            return {
                "type": "sample",
                "sequences": [
                    {
                        "stop_reason": sequence.stop_reason.value,
                        "tokens": sequence.tokens.tolist(),
                        "logprobs": _json_floats(sequence.logprobs),
                        **({} if sequence.topk is None else {"topk_logprobs": _json_topk(sequence.topk)}),
                    }
                    for sequence in result.sequences
                ],
                "prompt_logprobs": None
                if result.prompt_logprobs is None
                else _nullable(result.prompt_logprobs),
                "topk_prompt_logprobs": None
                if result.topk_prompt_logprobs is None
                else _json_topk(result.topk_prompt_logprobs),
                "target_prompt_logprobs": None
                if result.target_prompt_logprobs is None
                else _json_cells(result.target_prompt_logprobs),
                "prompt_cache_hit_tokens": result.prompt_cache_hit_tokens,
            }
        case ForwardBackwardResult():
            return {
                "loss_fn_output_type": "ArrayRecord",
                "loss_fn_outputs": [
                    {
                        "logprobs": {
                            "data": _json_floats(logprobs.reshape(-1)),
                            "dtype": "float32",
                            "shape": list(logprobs.shape),
                        }
                    }
                    for logprobs in result.logprobs
                ],
                "metrics": _json_metrics(result.metrics),
            }
        case OptimStepResult():
            return {"metrics": _json_metrics(result.metrics)}
        case WeightsSaved():
            size = {"size_bytes": result.size_bytes} if kind == "save_weights_external" else {}
            return {"type": kind, "path": result.path, **size, **extra}
        case WeightsLoaded():
            return {"type": kind, "model_id": result.model_id, **extra}
        case Done():
            return {"type": kind, **extra}


def _json_float(value: float) -> float | str:
    """Return `value` if it is finite, otherwise the string "inf", "-inf" or "nan", because JSON has no such
    numbers. The SDK converts these strings to floats."""
    return value if math.isfinite(value) else str(value)


def _nullable(values: np.ndarray) -> list[float | str | None]:
    """Return logprobs as JSON values. An undefined logprob, which is NaN in `values`, becomes None."""
    return [None if math.isnan(value) else _json_float(value) for value in values.tolist()]


def _json_floats(values: np.ndarray) -> list[float | str]:
    return [_json_float(value) for value in values.tolist()]


def _json_list(items: Iterable[object]) -> orjson.Fragment:
    """Return a JSON list whose items are encoded one by one, so that a thread that encodes a large result
    holds the GIL only for a short time."""
    return orjson.Fragment(b"[" + b",".join(map(orjson.dumps, items)) + b"]")


def _json_metrics(metrics: Mapping[str, float]) -> dict[str, float | str]:
    return {name: _json_float(value) for name, value in metrics.items()}


def _json_topk(topk: TopkLogprobs) -> orjson.Fragment:
    """Return the top-k of each position, with None at a position that has no top-k tokens."""
    return _json_list(
        None if row[0] == NO_LOGPROB else list(zip(ids.tolist(), _json_floats(row), strict=True))
        for ids, row in zip(topk.token_ids, topk.logprobs, strict=True)
    )


def _json_cells(cells: CsrMatrix) -> dict[str, object]:
    sparse: dict[str, object] = {}
    if cells.crow_indices is not None and cells.col_indices is not None:
        sparse = {
            "sparse_crow_indices": cells.crow_indices.tolist(),
            "sparse_col_indices": cells.col_indices.tolist(),
        }
    return {"data": _json_floats(cells.values), "dtype": "float32", "shape": list(cells.shape), **sparse}

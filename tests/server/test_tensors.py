"""Tests the tensors of JSON requests."""

import numpy as np
import pytest

from skyrl_tx_server.errors import UserError
from skyrl_tx_server.http.wire.openai_replies import chat_logprobs
from skyrl_tx_server.http.wire.tensors import integers, parse_tensor


def test_integral_floats_are_accepted_as_integers() -> None:
    tensor = parse_tensor({"data": [1.0, 2], "dtype": "int64"}, "datum 0")
    assert isinstance(tensor, np.ndarray) and tensor.dtype == np.int64 and tensor.tolist() == [1, 2]


@pytest.mark.parametrize("value", [1.7, float("nan"), float("inf"), 1 << 64])
def test_a_value_that_is_not_an_int64_is_refused(value: float) -> None:
    with pytest.raises(UserError, match="datum 0: data does not match its dtype and shape"):
        parse_tensor({"data": [0, value], "dtype": "int64"}, "datum 0")


@pytest.mark.parametrize("shape", [[-1], [1, -1], [-2]])
def test_a_negative_dimension_is_refused(shape: list[int]) -> None:
    with pytest.raises(
        UserError, match=r"^datum 0: the shape \[.*\] has a negative dimension; send the size"
    ):
        parse_tensor({"data": [1, 2], "dtype": "int64", "shape": shape}, "datum 0")


@pytest.mark.parametrize("values", [[1, True], [1] * 70_000 + [True], [False], [2**63]])
def test_values_that_are_not_64_bit_integers_are_refused(values: list[object]) -> None:
    with pytest.raises(UserError, match=r"^prompt: expected a flat list of integers"):
        integers(values, "prompt")


def test_column_indices_need_row_pointers() -> None:
    with pytest.raises(UserError, match="sparse_col_indices needs sparse_crow_indices"):
        parse_tensor({"data": [1.0, 2.0], "shape": [2], "sparse_col_indices": [0, 1]}, "datum 0")


def test_a_part_of_a_character_has_no_bytes() -> None:
    logprobs = chat_logprobs([1, 2], [-1.0, -2.0], lambda ids: {1: "\ufffd", 2: "é"}[ids[0]])
    assert [item["bytes"] for item in logprobs["content"]] == [None, [195, 169]]  # type: ignore[attr-defined]

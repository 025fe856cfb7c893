import numpy as np
import pytest

from skyrl_tx_server.batching import TrainShape, check_data, pack, train_shapes, unpack
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.ops import TrainDatum
from tests.server import tiny_qwen3

SHAPES = train_shapes(max_context_length=512, tokens_per_batch=512)


def test_lengths_double_up_to_the_context_and_rows_fill_the_token_budget() -> None:
    shapes = train_shapes(max_context_length=1000, tokens_per_batch=512)
    assert [(shape.rows, shape.length) for shape in shapes] == [(4, 128), (2, 256), (1, 512), (1, 1024)]
    assert [shape.length for shape in train_shapes(max_context_length=300, tokens_per_batch=512)] == [128, 256, 384]
    assert train_shapes(max_context_length=40, tokens_per_batch=8192) == (TrainShape(rows=64, length=128),)


def test_sequences_share_rows_and_keep_their_own_segments_and_positions() -> None:
    data = tiny_qwen3.data((50, 30, 40, 100), weights=True)
    (batch,) = pack(data, SHAPES)
    assert batch.tokens.shape == (4, 128)
    assert [(place.datum, place.row, place.start) for place in batch.placements] == [(3, 0, 0), (0, 1, 0), (2, 1, 50), (1, 1, 90)]
    assert np.array_equal(batch.segment_ids[1], [1] * 50 + [2] * 40 + [3] * 30 + [0] * 8)
    assert np.array_equal(batch.positions[1], [*range(50), *range(40), *range(30)] + [0] * 8)
    assert np.array_equal(batch.tokens[1, 50:90], data[2].tokens)
    assert np.array_equal(batch.targets[1, 50:90], data[2].target_tokens)
    assert np.array_equal(batch.weights[1, 50:90], data[2].weights)
    assert not np.any(batch.weights[batch.segment_ids == 0])


def test_every_token_is_placed_once_and_comes_back_in_order() -> None:
    lengths = tuple(int(length) for length in np.random.default_rng(0).integers(1, 300, 40))
    data = tiny_qwen3.data(lengths, advantages=True)
    batches = pack(data, SHAPES)
    assert {batch.tokens.shape for batch in batches} == {(1, 512)}
    assert sum(int((batch.segment_ids > 0).sum()) for batch in batches) == sum(lengths)
    assert len(batches) <= 1.15 * sum(lengths) / 512 + 1
    for field, attribute in (("tokens", "tokens"), ("advantages", "advantages"), ("sampler_logprobs", "logprobs")):
        for datum, values in zip(data, unpack(batches, [getattr(batch, field) for batch in batches]), strict=True):
            np.testing.assert_array_equal(values, getattr(datum, attribute))


def test_missing_weights_mean_one_on_every_real_token() -> None:
    (batch,) = pack(tiny_qwen3.data((20,)), SHAPES)
    assert batch.weights.sum() == 20
    assert not np.any(batch.advantages)


def datum(tokens: list[int], targets: list[int]) -> TrainDatum:
    return TrainDatum(tokens=np.array(tokens, np.int32), target_tokens=np.array(targets, np.int32))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (datum([], []), "datum 1 is empty"),
        (datum([1] * 9, [1] * 9), "datum 1 has 9 tokens, more than the context of 8"),
        (datum([1, 2], [2]), "datum 1: target_tokens has length 1, model_input 2"),
        (datum([1, 53], [2, 3]), r"datum 1: model_input holds a token id outside 0\.\.52"),
        (datum([1, 2], [2, -1]), r"datum 1: target_tokens holds a token id outside 0\.\.52"),
    ],
)
def test_a_sequence_the_model_cannot_hold_is_refused(bad: TrainDatum, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_data([datum([1, 2], [2, 3]), bad], vocab_size=53, max_context_length=8)


def test_a_request_without_data_is_refused() -> None:
    with pytest.raises(UserError, match="no data"):
        check_data([], vocab_size=53, max_context_length=8)


def test_rows_are_a_multiple_of_the_devices_they_are_divided_over() -> None:
    shapes = train_shapes(max_context_length=1000, tokens_per_batch=1024, row_groups=4)
    assert [(shape.rows, shape.length) for shape in shapes] == [(8, 128), (4, 256), (4, 512), (4, 1024)]

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_tx_server.engine.operations import TrainDatum
from skyrl_tx_server.model.shapes import ATTENTION_TILE, train_shapes
from skyrl_tx_server.training.packing import DatumSpan, MicroBatch, TrainBatch, pack, unpack
from tests.server import tiny_qwen3

SHAPES = train_shapes(max_context_length=512, tokens_per_batch=512)


def packed(data: tuple[TrainDatum, ...], shapes=SHAPES) -> list[MicroBatch]:
    return pack(data, [np.ones(len(datum.tokens), bool) for datum in data], shapes)


def test_bucket_shapes_are_fractions_and_doubles_of_the_budget() -> None:
    def lengths(**options: int) -> list[int]:
        return [shape.length for shape in train_shapes(**options).shapes]

    assert lengths(max_context_length=1000, tokens_per_batch=512) == [128, 512, 1024]
    assert lengths(max_context_length=300, tokens_per_batch=512) == [128, 512]
    assert lengths(max_context_length=40, tokens_per_batch=8192) == [512, 2048, 8192]
    assert lengths(max_context_length=20_000, tokens_per_batch=8192) == [512, 2048, 8192, 16384, 20096]
    assert lengths(max_context_length=4096, tokens_per_batch=8192, dp_ranks=4) == [128, 512, 2048, 4096]
    assert train_shapes(max_context_length=4096, tokens_per_batch=8192, dp_ranks=4).budget.streams == 4


def test_shared_tokens_are_in_the_stream_once() -> None:
    common = np.arange(20)
    first, second, unrelated = np.r_[common, 30, 31], np.r_[common, 40, 41, 42], np.array([50, 51])
    data = tuple(
        TrainDatum(tokens=tokens.astype(np.int32), target_tokens=tokens.astype(np.int32))
        for tokens in (second, unrelated, first)
    )
    (batch,) = packed(data)
    assert batch.arrays.tokens.shape == (1, 128)
    assert batch.arrays.tokens[0, :27].tolist() == [*common, 30, 31, 40, 41, 42, 50, 51]
    assert batch.arrays.positions[0, :27].tolist() == [*range(22), 20, 21, 22, 0, 1]
    assert batch.arrays.layout.subtree_end[0, :28].tolist() == [25] * 20 + [22] * 2 + [25] * 3 + [27] * 2 + [
        28
    ]
    # The shared prefix has equal targets and weights in both sequences, so a position counts for both.
    assert batch.arrays.loss_inputs.counts[0, :28].tolist() == [2] * 20 + [1] * 7 + [0]


def test_loss_positions_are_separate_where_losses_differ() -> None:
    tokens = np.arange(20, dtype=np.int32)
    weights = [np.ones(20, np.float32), np.r_[np.ones(15), np.zeros(5)].astype(np.float32)]
    data = tuple(
        TrainDatum(tokens=tokens, target_tokens=tokens, weights=datum_weights) for datum_weights in weights
    )
    (batch,) = pack(data, [datum_weights != 0 for datum_weights in weights], SHAPES)
    assert batch.arrays.num_trained[0] == 20
    assert batch.arrays.loss_inputs.counts[0, :26].tolist() == [2] * 15 + [1] * 10 + [0]
    trained_weights, other_weights = (
        batch.arrays.loss_inputs.weights[0, :20],
        batch.arrays.loss_inputs.weights[0, 20:25],
    )
    assert trained_weights.all() and not other_weights.any()


@st.composite
def forests(draw) -> tuple[TrainDatum, ...]:
    """Draw sequences, many of which continue a prefix of an earlier one."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sequences: list[np.ndarray] = []
    for _ in range(draw(st.integers(1, 12))):
        tokens = random.integers(0, 5, draw(st.integers(1, 300)))
        if sequences and draw(st.booleans()):
            earlier = sequences[draw(st.integers(0, len(sequences) - 1))]
            tokens = np.concatenate([earlier[: draw(st.integers(0, len(earlier)))], tokens])[:700]
        sequences.append(tokens.astype(np.int32))
    return tuple(
        TrainDatum(
            tokens=tokens,
            target_tokens=np.roll(tokens, -1),
            logprobs=random.choice([0.0, -1.0], len(tokens)).astype(np.float32),
            advantages=(random.random(len(tokens)) > 0.5).astype(np.float32),
        )
        for tokens in sequences
    )


@given(data=forests(), rows=st.sampled_from([1, 2]))
@settings(deadline=None, max_examples=40)
def test_every_token_attends_only_to_its_own_sequence(data: tuple[TrainDatum, ...], rows: int) -> None:
    shapes = train_shapes(max_context_length=700, tokens_per_batch=512, dp_ranks=rows)
    batches = pack(data, [datum.advantages != 0 for datum in data], shapes)
    assert sorted(span.datum for batch in batches for span in batch.spans) == list(range(len(data)))
    for batch in batches:
        assert batch.arrays.tokens.shape[0] == rows and batch.arrays.tokens.shape[1] in [
            shape.length for shape in shapes.shapes
        ]
        for span in batch.spans:
            check_span(batch.arrays, span, data[span.datum])
        for row in range(rows):
            is_trained = (
                batch.arrays.loss_inputs.advantages[row, batch.arrays.loss_inputs.counts[row] > 0] != 0
            )
            assert (
                is_trained.sum()
                == batch.arrays.num_trained[row]
                == is_trained[: batch.arrays.num_trained[row]].sum()
            )
    assert sum(batch.arrays.loss_inputs.counts.sum() for batch in batches) == sum(
        len(datum.tokens) for datum in data
    )
    for read, attribute in (
        (lambda arrays: arrays.targets, "target_tokens"),
        (lambda arrays: arrays.loss_inputs.sampler_logprobs, "logprobs"),
        (lambda arrays: arrays.loss_inputs.advantages, "advantages"),
    ):
        for datum, values in zip(
            data, unpack(batches, [read(batch.arrays) for batch in batches]), strict=True
        ):
            np.testing.assert_array_equal(values, getattr(datum, attribute))


def check_span(batch: TrainBatch, span: DatumSpan, datum: TrainDatum) -> None:
    path = batch.token_index[span.stream, span.loss_positions]
    ends = batch.layout.subtree_end[span.stream]
    np.testing.assert_array_equal(batch.tokens[span.stream, path], datum.tokens)
    np.testing.assert_array_equal(batch.positions[span.stream, path], np.arange(len(path)))
    last = path[-1]
    (attended,) = np.nonzero((np.arange(len(ends)) <= last) & (last < ends))
    np.testing.assert_array_equal(attended, path)  # so every earlier token attends to its own prefix
    blocks = batch.layout.key_blocks[
        span.stream,
        last // ATTENTION_TILE,
        : batch.layout.num_key_blocks[span.stream, last // ATTENTION_TILE],
    ]
    assert set(path // ATTENTION_TILE) <= set(blocks.tolist())


def test_a_group_contains_its_prompt_once() -> None:
    random = np.random.default_rng(0)
    prompt = random.integers(0, 50, 256)
    tokens = [np.concatenate([prompt, random.integers(0, 50, 32)]).astype(np.int32) for _ in range(8)]
    (batch,) = packed(tuple(TrainDatum(tokens=sequence, target_tokens=sequence) for sequence in tokens))
    assert batch.arrays.tokens.shape == (1, 512)
    assert batch.arrays.layout.subtree_end[0, 511] == 512  # 256 + 8 * 32 tokens fill the stream
    # The last four responses do not attend to the first four.
    assert batch.arrays.layout.num_key_blocks[0].tolist() == [1, 2, 3, 3]


def test_no_batch_exceeds_the_budget_unless_a_sequence_does() -> None:
    """A prefix of 256 tokens and 8 responses of 64 fit into one stream of 1,024 tokens, or into two of 512
    tokens that both contain the prefix."""
    random = np.random.default_rng(0)
    prompt = random.integers(0, 50, 256)
    tokens = [np.concatenate([prompt, random.integers(0, 50, 64)]).astype(np.int32) for _ in range(8)]
    data = tuple(TrainDatum(tokens=sequence, target_tokens=sequence) for sequence in tokens)
    assert [
        batch.arrays.tokens.shape
        for batch in packed(data, train_shapes(max_context_length=1024, tokens_per_batch=512))
    ] == [(1, 512)] * 2


def test_the_largest_trees_may_fill_a_stream_completely() -> None:
    assert [batch.arrays.tokens.shape for batch in packed(tiny_qwen3.data((512,)))] == [(1, 512)]
    data = [np.full(length, token, np.int32) for token, length in enumerate((212, 212, 300, 300))]
    assert len(packed(tuple(TrainDatum(tokens=tokens, target_tokens=tokens) for tokens in data))) == 2


def test_many_short_sequences_fill_the_budget() -> None:
    assert [batch.arrays.tokens.shape for batch in packed(tiny_qwen3.data((60,) * 8))] == [(1, 512)]


def test_the_loss_positions_of_a_stream_are_limited() -> None:
    """Eight datums with the same 100 tokens and different advantages need 800 loss positions. A stream of 512
    tokens has only 640."""
    tokens = np.arange(100, dtype=np.int32) % 50
    for count in (4, 8):
        data = tuple(
            TrainDatum(tokens=tokens, target_tokens=tokens, advantages=np.full(100, number, np.float32))
            for number in range(1, 1 + count)
        )
        batches = packed(data)
        assert sum(batch.arrays.loss_inputs.counts.sum() for batch in batches) == count * 100
        for datum, values in zip(
            data,
            unpack(batches, [np.asarray(batch.arrays.loss_inputs.advantages) for batch in batches]),
            strict=True,
        ):
            np.testing.assert_array_equal(values, datum.advantages)


def test_groups_are_split_if_that_reduces_the_padding() -> None:
    """Two groups of 1,216 tokens fit into one stream of 4,096 tokens, or into three of 1,024."""
    random = np.random.default_rng(0)
    prompts = random.integers(0, 50, (2, 256))
    sequences = [
        np.r_[prompt, random.integers(0, 50, 240)].astype(np.int32) for prompt in prompts for _ in range(4)
    ]
    data = tuple(TrainDatum(tokens=tokens, target_tokens=tokens) for tokens in sequences)
    batches = packed(data, train_shapes(max_context_length=1024, tokens_per_batch=4096))
    assert [batch.arrays.tokens.shape for batch in batches] == [(1, 1024)] * 3
    assert sorted(span.datum for batch in batches for span in batch.spans) == list(range(8))


def test_ragged_sequences_fill_their_streams() -> None:
    lengths = tuple(
        int(length) for length in np.clip(np.random.default_rng(0).lognormal(5.4, 0.7, 32), 8, 1025)
    )
    shapes = train_shapes(max_context_length=2048, tokens_per_batch=2048)
    batches = packed(tiny_qwen3.data(lengths), shapes)
    assert sum(lengths) / sum(batch.arrays.tokens.size for batch in batches) >= 0.85


def test_missing_weights_are_1_at_every_token_except_padding() -> None:
    (batch,) = packed(tiny_qwen3.data((20,)))
    assert batch.arrays.loss_inputs.weights.sum() == 20
    assert not np.any(batch.arrays.loss_inputs.advantages)


def test_padding_tiles_attend_to_nothing() -> None:
    (batch,) = packed(tiny_qwen3.data((2 * ATTENTION_TILE + 1,)))
    assert batch.arrays.tokens.shape == (1, 4 * ATTENTION_TILE) and batch.arrays.layout.num_key_blocks[
        0
    ].tolist() == [1, 2, 3, 0]

import numpy as np

from src.learning.datums import (
    merge_turns,
    scale_advantages,
    sequences_of,
    step_sequences_of,
    to_datum,
    to_datums,
)
from tests.fakes.trials import turn


def test_turns_that_extend_each_other_become_one_sequence():
    first = turn([1, 2], [10, 11], logprob=-0.25)
    second = turn([1, 2, 10, 11, 3], [12], logprob=-0.5)
    [sequence] = sequences_of([first, second], advantage=2.0)
    assert sequence.tokens.tolist() == [1, 2, 10, 11, 3, 12]
    assert sequence.sampled.tolist() == [False, False, True, True, False, True]
    assert sequence.logprobs.tolist() == [0, 0, -0.25, -0.25, 0, -0.5]
    assert sequence.advantages.tolist() == [0, 0, 2, 2, 0, 2]
    assert sequence.num_sampled == 3


def test_a_datum_is_shifted_by_one_token():
    [sequence] = sequences_of([turn([1, 2], [10, 11], logprob=-0.25)], advantage=-1.0)
    datum = to_datum(sequence)
    assert datum.model_input.to_ints() == [1, 2, 10]
    inputs = {name: value.to_numpy() for name, value in datum.loss_fn_inputs.items()}
    assert {name: value.tolist() for name, value in inputs.items()} == {
        "target_tokens": [2, 10, 11],
        "logprobs": [0, -0.25, -0.25],
        "advantages": [0, -1, -1],
    }
    assert inputs["target_tokens"].dtype == np.int64 and inputs["advantages"].dtype == np.float32


def test_a_rewritten_history_starts_a_new_sequence():
    first = turn([1, 2], [10])
    rewritten = turn([1, 9], [11])
    assert merge_turns([first, rewritten]) == [[first], [rewritten]]


def test_a_side_conversation_does_not_break_the_main_one():
    first, side, second = turn([1], [10]), turn([5], [50]), turn([1, 10, 2], [11])
    assert merge_turns([first, side, second]) == [[first, second], [side]]


class Counted(list):
    """A list of token ids that counts the copied ids in `Counted.copied`."""

    copied = 0

    def __getitem__(self, key):
        item = super().__getitem__(key)
        Counted.copied += len(item) if isinstance(key, slice) else 0
        return item


def test_comparing_rewritten_histories_copies_few_tokens():
    turns = [turn(Counted([*range(10 * number), number + 1000]), [number]) for number in range(1, 101)]
    Counted.copied = 0
    assert merge_turns(turns) == [[single] for single in turns]
    assert Counted.copied < 2 * 100 * 100


def test_rewritten_histories_are_compared_without_copying_answers():
    turns = [turn(Counted(range(1, 200 * number)), [0] * 100) for number in range(1, 51)]
    Counted.copied = 0
    assert merge_turns(turns) == [[single] for single in turns]
    assert Counted.copied == 0


def test_a_second_answer_to_a_prompt_is_another_sequence():
    assert len(merge_turns([turn([1], [10]), turn([1], [11])])) == 2


def test_every_sampled_token_is_trained_exactly_once():
    turns = [
        turn([1], [10, 11]),
        turn([1, 10, 11, 2], [12]),
        turn([7], [13, 14]),
        turn([1, 10, 11, 2, 12, 3], [15]),
    ]
    sequences = sequences_of(turns, advantage=1.0)
    trained = sorted(token for sequence in sequences for token in sequence.tokens[sequence.sampled].tolist())
    assert trained == [10, 11, 12, 13, 14, 15]


def test_an_empty_completion_adds_no_token():
    assert sequences_of([turn([1], [])], advantage=1.0) == []
    [sequence] = sequences_of([turn([1], []), turn([1, 2], [10])], advantage=1.0)
    assert sequence.tokens.tolist() == [1, 2, 10]
    [step] = step_sequences_of([turn([1], []), turn([1, 2], [10])], advantage=1.0)
    assert step.tokens.tolist() == [1, 2, 10]


def test_sequences_without_advantage_are_not_sent():
    zero_advantage = sequences_of([turn([1], [10])], advantage=0.0)
    nonzero_advantage = sequences_of([turn([1], [11])], advantage=1.0)
    [datum] = to_datums([*zero_advantage, *nonzero_advantage])
    assert datum.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [11]


def test_scaling_changes_only_advantages():
    [sequence] = sequences_of([turn([1], [10, 11])], advantage=2.0)
    half = scale_advantages(sequence, 0.5)
    assert half.advantages.tolist() == [0, 1, 1]
    assert half.logprobs is sequence.logprobs

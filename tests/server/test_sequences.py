from dataclasses import replace

import numpy as np
import pytest

from skyrl_tx_server.engine.operations import SamplingSettings, StopReason
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.sampling.sequences import (
    SequenceState,
    batch_settings,
    stop_tokens_of,
)
from tests.fakes.tiny_model import CONFIG, byte_tokenizer

PLAIN = SamplingSettings(stop_at_eos=False)


def sequence(**changes: object) -> SequenceState:
    plain = SequenceState(
        request_id=1,
        index=3,
        weights=None,
        adapter_slot=0,
        settings=PLAIN,
        seed=0,
        stop_tokens=(7,),
        prompt=np.arange(4, dtype=np.int32),
        max_tokens=3,
        topk=0,
    )
    return replace(plain, **changes)


def test_batch_settings_split_seeds_and_leave_free_slots_greedy() -> None:
    filtered = replace(PLAIN, temperature=0.5, top_k=5, top_p=0.25)
    settings = batch_settings(
        [
            None,
            sequence(seed=(5 << 32) + 2**32 - 1, settings=filtered),
            sequence(settings=replace(filtered, top_k=99)),
        ],
        10,
    )
    assert settings.seeds.tolist() == [
        [0, 0],
        [5, 2**32 - 1],
        [0, 0],
    ] and settings.sample_indices.tolist() == [0, 3, 3]
    assert settings.temperatures.tolist() == [0, 0.5, 0.5] and settings.top_p.tolist() == [1, 0.25, 0.25]
    assert settings.top_k.tolist() == [10, 5, 10]
    assert batch_settings([sequence()], 10).top_k.tolist() == [10]


def test_a_sequence_ends_at_a_stop_token_or_at_max_tokens() -> None:
    ends = sequence()
    assert ends.extend([1], [-1.0], None) is None and (ends.position, ends.remaining) == (4, 2)
    ends.pending_tokens = 2
    assert (ends.position, ends.remaining) == (6, 0)
    assert ends.extend([2, 3], [-1.0, -2.0], None) == (
        3,
        StopReason.LENGTH,
    ) and ends.cached_tokens.tolist() == [0, 1, 2, 3, 1, 2]
    assert sequence().extend([1, 7], [-1.0, -1.0], None) == (2, StopReason.STOP)


@pytest.mark.parametrize(
    ("weights", "cause"),
    [
        (None, "sampling from the base model: the probabilities are NaN, because its files are damaged or"),
        ("trained", "sampling from trained: the probabilities are NaN, because the weights have diverged"),
    ],
)
def test_nan_is_an_error_with_a_cause_that_fits_the_weights(weights: str | None, cause: str) -> None:
    with pytest.raises(UserError, match=cause):
        sequence(weights=weights).extend([1, 2], [-1.0, float("nan")], None)


def test_a_stop_string_ends_at_the_token_that_completes_it() -> None:
    tokenizer = byte_tokenizer()
    text = tokenizer.encode("xabyz").ids
    stopping = sequence(settings=replace(PLAIN, stop_strings=("ab",)), max_tokens=9)
    assert stopping.extend(text[:2], [-1.0] * 2, tokenizer) is None
    assert stopping.extend(text[2:], [-1.0] * 3, tokenizer) == (3, StopReason.STOP)


def test_too_many_stop_tokens_are_refused() -> None:
    """The model's two end tokens count if `stop_at_eos` is set."""
    at_limits = SamplingSettings(stop_token_ids=tuple(range(14)), stop_at_eos=True)
    assert stop_tokens_of(at_limits, CONFIG) == (*range(14), 257, 258)
    assert stop_tokens_of(
        replace(at_limits, stop_token_ids=tuple(range(16)), stop_at_eos=False), CONFIG
    ) == tuple(range(16))
    with pytest.raises(UserError, match="17 stop tokens, including the end tokens of the model; at most 16"):
        stop_tokens_of(replace(at_limits, stop_token_ids=tuple(range(15))), CONFIG)

import random

import pytest

from src.core.token_ids import TokenIds, starts_with
from src.core.trajectory import StopReason, Trajectory, Turn
from src.records.rollout_store import decoded, encoded
from tests.fakes.tokenizer import byte_chat


def test_token_ids_can_be_read_like_a_list():
    ids = list(range(10))
    tokens = TokenIds(ids[:6]).extended(ids[6:])
    assert (len(tokens), list(tokens), tokens == ids, ids == tokens, tokens == ids[1:]) == (
        10,
        ids,
        True,
        True,
        False,
    )
    rng = random.Random(0)
    for _ in range(200):
        start, stop = (rng.choice([None, *range(-12, 13)]) for _ in range(2))
        cut = slice(start, stop, rng.choice([None, 1, 2, -1, -3]))
        assert tokens[cut] == ids[cut]
    assert (tokens[0], tokens[-1], tokens + ids) == (0, 9, ids + ids)
    with pytest.raises(IndexError):
        tokens[10]


def test_two_extensions_of_token_ids_do_not_affect_each_other():
    first = TokenIds([1, 2])
    second, sibling = first.extended([3]), first.extended([4])
    third = second.extended([5])
    assert (first, second, sibling, third) == ([1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 3, 5])
    assert second.shares_with(first) and third.shares_with(first) and not sibling.shares_with(first)
    assert second != sibling and first.extended([]) == first and TokenIds.wrap(first) is first
    with pytest.raises(IndexError):
        first[2]


def test_starts_with_compares_lists_and_token_ids():
    first = TokenIds([1, 2])
    longer = first.extended([3])
    for ids, beginning in [
        (longer, first),
        (longer, [1, 2]),
        ([1, 2, 3], first),
        ([1, 2, 3], [1, 2]),
        (TokenIds([1, 2, 3]), first),
        (first, first),
    ]:
        assert starts_with(ids, beginning)
    for ids, beginning in [
        (first, longer),
        ([1, 2], longer),
        (longer, [2]),
        (first.extended([4]), longer),
        ([], first),
    ]:
        assert not starts_with(ids, beginning)


def test_a_conversation_stores_every_token_once():
    chat, turns = byte_chat(), []
    prompt = TokenIds.wrap(chat.render([{"role": "user", "content": "go"}]))
    for _ in range(20):
        turns.append(
            Turn(
                prompt_ids=prompt,
                completion_ids=[65, 66],
                logprobs=[-1.0, -1.0],
                stop_reason=StopReason.STOP,
                policy_version=0,
            )
        )
        prompt = chat.extend(prompt, turns[-1].completion_ids, [{"role": "user", "content": "on"}])
    result = Trajectory(task_id="a", turns=turns, reward=0.0, stop_reason=StopReason.STOP)
    again = decoded(encoded(result))
    assert isinstance(again, Trajectory) and again == result
    for trajectory in (result, again):
        last = trajectory.turns[-1].prompt_ids
        assert isinstance(last, TokenIds)
        assert all(
            isinstance(turn.prompt_ids, TokenIds) and turn.prompt_ids.shares_with(last)
            for turn in trajectory.turns
        )

"""Finds the token that completes a stop string. Only the tokens that can be part of the string, and the token
before them, are decoded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from skyrl_tx_server.errors import UserError


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Return the tokenizer of the model. Raise UserError if the directory has no tokenizer.json. Stop
    strings need the tokenizer. Stop token ids do not."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            "stop strings need the model's tokenizer.json, which is missing; pass stop token ids instead"
        )
    return Tokenizer.from_file(str(path))


def find_stop(
    tokenizer: Tokenizer, tokens: Sequence[int], stop_strings: Sequence[str], *, new: int
) -> int | None:
    """Return the number of tokens up to and including the first token that completes a stop string. None: no
    stop string was found.

    The function finds only a stop string that ends within the last `new` tokens, because earlier calls have
    searched the tokens before them. A token has at least one byte of text, so a stop string of n bytes lies
    within n tokens. The search therefore starts n tokens before the new tokens.

    >>> find_stop(tokenizer, [72, 105, 10, 33], ["i\\n"], new=4)    # "H", "i", "\\n", "!"
    3
    """
    max_stop_tokens = max(len(stop.encode()) for stop in stop_strings)
    first = len(tokens) - new

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.decode(list(tokens), skip_special_tokens=False)

    def contains_stop(start: int, end: int) -> bool:
        # The token before `start` is decoded too, because some tokenizers remove a space at the beginning.
        before, text = (decode(tokens[max(0, start - 1) : last]) for last in (start, end))
        return any(stop in text[len(before) :] for stop in stop_strings)

    if not contains_stop(max(0, first - max_stop_tokens), len(tokens)):
        return None
    for end in range(first + 1, len(tokens) + 1):
        if contains_stop(max(0, end - max_stop_tokens), end):
            return end
    return None

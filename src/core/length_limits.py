"""The length limits of turns and training sequences, for all environments.

`max_input_length` and `max_generate_length` have SkyRL's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import chz

from src.core.options import Options, at_least, require


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthLimits:
    """Limits in tokens. A prompt of exactly `max_input_length` tokens is within the limit."""

    max_input_length: int  # for a prompt, i.e. the whole context that is sent to the sampler
    max_generate_length: int  # for one completion
    max_sequence_length: int  # for a training sequence; a longer sequence is not trained
    # for a prompt and its completion together; at most the max_context_length of the server
    context_limit: int

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """Return the maximum length of the completion: 0 if the prompt is too long or fills the context.

        >>> limits = LengthLimits(
        ...     max_input_length=22, max_generate_length=5, max_sequence_length=30, context_limit=30
        ... )
        >>> limits.max_new_tokens(22), limits.max_new_tokens(23)
        (5, 0)
        """
        if num_prompt_tokens > self.max_input_length:
            return 0
        return max(0, min(self.max_generate_length, self.context_limit - num_prompt_tokens))


def fitted_lengths(
    limit: int, *, max_tokens: int, threshold: int, given: Mapping[str, str]
) -> dict[str, int]:
    """Return values of context_limit, max_tokens and proactive_summarization_threshold that fit a context of
    `limit` tokens.

    `given` contains the options that the user has set (name -> text). An option in `given` is not returned,
    and max_tokens is not returned if `given` has max_generate_length. The arguments `max_tokens` and
    `threshold` are the current values of the options max_tokens and proactive_summarization_threshold. Both
    are reduced to at most a quarter of the context, and the threshold also to at most half of the longest
    allowed prompt.

    >>> fitted_lengths(4096, max_tokens=2048, threshold=8000, given={"max_tokens": "500"})
    {'context_limit': 4096, 'proactive_summarization_threshold': 1024}
    """
    lengths = {"context_limit": limit}
    if "max_generate_length" not in given:
        lengths["max_tokens"] = min(max_tokens, max(1, limit // 4))
    generated = int(given.get("max_generate_length") or given.get("max_tokens") or lengths["max_tokens"])
    longest_input = min(int(given.get("max_input_length", limit)), limit - generated)
    lengths["proactive_summarization_threshold"] = min(threshold, limit // 4, max(0, longest_input // 2))
    return {name: value for name, value in lengths.items() if name not in given}


@chz.chz
class ContextOptions(Options):
    """Agent and lengths"""

    context_limit: int = chz.field(
        default=32_000,
        doc="Maximum tokens of a conversation, including its last answer",
        validator=at_least(1),
    )


@chz.chz
class LengthOptions(ContextOptions):
    """Agent and lengths"""

    max_tokens: int = chz.field(default=1024, doc="Maximum tokens per answer", validator=at_least(1))
    max_input_length: int | None = chz.field(
        default=None,
        doc="SkyRL's limit of the prompt: the trial ends if the conversation is longer (with "
        "enable_summarize, Terminus-2 summarises it first). None: context_limit - 1. With None, the last "
        "answer can be shorter than max_tokens, because prompt and answer together have at most "
        "context_limit tokens",
        validator=at_least(1),
    )
    max_generate_length: int | None = chz.field(
        default=None, doc="SkyRL's name of max_tokens; None: the value of max_tokens", validator=at_least(1)
    )
    max_sequence_length: int | None = chz.field(
        default=None,
        doc="SkyRL's limit of a training sequence: longer sequences are not trained; None: context_limit",
        validator=at_least(1),
    )

    @property
    def length_limits(self) -> LengthLimits:
        """The limits in tokens. A limit that is None takes its value from another option."""
        max_input_length = self.context_limit - 1 if self.max_input_length is None else self.max_input_length
        return LengthLimits(
            max_input_length=max_input_length,
            max_generate_length=self.max_generate_length or self.max_tokens,
            max_sequence_length=self.max_sequence_length or self.context_limit,
            context_limit=self.context_limit,
        )

    @chz.validate
    def _lengths_fit(self) -> None:
        limits = self.length_limits
        name = "max_tokens" if self.max_generate_length is None else "max_generate_length"
        require(
            limits.max_generate_length < self.context_limit,
            f"{name}={limits.max_generate_length} leaves no room for a prompt in "
            f"context_limit={self.context_limit}; lower {name}",
        )
        require(
            limits.max_sequence_length <= self.context_limit,
            f"max_sequence_length={limits.max_sequence_length} is above context_limit={self.context_limit}; "
            "lower max_sequence_length",
        )
        longest = limits.max_input_length + limits.max_generate_length
        require(
            self.max_input_length is None or longest <= limits.max_sequence_length,
            f"max_input_length={limits.max_input_length} + {name}={limits.max_generate_length} exceed "
            f"max_sequence_length={limits.max_sequence_length}; lower max_input_length",
        )

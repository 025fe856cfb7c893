"""The length limits of an episode and of a training sequence, one object for every kind of environment. The names are SkyRL's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthLimits:
    """In tokens. A prompt of exactly `max_input_length` may still be answered."""

    max_input_length: int  # of the whole context that is sent to the sampler
    max_generate_length: int  # of one answer
    max_sequence_length: int  # of one training sequence; a longer one trains nothing
    context_limit: int  # of a prompt and its answer together: the server's, which no answer may leave

    def room(self, num_prompt_tokens: int) -> int:
        """How many tokens an answer to such a prompt may have; 0: the prompt is over the limit.

        >>> LengthLimits(max_input_length=22, max_generate_length=5, max_sequence_length=30, context_limit=30).room(23)
        0
        """
        if num_prompt_tokens > self.max_input_length:
            return 0
        return max(0, min(self.max_generate_length, self.context_limit - num_prompt_tokens))

"""The length limits of episodes and training sequences, for all environments. The names are SkyRL's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthLimits:
    """Limits in tokens. A prompt of exactly `max_input_length` tokens is within the limit."""

    max_input_length: int  # of a prompt, i.e. the whole context sent to the sampler
    max_generate_length: int  # of one completion
    max_sequence_length: int  # of a training sequence; a longer sequence is not trained
    context_limit: int  # of a prompt and its completion together: the limit of the server

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """Return the maximum length of the completion; 0 if the prompt exceeds its limit.

        >>> limits = LengthLimits(
        ...     max_input_length=22, max_generate_length=5, max_sequence_length=30, context_limit=30
        ... )
        >>> limits.max_new_tokens(22), limits.max_new_tokens(23)
        (5, 0)
        """
        if num_prompt_tokens > self.max_input_length:
            return 0
        return max(0, min(self.max_generate_length, self.context_limit - num_prompt_tokens))

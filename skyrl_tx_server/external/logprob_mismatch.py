"""The difference between the logprobs of an external sampler (a vLLM or SGLang server) and of this server's
engine, in nats per token over recent samples."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

import numpy as np

logger = logging.getLogger(__name__)

WINDOW = 64
"""Number of recent samples over which the difference is averaged."""
MIN_SAMPLES = 8
"""Minimum number of compared samples for a warning."""
OTHER_MODEL_FACTOR = 10
"""A sample counts as sampled by another model if its mean difference is above this factor times the limit
(`sampler_check_limit`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobDiff:
    """The comparison of one sample. `ours` is the engine's logprob of a token, `theirs` the external
    sampler's."""

    num_tokens: int
    absolute: float  # the sum of |ours - theirs|
    # the sum of r - 1 - log r with r = exp(ours - theirs). Each term is a nonnegative estimate of
    # KL(theirs || ours), unbiased for samples at temperature 1 without top-k and top-p (Schulman 2020).
    kl: float
    largest: float  # the maximum of |ours - theirs|

    @property
    def mean(self) -> float:
        return self.absolute / self.num_tokens


def logprob_diff(theirs: np.ndarray, ours: np.ndarray) -> LogprobDiff:
    """Compare two [n] arrays of logprobs, n >= 1.

    >>> logprob_diff(np.array([-1.0, -2.0]), np.array([-1.0, -1.5])).mean
    0.25
    """
    difference = ours.astype(np.float64) - theirs
    absolute = np.abs(difference)
    return LogprobDiff(
        num_tokens=len(theirs),
        absolute=float(absolute.sum()),
        kl=float((np.expm1(np.minimum(difference, 700.0)) - difference).sum()),
        largest=float(absolute.max()),
    )


class LogprobMismatch:
    """Averages the differences of recent samples. Logs a warning if the average is above `limit`."""

    def __init__(self, *, limit: float) -> None:
        self._limit = limit
        self._recent: deque[LogprobDiff] = deque(maxlen=WINDOW)
        self._tokens = 0
        self._since_warning = WINDOW

    def is_other_model(self, diff: LogprobDiff) -> bool:
        return diff.mean > OTHER_MODEL_FACTOR * self._limit

    def add(self, diff: LogprobDiff) -> None:
        """Add a comparison. Warn if the mean difference over the last WINDOW comparisons is above the limit,
        but not before MIN_SAMPLES comparisons and at most once in WINDOW comparisons."""
        self._recent.append(diff)
        self._tokens += diff.num_tokens
        self._since_warning += 1
        if (
            len(self._recent) >= MIN_SAMPLES
            and self._since_warning > WINDOW
            and (mean := self._mean()) > self._limit
        ):
            self._since_warning = 0
            logger.warning(
                "the external sampler's logprobs differ from this server's by %.3f nats per token "
                "over the last %d compared samples (limit %g): the sampler may run another base model or "
                "revision, use another dtype or quantised weights, ignore the adapter, or return "
                "logprobs after temperature (vLLM needs --logprobs-mode raw_logprobs, SGLang "
                "needs SGLANG_RETURN_ORIGINAL_LOGPROB=1)",
                mean,
                len(self._recent),
                self._limit,
            )

    def stats(self) -> dict[str, object]:
        if not self._recent:
            return {"sampler_tokens_compared": 0}
        return {
            "sampler_tokens_compared": self._tokens,
            "sampler_difference_mean": self._mean(),
            "sampler_difference_kl": sum(diff.kl for diff in self._recent) / self._num_tokens(),
            "sampler_difference_max": max(diff.largest for diff in self._recent),
        }

    def _mean(self) -> float:
        return sum(diff.absolute for diff in self._recent) / self._num_tokens()

    def _num_tokens(self) -> int:
        return sum(diff.num_tokens for diff in self._recent)

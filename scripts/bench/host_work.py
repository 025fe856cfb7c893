"""Measure parts of the host's work in sampling: computing the KV splits of a decode dispatch (the parts of
the KV cache that an attention kernel reads one by one), lookup and eviction in the prefix cache, and the
choice of requests for free slots. No model is loaded.

    python -m scripts.bench.host_work
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from scripts.bench.compare import print_figure
from skyrl_tx_server.engine.operations import Sample, SamplingSettings
from skyrl_tx_server.engine.sample_queue import SampleQueue
from skyrl_tx_server.model.attention.kv_splits import kv_splits_of
from skyrl_tx_server.model.shapes import PAGE_SIZE
from skyrl_tx_server.sampling.prefix_cache import PrefixCache

REPEATS = 50


def main() -> None:
    for rows, context, at_most in ((64, 2048, None), (256, 2048, None), (256, 8192, 3.0)):
        pages = context // PAGE_SIZE + 1
        tables = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
        lengths = np.full(rows, context, np.int32)
        milliseconds = fastest_ms(partial(kv_splits_of, tables, lengths, group=4))
        print_figure(f"KV splits of {rows} sequences of {context} tokens, ms", milliseconds, at_most=at_most)
    prefix = np.arange(1000, dtype=np.int32)
    cache = PrefixCache(first=0, count=12_000)
    branches = [np.append(prefix, branch).astype(np.int32) for branch in range(10_000)]
    for tokens in branches:
        computed(cache, tokens)
    milliseconds = fastest_ms(lambda: cache.find(None, branches[5000]))
    print_figure("lookup of 1,001 tokens with 10,000 branches, ms", milliseconds, at_most=0.1)
    held = PrefixCache(first=0, count=20_002)
    for number in range(20_000):
        tokens = np.full(PAGE_SIZE, number, np.int32)
        if number % 2:
            computed(held, tokens)
        else:
            held.insert(None, tokens, held.allocate(1) or ())
    held.allocate(1)
    milliseconds = fastest_ms(lambda: held.allocate(1))
    print_figure("eviction of one page while sequences hold 10,000 pages, ms", milliseconds, at_most=0.05)
    queue = SampleQueue(max_partial_prefill_tokens=0, is_changing=lambda weights, request_id: False)
    settings = SamplingSettings(max_tokens=1000)
    for number in range(1000):
        sample = Sample(weights=None, prompt=prefix[:20], settings=settings, num_samples=1)
        queue.add(number + 1, sample, tenant=str(number))
    milliseconds = fastest_ms(lambda: queue.plan_prefills(16, 16, reserved=[], deferred=None))
    print_figure("choice of 16 requests of 1,000 tenants, ms", milliseconds, at_most=5.0)


def computed(cache: PrefixCache, tokens: np.ndarray) -> None:
    """Insert `tokens` into the prefix cache and release their pages, as at the end of a sequence."""
    pages = cache.allocate(-(-len(tokens) // PAGE_SIZE)) or []
    cache.insert(None, tokens, pages)
    cache.free(pages)


def fastest_ms(run: Callable[[], object]) -> float:
    """Return the shortest of several durations, which depends least on other load of the machine."""
    times_s = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - started)
    return 1000 * min(times_s)


if __name__ == "__main__":
    main()

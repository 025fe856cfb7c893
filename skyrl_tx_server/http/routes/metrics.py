"""The route GET /metrics, which replies in Prometheus' text format."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from skyrl_tx_server.config.renamed import RENAMED_LABEL_VALUES, RENAMED_METRICS
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.http_handler import Endpoint, Reply

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "skyrl_tx_"
type Family = GaugeMetricFamily | CounterMetricFamily


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that is read from the engine's statistics."""

    family: type[Family]
    name: str
    help: str
    source: Mapping[str, str] | str  # name of the statistic, or label value -> name of the statistic
    label: str = ""  # name of the label, if `source` or the statistic is a mapping


_gauge = partial(Metric, GaugeMetricFamily)
_counter = partial(Metric, CounterMetricFamily)

METRICS: tuple[Metric, ...] = (
    _gauge("ops_pending", "Operations accepted and not finished", "ops_pending"),
    _gauge(
        "queue_depth",
        "Sample operations with sequences that have not started, and other operations that have not ended",
        {"sample": "samples_waiting", "step": "steps_waiting"},
        label="kind",
    ),
    _counter(
        "ops_total", "Operations that ended", {"ok": "ops_finished", "failed": "ops_failed"}, label="outcome"
    ),
    _gauge("decode_slots", "Sequences that can be decoded at once", "slots"),
    _gauge("decode_slots_used", "Slots in use or reserved for preempted sequences", "slots_used"),
    _gauge(
        "cache_pages",
        "KV pages: all, free, and in the prefix cache, including those that running sequences share",
        {"all": "cache_pages", "free": "cache_pages_free", "cached": "cache_pages_cached"},
        label="kind",
    ),
    _counter("preemptions_total", "Sequences preempted because no KV page was free", "num_preemptions"),
    _counter("decode_dispatches_total", "Decode dispatches", "decode_dispatches"),
    _counter(
        "decode_dispatches_ahead_total",
        "Decode dispatches that started before the host processed the tokens of the previous one",
        "decode_dispatches_ahead",
    ),
    _counter(
        "work_seconds_total",
        "Time that the engine has spent on each kind of work",
        "work_seconds",
        label="work",
    ),
    _counter(
        "tokens_total",
        "Tokens by kind of work",
        {
            "sampled": "tokens_sampled",
            "sampled_externally": "tokens_sampled_externally",
            "prefilled": "tokens_prefilled",
            "prefix_cache": "tokens_from_prefix_cache",
            "trained": "tokens_trained",
            "forward": "tokens_forward",
        },
        label="kind",
    ),
    _gauge("models", "Training models, on the device and in host memory", "models"),
    _gauge(
        "sampler_snapshots",
        "Sampler snapshots in memory",
        {"device": "snapshots_on_device", "host": "snapshots_in_host_memory"},
        label="place",
    ),
    _counter(
        "sampler_requests_total",
        "Sample operations of the external sampler that succeeded or failed",
        {"ok": "sampler_ok", "failed": "sampler_failed"},
        label="outcome",
    ),
    _gauge("sampler_adapters", "Adapters loaded into the external sampler", "sampler_adapters"),
    _counter(
        "sampler_tokens_compared_total",
        "Tokens whose logprobs of the external sampler and of the engine were compared",
        "sampler_tokens_compared",
    ),
    _gauge(
        "sampler_difference_nats",
        "Difference between the external sampler's logprobs and the engine's, per token over "
        "the last compared samples",
        {"mean": "sampler_difference_mean", "kl": "sampler_difference_kl", "max": "sampler_difference_max"},
        label="kind",
    ),
    _counter(
        "programs_total",
        "XLA programs compiled or read from the persistent cache, by name",
        "programs",
        label="program",
    ),
    _counter(
        "program_seconds_total",
        "Time spent on compiling or reading programs",
        "program_seconds",
        label="program",
    ),
    _counter("programs_from_cache_total", "Programs read from the persistent cache", "programs_from_cache"),
    _gauge(
        "device_memory_bytes",
        "Memory of the first accelerator of the server process",
        {"used": "device_bytes_in_use", "peak": "device_peak_bytes", "limit": "device_bytes_limit"},
        label="kind",
    ),
)


@dataclass(frozen=True, slots=True)
class _MetricsCollector(Collector):
    """Collects the metric families of one reply."""

    state: AppState

    def collect(self) -> Iterable[Family]:
        statistics = self.state.engine.stats()
        for metric in METRICS:
            yield from _families(metric, statistics)
        for name, value in self.state.registry.stats().items():
            yield GaugeMetricFamily(f"{PREFIX}registry_{name}", f"Number of {name} in the registry", value)
        yield GaugeMetricFamily(
            f"{PREFIX}resident_memory_bytes", "Resident memory of the server process", _resident_bytes()
        )
        requests = CounterMetricFamily(
            f"{PREFIX}requests_total", "HTTP requests answered", labels=("method", "route", "status")
        )
        for (method, route, status), count in sorted(self.state.requests.items()):
            requests.add_metric((method, route, str(status)), count)
        yield requests


async def metrics(state: AppState, request: Request) -> Reply:
    return Response(generate_latest(_MetricsCollector(state)), media_type=MEDIA_TYPE)


def _families(metric: Metric, statistics: Mapping[str, object]) -> Iterable[Family]:
    """Yield the metric, also under its former name if it has one. Yield nothing if the engine has no such
    statistic."""
    if isinstance(metric.source, str):
        statistic = statistics.get(metric.source)
        values = statistic if isinstance(statistic, dict) else {"": statistic}
    else:
        values = {value: statistics.get(name) for value, name in metric.source.items()}
    numbers = {label: value for label, value in values.items() if isinstance(value, int | float)}
    if not numbers:
        return
    for (name, value), former_value in RENAMED_LABEL_VALUES.items():
        if name == metric.name and value in numbers:
            numbers[former_value] = numbers[value]
    yield _family(metric, metric.name, metric.label, metric.help, numbers)
    if (former := RENAMED_METRICS.get(metric.name)) is not None:
        notice = f"Former name of {PREFIX}{metric.name}; the next release removes it"
        yield _family(metric, former.name, former.label or metric.label, notice, numbers)


def _family(metric: Metric, name: str, label: str, text: str, numbers: Mapping[str, int | float]) -> Family:
    family = metric.family(PREFIX + name, text, labels=(label,) if label else ())
    for value, number in numbers.items():
        family.add_metric((value,) if label else (), number)
    return family


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


ENDPOINTS = (
    Endpoint(method="GET", path="/metrics", handler=metrics, for_operator=True, log_level=logging.DEBUG),
)

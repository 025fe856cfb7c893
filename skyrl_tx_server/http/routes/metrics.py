"""GET /metrics in Prometheus' text format."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

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
FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
Family = GaugeMetricFamily | CounterMetricFamily


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A metric that is read from the engine's statistics."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    source: Mapping[str, str] | str  # name of the statistic, or label value -> name
    label: str = ""  # name of the label, if `source` or the statistic is a mapping


METRICS: tuple[Metric, ...] = (
    Metric(
        name="ops_pending", kind="gauge", help="Operations accepted and not finished", source="ops_pending"
    ),
    Metric(
        name="queue_depth",
        kind="gauge",
        help="Operations that have not started",
        label="kind",
        source={"sample": "samples_waiting", "step": "steps_waiting"},
    ),
    Metric(
        name="ops_total",
        kind="counter",
        help="Operations that ended",
        label="outcome",
        source={"ok": "ops_finished", "failed": "ops_failed"},
    ),
    Metric(name="decode_slots", kind="gauge", help="Sequences that can be decoded at once", source="slots"),
    Metric(name="decode_slots_used", kind="gauge", help="Sequences being decoded", source="slots_used"),
    Metric(
        name="cache_pages",
        kind="gauge",
        help="KV pages: all of them, those that are free, and those that only the prefix cache holds",
        label="kind",
        source={
            "all": "cache_pages",
            "free": "cache_pages_free",
            "cached": "cache_pages_cached",
        },
    ),
    Metric(
        name="preemptions_total",
        kind="counter",
        help="Sequences preempted because no KV page was free",
        source="num_preemptions",
    ),
    Metric(
        name="decode_dispatches_total",
        kind="counter",
        help="Dispatches of decode steps",
        source="decode_dispatches",
    ),
    Metric(
        name="decode_dispatches_ahead_total",
        kind="counter",
        help="Dispatches of decode steps that started before the host read the previous one",
        source="decode_dispatches_ahead",
    ),
    Metric(
        name="work_seconds_total",
        kind="counter",
        help="Time that the engine has spent on each kind of work",
        label="work",
        source="work_seconds",
    ),
    Metric(
        name="tokens_total",
        kind="counter",
        help="Tokens by kind of work",
        label="kind",
        source={
            "sampled": "tokens_sampled",
            "sampled_elsewhere": "tokens_sampled_elsewhere",
            "prefilled": "tokens_prefilled",
            "prefix_cache": "tokens_from_prefix_cache",
            "trained": "tokens_trained",
            "forward": "tokens_forward",
        },
    ),
    Metric(name="models", kind="gauge", help="Models being trained", source="models"),
    Metric(
        name="sampler_snapshots",
        kind="gauge",
        help="Sampler snapshots in memory",
        label="place",
        source={"device": "snapshots_on_device", "host": "snapshots_in_host_memory"},
    ),
    Metric(
        name="sampler_requests_total",
        kind="counter",
        help="Requests to the external sampler that ended",
        label="outcome",
        source={"ok": "sampler_ok", "failed": "sampler_failed"},
    ),
    Metric(
        name="sampler_adapters",
        kind="gauge",
        help="Adapters loaded into the external sampler",
        source="sampler_adapters",
    ),
    Metric(
        name="sampler_tokens_compared_total",
        kind="counter",
        help="Tokens of the external sampler that the engine scored again",
        source="sampler_tokens_compared",
    ),
    Metric(
        name="sampler_difference_nats",
        kind="gauge",
        help="Difference between the external sampler's log-probabilities and the engine's, per token over "
        "the last compared samples",
        label="kind",
        source={
            "mean": "sampler_difference_mean",
            "kl": "sampler_difference_kl",
            "max": "sampler_difference_max",
        },
    ),
    Metric(
        name="programs_total",
        kind="counter",
        help="XLA programs compiled or read from the persistent cache, by name",
        label="program",
        source="programs",
    ),
    Metric(
        name="program_seconds_total",
        kind="counter",
        help="Time spent on compiling or reading programs",
        label="program",
        source="program_seconds",
    ),
    Metric(
        name="programs_from_cache_total",
        kind="counter",
        help="Programs read from the persistent cache",
        source="programs_from_cache",
    ),
    Metric(
        name="device_memory_bytes",
        kind="gauge",
        help="Accelerator memory",
        label="kind",
        source={"used": "device_bytes_in_use", "peak": "device_peak_bytes", "limit": "device_bytes_limit"},
    ),
)


@dataclass(frozen=True, slots=True)
class _Families(Collector):
    """The metric families of one reply."""

    state: AppState

    def collect(self) -> Iterable[Family]:
        statistics = self.state.engine.stats()
        for metric in METRICS:
            yield from _families(metric, statistics)
        for name, value in self.state.registry.stats().items():
            yield GaugeMetricFamily(f"{PREFIX}registry_{name}", f"{name} that the HTTP side knows", value)
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
    return Response(generate_latest(_Families(state)), media_type=MEDIA_TYPE)


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
    family = FAMILIES[metric.kind](PREFIX + name, text, labels=(label,) if label else ())
    for value, number in numbers.items():
        family.add_metric((value,) if label else (), number)
    return family


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


ENDPOINTS = (
    Endpoint(method="GET", path="/metrics", handler=metrics, for_operator=True, log_level=logging.DEBUG),
)

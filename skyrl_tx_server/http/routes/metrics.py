"""GET /metrics in Prometheus' text format: what waits, what runs, tokens by kind, caches, compilations, memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.http_handler import Endpoint, Reply

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "skyrl_tx_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric, fed from the engine's statistics: one key, or one key per value of a label."""

    name: str
    kind: str  # gauge or counter
    help: str
    source: Mapping[str, str] | str  # the statistic's key; or label value -> key
    label: str = ""  # of a metric with several sources, or of a statistic that is itself a mapping


METRICS = (
    Metric(
        name="ops_pending", kind="gauge", help="Operations accepted and not finished", source="ops_pending"
    ),
    Metric(
        name="queue_depth",
        kind="gauge",
        help="Operations waiting for their first turn",
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
        help="Pages for keys and values: all, those nobody has, those kept for prompts that begin alike",
        label="kind",
        source={"all": "cache_pages", "free": "cache_pages_free", "remembered": "cache_pages_remembered"},
    ),
    Metric(
        name="preemptions_total",
        kind="counter",
        help="Sequences set aside for want of pages",
        source="preemptions",
    ),
    Metric(name="decode_blocks_total", kind="counter", help="Decode blocks run", source="decode_blocks"),
    Metric(
        name="decode_blocks_ahead_total",
        kind="counter",
        help="Decode blocks begun before the host looked at the one before",
        source="decode_blocks_ahead",
    ),
    Metric(
        name="turn_seconds_total",
        kind="counter",
        help="Time the engine has spent, by what on",
        label="turn",
        source="turn_seconds",
    ),
    Metric(
        name="tokens_total",
        kind="counter",
        help="Tokens by what was done with them",
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
        help="Sampler snapshots held",
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
        help="Tokens of the external sampler scored again",
        source="sampler_tokens_compared",
    ),
    Metric(
        name="sampler_difference_nats",
        kind="gauge",
        help="The external sampler's log-probabilities against ours, per token over the last compared samples",
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
        help="XLA programs made ready, by name",
        label="program",
        source="programs",
    ),
    Metric(
        name="program_seconds_total",
        kind="counter",
        help="Time spent making them ready",
        label="program",
        source="program_seconds",
    ),
    Metric(
        name="programs_from_cache_total",
        kind="counter",
        help="Programs found in the persistent cache",
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


async def metrics(context: AppState, request: Request) -> Reply:
    statistics = context.engine.stats()
    lines = [line for metric in METRICS for line in _lines(metric, statistics)]
    for name, value in context.registry.stats().items():
        lines += _described(
            Metric(name=f"registry_{name}", kind="gauge", help="Known to the HTTP side", source=""),
            {"": value},
        )
    memory = Metric(
        name="resident_memory_bytes", kind="gauge", help="The server process's resident memory", source=""
    )
    lines += _described(memory, {"": _resident_bytes()})
    lines += [
        f"# HELP {PREFIX}requests_total HTTP requests answered",
        f"# TYPE {PREFIX}requests_total counter",
    ]
    for (method, route, status), count in sorted(context.requests.items()):
        lines.append(f'{PREFIX}requests_total{{method="{method}",route="{route}",status="{status}"}} {count}')
    return Response("\n".join(lines) + "\n", media_type=MEDIA_TYPE)


def _lines(metric: Metric, statistics: Mapping[str, object]) -> Iterable[str]:
    if isinstance(metric.source, str):
        found = statistics.get(metric.source)
        values = found if isinstance(found, dict) else {"": found}
    else:
        values = {value: statistics.get(key) for value, key in metric.source.items()}
    return _described(
        metric, {label: value for label, value in values.items() if isinstance(value, int | float)}
    )


def _described(metric: Metric, values: Mapping[str, int | float]) -> list[str]:
    """Nothing for a metric this engine or device does not have."""
    if not values:
        return []
    name = PREFIX + metric.name
    samples = [
        f'{name}{{{metric.label}="{_escaped(label)}"}} {value}' if label else f"{name} {value}"
        for label, value in values.items()
    ]
    return [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}", *samples]


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


ENDPOINTS = (
    Endpoint(method="GET", path="/metrics", handler=metrics, for_operator=True, log_level=logging.DEBUG),
)

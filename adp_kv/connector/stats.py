"""The connector's numbers on their way to vLLM's log and its Prometheus endpoint.

    Recorder (rank, scheduler side) ─► AdpStats ─► vLLM adds up ranks ─► AdpPromMetrics

Threads: whatever vLLM uses; nothing is shared. Failure scope: none; a number that is not in
the table of `adp_kv.metrics` is a fault of ours and raises in tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from adp_kv.metrics import ENGINE_METRICS, ENGINE_PREFIX, SECONDS, Metric


@dataclass
class AdpStats(KVConnectorStats):
    """Numbers of one interval: data as Recorder.take() gives it, or empty."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: Any) -> AdpStats:
        """Add another rank's or interval's numbers to these."""
        for name, amount in other.data.get("sums", {}).items():
            sums = self.data.setdefault("sums", {})
            sums[name] = sums.get(name, 0) + amount
        for name, seconds in other.data.get("seconds", {}).items():
            durations = self.data.setdefault("seconds", {})
            durations[name] = [*durations.get(name, []), *seconds]
        self.data.setdefault("now", {}).update(other.data.get("now", {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return one number each for vLLM's log line: sums, and means in milliseconds."""
        told: dict[str, int | float] = dict(self.data.get("sums", {}))
        for name, seconds in self.data.get("seconds", {}).items():
            told[f"{name.removesuffix('_seconds')}_mean_ms"] = round(
                1000 * sum(seconds) / len(seconds), 3
            )
        told.update(self.data.get("now", {}))
        return told

    def is_empty(self) -> bool:
        """Return whether there is nothing to tell."""
        return not any(self.data.values())


class AdpPromMetrics(KVConnectorPromMetrics):
    """The connector's families on vLLM's endpoint; labels are vLLM's, and the family's own."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._label_values = per_engine_labelvalues
        self._families = {m.name: _family(m, metric_types, labelnames) for m in ENGINE_METRICS}
        for name in (name for metric in ENGINE_METRICS for name in metric.series):
            for engine in per_engine_labelvalues:
                self._child(name, engine)  # shown before it happens

    def _child(self, name: str, engine: int) -> Any:
        family, _, label = name.partition(":")
        values = [*self._label_values[engine], label] if label else self._label_values[engine]
        return self._families[family].labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's numbers."""
        for name, amount in transfer_stats_data.get("sums", {}).items():
            self._child(name, engine_idx).inc(amount)
        for name, value in transfer_stats_data.get("now", {}).items():
            self._child(name, engine_idx).set(value)
        for name, durations in transfer_stats_data.get("seconds", {}).items():
            child = self._child(name, engine_idx)
            for seconds in durations:
                child.observe(seconds)


def _family(metric: Metric, metric_types: dict[Any, Any], labelnames: list[str]) -> Any:
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "counter": (Counter, {}),
        "gauge": (Gauge, {"multiprocess_mode": "mostrecent"}),
        "histogram": (Histogram, {"buckets": list(SECONDS)}),
    }
    kind, extra = kinds[metric.kind]
    return metric_types[kind](
        name=ENGINE_PREFIX + metric.name,
        documentation=metric.meaning,
        labelnames=[*labelnames, *metric.labels],
        **extra,
    )

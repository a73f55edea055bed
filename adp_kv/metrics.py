"""What both sides count: how a metric is described, and histograms of seconds.

The table of the connector is here, that of the gateway in `gateway.metrics`;
docs/metrics.md is made from both.

Threads: a Histogram belongs to one; a copy may be read by any.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any, Literal

SECONDS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
"""Upper bounds of the buckets of every histogram of seconds; one more bucket has the rest."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One family as Prometheus sees it.

    Attributes:
        name: without prefix and without _total.
        kind: of the family.
        meaning: for HELP and docs/metrics.md; says the unit where the name does not.
        labels: names of labels beyond those of the process.
        values: what the only label can be, where that is known: exported as 0 from the start,
            since a rate does not see the step from nothing to the first event.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    @property
    def series(self) -> list[str]:
        """Names of the counters or histograms that are known before anything has happened."""
        if self.labels:
            return [f"{self.name}:{value}" for value in self.values]
        return [self.name]


@dataclass(slots=True)
class Histogram:
    """Durations in buckets.

    Attributes:
        counts: of each bucket of SECONDS, and of what took longer.
        total_s: sum of the durations.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total_s: float = 0.0

    @property
    def count(self) -> int:
        """How many durations there are."""
        return sum(self.counts)

    def observe(self, seconds: float) -> None:
        """Add a duration."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total_s += seconds

    def copy(self) -> Histogram:
        """Return one that does not change any more."""
        return Histogram(list(self.counts), self.total_s)


ENGINE_PREFIX = "vllm:adp_kv_"
ENGINE_METRICS = (
    Metric("lookups", "counter", "requests whose chunks were asked for"),
    Metric("lookup_chunks", "counter", "chunks asked for"),
    Metric("lookup_chunks_found", "counter", "of those, chunks that were stored"),
    Metric("lookups_unanswered", "counter", "lookups without an answer within lookup_timeout_s"),
    Metric("tokens_restored", "counter", "tokens vLLM was promised: restored unless it failed"),
    Metric("chunks_saved", "counter", "chunks picked for saving"),
    Metric("chunks_unsaved", "counter", "of those, chunks some rank did not save: tried again"),
    Metric("bytes_restored", "counter", "bytes brought from the ring to GPU memory"),
    Metric("bytes_exchanged", "counter", "of those, bytes that ranks shared over NVLink"),
    Metric("bytes_saved", "counter", "bytes copied from GPU memory to the ring"),
    Metric("objects_missed", "counter", "objects that were missing or damaged on the card"),
    Metric("requests_failed", "counter", "gets and puts that the gateway failed"),
    Metric(
        "restores_failed",
        "counter",
        "restores that did not bring everything",
        ("mode",),
        ("layerwise", "async"),
    ),
    Metric(
        "saves_dropped",
        "counter",
        "saves of a step given up on a rank",
        ("reason",),
        ("off", "restore_failed", "max_pending_save_bytes", "save_timeout_s", "transfer_failed"),
    ),
    Metric("turned_off", "counter", "ranks that turned the external cache off"),
    Metric("off", "gauge", "1: neither hits nor saves; the engine's log says why"),
    Metric("pinned_blocks", "gauge", "blocks kept from reuse until they are saved"),
    Metric("lookup_seconds", "histogram", "from question to answer"),
    Metric("restore_wait_seconds", "histogram", "a step stood still for one layer's pages"),
    Metric("restore_seconds", "histogram", "of a restore on a rank, until its last layer"),
    Metric("save_seconds", "histogram", "of a step's save on a rank, until its blocks are free"),
)
"""What vLLM's endpoint shows of the connector."""


class Recorder:
    """What one side of the connector has to tell since it was last asked.

    Names are those of ENGINE_METRICS; `name:value` gives the family's label. Threads: one.
    """

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}
        self._seconds: dict[str, list[float]] = {}
        self._now: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._moved = False

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        if amount:
            self._sums[name] = self._sums.get(name, 0) + amount

    def observe(self, name: str, seconds: float) -> None:
        """Add a duration."""
        self._seconds.setdefault(name, []).append(seconds)

    def show(self, name: str, value: float) -> None:
        """Set a gauge; told only when it has changed."""
        if self._now.get(name) != value:
            self._now[name] = value
            self._moved = True

    def take(self) -> dict[str, dict[str, Any]] | None:
        """Return what is new, as plain dicts by kind, and begin anew; None if nothing is."""
        now = {}
        if self._moved:
            now = {k: v for k, v in self._now.items() if self._told.get(k) != v}
            self._moved = False
        if not self._sums and not self._seconds and not now:
            return None
        self._told |= now
        told: dict[str, dict[str, Any]] = {
            "sums": dict(self._sums),
            "seconds": dict(self._seconds),
            "now": dict(now),
        }
        self._sums, self._seconds = {}, {}
        return told

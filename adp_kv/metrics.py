"""What both sides count: how a metric is described, and histograms of seconds.

The tables of metrics are where the numbers are: `adp_kv.connector.stats` for vLLM's
endpoint, `gateway.metrics` for the gateway's. docs/metrics.md is made from them.

Threads: a Histogram belongs to one; a copy may be read by any.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal

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
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()


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

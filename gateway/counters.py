"""Counters and durations of the gateway: plain names; gateway/metrics.py says what they mean."""

from __future__ import annotations

from collections import Counter

from adp_kv.metrics import Histogram


class Counters:
    """Monotonic sums and histograms of seconds by name; used by the main thread."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._durations: dict[str, Histogram] = {}

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a sum."""
        self._sums[name] += amount

    def observe(self, name: str, seconds: float) -> None:
        """Add a duration to a histogram."""
        self._durations.setdefault(name, Histogram()).observe(seconds)

    def snapshot(self) -> dict[str, int]:
        """Return a copy of the sums."""
        return dict(self._sums)

    def durations(self) -> dict[str, Histogram]:
        """Return a copy of the histograms."""
        return {name: histogram.copy() for name, histogram in self._durations.items()}

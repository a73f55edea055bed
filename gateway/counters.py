"""Counters of the gateway: plain names, plain sums; docs/metrics.md says what they mean."""

from __future__ import annotations

from collections import Counter


class Counters:
    """Monotonic sums by name; used by the main thread."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a sum."""
        self._sums[name] += amount

    def snapshot(self) -> dict[str, int]:
        """Return a copy."""
        return dict(self._sums)

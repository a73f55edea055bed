"""How long devices take: histograms by file descriptor, filled a turn at a time.

Threads. note() is called by one executor's threads and is short: what it is given is sorted
into buckets many turns at once. of() may be called by any thread. Both hold the lock.
It must not know databases: a card knows which descriptor is whose.
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np
from numpy.typing import NDArray

from adp_kv.metrics import SECONDS, Histogram

_BOUNDS_NS: Final = np.array(SECONDS) * 1e9
_TURNS: Final = 64


class DeviceLatencies:
    """Durations of I/Os by descriptor."""

    def __init__(self) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self._turns: list[tuple[NDArray[np.int32], NDArray[np.int64]]] = []
        self._by_fd: dict[int, Histogram] = {}

    def note(self, fds: NDArray[np.int32], durations_ns: NDArray[np.int64]) -> None:
        """Add the durations of I/Os, each on its descriptor: [n] both, not changed later."""
        with self._lock:
            self._turns.append((fds, durations_ns))
            if len(self._turns) >= _TURNS:
                self._sort()

    def of(self, fd: int) -> Histogram:
        """Return a copy of a descriptor's histogram; empty if nothing ended there."""
        with self._lock:
            self._sort()
            histogram = self._by_fd.get(fd)
            return Histogram() if histogram is None else histogram.copy()

    def _sort(self) -> None:
        if not self._turns:
            return
        fds = np.concatenate([fds for fds, _ in self._turns])
        durations_ns = np.concatenate([durations for _, durations in self._turns])
        self._turns.clear()
        buckets = np.searchsorted(_BOUNDS_NS, durations_ns)
        for fd in np.unique(fds).tolist():
            mine = fds == fd
            histogram = self._by_fd.setdefault(fd, Histogram())
            counts = np.bincount(buckets[mine], minlength=len(SECONDS) + 1).tolist()
            histogram.counts = [a + b for a, b in zip(histogram.counts, counts, strict=True)]
            histogram.total_s += float(durations_ns[mine].sum()) / 1e9

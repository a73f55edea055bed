"""Which slots of one direction are free: an allocator that prefers contiguous runs.

One contiguous copy runs at the link's speed, so a layer's get should find its
objects side by side. Free slots are kept as a sorted list of (start, length)
extents; a request takes the smallest extent that holds it whole, else the largest
ones until it is served.

Threads: used by one (the gateway's main). Failure scope: a call that fails changes
nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


class SlotAllocator:
    """Hands out slot numbers 0..num_slots-1, each to one holder at a time."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_free = num_slots
        self._extents: list[tuple[int, int]] = [(0, num_slots)] if num_slots else []

    def try_allocate(self, count: int) -> NDArray[np.uint32] | None:
        """Return count slots in as few runs as possible, or None if too few are free."""
        if count < 1 or count > self.num_free:
            return None
        best: tuple[int, int] | None = None
        for start, length in self._extents:
            if length >= count and (best is None or length < best[1]):
                best = (start, length)
        self.num_free -= count
        if best is not None:
            return self._take(best, count)
        runs = []
        for extent in sorted(self._extents, key=lambda e: -e[1]):
            part = self._take(extent, min(extent[1], count))
            runs.append(part)
            count -= len(part)
            if not count:
                break
        return np.concatenate(runs)

    def _take(self, extent: tuple[int, int], count: int) -> NDArray[np.uint32]:
        start, length = extent
        at = bisect_left(self._extents, extent)
        if count == length:
            del self._extents[at]
        else:
            self._extents[at] = (start + count, length - count)
        return np.arange(start, start + count, dtype=np.uint32)

    def free(self, slots: NDArray[np.uint32]) -> None:
        """Take slots back.

        Raises:
            ValueError: A slot is out of range, named twice or already free.
        """
        if not len(slots):
            return
        ordered = slots.astype(np.int64)
        steps = ordered[1:] - ordered[:-1]
        if (steps < 1).any():
            ordered.sort()
            steps = ordered[1:] - ordered[:-1]
        if ordered[0] < 0 or ordered[-1] >= self.num_slots:
            raise ValueError(f"slot {int(ordered[-1])} is outside 0..{self.num_slots - 1}")
        ends = np.flatnonzero(steps != 1)  # of runs, but for the last one
        bounds = [0, *(ends + 1).tolist(), len(ordered)]
        runs = [(int(ordered[a]), b - a) for a, b in pairwise(bounds)]
        if (ends.size and not steps.all()) or any(self._overlaps(s, n) for s, n in runs):
            raise ValueError("a slot was freed twice")
        for start, length in runs:
            self._give(start, length)
        self.num_free += len(ordered)

    def _overlaps(self, start: int, length: int) -> bool:
        at = bisect_left(self._extents, (start, 0))
        before = at > 0 and sum(self._extents[at - 1]) > start
        after = at < len(self._extents) and self._extents[at][0] < start + length
        return before or after

    def _give(self, start: int, length: int) -> None:
        at = bisect_left(self._extents, (start, 0))
        if at < len(self._extents) and self._extents[at][0] == start + length:
            length += self._extents.pop(at)[1]
        if at > 0 and sum(self._extents[at - 1]) == start:
            previous = self._extents.pop(at - 1)
            start, length = previous[0], previous[1] + length
        insort(self._extents, (start, length))

    def check_integrity(self) -> None:
        """Raise AssertionError unless the extents are sorted, apart, in range and add up."""
        end = -1
        total = 0
        for start, length in self._extents:
            if not (start > end and length > 0 and start + length <= self.num_slots):
                raise AssertionError(f"bad extent {(start, length)} in {self._extents}")
            end = start + length
            total += length
        if total != self.num_free:
            raise AssertionError(f"{total} slots in extents, {self.num_free} counted free")

"""The parts that S3-FIFO is made of: queues of row numbers, and names that were let go lately.

Threads. None of its own and no lock: `gateway.cards.groups` owns them.
Failure scope. Nothing here can fail but for memory.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

GroupRows: TypeAlias = NDArray[np.int64]
"""int64 [n], rows of a GroupTable; -1 stands for no group."""

_FIRST_ROOM: Final = 1024


class RowQueue:
    """A FIFO of (row, stamp) in numpy.

    Whoever takes entries skips those whose row has another stamp by now; tidy() leaves them
    behind.
    """

    def __init__(self) -> None:
        """Make an empty queue."""
        self._entries: NDArray[np.int64] = np.empty((_FIRST_ROOM, 2), dtype=np.int64)
        self._head = self._tail = 0

    def __len__(self) -> int:
        """Return the number of entries, skipped ones included."""
        return self._tail - self._head

    def push(self, rows: GroupRows, stamps: NDArray[np.int64]) -> None:
        """Append entries at the end."""
        self._make_room(rows.size)
        self._entries[self._tail : self._tail + rows.size, 0] = rows
        self._entries[self._tail : self._tail + rows.size, 1] = stamps
        self._tail += rows.size

    def take(self, limit: int) -> NDArray[np.int64]:
        """Remove and return up to `limit` entries from the front: int64 [n, 2]."""
        taken = self._entries[self._head : min(self._head + limit, self._tail)].copy()
        self._head += len(taken)
        return taken

    def put_back(self, entries: NDArray[np.int64]) -> None:
        """Put entries that were taken in front again."""
        if len(entries) > self._head:
            self._shift(len(entries))
        self._head -= len(entries)
        self._entries[self._head : self._head + len(entries)] = entries

    def tidy(self, stamps: NDArray[np.int64]) -> None:
        """Leave behind the entries whose row has another stamp by now: int64 [rows]."""
        entries = self._entries[self._head : self._tail]
        kept = entries[stamps[entries[:, 0]] == entries[:, 1]]
        self._entries = np.empty((max(_FIRST_ROOM, 2 * len(kept)), 2), dtype=np.int64)
        self._entries[: len(kept)] = kept
        self._head, self._tail = 0, len(kept)

    def _make_room(self, count: int) -> None:
        if self._tail + count > len(self._entries):
            self._shift(0, count)

    def _shift(self, before: int, behind: int = 0) -> None:
        """Move what is there, so that there is room before and behind it."""
        entries = self._entries[self._head : self._tail]
        room = max(_FIRST_ROOM, before + 2 * (len(entries) + behind))
        self._entries = np.empty((room, 2), dtype=np.int64)
        self._entries[before : before + len(entries)] = entries
        self._head, self._tail = before, before + len(entries)


class Ghosts:
    """Names of groups that were evicted from the small queue lately, in a fixed table.

    A name overwrites another that falls on its place: it is a hint, never a promise.
    """

    def __init__(self) -> None:
        """Make an empty table."""
        self._allocate(_FIRST_ROOM)

    def _allocate(self, size: int) -> None:
        self._names: NDArray[np.uint64] = np.zeros(size, dtype=np.uint64)
        self._numbers: NDArray[np.int64] = np.zeros(size, dtype=np.int64)
        self._count = 0

    def fit(self, num_groups: int) -> None:
        """Make room for about as many names as there are groups; a larger table starts empty."""
        if num_groups > self._names.size:
            self._allocate(1 << (2 * num_groups - 1).bit_length())

    def add(self, names: NDArray[np.uint64]) -> None:
        """Remember names: uint64 [n]."""
        places = self._places(names)
        self._names[places] = names
        self._numbers[places] = self._count + np.arange(1, names.size + 1)
        self._count += names.size

    def take(self, names: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which names were added among the last, and forget them: bool [n]."""
        places = self._places(names)
        recent = self._numbers[places] > max(0, self._count - self._names.size)
        there: NDArray[np.bool_] = (self._names[places] == names) & recent
        self._numbers[places[there]] = 0
        return there

    def _places(self, names: NDArray[np.uint64]) -> NDArray[np.int64]:
        return (names & np.uint64(self._names.size - 1)).astype(np.int64)

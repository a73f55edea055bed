"""Evicting whole groups: the commit record first, then the values.

    pressure, ttl, quota ─► GroupTable chooses ─► markers dropped ─► values dropped ─► rows free

A marker's record is in its database's journal before the first value of its group is
dropped anywhere, so that whatever a kill leaves behind is a group without marker, never a
marker without values. EXIST stops offering a group at the moment it is chosen.

Values are found by going through the databases' indices in pieces, for all groups that
were chosen together: about 20 ns a row of the index, some tenths of a second for 8 M values,
once for each tenth of the card that is written.

What expired or was abandoned is hidden from EXIST at once, but may come in a trickle: its
values wait until the last pass is long enough ago, unless room is short.

Threads. One of its own; round() may be called from any other instead. A database's lock
is held for one piece at a time, with a pause between two.
Failure scope. What a journal refuses to note is dropped in memory all the same; nothing is
written in its place before the journal has it (`gateway.cards.slab_database`).
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from adp_kv.wire.keys import KeyArray
from gateway.cards.batches import by_database
from gateway.cards.group_facts import CommitArray
from gateway.cards.group_queue import GroupRows
from gateway.cards.groups import GroupTable
from gateway.cards.index import Locations
from gateway.cards.pace import Pace
from gateway.cards.retention import RetentionSettings
from gateway.cards.slots import SlotTable

_logger: Final = logging.getLogger(__name__)

PIECE_ROWS: Final = 4096
_TICK_S: Final = 1.0
_PRESSED_TICK_S: Final = 0.1
_REST_SHARE: Final = 20  # times what a pass took, before one that is not urgent
_MAX_REST_S: Final = 60.0


class Shelf(ABC):
    """One database, as the evictor sees it.

    Attributes:
        table: which key is in which slot; its lock is held around every call.
    """

    table: SlotTable

    @abstractmethod
    def drop(self, keys: KeyArray, slots: Locations) -> NDArray[np.bool_]:
        """Delete keys that still are at `slots`, for good; return which were: bool [n]."""

    @abstractmethod
    def move_markers(self, commits: CommitArray) -> None:
        """Note that markers that are there have another place in the order now."""


class Evictor:
    """Keeps room on a card (see the module)."""

    def __init__(
        self, groups: GroupTable, shelves: Sequence[Shelf], settings: RetentionSettings
    ) -> None:
        """Start the thread.

        Args:
            groups: of all databases.
            shelves: the databases, in order.
            settings: watermarks.
        """
        self._groups = groups
        self._shelves = shelves
        self._settings = settings
        names = ("evicted_chunks", "evicted_bytes", "expired_chunks", "abandoned_chunks")
        self._counts = dict.fromkeys((*names, "quota_evicted_chunks"), 0)
        self._condemned: list[GroupRows] = []
        self._left: GroupRows = np.empty(0, dtype=np.int64)
        self._round_lock = threading.Lock()
        self._condemned_lock = threading.Lock()
        self._rested_at = 0.0
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adp-card-evict", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, int]:
        """Return what went and why; evicted_* are all of them together."""
        return {"groups": len(self._groups), **self._counts}

    def check_room(self, shelf: Shelf) -> None:
        """Begin to evict if a database got too full; never blocks."""
        if self._is_crowded(shelf):
            self._wake.set()

    def check_quota(self) -> None:
        """Begin to evict if a namespace has too much; never blocks."""
        if self._crowded_namespaces():
            self._wake.set()

    def condemn(self, rows: GroupRows) -> None:
        """Take the markers of groups away, a value of which is lost; never blocks.

        From now on EXIST does not find them.
        """
        rows = rows[rows >= 0]
        if rows.size:
            self._groups.uncommit(rows)
            with self._condemned_lock:
                self._condemned.append(rows)
            self._wake.set()

    def stop(self, timeout_s: float) -> bool:
        """End the thread; return whether it ended in time."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        rest_s = _PRESSED_TICK_S
        while not self._stop.is_set():
            moved = False
            try:
                moved = self.round()
            except Exception:
                _logger.exception("eviction failed; it is tried again")
            if not self._is_pressed():
                self._wake.wait(_TICK_S)
            elif not moved:
                # Nothing may go: each write wakes this thread, and none should cost a round.
                self._stop.wait(rest_s)
            rest_s = _PRESSED_TICK_S if moved else min(2 * rest_s, _TICK_S)
            self._wake.clear()

    def _is_pressed(self) -> bool:
        crowded = any(self._is_crowded(shelf) for shelf in self._shelves)
        return crowded or bool(self._crowded_namespaces())

    def round(self) -> bool:
        """Evict what is due now; return whether anything went."""
        with self._round_lock:
            before = self._counts["evicted_chunks"]
            self._drop_condemned()
            expired, abandoned = self._groups.expired(), self._groups.abandoned()
            self._counts["expired_chunks"] += expired.size
            self._counts["abandoned_chunks"] += abandoned.size
            over = [self._over_quota(name) for name in self._crowded_namespaces()]
            self._counts["quota_evicted_chunks"] += sum(rows.size for rows in over)
            due = np.concatenate([self._left, expired, abandoned, *over])
            if self._is_pressed() or time.monotonic() >= self._rested_at:
                self._left = due[:0]
                self._sweep(due)
            else:
                self._left = due
            while self._relieve():
                pass
            return self._counts["evicted_chunks"] > before

    def _drop_condemned(self) -> None:
        with self._condemned_lock:
            condemned, self._condemned = self._condemned, []
        for rows in condemned:
            self._drop_markers(rows, going=False)

    def _drop_markers(self, rows: GroupRows, *, going: bool) -> None:
        owners, facts = self._groups.markers(rows)
        for database, mine in by_database(facts["database"], np.arange(owners.size)):
            shelf = self._shelves[database]
            for some in self._pieces(mine):
                with shelf.table.lock:
                    # Else it may have been committed anew.
                    gone = some if going else some[~self._groups.committed(owners[some])]
                    keys = np.ascontiguousarray(facts["key"][gone])
                    shelf.drop(keys, shelf.table.marker_of(owners[gone]))

    def _pieces(self, rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Cut rows, so that a lock is held for a piece of them at a time."""
        pace = Pace(self._stop)
        for start in range(0, rows.size, PIECE_ROWS):
            if start:
                pace.pause()
            yield rows[start : start + PIECE_ROWS]

    def _crowded_namespaces(self) -> list[int]:
        return self._groups.over_quota(self._settings.evict_above)

    def _over_quota(self, namespace: int) -> GroupRows:
        target = int(self._groups.rules.quota_slots * self._settings.evict_to)
        return self._choose(self._groups.used_slots(namespace) - target, namespace)

    def _relieve(self) -> bool:
        """Evict if a database is too full; return whether that made room."""
        if self._stop.is_set() or not any(self._is_crowded(shelf) for shelf in self._shelves):
            return False
        excess = max(
            shelf.table.num_used - self._settings.evict_to * shelf.table.marker
            for shelf in self._shelves
        )
        # The values of a group are spread evenly, so a database gets its share of what goes.
        victims = self._choose(max(1, int(excess)) * len(self._shelves), None)
        self._sweep(victims)
        return victims.size > 0

    def _choose(self, num_slots: int, namespace: int | None) -> GroupRows:
        choice = self._groups.choose(num_slots, namespace)
        for rows in self._pieces(choice.promoted):
            owners, facts = self._groups.markers(rows)
            for database, mine in by_database(facts["database"], np.arange(owners.size)):
                shelf = self._shelves[database]
                with shelf.table.lock:
                    there = shelf.table.find(np.ascontiguousarray(facts["key"][mine]))
                    same = there == shelf.table.marker_of(owners[mine])
                    shelf.move_markers(facts[mine[same]])
        return choice.victims

    def _is_crowded(self, shelf: Shelf) -> bool:
        return shelf.table.num_used > self._settings.evict_above * shelf.table.marker

    def _sweep(self, victims: GroupRows) -> None:
        """Drop all of the groups that were chosen."""
        if victims.size == 0:
            return
        began = time.thread_time()
        self._drop_markers(victims, going=True)
        going = np.zeros(int(victims.max()) + 2, dtype=np.bool_)  # the last one: no group
        going[victims] = True
        for shelf in self._shelves:
            self._counts["evicted_bytes"] += self._sweep_values(shelf, going)
        left = self._groups.forget(victims)
        self._left = np.concatenate([self._left, left])
        self._counts["evicted_chunks"] += victims.size - left.size
        rest_s = (time.thread_time() - began) * _REST_SHARE
        self._rested_at = time.monotonic() + min(rest_s, _MAX_REST_S)

    def _sweep_values(self, shelf: Shelf, going: NDArray[np.bool_]) -> int:
        """Drop the values of groups; return their bytes."""
        table = shelf.table
        num_bytes = start = 0
        extent = table.extent
        pace = Pace(self._stop)
        while start < extent[0]:
            with table.lock:
                if table.extent != extent:  # keys have moved: from the beginning
                    extent, start = table.extent, 0
                keys, slots = table.piece(start, PIECE_ROWS)
                hit = going[np.minimum(table.row_at(slots), going.size - 1)]
                lengths = table.lengths[np.minimum(slots[hit], table.marker)]
                removed = shelf.drop(keys[hit], slots[hit])
                num_bytes += int(lengths[removed].sum(dtype=np.int64))
            start += PIECE_ROWS
            if start < extent[0] and pace.pause():
                break
        return num_bytes

"""Which key lives in which slot of one database, and when a slot may be used again.

A slot is free, being written (allocated, not yet in the index), live, or dying: no key
has it any more but a read of it is in flight. Overwriting a key takes a new slot and
lets the old one go, so no slot that anybody reads is ever written.

The slot number `marker` stands for "no bytes": zero-length values share it; it is never
allocated or freed, and a pin of it means nothing. The marker of a group is at `marker` + 1
+ the group's row instead, so that what finds it has the row, and what removes it by
location can't remove the marker of the group's next life.

Threads. The owner holds `lock` around every call and reads of the arrays; the group
table's lock is taken under it.
Failure scope. None of its own.
It must not know files, memory or what a checksum is computed of.
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np
from numpy.typing import NDArray

from adp_kv.wire.keys import KeyArray
from gateway.cards.base import Status, StatusArray
from gateway.cards.group_facts import NO_GROUP
from gateway.cards.group_queue import GroupRows
from gateway.cards.groups import GroupTable
from gateway.cards.index import ABSENT, KeyIndex, Locations

_ONE: Final = np.uint32(1)  # of the pins' own type: ten times as fast as an int


class SlotTable:
    """Slots of one database (see the module's contract).

    Attributes:
        lock: guards everything here.
        marker: the slot number of zero-length values, equal to the number of slots.
        lengths: uint32 [num_slots + 1], value bytes of live slots.
        checksums: uint64 [num_slots + 1], of live slots.
        rows: int32 [num_slots + 1], the group of each live slot, or NO_GROUP.
    """

    def __init__(self, num_slots: int, groups: GroupTable) -> None:
        """Make an empty table.

        Args:
            num_slots: slots.
            groups: told which groups gain and lose slots and markers.
        """
        self.lock = threading.Lock()
        self._groups = groups
        self.marker: Final = num_slots
        self.lengths: NDArray[np.uint32] = np.zeros(num_slots + 1, dtype=np.uint32)
        self.checksums: NDArray[np.uint64] = np.zeros(num_slots + 1, dtype=np.uint64)
        self.rows: NDArray[np.int32] = np.full(num_slots + 1, NO_GROUP, dtype=np.int32)
        self._index = KeyIndex(num_slots)
        self._pins: NDArray[np.uint32] = np.zeros(num_slots + 1, dtype=np.uint32)
        self._dying: NDArray[np.bool_] = np.zeros(num_slots + 1, dtype=np.bool_)
        # A stack whose top hands out low numbers first: neighbours in time are so in space.
        self._free: NDArray[np.int64] = np.arange(num_slots - 1, -1, -1, dtype=np.int64)
        self._num_free = num_slots
        self._num_dying = 0

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._index)

    @property
    def num_free(self) -> int:
        """Slots that can be allocated now."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Slots that hold a value or are being written; not those that only wait for a read."""
        return self.marker - self._num_free - self._num_dying

    def restore(
        self,
        keys: KeyArray,
        slots: Locations,
        lengths: NDArray[np.uint32],
        checksums: NDArray[np.uint64],
        rows: GroupRows,
    ) -> None:
        """Fill an empty table: distinct keys, and slots that differ but for markers."""
        self._describe(slots, lengths, checksums, rows)
        self._index.load(keys, slots)
        used = np.zeros(self.marker + 1, dtype=np.bool_)
        used[self._clip(slots)] = True
        free = np.flatnonzero(~used[: self.marker])[::-1]
        self._free[: free.size] = free
        self._num_free = free.size

    def find(self, keys: KeyArray) -> Locations:
        """Return the slot of each key, ABSENT (-1) where there is none."""
        return self._index.lookup(keys)

    def exists(self, keys: KeyArray) -> NDArray[np.bool_]:
        """Return which keys EXIST answers OK to: bool [n]; markers that are found are used."""
        slots = self._index.lookup(keys)
        there: NDArray[np.bool_] = slots >= 0
        markers = np.flatnonzero(slots > self.marker)
        if markers.size:
            there[markers] = self._groups.use(slots[markers] - self.marker - 1)
        return there

    def hold(self, slots: Locations) -> None:
        """Keep the groups of values that are being read from eviction for a while."""
        self._groups.hold(np.unique(self.row_at(slots)))

    def piece(self, start: int, count: int) -> tuple[KeyArray, Locations]:
        """Return keys and slots of a part of the index: `gateway.cards.index` has the contract."""
        return self._index.piece(start, count)

    @property
    def extent(self) -> tuple[int, int]:
        """The index's capacity and generation."""
        return self._index.capacity, self._index.generation

    def marker_of(self, rows: GroupRows) -> Locations:
        """Return where the marker of each group is, `marker` for NO_GROUP."""
        return self.marker + 1 + rows

    def row_at(self, slots: Locations) -> GroupRows:
        """Return the group of each slot or marker that find() gave, or NO_GROUP."""
        rows = np.where(slots > self.marker, slots - self.marker - 1, NO_GROUP)
        here = (slots >= 0) & (slots < self.marker)
        rows[here] = self.rows[slots[here]]
        return rows

    def _clip(self, slots: Locations) -> Locations:
        return np.minimum(slots, self.marker)

    def pin(
        self, keys: KeyArray, lengths: NDArray[np.uint32]
    ) -> tuple[Locations, StatusArray, NDArray[np.uint64]]:
        """Look keys up for reading; what is found stays where it is until unpin().

        Args:
            keys: uint64 [n, 2].
            lengths: uint32 [n], what the reader expects.

        Returns:
            slots int64 [n]; status uint8 [n]: OK (pinned), ABSENT or CORRUPT (other length;
            not pinned); checksums uint64 [n], valid where OK.
        """
        slots = self._index.lookup(keys)
        places = self._clip(slots)
        status = np.full(len(keys), Status.ABSENT, dtype=np.uint8)
        here = slots >= 0
        same = self.lengths[places] == lengths
        status[here & same] = Status.OK
        status[here & ~same] = Status.CORRUPT
        np.add.at(self._pins, places[here & same], _ONE)
        return slots, status, self.checksums[places]

    def unpin(self, slots: Locations) -> None:
        """End one read of each slot; one named twice was pinned twice."""
        slots = self._clip(slots)
        np.subtract.at(self._pins, slots, _ONE)
        dying = self._dying[slots]
        if not dying.any():
            return
        done = np.unique(slots[dying & (self._pins[slots] == 0)])
        self._dying[done] = False
        self._num_dying -= done.size
        self._push(done)

    def allocate(self, wanted: int) -> Locations:
        """Take up to `wanted` free slots to write to: int64 [<= wanted]."""
        taken = min(wanted, self._num_free)
        self._num_free -= taken
        return self._free[self._num_free : self._num_free + taken][::-1].copy()

    def give_back(self, slots: Locations) -> None:
        """Return allocated slots that hold nothing after all."""
        self._push(slots[slots < self.marker])

    def put(
        self,
        keys: KeyArray,
        slots: Locations,
        lengths: NDArray[np.uint32],
        checksums: NDArray[np.uint64],
        rows: GroupRows,
    ) -> None:
        """Make written slots the values of their keys and let displaced slots go.

        Args:
            keys: uint64 [n, 2].
            slots: int64 [n], allocated, or marker_of() the group where the length is 0.
            lengths: uint32 [n].
            checksums: uint64 [n].
            rows: int64 [n], the group of each or NO_GROUP.
        """
        self._describe(slots, lengths, checksums, rows)
        displaced = self._index.insert(keys, slots)
        self._release(np.where(displaced == slots, ABSENT, displaced))

    def _describe(
        self,
        slots: Locations,
        lengths: NDArray[np.uint32],
        checksums: NDArray[np.uint64],
        rows: GroupRows,
    ) -> None:
        values = slots < self.marker
        if not values.all():
            slots, lengths, checksums, rows = (
                slots[values],
                lengths[values],
                checksums[values],
                rows[values],
            )
        self.lengths[slots] = lengths
        self.checksums[slots] = checksums
        self.rows[slots] = rows
        self._groups.count_slots(rows, 1)

    def delete(self, keys: KeyArray, only_if: Locations | None = None) -> NDArray[np.bool_]:
        """Remove keys (with `only_if`, those still at that slot): bool [n], removed or not."""
        removed = self._index.delete(keys, only_if)
        self._release(removed)
        return removed >= 0

    def _release(self, slots: Locations) -> None:
        markers = slots[slots > self.marker]
        if markers.size:
            self._groups.uncommit(self.row_at(markers))
        slots = slots[(slots >= 0) & (slots < self.marker)]
        if not slots.size:
            return
        self._groups.count_slots(self.row_at(slots), -1)
        self.rows[slots] = NO_GROUP
        busy = self._pins[slots] > 0
        self._dying[slots[busy]] = True
        self._num_dying += int(np.count_nonzero(busy))
        self._push(slots[~busy])

    def _push(self, slots: Locations) -> None:
        self._free[self._num_free : self._num_free + slots.size] = slots
        self._num_free += slots.size

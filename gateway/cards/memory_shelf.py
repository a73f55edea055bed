"""A database of the memory card, as the evictor and the copying threads change it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from adp_kv.errors import CardError
from adp_kv.wire.keys import KeyArray
from gateway.cards.base import Batch
from gateway.cards.batches import Rows
from gateway.cards.evictor import Shelf
from gateway.cards.group_facts import CommitArray
from gateway.cards.groups import GroupTable
from gateway.cards.index import Locations
from gateway.cards.slots import SlotTable


class MemoryShelf(Shelf):
    """A table without a journal; `table.lock` is held around every call."""

    def __init__(self, table: SlotTable, database: int, groups: GroupTable) -> None:
        self.table = table
        self._database = database
        self._groups = groups

    def put(
        self, batch: Batch, mine: Rows, slots: Locations, checksums: NDArray[np.uint64]
    ) -> None:
        """Index values of a batch whose bytes are in their slots, and markers, of length 0."""
        if batch.lengths is None:
            raise CardError("batch: WRITE needs lengths")
        keys, lengths, namespace = batch.keys[mine], batch.lengths[mine], batch.namespace
        groups = np.zeros(mine.size, np.uint64) if batch.groups is None else batch.groups[mine]
        moving = lengths > 0
        rows = np.empty(len(keys), dtype=np.int64)
        rows[moving] = self._groups.enter(groups[moving], namespace)
        rows[~moving] = self._groups.enter(groups[~moving], namespace, markers=True)
        markers = ~moving & (rows >= 0)
        databases = np.full(int(markers.sum()), self._database, dtype=np.uint16)
        self._groups.commit(rows[markers], databases, keys[markers])
        slots = np.where(~moving, self.table.marker_of(rows), slots)
        self.table.put(keys, slots, lengths, checksums, rows)

    @override
    def drop(self, keys: KeyArray, slots: Locations) -> NDArray[np.bool_]:
        return self.table.delete(keys, slots)

    @override
    def move_markers(self, commits: CommitArray) -> None:
        """Nothing outlives the process."""

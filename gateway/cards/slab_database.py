"""One database of a slab card: slab, journal and table, changed in step; and their restore.

Every change is in the journal before it is in the table, so that a kill between the two
leaves nothing that anybody was told. Eviction is the other way round: where the file system
refuses its records they are owed, and no slot is written before they are in the journal, which
says as long that another value is there.

Threads. `table.lock` is held around every call but sync(), are_live() included.
Failure scope. What the file system refuses is the Status that the caller answers.
"""

from __future__ import annotations

import errno
import logging
import os
from typing import Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from adp_kv.wire.keys import KeyArray
from gateway.cards.base import Status
from gateway.cards.evictor import Shelf
from gateway.cards.group_facts import NO_GROUP, CommitArray
from gateway.cards.group_queue import GroupRows
from gateway.cards.groups import GroupTable
from gateway.cards.index import Locations
from gateway.cards.journal import Journal
from gateway.cards.journal_records import (
    RECORD,
    Kind,
    RecordArray,
    commit_records,
    commits_of,
    delete_records,
    is_commit,
    put_records,
)
from gateway.cards.slots import SlotTable

_logger: Final = logging.getLogger(__name__)

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class Database(Shelf):
    """One key space; `table.lock` guards table, journal appends and dirty_bytes.

    Attributes:
        fd: the slab.
        journal: of the slab.
        table: which key is in which slot.
        dirty_bytes: written since the last sync.
        journal_failures: appends the file system refused.
    """

    def __init__(self, fd: int, journal: Journal, table: SlotTable, groups: GroupTable) -> None:
        """Own the descriptor and the journal; open_store() makes databases."""
        self.fd = fd
        self.journal = journal
        self.table = table
        self.dirty_bytes = 0
        self.journal_failures = 0
        self._owed: list[KeyArray] = []
        self._refused = False
        self._groups = groups

    def sync(self) -> None:
        """Wait until the device has what was written before this call."""
        with self.table.lock:
            dirty, self.dirty_bytes = self.dirty_bytes, 0
        if dirty:
            os.fdatasync(self.fd)
            self.journal.sync()

    def record(self, records: RecordArray) -> Status:
        """Append to the journal, table.lock held.

        Returns:
            OK; NO_SPACE or IO_ERROR where the file system refused and nothing was appended.
        """
        try:
            while self._owed:
                self.journal.append(delete_records(self._owed[-1]))
                self._owed.pop()
            self.journal.append(records)
        except OSError as error:
            self.journal_failures += 1
            if not self._refused:  # a full file system refuses each batch
                _logger.warning("journal: %s; what follows until it works is counted", error)
            self._refused = True
            return Status.NO_SPACE if error.errno in _FULL else Status.IO_ERROR
        self._refused = False
        self.dirty_bytes += len(records)  # a sync is due, however little it is
        return Status.OK

    def allocate(self, wanted: int) -> tuple[Locations, Status]:
        """Take up to `wanted` free slots to write to, table.lock held.

        Returns:
            int64 [<= wanted]; why the others have none.
        """
        status = self.record(np.empty(0, dtype=RECORD)) if self._owed else Status.OK
        if status is not Status.OK:
            return np.empty(0, dtype=np.int64), status
        return self.table.allocate(wanted), Status.NO_SPACE

    def forget(self, keys: KeyArray) -> None:
        """Note that keys are gone that the table has no more, table.lock held."""
        if self.record(delete_records(keys)) is not Status.OK:
            self._owed.append(keys)

    def put(
        self,
        keys: KeyArray,
        slots: Locations,
        lengths: NDArray[np.uint32],
        checksums: NDArray[np.uint64],
        groups: NDArray[np.uint64],
        namespace: int,
    ) -> Status:
        """Journal, then index values whose bytes are in their slots, table.lock held.

        Returns:
            As record(); where it is not OK the slots are free again.
        """
        status = self.record(put_records(keys, slots, lengths, checksums, groups))
        if status is Status.OK:
            rows = self._groups.enter(groups, namespace)
            self.table.put(keys, slots, lengths, checksums, rows)
        else:
            self.table.give_back(slots)
        return status

    def put_markers(
        self, keys: KeyArray, database: int, groups: NDArray[np.uint64], namespace: int
    ) -> Status:
        """Journal, then index zero-length values, table.lock held; returns as record()."""
        rows = self._groups.enter(groups, namespace, markers=True)
        grouped = rows >= 0
        n = len(keys)
        lengths, checksums = np.zeros(n, np.uint32), np.zeros(n, np.uint64)
        plain = put_records(keys, self.table.marker_of(rows), lengths, checksums, groups)
        databases = np.full(int(grouped.sum()), database, dtype=np.uint16)
        commits = self._groups.commit(rows[grouped], databases, keys[grouped])
        status = self.record(np.concatenate([plain[~grouped], commit_records(commits)]))
        if status is Status.OK:
            nowhere = np.full(n, NO_GROUP, dtype=np.int64)
            self.table.put(keys, self.table.marker_of(rows), lengths, checksums, nowhere)
        else:
            self._groups.uncommit(rows[grouped])
        return status

    @override
    def drop(self, keys: KeyArray, slots: Locations) -> NDArray[np.bool_]:
        removed = self.table.delete(keys, slots)
        self.forget(keys[removed])
        return removed

    @override
    def move_markers(self, commits: CommitArray) -> None:
        self.record(commit_records(commits))

    def are_live(self, records: RecordArray) -> NDArray[np.bool_]:
        """Return which records are in force, table.lock held: bool [n]."""
        there = self.table.find(np.ascontiguousarray(records["key"]))
        live: NDArray[np.bool_] = there >= 0
        puts = records["kind"] == Kind.PUT
        slots = np.clip(there, 0, self.table.marker)
        same = (slots == records["slot"]) & (self.table.lengths[slots] == records["length"])
        live &= ~puts | (same & (self.table.checksums[slots] == records["checksum"]))
        commits = is_commit(records)
        stamps = self._groups.stamps(self.table.row_at(there[commits]))
        live[commits] &= stamps == records["checksum"][commits].astype(np.int64)
        live &= records["kind"] != Kind.DELETE
        return live


def restore(databases: list[Database], groups: GroupTable) -> None:
    """Fill the tables with what the journals say is there."""
    commits = [commits_of(d.journal.live[is_commit(d.journal.live)]) for d in databases]
    commit_rows = groups.restore(np.concatenate(commits))
    rows = [_rows_of(groups, database.journal.live) for database in databases]
    counts = np.zeros(len(groups), dtype=np.int64)
    for database, mine in zip(databases, rows, strict=True):
        values = mine[~is_commit(database.journal.live) & (mine >= 0)]
        counts += np.bincount(values, minlength=len(groups))
    promised = np.concatenate(commits)["num_values"].astype(np.int64)
    whole = np.ones(len(groups) + 1, dtype=np.bool_)  # the last: no group
    whole[commit_rows[counts[commit_rows] < promised]] = False
    groups.discard(np.flatnonzero(~whole))
    start = 0
    for database, mine, own in zip(databases, rows, commits, strict=True):
        own_rows = commit_rows[start : start + len(own)]
        start += len(own)
        _restore_table(database, mine, own_rows, whole)


def _rows_of(groups: GroupTable, live: RecordArray) -> GroupRows:
    """Return the row of each record's group: neighbours mostly share theirs."""
    names = np.ascontiguousarray(live["group"])
    if names.size == 0:
        return np.empty(0, dtype=np.int64)
    starts = np.flatnonzero(np.concatenate([[True], names[1:] != names[:-1]]))
    found = groups.rows_of(names[starts])
    return np.repeat(found, np.diff(np.append(starts, names.size)))


def _restore_table(
    database: Database, rows: GroupRows, commit_rows: GroupRows, whole: NDArray[np.bool_]
) -> None:
    live, table = database.journal.live, database.table
    database.journal.forget_live()
    slots = live["slot"].astype(np.int64)
    lengths = np.ascontiguousarray(live["length"])
    markers = is_commit(live)
    slots[markers] = table.marker_of(commit_rows)
    lengths[markers] = 0
    kept = whole[rows] & ((live["group"] == 0) | (rows >= 0))
    rows = np.where(markers, NO_GROUP, rows)
    keys = np.ascontiguousarray(live["key"])
    sums = np.ascontiguousarray(live["checksum"])
    if not kept.all():
        database.forget(keys[~kept])
        keys, slots, lengths = keys[kept], slots[kept], lengths[kept]
        sums, rows = sums[kept], rows[kept]
    table.restore(keys, slots, lengths, sums, rows)

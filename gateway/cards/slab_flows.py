"""What the slab card does with a batch: plan it, move its bytes, check them.

    plan: look up, pin or allocate ─► engine, parts of PART_ROWS ─► check: xxh3, journal, index

Threads. plan() on the planner, the engine's completions on its thread, checks on the
checkers. A database's table lock is held for vectorised work and journal appends alone.
Failure scope. Entries; a value that is damaged takes its group's commit record with it.
"""

from __future__ import annotations

import errno
import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import CardError
from adp_kv.wire.keys import KeyArray
from gateway.cards.base import Batch, CardLimits, Op, Status
from gateway.cards.batches import PendingBatch, Rows, WorkerPool, by_database, value_checksums
from gateway.cards.evictor import Evictor
from gateway.cards.groups import GroupTable
from gateway.cards.index import ABSENT, Locations
from gateway.cards.io_engine import IoEngine, IoRequest
from gateway.cards.journal_records import delete_records
from gateway.cards.slab_database import Database
from gateway.cards.slab_format import DATA_OFFSET
from gateway.cards.slab_settings import SlabSettings

_logger: Final = logging.getLogger(__name__)

PART_ROWS: Final = 64
"""Entries that are checked and journalled together; also about one queue's depth."""

SCRUB_TOKEN: Final = -1
"""The token of a batch that reads to find damage, not for a reader."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Entries of a batch that go through the engine together.

    Attributes:
        rows: int64 [k], positions in the batch.
        slots: int64 [k], pinned (READ) or allocated (WRITE).
        sizes: uint32 [k], bytes of I/O: lengths padded to the alignment.
        checksums: uint64 [k], expected ones of a READ.
    """

    rows: Rows
    slots: Locations
    sizes: NDArray[np.uint32]
    checksums: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Machinery:
    """What an open card works with.

    Attributes:
        engine: moves bytes.
        checkers: compute checksums and append to journals.
        databases: in order.
        groups: of all databases.
        evictor: keeps room.
        settled: told of each batch that was answered.
        sync_soon: asks for a sync.
    """

    engine: IoEngine
    checkers: WorkerPool
    databases: list[Database]
    groups: GroupTable
    evictor: Evictor
    settled: Callable[[], None]
    sync_soon: Callable[[], None]


class Flows:
    """Batches on their way through an open card (see the module).

    Attributes:
        abandoning: true answers IO_ERROR to whatever is not under way yet.
    """

    def __init__(self, settings: SlabSettings, limits: CardLimits, machinery: Machinery) -> None:
        """Begin with zero counters."""
        self.abandoning = False
        self._settings = settings
        self._limits = limits
        self._with = machinery
        self._fds: NDArray[np.int32] = np.array(
            [database.fd for database in machinery.databases], dtype=np.int32
        )
        self._lock = threading.Lock()
        names = ("bytes_read", "bytes_written", "corrupt", "io_errors", "scrubbed_bytes")
        self._counts = dict.fromkeys((*names, "dropped_by_quota"), 0)

    def stats(self) -> dict[str, int]:
        """Return the counters."""
        with self._lock:
            return dict(self._counts)

    def _settle(self, pending: PendingBatch) -> None:
        if pending.settle():
            self._with.settled()

    def plan(self, pending: PendingBatch) -> None:
        """Begin a batch; what can't be begun is answered."""
        plans: dict[Op, Callable[[PendingBatch], None]] = {
            Op.EXIST: self._plan_exist,
            Op.READ: self._plan_read,
            Op.WRITE: self._plan_write,
            Op.DELETE: self._plan_delete,
        }
        try:
            if not self.abandoning:
                plans[pending.batch.op](pending)
        finally:
            self._settle(pending)

    def _by_database(self, batch: Batch, rows: Rows) -> list[tuple[Database, Rows]]:
        return [(self._with.databases[i], mine) for i, mine in by_database(batch.databases, rows)]

    def _in_part(self, batch: Batch, rows: Rows) -> list[tuple[Database, Rows]]:
        """As _by_database, but with positions in `rows`."""
        places = np.arange(rows.size, dtype=np.int64)
        found = by_database(batch.databases[rows], places)
        return [(self._with.databases[i], mine) for i, mine in found]

    def _plan_exist(self, pending: PendingBatch) -> None:
        batch = pending.batch
        for database, rows in self._by_database(batch, _all_rows(batch)):
            with database.table.lock:
                there = database.table.exists(batch.keys[rows])
            pending.status[rows] = np.where(there, Status.OK, Status.ABSENT)

    def _plan_delete(self, pending: PendingBatch) -> None:
        batch = pending.batch
        for database, rows in self._by_database(batch, _all_rows(batch)):
            keys = batch.keys[rows]
            with database.table.lock:
                slots = database.table.find(keys)
                there = slots >= 0
                pending.status[rows] = np.where(there, Status.OK, Status.ABSENT)
                # The record before the slot is free: else its next value could be lost to it.
                if database.record(delete_records(keys[there])) is Status.OK:
                    database.table.delete(keys)
                else:
                    pending.status[rows[there]] = Status.IO_ERROR

    def _plan_read(self, pending: PendingBatch) -> None:
        batch = pending.batch
        lengths = _lengths(batch)
        slots = np.full(len(lengths), ABSENT, dtype=np.int64)
        checksums = np.zeros(len(lengths), dtype=np.uint64)
        for database, rows in self._by_database(batch, _all_rows(batch)):
            table = database.table
            with table.lock:
                slots[rows], status, checksums[rows] = table.pin(batch.keys[rows], lengths[rows])
                status[lengths[rows] > self._limits.max_value_bytes] = Status.TOO_LARGE
                if batch.token == SCRUB_TOKEN:  # it was written anew since the scrub looked
                    status[status == Status.CORRUPT] = Status.ABSENT
                corrupt = rows[status == Status.CORRUPT]
                self._lose(database, batch.keys[corrupt], slots[corrupt])
                if batch.token != SCRUB_TOKEN:
                    table.hold(slots[rows[status == Status.OK]])
            pending.status[rows] = status
            self.count("corrupt", corrupt.size)
        moving = np.flatnonzero((pending.status == Status.OK) & (lengths > 0))
        pending.status[moving] = Status.IO_ERROR  # until checked, whatever happens on the way
        self._launch(pending, moving, slots, checksums)

    def _plan_write(self, pending: PendingBatch) -> None:
        batch = pending.batch
        lengths = _lengths(batch)
        pending.status[lengths > self._limits.max_value_bytes] = Status.TOO_LARGE
        slots = np.full(len(lengths), ABSENT, dtype=np.int64)
        fitting = np.flatnonzero(lengths <= self._limits.max_value_bytes)
        self._plan_markers(pending, fitting[lengths[fitting] == 0])
        moving = self._within_quota(pending, fitting[lengths[fitting] > 0])
        for database, rows in self._by_database(batch, moving):
            with database.table.lock:
                taken = database.table.allocate(rows.size)
                self._with.evictor.check_room(database)
            slots[rows[: taken.size]] = taken
            pending.status[rows[taken.size :]] = Status.NO_SPACE
        self._with.groups.release(batch.namespace, int((slots[moving] < 0).sum()))
        self._launch(pending, np.flatnonzero(slots >= 0), slots, np.zeros_like(batch.keys[:, 0]))

    def _within_quota(self, pending: PendingBatch, moving: Rows) -> Rows:
        """Return the rows that the namespace may still write; the others are answered."""
        allowed = self._with.groups.reserve(pending.batch.namespace, moving.size)
        self._with.evictor.check_quota()
        pending.status[moving[allowed:]] = Status.NO_SPACE
        self.count("dropped_by_quota", moving.size - allowed)
        return moving[:allowed]

    def _plan_markers(self, pending: PendingBatch, markers: Rows) -> None:
        batch = pending.batch
        for database, rows in self._by_database(batch, markers):
            number = int(batch.databases[rows[0]])
            with database.table.lock:
                pending.status[rows] = database.put_markers(
                    batch.keys[rows], number, _groups(batch, rows), batch.namespace
                )

    def _lose(self, database: Database, keys: KeyArray, slots: Locations) -> None:
        """Delete damaged values, and take away the markers that vouch for them."""
        if not slots.size:
            return
        rows = database.table.row_at(slots)
        removed = database.drop(keys, slots)
        self._with.evictor.condemn(rows[removed])

    def _launch(
        self,
        pending: PendingBatch,
        moving: Rows,
        slots: Locations,
        checksums: NDArray[np.uint64],
    ) -> None:
        """Send rows to the engine in parts; slots and checksums are columns of the batch."""
        batch = pending.batch
        sizes = _padded(_lengths(batch), self._limits.alignment_bytes)
        starts = range(0, moving.size, PART_ROWS)
        pending.expect(len(starts))
        for start in starts:
            rows = moving[start : start + PART_ROWS]
            part = _Part(rows, slots[rows], sizes[rows], checksums[rows])
            check = self._check_read if batch.op is Op.READ else self._check_write
            offsets = part.slots.astype(np.uint64) * np.uint64(self._settings.slot_bytes)
            self._with.engine.submit(
                IoRequest(
                    write=batch.op is Op.WRITE,
                    fds=self._fds[batch.databases[rows]],
                    offsets=offsets + np.uint64(DATA_OFFSET),
                    addresses=_addresses(batch)[rows],
                    lengths=part.sizes,
                    on_complete=functools.partial(self._hand_over, pending, part, check),
                )
            )

    def _hand_over(
        self,
        pending: PendingBatch,
        part: _Part,
        check: Callable[[PendingBatch, _Part, NDArray[np.int32]], None],
        results: NDArray[np.int32],
    ) -> None:
        """Run on the engine's thread: leave the rest to a checker."""

        def work() -> None:
            try:
                check(pending, part, results)
            finally:
                self._settle(pending)

        self._with.checkers.put(work)

    def _check_read(self, pending: PendingBatch, part: _Part, results: NDArray[np.int32]) -> None:
        batch, rows = pending.batch, part.rows
        status = np.full(rows.size, Status.OK, dtype=np.uint8)
        status[results < 0] = Status.IO_ERROR
        # The slab ends early or the device stopped short: the value is not all there.
        status[(results >= 0) & (results != part.sizes)] = Status.CORRUPT
        read = np.flatnonzero(status == Status.OK)
        if self._settings.checksums:
            status[read[self._digests(batch, rows[read]) != part.checksums[read]]] = Status.CORRUPT
        corrupt = status == Status.CORRUPT
        for database, here in self._in_part(batch, rows):
            bad = here[corrupt[here]]
            with database.table.lock:
                self._lose(database, batch.keys[rows[bad]], part.slots[bad])
                database.table.unpin(part.slots[here])
        pending.status[rows] = status
        self.count("corrupt", int(corrupt.sum()))
        name = "scrubbed_bytes" if batch.token == SCRUB_TOKEN else "bytes_read"
        self._count_io(name, batch, rows, results, status == Status.OK)

    def _check_write(self, pending: PendingBatch, part: _Part, results: NDArray[np.int32]) -> None:
        try:
            self._keep_written(pending, part, results)
        finally:
            self._with.groups.release(pending.batch.namespace, part.rows.size)

    def _keep_written(self, pending: PendingBatch, part: _Part, results: NDArray[np.int32]) -> None:
        batch, rows = pending.batch, part.rows
        written = results == part.sizes
        digests = np.zeros(rows.size, dtype=np.uint64)
        if self._settings.checksums:
            digests[written] = self._digests(batch, rows[written])
        lengths = _lengths(batch)[rows]
        for database, here in self._in_part(batch, rows):
            done, failed = here[written[here]], here[~written[here]]
            with database.table.lock:
                pending.status[rows[done]] = database.put(
                    batch.keys[rows[done]],
                    part.slots[done],
                    lengths[done],
                    digests[done],
                    _groups(batch, rows[done]),
                    batch.namespace,
                )
                database.table.give_back(part.slots[failed])
                database.dirty_bytes += int(part.sizes[done].sum(dtype=np.int64))
                if database.dirty_bytes >= self._settings.sync_bytes:
                    self._with.sync_soon()
        pending.status[rows[results == -errno.ENOSPC]] = Status.NO_SPACE
        self._count_io("bytes_written", batch, rows, results, written)

    def _digests(self, batch: Batch, rows: Rows) -> NDArray[np.uint64]:
        return value_checksums(
            batch.keys[rows], batch.databases[rows], _addresses(batch)[rows], _lengths(batch)[rows]
        )

    def count(self, name: str, amount: int) -> None:
        """Add to a counter."""
        if amount:
            with self._lock:
                self._counts[name] += amount

    def _count_io(
        self,
        name: str,
        batch: Batch,
        rows: Rows,
        results: NDArray[np.int32],
        moved: NDArray[np.bool_],
    ) -> None:
        self.count(name, int(_lengths(batch)[rows[moved]].sum(dtype=np.int64)))
        failed = results[(results < 0) & (results != -errno.ECANCELED)]
        if failed.size:
            self.count("io_errors", failed.size)
            _logger.warning(
                "path %s: %d of %d I/Os failed, first with %s",
                self._settings.path,
                failed.size,
                results.size,
                errno.errorcode.get(-int(failed[0]), str(-int(failed[0]))),
            )


def _all_rows(batch: Batch) -> Rows:
    return np.arange(len(batch.databases), dtype=np.int64)


def _lengths(batch: Batch) -> NDArray[np.uint32]:
    if batch.lengths is None:
        raise CardError(f"batch: {batch.op.name} needs lengths")
    return batch.lengths


def _addresses(batch: Batch) -> NDArray[np.uint64]:
    if batch.addresses is None:
        raise CardError(f"batch: {batch.op.name} needs addresses")
    return batch.addresses


def _groups(batch: Batch, rows: Rows) -> NDArray[np.uint64]:
    return np.zeros(rows.size, dtype=np.uint64) if batch.groups is None else batch.groups[rows]


def _padded(lengths: NDArray[np.uint32], alignment: int) -> NDArray[np.uint32]:
    mask = np.uint32(alignment - 1)
    return (lengths + mask) & ~mask

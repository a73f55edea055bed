"""What the slab card does with a batch: plan it, move its bytes, check them.

    plan: look up, pin or allocate ─► engine, part by part ─► xxh3 of each part
                                                                  │ after a batch's last one
                                                     status ◄── keep: journal, index

Parts let the checksums of one overlap the I/O of the next. What is vectorised over entries
(journal, index, pins, counters) costs about the same for few as for many and is done once
a batch.

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
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import CardError
from adp_kv.units import MiB
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

PART_BYTES: Final = 8 * MiB
"""Of I/O in a part with more than one entry."""

_MAX_PART_ROWS: Final = 256

SCRUB_TOKEN: Final = -1
"""The token of a batch that reads to find damage, not for a reader."""


@dataclass(slots=True)
class _Transfer:
    """The entries of a batch whose bytes move.

    Attributes:
        pending: their batch.
        rows: int64 [k], positions in the batch.
        slots: int64 [k], pinned (READ) or allocated (WRITE).
        sizes: uint32 [k], bytes of I/O: lengths padded to the alignment.
        expected: uint64 [k], checksums that a READ must have.
        digests: uint64 [k], checksums of what was moved; 0 where they are off.
        results: int32 [k], bytes moved or -errno.
        parts_left: parts that have not ended.
    """

    pending: PendingBatch
    rows: Rows
    slots: Locations
    sizes: NDArray[np.uint32]
    expected: NDArray[np.uint64]
    parts_left: int
    digests: NDArray[np.uint64] = field(init=False)
    results: NDArray[np.int32] = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.digests = np.zeros(self.rows.size, dtype=np.uint64)
        self.results = np.full(self.rows.size, -errno.EIO, dtype=np.int32)

    def end_part(self) -> bool:
        """Return whether it was the last."""
        with self.lock:
            self.parts_left -= 1
            return self.parts_left == 0


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
                taken, why = database.allocate(rows.size)
                self._with.evictor.check_room(database)
            slots[rows[: taken.size]] = taken
            pending.status[rows[taken.size :]] = why
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
        if not moving.size:
            return
        batch = pending.batch
        sizes = _padded(_lengths(batch)[moving], self._limits.alignment_bytes)
        parts = _cut(sizes)
        mine = slots[moving]
        transfer = _Transfer(pending, moving, mine, sizes, checksums[moving], len(parts))
        pending.expect(1)
        fds = self._fds[batch.databases[moving]]
        offsets = mine.astype(np.uint64) * np.uint64(self._settings.slot_bytes)
        offsets += np.uint64(DATA_OFFSET)
        addresses = _addresses(batch)[moving]
        for part in parts:
            self._with.engine.submit(
                IoRequest(
                    write=batch.op is Op.WRITE,
                    fds=fds[part],
                    offsets=offsets[part],
                    addresses=addresses[part],
                    lengths=sizes[part],
                    on_complete=functools.partial(self._hand_over, transfer, part),
                )
            )

    def _hand_over(self, transfer: _Transfer, part: slice, results: NDArray[np.int32]) -> None:
        """Run on the engine's thread: leave what takes time to a checker."""
        if self._settings.checksums:
            self._with.checkers.put(functools.partial(self._check, transfer, part, results))
            return
        transfer.results[part] = results
        if transfer.end_part():
            self._with.checkers.put(functools.partial(self._finish, transfer))

    def _check(self, transfer: _Transfer, part: slice, results: NDArray[np.int32]) -> None:
        """Compute a part's checksums; whoever ends the last part finishes the batch."""
        try:
            batch, rows = transfer.pending.batch, transfer.rows[part]
            whole = np.flatnonzero(results == transfer.sizes[part])
            chosen = rows[whole]
            digests = transfer.digests[part]
            digests[whole] = value_checksums(
                batch.keys[chosen],
                batch.databases[chosen],
                _addresses(batch)[chosen],
                _lengths(batch)[chosen],
            )
            transfer.results[part] = results  # last: a part that broke stays EIO
        finally:
            if transfer.end_part():
                self._finish(transfer)

    def _finish(self, transfer: _Transfer) -> None:
        pending = transfer.pending
        try:
            if pending.batch.op is Op.READ:
                self._keep_read(transfer)
            else:
                self._keep_written(transfer)
        finally:
            if pending.batch.op is Op.WRITE:
                self._with.groups.release(pending.batch.namespace, transfer.rows.size)
            self._settle(pending)

    def _keep_read(self, transfer: _Transfer) -> None:
        batch, rows, results = transfer.pending.batch, transfer.rows, transfer.results
        status = np.full(rows.size, Status.OK, dtype=np.uint8)
        # The slab ends early or the device stopped short: the value is not all there.
        corrupt = results != transfer.sizes
        if self._settings.checksums:
            corrupt |= transfer.digests != transfer.expected
        failed = results < 0
        corrupt &= ~failed
        status[corrupt] = Status.CORRUPT
        status[failed] = Status.IO_ERROR
        for database, here in self._in_part(batch, rows):
            bad = here[corrupt[here]]
            with database.table.lock:
                self._lose(database, batch.keys[rows[bad]], transfer.slots[bad])
                database.table.unpin(transfer.slots[here])
        transfer.pending.status[rows] = status
        self.count("corrupt", int(np.count_nonzero(corrupt)))
        name = "scrubbed_bytes" if batch.token == SCRUB_TOKEN else "bytes_read"
        self._count_io(name, batch, rows, results, status == Status.OK)

    def _keep_written(self, transfer: _Transfer) -> None:
        pending, rows, results = transfer.pending, transfer.rows, transfer.results
        batch = pending.batch
        written = results == transfer.sizes
        lengths = _lengths(batch)[rows]
        for database, here in self._in_part(batch, rows):
            done, failed = here[written[here]], here[~written[here]]
            with database.table.lock:
                pending.status[rows[done]] = database.put(
                    batch.keys[rows[done]],
                    transfer.slots[done],
                    lengths[done],
                    transfer.digests[done],
                    _groups(batch, rows[done]),
                    batch.namespace,
                )
                database.table.give_back(transfer.slots[failed])
                database.dirty_bytes += int(transfer.sizes[done].sum(dtype=np.int64))
                if database.dirty_bytes >= self._settings.sync_bytes:
                    self._with.sync_soon()
        pending.status[rows[results == -errno.ENOSPC]] = Status.NO_SPACE
        self._count_io("bytes_written", batch, rows, results, written)

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


def _cut(sizes: NDArray[np.uint32]) -> list[slice]:
    """Return parts of at most PART_BYTES each, but for one of a single longer entry."""
    rows = max(1, min(_MAX_PART_ROWS, PART_BYTES // int(sizes.max())))
    return [slice(start, start + rows) for start in range(0, sizes.size, rows)]

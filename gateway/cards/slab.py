"""The embedded card: slabs of fixed slots on local NVMe, files or block devices.

    submit ──► planner: look up, pin or allocate ──► I/O engine: O_DIRECT
                                                         │ parts of PART_ROWS entries
    on_done ◄── checkers: xxh3, journal, index ◄─────────┘

A batch is planned at once and runs in parts, so that checking one overlaps the I/O of
the next. Every value has xxh3_64 (seeded with key and database), length and key in its
journal record, and each read is checked after its I/O: a torn, lost or misplaced write
is CORRUPT, which deletes the entry. So nothing needs to be ordered by fsync.

A WRITE goes to a free slot, then into the journal, then into the index, then is answered;
the slot of a replaced value is let go after that and not written while read. A full
database answers NO_SPACE, to overwrites too: they need a slot until the old one is let go.

Threads. One planner, the engine's, `checker_threads`, one that syncs. A database's table
has its lock, held for vectorised work and journal appends alone.
Durability. Answered writes survive the process. The sync thread calls fdatasync each
`sync_interval_s` or `sync_bytes`, so a power loss takes about that much (missing or
CORRUPT, never wrong). With checksums=False that promise holds for a killed process
only: after a power loss or on a bad device wrong bytes may be read.
Failure scope. Entries: what the device refuses is IO_ERROR for that entry; a full file
system under the journal is NO_SPACE.
"""

from __future__ import annotations

import errno
import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from adp_kv.errors import CardError
from adp_kv.metrics import Histogram
from gateway.cards.base import Batch, Card, CardLimits, OnDone, Op, Status
from gateway.cards.batches import (
    PendingBatch,
    Rows,
    WorkerPool,
    by_database,
    check_batch,
    value_checksums,
)
from gateway.cards.direct_io import alignment_of
from gateway.cards.engines import start_engine
from gateway.cards.index import ABSENT, Locations
from gateway.cards.io_engine import IoEngine, IoRequest
from gateway.cards.journal import Kind
from gateway.cards.slab_settings import SlabSettings
from gateway.cards.slab_store import DATA_OFFSET, Database, Store, StoreSpec, open_store

_logger: Final = logging.getLogger(__name__)

PART_ROWS: Final = 64
"""Entries that are checked and journalled together; also about one queue's depth."""

_STOP_TIMEOUT_S: Final = 5.0


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


class SlabCard(Card):
    """A card of slab files or block devices (see the module)."""

    def __init__(self, settings: SlabSettings) -> None:
        """Make a closed card; touches nothing on disk.

        Args:
            settings: of the card.
        """
        self._settings = settings
        self._path = Path(settings.path)
        alignment = settings.alignment_bytes or max(
            alignment_of(Path(device)) for device in settings.devices or (settings.path,)
        )
        self._limits = CardLimits(settings.slot_bytes, alignment, settings.num_databases)
        self._store: Store | None = None
        self._databases: list[Database] = []
        self._state = threading.Condition()
        self._outstanding = 0
        self._abandoning = False
        self._counts = dict.fromkeys(("bytes_read", "bytes_written", "corrupt", "io_errors"), 0)

    @property
    @override
    def limits(self) -> CardLimits:
        return self._limits

    @property
    def engine_name(self) -> str:
        """Which executor runs the I/O: "io_uring" or "threads"; "" while closed."""
        return self._engine.name if self._store is not None else ""

    @override
    def open(self, on_done: OnDone) -> None:
        s = self._settings
        if self._store is not None:
            raise CardError(f"path {s.path}: this card is open already")
        slots = s.slots_per_database
        store = open_store(
            StoreSpec(self._path, s.devices, s.slot_bytes, s.num_databases, slots, s.lock_wait_s)
        )
        try:
            self._engine: IoEngine = start_engine(s.io_engine, s.queue_depth, s.io_threads)
        except CardError:
            store.close()
            raise
        self._databases = store.databases
        self._fds: NDArray[np.int32] = np.array(
            [database.fd for database in store.databases], dtype=np.int32
        )
        self._on_done = on_done
        self._abandoning = False
        self._planner = WorkerPool("adp-card-plan", 1)
        self._checkers = WorkerPool("adp-card-check", s.checker_threads)
        self._sync_wake = threading.Event()
        self._sync_stop = False
        self._sync_thread = threading.Thread(target=self._sync, name="adp-card-sync", daemon=True)
        self._sync_thread.start()
        self._store = store
        for database in store.databases:
            if database.journal.discarded_bytes:
                _logger.warning(
                    "path %s: %d bytes at the end of a journal were not whole and are forgotten",
                    s.path,
                    database.journal.discarded_bytes,
                )

    @override
    def register(self, address: int, num_bytes: int) -> None:
        if self._store is not None:
            self._engine.register(address, num_bytes)

    @override
    def unregister(self) -> None:
        if self._store is not None:
            self._engine.unregister()

    @override
    def submit(self, batch: Batch) -> None:
        check_batch(batch, self._limits)
        with self._state:
            if self._store is None:
                raise CardError(f"path {self._settings.path}: the card is not open")
            self._outstanding += 1
        pending = PendingBatch(batch, self._on_done)
        self._planner.put(functools.partial(self._plan, pending))

    @override
    def stats(self) -> dict[str, int]:
        tables = [database.table for database in self._databases]
        with self._state:
            counts = dict(self._counts)
        return {
            "values": sum(len(table) for table in tables),
            "free_slots": sum(table.num_free for table in tables),
            "journal_bytes": sum(d.journal.size_bytes for d in self._databases),
            "journal_failures": sum(d.journal_failures for d in self._databases),
            **counts,
        }

    @override
    def latencies(self) -> dict[int, Histogram]:
        return {i: self._engine.latencies.of(d.fd) for i, d in enumerate(self._databases)}

    @override
    def close(self) -> None:
        with self._state:
            store, self._store = self._store, None
            if store is None:
                return
            deadline = time.monotonic() + self._settings.close_timeout_s
            while self._outstanding and time.monotonic() < deadline:
                self._state.wait(max(0.0, deadline - time.monotonic()))
            self._abandoning = True
        # The planner feeds the engine and the engine the checkers: stop them in that order.
        quiet = self._planner.stop(_STOP_TIMEOUT_S)
        quiet &= self._engine.stop(_STOP_TIMEOUT_S)
        quiet &= self._checkers.stop(_STOP_TIMEOUT_S)
        self._sync_stop = True
        self._sync_wake.set()
        self._sync_thread.join(_STOP_TIMEOUT_S)
        quiet &= not self._sync_thread.is_alive()
        self._databases = []
        if not quiet:
            # The descriptors stay open, and locked, as long as I/O may go through them.
            _logger.error(
                "path %s: I/O did not end in time; end this process, its memory is in use",
                self._settings.path,
            )
            return
        store.close()

    def _settle(self, pending: PendingBatch) -> None:
        if pending.settle():
            with self._state:
                self._outstanding -= 1
                self._state.notify_all()

    def _plan(self, pending: PendingBatch) -> None:
        plans: dict[Op, Callable[[PendingBatch], None]] = {
            Op.EXIST: self._plan_exist,
            Op.READ: self._plan_read,
            Op.WRITE: self._plan_write,
            Op.DELETE: self._plan_delete,
        }
        try:
            if not self._abandoning:
                plans[pending.batch.op](pending)
        finally:
            self._settle(pending)

    def _groups(self, batch: Batch, rows: Rows) -> list[tuple[Database, Rows]]:
        return [(self._databases[i], mine) for i, mine in by_database(batch.databases, rows)]

    def _plan_exist(self, pending: PendingBatch) -> None:
        batch = pending.batch
        for database, rows in self._groups(batch, _all_rows(batch)):
            with database.table.lock:
                there = database.table.find(batch.keys[rows]) >= 0
            pending.status[rows] = np.where(there, Status.OK, Status.ABSENT)

    def _plan_delete(self, pending: PendingBatch) -> None:
        batch = pending.batch
        for database, rows in self._groups(batch, _all_rows(batch)):
            keys = batch.keys[rows]
            with database.table.lock:
                slots = database.table.find(keys)
                there = slots >= 0
                pending.status[rows] = np.where(there, Status.OK, Status.ABSENT)
                # The record before the slot is free: else its next value could be lost to it.
                if database.record(Kind.DELETE, keys[there], slots[there]) is Status.OK:
                    database.table.delete(keys)
                else:
                    pending.status[rows[there]] = Status.IO_ERROR

    def _plan_read(self, pending: PendingBatch) -> None:
        batch = pending.batch
        lengths = _lengths(batch)
        slots = np.full(len(lengths), ABSENT, dtype=np.int64)
        checksums = np.zeros(len(lengths), dtype=np.uint64)
        for database, rows in self._groups(batch, _all_rows(batch)):
            table = database.table
            with table.lock:
                slots[rows], status, checksums[rows] = table.pin(batch.keys[rows], lengths[rows])
                status[lengths[rows] > self._limits.max_value_bytes] = Status.TOO_LARGE
                corrupt = rows[status == Status.CORRUPT]
                database.drop(batch.keys[corrupt], slots[corrupt])
            pending.status[rows] = status
            self._count("corrupt", corrupt.size)
        moving = np.flatnonzero((pending.status == Status.OK) & (lengths > 0))
        pending.status[moving] = Status.IO_ERROR  # until checked, whatever happens on the way
        self._launch(pending, moving, slots, checksums)

    def _plan_write(self, pending: PendingBatch) -> None:
        batch = pending.batch
        lengths = _lengths(batch)
        pending.status[lengths > self._limits.max_value_bytes] = Status.TOO_LARGE
        slots = np.full(len(lengths), ABSENT, dtype=np.int64)
        fitting = np.flatnonzero(lengths <= self._limits.max_value_bytes)
        for database, rows in self._groups(batch, fitting):
            self._plan_markers(pending, database, rows[lengths[rows] == 0])
            moving = rows[lengths[rows] > 0]
            with database.table.lock:
                taken = database.table.allocate(moving.size)
            slots[moving[: taken.size]] = taken
            pending.status[moving[taken.size :]] = Status.NO_SPACE
        self._launch(pending, np.flatnonzero(slots >= 0), slots, np.zeros_like(batch.keys[:, 0]))

    def _plan_markers(self, pending: PendingBatch, database: Database, rows: Rows) -> None:
        keys = pending.batch.keys[rows]
        slots = np.full(rows.size, database.table.marker, dtype=np.int64)
        with database.table.lock:
            pending.status[rows] = database.put(
                keys, slots, np.zeros(rows.size, np.uint32), np.zeros(rows.size, np.uint64)
            )

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
            self._engine.submit(
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

        self._checkers.put(work)

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
        for database, mine in self._groups(batch, rows):
            here = np.isin(rows, mine, assume_unique=True)
            bad = here & corrupt
            with database.table.lock:
                database.drop(batch.keys[rows[bad]], part.slots[bad])
                database.table.unpin(part.slots[here])
        pending.status[rows] = status
        self._count("corrupt", int(corrupt.sum()))
        self._count_io("bytes_read", batch, rows, results, status == Status.OK)

    def _check_write(self, pending: PendingBatch, part: _Part, results: NDArray[np.int32]) -> None:
        batch, rows = pending.batch, part.rows
        written = results == part.sizes
        digests = np.zeros(rows.size, dtype=np.uint64)
        if self._settings.checksums:
            digests[written] = self._digests(batch, rows[written])
        lengths = _lengths(batch)[rows]
        for database, mine in self._groups(batch, rows):
            here = np.isin(rows, mine, assume_unique=True)
            done = here & written
            with database.table.lock:
                pending.status[rows[done]] = database.put(
                    batch.keys[rows[done]], part.slots[done], lengths[done], digests[done]
                )
                database.table.give_back(part.slots[here & ~written])
                database.dirty_bytes += int(part.sizes[done].sum(dtype=np.int64))
                if database.dirty_bytes >= self._settings.sync_bytes:
                    self._sync_wake.set()
        pending.status[rows[results == -errno.ENOSPC]] = Status.NO_SPACE
        self._count_io("bytes_written", batch, rows, results, written)

    def _digests(self, batch: Batch, rows: Rows) -> NDArray[np.uint64]:
        return value_checksums(
            batch.keys[rows], batch.databases[rows], _addresses(batch)[rows], _lengths(batch)[rows]
        )

    def _count(self, name: str, amount: int) -> None:
        if amount:
            with self._state:
                self._counts[name] += amount

    def _count_io(
        self,
        name: str,
        batch: Batch,
        rows: Rows,
        results: NDArray[np.int32],
        moved: NDArray[np.bool_],
    ) -> None:
        self._count(name, int(_lengths(batch)[rows[moved]].sum(dtype=np.int64)))
        failed = results[(results < 0) & (results != -errno.ECANCELED)]
        if failed.size:
            self._count("io_errors", failed.size)
            _logger.warning(
                "path %s: %d of %d I/Os failed, first with %s",
                self._settings.path,
                failed.size,
                results.size,
                errno.errorcode.get(-int(failed[0]), str(-int(failed[0]))),
            )

    def _sync(self) -> None:
        while True:
            self._sync_wake.wait(self._settings.sync_interval_s)
            self._sync_wake.clear()
            last = self._sync_stop
            for database in self._databases:
                try:
                    database.sync()
                except OSError as error:
                    self._count("io_errors", 1)
                    _logger.warning("path %s: sync: %s", self._settings.path, error.strerror)
            if last:
                return


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


def _padded(lengths: NDArray[np.uint32], alignment: int) -> NDArray[np.uint32]:
    mask = np.uint32(alignment - 1)
    return (lengths + mask) & ~mask

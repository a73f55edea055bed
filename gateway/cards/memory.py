"""The reference card: the contract of `gateway.cards.base` in RAM.

    submit ─► planner: look up, pin or allocate ─► shares ─► copiers ─► the last one: answer

Values live in one anonymous mapping of fixed slots. A batch is planned as a whole, so that
its arrays cost the interpreter once, and cut into one share of about equal bytes a copier.
Values that are neighbours in the card's and in the caller's memory (written and read in
one order, of a length that is the stride) are copied in one call that holds no GIL:
copiers then run at memory speed; scattered values pay about 1 µs of GIL each.
The oracle of the contract's tests, and the store under benchmarks of what is above.

Threads. One planner, which runs batches in the order of submit(), and `copy_threads`
copiers; a database's table has its lock.
Durability. None: values end with the process.
Failure scope. Entries; a batch whose plan or copy breaks is IO_ERROR where it was not done.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import logging
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from adp_kv.errors import CardError, ConfigError
from adp_kv.units import KiB, MiB, align_up
from adp_kv.wire.keys import KeyArray
from gateway.cards.base import Batch, Card, CardLimits, OnDone, Op, Status, StatusArray
from gateway.cards.batches import (
    PendingBatch,
    Rows,
    WorkerPool,
    by_database,
    check_batch,
    value_checksums,
)
from gateway.cards.evictor import Evictor
from gateway.cards.memory_shelf import MemoryShelf
from gateway.cards.retention import RetentionSettings
from gateway.cards.slots import SlotTable

_logger: Final = logging.getLogger(__name__)

_MAX_DATABASES: Final = 1 << 16
_MAX_VALUE_BYTES: Final = 1 << 31
_STRIDE_ALIGNMENT: Final = 64  # cache line
_CLOSE_TIMEOUT_S: Final = 30.0
_MADV_POPULATE_WRITE: Final = 23  # not in Python's mmap yet
_MIN_SHARE_BYTES: Final = 1 * MiB  # less is not worth waking another thread
_MAX_COPY_THREADS: Final = 12  # more only take from the device what they win

_memmove: Final = ctypes.CDLL(None).memmove
_memmove.restype = None
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class MemorySettings(RetentionSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the memory card.

    Attributes:
        capacity_bytes: memory for values, all databases together.
        max_value_bytes: the longest value; every value takes this much.
        num_databases: independent key spaces; they share the capacity evenly.
        copy_threads: threads that copy; 0: three quarters of the cores, at most 12.
        verify: check a checksum on every read, as a card on a device does.
        prefault: touch all memory in open(), so that first writes run at full speed.
    """

    capacity_bytes: int
    max_value_bytes: int = 256 * KiB
    num_databases: int = 1
    copy_threads: int = 0
    verify: bool = False
    prefault: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_databases <= _MAX_DATABASES:
            raise ConfigError(f"num_databases: {self.num_databases} is not in 1..{_MAX_DATABASES}")
        if not 1 <= self.max_value_bytes <= _MAX_VALUE_BYTES:
            raise ConfigError(
                f"max_value_bytes: {self.max_value_bytes} is not in 1..{_MAX_VALUE_BYTES}"
            )
        if self.copy_threads < 0:
            raise ConfigError(f"copy_threads: {self.copy_threads}, at least 0")
        if self.slots_per_database < 1:
            raise ConfigError(
                f"capacity_bytes: {self.capacity_bytes} has no room for one value of "
                f"{self.max_value_bytes} bytes in each of {self.num_databases} databases"
            )
        self.check_retention(self.stride_bytes)

    @property
    def stride_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return align_up(self.max_value_bytes, _STRIDE_ALIGNMENT)

    @property
    def num_copiers(self) -> int:
        """Threads that copy."""
        cores = len(os.sched_getaffinity(0))
        return self.copy_threads or max(1, min(_MAX_COPY_THREADS, cores * 3 // 4))

    @property
    def slots_per_database(self) -> int:
        """Values a database holds, not counting markers."""
        return self.capacity_bytes // self.num_databases // self.stride_bytes


_Run: TypeAlias = tuple[int, int, int]
"""A copy: target, source, bytes."""


@dataclass(slots=True)
class _Transfer:
    """The copies of one READ or WRITE batch.

    Attributes:
        rows: int64 [k], rows of the batch whose bytes move.
        addresses: uint64 [k] of their memory outside the card; lengths: uint32 [k].
        checksums: uint64 [k] of what was moved, where the card verifies.
        finish: run once, by the thread that ends the last share.
        whole: no share has broken.
        shares_left: shares that have not ended.
    """

    pending: PendingBatch
    rows: Rows
    addresses: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    checksums: NDArray[np.uint64]
    finish: Callable[[_Transfer], None]
    shares_left: int = 0
    whole: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)


class MemoryCard(Card):
    """A card in RAM (see the module)."""

    def __init__(self, settings: MemorySettings) -> None:
        """Make a closed card."""
        self._settings = settings
        self._limits = CardLimits(
            settings.max_value_bytes,
            1,
            settings.num_databases,
            settings.uncommitted_s,
            exclusive=True,
        )
        self._planner: WorkerPool | None = None
        self._num_copiers = settings.num_copiers
        names = ("bytes_read", "bytes_written", "corrupt", "io_errors", "dropped_by_quota")
        self._counts = dict.fromkeys(names, 0)
        self._counts_lock = threading.Lock()
        self._plans: dict[Op, Callable[[PendingBatch], None]] = {
            Op.EXIST: self._exist,
            Op.READ: self._read,
            Op.WRITE: self._write,
            Op.DELETE: self._delete,
        }

    @property
    @override
    def limits(self) -> CardLimits:
        return self._limits

    @override
    def open(self, on_done: OnDone) -> None:
        if self._planner is not None:
            raise CardError("memory card: already open")
        s = self._settings
        slots = s.slots_per_database
        try:
            self._values = mmap.mmap(-1, slots * s.num_databases * s.stride_bytes)
        except OSError as error:
            raise CardError(
                f"capacity_bytes: no room for {s.capacity_bytes} bytes: {error.strerror}"
            ) from error
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._values.madvise(mmap.MADV_HUGEPAGE)
        if s.prefault:
            with contextlib.suppress(OSError):  # before Linux 5.14
                self._values.madvise(_MADV_POPULATE_WRITE)
        base = np.frombuffer(self._values, dtype=np.uint8).ctypes.data
        first = np.arange(s.num_databases, dtype=np.uint64) * np.uint64(slots * s.stride_bytes)
        self._bases = first + np.uint64(base)
        self._groups = s.new_groups(slots * s.num_databases, s.stride_bytes)
        self._tables = [SlotTable(slots, self._groups) for _ in range(s.num_databases)]
        self._shelves = [MemoryShelf(t, i, self._groups) for i, t in enumerate(self._tables)]
        self._evictor = Evictor(self._groups, self._shelves, s)
        self._on_done = on_done
        self._copiers = WorkerPool("adp-card-copy", self._num_copiers)
        self._planner = WorkerPool("adp-card-plan", 1)

    @override
    def register(self, address: int, num_bytes: int) -> None:
        """Nothing to gain for a copy."""

    @override
    def unregister(self) -> None:
        """Nothing was announced."""

    @override
    def submit(self, batch: Batch) -> None:
        if self._planner is None:
            raise CardError("memory card: not open")
        check_batch(batch, self._limits)
        pending = PendingBatch(batch, self._on_done)
        self._planner.put(functools.partial(self._plan, pending))

    @override
    def stats(self) -> dict[str, int]:
        tables = self._tables if self._planner is not None else []
        with self._counts_lock:
            return {
                "values": sum(len(table) for table in tables),
                "free_slots": sum(table.num_free for table in tables),
                **(self._evictor.stats() if tables else {}),
                **self._counts,
            }

    @override
    def close(self) -> None:
        if self._planner is None:
            return
        planner, self._planner = self._planner, None
        self._evictor.stop(_CLOSE_TIMEOUT_S)
        if not (planner.stop(_CLOSE_TIMEOUT_S) and self._copiers.stop(_CLOSE_TIMEOUT_S)):
            _logger.error("memory card: copies did not end within %g s", _CLOSE_TIMEOUT_S)
            return
        self._tables = []
        self._values.close()

    def _plan(self, pending: PendingBatch) -> None:
        try:
            self._plans[pending.batch.op](pending)
        except BaseException:
            pending.settle()
            raise

    def _exist(self, pending: PendingBatch) -> None:
        self._ask_tables(pending, SlotTable.exists)

    def _delete(self, pending: PendingBatch) -> None:
        self._ask_tables(pending, SlotTable.delete)

    def _ask_tables(
        self,
        pending: PendingBatch,
        ask: Callable[[SlotTable, KeyArray], NDArray[np.bool_]],
    ) -> None:
        """Answer a batch that moves no bytes: OK where the table says so of a key."""
        batch = pending.batch
        for database, rows in by_database(batch.databases, _all_rows(batch)):
            table = self._tables[database]
            with table.lock:
                there = ask(table, batch.keys[rows])
            pending.status[rows] = np.where(there, Status.OK, Status.ABSENT)
        pending.settle()

    def _read(self, pending: PendingBatch) -> None:
        batch, status = pending.batch, pending.status
        lengths, _ = _columns(batch)
        slots = np.empty(len(lengths), dtype=np.int64)
        checksums = np.empty(len(lengths), dtype=np.uint64)
        parts = list(by_database(batch.databases, _all_rows(batch)))
        for database, rows in parts:
            table = self._tables[database]
            with table.lock:
                slots[rows], status[rows], checksums[rows] = table.pin(
                    batch.keys[rows], lengths[rows]
                )
                table.hold(slots[rows[status[rows] == Status.OK]])
        status[lengths > self._limits.max_value_bytes] = Status.TOO_LARGE
        pinned = status == Status.OK

        def finish(transfer: _Transfer) -> None:
            if not transfer.whole:
                status[transfer.rows] = Status.IO_ERROR
            elif self._settings.verify:
                bad = transfer.checksums != checksums[transfer.rows]
                status[transfer.rows[bad]] = Status.CORRUPT
            corrupt = status == Status.CORRUPT
            for database, rows in parts:
                table = self._tables[database]
                with table.lock:
                    if corrupt[rows].any():
                        wrong = rows[corrupt[rows]]
                        self._evictor.condemn(table.row_at(slots[wrong]))
                        table.delete(batch.keys[wrong], slots[wrong])
                    table.unpin(slots[rows[pinned[rows]]])
            self._count(
                bytes_read=int(lengths[status == Status.OK].sum()), corrupt=int(corrupt.sum())
            )

        moving = np.flatnonzero(pinned & (lengths > 0))
        sources = self._addresses(batch.databases[moving], slots[moving])
        transfer = _transfer(pending, moving, finish)
        self._move(transfer, transfer.addresses, sources)

    def _write(self, pending: PendingBatch) -> None:
        batch, status = pending.batch, pending.status
        lengths, _ = _columns(batch)
        marker = self._tables[0].marker
        slots = np.full(len(lengths), marker, dtype=np.int64)
        done = lengths <= self._limits.max_value_bytes
        status[~done] = Status.TOO_LARGE
        done, num_reserved = self._within_quota(batch, done, status)
        parts = list(by_database(batch.databases, _all_rows(batch)))
        for database, rows in parts:
            table = self._tables[database]
            wanting = rows[done[rows] & (lengths[rows] > 0)]
            with table.lock:
                taken = table.allocate(wanting.size)
                self._evictor.check_room(self._shelves[database])
            slots[wanting[: taken.size]] = taken
            status[wanting[taken.size :]] = Status.NO_SPACE
            done[wanting[taken.size :]] = False

        def finish(transfer: _Transfer) -> None:
            checksums = np.zeros(len(lengths), dtype=np.uint64)
            checksums[transfer.rows] = transfer.checksums
            for database, rows in parts:
                table, mine = self._tables[database], rows[done[rows]]
                with table.lock:
                    if transfer.whole:
                        self._shelves[database].put(batch, mine, slots[mine], checksums[mine])
                    else:
                        table.give_back(slots[mine])
            self._groups.release(batch.namespace, num_reserved)
            if transfer.whole:
                status[done] = Status.OK
                self._count(bytes_written=int(lengths[done].sum()))

        moving = np.flatnonzero(done & (lengths > 0))
        targets = self._addresses(batch.databases[moving], slots[moving])
        transfer = _transfer(pending, moving, finish)
        self._move(transfer, targets, transfer.addresses)

    def _within_quota(
        self, batch: Batch, done: NDArray[np.bool_], status: StatusArray
    ) -> tuple[NDArray[np.bool_], int]:
        """Return which entries the namespace may still write, and how many slots are reserved."""
        wanting = np.flatnonzero(done & (_columns(batch)[0] > 0))
        allowed = self._groups.reserve(batch.namespace, wanting.size)
        self._evictor.check_quota()
        status[wanting[allowed:]] = Status.NO_SPACE
        self._count(dropped_by_quota=wanting.size - allowed)
        done[wanting[allowed:]] = False
        return done, allowed

    def _move(
        self, transfer: _Transfer, targets: NDArray[np.uint64], sources: NDArray[np.uint64]
    ) -> None:
        """Hand shares of about equal bytes to the copiers."""
        bounds = _cut(transfer.lengths, self._num_copiers)
        runs = _runs(targets, sources, transfer.lengths, bounds)
        transfer.shares_left = len(runs)
        for share, rows in zip(runs, itertools.pairwise(bounds), strict=True):
            self._copiers.put(functools.partial(self._copy_share, transfer, share, slice(*rows)))

    def _copy_share(self, transfer: _Transfer, runs: list[_Run], rows: slice) -> None:
        whole = False
        try:
            for target, source, num_bytes in runs:
                _memmove(target, source, num_bytes)
            if self._settings.verify:
                batch, mine = transfer.pending.batch, transfer.rows[rows]
                transfer.checksums[rows] = value_checksums(
                    batch.keys[mine],
                    batch.databases[mine],
                    transfer.addresses[rows],
                    transfer.lengths[rows],
                )
            whole = True
        finally:
            with transfer.lock:
                transfer.whole &= whole
                transfer.shares_left -= 1
                last = transfer.shares_left == 0
            if last:
                self._finish(transfer)

    def _finish(self, transfer: _Transfer) -> None:
        try:
            transfer.finish(transfer)
        finally:
            transfer.pending.settle()

    def _addresses(
        self, databases: NDArray[np.uint16], slots: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        offsets = slots.astype(np.uint64) * np.uint64(self._settings.stride_bytes)
        return offsets + self._bases[databases]

    def _count(self, **amounts: int) -> None:
        with self._counts_lock:
            for name, amount in amounts.items():
                self._counts[name] += amount


def _all_rows(batch: Batch) -> Rows:
    return np.arange(len(batch.databases), dtype=np.int64)


def _columns(batch: Batch) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    if batch.lengths is None or batch.addresses is None:
        raise CardError(f"batch: {batch.op.name} needs addresses and lengths")
    return batch.lengths, batch.addresses


def _transfer(pending: PendingBatch, rows: Rows, finish: Callable[[_Transfer], None]) -> _Transfer:
    lengths, addresses = _columns(pending.batch)
    checksums = np.zeros(rows.size, dtype=np.uint64)
    return _Transfer(pending, rows, addresses[rows], lengths[rows], checksums, finish)


def _cut(lengths: NDArray[np.uint32], most: int) -> list[int]:
    """Return the bounds of at most so many shares of about equal bytes; one for nothing."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if ends.size else 0
    num = max(1, min(most, total // _MIN_SHARE_BYTES, lengths.size))
    cuts = np.searchsorted(ends, np.arange(1, num) * total // num) + 1
    return [0, *sorted(set(cuts.tolist()) - {lengths.size}), lengths.size]


def _runs(
    targets: NDArray[np.uint64],
    sources: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
    bounds: list[int],
) -> list[list[_Run]]:
    """Return each share's copies: values that are neighbours on both sides are one."""
    if not lengths.size:
        return [[]]
    sizes = lengths.astype(np.uint64)
    starts_run = np.ones(lengths.size, dtype=np.bool_)
    starts_run[1:] = (targets[1:] != targets[:-1] + sizes[:-1]) | (
        sources[1:] != sources[:-1] + sizes[:-1]
    )
    starts_run[bounds[1:-1]] = True
    firsts = np.flatnonzero(starts_run)
    totals = np.add.reduceat(sizes, firsts)
    every = list(
        zip(targets[firsts].tolist(), sources[firsts].tolist(), totals.tolist(), strict=True)
    )
    shares = np.searchsorted(firsts, bounds).tolist()
    return [every[a:b] for a, b in itertools.pairwise(shares)]

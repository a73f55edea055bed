"""The reference card: the contract of `gateway.cards.base` in RAM.

Values live in one anonymous mapping of fixed slots. A batch is cut into one share a copy
thread; a share looks its keys up at once, pins what it found, and copies value by value
with the GIL released. Values that are neighbours in the slab and in the caller's memory
(written and read in one order, of a length that is the stride) are copied in one go, so
that many threads run at memory speed; scattered small ones pay about 1 µs of GIL each.
The oracle of the contract's tests, and the store under benchmarks of what is above.

Threads. `copy_threads` of its own; a database's table has its lock.
Durability. None: values end with the process.
Failure scope. Entries; a share that breaks is IO_ERROR.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import threading
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from adp_kv.errors import CardError, ConfigError
from adp_kv.units import KiB, align_up
from gateway.cards.base import Batch, Card, CardLimits, OnDone, Op, Status, StatusArray
from gateway.cards.batches import (
    PendingBatch,
    Rows,
    WorkerPool,
    by_database,
    check_batch,
    value_checksums,
)
from gateway.cards.slots import SlotTable

_logger: Final = logging.getLogger(__name__)

_MAX_DATABASES: Final = 1 << 16
_MAX_VALUE_BYTES: Final = 1 << 31
_STRIDE_ALIGNMENT: Final = 64  # cache line
_CLOSE_TIMEOUT_S: Final = 30.0
_MADV_POPULATE_WRITE: Final = 23  # not in Python's mmap yet

_memmove: Final = ctypes.CDLL(None).memmove
_memmove.restype = None
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class MemorySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the memory card.

    Attributes:
        capacity_bytes: memory for values, all databases together.
        max_value_bytes: the longest value; every value takes this much.
        num_databases: independent key spaces; they share the capacity evenly.
        copy_threads: threads that copy.
        verify: check a checksum on every read, as a card on a device does.
        prefault: touch all memory in open(), so that first writes run at full speed.
    """

    capacity_bytes: int
    max_value_bytes: int = 256 * KiB
    num_databases: int = 1
    copy_threads: int = 2
    verify: bool = False
    prefault: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_databases <= _MAX_DATABASES:
            raise ConfigError(f"num_databases: {self.num_databases} is not in 1..{_MAX_DATABASES}")
        if not 1 <= self.max_value_bytes <= _MAX_VALUE_BYTES:
            raise ConfigError(
                f"max_value_bytes: {self.max_value_bytes} is not in 1..{_MAX_VALUE_BYTES}"
            )
        if self.copy_threads < 1:
            raise ConfigError(f"copy_threads: {self.copy_threads}, at least 1 is needed")
        if self.slots_per_database < 1:
            raise ConfigError(
                f"capacity_bytes: {self.capacity_bytes} has no room for one value of "
                f"{self.max_value_bytes} bytes in each of {self.num_databases} databases"
            )

    @property
    def stride_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return align_up(self.max_value_bytes, _STRIDE_ALIGNMENT)

    @property
    def slots_per_database(self) -> int:
        """Values a database holds, not counting markers."""
        return self.capacity_bytes // self.num_databases // self.stride_bytes


class MemoryCard(Card):
    """A card in RAM (see the module)."""

    def __init__(self, settings: MemorySettings) -> None:
        """Make a closed card."""
        self._settings = settings
        self._limits = CardLimits(settings.max_value_bytes, 1, settings.num_databases)
        self._pool: WorkerPool | None = None
        self._counts = dict.fromkeys(("bytes_read", "bytes_written", "corrupt", "io_errors"), 0)
        self._counts_lock = threading.Lock()

    @property
    @override
    def limits(self) -> CardLimits:
        return self._limits

    @override
    def open(self, on_done: OnDone) -> None:
        if self._pool is not None:
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
        size = slots * s.stride_bytes
        self._bases = [base + i * size for i in range(s.num_databases)]
        self._tables = [SlotTable(slots) for _ in range(s.num_databases)]
        self._on_done = on_done
        self._pool = WorkerPool("adp-card-copy", s.copy_threads)

    @override
    def register(self, address: int, num_bytes: int) -> None:
        """Nothing to gain for a copy."""

    @override
    def unregister(self) -> None:
        """Nothing was announced."""

    @override
    def submit(self, batch: Batch) -> None:
        if self._pool is None:
            raise CardError("memory card: not open")
        check_batch(batch, self._limits)
        pending = PendingBatch(batch, self._on_done)
        n = len(batch.databases)
        shares = min(n, self._settings.copy_threads)
        pending.expect(shares - 1)
        for rows in np.array_split(np.arange(n, dtype=np.int64), shares):
            self._pool.put(functools.partial(self._run_share, pending, rows))

    @override
    def stats(self) -> dict[str, int]:
        tables = self._tables if self._pool is not None else []
        with self._counts_lock:
            return {
                "values": sum(len(table) for table in tables),
                "free_slots": sum(table.num_free for table in tables),
                **self._counts,
            }

    @override
    def close(self) -> None:
        if self._pool is None:
            return
        pool, self._pool = self._pool, None
        if not pool.stop(_CLOSE_TIMEOUT_S):
            _logger.error("memory card: copies did not end within %g s", _CLOSE_TIMEOUT_S)
            return
        self._tables = []
        self._values.close()

    def _run_share(self, pending: PendingBatch, rows: Rows) -> None:
        runs = {
            Op.EXIST: self._exist,
            Op.READ: self._read,
            Op.WRITE: self._write,
            Op.DELETE: self._delete,
        }
        try:
            for database, mine in by_database(pending.batch.databases, rows):
                pending.status[mine] = runs[pending.batch.op](pending.batch, database, mine)
        finally:
            pending.settle()

    def _exist(self, batch: Batch, database: int, rows: Rows) -> StatusArray:
        table = self._tables[database]
        with table.lock:
            there = table.find(batch.keys[rows]) >= 0
        return np.where(there, Status.OK, Status.ABSENT).astype(np.uint8)

    def _delete(self, batch: Batch, database: int, rows: Rows) -> StatusArray:
        table = self._tables[database]
        with table.lock:
            removed = table.delete(batch.keys[rows])
        return np.where(removed, Status.OK, Status.ABSENT).astype(np.uint8)

    def _read(self, batch: Batch, database: int, rows: Rows) -> StatusArray:
        keys, lengths, addresses = _columns(batch, rows)
        table = self._tables[database]
        with table.lock:
            slots, status, sums = table.pin(keys, lengths)
            status[lengths > self._limits.max_value_bytes] = Status.TOO_LARGE
            pinned = status == Status.OK
        _copy(addresses[pinned], self._addresses(database, slots[pinned]), lengths[pinned])
        if self._settings.verify:
            check = np.flatnonzero(pinned & (lengths > 0))
            found = value_checksums(
                keys[check], batch.databases[rows[check]], addresses[check], lengths[check]
            )
            status[check[found != sums[check]]] = Status.CORRUPT
        with table.lock:
            corrupt = status == Status.CORRUPT
            table.delete(keys[corrupt], slots[corrupt])
            table.unpin(slots[pinned])
        self._count(bytes_read=lengths[status == Status.OK], corrupt=corrupt)
        return status

    def _write(self, batch: Batch, database: int, rows: Rows) -> StatusArray:
        keys, lengths, addresses = _columns(batch, rows)
        table = self._tables[database]
        status = np.full(len(rows), Status.OK, dtype=np.uint8)
        status[lengths > self._limits.max_value_bytes] = Status.TOO_LARGE
        slots = np.full(len(rows), table.marker, dtype=np.int64)
        wanting = np.flatnonzero((status == Status.OK) & (lengths > 0))
        with table.lock:
            taken = table.allocate(wanting.size)
        wanting, unlucky = wanting[: taken.size], wanting[taken.size :]
        slots[wanting] = taken
        status[unlucky] = Status.NO_SPACE
        _copy(self._addresses(database, taken), addresses[wanting], lengths[wanting])
        sums = np.zeros(len(rows), dtype=np.uint64)
        if self._settings.verify:
            sums[wanting] = value_checksums(
                keys[wanting], batch.databases[rows[wanting]], addresses[wanting], lengths[wanting]
            )
        done = status == Status.OK
        with table.lock:
            table.put(keys[done], slots[done], lengths[done], sums[done])
        self._count(bytes_written=lengths[done])
        return status

    def _addresses(self, database: int, slots: NDArray[np.int64]) -> NDArray[np.uint64]:
        offsets = slots.astype(np.uint64) * np.uint64(self._settings.stride_bytes)
        return offsets + np.uint64(self._bases[database])

    def _count(self, **amounts: NDArray[np.uint32] | NDArray[np.bool_]) -> None:
        with self._counts_lock:
            for name, amount in amounts.items():
                self._counts[name] += int(amount.sum(dtype=np.int64))


def _columns(
    batch: Batch, rows: Rows
) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint64]]:
    if batch.lengths is None or batch.addresses is None:
        raise CardError(f"batch: {batch.op.name} needs addresses and lengths")
    return batch.keys[rows], batch.lengths[rows], batch.addresses[rows]


def _copy(
    targets: NDArray[np.uint64], sources: NDArray[np.uint64], lengths: NDArray[np.uint32]
) -> None:
    """Copy values; those that are neighbours on both sides go in one call (GIL released)."""
    if lengths.size == 0:
        return
    sizes = lengths.astype(np.uint64)
    starts_run = np.ones(lengths.size, dtype=np.bool_)
    starts_run[1:] = (targets[1:] != targets[:-1] + sizes[:-1]) | (
        sources[1:] != sources[:-1] + sizes[:-1]
    )
    runs = np.flatnonzero(starts_run)
    totals = np.add.reduceat(sizes, runs)
    for target, source, total in zip(
        targets[runs].tolist(), sources[runs].tolist(), totals.tolist(), strict=True
    ):
        _memmove(target, source, total)

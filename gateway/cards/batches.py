"""What the cards share: checking a batch, answering it once, hashing and working memory.

Threads. check_batch runs in submit(); a PendingBatch is filled in from several threads,
each its own rows.
Failure scope. A batch that breaks the contract raises before anything was queued; what
breaks later is answered IO_ERROR for the entries not settled yet.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from adp_kv.errors import CardError
from adp_kv.wire.keys import KEY_WORDS, KeyArray
from gateway.cards.base import Batch, CardLimits, OnDone, Op, Status, StatusArray

_logger: Final = logging.getLogger(__name__)

Rows: TypeAlias = NDArray[np.int64]
"""int64 [k], positions within a batch."""

_UNIQUE_KEY_OPS: Final = (Op.WRITE, Op.DELETE)
_SEED_MIX: Final = np.uint64(0x9E3779B97F4A7C15)

# All of user space as one buffer: a slice by address makes a view without a type per length.
_memory: Final = memoryview((ctypes.c_char * (1 << 47)).from_address(0))

_WRITABLE: Final = 0x200
_view: Final = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def check_batch(batch: Batch, limits: CardLimits) -> None:
    """Refuse a batch that breaks the contract of `gateway.cards.base`.

    Raises:
        CardError: It names the field.
    """
    n = len(batch.databases)
    if n == 0:
        raise CardError("batch: no entries")
    _check_column("databases", batch.databases, np.uint16, (n,))
    _check_column("keys", batch.keys, np.uint64, (n, KEY_WORDS))
    highest = int(batch.databases.max())
    if highest >= limits.num_databases:
        raise CardError(f"batch.databases: {highest}, but the card has {limits.num_databases}")
    if batch.op in (Op.READ, Op.WRITE):
        _check_memory(batch, n, limits.alignment_bytes)
    if batch.groups is not None:
        _check_column("groups", batch.groups, np.uint64, (n,))
    if batch.op in _UNIQUE_KEY_OPS and _has_twin(batch.databases, batch.keys):
        raise CardError(f"batch.keys: a key occurs twice in one {batch.op.name}")


def _check_column(name: str, column: NDArray[Any], dtype: type, shape: tuple[int, ...]) -> None:
    if column.dtype != dtype or column.shape != shape:
        raise CardError(
            f"batch.{name}: {column.dtype} {list(column.shape)}, expected "
            f"{np.dtype(dtype)} {list(shape)}"
        )


def _check_memory(batch: Batch, n: int, alignment: int) -> None:
    if batch.addresses is None or batch.lengths is None:
        raise CardError(f"batch: {batch.op.name} needs addresses and lengths")
    _check_column("addresses", batch.addresses, np.uint64, (n,))
    _check_column("lengths", batch.lengths, np.uint32, (n,))
    off = (batch.addresses & np.uint64(alignment - 1)) != 0
    if (off & (batch.lengths > 0)).any():
        raise CardError(f"batch.addresses: not all are multiples of {alignment}")


def _has_twin(databases: NDArray[np.uint16], keys: KeyArray) -> bool:
    first_words = np.sort(keys[:, 0])
    if not (first_words[1:] == first_words[:-1]).any():
        return False
    order = np.lexsort((databases, keys[:, 1], keys[:, 0]))
    same = (keys[order][1:] == keys[order][:-1]).all(axis=1)
    return bool((same & (databases[order][1:] == databases[order][:-1])).any())


def by_database(databases: NDArray[np.uint16], rows: Rows) -> Iterator[tuple[int, Rows]]:
    """Yield each database and those of `rows` that belong to it."""
    mine = databases[rows]
    if not mine.size:
        return
    if (mine == mine[0]).all():  # and most of the time there is only one
        yield int(mine[0]), rows
        return
    for database in np.flatnonzero(np.bincount(mine)).tolist():
        yield database, rows[mine == database]


def memory_at(address: int, num_bytes: int) -> memoryview:
    """Return memory as a writable buffer of bytes; it must stay mapped while that is used."""
    view: memoryview = _view(address, num_bytes, _WRITABLE)
    return view


def checksum_seeds(keys: KeyArray, databases: NDArray[np.uint16]) -> NDArray[np.uint64]:
    """Return what a value's checksum is seeded with: uint64 [n].

    The seed makes bytes that belong to another key or database fail even where a value
    of the same bytes would pass.

    Args:
        keys: uint64 [n, 2].
        databases: uint16 [n].
    """
    return keys[:, 0] ^ (keys[:, 1] * _SEED_MIX) ^ databases


def checksum_at(address: int, num_bytes: int, seed: int) -> int:
    """Return xxh3_64 of memory (GIL released)."""
    digest: int = xxhash.xxh3_64_intdigest(_memory[address : address + num_bytes], seed)
    return digest


def value_checksums(
    keys: KeyArray,
    databases: NDArray[np.uint16],
    addresses: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
) -> NDArray[np.uint64]:
    """Return xxh3_64 of each value, seeded with its identity (GIL released per value).

    Args:
        keys: uint64 [n, 2].
        databases: uint16 [n].
        addresses: uint64 [n].
        lengths: uint32 [n].
    """
    seeds = checksum_seeds(keys, databases)
    return np.array(
        [
            checksum_at(address, length, seed)
            for address, length, seed in zip(
                addresses.tolist(), lengths.tolist(), seeds.tolist(), strict=True
            )
        ],
        dtype=np.uint64,
    )


class PendingBatch:
    """A batch on its way to its one answer.

    Attributes:
        batch: what was submitted.
        status: uint8 [n]; each row is written by the one thread that settles it.
    """

    def __init__(self, batch: Batch, on_done: OnDone) -> None:
        """Start with IO_ERROR everywhere and one part that `settle` ends: the planning."""
        self.batch = batch
        self.status: StatusArray = np.full(len(batch.databases), Status.IO_ERROR, dtype=np.uint8)
        self._on_done = on_done
        self._parts = 1
        self._lock = threading.Lock()

    def expect(self, parts: int) -> None:
        """Announce that `parts` more calls of settle() follow."""
        with self._lock:
            self._parts += parts

    def settle(self) -> bool:
        """End one part; the last one answers the batch, and true says so."""
        with self._lock:
            self._parts -= 1
            last = self._parts == 0
        if last:
            try:
                self._on_done(self.batch.token, self.status)
            except Exception:
                _logger.exception("on_done failed for batch %d", self.batch.token)
        return last


class WorkerPool:
    """Threads that run functions in the order they were put; a failure is logged."""

    def __init__(self, name: str, num_threads: int) -> None:
        """Start `num_threads` daemon threads called name-i."""
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Queue `work`; never blocks."""
        self._queue.put(work)

    def stop(self, timeout_s: float) -> bool:
        """Run what is queued, end the threads; return whether each ended in time."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                _logger.exception("card work failed")

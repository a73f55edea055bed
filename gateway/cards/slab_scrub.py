"""Reading a slab card's values again, to find damaged ones before a load does.

Values are read through the card itself, like by any READ: a damaged one is deleted, its
chunk's commit record taken away. Rows of the index that were looked at count towards the
rate, too: else a large card with few values would be looked through without a pause.

Threads. One at a time: the upkeep's, or whoever verifies.
Failure scope. An I/O that fails is the card's to count; the value stays.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from adp_kv.units import MiB, align_up
from adp_kv.wire.keys import KeyArray
from gateway.cards.base import Batch, OnDone, Op, Status, StatusArray
from gateway.cards.slab_database import Database
from gateway.cards.slab_flows import SCRUB_TOKEN
from gateway.cards.slots import SlotTable

_ROWS: Final = 256
_MOST_ROWS: Final = 16 * _ROWS  # of a step that finds no value
_ROW_BYTES: Final = 64  # what a row of the index counts as
_BUFFER_BYTES: Final = 4 * MiB
_LOOK_UP_S: Final = 1.0

_in_use: Final[list[mmap.mmap]] = []
"""Memory that a read which never ended may still fill."""


class Scrubber:
    """Goes through all values, again and again (see the module).

    Attributes:
        num_passes: how often all of them were read.
        num_read: values read.
        num_corrupt: damaged ones.
        num_failed: values that could not be read.
    """

    def __init__(
        self,
        databases: list[Database],
        slot_bytes: int,
        submit: Callable[[Batch, OnDone], None],
        stop: threading.Event,
    ) -> None:
        """Begin with the first value.

        Args:
            databases: in order.
            slot_bytes: the longest value.
            submit: begins a batch like any other.
            stop: ends a step that waits.
        """
        self.num_passes = self.num_read = self.num_corrupt = self.num_failed = 0
        self._databases = databases
        self._submit = submit
        self._stop = stop
        self._place = 0, 0
        self._stride = align_up(slot_bytes, mmap.PAGESIZE)
        self._rows = max(1, _BUFFER_BYTES // self._stride)
        self._buffer: mmap.mmap | None = None

    def step(self, bytes_per_s: float) -> bool:
        """Read the next few values at a rate; return false at the end of a pass."""
        number, start = self._place
        table = self._databases[number].table
        with table.lock:
            capacity = table.extent[0]
            keys, lengths, end = _next_values(table, start, min(start + _MOST_ROWS, capacity))
        self._scrub(number, keys, lengths, bytes_per_s)
        self._stop.wait((end - start) * _ROW_BYTES / bytes_per_s)
        start = end
        if start >= capacity:
            number, start = (number + 1) % len(self._databases), 0
        self._place = number, start
        ended = self._place == (0, 0)
        self.num_passes += ended
        return not ended and not self._stop.is_set()

    def _scrub(
        self, number: int, keys: KeyArray, lengths: NDArray[np.uint32], bytes_per_s: float
    ) -> None:
        for first in range(0, len(keys), self._rows):
            mine = slice(first, first + self._rows)
            began = time.monotonic()
            self._count(self._read(number, keys[mine], lengths[mine]))
            owed_s = int(lengths[mine].sum(dtype=np.int64)) / bytes_per_s
            if self._stop.wait(max(0.0, began + owed_s - time.monotonic())):
                return

    def _count(self, status: StatusArray) -> None:
        self.num_read += int((status == Status.OK).sum())
        self.num_corrupt += int((status == Status.CORRUPT).sum())
        self.num_failed += int((status == Status.IO_ERROR).sum())

    def _read(self, number: int, keys: KeyArray, lengths: NDArray[np.uint32]) -> StatusArray:
        if self._buffer is None:
            self._buffer = mmap.mmap(-1, self._rows * self._stride)
        base = np.frombuffer(self._buffer, dtype=np.uint8).ctypes.data
        answered = threading.Event()
        answers: list[StatusArray] = []

        def on_done(_token: int, status: StatusArray) -> None:
            answers.append(status)
            answered.set()

        offsets = np.arange(len(keys), dtype=np.uint64) * np.uint64(self._stride)
        batch = Batch(
            op=Op.READ,
            token=SCRUB_TOKEN,
            databases=np.full(len(keys), number, dtype=np.uint16),
            keys=keys,
            addresses=np.uint64(base) + offsets,
            lengths=lengths,
        )
        self._submit(batch, on_done)
        while not answered.wait(_LOOK_UP_S):
            if self._stop.is_set():
                _in_use.append(self._buffer)
                return np.empty(0, dtype=np.uint8)
        return answers[0]


def _next_values(
    table: SlotTable, start: int, limit: int
) -> tuple[KeyArray, NDArray[np.uint32], int]:
    """Return the first values in the index from a row on, and the row behind them."""
    while True:
        keys, slots = table.piece(start, _ROWS)
        start += _ROWS
        values = slots < table.marker
        if values.any() or start >= limit:
            return keys[values], table.lengths[slots[values]], start

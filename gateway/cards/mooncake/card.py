"""A card over Mooncake Store: one key space of a store is a database.

    submit ──► parts of batch_rows ──► lanes (threads) ──► engine ──► the store's machines
    on_done ◄── statuses ◄── codes, values moved straight from and to announced memory

Each value is stored behind a 16-byte header with its xxh3_64 (seeded with its key) and
length (`gateway.cards.value_header`), so that a foreign or damaged value, and one that was
given away while it was read, is CORRUPT, and then removed.

A name that is taken is not written again: a WRITE answers OK and the old value stays, which
is the same one where a key stands for its bytes. A corrupt one is removed when it is read.

The store owns capacity: it evicts, by its own rules and not by groups, and a full one answers
NO_SPACE. A value can vanish at any time, which a gateway reads as a miss.

Threads. `threads` lanes a database; the engine has more of its own.
Durability. The store's: values in RAM go with the process that holds them, all of them with
the master.
Failure scope. Entries. Machines of the store that are gone cost IO_ERROR until the master
has noticed, then ABSENT. A master that is gone costs IO_ERROR until it is back, empty.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Final

import numpy as np
from typing_extensions import override

from adp_kv.errors import CardError
from adp_kv.units import ceil_div
from gateway.cards.base import Batch, Card, CardLimits, OnDone, Op, Status
from gateway.cards.batches import PendingBatch, Rows, by_database, check_batch
from gateway.cards.mooncake.exchanges import Part
from gateway.cards.mooncake.lanes import PART_BYTES, Lanes
from gateway.cards.mooncake.settings import MooncakeSettings

_logger: Final = logging.getLogger(__name__)

_MIN_ROWS: Final = 8  # fewer are not spread over threads
_STOP_TIMEOUT_S: Final = 5.0
_WAITS: Final = 4  # a call can take this many deadlines of the engine


class MooncakeCard(Card):
    """A card of Mooncake stores (see the module)."""

    def __init__(self, settings: MooncakeSettings) -> None:
        """Make a closed card; connects to nothing."""
        self._settings = settings
        self._limits = CardLimits(settings.max_value_bytes, 1, len(settings.masters))
        self._lanes: list[Lanes] = []
        self._is_open = False
        self._state = threading.Condition()
        self._outstanding = 0
        self._counts = dict.fromkeys(("bytes_read", "bytes_written", "corrupt", "io_errors"), 0)

    @property
    @override
    def limits(self) -> CardLimits:
        return self._limits

    @override
    def open(self, on_done: OnDone) -> None:
        if self._is_open:
            raise CardError("mooncake card: open already")
        self._on_done = on_done
        with contextlib.ExitStack() as on_failure:
            lanes = []
            for master in self._settings.parsed_masters:
                lanes.append(Lanes(master, self._settings, self._ended))
                on_failure.callback(lanes[-1].stop, _STOP_TIMEOUT_S)
            on_failure.pop_all()
        self._lanes = lanes
        self._is_open = True

    @override
    def register(self, address: int, num_bytes: int) -> None:
        for lanes in self._lanes:
            lanes.register(address, num_bytes)

    @override
    def unregister(self) -> None:
        for lanes in self._lanes:
            lanes.unregister()

    @override
    def submit(self, batch: Batch) -> None:
        check_batch(batch, self._limits)
        with self._state:
            if not self._is_open:
                raise CardError("mooncake card: not open")
            self._outstanding += 1
        pending = PendingBatch(batch, self._on_done)
        parts = []
        for database, rows in by_database(
            batch.databases, np.arange(len(batch.databases), dtype=np.int64)
        ):
            size = self._part_rows(batch, rows)
            starts = range(0, len(rows), size)
            parts += [(database, Part(pending, rows[start : start + size])) for start in starts]
        pending.expect(len(parts) - 1)
        for database, part in parts:
            self._lanes[database].put(part)

    def _part_rows(self, batch: Batch, rows: Rows) -> int:
        """Return how many entries go into one call."""
        share = ceil_div(len(rows), self._settings.threads)
        size = min(max(share, _MIN_ROWS), self._settings.batch_rows)
        if batch.lengths is not None:
            longest = min(int(batch.lengths[rows].max()), self._settings.max_value_bytes)
            size = min(size, max(1, PART_BYTES // max(1, longest)))
        return size

    @override
    def stats(self) -> dict[str, int]:
        """Return counters; `values` is what this card stored and removed since it was opened."""
        with self._state:
            counts = dict(self._counts)
        return {
            "values": sum(lanes.values for lanes in self._lanes),
            "masters_lost": sum(lanes.lost for lanes in self._lanes),
            **counts,
        }

    @override
    def close(self) -> None:
        with self._state:
            if not self._is_open:
                return
            self._is_open = False
            deadline = time.monotonic() + self._settings.close_timeout_s
            while self._outstanding and time.monotonic() < deadline:
                self._state.wait(max(0.0, deadline - time.monotonic()))
        # What is queued fails; calls that are under way have the engine's deadlines.
        timeout_s = _WAITS * self._settings.io_timeout_s + _STOP_TIMEOUT_S
        ended = [lanes.stop(timeout_s) for lanes in self._lanes]
        if not all(ended):
            _logger.error("mooncake card: a call did not end within %g s", timeout_s)
        self._lanes = []

    def _ended(self, part: Part) -> None:
        """Settle a part; runs on a lane's thread."""
        part.settle()
        batch = part.pending.batch
        done = part.status == Status.OK
        moved = 0
        if batch.op in (Op.READ, Op.WRITE) and batch.lengths is not None:
            moved = int(batch.lengths[part.rows[done]].sum(dtype=np.int64))
        with self._state:
            if batch.op in (Op.READ, Op.WRITE):
                self._counts["bytes_read" if batch.op is Op.READ else "bytes_written"] += moved
            self._counts["corrupt"] += int((part.status == Status.CORRUPT).sum())
            self._counts["io_errors"] += int((part.status == Status.IO_ERROR).sum())
        if part.pending.settle():
            with self._state:
                self._outstanding -= 1
                self._state.notify_all()

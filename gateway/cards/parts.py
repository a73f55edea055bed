"""Cards that cut a batch into parts and hand each to a lane: threads or a queue of their own.

    submit ──► _cut ──► _hand_over(part) ──► lane ──► _ended(part) ──► on_done
                                                       after a batch's last part

PartsCard is what every such card has: the one answer to a batch, counters, and a close()
that first lets batches finish. LaneCard adds what cards over servers have: for each
database some lanes that take parts from one queue.

Threads. submit() and close() on the main thread; _ended() on a lane's.
Failure scope. A part's entries: they are IO_ERROR until their lane says otherwise.
It must not know protocols, devices or servers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import numpy as np
from typing_extensions import override

from adp_kv.errors import CardError
from adp_kv.units import MiB, ceil_div
from gateway.cards.base import Batch, Card, CardLimits, OnDone, Op, Status, StatusArray
from gateway.cards.batches import PendingBatch, Rows, by_database, check_batch
from gateway.cards.settings import LaneSettings

_logger: Final = logging.getLogger(__name__)

PART_BYTES: Final = 8 * MiB
"""Of values in a LaneCard's part with more than one entry: a server has them in memory at once."""

_MIN_ROWS: Final = 8  # fewer are not spread over lanes
_STOP_TIMEOUT_S: Final = 5.0


@dataclass(slots=True)
class Part:
    """Entries of a batch that a lane runs together.

    Attributes:
        pending: their batch.
        rows: int64 [n], positions in the batch.
        status: uint8 [n], IO_ERROR until something says otherwise.
    """

    pending: PendingBatch
    rows: Rows
    status: StatusArray = field(init=False)

    def __post_init__(self) -> None:
        self.status = np.full(len(self.rows), Status.IO_ERROR, dtype=np.uint8)


class Counters:
    """Numbers that several threads add to."""

    def __init__(self, *names: str) -> None:
        """Start at 0."""
        self._lock = threading.Lock()
        self._values = dict.fromkeys(names, 0)

    def add(self, name: str, amount: int) -> None:
        """Add to one of the names."""
        if amount:
            with self._lock:
                self._values[name] += amount

    def snapshot(self) -> dict[str, int]:
        """Return all of them."""
        with self._lock:
            return dict(self._values)


class PartsCard(Card):
    """A card that runs batches in parts (see the module).

    open() of a subclass starts what it needs, sets `_on_done`, and last `_is_open`.
    """

    def __init__(self, name: str, close_timeout_s: float) -> None:
        """Make a closed card.

        Args:
            name: of the kind, for messages.
            close_timeout_s: how long close() lets batches finish.
        """
        self._name = name
        self._close_timeout_s = close_timeout_s
        self._on_done: OnDone
        self._is_open = False
        self._state = threading.Condition()
        self._outstanding = 0
        self._counters = Counters("bytes_read", "bytes_written", "corrupt", "io_errors")

    @abstractmethod
    def _cut(self, batch: Batch) -> list[tuple[int, Rows]]:
        """Return the rows of each part, and their database; 0 where the card mixes them."""

    @abstractmethod
    def _hand_over(self, pending: PendingBatch, database: int, rows: Rows) -> None:
        """Queue a part; it ends with _ended(), or with _settle() where it never began."""

    @abstractmethod
    def _stop(self) -> None:
        """Abandon what did not end in time, and let everything go; the card is not open."""

    @override
    def submit(self, batch: Batch) -> None:
        check_batch(batch, self.limits)
        with self._state:
            if not self._is_open:
                raise CardError(f"{self._name} card: not open")
            self._outstanding += 1
        pending = PendingBatch(batch, self._on_done)
        parts = self._cut(batch)
        pending.expect(len(parts) - 1)
        for database, rows in parts:
            self._hand_over(pending, database, rows)

    @override
    def close(self) -> None:
        with self._state:
            if not self._is_open:
                return
            self._is_open = False
            deadline = time.monotonic() + self._close_timeout_s
            while self._outstanding and time.monotonic() < deadline:
                self._state.wait(max(0.0, deadline - time.monotonic()))
        self._stop()

    def _ended(self, part: Part) -> None:
        """Take over what a part came to; runs on a lane's thread, once a part."""
        part.pending.status[part.rows] = part.status
        batch = part.pending.batch
        if batch.op in (Op.READ, Op.WRITE) and batch.lengths is not None:
            moved = batch.lengths[part.rows[part.status == Status.OK]].sum(dtype=np.int64)
            name = "bytes_read" if batch.op is Op.READ else "bytes_written"
            self._counters.add(name, int(moved))
        self._counters.add("corrupt", int((part.status == Status.CORRUPT).sum()))
        self._settle(part.pending)

    def _settle(self, pending: PendingBatch) -> None:
        if pending.settle():
            with self._state:
                self._outstanding -= 1
                self._state.notify_all()


PartT = TypeVar("PartT", bound=Part)


class Lanes(ABC, Generic[PartT]):
    """All lanes to one database; they take parts from one queue.

    Attributes:
        values: that the database holds, as far as its server says.
        lost: times it stopped answering.
    """

    values: int = 0
    lost: int = 0

    @abstractmethod
    def put(self, part: PartT) -> None:
        """Queue a part; never blocks."""

    @abstractmethod
    def stop(self, timeout_s: float) -> bool:
        """Fail what is queued, end the threads; return whether each ended in time."""

    def register(self, address: int, num_bytes: int) -> None:
        """Announce memory; nothing to gain for most."""
        del address, num_bytes

    def unregister(self) -> None:
        """Forget announced memory; no part that uses it is under way."""


class LaneCard(PartsCard, Generic[PartT]):
    """A card over servers: lanes for each database (see the module)."""

    def __init__(
        self,
        name: str,
        settings: LaneSettings,
        part: type[PartT],
        *,
        databases: int,
        lanes: int,
        rows: int,
        stop_timeout_s: float,
    ) -> None:
        """Make a closed card; connects to nothing.

        Args:
            name: of the kind, for messages.
            settings: what such cards share.
            part: what its lanes take.
            databases: how many there are.
            lanes: for each.
            rows: entries of a part at most.
            stop_timeout_s: what a lane's call under way may take; its threads get a little more.
        """
        super().__init__(name, settings.close_timeout_s)
        self._limits = CardLimits(settings.max_value_bytes, 1, databases)
        self._part = part
        self._num_lanes = lanes
        self._max_rows = rows
        self._stop_timeout_s = stop_timeout_s + _STOP_TIMEOUT_S
        self._lanes: list[Lanes[PartT]] = []

    @abstractmethod
    def _connect(self) -> Iterator[Lanes[PartT]]:
        """Yield the lanes of each database in order, each as it is open.

        Raises:
            CardError: One can't be used.
        """

    @property
    @override
    def limits(self) -> CardLimits:
        return self._limits

    @override
    def open(self, on_done: OnDone) -> None:
        if self._is_open:
            raise CardError(f"{self._name} card: open already")
        self._on_done = on_done
        with contextlib.ExitStack() as on_failure:
            opened = []
            for lanes in self._connect():
                opened.append(lanes)
                on_failure.callback(lanes.stop, _STOP_TIMEOUT_S)
            on_failure.pop_all()
        self._lanes = opened
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
    def stats(self) -> dict[str, int]:
        values = sum(lanes.values for lanes in self._lanes)
        return {"values": values, **self._counters.snapshot()}

    @override
    def _cut(self, batch: Batch) -> list[tuple[int, Rows]]:
        parts = []
        everything = np.arange(len(batch.databases), dtype=np.int64)
        for database, rows in by_database(batch.databases, everything):
            size = self._part_rows(batch, rows)
            parts += [(database, rows[i : i + size]) for i in range(0, len(rows), size)]
        return parts

    def _part_rows(self, batch: Batch, rows: Rows) -> int:
        share = ceil_div(len(rows), self._num_lanes)
        size = min(max(share, _MIN_ROWS), self._max_rows)
        if batch.lengths is not None:
            longest = min(int(batch.lengths[rows].max()), self._limits.max_value_bytes)
            size = min(size, max(1, PART_BYTES // max(1, longest)))
        return size

    @override
    def _hand_over(self, pending: PendingBatch, database: int, rows: Rows) -> None:
        self._lanes[database].put(self._part(pending, rows))

    @override
    def _ended(self, part: Part) -> None:
        self._counters.add("io_errors", int((part.status == Status.IO_ERROR).sum()))
        super()._ended(part)

    @override
    def _stop(self) -> None:
        ended = [lanes.stop(self._stop_timeout_s) for lanes in self._lanes]
        if not all(ended):
            _logger.error(
                "%s card: a call did not end within %g s", self._name, self._stop_timeout_s
            )
        self._lanes = []

"""The io_uring executor: one thread that keeps one ring full across requests.

Requests queue up and stream through the ring in order: as completions free room, rows of
the next request follow those of the last, so the depth never drains between two of them.
A request's entries are made at once when it comes to its turn, then go by the slice: a
round of the loop costs about the same for one entry as for all of them.
The thread sleeps in io_uring_enter alone; an eventfd whose read is one of the ring's own
entries wakes it for new work.

Threads. The ring belongs to this thread (see `gateway.cards.uring`); other threads only
append to the inbox and ring the eventfd.
Failure scope. As `gateway.cards.io_engine` says. Memory that can't be pinned is used
unpinned, with one log line. Of a ring that is lost, requests whose I/O the kernel has begun
are not answered: it may still fill or read their memory, and nobody can tell when it ends.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from abc import abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from adp_kv.units import format_bytes
from gateway.cards.io_engine import IoEngine, IoRequest, Progress, RequestT
from gateway.cards.latency import DeviceLatencies
from gateway.cards.uring import (
    MAX_BUFFER_BYTES,
    OP_READ,
    OP_READ_FIXED,
    OP_WRITE,
    OP_WRITE_FIXED,
    CompletionArray,
    EntryArray,
    URing,
)

_logger: Final = logging.getLogger(__name__)

_WAKE: Final = 0xFFFFFFFF  # the number that no request has
_ROW_BITS: Final = 32
_SHIFT: Final = np.uint64(_ROW_BITS)
_ROW_MASK: Final = np.uint64(0xFFFFFFFF)
_UNREGISTER_TIMEOUT_S: Final = 10.0


@dataclass(slots=True)
class _Pinning:
    """An order to pin `buffers` (start addresses and sizes), or nothing."""

    buffers: list[tuple[int, int]]
    done: threading.Event = field(default_factory=threading.Event)


class RingEngine(IoEngine[RequestT]):
    """One ring and its thread (see the module's contract); a subclass fills its entries."""

    name = "io_uring"

    def __init__(self, queue_depth: int) -> None:
        """Start the thread and its ring.

        Args:
            queue_depth: I/Os in flight at once.

        Raises:
            OSError: io_uring does not work here.
        """
        self.latencies = DeviceLatencies()
        self._depth = queue_depth
        self._inbox: deque[RequestT | _Pinning] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()  # guards _wake_fd against a late submit
        self._wake_armed = False
        self._wake_entry: EntryArray | None = None
        self._wake_word = np.zeros(1, dtype=np.uint64)
        self._stopping = False
        self._gone = False
        self._is_left = False  # memory to the kernel, for good
        self._announced: list[tuple[int, int]] = []
        self._pin(_Pinning([]), None)
        self._running: dict[int, Progress[RequestT]] = {}
        self._waiting: deque[tuple[int, Progress[RequestT], EntryArray]] = deque()
        self._next_id = 0
        self._started = threading.Event()
        self._refusals: list[OSError] = []
        self._thread = threading.Thread(target=self._run, name="adp-card-io", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._refusals:
            os.close(self._wake_fd)
            raise self._refusals[0]

    @abstractmethod
    def _entries(self, ring: URing, request: RequestT, names: NDArray[np.uint64]) -> EntryArray:
        """Return what a request's rows are to the ring, under these names: [n]."""

    def _open_ring(self, entries: int) -> URing:
        """Make the ring; called on its thread."""
        return URing(entries)

    def _record(
        self, progress: Progress[RequestT], rows: NDArray[np.uint64], done: CompletionArray
    ) -> None:
        """Keep the results of `rows`, whose completions are `done`."""
        progress.results[rows] = done["res"]

    @override
    def submit(self, request: RequestT) -> None:
        with self._wake_lock:
            gone = self._gone
            if not gone:
                self._inbox.append(request)
                os.eventfd_write(self._wake_fd, 1)
        if gone:
            Progress(request).report()

    @override
    def register(self, address: int, num_bytes: int) -> None:
        self._announced.append((address, num_bytes))
        self._order(_Pinning(_split(self._announced)))

    @override
    def unregister(self) -> None:
        self._announced.clear()
        order = _Pinning([])
        if self._order(order) and not order.done.wait(_UNREGISTER_TIMEOUT_S):
            _logger.error(
                "memory is still pinned: I/O has not ended for %g s", _UNREGISTER_TIMEOUT_S
            )

    @override
    def stop(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        with self._wake_lock:
            if not self._gone:
                self._stopping = True
                os.eventfd_write(self._wake_fd, 1)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive() and not self._is_left

    def _order(self, order: _Pinning) -> bool:
        with self._wake_lock:
            if not self._gone:
                self._inbox.append(order)
                os.eventfd_write(self._wake_fd, 1)
            return not self._gone

    def _run(self) -> None:
        try:
            ring = self._open_ring(self._depth + 1)  # one row is the wake-up's
        except OSError as error:
            self._refusals.append(error)
            return
        finally:
            self._started.set()
        try:
            self._serve(ring)
        except OSError:
            _logger.exception("io_uring is lost: every I/O of this card fails until it is reopened")
            self._fail_running(ring.not_started >> _SHIFT)
        finally:
            ring.close()
            self._leave()

    def _serve(self, ring: URing) -> None:
        while True:
            stopping = self._stopping  # once a round: the checks below must agree
            self._take_inbox(ring)
            if stopping:
                self._cancel_waiting()
            self._fill(ring)
            in_flight = ring.in_flight - self._wake_armed
            if stopping and in_flight == 0:
                return
            if not self._wake_armed:
                self._arm(ring)
            # Half of what is in flight: few system calls, and the device never runs dry.
            ring.enter(max(1, in_flight // 2))
            self._settle(ring.reap())

    def _take_inbox(self, ring: URing) -> None:
        """Move new work in, up to an order to pin: that waits until the ring is idle."""
        while self._inbox:
            head = self._inbox[0]
            if isinstance(head, _Pinning):
                if ring.in_flight - self._wake_armed or self._waiting:
                    return
                self._pin(head, ring)
            else:
                number, self._next_id = self._next_id, (self._next_id + 1) & 0x7FFFFFFF
                entries = self._entries(ring, head, _names(number, len(head.fds)))
                progress = self._running[number] = Progress(head)
                self._waiting.append((number, progress, entries))
            self._inbox.popleft()

    def _pin(self, order: _Pinning, ring: URing | None) -> None:
        buffers = order.buffers
        try:
            if ring is not None and buffers:
                ring.register_buffers(buffers)
            elif ring is not None:
                ring.unregister_buffers()
        except OSError as error:
            _logger.warning(
                "can't pin %s for io_uring (%s), going on unpinned at some CPU; raise "
                "RLIMIT_MEMLOCK (systemd: LimitMEMLOCK=infinity)",
                format_bytes(sum(size for _, size in buffers)),
                error.strerror,
            )
            buffers = []
        pairs = np.array(sorted((a, a + n, i) for i, (a, n) in enumerate(buffers)), dtype=np.uint64)
        self._starts, self._ends, self._numbers = pairs.reshape(-1, 3).T
        order.done.set()

    def _fill(self, ring: URing) -> None:
        while self._waiting:
            room = self._depth - (ring.in_flight - self._wake_armed)
            if room <= 0:
                return
            _, progress, entries = self._waiting[0]
            rows = progress.take(room)
            if progress.next_row == len(progress.results):
                self._waiting.popleft()
            ring.append(entries[rows])

    def _arm(self, ring: URing) -> None:
        if self._wake_entry is None:
            address = np.array([self._wake_word.ctypes.data], dtype=np.uint64)
            offset = np.zeros(1, dtype=np.uint64)
            name = _names(_WAKE, 1)
            self._wake_entry = ring.transfers(OP_READ, self._wake_fd, offset, address, 8, name)
        ring.append(self._wake_entry)
        self._wake_armed = True

    def _settle(self, done: CompletionArray) -> None:
        now_ns = time.monotonic_ns()
        # Few requests at a time: to look for the first one's rows beats sorting them all.
        while len(done):
            names = done["user_data"]
            number = int(names[0]) >> _ROW_BITS
            mine = (names >> _SHIFT) == number
            if number == _WAKE:
                self._wake_armed = False
            else:
                self._settle_one(number, done[mine], now_ns)
            done = done[~mine]

    def _settle_one(self, number: int, done: CompletionArray, now_ns: int) -> None:
        progress = self._running[number]
        rows = done["user_data"] & _ROW_MASK
        self._record(progress, rows, done)
        progress.took_ns[rows] += now_ns
        progress.left -= len(done)
        self._finish(number, progress)

    def _finish(self, number: int, progress: Progress[RequestT]) -> None:
        if progress.left == 0:
            del self._running[number]
            begun = slice(0, progress.num_begun)
            self.latencies.note(progress.request.fds[begun], progress.took_ns[begun])
            progress.report()

    def _cancel_waiting(self) -> None:
        while self._waiting:
            number, progress, _ = self._waiting.popleft()
            progress.cancel_rest()
            self._finish(number, progress)

    def _fail_running(self, not_started: NDArray[np.uint64]) -> None:
        """Answer what the kernel has nothing of; `not_started` has the number of each row."""
        for number, progress in self._running.items():
            idle = len(progress.results) - progress.next_row
            idle += int(np.count_nonzero(not_started == number))
            if progress.left > idle:
                self._is_left = True
                continue
            progress.results[:] = -errno.EIO
            progress.report()
        self._running.clear()
        self._waiting.clear()

    def _leave(self) -> None:
        with self._wake_lock:
            self._gone = True
            os.close(self._wake_fd)
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, _Pinning):
                item.done.set()
            else:
                Progress(item).report()


class UringEngine(RingEngine[IoRequest]):
    """Reads and writes of files; pinned memory goes by the *_FIXED operations."""

    @override
    def _entries(self, ring: URing, request: IoRequest, names: NDArray[np.uint64]) -> EntryArray:
        addresses, lengths = request.addresses, request.lengths
        plain, fixed = (OP_WRITE, OP_WRITE_FIXED) if request.write else (OP_READ, OP_READ_FIXED)
        opcodes: NDArray[np.uint8] | int = plain
        buffers: NDArray[np.uint64] | int = 0
        if self._starts.size:
            place = np.searchsorted(self._starts, addresses, side="right") - 1
            # A value that crosses two buffers (place of its start, end beyond it) goes unpinned.
            inside = (place >= 0) & (addresses + lengths <= self._ends[place])
            opcodes = np.where(inside, fixed, plain).astype(np.uint8)
            buffers = np.where(inside, self._numbers[place], 0)
        return ring.transfers(
            opcodes, request.fds, request.offsets, addresses, lengths, names, buffers
        )


def _names(number: int, rows: int) -> NDArray[np.uint64]:
    """Return the user_data of the rows of the request that goes by `number`."""
    first = number << _ROW_BITS
    return np.arange(first, first + rows, dtype=np.uint64)


def _split(regions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Cut regions into buffers the kernel takes."""
    return [
        (address + start, min(MAX_BUFFER_BYTES, size - start))
        for address, size in regions
        for start in range(0, size, MAX_BUFFER_BYTES)
    ]

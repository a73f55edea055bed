"""File I/O by the batch into memory at given addresses: the interface, and its thread form.

    submit(IoRequest) ──► queue ──► executor ──► on_complete(results[n])

Two executors stand behind one interface: io_uring (`gateway.cards.uring_engine`, one
thread, queues kept full across requests) and threads that call pread/pwrite, for hosts
that forbid io_uring. `gateway.cards.engines` picks.

Threads. submit() is called from any thread and never blocks on I/O; on_complete runs on
an executor's thread, exactly once a request, and must be short.
Failure scope. A row that fails is -errno in its result; a short one is its byte count.
Rows that a stop caught before they began are -ECANCELED. An executor that is lost
answers -EIO to everything.
It must not know keys, slots or checksums.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar, override

from gateway.cards.latency import DeviceLatencies

_logger: Final = logging.getLogger(__name__)

_ROWS_A_TURN: Final = 8

_libc: Final = ctypes.CDLL(None, use_errno=True)
_pread: Final = _libc.pread64
_pwrite: Final = _libc.pwrite64
for _call in (_pread, _pwrite):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class Request:
    """Rows that complete together; all arrays have the same length n >= 1.

    Attributes:
        fds: int32 [n].
        on_complete: gets int32 [n], the result of each row.
    """

    fds: NDArray[np.int32]
    on_complete: Callable[[NDArray[np.int32]], None]


@dataclass(frozen=True, slots=True)
class IoRequest(Request):
    """Reads or writes; a row's result is the bytes moved, or -errno.

    Attributes:
        write: memory to file if true, file to memory if not.
        offsets: uint64 [n], bytes into the file.
        addresses: uint64 [n], host memory; stays valid until on_complete.
        lengths: uint32 [n], bytes.
    """

    write: bool
    offsets: NDArray[np.uint64]
    addresses: NDArray[np.uint64]
    lengths: NDArray[np.uint32]


RequestT = TypeVar("RequestT", bound=Request, default=IoRequest)


@dataclass(slots=True)
class Progress(Generic[RequestT]):
    """A request an executor has begun.

    Attributes:
        next_row: the first row not begun.
        num_begun: rows that an executor began.
        took_ns: int64 [n], minus when a row was begun; plus when it was completed.
        left: rows not completed.
        results: int32 [n], valid where completed.
    """

    request: RequestT
    next_row: int = 0
    num_begun: int = 0
    left: int = field(init=False)
    results: NDArray[np.int32] = field(init=False)
    took_ns: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.request.fds)
        self.took_ns = np.empty(self.left, dtype=np.int64)
        self.results = np.full(self.left, -errno.ECANCELED, dtype=np.int32)

    def take(self, limit: int) -> slice:
        """Return the next rows to begin, at most `limit`."""
        rows = slice(self.next_row, min(self.next_row + limit, len(self.results)))
        self.next_row = self.num_begun = rows.stop
        self.took_ns[rows] = -time.monotonic_ns()
        return rows

    def cancel_rest(self) -> None:
        """Give up the rows that were not begun."""
        self.left -= len(self.results) - self.next_row
        self.next_row = len(self.results)

    def report(self) -> None:
        """Hand the results over; what a callback raises stays with it."""
        try:
            self.request.on_complete(self.results)
        except Exception:
            _logger.exception("completion callback failed; its batch may never be answered")


class IoEngine(ABC, Generic[RequestT]):
    """An executor of one kind of request (see the module's contract).

    Attributes:
        latencies: what each descriptor's rows took from their begin to their result.
    """

    name: str
    latencies: DeviceLatencies

    @abstractmethod
    def submit(self, request: RequestT) -> None:
        """Queue a request; its on_complete follows exactly once."""

    @abstractmethod
    def register(self, address: int, num_bytes: int) -> None:
        """Pin memory that later requests use, if that helps; later requests wait for it."""

    @abstractmethod
    def unregister(self) -> None:
        """Unpin all memory before returning; no request is in flight."""

    @abstractmethod
    def stop(self, timeout_s: float) -> bool:
        """Cancel rows not begun and wait for the others.

        Returns:
            Whether nothing touches memory any more; false after `timeout_s`.
        """


class PoolEngine(IoEngine[RequestT]):
    """Blocking calls on a few threads; a subclass says which."""

    name = "threads"

    def __init__(self, num_threads: int) -> None:
        """Start `num_threads` daemon threads."""
        self.latencies = DeviceLatencies()
        self._wake = threading.Condition()
        self._queue: deque[Progress[RequestT]] = deque()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"adp-card-io-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @abstractmethod
    def _transfer(self, progress: Progress[RequestT], rows: slice) -> None:
        """Run `rows` and set their results."""

    @override
    def submit(self, request: RequestT) -> None:
        with self._wake:
            stopping = self._stopping
            if not stopping:
                self._queue.append(Progress(request))
                self._wake.notify(len(request.fds))
        if stopping:
            Progress(request).report()

    @override
    def register(self, address: int, num_bytes: int) -> None:
        """Nothing to gain for calls that block."""

    @override
    def unregister(self) -> None:
        """Nothing was pinned."""

    @override
    def stop(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        with self._wake:
            self._stopping = True
            abandoned = list(self._queue)
            self._queue.clear()
            for progress in abandoned:
                progress.cancel_rest()
            unbegun = [progress for progress in abandoned if progress.left == 0]
            self._wake.notify_all()
        for progress in unbegun:
            progress.report()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (work := self._take()) is not None:
            progress, rows = work
            began_ns = time.monotonic_ns()
            self._transfer(progress, rows)
            # One after the other: each took about its share.
            share_ns = (time.monotonic_ns() - began_ns) // (rows.stop - rows.start)
            fds = progress.request.fds[rows]
            self.latencies.note(fds, np.full(len(fds), share_ns, dtype=np.int64))
            with self._wake:
                progress.left -= rows.stop - rows.start
                finished = progress.left == 0
            if finished:
                progress.report()

    def _take(self) -> tuple[Progress[RequestT], slice] | None:
        with self._wake:
            while not self._queue:
                if self._stopping:
                    return None
                self._wake.wait()
            progress = self._queue[0]
            unbegun = len(progress.results) - progress.next_row
            # Few rows a turn, so that a short request still uses every thread.
            rows = progress.take(max(1, min(_ROWS_A_TURN, unbegun // len(self._threads))))
            if progress.next_row == len(progress.results):
                self._queue.popleft()
            return progress, rows


class ThreadEngine(PoolEngine[IoRequest]):
    """pread/pwrite on a few threads."""

    @override
    def _transfer(self, progress: Progress[IoRequest], rows: slice) -> None:
        request = progress.request
        call = _pwrite if request.write else _pread
        columns = (request.fds, request.addresses, request.lengths, request.offsets)
        for row, (fd, address, length, offset) in enumerate(
            zip(*(column[rows].tolist() for column in columns), strict=True), rows.start
        ):
            moved = call(fd, address, length, offset)
            progress.results[row] = moved if moved >= 0 else -ctypes.get_errno()

"""The two pipelines: a direction's streams, staging buffers and address tables.

    restore         copy stream: ring → buffer or pages    kernel stream: buffer → pages
    save            kernel stream: pages → buffer          copy stream: buffer or pages → ring
    direct streams  a kernel between ring and pages
    table stream    address tables of long direct pieces, ahead of the kernel
    end stream      nothing but the end of transfers that end on several streams

Kernels that use the ring take turns on two streams: while the last programs of one wait
for the link, the next already runs. The copy streams carry nothing but the bytes: a
table between two pieces would cost 5 % of the link. A kernel reads its table from pinned
memory, unless it is a long one between ring and pages: that table is copied to the device first.
A buffer or table is filled again only after the event that ends its last use: a stream
waits for it, or, for pinned tables, this thread has seen it happen.
Transfers may overlap; each ends with its own event, in no promised order.

A small transfer takes longer here than on the link, so each CUDA call counts. Of a piece's
streams only the first waits for the mark, since the second waits for it, and only the
last is recorded. A stream does not wait twice for the same mark: it runs in order, and a mark
is recorded once. A wait goes by handles through cupy's runtime, as copies do: torch
asks CUDA each time whether the current stream is being captured. A record stays with torch: cupy
keeps the GIL in it, and where a stream's queue is full the forward pass would stop.

Owning thread: the mover's. Failure scope: after an error drain() must be called before
the transfer's memory is used again.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from adp_kv.kernels.alignment import common_alignment
from adp_kv.transfer.copy_engine import CopyEngine
from adp_kv.transfer.device import Table, TorchDevice
from adp_kv.transfer.plan import Piece, Plan, Way
from adp_kv.transfer.settings import MoverSettings
from adp_kv.transfer.tables import TablePool, table_words

_BUFFER_ALIGN = 256
_WORD_BYTES = 8
_URGENT = -1
_NUM_TABLES = 4
_POLL_S = 0.0002

Addrs: TypeAlias = NDArray[np.int64]


@dataclass(slots=True)
class _Stream:
    """A stream, its handle, and the mark that it waited for last."""

    cuda: torch.cuda.Stream
    handle: int
    mark: torch.cuda.Event | None = None


@dataclass(slots=True)
class _Lane:
    """A staging buffer.

    Attributes:
        addr: where it starts.
        filled: recorded each time that it is full.
        free: the end of its last use.
    """

    addr: int
    filled: torch.cuda.Event
    free: torch.cuda.Event | None = None


@dataclass(slots=True)
class _DeviceTable:
    """Room for the addresses of max_pages pages, and the end of their last use."""

    words: torch.Tensor
    free: torch.cuda.Event | None = None


class Pipe:
    """One direction of a device mover."""

    def __init__(
        self, device: TorchDevice, engine: CopyEngine, settings: MoverSettings, *, to_device: bool
    ) -> None:
        self._to_device = to_device
        self._device = device
        self._engine = engine
        self._settings = settings
        self._wait = engine.runtime.streamWaitEvent
        self._copy_stream = self._new_stream(0)
        self._kernel_stream = self._new_stream(_URGENT)
        both = self._copy_stream, self._kernel_stream
        self._staged_streams = both if to_device else both[::-1]
        self._ring_programs = settings.restore_programs if to_device else settings.save_programs
        self._direct_streams = deque((self._new_stream(_URGENT), self._new_stream(_URGENT)))
        self._table_stream = self._new_stream(_URGENT)
        self._end_stream = self._new_stream(_URGENT)
        self._pool = TablePool(device, settings.max_pages)
        num = settings.staging_buffers
        self.buffer_bytes = settings.staging_bytes // num // _BUFFER_ALIGN * _BUFFER_ALIGN
        self._staging = device.allocate(max(self.buffer_bytes * num, 1))
        first = self._staging.data_ptr()
        self._lanes = deque(
            _Lane(first + idx * self.buffer_bytes, device.event()) for idx in range(num)
        )
        table_bytes = table_words(settings.max_pages) * _WORD_BYTES
        self._tables = deque(
            _DeviceTable(device.allocate(table_bytes).view(torch.int64)) for _ in range(_NUM_TABLES)
        )

    def _new_stream(self, priority: int) -> _Stream:
        stream = self._device.stream(priority)
        return _Stream(stream, stream.cuda_stream)

    def start(self, plan: Plan, after: torch.cuda.Event | None) -> torch.cuda.Event:
        """Queue a transfer of at least a page; return the event that ends it."""
        ends: dict[int, torch.cuda.Event] = {}  # of each stream on which a piece ended, the last
        for piece in plan.pieces():
            if piece.way is Way.DIRECT:
                stream, end = self._move_direct(piece, plan.page_bytes, after)
            elif piece.way is Way.STAGED:
                stream, end = self._move_staged(piece, plan.page_bytes, after)
            else:
                stream, end = self._move_batch(piece, after)
            ends[stream.handle] = end
        if len(ends) > 1:
            for end in ends.values():
                self._wait(self._end_stream.handle, end.cuda_event)
            return self._device.record(self._end_stream.cuda)
        (end,) = ends.values()
        return end

    def _start_on(self, stream: _Stream, after: torch.cuda.Event | None) -> None:
        """Let a piece's first stream wait for the mark."""
        if after is not None and after is not stream.mark:
            self._wait(stream.handle, after.cuda_event)
            stream.mark = after

    def _move_batch(
        self, piece: Piece, after: torch.cuda.Event | None
    ) -> tuple[_Stream, torch.cuda.Event]:
        """Queue copies between ring and pages; return where and with what they end."""
        self._start_on(self._copy_stream, after)
        self._copy(piece, 0)
        return self._copy_stream, self._device.record(self._copy_stream.cuda)

    def _move_direct(
        self, piece: Piece, page_bytes: int, after: torch.cuda.Event | None
    ) -> tuple[_Stream, torch.cuda.Event]:
        """Queue a kernel between ring and pages; return where and with what it ends."""
        assert piece.host_addrs is not None
        self._direct_streams.rotate()
        stream = self._direct_streams[0]
        self._start_on(stream, after)
        pinned = self._take_table(piece.host_addrs, piece.page_addrs)
        align = common_alignment(page_bytes, piece.host_addrs, piece.page_addrs)
        if pinned.num_pages <= self._settings.pinned_pages:
            self._launch(stream, pinned, page_bytes, align, self._ring_programs)
            end = self._device.record(stream.cuda)
            pinned.hold_until(end, stream.handle)
            return stream, end
        room = self._tables[0]
        self._tables.rotate(-1)
        table = self._upload(room, pinned, stream)
        self._launch(stream, table, page_bytes, align, self._ring_programs)
        room.free = self._device.record(stream.cuda)
        return stream, room.free

    def _upload(self, room: _DeviceTable, pinned: Table, stream: _Stream) -> Table:
        """Bring a table to the device; the kernel's stream waits until it is there."""
        uploading = self._table_stream
        if room.free is not None:
            self._wait(uploading.handle, room.free.cuda_event)
        self._engine.upload(
            room.words.data_ptr(),
            pinned.words.data_ptr() + pinned.first * _WORD_BYTES,
            2 * pinned.row_words * _WORD_BYTES,
            uploading.handle,
        )
        there = self._device.record(uploading.cuda)
        pinned.hold_until(there, uploading.handle)
        self._wait(stream.handle, there.cuda_event)
        return pinned._replace(words=room.words, first=0)

    def _move_staged(
        self, piece: Piece, page_bytes: int, after: torch.cuda.Event | None
    ) -> tuple[_Stream, torch.cuda.Event]:
        """Queue copy and kernel in the direction's order; return where and with what they end."""
        lane = self._lanes[0]
        self._lanes.rotate(-1)
        first, last = self._staged_streams
        self._start_on(first, after)
        if lane.free is not None:
            self._wait(first.handle, lane.free.cuda_event)
        if self._to_device:
            self._copy(piece, lane.addr)
            self._hand_over(lane, first, last)
            table = self._launch_staged(piece, page_bytes, lane)
        else:
            table = self._launch_staged(piece, page_bytes, lane)
            self._hand_over(lane, first, last)
            self._copy(piece, lane.addr)
        lane.free = self._device.record(last.cuda)
        table.hold_until(lane.free, last.handle)
        return last, lane.free

    def _hand_over(self, lane: _Lane, first: _Stream, last: _Stream) -> None:
        """Let the buffer's second stream wait for the first."""
        lane.filled.record(first.cuda)
        self._wait(last.handle, lane.filled.cuda_event)

    def _launch_staged(self, piece: Piece, page_bytes: int, lane: _Lane) -> Table:
        """Launch the kernel between buffer and pages; return the table that it reads."""
        end = lane.addr + piece.num_pages * page_bytes
        table = self._take_table(
            np.arange(lane.addr, end, page_bytes, dtype=np.int64), piece.page_addrs
        )
        align = common_alignment(page_bytes | lane.addr, piece.page_addrs)
        self._launch(self._kernel_stream, table, page_bytes, align, self._settings.page_programs)
        return table

    def _take_table(self, near: Addrs, pages: Addrs) -> Table:
        """Return a table of where the kernel reads and where it writes."""
        return self._pool.take(near, pages) if self._to_device else self._pool.take(pages, near)

    def _launch(
        self, stream: _Stream, table: Table, page_bytes: int, align: int, num_programs: int
    ) -> None:
        self._device.launch_table(
            stream.cuda, table, page_bytes, align=align, num_programs=num_programs
        )

    def _copy(self, piece: Piece, device_base: int) -> None:
        """Queue a piece's copies on the copy stream."""
        assert piece.extents is not None
        stream = self._copy_stream.handle
        self._engine.copy(piece.extents, device_base, to_device=self._to_device, stream=stream)

    def ends(self) -> list[torch.cuda.Event]:
        """Return events that have happened when everything that was queued has ended."""
        streams = (self._table_stream, self._copy_stream, self._kernel_stream)
        return [self._device.record(each.cuda) for each in (*streams, *self._direct_streams)]

    def drain(self, deadline: float) -> bool:
        """Wait until everything that was queued has ended; return False at the deadline.

        Args:
            deadline: of time.monotonic(); a device that hangs would never let go.
        """
        ends = self.ends()
        while not all(end.query() for end in ends):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

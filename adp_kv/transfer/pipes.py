"""The two pipelines: a direction's streams, staging buffers and address tables.

    table stream    address tables, ahead of the bytes
    restore         copy stream: ring → buffer or pages    kernel stream: buffer → pages
    save            kernel stream: pages → buffer          copy stream: buffer or pages → ring
    direct streams  a kernel between ring and pages
    end stream      nothing but the end of each transfer

Kernels that use the ring take turns on two streams: while the last programs of one wait
for the link, the next already runs. The copy streams carry nothing but the bytes: a
table between two pieces would cost 5 % of the link. A buffer or table is filled again
only after the event that ends its last use, waited for by a stream. Transfers may
overlap; each ends with its own event.
Owning thread: the mover's. Failure scope: after an error drain() must be called before
the transfer's memory is used again.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from adp_kv.kernels.alignment import common_alignment
from adp_kv.transfer.copy_engine import CopyEngine
from adp_kv.transfer.device import TorchDevice
from adp_kv.transfer.plan import Piece, Plan, Way
from adp_kv.transfer.settings import MoverSettings
from adp_kv.transfer.tables import TablePool
from adp_kv.units import align_up

_BUFFER_ALIGN = 256
_WORD_BYTES = 8
_URGENT = -1
_NUM_TABLES = 4
_POLL_S = 0.0002

Addrs: TypeAlias = NDArray[np.int64]
Launch: TypeAlias = Callable[[int], None]
"""Launches the page kernel of a piece with so many programs."""


@dataclass(slots=True)
class _Lane:
    """A staging buffer and the end of its last use."""

    addr: int
    free: torch.cuda.Event | None = None


@dataclass(slots=True)
class _DeviceTable:
    """Room for the addresses of max_pages pages, and the end of their last use."""

    words: torch.Tensor
    free: torch.cuda.Event | None = None


class Pipe(ABC):
    """One direction of a device mover."""

    def __init__(self, device: TorchDevice, engine: CopyEngine, settings: MoverSettings) -> None:
        self._device = device
        self._engine = engine
        self._settings = settings
        self._copy_stream = device.stream(0)
        self._kernel_stream = device.stream(_URGENT)
        self._direct_streams = deque((device.stream(_URGENT), device.stream(_URGENT)))
        self._table_stream = device.stream(_URGENT)
        self._end_stream = device.stream(_URGENT)
        self._pool = TablePool(device, settings.max_pages)
        num = settings.staging_buffers
        self.buffer_bytes = settings.staging_bytes // num // _BUFFER_ALIGN * _BUFFER_ALIGN
        self._staging = device.allocate(max(self.buffer_bytes * num, 1))
        first = self._staging.data_ptr()
        self._lanes = deque(_Lane(first + idx * self.buffer_bytes) for idx in range(num))
        table_bytes = 2 * align_up(settings.max_pages, 2) * _WORD_BYTES
        self._tables = deque(
            _DeviceTable(device.allocate(table_bytes).view(torch.int64)) for _ in range(_NUM_TABLES)
        )

    def start(self, plan: Plan, after: torch.cuda.Event | None) -> torch.cuda.Event:
        """Queue a transfer; return the event that ends it."""
        streams = (self._copy_stream, self._kernel_stream, *self._direct_streams)
        if after is not None:
            for stream in streams:
                stream.wait_event(after)
        for group in _groups(plan, self._settings.max_pages):
            match group[0].way:
                case Way.DIRECT:
                    self._direct_streams.rotate()
                    self._move_group(plan, group, self._direct_streams[0])
                case Way.STAGED:
                    self._move_group(plan, group, self._kernel_stream)
                case Way.BATCH:
                    self._copy(group[0], 0)
        for stream in streams:
            self._end_stream.wait_event(self._device.record(stream))
        return self._device.record(self._end_stream)

    def _move_group(self, plan: Plan, group: list[Piece], stream: torch.cuda.Stream) -> None:
        """Queue pieces that a kernel takes part in on a stream, with one table for all."""
        lanes = [self._next_lane() if piece.way is Way.STAGED else None for piece in group]
        near = _joined([_near_addresses(plan, *both) for both in zip(group, lanes, strict=True)])
        pages = _joined([piece.page_addrs for piece in group])
        table = self._tables[0]
        self._tables.rotate(-1)
        sources, targets = self._upload(table, stream, *self._from_to(near, pages))
        align = common_alignment(plan.page_bytes, near, pages)
        first = 0
        for piece, lane in zip(group, lanes, strict=True):
            there = slice(first, first + piece.num_pages)
            first = there.stop
            launch = partial(
                self._launch, stream, sources[there], targets[there], plan.page_bytes, align
            )
            self._move(piece, lane, launch)
        table.free = self._device.record(stream)

    def _upload(
        self, table: _DeviceTable, stream: torch.cuda.Stream, sources: Addrs, targets: Addrs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring addresses to the device; the kernels' stream waits until they are there."""
        pinned = self._pool.take(sources, targets)
        if table.free is not None:
            self._table_stream.wait_event(table.free)
        self._engine.upload(
            table.words.data_ptr(),
            pinned.tensor.data_ptr(),
            pinned.tensor.numel() * _WORD_BYTES,
            self._table_stream.cuda_stream,
        )
        there = self._device.record(self._table_stream)
        pinned.hold_until(there)
        stream.wait_event(there)
        row = pinned.row_words
        return table.words[: pinned.num_pages], table.words[row : row + pinned.num_pages]

    def _launch(
        self,
        stream: torch.cuda.Stream,
        sources: torch.Tensor,
        targets: torch.Tensor,
        page_bytes: int,
        align: int,
        num_programs: int,
    ) -> None:
        self._device.launch(
            stream,
            sources,
            targets,
            page_bytes,
            align=align,
            num_programs=num_programs,
        )

    def _next_lane(self) -> _Lane:
        lane = self._lanes[0]
        self._lanes.rotate(-1)
        return lane

    def drain(self, deadline: float) -> bool:
        """Wait until everything that was queued has ended; return False at the deadline.

        Args:
            deadline: of time.monotonic(); a device that hangs would never let go.
        """
        streams = (self._table_stream, self._copy_stream, self._kernel_stream)
        ends = [self._device.record(stream) for stream in (*streams, *self._direct_streams)]
        while not all(end.query() for end in ends):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    @abstractmethod
    def _from_to(self, near: Addrs, pages: Addrs) -> tuple[Addrs, Addrs]:
        """Return where the kernel reads and where it writes."""

    @abstractmethod
    def _move(self, piece: Piece, lane: _Lane | None, launch: Launch) -> None:
        """Queue a piece that a kernel takes part in; no lane: the kernel uses the ring."""

    @abstractmethod
    def _copy(self, piece: Piece, device_base: int) -> None:
        """Queue a piece's copies on the copy stream."""


class RestorePipe(Pipe):
    """Ring → pages."""

    @override
    def _from_to(self, near: Addrs, pages: Addrs) -> tuple[Addrs, Addrs]:
        return near, pages

    @override
    def _copy(self, piece: Piece, device_base: int) -> None:
        assert piece.extents is not None
        stream = self._copy_stream.cuda_stream
        self._engine.copy(piece.extents, device_base, to_device=True, stream=stream)

    @override
    def _move(self, piece: Piece, lane: _Lane | None, launch: Launch) -> None:
        if lane is None:
            launch(self._settings.restore_programs)
            return
        if lane.free is not None:
            self._copy_stream.wait_event(lane.free)
        self._copy(piece, lane.addr)
        self._kernel_stream.wait_event(self._device.record(self._copy_stream))
        launch(self._settings.page_programs)
        lane.free = self._device.record(self._kernel_stream)


class SavePipe(Pipe):
    """Pages → ring."""

    @override
    def _from_to(self, near: Addrs, pages: Addrs) -> tuple[Addrs, Addrs]:
        return pages, near

    @override
    def _copy(self, piece: Piece, device_base: int) -> None:
        assert piece.extents is not None
        stream = self._copy_stream.cuda_stream
        self._engine.copy(piece.extents, device_base, to_device=False, stream=stream)

    @override
    def _move(self, piece: Piece, lane: _Lane | None, launch: Launch) -> None:
        if lane is None:
            launch(self._settings.save_programs)
            return
        if lane.free is not None:
            self._kernel_stream.wait_event(lane.free)
        launch(self._settings.page_programs)
        self._copy_stream.wait_event(self._device.record(self._kernel_stream))
        self._copy(piece, lane.addr)
        lane.free = self._device.record(self._copy_stream)


def _groups(plan: Plan, max_pages: int) -> Iterator[list[Piece]]:
    """Yield the pieces that share an address table, as soon as they are planned.

    Staged pieces do, whatever fits; but the first has its own, so that its bytes move soon.
    """
    group: list[Piece] = []
    for first, piece in enumerate(plan.pieces()):
        shared = first > 1 and piece.way is Way.STAGED and group[-1].way is Way.STAGED
        if not shared or sum(part.num_pages for part in group) + piece.num_pages > max_pages:
            if group:
                yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _joined(parts: list[Addrs]) -> Addrs:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _near_addresses(plan: Plan, piece: Piece, lane: _Lane | None) -> Addrs:
    """Return where a piece's pages lie on the near side: in staging, or in the ring."""
    if lane is None:
        assert piece.host_addrs is not None
        return piece.host_addrs
    return lane.addr + np.arange(piece.num_pages, dtype=np.int64) * plan.page_bytes

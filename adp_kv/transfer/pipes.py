"""The two pipelines: a direction's streams, staging buffers and address tables.

    table stream    address tables, once for many pieces, ahead of the bytes
    restore         copy stream: ring → buffer            kernel stream: buffer or ring → pages
    save            kernel stream: pages → buffer or ring     copy stream: buffer → ring

Kernels that use the ring take turns on two streams: while the last programs of one wait
for the link, the next already runs. The copy streams carry nothing but the bytes: a
table between two pieces would cost 5 % of the link. A buffer or table is filled again
only after the event that ends its last use, waited for by a stream. Transfers may
overlap; each ends with its own event.
Owning thread: the mover's. Failure scope: after an error drain() must be called before
the transfer's memory is used again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
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
        self._direct_streams = deque((self._kernel_stream, device.stream(_URGENT)))
        self._table_stream = device.stream(_URGENT)
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
        if after is not None:
            for stream in (self._copy_stream, *self._direct_streams):
                stream.wait_event(after)
        groups = _groups(plan, self._settings.max_pages)
        way = plan.pieces[0].way
        if way is Way.DIRECT:
            self._direct_streams.rotate()
            for group in groups:
                self._move_group(plan, group, self._direct_streams[0])
            return self._device.record(self._direct_streams[0])
        for group in groups:
            if way is Way.STAGED:
                self._move_group(plan, group, self._kernel_stream)
            else:
                for piece in group:
                    self._copy(piece, 0)
        first, last = self._order()
        last.wait_event(self._device.record(first))
        return self._device.record(last)

    def _move_group(self, plan: Plan, group: list[Piece], stream: torch.cuda.Stream) -> None:
        """Queue pieces that a kernel takes part in on a stream, with one table for all."""
        lanes = [self._next_lane() if piece.way is Way.STAGED else None for piece in group]
        near = np.concatenate(
            [
                _near_addresses(plan, piece, 0 if lane is None else lane.addr)
                for piece, lane in zip(group, lanes, strict=True)
            ]
        )
        pages = plan.page_addrs[group[0].first_page : group[-1].first_page + group[-1].num_pages]
        table = self._tables[0]
        self._tables.rotate(-1)
        sources, targets = self._upload(table, stream, *self._from_to(near, pages))
        align = common_alignment(plan.page_bytes, near, pages)
        for piece, lane in zip(group, lanes, strict=True):
            there = slice(
                piece.first_page - group[0].first_page,
                piece.first_page - group[0].first_page + piece.num_pages,
            )
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

    def drain(self) -> None:
        """Block until everything that was queued has ended."""
        self._table_stream.synchronize()
        self._copy_stream.synchronize()
        for stream in self._direct_streams:
            stream.synchronize()

    @abstractmethod
    def _order(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Return the streams in the order in which bytes pass them."""

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
    def _order(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        return self._copy_stream, self._kernel_stream

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
    def _order(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        return self._kernel_stream, self._copy_stream

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


def _groups(plan: Plan, max_pages: int) -> list[list[Piece]]:
    """Return consecutive pieces together whose pages fit one table."""
    groups: list[list[Piece]] = []
    room = 0
    for piece in plan.pieces:
        if not groups or piece.num_pages > room:
            groups.append([])
            room = max_pages
        groups[-1].append(piece)
        room -= piece.num_pages
    return groups


def _near_addresses(plan: Plan, piece: Piece, staging_addr: int) -> Addrs:
    """Return where a piece's pages lie on the near side: in staging, or in the ring."""
    if piece.way is Way.DIRECT:
        return plan.host_addrs[piece.first_page : piece.first_page + piece.num_pages]
    return staging_addr + np.arange(piece.num_pages, dtype=np.int64) * plan.page_bytes

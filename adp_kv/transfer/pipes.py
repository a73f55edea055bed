"""The two pipelines: a direction's streams, staging buffers and address tables.

    restore   copy stream: table, ring → buffer     kernel stream: buffer or ring → pages
    save      kernel stream: pages → buffer or ring     copy stream: buffer → ring

A buffer is filled again only after the event that ends its last use, waited for by a
stream. Transfers of a direction happen in the order of their start.
Owning thread: the mover's. Failure scope: after an error drain() must be called before
the transfer's memory is used again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from adp_kv.kernels.alignment import common_alignment
from adp_kv.transfer.copy_engine import CopyEngine
from adp_kv.transfer.device import TorchDevice
from adp_kv.transfer.plan import Piece, Plan, Way
from adp_kv.transfer.settings import MoverSettings
from adp_kv.transfer.tables import Table, TablePool
from adp_kv.units import align_up

_BUFFER_ALIGN = 256
_WORD_BYTES = 8
_URGENT = -1


@dataclass(slots=True)
class _Lane:
    """A staging buffer, its address table on the device, and the end of their last use."""

    addr: int
    table: torch.Tensor
    free: torch.cuda.Event | None = None


class Pipe(ABC):
    """One direction of a device mover."""

    def __init__(self, device: TorchDevice, engine: CopyEngine, settings: MoverSettings) -> None:
        self._device = device
        self._engine = engine
        self._settings = settings
        self._copy_stream = device.stream(0)
        self._kernel_stream = device.stream(_URGENT)
        self._pool = TablePool(device, settings.max_pages)
        num = settings.staging_buffers
        self.buffer_bytes = settings.staging_bytes // num // _BUFFER_ALIGN * _BUFFER_ALIGN
        self._staging = device.allocate(max(self.buffer_bytes * num, 1))
        table_bytes = 2 * align_up(settings.max_pages, 2) * _WORD_BYTES
        first = self._staging.data_ptr()
        self._lanes = [
            _Lane(first + idx * self.buffer_bytes, device.allocate(table_bytes).view(torch.int64))
            for idx in range(num)
        ]
        self._next_lane = 0

    def start(self, plan: Plan, after: torch.cuda.Event | None) -> torch.cuda.Event:
        """Queue a transfer; return the event that ends it."""
        if after is not None:
            self._copy_stream.wait_event(after)
            self._kernel_stream.wait_event(after)
        for piece in plan.pieces:
            if piece.way is Way.BATCH:
                assert piece.extents is not None
                self._copy(piece, 0)
            else:
                self._move(plan, piece)
        first, last = self._order()
        last.wait_event(self._device.record(first))
        return self._device.record(last)

    def drain(self) -> None:
        """Block until everything that was queued has ended."""
        self._copy_stream.synchronize()
        self._kernel_stream.synchronize()

    @abstractmethod
    def _order(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Return the streams in the order in which bytes pass them."""

    @abstractmethod
    def _move(self, plan: Plan, piece: Piece) -> None:
        """Queue a piece that a kernel takes part in."""

    @abstractmethod
    def _copy(self, piece: Piece, device_base: int) -> None:
        """Queue a piece's copies on the copy stream."""

    def _take_lane(self) -> _Lane:
        lane = self._lanes[self._next_lane]
        self._next_lane = (self._next_lane + 1) % len(self._lanes)
        return lane

    def _launch(
        self, table: torch.Tensor, shape: Table, piece: Piece, plan: Plan, align: int
    ) -> None:
        """Launch the page kernel over a table that lies on the device or in pinned memory."""
        settings = self._settings
        num_programs = settings.page_programs
        if piece.way is Way.DIRECT:
            num_programs = self._direct_programs()
        self._device.launch(
            self._kernel_stream,
            table[: shape.num_pages],
            table[shape.row_words : shape.row_words + shape.num_pages],
            plan.page_bytes,
            align=align,
            num_programs=num_programs,
        )

    @abstractmethod
    def _direct_programs(self) -> int:
        """Return the programs of a kernel that waits on the link."""


class RestorePipe(Pipe):
    """Ring → pages. Tables travel ahead of the bytes, on the same stream."""

    def _order(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        return self._copy_stream, self._kernel_stream

    def _direct_programs(self) -> int:
        return self._settings.restore_programs

    def _copy(self, piece: Piece, device_base: int) -> None:
        assert piece.extents is not None
        stream = self._copy_stream.cuda_stream
        self._engine.copy(piece.extents, device_base, to_device=True, stream=stream)

    def _move(self, plan: Plan, piece: Piece) -> None:
        lane = self._take_lane()
        if lane.free is not None:
            self._copy_stream.wait_event(lane.free)
        near, pages = _addresses(plan, piece, lane.addr)
        table = self._pool.take(near, pages)
        self._engine.upload(
            lane.table.data_ptr(),
            table.tensor.data_ptr(),
            table.tensor.numel() * _WORD_BYTES,
            self._copy_stream.cuda_stream,
        )
        if piece.way is Way.STAGED:
            self._copy(piece, lane.addr)
        filled = self._device.record(self._copy_stream)
        table.hold_until(filled)
        self._kernel_stream.wait_event(filled)
        align = common_alignment(plan.page_bytes, near, pages)
        self._launch(lane.table, table, piece, plan, align)
        lane.free = self._device.record(self._kernel_stream)


class SavePipe(Pipe):
    """Pages → ring. The kernel reads its table in pinned memory: the link is free that way."""

    def _order(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        return self._kernel_stream, self._copy_stream

    def _direct_programs(self) -> int:
        return self._settings.save_programs

    def _copy(self, piece: Piece, device_base: int) -> None:
        assert piece.extents is not None
        stream = self._copy_stream.cuda_stream
        self._engine.copy(piece.extents, device_base, to_device=False, stream=stream)

    def _move(self, plan: Plan, piece: Piece) -> None:
        lane = self._take_lane() if piece.way is Way.STAGED else None
        if lane is not None and lane.free is not None:
            self._kernel_stream.wait_event(lane.free)
        near, pages = _addresses(plan, piece, lane.addr if lane is not None else 0)
        table = self._pool.take(pages, near)
        align = common_alignment(plan.page_bytes, near, pages)
        self._launch(table.tensor, table, piece, plan, align)
        gathered = self._device.record(self._kernel_stream)
        table.hold_until(gathered)
        if lane is not None:
            self._copy_stream.wait_event(gathered)
            self._copy(piece, lane.addr)
            lane.free = self._device.record(self._copy_stream)


def _addresses(
    plan: Plan, piece: Piece, staging_addr: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where a piece's pages lie on the near side (staging or ring), and on the device."""
    there = slice(piece.first_page, piece.first_page + piece.num_pages)
    if piece.way is Way.DIRECT:
        return plan.host_addrs[there], plan.page_addrs[there]
    staged = staging_addr + np.arange(piece.num_pages, dtype=np.int64) * plan.page_bytes
    return staged, plan.page_addrs[there]

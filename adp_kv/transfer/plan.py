"""Choose how a transfer moves and cut it into pieces; pure numpy.

A piece is planned while the ones before it move, so that little is done before the first byte.

Slices are taken in the order in which they come: the gateway hands out slots in ascending
runs, and sorting thousands of scattered ones would take as long as moving them. A piece
is a range of pages in that order:

    STAGED   ring ◄─ copy engine ─► staging buffer ◄─ page kernel ─► pages
    DIRECT   ring ◄────────────── page kernel ─────────────────────► pages
    BATCH    ring ◄────────────── copy engine ─────────────────────► pages

A kernel that runs beside the model's CUDA graphs makes what lies between their kernels longer, and
it stays longer when it has ended (docs/design/restore-profile.md); copies of the copy engine leave
nothing behind. So BATCH comes first wherever it is about as fast.

No copy of the copy engine crosses a border between two registrations of the ring: CUDA
refuses such a copy. The kernel may cross them. Failure scope: one transfer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import cycle, repeat
from typing import NamedTuple

import numpy as np

from adp_kv.errors import TransferError
from adp_kv.transfer.base import SliceCopy
from adp_kv.transfer.extents import (
    Addrs,
    Extents,
    OneCopy,
    cut_at_borders,
    rows_apart,
    staged_extents,
)
from adp_kv.units import KiB, MiB

NEVER = 1 << 62
"""A threshold that no transfer reaches."""
_SEEN = 4096
"""Slices that the choice looks at: all of them would take as long as moving 8 MiB."""


class Way(Enum):
    """How the bytes of a piece move (see the module)."""

    STAGED = "staged"
    DIRECT = "direct"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Where one way becomes faster than the next, in bytes.

    Measured on an H200 with PCIe Gen5 x16; shares are of a contiguous 1 GiB copy in
    the same run. benchmarks/scatter.py and benchmarks/gather.py check the choice.

    Attributes:
        staged: smallest transfer that is staged; a staged piece costs two launches
            more than a kernel that reads the ring (1 MiB: 98 against 70 µs; 4 MiB: 102
            against 131).
        extent: mean bytes of a copy call from which single calls keep the link
            busy (1 MiB 0.86 a call each, 64 KiB 0.28).
        strided: smallest slice whose strided run moves by 2-D copies.
        batch: smallest page worth an entry of a batched call.
        batch_slice: likewise smallest run of slices, to or from staging, if not below batch.
        few_pages: most pages that are entries of batched calls whatever their size: an entry
            takes 0.9 µs, and 128 of them as long as one launch of a kernel with its copies.
        beside_strided: smallest slice of a strided run of which the copy engine moves a part
            while a kernel moves the rest.
        beside: that part, below 1.
        force: use this way wherever it is possible, whatever the sizes are.
    """

    staged: int
    extent: int
    strided: int
    batch: int
    batch_slice: int = 0
    few_pages: int = 0
    beside_strided: int = NEVER
    beside: float = 0.25
    force: Way | None = None


RESTORE = Thresholds(staged=2 * MiB, extent=MiB, strided=64 * KiB, batch=40 * KiB, few_pages=128)
"""Ring to device. 2-D copies 0.95 from 64 KiB on, 0.86 at 32 and 0.60 at 16 KiB, batches 0.97
from 72 KiB on, 0.95 at 41 and 0.61 to 0.69 at 32 KiB, against 0.917 for any kernel at any size,
which copies beside it do not raise."""
SAVE = Thresholds(
    staged=2 * MiB, extent=MiB, strided=NEVER, batch=64 * KiB, batch_slice=MiB, few_pages=256,
    beside_strided=8 * KiB, beside=0.25,
)  # fmt: skip
"""Device to ring. A kernel alone reaches 0.94 at any size, with a quarter of the bytes moved by
copies beside it 0.95; behind a gather, 2-D copies alone reach 0.59 to 0.91 and contiguous
ones 0.96; batches 0.65 at 32 KiB and, by the host, 0.90 to 0.97 at 64 KiB, 0.91 to 0.99 at 128.
What a batch of decodes saves in a step is few pages."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the mover has.

    Attributes:
        borders: int64, sorted addresses at which one registration of the ring ends and
            the next begins.
        staging_bytes: bytes of one staging buffer, the most one piece may stage.
        direct_bytes: bytes of a piece that a kernel moves between ring and pages.
        max_pages: most pages of a piece (its address table has that many rows).
        has_batch: whether batched copies are one call.
    """

    borders: Addrs
    staging_bytes: int
    direct_bytes: int
    max_pages: int
    has_batch: bool


class Piece(NamedTuple):
    """Pages that follow each other in a transfer and move the same way.

    Attributes:
        way: how they move.
        first_page: number of the first in the transfer.
        page_addrs: int64 [n], where each page lies on the device.
        host_addrs: int64 [n], where each lies in the ring; None unless DIRECT.
        extents: the copies of the copy engine; None if DIRECT.
    """

    way: Way
    first_page: int
    page_addrs: Addrs
    host_addrs: Addrs | None
    extents: Extents | OneCopy | None

    @property
    def num_pages(self) -> int:
        """Pages of the piece."""
        return int(self.page_addrs.size)


class Plan:
    """A transfer, cut into pieces one after the other while the ones before move.

    Attributes:
        page_bytes: of every page.
        low, high: the slices lie in [low, high), the addresses of the first and behind the last.
    """

    def __init__(self, copy: SliceCopy, limits: Limits, thresholds: Thresholds) -> None:
        self.page_bytes = copy.page_bytes
        self._copy = copy
        self._limits = limits
        self._per_slice: int = copy.page_addrs.shape[1]
        self._num_pages: int = copy.page_addrs.size
        self._pages = np.ascontiguousarray(copy.page_addrs).reshape(-1)
        self._slice_bytes = self._per_slice * copy.page_bytes
        self.low, self.high, self._pitch = _look(copy.slice_addrs, self._slice_bytes)
        inside = bisect_right(limits.borders, self.low), bisect_left(limits.borders, self.high)
        self._has_borders = inside[0] < inside[1]
        shape = _shape(copy, thresholds, self._slice_bytes, self._pitch)
        self._step, self._total_bytes = shape.step, shape.total_bytes
        self._way = _choose(copy.page_bytes, shape, limits, thresholds)
        self._has_help = _has_help(copy.page_bytes, shape, limits, thresholds)
        self._share = thresholds.beside

    def pieces(self) -> Iterator[Piece]:
        """Yield pieces that cover every page once, in order."""
        first = 0
        sizes = self._sizes()
        while first < self._num_pages:
            way, num_bytes = next(sizes)
            most = max(1, min(num_bytes // self.page_bytes, self._limits.max_pages))
            num_pages = self._whole_slices(first, most)
            yield self._piece(way, first, num_pages)
            first += num_pages

    def _sizes(self) -> Iterator[tuple[Way, int]]:
        """Yield the ways of successive pieces and their bytes."""
        direct = self._limits.direct_bytes
        if self._way is not Way.DIRECT:
            most = NEVER if self._way is Way.BATCH else self._limits.staging_bytes
            yield from repeat((self._way, most))
        if self._total_bytes > direct:  # the first table is short, so that bytes move soon
            yield Way.DIRECT, direct // 4
        if self._has_help:
            beside = int(direct * self._share / (1 - self._share))
            beside = min(beside, self._limits.staging_bytes)
            yield from cycle([(Way.STAGED, beside), (Way.DIRECT, direct)])
        yield from repeat((Way.DIRECT, direct))

    def _whole_slices(self, first: int, most: int) -> int:
        """Return the pages of a piece: whole slices, or a part of one."""
        inside = first % self._per_slice
        if inside or most < self._per_slice:
            return min(most, self._per_slice - inside)
        return min(most // self._per_slice * self._per_slice, self._num_pages - first)

    def _piece(self, way: Way, first: int, num_pages: int) -> Piece:
        pages = self._pages[first : first + num_pages]
        if way is Way.STAGED:
            return Piece(way, first, pages, None, self._staged(first, num_pages))
        hosts = self._hosts(first, num_pages)
        if way is Way.DIRECT:
            return Piece(way, first, pages, hosts, None)
        if num_pages == 1 and not self._has_borders:
            width = self.page_bytes
            return Piece(
                way, first, pages, None, OneCopy(int(hosts[0]), width, width, 1, int(pages[0]))
            )
        extents = rows_apart(hosts, self.page_bytes, pages)
        return Piece(way, first, pages, None, self._cut(extents))

    def _staged(self, first: int, num_pages: int) -> Extents | OneCopy:
        """Return the copies between the ring and a staging buffer; most pieces are one."""
        rows = num_pages // self._per_slice or 1
        is_one = rows == 1 or self._pitch == self._step
        if not self._pitch or self._has_borders or not is_one:
            return self._cut(staged_extents(self._copy, first, num_pages, self._step))
        row, inside = divmod(first, self._per_slice)
        low = self.low + row * self._pitch + inside * self.page_bytes
        if rows == 1 or self._pitch == self._slice_bytes:
            return OneCopy(low, num_pages * self.page_bytes, num_pages * self.page_bytes, 1, 0)
        return OneCopy(low, self._pitch, self._slice_bytes, rows, 0)

    def _cut(self, extents: Extents) -> Extents:
        return cut_at_borders(extents, self._limits.borders) if self._has_borders else extents

    def _hosts(self, first: int, num_pages: int) -> Addrs:
        """Return where pages lie in the ring."""
        if self._pitch == self._slice_bytes:
            low = self.low + first * self.page_bytes
            return np.arange(low, low + num_pages * self.page_bytes, self.page_bytes, np.int64)
        row, inside = divmod(first, self._per_slice)
        end = -(-(first + num_pages) // self._per_slice)
        slices = self._copy.slice_addrs[row:end]
        hosts = host_page_addrs(slices, self._per_slice, self.page_bytes)
        return hosts[inside : inside + num_pages]


def host_page_addrs(slice_addrs: Addrs, pages_per_slice: int, page_bytes: int) -> Addrs:
    """Return int64 [num_slices * pages_per_slice], where each page lies in the ring."""
    if pages_per_slice == 1:
        return slice_addrs
    hosts = np.empty((pages_per_slice, slice_addrs.size), dtype=np.int64)
    inside = np.arange(pages_per_slice, dtype=np.int64) * page_bytes
    np.add(slice_addrs, inside[:, None], out=hosts)
    return np.ascontiguousarray(hosts.T).reshape(-1)


def check_copy(copy: SliceCopy) -> None:
    """Raise TransferError if the tables of a transfer do not fit each other."""
    slices, pages = copy.slice_addrs, copy.page_addrs
    if pages.ndim != 2 or slices.shape != pages.shape[:1] or copy.page_bytes <= 0:  # noqa: PLR2004
        raise TransferError(
            f"slice_addrs {slices.shape}, page_addrs {pages.shape} and page_bytes "
            f"{copy.page_bytes} do not describe one transfer"
        )
    if slices.dtype != np.int64 or pages.dtype != np.int64:
        raise TransferError(f"addresses must be int64, not {slices.dtype} and {pages.dtype}")


def make_plan(copy: SliceCopy, limits: Limits, thresholds: Thresholds) -> Plan:
    """Return how a transfer moves.

    Args:
        copy: what moves; its slices may come in any order.
        limits: what the mover has.
        thresholds: RESTORE or SAVE.

    Raises:
        TransferError: The tables of the transfer do not fit each other.
    """
    check_copy(copy)
    return Plan(copy, limits, thresholds)


def _look(slices: Addrs, width: int) -> tuple[int, int, int]:
    """Return where slices begin and end, and their distance: 0 where it varies.

    It is not looked for in many slices, as in _shape().
    """
    num = slices.size
    if not num:
        return 0, 0, 0
    first, last = int(slices[0]), int(slices[-1])
    if num == 1:
        return first, first + width, width
    pitch = int(slices[1]) - first
    if num <= _SEEN and pitch >= width and last == first + (num - 1) * pitch:
        gaps = slices[1:] - slices[:-1]
        if np.count_nonzero(gaps == pitch) == gaps.size:
            return first, last + width, pitch
    return int(np.minimum.reduce(slices)), int(np.maximum.reduce(slices)) + width, 0


class _Shape(NamedTuple):
    """How slices lie in the ring.

    Attributes:
        slice_bytes, total_bytes: of the transfer.
        is_run: copies of whole runs keep the link busy.
        is_strided: so do 2-D copies, of rows so far apart.
        step: distance of slices that share a copy.
        mean_1d: mean bytes of a run.
    """

    slice_bytes: int
    total_bytes: int
    is_run: bool
    is_strided: bool
    step: int
    mean_1d: int


def _shape(copy: SliceCopy, thresholds: Thresholds, slice_bytes: int, pitch: int) -> _Shape:
    """Look at the first slices; at all of them would take longer than bytes should wait.

    Args:
        copy: the transfer.
        thresholds: of its direction.
        slice_bytes: of a slice.
        pitch: distance of all slices, if they have one.
    """
    seen = copy.slice_addrs[:_SEEN]
    seen_bytes = seen.size * slice_bytes
    if pitch:
        step = pitch
        mean_1d, mean_2d = seen_bytes if pitch == slice_bytes else slice_bytes, seen_bytes
    else:
        gaps = seen[1:] - seen[:-1]
        wide = gaps[gaps > slice_bytes]
        step = int(wide.min()) if wide.size else slice_bytes
        mean_1d = seen_bytes // (1 + int(np.count_nonzero(gaps != slice_bytes)))
        mean_2d = seen_bytes // (1 + int(np.count_nonzero(gaps != step)))
    is_run = mean_1d >= max(thresholds.extent, 2 * copy.page_bytes)
    is_strided = not is_run and mean_2d >= max(thresholds.extent, 4 * slice_bytes)
    total_bytes = copy.slice_addrs.size * slice_bytes
    step = step if is_strided else slice_bytes
    return _Shape(slice_bytes, total_bytes, is_run, is_strided, step, mean_1d)


def _choose(page_bytes: int, shape: _Shape, limits: Limits, thresholds: Thresholds) -> Way:
    """Return the way of a transfer; if DIRECT, the copy engine may still help."""
    fits = page_bytes <= limits.staging_bytes
    if thresholds.force is not None:
        possible = fits or thresholds.force is not Way.STAGED
        return thresholds.force if possible else Way.DIRECT
    is_few = shape.total_bytes <= thresholds.few_pages * page_bytes
    if limits.has_batch and (is_few or page_bytes >= thresholds.batch):
        return Way.BATCH
    large = fits and shape.total_bytes >= thresholds.staged
    strided = shape.is_strided and shape.slice_bytes >= thresholds.strided
    if large and (shape.is_run or strided):
        return Way.STAGED
    least = max(thresholds.batch, thresholds.batch_slice)
    worth = limits.has_batch and shape.mean_1d >= least
    return Way.STAGED if large and worth else Way.DIRECT


def _has_help(page_bytes: int, shape: _Shape, limits: Limits, thresholds: Thresholds) -> bool:
    """Return whether the copy engine moves a part of a DIRECT transfer, through staging."""
    if thresholds.force is not None or shape.total_bytes <= limits.direct_bytes:
        return False
    is_worth = shape.is_strided and shape.slice_bytes >= thresholds.beside_strided
    return is_worth and page_bytes <= limits.staging_bytes

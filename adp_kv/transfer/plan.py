"""Choose how a transfer moves and cut it into pieces; pure numpy.

Slices are taken in the order in which they come: the gateway hands out slots in ascending
runs, and sorting thousands of scattered ones would take as long as moving them. A piece
is a range of pages in that order:

    STAGED   ring ◄─ copy engine ─► staging buffer ◄─ page kernel ─► pages
    DIRECT   ring ◄────────────── page kernel ─────────────────────► pages
    BATCH    ring ◄────────────── copy engine ─────────────────────► pages

No copy of the copy engine crosses a border between two registrations of the ring: CUDA
refuses such a copy. The kernel may cross them. Failure scope: one transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import TransferError
from adp_kv.transfer.base import SliceCopy
from adp_kv.units import KiB, MiB

Addrs = NDArray[np.int64]
NEVER = 1 << 62
"""A threshold that no transfer reaches."""


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
        batch: smallest copy worth an entry of a batched call.
        force: use this way wherever it is possible, whatever the sizes are.
    """

    staged: int
    extent: int
    strided: int
    batch: int
    force: Way | None = None


RESTORE = Thresholds(staged=2 * MiB, extent=MiB, strided=64 * KiB, batch=64 * KiB)
"""Ring to device. 2-D copies 0.95 from 72 KiB on, 0.83 at 32 and 0.57 at 16 KiB, batches 0.94 from
64 KiB on and 0.67 at 32 KiB, against 0.92 for the kernel at any size."""
SAVE = Thresholds(staged=2 * MiB, extent=MiB, strided=NEVER, batch=MiB)
"""Device to ring. The kernel reaches 0.945 at any size; behind a gather, 2-D copies reach
0.85 to 0.94 and contiguous ones 0.96; batches 0.96 at 1 MiB and 0.90 at 128 KiB."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the mover has.

    Attributes:
        borders: int64, sorted addresses at which one registration of the ring ends and
            the next begins.
        staging_bytes: bytes of one staging buffer, the most one piece may stage.
        max_pages: most pages of a piece (its address table has that many rows).
        has_batch: whether batched copies are one call.
    """

    borders: Addrs
    staging_bytes: int
    max_pages: int
    has_batch: bool


@dataclass(frozen=True, slots=True)
class Extents:
    """Copies of a piece: row r of copy i lies at host_addrs[i] + r * pitches[i].

    On the device its rows follow each other from offsets[i] on: an offset in the
    staging buffer if the piece is STAGED, the address of a page if it is BATCH.
    """

    host_addrs: Addrs
    pitches: Addrs
    widths: Addrs
    rows: Addrs
    offsets: Addrs


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages [first_page, first_page + num_pages) of a plan; extents unless DIRECT."""

    way: Way
    first_page: int
    num_pages: int
    extents: Extents | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A transfer cut into pieces.

    Attributes:
        host_addrs: int64 [num_pages], address of each page in the ring.
        page_addrs: int64 [num_pages], address of the same page on the device.
        page_bytes: bytes of every page.
        pieces: cover every page once, in order.
    """

    host_addrs: Addrs
    page_addrs: Addrs
    page_bytes: int
    pieces: tuple[Piece, ...]


def host_page_addrs(slice_addrs: Addrs, pages_per_slice: int, page_bytes: int) -> Addrs:
    """Return int64 [num_slices * pages_per_slice], where each page lies in the ring."""
    inside = np.arange(pages_per_slice, dtype=np.int64) * page_bytes
    return (slice_addrs[:, None] + inside).reshape(-1)


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
    slices, pages = copy.slice_addrs, copy.page_addrs
    page_bytes = copy.page_bytes
    hosts = host_page_addrs(slices, pages.shape[1], page_bytes)
    flat = np.ascontiguousarray(pages).reshape(-1)
    if not flat.size:
        return Plan(hosts, flat, page_bytes, ())
    way, step = _choose(copy, slices, limits, thresholds)
    most = limits.max_pages
    if way is Way.STAGED:
        most = min(most, limits.staging_bytes // page_bytes)
    pieces = []
    for first, num_pages in _ranges(slices.size, pages.shape[1], most):
        extents = None
        if way is Way.BATCH:
            there = slice(first, first + num_pages)
            extents = _rows_apart(hosts[there], page_bytes, flat[there])
        elif way is Way.STAGED:
            extents = _staged_extents(slices, copy, first, num_pages, step)
        if extents is not None:
            extents = _cut_at_borders(extents, limits.borders)
        pieces.append(Piece(way, first, num_pages, extents))
    return Plan(hosts, flat, page_bytes, tuple(pieces))


def _choose(
    copy: SliceCopy, slices: Addrs, limits: Limits, thresholds: Thresholds
) -> tuple[Way, int]:
    """Return the way, and the distance of slices that share a staged copy."""
    gaps = np.diff(slices)
    slice_bytes, page_bytes, total = copy.slice_bytes, copy.page_bytes, copy.total_bytes
    wide = gaps[gaps > slice_bytes]
    step = int(wide.min()) if wide.size else slice_bytes
    mean_1d = total // (1 + int(np.count_nonzero(gaps != slice_bytes)))
    mean_2d = total // (1 + int(np.count_nonzero(gaps != step)))
    is_run = mean_1d >= max(thresholds.extent, 2 * page_bytes)
    is_strided = not is_run and mean_2d >= max(thresholds.extent, 4 * slice_bytes)
    if not is_strided:
        step = slice_bytes
    fits = page_bytes <= limits.staging_bytes
    if thresholds.force is not None:
        possible = fits or thresholds.force is not Way.STAGED
        return (thresholds.force if possible else Way.DIRECT), step
    staged = is_run or (is_strided and slice_bytes >= thresholds.strided)
    if fits and staged and total >= thresholds.staged:
        return Way.STAGED, step
    if limits.has_batch and page_bytes >= thresholds.batch:
        return Way.BATCH, slice_bytes
    worth = limits.has_batch and mean_1d >= thresholds.batch and total >= thresholds.staged
    return (Way.STAGED if fits and worth else Way.DIRECT), slice_bytes


def _ranges(num_slices: int, pages_per_slice: int, most: int) -> list[tuple[int, int]]:
    """Return ranges of at most `most` pages: whole slices, or parts of one slice."""
    num_pages = num_slices * pages_per_slice
    if pages_per_slice <= most:
        step = most // pages_per_slice * pages_per_slice
        return [(first, min(step, num_pages - first)) for first in range(0, num_pages, step)]
    return [
        (start + first, min(most, pages_per_slice - first))
        for start in range(0, num_pages, pages_per_slice)
        for first in range(0, pages_per_slice, most)
    ]


def _rows_apart(host_addrs: Addrs, width: int, offsets: Addrs) -> Extents:
    """Return one copy for each row."""
    widths = np.full(host_addrs.size, width, dtype=np.int64)
    return Extents(host_addrs, widths, widths, np.ones_like(widths), offsets)


def _staged_extents(
    slices: Addrs, copy: SliceCopy, first: int, num_pages: int, step: int
) -> Extents:
    """Return the copies between the ring and a staging buffer for a range of pages."""
    per_slice = copy.page_addrs.shape[1]
    row = first // per_slice
    if num_pages < per_slice:  # a part of one slice
        inside = first % per_slice * copy.page_bytes
        start = np.zeros(1, dtype=np.int64)
        return _rows_apart(slices[row : row + 1] + inside, num_pages * copy.page_bytes, start)
    rows = slices[row : row + num_pages // per_slice]
    width = copy.slice_bytes
    breaks = (rows[1:] - rows[:-1] != step).nonzero()[0]
    if not breaks.size:  # most pieces: one copy
        if step == width:
            return _one_copy(rows[0], rows.size * width, rows.size * width, 1)
        return _one_copy(rows[0], step, width, rows.size)
    starts = np.concatenate(([0], breaks + 1))
    counts = np.diff(np.append(starts, rows.size))
    offsets = starts * width
    if step == width:
        widths = counts * width
        return Extents(rows[starts], widths, widths, np.ones_like(widths), offsets)
    same = np.ones_like(counts)
    return Extents(rows[starts], same * step, same * width, counts, offsets)


def _one_copy(addr: np.int64, pitch: int, width: int, num_rows: int) -> Extents:
    """Return a single copy to the start of the staging buffer."""
    columns = np.array([[addr], [pitch], [width], [num_rows], [0]], dtype=np.int64)
    return Extents(*columns)


def _cut_at_borders(extents: Extents, borders: Addrs) -> Extents:
    """Return the same copies, none of which crosses a border."""
    if not borders.size:
        return extents
    ends = extents.host_addrs + (extents.rows - 1) * extents.pitches + extents.widths
    crossing = np.searchsorted(borders, extents.host_addrs, side="right") < np.searchsorted(
        borders, ends, side="left"
    )
    if not crossing.any():
        return extents
    columns = np.stack(
        [extents.host_addrs, extents.pitches, extents.widths, extents.rows, extents.offsets], axis=1
    )
    cut = [
        part
        for addr, pitch, width, rows, offset in columns[crossing].tolist()
        for part in _cut_one(addr, pitch, width, rows, offset, borders)
    ]
    columns = np.concatenate([columns[~crossing], np.array(cut, dtype=np.int64)])
    return Extents(*columns.T.copy())


def _cut_one(
    addr: int, pitch: int, width: int, rows: int, offset: int, borders: Addrs
) -> list[tuple[int, int, int, int, int]]:
    """Return the parts of one copy between borders."""
    inside = borders[(borders > addr) & (borders < addr + (rows - 1) * pitch + width)]
    if not inside.size:
        return [(addr, pitch, width, rows, offset)]
    border = int(inside[0])
    parts = []
    before = max(0, (border - addr - width) // pitch + 1)  # rows that end before the border
    if before:
        parts.append((addr, pitch, width, before, offset))
        addr, offset, rows = addr + before * pitch, offset + before * width, rows - before
    if addr < border:  # this row lies across it
        head = border - addr
        parts.append((addr, head, head, 1, offset))
        tail = width - head
        parts += _cut_one(border, tail, tail, 1, offset + head, borders)
        addr, offset, rows = addr + pitch, offset + width, rows - 1
    if rows:
        parts += _cut_one(addr, pitch, width, rows, offset, borders)
    return parts

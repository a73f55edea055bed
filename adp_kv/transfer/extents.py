"""The copies of a piece that the copy engine makes; pure numpy.

A copy never crosses a border between two registrations of the ring: CUDA refuses that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from adp_kv.transfer.base import SliceCopy

Addrs = NDArray[np.int64]


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


class OneCopy(NamedTuple):
    """A piece that is one copy: rows of width bytes, each pitch behind the one before it.

    On the device the rows follow each other from offset on, as in Extents.
    """

    host_addr: int
    pitch: int
    width: int
    rows: int
    offset: int


def rows_apart(host_addrs: Addrs, width: int, offsets: Addrs) -> Extents:
    """Return one copy for each row."""
    widths = np.full(host_addrs.size, width, dtype=np.int64)
    return Extents(host_addrs, widths, widths, np.ones_like(widths), offsets)


def staged_extents(copy: SliceCopy, first: int, num_pages: int, step: int) -> Extents:
    """Return the copies between the ring and a staging buffer for a range of pages."""
    slices, per_slice = copy.slice_addrs, copy.page_addrs.shape[1]
    row = first // per_slice
    if num_pages < per_slice:  # a part of one slice
        inside = first % per_slice * copy.page_bytes
        start = np.zeros(1, dtype=np.int64)
        return rows_apart(slices[row : row + 1] + inside, num_pages * copy.page_bytes, start)
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


def cut_at_borders(extents: Extents, borders: Addrs) -> Extents:
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

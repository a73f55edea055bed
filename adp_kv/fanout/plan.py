"""Who copies what: pure functions of sizes, so that every rank of a group finds the same.

    pages of a transfer   [ piece 0            | piece 1            | ... ]
    a piece               [ share of rank 0 | share of rank 1 | ... ]       borders, in pages
    a staging buffer      [ region of rank 0 | region of rank 1 | ... ]     all equally long
    a region              [ pages of that rank's share | unused ]

Shares differ by at most one unit and may be empty; who has the larger one changes from transfer
to transfer. Regions don't differ, because an all-gather moves equal parts. Nothing here may
depend on a rank's number, memory, clock or luck: a rank that decided otherwise would wait for an
exchange that the others never start.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import TransferError
from adp_kv.units import MiB, align_up, ceil_div

REGION_ALIGN = 256
"""Regions start and end on it."""
SAVED_BYTES = 2 * MiB
"""A rank must be spared at least this much of the link for an exchange to pay. Of two H200, 4 MiB
exchanged took 0.43 to 0.44 of the time in which both read all, on two hosts; less than that is
mostly the host's time, of either way, and moves with it."""
SHARE_BYTES = 8 * MiB
"""About the most a rank copies for a piece: 150 µs on the link, longer than a piece takes the host,
and no longer, since the exchange and the scatter of the last piece are behind all copies."""
PIECES = 8
"""Of so many pieces the last one weighs little, and pieces may be larger, to spare the host."""
TAIL_BYTES = 4 * MiB
"""The last of so many pieces is cut in halves down to shares of this: what the ranks exchange and
scatter behind the last copy is time that nothing hides. An exchange and a scatter take 80 µs at
least, and a share of 4 MiB takes the link as long; smaller ones would queue."""
SLICES_PER_RANK = 8
"""From so many slices a rank on, shares are cut between slices: whole ones move as 2-D copies."""


class Shape(NamedTuple):
    """Sizes of one transfer: num_slices slices of pages_per_slice pages of page_bytes."""

    num_slices: int
    pages_per_slice: int
    page_bytes: int

    @property
    def num_pages(self) -> int:
        """Pages of the transfer."""
        return self.num_slices * self.pages_per_slice

    @property
    def total_bytes(self) -> int:
        """Bytes of the transfer."""
        return self.num_pages * self.page_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """What one exchange brings.

    Attributes:
        borders: num_ranks + 1 page numbers of the transfer, ascending; rank r copies the
            pages from borders[r] up to borders[r + 1].
        region_bytes: bytes of every rank's region of the staging buffer.
        layout: page_bytes, region_bytes and the pages of every share.
    """

    borders: tuple[int, ...]
    region_bytes: int
    layout: tuple[int, ...]

    @property
    def first_page(self) -> int:
        """First page of the piece."""
        return self.borders[0]

    @property
    def num_pages(self) -> int:
        """Pages of the piece."""
        return self.borders[-1] - self.borders[0]


def least_bytes(num_ranks: int) -> int:
    """Return from how many bytes on a transfer is exchanged rather than read whole by each."""
    assert num_ranks > 1
    return ceil_div(SAVED_BYTES * num_ranks, num_ranks - 1)


def fits(page_bytes: int, num_ranks: int, buffer_bytes: int) -> bool:
    """Return whether a buffer holds at least a page of every rank."""
    return num_ranks * _region_bytes(1, page_bytes) <= buffer_bytes


@lru_cache(maxsize=64)
def make_pieces(
    shape: Shape, num_ranks: int, buffer_bytes: int, max_pages: int, turn: int = 0
) -> tuple[Piece, ...]:
    """Cut a transfer into pieces that fit a staging buffer.

    All are of one size, but for the last of a few, and the last ones of many (TAIL_BYTES).

    Args:
        shape: what moves.
        num_ranks: ranks of the group, > 0.
        buffer_bytes: one staging buffer, regions of all ranks.
        max_pages: most pages of a piece.
        turn: 0 to num_ranks - 1; who gets the larger shares. With one turn for all transfers
            some ranks' links would always be the later ones.

    Raises:
        TransferError: Not even a page of every rank fits; fits() tells beforehand.
    """
    if not shape.num_pages:
        return ()
    room = buffer_bytes // num_ranks // REGION_ALIGN * REGION_ALIGN // shape.page_bytes
    if room < 1 or max_pages < num_ranks:
        raise TransferError(
            f"a staging buffer of {buffer_bytes} bytes does not hold a page of {shape.page_bytes} "
            f"bytes for each of {num_ranks} ranks"
        )
    share_bytes = max(SHARE_BYTES, shape.total_bytes // (num_ranks * PIECES))
    room = min(room, max_pages // num_ranks, max(1, share_bytes // shape.page_bytes))
    unit = 1
    in_slices = room // shape.pages_per_slice
    if in_slices and shape.num_slices >= SLICES_PER_RANK * num_ranks:
        unit = shape.pages_per_slice
    most = room // unit * num_ranks
    least = ceil_div(TAIL_BYTES, unit * shape.page_bytes) * num_ranks
    pieces, first = [], 0
    for size in _sizes(shape.num_pages // unit, most, least, num_ranks):
        shares = [first + (size * rank + turn) // num_ranks for rank in range(num_ranks + 1)]
        largest = max(b - a for a, b in pairwise(shares)) * unit
        borders = tuple(share * unit for share in shares)
        region_bytes = _region_bytes(largest, shape.page_bytes)
        counts = (end - start for start, end in pairwise(borders))
        pieces.append(Piece(borders, region_bytes, (shape.page_bytes, region_bytes, *counts)))
        first += size
    return tuple(pieces)


def _sizes(num_units: int, most: int, least: int, num_ranks: int) -> list[int]:
    """Return the units of every piece: at most `most`, halves not below `least`."""
    num = ceil_div(num_units, most)
    step = align_up(ceil_div(num_units, num), num_ranks)
    sizes, rest = [], num_units
    while rest:
        size = min(step, rest)
        if num >= PIECES and rest <= 2 * step:
            half = align_up(rest // 2, num_ranks)
            size = min(step, half if half >= least else rest)
        sizes.append(size)
        rest -= size
    return sizes


@lru_cache(maxsize=32)
def offsets_in_buffer(layout: tuple[int, ...]) -> NDArray[np.int64]:
    """Return int64 [pages]: where each page of such a piece lies in a staging buffer."""
    page_bytes, region_bytes, *counts = layout
    regions = [
        np.arange(count, dtype=np.int64) * page_bytes + rank * region_bytes
        for rank, count in enumerate(counts)
    ]
    offsets = np.concatenate(regions)
    offsets.flags.writeable = False  # one for all that ask
    return offsets


def _region_bytes(num_pages: int, page_bytes: int) -> int:
    return align_up(num_pages * page_bytes, REGION_ALIGN)

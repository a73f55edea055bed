"""Who copies what: pure functions of sizes, so that every rank of a group finds the same.

    pages of a transfer   [ piece 0            | piece 1            | ... ]
    a piece               [ share of rank 0 | share of rank 1 | ... ]       borders, in pages
    a staging buffer      [ region of rank 0 | region of rank 1 | ... ]     all equally long
    a region              [ pages of that rank's share | unused ]

Shares differ by at most one unit and may be empty; regions don't, because an all-gather moves
equal parts. Nothing here may depend on a rank's number, memory, clock or luck: a rank that
decided otherwise would wait for an exchange that the others never start.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from adp_kv.errors import TransferError
from adp_kv.units import MiB, align_up, ceil_div

REGION_ALIGN = 256
"""Regions start and end on it."""
SAVED_BYTES = 4 * MiB
"""A rank must be spared at least this much of the link for an exchange to pay. One exchange costs
about 40 µs and three launches; the link moves 4 MiB in 76 µs."""
SHARE_BYTES = 8 * MiB
"""About the most a rank copies for a piece: 150 µs on the link, longer than a piece takes the host,
and no longer, since the exchange and the scatter of the last piece are behind all copies."""
PIECES = 8
"""Of so many pieces the last one weighs little, and pieces may be larger, to spare the host."""
SLICES_PER_RANK = 8
"""From so many slices a rank on, shares are cut between slices: whole ones move as 2-D copies."""


@dataclass(frozen=True, slots=True)
class Shape:
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
        layout: equal for pieces whose pages lie alike in a staging buffer.
    """

    borders: tuple[int, ...]
    region_bytes: int
    layout: tuple[int, ...] = ()

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
    shape: Shape, num_ranks: int, buffer_bytes: int, max_pages: int
) -> tuple[Piece, ...]:
    """Cut a transfer into pieces that fit a staging buffer, all of one size but the last.

    Args:
        shape: what moves.
        num_ranks: ranks of the group, > 0.
        buffer_bytes: one staging buffer, regions of all ranks.
        max_pages: most pages of a piece.

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
    most = room // unit * num_ranks  # units of a piece
    num_units = shape.num_pages // unit
    step = align_up(ceil_div(num_units, ceil_div(num_units, most)), num_ranks)
    pieces = []
    for first in range(0, num_units, step):
        end = min(first + step, num_units)
        shares = [first + (end - first) * rank // num_ranks for rank in range(num_ranks + 1)]
        largest = max(b - a for a, b in pairwise(shares)) * unit
        borders = tuple(share * unit for share in shares)
        region_bytes = _region_bytes(largest, shape.page_bytes)
        sizes = (end - first for first, end in pairwise(borders))
        pieces.append(Piece(borders, region_bytes, (shape.page_bytes, region_bytes, *sizes)))
    return tuple(pieces)


def _region_bytes(num_pages: int, page_bytes: int) -> int:
    return align_up(num_pages * page_bytes, REGION_ALIGN)

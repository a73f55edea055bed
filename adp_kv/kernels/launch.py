"""Choose how the page copy kernel is compiled and how many programs run it.

Owning thread: the mover's. Stream: the current one of the calling thread. Failure
scope: none of its own; see copy_pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from adp_kv.kernels.copy_pages import copy_pages_kernel
from adp_kv.units import ceil_div

if TYPE_CHECKING:
    import torch

MAX_UNITS = (1 << 31) - (1 << 24)
"""Units of one launch: the kernel counts them in 32 bits and adds one step past the end."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How the kernel is cut.

    Attributes:
        rows: units of a program at a time.
        cols: words of a unit (8 bytes, or 1 on the byte path).
        num_warps: warps of a program.
    """

    rows: int
    cols: int
    num_warps: int


WORDS = Shape(rows=16, cols=256, num_warps=4)
"""32 KiB in flight a program, 2 KiB a unit: 8 programs fill the link in both directions, at
pages of 8 and 72 KiB alike (measured on an H200)."""
BYTES = Shape(rows=8, cols=512, num_warps=4)


def copy_pages(
    src_addrs: torch.Tensor,
    dst_addrs: torch.Tensor,
    page_bytes: int,
    *,
    align: int,
    num_programs: int,
) -> None:
    """Launch the copy of page i from src_addrs[i] to dst_addrs[i] on the current stream.

    Args:
        src_addrs: int64 [n] on the device, or in pinned memory that it can read.
        dst_addrs: int64 [n], likewise; the pages are disjoint.
        page_bytes: bytes of every page, > 0.
        align: common_alignment() of the page size and of both tables.
        num_programs: bound of the programs, hence of the multiprocessors held.
    """
    shape = BYTES if align == 1 else WORDS
    units_per_page = ceil_div(page_bytes // min(align, 8), shape.cols)
    pages_per_launch = max(1, MAX_UNITS // units_per_page)
    for first in range(0, src_addrs.numel(), pages_per_launch):
        sources = src_addrs[first : first + pages_per_launch]
        num_pages = sources.numel()
        programs = min(num_programs, ceil_div(num_pages * units_per_page, shape.rows))
        copy_pages_kernel[(programs,)](
            sources,
            dst_addrs[first : first + pages_per_launch],
            num_pages,
            page_bytes // align,
            ALIGN=align,
            ROWS=shape.rows,
            COLS=shape.cols,
            num_warps=shape.num_warps,
        )

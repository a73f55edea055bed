"""The page copy kernel, compiled ahead and launched without Triton's dispatch.

Triton spends about 25 µs a launch on finding the compiled kernel again; a layer of 15 MiB that
two ranks share moves in 143. What it finds is kept here and launched with addresses as
numbers, by the call that Triton itself makes. Since that call is not one that Triton
promises to keep, prepare() tries it, and where it does not move bytes there is no PreparedCopy.

Owning thread: the caller's; the stream is given. Failure scope: see copy_pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adp_kv.kernels.copy_pages import copy_pages_kernel
from adp_kv.kernels.launch import BYTES, MAX_UNITS, WORDS, Shape
from adp_kv.units import ceil_div

if TYPE_CHECKING:
    import torch

TABLE_ALIGN = 16
"""Address tables start at a multiple of this: the kernel was compiled for such."""


class PreparedCopy:
    """The kernel for one alignment of pages.

    Args:
        kernel: what Triton compiled.
        align: 16, 8 or 1.
        shape: how it was cut.
    """

    def __init__(self, kernel: Any, align: int, shape: Shape) -> None:  # noqa: ANN401 - Triton's own
        self._launch = kernel.run
        self._function = kernel.function
        self._metadata = kernel.packed_metadata
        self._align = align
        self._unit_bytes = shape.cols * min(align, 8)
        self._rows = shape.rows
        self._constants = (align, shape.rows, shape.cols)

    def launch(
        self,
        stream: int,
        src_table: int,
        dst_table: int,
        num_pages: int,
        page_bytes: int,
        num_programs: int,
    ) -> None:
        """Launch the copy of page i from src_table[i] to dst_table[i].

        Args:
            stream: handle.
            src_table: address of int64 [num_pages], a multiple of TABLE_ALIGN.
            dst_table: likewise.
            num_pages: pages, so many that their units are at most MAX_UNITS.
            page_bytes: bytes of every page; it and every address are multiples of the alignment.
            num_programs: bound of the programs.
        """
        units = num_pages * ceil_div(page_bytes, self._unit_bytes)
        assert units <= MAX_UNITS
        programs = min(num_programs, ceil_div(units, self._rows))
        self._launch(
            programs, 1, 1, stream, self._function, self._metadata, None, None, None,
            src_table, dst_table, num_pages, page_bytes // self._align, *self._constants,
        )  # fmt: skip


def prepare(scratch: torch.Tensor, stream: torch.cuda.Stream, align: int) -> PreparedCopy | None:
    """Compile the kernel for an alignment; return None where it can't be launched this way.

    Args:
        scratch: uint8 [at least 256] on the device, aligned to 256; overwritten.
        stream: the calling thread's current stream.
        align: 16, 8 or 1.
    """
    import torch  # noqa: PLC0415

    base = scratch.data_ptr()
    tables = scratch[:64].view(torch.int64)  # [sources | targets], two words apart
    shape = BYTES if align == 1 else WORDS
    tables[0], tables[2] = base + 64, base + 128
    kernel = copy_pages_kernel[(1,)](
        tables[0:1],
        tables[2:3],
        1,
        1,
        ALIGN=align,
        ROWS=shape.rows,
        COLS=shape.cols,
        num_warps=shape.num_warps,
    )
    try:
        copy = PreparedCopy(kernel, align, shape)
        scratch[64:128] = torch.arange(1, 65, device=scratch.device, dtype=torch.uint8)
        scratch[128:192] = 0
        copy.launch(stream.cuda_stream, base, base + 16, 1, align, 1)
        came = scratch[128:192].cpu()
    except (AttributeError, TypeError, ValueError):
        return None
    expected = torch.arange(1, 65, dtype=torch.uint8)  # no zero, which is what lies there before
    expected[align:] = 0
    return copy if torch.equal(came, expected) else None

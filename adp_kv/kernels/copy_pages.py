"""The page copy kernel: page i goes from src_addrs[i] to dst_addrs[i].

One kernel serves every direction, since a registered host address is a device
address too: gather (pages → staging), scatter (staging → pages), and reading or
writing the ring itself.

A page is cut into units of COLS words and a program copies ROWS units at a time, so
that small and large pages keep the same number of bytes in flight. The last unit of
a page is masked: nothing outside a page is read or written.

Owning thread: the mover's. Stream: the current one. Failure scope: an address that
is not mapped ends the CUDA context of the process.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pages", "page_size"])
def copy_pages_kernel(
    p_src_addrs,
    p_dst_addrs,
    num_pages,
    page_size,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    """Copy whole pages between two tables of addresses.

    Args:
        p_src_addrs: int64 [num_pages], address of each page to read.
        p_dst_addrs: int64 [num_pages], address of each page to write; disjoint.
        num_pages: pages to copy; num_pages * units per page < 2**31.
        page_size: page bytes / ALIGN. A run-time value: sizes share one compilation.
        ALIGN: 16, 8 or 1; divides every address and the page bytes. At 16 and 8 a
            word is 8 bytes, at 16 two words go in one access; at 1 a word is a byte.
        ROWS: units copied at a time by one program, a power of two.
        COLS: words of a unit, a power of two.
    """
    word_type: tl.constexpr = tl.int8 if ALIGN == 1 else tl.int64
    pointer: tl.constexpr = tl.pointer_type(word_type)
    page_words = page_size * 2 if ALIGN == 16 else page_size  # noqa: PLR2004
    units_per_page = tl.cdiv(page_words, COLS)
    num_units = num_pages * units_per_page
    step = tl.num_programs(0) * ROWS
    for first in range(tl.program_id(0) * ROWS, num_units, step):
        o_unit = first + tl.arange(0, ROWS)
        m_unit = o_unit < num_units
        o_page = o_unit // units_per_page
        o_word = ((o_unit % units_per_page) * COLS)[:, None] + tl.arange(0, COLS)[None, :]
        p_src = tl.load(p_src_addrs + o_page, mask=m_unit, other=0).to(pointer)  # [ROWS]
        p_dst = tl.load(p_dst_addrs + o_page, mask=m_unit, other=0).to(pointer)
        p_src = tl.multiple_of(p_src, ALIGN)
        p_dst = tl.multiple_of(p_dst, ALIGN)
        m_word = m_unit[:, None] & (o_word < page_words)
        b_words = tl.load(p_src[:, None] + o_word, mask=m_word)  # [ROWS, COLS]
        tl.store(p_dst[:, None] + o_word, b_words, mask=m_word)

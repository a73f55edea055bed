"""What copy_pages means, over host addresses; also the way pages move on a CPU.

Owning thread: the caller's; copies at once, no stream. Failure scope: an address that
is not mapped ends the process.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray


def copy_pages_reference(
    src_addrs: NDArray[np.int64], dst_addrs: NDArray[np.int64], page_bytes: int
) -> None:
    """Copy page_bytes from src_addrs[i] to dst_addrs[i] for every i.

    Pages that follow each other on both sides are copied as one.

    Args:
        src_addrs: int64 [n], host addresses to read.
        dst_addrs: int64 [n], host addresses to write; no page overlaps another.
        page_bytes: bytes of every page, > 0.
    """
    if src_addrs.size == 0:
        return
    joined = (np.diff(src_addrs) == page_bytes) & (np.diff(dst_addrs) == page_bytes)
    starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    lengths = np.diff(np.append(starts, src_addrs.size)) * page_bytes
    sources, targets = src_addrs[starts].tolist(), dst_addrs[starts].tolist()
    for source, target, length in zip(sources, targets, lengths.tolist(), strict=True):
        ctypes.memmove(target, source, length)

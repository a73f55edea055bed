"""Where the bytes of a share lie in the ring: most often one run, which is one copy.

Everything that concerns a whole transfer is found once, since a piece has about 100 µs of a
CPU: that is what its share of a small layer takes on the link.
Failure scope: the transfer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import TransferError
from adp_kv.kernels.alignment import common_alignment
from adp_kv.transfer.base import SliceCopy
from adp_kv.transfer.copy_engine import CopyEngine
from adp_kv.transfer.extents import cut_at_borders, staged_extents
from adp_kv.transfer.plan import check_copy, host_page_addrs
from adp_kv.transfer.registration import RingRegistration

_TO_DEVICE = 1

Words = NDArray[np.int64]


@dataclass(slots=True)
class Source:
    """A transfer as its rank sees it.

    Attributes:
        copy: the transfer.
        pages: int64 [pages], where each page belongs, in the order of the slices.
        first: address of the first slice; step: distance of slices, 0 where it varies.
    """

    copy: SliceCopy
    pages: Words
    first: int
    step: int
    _align: int = 0

    def align(self) -> int:
        """Return the alignment of the page size and all pages.

        Looked up when pages are scattered first, since the first copy is queued by then: a
        transfer of 58,000 pages would start 0.1 ms later.
        """
        if not self._align:
            self._align = common_alignment(self.copy.page_bytes, self.pages)
        return self._align


def find_source(copy: SliceCopy, ring: RingRegistration) -> Source:
    """Look at a transfer.

    Raises:
        TransferError: Its tables do not fit each other, or a slice lies outside the ring: such
            an address would end the process's CUDA context.
    """
    check_copy(copy)
    slices, width = copy.slice_addrs, copy.slice_bytes
    first, step = int(slices[0]), width
    if slices.size > 1:
        gaps = slices[1:] - slices[:-1]
        step = int(gaps[0])
        if step < width or np.count_nonzero(gaps != step):
            step = 0
    low, high = (first, int(slices[-1])) if step else (int(slices.min()), int(slices.max()))
    if not ring.covers(low, high + width):
        raise TransferError("slices lie outside the registered ring")
    return Source(copy, copy.page_addrs.reshape(-1), first, step)


def queue_share(
    source: Source,
    pages: tuple[int, int],
    target: int,
    engine: CopyEngine,
    borders: list[int],
    stream: int,
) -> None:
    """Queue the copies of a share of a transfer.

    Args:
        source: the transfer.
        pages: first and end of the share.
        target: device address of its first page.
        engine: makes the copies.
        borders: sorted addresses that no copy may cross.
        stream: handle.

    Raises:
        TransferError, RuntimeError: A copy was refused; earlier ones are queued.
    """
    first, end = pages
    if first == end:
        return
    copy, step = source.copy, source.step
    per_slice, width = copy.page_addrs.shape[1], copy.slice_bytes
    in_slices = first % per_slice == 0 and end % per_slice == 0
    if step == width or (step and in_slices):
        row, page = divmod(first, per_slice)
        low = source.first + row * step + page * copy.page_bytes
        num_bytes = (end - first) * copy.page_bytes
        rows = 1 if step == width else (end - first) // per_slice
        high = low + (num_bytes if rows == 1 else (rows - 1) * step + width)
        if bisect_right(borders, low) == bisect_left(borders, high):
            if rows == 1:
                engine.runtime.memcpyAsync(target, low, num_bytes, _TO_DEVICE, stream)
            else:
                engine.runtime.memcpy2DAsync(
                    target, width, low, step, width, rows, _TO_DEVICE, stream
                )
            return
    _queue_any(source, pages, target, engine, borders, stream)


def _queue_any(
    source: Source,
    pages: tuple[int, int],
    target: int,
    engine: CopyEngine,
    borders: list[int],
    stream: int,
) -> None:
    """Queue a share that is no run, or lies across a border."""
    copy, (first, end) = source.copy, pages
    per_slice = copy.page_addrs.shape[1]
    low, high = first // per_slice, -(-end // per_slice)
    if first % per_slice == 0 and end % per_slice == 0:
        share = SliceCopy(copy.slice_addrs[low:high], copy.page_addrs[low:high], copy.page_bytes)
        step = source.step or copy.slice_bytes
    else:  # pages by themselves; those next to each other move as one
        hosts = host_page_addrs(copy.slice_addrs[low:high], per_slice, copy.page_bytes)
        hosts = hosts[first - low * per_slice : end - low * per_slice]
        share, step = SliceCopy(hosts, hosts[:, None], copy.page_bytes), copy.page_bytes
    extents = staged_extents(share, 0, end - first, step)
    extents = cut_at_borders(extents, np.array(borders, dtype=np.int64))
    engine.copy(extents, target, to_device=True, stream=stream)

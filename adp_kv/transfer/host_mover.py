"""The mover of a device whose memory is the host's: copies at once, in the calling thread."""

from __future__ import annotations

from typing_extensions import override

from adp_kv.errors import TransferError
from adp_kv.kernels.reference import copy_pages_reference
from adp_kv.transfer.base import Mark, Mover, SliceCopy, Ticket
from adp_kv.transfer.plan import check_copy, host_page_addrs


class HostMark:
    """Any point: the host computes in the order of its calls."""


class HostTicket(Ticket):
    """A transfer that ended before its start returned."""

    @override
    def done(self) -> bool:
        return True

    @override
    def fence(self) -> None:
        return


class HostMover(Mover):
    """Moves slices between the ring and pages in host memory."""

    def __init__(self) -> None:
        self._first = 0
        self._end = 0
        self._is_closed = False

    @override
    def register_ring(self, address: int, num_bytes: int) -> None:
        if num_bytes <= 0:
            raise TransferError(f"a ring of {num_bytes} bytes can't be registered")
        if self._is_closed or self._end:
            raise TransferError("the mover is closed, or has a ring already")
        self._first, self._end = address, address + num_bytes

    @override
    def mark(self) -> Mark:
        return HostMark()

    @override
    def restore(self, copy: SliceCopy, after: Mark | None) -> Ticket:
        self._check(copy)
        hosts = host_page_addrs(copy.slice_addrs, copy.page_addrs.shape[1], copy.page_bytes)
        copy_pages_reference(hosts, copy.page_addrs.reshape(-1), copy.page_bytes)
        return HostTicket()

    @override
    def save(self, copy: SliceCopy, after: Mark | None) -> Ticket:
        self._check(copy)
        hosts = host_page_addrs(copy.slice_addrs, copy.page_addrs.shape[1], copy.page_bytes)
        copy_pages_reference(copy.page_addrs.reshape(-1), hosts, copy.page_bytes)
        return HostTicket()

    @override
    def close(self) -> None:
        self._is_closed = True

    def _check(self, copy: SliceCopy) -> None:
        if self._is_closed:
            raise TransferError("the mover is closed")
        check_copy(copy)
        slices = copy.slice_addrs
        if slices.size and not (
            self._first <= slices.min() and slices.max() + copy.slice_bytes <= self._end
        ):
            raise TransferError("slices lie outside the registered ring")

"""The contract between the SDK client and whatever moves the bytes.

    ring slices (host, one per chunk) ◄──► pages (device, pages_per_slice per chunk)

A mover knows addresses only: no layer, key, socket or vLLM. It is used by one
thread (the client's); mark() and a ticket's done() and fence() may also be called by
the thread that runs the forward pass: they look at, or order, its current stream.

Ordering. A copy starts on the device only after its `after` mark. A Ticket is done
when its bytes have arrived: for a restore in device memory, for a save in the ring; transfers
end in any order.
Slices, pages and staging of unfinished tickets must stay valid. Nothing here blocks
the calling thread, except close() and a failed start, which wait for what is in flight,
up to a deadline.

Failure scope: TransferError from restore() or save() concerns that transfer, and nothing of it runs
any more; where it can't be ended a ticket is returned that fails when it has. A device that is gone
makes every later call raise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SliceCopy:
    """One rank's slices in some ring slots, and the pages that belong to them.

    Attributes:
        slice_addrs: int64 [n], registered host address of this rank's slice in each slot.
        page_addrs: int64 [n, pages_per_slice], device address of each page, in the order
            in which the pages lie in a slice. Pages of one transfer are disjoint, but for
            one that nobody reads and that a restore may name many times.
        page_bytes: bytes of every page (> 0); a slice is pages_per_slice * page_bytes long.
    """

    slice_addrs: NDArray[np.int64]
    page_addrs: NDArray[np.int64]
    page_bytes: int

    @property
    def slice_bytes(self) -> int:
        """Bytes of one slice."""
        return int(self.page_addrs.shape[1]) * self.page_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole transfer."""
        return int(self.page_addrs.size) * self.page_bytes


class Mark(Protocol):
    """A point in the order of the compute stream."""


class Ticket(ABC):
    """A transfer that was started."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the bytes have arrived; never blocks.

        Raises:
            TransferError: The device reported an error; the bytes are not to be used.
        """

    @abstractmethod
    def fence(self) -> None:
        """Make the caller's current stream wait for the transfer; never blocks the CPU."""

    def proven(self) -> bool:
        """Return whether the bytes will be right where fence() has let something go on.

        False: not known yet, as long as other ranks have a part in it; ask again.

        Raises:
            TransferError: They are not to be used.
        """
        return True


class Mover(ABC):
    """Moves slices between the ring and pages (see the module's contract)."""

    @abstractmethod
    def register_ring(self, address: int, num_bytes: int) -> None:
        """Register the mapped ring with the device.

        Raises:
            TransferError: Registration failed; sticky device errors are cleared.
        """

    @abstractmethod
    def mark(self) -> Mark:
        """Record where the caller's current stream stands now."""

    @abstractmethod
    def restore(self, copy: SliceCopy, after: Mark | None) -> Ticket:
        """Start ring → pages."""

    @abstractmethod
    def save(self, copy: SliceCopy, after: Mark | None) -> Ticket:
        """Start pages → ring."""

    @abstractmethod
    def close(self) -> None:
        """Wait for transfers in flight and unregister the ring; safe to call twice.

        Raises:
            TransferError: They did not end in time. The ring is still registered, and the device
                may still use it, the staging and the tables: ring and mover are to be kept.
        """

"""A mover over host memory that is as slow, or as broken, as a test wants.

A copy is carried out when its ticket is first found done, so that bytes arrive as late
as on a device: a slot given away too soon shows as wrong bytes.
"""

import ctypes
import threading
import time

from adp_kv.errors import TransferError
from adp_kv.transfer.base import Mover, Ticket


class FakeTicket(Ticket):
    """Done once its mover lets it, `delay_s` after its start."""

    def __init__(self, mover, pairs, num_bytes, *, fails):
        self.mover = mover
        self.fails = fails
        self._pairs = pairs
        self._num_bytes = num_bytes
        self._due = time.monotonic() + mover.delay_s
        self._lock = threading.Lock()
        self._copied = False

    def done(self):
        if self.fails:
            raise TransferError("the fake device reported an error")
        with self._lock:
            if not self._copied:
                if not self.mover.gate.is_set() or time.monotonic() < self._due:
                    return False
                self._copied = True
                for target, source in self._pairs:
                    ctypes.memmove(target, source, self._num_bytes)
        return True

    def fence(self):
        while not self.done():
            time.sleep(0.0005)


class FakeMover(Mover):
    """Moves host memory.

    Attributes:
        gate: copies end only while it is set.
        fail_starts, fail_copies: how many of the next restore() or save() raise at once, or
            later from their ticket.
        tickets: every ticket it gave.
        copies: (kind, SliceCopy) of every copy that was started.
    """

    def __init__(self, delay_s=0.0):
        self.delay_s = delay_s
        self.gate = threading.Event()
        self.gate.set()
        self.fail_starts = 0
        self.fail_copies = 0
        self.fail_register = False
        self.tickets = []
        self.copies = []
        self.ring = None
        self.closed = False

    def register_ring(self, address, num_bytes):
        if self.fail_register:
            raise TransferError("the fake device can't register the ring")
        self.ring = (address, num_bytes)

    def mark(self):
        return object()

    def restore(self, copy, after):
        return self._start("restore", copy)

    def save(self, copy, after):
        return self._start("save", copy)

    def _start(self, kind, copy):
        if self.fail_starts:
            self.fail_starts -= 1
            raise TransferError("the fake device takes no copy")
        self.copies.append((kind, copy))
        pairs = []
        for slice_addr, pages in zip(
            copy.slice_addrs.tolist(), copy.page_addrs.tolist(), strict=True
        ):
            for i, page in enumerate(pages):
                inside = slice_addr + i * copy.page_bytes
                pairs.append((page, inside) if kind == "restore" else (inside, page))
        fails = self.fail_copies > 0
        self.fail_copies -= fails
        ticket = FakeTicket(self, pairs, copy.page_bytes, fails=fails)
        self.tickets.append(ticket)
        return ticket

    def close(self):
        self.gate.set()
        for ticket in self.tickets:
            try:
                ticket.fence()
            except TransferError:
                continue
        self.closed = True

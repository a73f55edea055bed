"""A ring, a pool of pages on the device and movers between them, for tests on CUDA.

Everything is filled with GUARD; check_rest() finds any byte that was written outside the
pages and slices of a transfer.
"""

import mmap
import time

import numpy as np
import torch

from adp_kv.transfer.base import SliceCopy
from adp_kv.transfer.factory import open_mover
from adp_kv.transfer.plan import RESTORE, SAVE, Thresholds
from adp_kv.transfer.settings import MoverSettings
from adp_kv.units import MiB

GUARD = 0xA5
RING_BYTES = 128 * MiB
PIECE_BYTES = 32 * MiB
DEADLINE_S = 20.0


def forced(way):
    """Return thresholds of both directions, with a way forced unless it is None."""
    if way is None:
        return RESTORE, SAVE
    both = Thresholds(0, 0, 0, 0, force=way)
    return both, both


def wait(tickets):
    """Poll tickets until all are done."""
    deadline = time.monotonic() + DEADLINE_S
    while not all(ticket.done() for ticket in tickets):
        assert time.monotonic() < deadline, "a transfer did not end"
        time.sleep(0.0002)


class Rig:
    """One mover over a new ring and a given pool."""

    def __init__(self, pool, way=None, **settings):
        restore, save = forced(way)
        self.pool = pool
        self._memory = mmap.mmap(-1, RING_BYTES)
        self.ring = np.frombuffer(self._memory, np.uint8)
        self.ring[:] = GUARD
        self.address = self.ring.ctypes.data
        chosen = MoverSettings(
            restore=restore, save=save, register_piece_bytes=PIECE_BYTES, **settings
        )
        self.mover = open_mover(pool.device, settings=chosen)
        self.mover.register_ring(self.address, RING_BYTES)

    def close(self):
        self.mover.close()

    def pages(self, page_bytes, num_pages, gap, seed=0):
        """Return offsets of disjoint pages anywhere in the pool; the last page of it is one."""
        pitch = page_bytes + gap
        room = self.pool.numel() // pitch
        rng = np.random.default_rng(seed)
        chosen = rng.choice(room - 1, num_pages - 1, replace=False) if num_pages > 1 else []
        return rng.permutation(np.append(chosen, room - 1).astype(np.int64)) * pitch

    def copy(self, slices, pages, page_bytes):
        """Return the transfer between offsets of slices and offsets of pages."""
        slices, pages = np.asarray(slices, np.int64), np.asarray(pages, np.int64)
        table = (self.pool.data_ptr() + pages).reshape(slices.size, -1)
        return SliceCopy(self.address + slices, table, page_bytes)

    def read_pages(self, pages, page_bytes):
        """Return uint8 [num_pages, page_bytes] of the pool, on the host."""
        torch.cuda.synchronize()
        return self._rows(pages, page_bytes).cpu().numpy()

    def _rows(self, pages, page_bytes):
        if pages.size <= 64:
            rows = [self.pool[page : page + page_bytes] for page in pages.tolist()]
            return torch.stack(rows)
        inside = torch.arange(page_bytes, device=self.pool.device)
        return self.pool[torch.from_numpy(pages).to(self.pool.device)[:, None] + inside]

    def slices(self, slices, slice_bytes):
        """Return uint8 [num_slices, slice_bytes] of the ring, a copy."""
        return np.stack([self.ring[first : first + slice_bytes] for first in slices])

    def fill_slices(self, slices, data):
        """Set slices to the rows of data."""
        for first, row in zip(slices, data, strict=True):
            self.ring[first : first + row.size] = row

    def check_rest(self, slices, slice_bytes, pages, page_bytes):
        """Put GUARD into a transfer's memory and assert that it is everywhere then."""
        for first in slices:
            self.ring[first : first + slice_bytes] = GUARD
        assert (self.ring == GUARD).all()
        if pages.size <= 64:
            for page in pages.tolist():
                self.pool[page : page + page_bytes] = GUARD
        else:
            inside = torch.arange(page_bytes, device=self.pool.device)
            self.pool[torch.from_numpy(pages).to(self.pool.device)[:, None] + inside] = GUARD
        for part in self.pool.split(1 << 30):
            assert bool((part == GUARD).all())

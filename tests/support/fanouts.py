"""Groups of ranks that restore together, in one process over fake devices.

with Members(3) as members:
    tickets = members.restore(shape)
"""

import numpy as np

from adp_kv.fanout.fanout import Fanout
from adp_kv.fanout.flags import Flags, flags_bytes
from adp_kv.fanout.plan import Shape
from adp_kv.fanout.settings import FanoutSettings
from adp_kv.transfer.base import SliceCopy
from adp_kv.transfer.copy_engine import CopyEngine
from adp_kv.transfer.hardware import Hardware
from adp_kv.transfer.registration import RingRegistration
from tests.support.exchanges import LocalGroup
from tests.support.fake_cuda import FakeDevice

GUARD = 0xA5
NUM_SLOTS = 256
SMALL = FanoutSettings(staging_bytes=64 << 10, num_buffers=2, max_ahead=6, max_pages=64)


class Members:
    """Ranks over one ring, each with pages of its own between guard bands."""

    def __init__(self, num_ranks, *, seed=0, slot_bytes=1024, settings=SMALL, clock=None):
        self.devices = [FakeDevice(seed * 31 + rank) for rank in range(num_ranks)]
        self.slot_bytes = slot_bytes
        self.ring = np.random.default_rng(seed).integers(
            0, 256, NUM_SLOTS * slot_bytes, dtype=np.uint8
        )
        self.exchanges = LocalGroup(num_ranks).exchanges(self.devices)
        self.pools = [np.full(NUM_SLOTS * slot_bytes * 4, GUARD, np.uint8) for _ in self.devices]
        self.fanouts = []
        words = np.zeros(flags_bytes(settings.max_ahead, num_ranks) // 8, np.int64)
        for device, exchange in zip(self.devices, self.exchanges, strict=True):
            ring = RingRegistration(device, 0, piece_bytes=32 << 10)
            ring.register(self.ring.ctypes.data, self.ring.size)
            hardware = Hardware(device, CopyEngine(device, device), ring)
            extra = {} if clock is None else {"clock": clock}
            flags = Flags(words, exchange.rank, num_ranks)
            self.fanouts.append(
                Fanout(hardware, exchange, flags, settings, tuple(range(num_ranks)), **extra)
            )
        self.num_labels = 0

    def copies(self, slots, pages, shape):
        """Return the same transfer on every rank; pages: numbers of pages in each pool."""
        pitch = shape.page_bytes + 16
        return [
            SliceCopy(
                self.ring.ctypes.data + np.asarray(slots, np.int64) * self.slot_bytes,
                (pool.ctypes.data + np.asarray(pages, np.int64) * pitch).reshape(len(slots), -1),
                shape.page_bytes,
            )
            for pool in self.pools
        ]

    def restore(self, shape, copies, marks=None):
        """Start a transfer on all ranks; None in copies: that rank has failed."""
        self.num_labels += 1
        marks = marks or [device.record(device.main) for device in self.devices]
        return [
            fanout.restore((self.num_labels, 7), shape, copy, mark)
            for fanout, copy, mark in zip(self.fanouts, copies, marks, strict=True)
        ]

    def expected(self, slots, shape):
        """Return uint8 [pages, page_bytes] of slots."""
        slice_bytes = shape.pages_per_slice * shape.page_bytes
        rows = self.ring.reshape(NUM_SLOTS, -1)[slots, :slice_bytes]
        return rows.reshape(-1, shape.page_bytes)

    def pages(self, rank, pages, shape):
        pitch = shape.page_bytes + 16
        pool = self.pools[rank]
        rows = pool[: pool.size // pitch * pitch].reshape(-1, pitch)
        return rows[np.asarray(pages).reshape(-1), : shape.page_bytes]

    def is_untouched(self, rank, pages, shape):
        """Return whether everything but these pages is as it was."""
        pitch = shape.page_bytes + 16
        pool = self.pools[rank].copy()
        rows = pool[: pool.size // pitch * pitch].reshape(-1, pitch)
        rows[np.asarray(pages, np.int64).reshape(-1), : shape.page_bytes] = GUARD
        return bool((pool == GUARD).all())

    def step(self, count=1000):
        """Let every device run."""
        for _ in range(10):
            for device in self.devices:
                device.step(count)


def shape_of(slots, per_slice, page_bytes):
    return Shape(len(slots), per_slice, page_bytes)

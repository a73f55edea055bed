"""The device mover over a device that runs its streams in any order (see fake_cuda)."""

import numpy as np
import pytest

from tests.support.fake_cuda import FakeDevice, FakeEvent

torch = pytest.importorskip("torch")
from adp_kv.errors import TransferError  # noqa: E402
from adp_kv.transfer import cuda_mover  # noqa: E402
from adp_kv.transfer.base import SliceCopy  # noqa: E402
from adp_kv.transfer.copy_engine import CopyEngine  # noqa: E402
from adp_kv.transfer.plan import NEVER, Thresholds, Way  # noqa: E402
from adp_kv.transfer.registration import RingRegistration  # noqa: E402
from adp_kv.transfer.settings import MoverSettings  # noqa: E402

GUARD = 0xA5
NUM_SLOTS = 192
MIXED = {  # a kernel moves a part and the copy engine another
    "beside staged": Thresholds(0, 1, NEVER, NEVER, beside_strided=0, beside=0.5),
    "beside batch": Thresholds(0, NEVER, NEVER, NEVER, beside_batch=0, beside=0.5),
}


@pytest.fixture(autouse=True)
def fake_events(monkeypatch):
    monkeypatch.setattr(cuda_mover.torch.cuda, "Event", FakeEvent)


class Bench:
    """A mover, a ring of slots and a pool of pages, both with guard bands."""

    def __init__(
        self, device, way, page_bytes=24, pages_per_slice=3, staging_bytes=1024, batch=True
    ):
        self.device = device
        thresholds = MIXED.get(way) or Thresholds(0, 0, 0, 0, force=way)
        settings = MoverSettings(
            staging_bytes=staging_bytes,
            direct_bytes=512,
            restore=thresholds,
            save=thresholds,
            max_pages=16,
        )
        engine = CopyEngine(device, device if batch else None)
        registration = RingRegistration(device, 0, piece_bytes=4096)
        self.mover = cuda_mover.CudaMover(device, engine, registration, settings)
        self.page_bytes, self.per_slice = page_bytes, pages_per_slice
        self.slice_bytes = page_bytes * pages_per_slice
        self.slot_bytes = self.slice_bytes + 40
        self.page_pitch = page_bytes + 16
        self.ring = np.full(NUM_SLOTS * self.slot_bytes, GUARD, np.uint8)
        self.pool = np.full(NUM_SLOTS * pages_per_slice * self.page_pitch, GUARD, np.uint8)
        self.mover.register_ring(self.ring.ctypes.data, self.ring.size)

    def copy_of(self, slots, pages):
        slots, pages = np.asarray(slots, np.int64), np.asarray(pages, np.int64)
        return SliceCopy(
            self.ring.ctypes.data + slots * self.slot_bytes + 8,
            (self.pool.ctypes.data + pages * self.page_pitch).reshape(len(slots), self.per_slice),
            self.page_bytes,
        )

    def slices(self, slots):
        return self.ring.reshape(NUM_SLOTS, -1)[slots, 8 : 8 + self.slice_bytes]

    def pages(self, pages):
        return self.pool.reshape(-1, self.page_pitch)[pages, : self.page_bytes]

    def outside(self):
        """Return all bytes that no transfer may write."""
        ring = self.ring.reshape(NUM_SLOTS, -1)
        pool = self.pool.reshape(-1, self.page_pitch)
        parts = (ring[:, :8], ring[:, 8 + self.slice_bytes :], pool[:, self.page_bytes :])
        return np.concatenate([part.reshape(-1) for part in parts])


def shares(rng, num, kind):
    """Return disjoint groups of slots: runs, strided or in any order."""
    slots = {
        "run": np.arange(NUM_SLOTS),
        "random": rng.permutation(NUM_SLOTS),
        "strided": np.concatenate([np.arange(0, NUM_SLOTS, 2), np.arange(1, NUM_SLOTS, 2)]),
    }[kind]
    return np.array_split(slots, num)


@pytest.mark.parametrize("way", [None, *Way, *MIXED])
@pytest.mark.parametrize("kind", ["run", "random", "strided"])
@pytest.mark.parametrize("seed", range(6))
def test_transfers_in_flight_move_the_right_bytes(way, kind, seed):
    rng = np.random.default_rng(seed)
    device = FakeDevice(seed)
    page_bytes, per_slice = [(24, 3), (16, 1), (7, 5), (400, 2)][seed % 4]
    bench = Bench(device, way, page_bytes, per_slice, [1024, 2400, 4096][seed % 3], seed % 2 == 0)
    groups = shares(rng, 16, kind)
    order = rng.permutation(NUM_SLOTS * per_slice)
    expected, tickets, first = [], [], 0
    for slots in groups:
        pages = order[first : first + slots.size * per_slice]
        first += pages.size
        copy = bench.copy_of(slots, pages)
        data = rng.integers(0, 256, (slots.size, bench.slice_bytes), dtype=np.uint8)
        restoring = bool(rng.integers(2))
        if restoring:  # the compute stream still owns the pages until the mark
            bench.ring.reshape(NUM_SLOTS, -1)[slots, 8 : 8 + bench.slice_bytes] = data
            device.main.add(
                lambda p=pages: bench.pool.reshape(-1, bench.page_pitch).__setitem__(
                    (p, slice(0, bench.page_bytes)), 1
                )
            )
            tickets.append(bench.mover.restore(copy, bench.mover.mark()))
        else:  # the compute stream writes the pages before the mark
            device.main.add(
                lambda p=pages, d=data: bench.pool.reshape(-1, bench.page_pitch).__setitem__(
                    (p, slice(0, bench.page_bytes)), d.reshape(p.size, -1)
                )
            )
            tickets.append(bench.mover.save(copy, bench.mover.mark()))
        expected.append((restoring, slots, pages, data))
        device.step(rng.integers(0, [1, 9, 40][seed % 3]))
    while expected:
        at = int(rng.integers(len(expected)))
        if tickets[at].done():
            tickets.pop(at)
            restoring, slots, pages, data = expected.pop(at)
            got = bench.pages(pages).reshape(data.shape) if restoring else bench.slices(slots)
            assert np.array_equal(got, data), (restoring, slots)
    assert (bench.outside() == GUARD).all()
    assert device.registered
    bench.mover.close()
    bench.mover.close()
    assert not device.registered


def test_restore_waits_for_its_mark():
    device = FakeDevice()
    bench = Bench(device, None)
    gate = FakeEvent(device)
    device.main.wait_event(gate)
    ticket = bench.mover.restore(bench.copy_of([3], [0, 1, 2]), bench.mover.mark())
    device.step(1000)
    assert not ticket.done()
    gate.happened = True
    device.step(1000)
    assert ticket.done()


def test_fence_makes_current_stream_wait():
    device = FakeDevice()
    bench = Bench(device, None)
    bench.ring[:] = 9
    ticket = bench.mover.restore(bench.copy_of([0], [0, 1, 2]), None)
    ticket.fence()
    seen = []
    device.main.add(lambda: seen.append(bench.pages([0, 1, 2]).copy()))
    device.main.synchronize()
    assert (seen[0] == 9).all()


def test_failed_transfer_is_drained_and_next_works():
    device = FakeDevice()
    bench = Bench(device, Way.BATCH)
    copy = bench.copy_of([0, 5], range(6))
    device.fail_copies = True
    with pytest.raises(TransferError, match="invalid argument"):
        bench.mover.restore(copy, None)
    device.fail_copies = False
    bench.ring[:] = 3
    ticket = bench.mover.restore(copy, None)
    device.step(1000)
    assert ticket.done()
    assert (bench.pages(range(6)) == 3).all()


def test_slices_outside_ring_raise_and_queue_nothing():
    device = FakeDevice()
    bench = Bench(device, None)
    copy = bench.copy_of([0], [0, 1, 2])
    beyond = SliceCopy(copy.slice_addrs + bench.ring.size, copy.page_addrs, copy.page_bytes)
    with pytest.raises(TransferError, match="outside"):
        bench.mover.save(beyond, None)
    assert device.calls == []


def test_device_that_hangs_holds_close_until_its_deadline_and_keeps_the_ring(monkeypatch):
    monkeypatch.setattr(cuda_mover, "_DRAIN_S", 0.05)
    device = FakeDevice()
    bench = Bench(device, None)
    device.main.wait_event(FakeEvent(device))
    bench.mover.restore(bench.copy_of([0], [0, 1, 2]), bench.mover.mark())
    bench.mover.close()
    assert device.registered, "the device may still read the ring"


def test_failed_transfer_on_a_device_that_hangs_ends_the_mover(monkeypatch):
    monkeypatch.setattr(cuda_mover, "_DRAIN_S", 0.05)
    device = FakeDevice()
    bench = Bench(device, Way.BATCH)
    device.main.wait_event(FakeEvent(device))
    device.fail_copies = True
    copy = bench.copy_of([0, 5], range(6))
    with pytest.raises(TransferError, match="invalid argument"):
        bench.mover.restore(copy, bench.mover.mark())
    device.fail_copies = False
    with pytest.raises(TransferError, match="closed"):
        bench.mover.restore(copy, None)


def test_closed_mover_refuses():
    bench = Bench(FakeDevice(), None)
    bench.mover.close()
    with pytest.raises(TransferError, match="closed"):
        bench.mover.restore(bench.copy_of([0], [0, 1, 2]), None)


def test_transfer_of_nothing_is_done():
    bench = Bench(FakeDevice(), None)
    ticket = bench.mover.save(bench.copy_of([], []), None)
    ticket.fence()
    assert ticket.done()

"""The device mover over a device that runs its streams in any order (see fake_cuda)."""

import threading

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
# A kernel moves a part and the copy engine another.
MIXED = {"beside staged": Thresholds(0, 1, NEVER, NEVER, beside_strided=0, beside=0.5)}


@pytest.fixture(autouse=True)
def fake_events(monkeypatch):
    monkeypatch.setattr(cuda_mover.torch.cuda, "Event", FakeEvent)


class Bench:
    """A mover, a ring of slots and a pool of pages, both with guard bands."""

    def __init__(
        self,
        device,
        way,
        page_bytes=24,
        pages_per_slice=3,
        staging_bytes=1024,
        batch=True,
        piece_bytes=4096,
        **settings,
    ):
        self.device = device
        thresholds = MIXED.get(way) or Thresholds(0, 0, 0, 0, force=way)
        settings = MoverSettings(
            staging_bytes=staging_bytes,
            direct_bytes=512,
            restore=thresholds,
            save=thresholds,
            max_pages=16,
            **settings,
        )
        engine = CopyEngine(device, device if batch else None)
        registration = RingRegistration(device, 0, piece_bytes=piece_bytes)
        self.buffers = settings.staging_buffers
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

    def write_pages(self, pages, data):
        self.pool.reshape(-1, self.page_pitch)[pages, : self.page_bytes] = data

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
    staging_bytes, pinned_pages = [1024, 2400, 4096][seed % 3], [0, 5, 256][seed // 2]
    bench = Bench(
        device, way, page_bytes, per_slice, staging_bytes, seed % 2 == 0, pinned_pages=pinned_pages
    )
    groups = shares(rng, 24, kind)
    order = rng.permutation(NUM_SLOTS * per_slice)
    expected, tickets, first = [], [], 0
    while groups:
        begun = []
        for slots in [groups.pop() for _ in range(min(len(groups), int(rng.integers(1, 4))))]:
            pages = order[first : first + slots.size * per_slice]
            first += pages.size
            data = rng.integers(0, 256, (slots.size, bench.slice_bytes), dtype=np.uint8)
            restoring = bool(rng.integers(2))
            # The compute stream owns the pages until the mark, and writes what a save takes.
            written = 1 if restoring else data.reshape(pages.size, -1)
            if restoring:
                bench.ring.reshape(NUM_SLOTS, -1)[slots, 8 : 8 + bench.slice_bytes] = data
            device.main.add(lambda p=pages, w=written: bench.write_pages(p, w))
            begun.append((restoring, slots, pages, data))
        mark = bench.mover.mark()  # of all that begin now, in both directions
        for restoring, slots, pages, _ in begun:
            start = bench.mover.restore if restoring else bench.mover.save
            tickets.append(start(bench.copy_of(slots, pages), mark))
            device.step(rng.integers(0, [1, 9, 40][seed % 3]))
        expected += begun
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


@pytest.mark.parametrize("way", [*Way, *MIXED])
@pytest.mark.parametrize("verb", ["restore", "save"])
def test_transfers_wait_each_for_their_mark(way, verb):
    device = FakeDevice()
    bench = Bench(device, way)
    start = getattr(bench.mover, verb)
    gates, marks = [FakeEvent(device) for _ in range(2)], []
    for gate in gates:
        device.main.wait_event(gate)
        marks.append(bench.mover.mark())
    slots = np.arange(NUM_SLOTS).reshape(4, -1)  # of many pieces each
    pages = np.arange(NUM_SLOTS * 3).reshape(4, -1)
    copies = [bench.copy_of(*both) for both in zip(slots, pages, strict=True)]
    tickets = [start(copies[0], marks[0]), start(copies[1], marks[0])]
    tickets += [start(copies[2], marks[1]), start(copies[3], marks[1])]
    bench.ring[:], bench.pool[:] = 7, 8
    ring, pool = bench.ring.copy(), bench.pool.copy()
    device.step(1000)
    assert not any(ticket.done() for ticket in tickets)
    assert np.array_equal(bench.ring, ring)
    assert np.array_equal(bench.pool, pool)
    gates[0].happened = True
    device.step(5000)
    assert [ticket.done() for ticket in tickets] == [True, True, False, False]
    gates[1].happened = True
    device.step(5000)
    assert all(ticket.done() for ticket in tickets)
    bench.mover.close()


@pytest.mark.parametrize("way", [*Way, *MIXED])
@pytest.mark.parametrize("verb", ["restore", "save"])
def test_end_of_a_transfer_is_the_end_of_all_its_pieces(way, verb):
    for seed in range(8):
        device = FakeDevice(seed)
        bench = Bench(device, way)
        rng = np.random.default_rng(seed)
        slots, pages = rng.permutation(NUM_SLOTS)[:96], rng.permutation(NUM_SLOTS * 3)[:288]
        data = rng.integers(0, 256, (96, bench.slice_bytes), dtype=np.uint8)
        if verb == "restore":
            bench.ring.reshape(NUM_SLOTS, -1)[slots, 8 : 8 + bench.slice_bytes] = data
        else:
            bench.write_pages(pages, data.reshape(288, -1))
        ticket = getattr(bench.mover, verb)(bench.copy_of(slots, pages), None)
        while not ticket.done():
            pass
        got = bench.slices(slots) if verb == "save" else bench.pages(pages).reshape(data.shape)
        assert np.array_equal(got, data)
        assert device.is_idle(), "it ended before something that it had queued"


CALLS = {  # way: waits, records, launches and copies of a transfer, behind one with another mark
    Way.BATCH: (1, 1, 0, 3),  # a copy a page
    Way.DIRECT: (1, 1, 1, 0),
    Way.STAGED: (3, 2, 1, 1),  # the mark, the buffer, and kernel behind copy
}


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("verb", ["restore", "save"])
def test_small_transfer_is_few_cuda_calls(way, verb):
    device = FakeDevice()
    bench = Bench(device, way, piece_bytes=1 << 20)  # no border cuts a copy
    start = getattr(bench.mover, verb)
    for number in range(bench.buffers + 2):
        mark = bench.mover.mark()
        device.counts.clear()
        device.calls.clear()
        start(bench.copy_of([number], range(3 * number, 3 * number + 3)), mark)
    launches = [call for call in device.calls if call[0] == "launch"]
    copies = len(device.calls) - len(launches)
    waits, records, num_launches, num_copies = CALLS[way]
    assert (device.counts["wait"], device.counts["record"]) == (waits, records)
    assert (len(launches), copies) == (num_launches, num_copies)
    device.counts.clear()
    start(bench.copy_of([10], range(30, 33)), mark)
    start(bench.copy_of([11], range(33, 36)), mark)
    saved = 2 if way is not Way.DIRECT else 1  # a stream waits for a mark once
    assert device.counts["wait"] == 2 * waits - saved
    bench.mover.close()


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


def test_device_that_fails_is_a_failed_transfer(monkeypatch):
    def fail(_event):
        raise RuntimeError("cudaErrorIllegalAddress")

    bench = Bench(FakeDevice(), None)
    ticket = bench.mover.restore(bench.copy_of([0], [0, 1, 2]), None)
    monkeypatch.setattr(FakeEvent, "query", fail)
    with pytest.raises(TransferError, match=r"device failed.*IllegalAddress"):
        ticket.done()
    bench.mover.close()


def test_slices_outside_ring_raise_and_queue_nothing():
    device = FakeDevice()
    bench = Bench(device, None)
    copy = bench.copy_of([0], [0, 1, 2])
    beyond = SliceCopy(copy.slice_addrs + bench.ring.size, copy.page_addrs, copy.page_bytes)
    with pytest.raises(TransferError, match="outside"):
        bench.mover.save(beyond, None)
    assert device.calls == []


@pytest.mark.parametrize("way", [None, *Way, *MIXED])
@pytest.mark.parametrize("verb", ["restore", "save"])
@pytest.mark.parametrize("hangs", [0, 1])
def test_device_that_hangs_holds_close_until_its_deadline_and_keeps_the_ring(
    monkeypatch, way, verb, hangs
):
    monkeypatch.setattr(cuda_mover, "_DRAIN_S", 0.05)
    device = FakeDevice()
    bench = Bench(device, way)
    gate = FakeEvent(device)
    device.main.wait_event(gate)
    marks = [None, None]
    marks[hangs] = bench.mover.mark()
    for number, mark in enumerate(marks):  # on each of two streams that take turns
        copy = bench.copy_of([number], range(3 * number, 3 * number + 3))
        getattr(bench.mover, verb)(copy, mark)
    with pytest.raises(TransferError, match="did not end"):
        bench.mover.close()
    assert device.registered, "the device may still read the ring"
    gate.happened = True
    bench.mover.close()
    assert not device.registered


@pytest.mark.parametrize("pipe", ["_restores", "_saves"])
@pytest.mark.parametrize("stream", ["_table_stream", "_copy_stream", "_kernel_stream"])
def test_close_waits_for_each_stream(pipe, stream, monkeypatch):
    monkeypatch.setattr(cuda_mover, "_DRAIN_S", 0.05)
    device = FakeDevice()
    bench, gate = Bench(device, None), FakeEvent(device)
    getattr(getattr(bench.mover, pipe), stream).cuda.wait_event(gate)
    with pytest.raises(TransferError, match="did not end"):
        bench.mover.close()
    assert device.registered
    gate.happened = True
    bench.mover.close()
    assert not device.registered


def test_groups_of_rows_apart_are_2d_copies_and_no_batch():
    device = FakeDevice()
    bench = Bench(device, Way.STAGED, pages_per_slice=1, staging_bytes=4096)
    slots = (np.arange(5)[:, None] * 20 + np.arange(5) * 2).reshape(-1)  # five each, two apart
    data = np.random.default_rng(0).integers(0, 256, (25, 24), dtype=np.uint8)
    bench.ring.reshape(NUM_SLOTS, -1)[slots, 8:32] = data
    ticket = bench.mover.restore(bench.copy_of(slots, range(25)), None)
    device.step(1000)
    assert ticket.done()
    assert np.array_equal(bench.pages(range(25)), data)
    ways = {call[0] for call in device.calls}
    assert "2-D" in ways
    assert "batch" not in ways
    bench.mover.close()


def test_another_ring_has_its_own_borders():
    device = FakeDevice()
    bench = Bench(device, Way.STAGED)
    other = np.zeros(3 * 4096, np.uint8)
    start = -other.ctypes.data % 4096
    border = other.ctypes.data + start + 4096
    bench.mover.release_ring()
    bench.mover.register_ring(other.ctypes.data + start, 2 * 4096)
    bench.mover.restore(
        SliceCopy(np.array([border - 8]), bench.copy_of([0], range(3)).page_addrs, 24), None
    )
    assert [call for call in device.calls if call[0] == "1-D"] == [("1-D",)] * 2
    bench.mover.close()


def test_failed_transfer_on_a_device_that_hangs_ends_the_mover(monkeypatch):
    monkeypatch.setattr(cuda_mover, "_DRAIN_S", 0.05)
    device = FakeDevice()
    bench = Bench(device, Way.STAGED)
    gate = FakeEvent(device)
    device.main.wait_event(gate)
    copies = []

    def copy_one(*how, copy=device.memcpyAsync):
        if copies:
            raise RuntimeError("cudaErrorInvalidValue: invalid argument")
        copies.append(how)
        copy(*how)

    monkeypatch.setattr(device, "memcpyAsync", copy_one)
    copy = bench.copy_of([0, 5], range(6))
    ticket = bench.mover.restore(copy, bench.mover.mark())
    assert copies, "nothing was queued: this proves nothing"
    assert not ticket.done(), "its pages and slots are given away while it may still run"
    with pytest.raises(TransferError, match="invalid argument"):
        ticket.proven()
    ticket.fence()
    with pytest.raises(TransferError, match="closed"):
        bench.mover.restore(copy, None)
    with pytest.raises(TransferError, match="did not end"):
        bench.mover.close()
    gate.happened = True
    device.step(1000)
    with pytest.raises(TransferError, match="invalid argument"):
        ticket.done()
    assert device.is_idle()
    bench.mover.close()


@pytest.mark.parametrize("way", [*Way, *MIXED])
def test_device_is_the_thread_s_own_and_no_capture_is_ended(way, monkeypatch):
    """A thread that has bound no device would use another; a call outside ends vLLM's capture."""
    used, errors = set(), []
    names = ["_copy", "launch", "streamWaitEvent", "record"]

    def watch(kind, name):
        call = getattr(kind, name)

        def use(self, *how, **more):
            device = getattr(self, "_device", self)
            used.add(name)
            assert device.is_exempt(), name
            assert device.is_bound(), name
            return call(self, *how, **more)

        monkeypatch.setattr(kind, name, use)

    for name in names:
        watch(FakeDevice, name)
    watch(FakeEvent, "query")
    bench = Bench(FakeDevice(), way, pinned_pages=0)

    def transfer():
        try:
            for number, start in enumerate((bench.mover.restore, bench.mover.save)):
                slots = range(20 * number, 20 * (number + 1))
                pages = range(60 * number, 60 * (number + 1))
                ticket = start(bench.copy_of(slots, pages), None)
                while not ticket.done():
                    pass
        except Exception as error:  # noqa: BLE001 - raised by the thread that started this one
            errors.append(error)

    thread = threading.Thread(target=transfer)
    thread.start()
    thread.join(60)
    assert not errors, errors
    assert not thread.is_alive()
    unused = {"launch", "streamWaitEvent"} if way is Way.BATCH else set()
    assert used == {*names, "query"} - unused


def test_ring_is_registered_and_given_back_where_that_ends_no_capture(monkeypatch):
    used = []

    def watch(name):
        call = getattr(FakeDevice, name)

        def use(self, *how):
            used.append((name, self.is_exempt()))
            call(self, *how)

        monkeypatch.setattr(FakeDevice, name, use)

    watch("hostRegister")
    watch("hostUnregister")
    bench = Bench(FakeDevice(), None)  # several pieces: threads of their own register them
    bench.mover.close()
    assert {name for name, _ in used} == {"hostRegister", "hostUnregister"}
    assert all(is_exempt for _, is_exempt in used), used


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

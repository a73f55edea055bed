import errno
import os
import threading
import time

import numpy as np
import pytest

from adp_kv.errors import CardError
from gateway.cards import uring_engine
from gateway.cards.engines import start_engine
from gateway.cards.io_engine import IoRequest, ThreadEngine
from gateway.cards.uring import OP_NOP, URing, probe
from gateway.cards.uring_engine import UringEngine, _split
from tests.support.cards import Arena
from tests.support.process import wait_until

uring = pytest.mark.skipif(probe() is not None, reason=f"no io_uring here: {probe()}")
BLOCK = 4096


@pytest.fixture(
    params=[
        pytest.param(lambda: UringEngine(8), id="io_uring", marks=uring),
        pytest.param(lambda: ThreadEngine(3), id="threads"),
    ]
)
def engine(request):
    engine = request.param()
    yield engine
    assert engine.stop(5)


@pytest.fixture
def file(tmp_path):
    descriptor = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.pwritev(descriptor, [Arena(200 * BLOCK).bytes], 0)  # holes would be read inline
    yield descriptor
    os.close(descriptor)


class Waiting:
    def __init__(self):
        self.done = threading.Event()
        self.results = None

    def __call__(self, results):
        assert self.results is None
        self.results = results
        self.done.set()

    def wait(self):
        assert self.done.wait(10)
        return self.results.tolist()


def request(fd, arena, blocks, *, write, on_complete):
    n = len(blocks)
    return IoRequest(
        write=write,
        fds=np.full(n, fd, np.int32),
        offsets=np.array(blocks, np.uint64) * np.uint64(BLOCK),
        addresses=np.uint64(arena.base) + np.arange(n, dtype=np.uint64) * np.uint64(BLOCK),
        lengths=np.full(n, BLOCK, np.uint32),
        on_complete=on_complete,
    )


def test_requests_beyond_the_depth_move_all_bytes(engine, file):
    source, target = Arena(1 << 20), Arena(1 << 20)
    source.bytes[:] = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    blocks = np.random.default_rng(1).permutation(200)
    for start in range(0, 200, 100):
        arena = Arena(100 * BLOCK)
        arena.bytes[:] = source.bytes[start * BLOCK : (start + 100) * BLOCK]
        done = Waiting()
        part = blocks[start : start + 100]
        engine.submit(request(file, arena, part, write=True, on_complete=done))
        assert done.wait() == [BLOCK] * 100
    waits = [Waiting() for _ in range(20)]
    targets = [Arena(10 * BLOCK) for _ in waits]
    for i, (done, target) in enumerate(zip(waits, targets, strict=True)):
        part = blocks[i * 10 : i * 10 + 10]
        engine.submit(request(file, target, part, write=False, on_complete=done))
    for i, (done, target) in enumerate(zip(waits, targets, strict=True)):
        assert done.wait() == [BLOCK] * 10
        first = i * 10 * BLOCK
        assert np.array_equal(target.bytes, source.bytes[first : first + 10 * BLOCK])


def test_bad_rows_fail_alone(engine, file):
    done = Waiting()
    arena = Arena(1 << 16)
    bad = request(file, arena, [0, 1, 2, 500], write=False, on_complete=done)
    bad.fds[1] = 9999
    bad.addresses[2] = 8
    engine.submit(bad)
    assert done.wait() == [BLOCK, -errno.EBADF, -errno.EFAULT, 0]


def test_callback_that_raises_stops_nothing(engine, file, caplog):
    def burst(results):
        raise RuntimeError("no")

    arena = Arena(1 << 16)
    engine.submit(request(file, arena, [0], write=False, on_complete=burst))
    done = Waiting()
    engine.submit(request(file, arena, [0], write=False, on_complete=done))
    assert done.wait() == [BLOCK]
    assert engine.stop(5)
    assert "callback failed" in caplog.text


def test_stopped_engine_cancels(file):
    for engine in (ThreadEngine(1), *([UringEngine(4)] if probe() is None else [])):
        assert engine.stop(5)
        done = Waiting()
        engine.submit(request(file, Arena(1 << 16), [0, 1], write=False, on_complete=done))
        assert done.wait() == [-errno.ECANCELED] * 2


def test_stop_answers_every_request(engine, file):
    waits = [Waiting() for _ in range(50)]
    arena = Arena(1 << 20)
    for done in waits:
        engine.submit(request(file, arena, range(40), write=False, on_complete=done))
    assert engine.stop(10)
    for done in waits:
        assert set(done.wait()) <= {BLOCK, -errno.ECANCELED}


@uring
def test_registered_and_other_memory_mix(file):
    engine = UringEngine(8)
    inside, outside = Arena(1 << 16), Arena(1 << 16)
    engine.register(inside.base, 6 * BLOCK + 100)  # the seventh block crosses its end
    for arena in (inside, outside):
        done = Waiting()
        engine.submit(request(file, arena, range(10), write=True, on_complete=done))
        assert done.wait() == [BLOCK] * 10
    assert engine._starts.tolist() == [inside.base]
    engine.unregister()
    assert engine._starts.size == 0
    assert engine.stop(5)


@uring
def test_depth_stays_full_across_requests(file, monkeypatch):
    depths, enter = [], URing.enter
    monkeypatch.setattr(
        URing, "enter", lambda ring, n: (depths.append(ring.in_flight - 1), enter(ring, n))
    )
    engine, arena = UringEngine(8), Arena(1 << 16)
    waits = [Waiting() for _ in range(10)]
    queued = [request(file, arena, range(3), write=False, on_complete=done) for done in waits]
    engine._inbox.extend(queued[:-1])
    engine.submit(queued[-1])
    for done in waits:
        assert done.wait() == [BLOCK] * 3
    assert engine.stop(5)
    busy = depths[1:-1]  # without falling asleep before and after
    assert max(busy) == 8
    assert len([depth for depth in busy if depth < 8]) <= 8  # only while the last 8 rows drain


@uring
def test_refused_pinning_goes_on_unpinned(file, monkeypatch, caplog):
    def refuse(self, buffers):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(uring_engine.URing, "register_buffers", refuse)
    engine = UringEngine(8)
    arena = Arena(1 << 16)
    engine.register(arena.base, arena.num_bytes)
    done = Waiting()
    engine.submit(request(file, arena, range(10), write=True, on_complete=done))
    assert done.wait() == [BLOCK] * 10
    assert engine.stop(5)
    assert "LimitMEMLOCK" in caplog.text


@uring
def test_lost_ring_answers_io_errors(file, monkeypatch, caplog):
    engine = UringEngine(8)

    def refuse(self, min_complete):
        raise OSError(errno.ENXIO, "gone")

    monkeypatch.setattr(uring_engine.URing, "enter", refuse)
    first, second = Waiting(), Waiting()
    arena = Arena(1 << 16)
    engine.submit(request(file, arena, [0, 1], write=False, on_complete=first))
    assert set(first.wait()) <= {BLOCK, -errno.EIO}
    engine._thread.join(5)
    engine.submit(request(file, arena, [0, 1], write=False, on_complete=second))
    assert set(second.wait()) <= {-errno.EIO, -errno.ECANCELED}
    assert engine.stop(5)


@uring
def test_lost_ring_does_not_answer_what_the_kernel_has(file, monkeypatch, caplog):
    """It may yet fill that memory: whoever was answered would give it to another read."""
    engine, arena = UringEngine(8), Arena(1 << 16)
    source, sink = os.pipe()  # a read that does not end
    real, lost = uring_engine.URing.enter, threading.Event()

    def enter(self, min_complete):
        if lost.is_set():
            raise OSError(errno.ENXIO, "gone")
        real(self, min_complete)

    monkeypatch.setattr(uring_engine.URing, "enter", enter)
    begun, other = Waiting(), Waiting()
    engine.submit(request(source, arena, [0], write=False, on_complete=begun))
    wait_until(lambda: engine._running and engine._wake_armed, 5, "it waits in the kernel")
    lost.set()
    engine.submit(request(file, arena, [0, 1], write=False, on_complete=other))
    assert set(other.wait()) <= {-errno.EIO, -errno.ECANCELED}
    assert not engine.stop(5)
    assert not begun.done.is_set()
    os.close(source)
    os.close(sink)


def test_forbidden_uring_falls_back_or_says_why(monkeypatch, caplog):
    def forbidden(entries):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(uring_engine, "URing", forbidden)
    engine = start_engine("auto", 8, 2)
    assert engine.name == "threads"
    assert engine.stop(5)
    assert "no io_uring (Operation not permitted)" in caplog.text
    with pytest.raises(CardError, match="io_uring_disabled"):
        start_engine("io_uring", 8, 2)


def test_buffers_are_cut_at_a_gibibyte():
    gib = 1 << 30
    assert _split([(4096, gib), (1 << 40, 2 * gib + 5)]) == [
        (4096, gib),
        (1 << 40, gib),
        ((1 << 40) + gib, gib),
        ((1 << 40) + 2 * gib, 5),
    ]


@uring
def test_ring_wraps_and_refuses_overflow():
    ring = URing(8)
    for round_number in range(50):
        names = np.arange(5, dtype=np.uint64) + np.uint64(round_number)
        ring.append(ring.transfers(OP_NOP, -1, names, names, 0, names))
        ring.enter(5)
        done = ring.reap()
        assert sorted(done["user_data"].tolist()) == names.tolist()
        assert (done["res"] == 0).all()
    names = np.arange(9, dtype=np.uint64)
    with pytest.raises(ValueError, match="pass 8"):
        ring.append(ring.transfers(OP_NOP, -1, names, names, 0, names))
    assert ring.in_flight == 0
    ring.close()


def test_latencies_are_of_rows_that_began(engine, file):
    arena, began = Arena(1 << 20), time.monotonic()
    for blocks in (range(40), range(3)):
        done = Waiting()
        engine.submit(request(file, arena, blocks, write=False, on_complete=done))
        done.wait()
    elapsed_s = time.monotonic() - began
    seen = engine.latencies.of(file)
    assert seen.count == 43
    assert 0 < seen.total_s <= 43 * elapsed_s
    assert engine.latencies.of(file + 1).count == 0


@uring
def test_rows_that_a_stop_caught_have_no_latency(file):
    reader, writer = os.pipe()  # reads of it hang until something is written
    engine, arena = UringEngine(2), Arena(1 << 16)
    hanging, waiting = Waiting(), Waiting()
    blocked = request(reader, arena, [0, 0], write=False, on_complete=hanging)
    blocked.offsets[:] = 2**64 - 1  # where the file is
    engine.submit(blocked)
    begun = lambda: [p.num_begun for p in list(engine._running.values())] == [2]  # noqa: E731
    wait_until(begun, 10, "the reads of the pipe have begun")
    engine.submit(request(file, arena, range(4), write=False, on_complete=waiting))
    assert not engine.stop(0.1)
    assert waiting.wait() == [-errno.ECANCELED] * 4
    os.write(writer, b"x" * BLOCK)
    os.close(writer)
    hanging.wait()
    assert engine.stop(10)
    assert engine.latencies.of(file).count == 0
    assert engine.latencies.of(reader).count == 2
    os.close(reader)

"""Copies of a share: the right bytes in order, and none across a border of the ring."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
from adp_kv.errors import TransferError
from adp_kv.fanout.shares import find_source, queue_share
from adp_kv.transfer.base import SliceCopy
from adp_kv.transfer.copy_engine import CopyEngine

NUM_SLOTS, PAGE = 64, 48


class Ring:
    """A ring that is registered in pieces."""

    def __init__(self, memory, borders):
        self.first, self.end = memory.ctypes.data, memory.ctypes.data + memory.size
        self.border_list = borders

    def covers(self, first, end):
        return self.first <= first and end <= self.end


class Runtime:
    """Copies at once; refuses what CUDA refuses."""

    def __init__(self, borders):
        self.borders = borders
        self.calls = 0

    def memcpyAsync(self, dst, src, size, kind, stream):  # noqa: N802
        self.memcpy2DAsync(dst, size, src, size, size, 1, kind, stream)

    def memcpy2DAsync(  # noqa: N802, PLR0913, PLR0917
        self, dst, dpitch, src, spitch, width, height, kind, stream
    ):
        assert (kind, stream) == (1, 7)
        last = src + (height - 1) * spitch + width
        assert not any(src < border < last for border in self.borders), "a copy crosses a border"
        self.calls += 1
        for row in range(height):
            ctypes.memmove(dst + row * dpitch, src + row * spitch, width)

    def copy(self, dsts, srcs, sizes, stream):
        for dst, src, size in zip(dsts.tolist(), srcs.tolist(), sizes.tolist(), strict=True):
            self.memcpyAsync(dst, src, size, 1, stream)


def moved(slots, per_slice, pages, borders, slot_pages):
    """Return what a share brings, what it should, and how many calls it took."""
    slot_bytes = slot_pages * PAGE
    ring = np.random.default_rng(3).integers(0, 256, NUM_SLOTS * slot_bytes, dtype=np.uint8)
    base = ring.ctypes.data
    cuts = [base + cut for cut in sorted(borders)]
    slices = base + np.array(slots, dtype=np.int64) * slot_bytes
    numbers = np.arange(len(slots) * per_slice, dtype=np.int64).reshape(len(slots), -1)
    runtime = Runtime(cuts)
    source = find_source(SliceCopy(slices, numbers * 4096, PAGE), Ring(ring, cuts))
    target = np.full((pages[1] - pages[0]) * PAGE + 16, 0xA5, np.uint8)
    engine = CopyEngine(runtime, runtime)
    queue_share(source, pages, target.ctypes.data, engine, cuts, 7)
    rows = ring.reshape(NUM_SLOTS, slot_pages, PAGE)[slots, :per_slice].reshape(-1, PAGE)
    assert (target[-16:] == 0xA5).all()
    return target[:-16], rows[pages[0] : pages[1]].reshape(-1), runtime.calls


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_share_brings_its_pages_in_order(data):
    per_slice = data.draw(st.integers(1, 5))
    slot_pages = per_slice + data.draw(st.sampled_from([0, 0, 1, 3]))
    kind = data.draw(st.sampled_from(["run", "strided", "any"]))
    num = data.draw(st.integers(1, 24))
    slots = list(range(3, 3 + num)) if kind == "run" else list(range(1, 1 + 2 * num, 2))
    if kind == "any":
        slots = data.draw(st.permutations(range(NUM_SLOTS)))[:num]
    first = data.draw(st.integers(0, num * per_slice))
    end = data.draw(st.integers(first, num * per_slice))
    size = NUM_SLOTS * slot_pages * PAGE
    borders = data.draw(st.lists(st.integers(1, size - 1), max_size=4, unique=True))
    came, wanted, _ = moved(slots, per_slice, (first, end), borders, slot_pages)
    assert np.array_equal(came, wanted)


@pytest.mark.parametrize(
    ("slot_pages", "slots"), [(4, range(20)), (6, range(20)), (4, range(0, 40, 2))]
)
def test_share_of_a_run_is_one_copy(slot_pages, slots):
    *_, calls = moved(list(slots), 4, (8, 40), [], slot_pages)
    assert calls == 1


@pytest.mark.parametrize(
    "slots",
    [[0, 1, NUM_SLOTS], [NUM_SLOTS, 0, 5], [0, -1], [0, NUM_SLOTS - 0.5], [-0.5, 0.5], [0.5, -0.5]],
)
def test_slices_outside_the_ring_are_refused(slots):
    memory = np.zeros(NUM_SLOTS * PAGE, np.uint8)
    slices = memory.ctypes.data + (np.array(slots) * PAGE).astype(np.int64)
    copy = SliceCopy(slices, np.zeros((len(slots), 1), np.int64), PAGE)
    with pytest.raises(TransferError, match="outside"):
        find_source(copy, Ring(memory, []))

"""Many copies in a few calls of the driver: each of them once, with its own size."""

import numpy as np
import pytest

from tests.support.fake_cuda import FakeDevice

pytest.importorskip("torch")
from adp_kv.transfer import copy_engine
from adp_kv.transfer.copy_engine import CopyEngine
from adp_kv.transfer.extents import Extents

SIZES = np.array([8, 3, 40, 1, 16, 7, 64, 5, 33, 2, 9, 12], dtype=np.int64)


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize(("entries", "calls"), [(5, [5, 5, 2]), (12, [12]), (11, [11, 1])])
def test_batches_leave_nothing_out(to_device, entries, calls, monkeypatch):
    monkeypatch.setattr(copy_engine, "BATCH_ENTRIES", entries)
    device, counts = FakeDevice(), []

    def copy_batch(dsts, srcs, sizes, stream, copy=device.copy):
        counts.append(sizes.size)
        copy(dsts, srcs, sizes, stream)

    monkeypatch.setattr(device, "copy", copy_batch)
    begins = np.cumsum(SIZES + 6) - SIZES  # six bytes apart
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, int(begins[-1] + SIZES[-1]) + 6, dtype=np.uint8)
    target, wanted = np.zeros_like(source), np.zeros_like(source)
    order = rng.permutation(SIZES.size)
    for begin, size in zip(begins.tolist(), SIZES.tolist(), strict=True):
        wanted[begin : begin + size] = source[begin : begin + size]
    host, on_device = (source, target) if to_device else (target, source)
    sizes, rows = SIZES[order], np.ones(SIZES.size, dtype=np.int64)
    extents = Extents(host.ctypes.data + begins[order], sizes, sizes, rows, begins[order])
    stream = device.stream(0)
    CopyEngine(device, device).copy(
        extents, on_device.ctypes.data, to_device=to_device, stream=stream.cuda_stream
    )
    device.step(100)
    assert np.array_equal(target, wanted)
    assert counts == calls

"""The mover contract on host memory, with guard bands and odd sizes."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adp_kv.errors import TransferError
from adp_kv.transfer.base import SliceCopy
from adp_kv.transfer.host_mover import HostMover

GUARD = 0xA5
NUM_SLOTS = 7


def a_transfer(page_bytes, per_slice, slots, seed=0):
    """Return ring [slot, bytes], pool [page, bytes] (with guards) and the copy between them."""
    rng = np.random.default_rng(seed)
    ring = np.full((NUM_SLOTS, page_bytes * per_slice + 33), GUARD, np.uint8)
    pool = np.full((NUM_SLOTS * per_slice, page_bytes + 7), GUARD, np.uint8)
    pages = rng.permutation(NUM_SLOTS * per_slice)[: len(slots) * per_slice].astype(np.int64)
    copy = SliceCopy(
        ring.ctypes.data + 5 + np.array(slots, np.int64) * ring.shape[1],
        (pool.ctypes.data + pages * pool.shape[1]).reshape(len(slots), per_slice),
        page_bytes,
    )
    return ring, pool, pages, copy


@settings(max_examples=60, deadline=None)
@given(
    page_bytes=st.sampled_from([1, 7, 8, 24, 1000, 4104]),
    per_slice=st.integers(1, 4),
    slots=st.lists(st.integers(0, NUM_SLOTS - 1), unique=True),
    saving=st.booleans(),
)
def test_transfer_moves_exactly_its_bytes(page_bytes, per_slice, slots, saving):
    ring, pool, pages, copy = a_transfer(page_bytes, per_slice, slots)
    data = np.random.default_rng(1).integers(0, 256, (len(slots), per_slice * page_bytes), np.uint8)
    want_ring, want_pool = ring.copy(), pool.copy()
    want_ring[slots, 5 : 5 + per_slice * page_bytes] = data
    want_pool[pages, :page_bytes] = data.reshape(-1, page_bytes)
    mover = HostMover()
    mover.register_ring(ring.ctypes.data, ring.size)
    if saving:
        pool[:] = want_pool
        ticket = mover.save(copy, mover.mark())
    else:
        ring[:] = want_ring
        ticket = mover.restore(copy, mover.mark())
    ticket.fence()
    assert ticket.done()
    assert np.array_equal(ring, want_ring)
    assert np.array_equal(pool, want_pool)
    mover.close()
    mover.close()


@pytest.mark.parametrize(("before", "behind"), [(0, 1), (1, 0)])
def test_slices_outside_the_ring_raise(before, behind):
    _, _, _, copy = a_transfer(8, 2, [0, NUM_SLOTS - 1])
    first, end = int(copy.slice_addrs.min()), int(copy.slice_addrs.max()) + copy.slice_bytes
    mover = HostMover()
    mover.register_ring(first + before, end - behind - first - before)
    with pytest.raises(TransferError, match="outside"):
        mover.restore(copy, None)


def test_closed_mover_refuses():
    ring, _, _, copy = a_transfer(8, 2, [0])
    mover = HostMover()
    mover.register_ring(ring.ctypes.data, ring.size)
    mover.close()
    with pytest.raises(TransferError, match="closed"):
        mover.save(copy, None)
    with pytest.raises(TransferError, match="closed"):
        mover.register_ring(ring.ctypes.data, ring.size)


def test_host_side_imports_no_device_library():
    modules = ("base", "plan", "factory", "registration", "copy_engine", "runtime", "settings")
    code = "import sys\n" + "".join(f"import adp_kv.transfer.{name}\n" for name in modules)
    code += "print({'torch', 'triton', 'cupy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_device_mover_imports_without_cuda():
    pytest.importorskip("torch")
    code = "import sys, adp_kv.transfer.cuda_mover\nprint({'triton', 'cupy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cupy" not in done.stdout


def test_open_mover_fits_the_device():
    torch = pytest.importorskip("torch")
    from adp_kv.transfer.factory import open_mover

    assert isinstance(open_mover(torch.device("cpu")), HostMover)
    with pytest.raises(TransferError, match="only cuda and cpu"):
        open_mover(torch.device("meta"))

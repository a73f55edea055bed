"""Bytes that a CUDA mover moves: sizes, layouts, ways, borders; guard bands everywhere."""

import numpy as np
import pytest
import torch

from adp_kv.errors import TransferError
from adp_kv.transfer.copy_engine import open_batch
from adp_kv.transfer.factory import open_mover
from adp_kv.transfer.plan import Way
from adp_kv.units import KiB, MiB, align_up
from tests.support.cuda_rig import GUARD, PIECE_BYTES, RING_BYTES, Rig, wait

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # of cupy and Triton, whatever versions are there
]
WAYS = [None, *Way]
SIZES = [8, 24, 1000, 1001, 8 * KiB, 18432, 41984, 73728, MiB, 3 * MiB + 8, 4 * MiB]


def layout(kind, slice_bytes, num_slices):
    """Return offsets of slices in the ring: over a border, at its end, or anywhere."""
    slot = slice_bytes if kind == "contiguous" else align_up(slice_bytes + 8, 4096)
    inside = slot - slice_bytes  # the last rank's slice of each slot
    if kind == "end":
        return RING_BYTES - np.arange(num_slices, 0, -1) * slot + inside
    if kind == "random":
        room = RING_BYTES // slot
        return np.random.default_rng(1).choice(room, num_slices, replace=False) * slot
    first = PIECE_BYTES // slot - num_slices // 2
    return (first + np.arange(num_slices)) * slot + inside


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "strided", "end", "random"])
def test_transfer_moves_exactly_its_bytes(pool, kind, way):
    rig = Rig(pool, way)
    try:
        for page_bytes in SIZES:
            per_slice = 3 if page_bytes < MiB else 2
            slice_bytes = per_slice * page_bytes
            num_slices = max(2, min(300, 8 * MiB // slice_bytes))
            slices = layout(kind, slice_bytes, num_slices)
            gap = 8 if page_bytes % 8 == 0 else 5
            pages = rig.pages(page_bytes, num_slices * per_slice, gap, seed=page_bytes)
            copy = rig.copy(slices, pages, page_bytes)
            data = np.random.default_rng(2).integers(0, 256, (num_slices, slice_bytes), np.uint8)
            rig.fill_slices(slices, data)
            wait([rig.mover.restore(copy, None)])
            rows = rig.read_pages(pages, page_bytes)
            assert np.array_equal(rows.reshape(data.shape), data), page_bytes
            rig.fill_slices(slices, np.zeros_like(data))
            wait([rig.mover.save(copy, rig.mover.mark())])
            assert np.array_equal(rig.slices(slices, slice_bytes), data), page_bytes
            rig.check_rest(slices, slice_bytes, pages, page_bytes)
    finally:
        rig.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("staging_bytes", [0, 4 * 256, MiB])
def test_staging_smaller_than_transfer(pool, way, staging_bytes):
    rig = Rig(pool, way, staging_bytes=staging_bytes, max_pages=64)
    try:
        for page_bytes, per_slice in ((24, 5), (24 * KiB, 1), (8 * KiB, 100)):
            slice_bytes = page_bytes * per_slice
            num_slices = max(4, min(400, 8 * MiB // slice_bytes))
            slices = layout("strided", slice_bytes, num_slices)
            pages = rig.pages(page_bytes, num_slices * per_slice, 8)
            copy = rig.copy(slices, pages, page_bytes)
            data = np.random.default_rng(2).integers(0, 256, (num_slices, slice_bytes), np.uint8)
            rig.fill_slices(slices, data)
            wait([rig.mover.restore(copy, None)])
            rows = rig.read_pages(pages, page_bytes)
            assert np.array_equal(rows.reshape(data.shape), data)
            rig.fill_slices(slices, np.zeros_like(data))
            wait([rig.mover.save(copy, rig.mover.mark())])
            assert np.array_equal(rig.slices(slices, slice_bytes), data)
            rig.check_rest(slices, slice_bytes, pages, page_bytes)
    finally:
        rig.close()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32", "int8"])
def test_block_of_any_dtype_and_stride_returns(pool, dtype):
    rig = Rig(pool)
    try:
        shape = (40, 2, 16, 8, 64)
        kv = torch.empty((*shape[:1], 3, *shape[1:]), dtype=getattr(torch, dtype), device="cuda")
        cache = kv[:, 1]  # the second of three layers that share a storage
        kv.view(torch.uint8).random_(0, 256)
        before = kv.view(torch.uint8).clone()
        page_bytes = cache[0].numel() * cache.element_size()
        pitch = cache.stride(0) * cache.element_size()
        blocks = torch.randperm(40)[:24].numpy()
        slices = np.arange(12, dtype=np.int64) * 2 * page_bytes
        copy = rig.copy(slices, cache.data_ptr() - pool.data_ptr() + blocks * pitch, page_bytes)
        wait([rig.mover.save(copy, rig.mover.mark())])
        chosen = torch.from_numpy(blocks).cuda()
        cache.view(torch.uint8)[chosen] = GUARD
        wait([rig.mover.restore(copy, rig.mover.mark())])
        assert torch.equal(kv.view(torch.uint8), before)
    finally:
        rig.close()


def test_registration_failure_is_named_and_cleared(pool):
    mover = open_mover(pool.device)
    with pytest.raises(TransferError, match="ulimit -l"):
        mover.register_ring(1 << 46, 1 << 20)  # nothing is mapped there
    assert int(torch.ones(8, device="cuda").sum()) == 8
    mover.close()
    rig = Rig(pool)
    rig.close()


def test_ring_can_be_registered_again(pool):
    rig = Rig(pool)
    rig.mover.close()
    again = open_mover(pool.device)
    again.register_ring(rig.address, RING_BYTES)
    again.close()


def test_batched_copies_are_found():
    """Needs a driver of CUDA 12.8 or later; an older one runs without them."""
    assert open_batch() is not None

"""Pages in strided caches, slices of ranks, numbers of layers."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adp_kv.errors import ConfigError, TransferError
from adp_kv.layout.geometry import (
    CacheGeometry,
    CacheStack,
    View,
    dense_pages,
    head_slices,
    joined_pages,
    layer_indices,
)

BLOCKS = 6


def view(shape, order, dtype=np.uint8, pad=0):
    """Return a zeroed view whose dimensions lie in memory in the given order.

    Args:
        order: dimensions from the outermost to the innermost; block stride grows by pad items.
    """
    inner = [d for d in order if d != 0]
    strides = [0] * len(shape)
    size = 1
    for d in reversed(inner):
        strides[d] = size
        size *= shape[d]
    strides[0] = size + pad
    item = np.dtype(dtype).itemsize
    storage = np.zeros((shape[0] * strides[0],), dtype=dtype)
    return np.lib.stride_tricks.as_strided(storage, shape, [s * item for s in strides]), storage


def pages_of(array, num_blocks):
    item = array.dtype.itemsize
    strides = [s // item for s in array.strides]
    return dense_pages("layer", array.shape, strides, item, num_blocks)


LAYOUTS = {
    "llama-0.25-nhd": ((BLOCKS, 2, 16, 4, 8), (0, 1, 2, 3, 4), np.uint16),
    "llama-0.25-hnd": ((BLOCKS, 2, 16, 4, 8), (0, 1, 3, 2, 4), np.uint16),
    "llama-0.32": ((BLOCKS, 4, 16, 16), (0, 1, 2, 3), np.uint16),
    "llama-0.32-permuted": ((BLOCKS, 4, 16, 16), (0, 2, 1, 3), np.float32),
    "mla": ((BLOCKS, 16, 576), (0, 1, 2), np.uint16),
    "mla-fp8": ((BLOCKS, 64, 656), (0, 1, 2), np.uint8),
    "indexer": ((BLOCKS, 64, 132), (0, 1, 2), np.uint8),
    "hybrid-int8": ((BLOCKS, 1, 1, 274432), (0, 1, 2, 3), np.int8),
    "hybrid-attention": ((BLOCKS, 2, 34, 32), (0, 2, 1, 3), np.uint16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("pad", "split"), [(0, 1), (4096, 1), (0, 2), (0, 3)])
def test_page_is_the_block_s_bytes(layout, pad, split):
    shape, order, dtype = LAYOUTS[layout]
    array, storage = view(shape, order, dtype, pad)
    num_blocks = BLOCKS // split
    dense = pages_of(array, num_blocks)
    assert dense.page_bytes == split * array[0].size * array.itemsize
    assert dense.block_stride_bytes == split * array.strides[0]
    for block in range(num_blocks):
        array[...] = 0
        array[block * split : (block + 1) * split] = 1
        touched = np.flatnonzero(storage.view(np.uint8)) // array.itemsize * array.itemsize
        first = block * dense.block_stride_bytes
        assert touched.min() == first
        assert touched.max() + array.itemsize == first + dense.page_bytes
        assert len(np.unique(touched)) == dense.page_bytes // array.itemsize


def test_shared_storage_of_all_layers_has_a_wide_stride():
    storage = np.zeros((BLOCKS, 3, 4, 16, 16), dtype=np.uint16)
    dense = pages_of(storage[:, 1], BLOCKS)
    assert dense.page_bytes == 4 * 16 * 16 * 2
    assert dense.block_stride_bytes == 3 * dense.page_bytes


def test_dimension_of_one_may_have_any_stride():
    dense = dense_pages("layer", (BLOCKS, 1, 16, 8), (128, 77, 8, 1), 2, BLOCKS)
    assert (dense.page_bytes, dense.block_stride_bytes) == (256, 256)


@pytest.mark.parametrize(
    ("shape", "strides", "num_blocks"),
    [
        ((2, BLOCKS, 16, 4, 8), (BLOCKS * 512, 512, 32, 8, 1), BLOCKS),  # K and V apart
        ((BLOCKS, 2, 16, 8), (128, BLOCKS * 128, 8, 1), BLOCKS),
        ((BLOCKS, 16, 8), (16 * 9, 9, 1), BLOCKS),  # a hole after each token
        ((BLOCKS, 16, 8), (256, 8, 2), BLOCKS),
        ((BLOCKS, 16, 8), (128, 8, 1), 4),
        ((BLOCKS, 16, 8), (128, 8, 1), BLOCKS + 1),
        ((), (), 1),
        ((BLOCKS, 16, 8), (200, 8, 1), BLOCKS // 2),  # kernel blocks apart
        ((BLOCKS, 16, 8), (0, 8, 1), BLOCKS),  # all blocks in one place
        ((BLOCKS, 16, 8), (64, 8, 1), BLOCKS),  # blocks overlap
    ],
)
def test_layout_without_whole_pages_is_refused(shape, strides, num_blocks):
    with pytest.raises(ConfigError, match="layer"):
        dense_pages("layer", shape, strides, 2, num_blocks)


@pytest.mark.parametrize("tp_size", range(1, 17))
@pytest.mark.parametrize("heads", [None, 1, 2, 4, 8, 16, 32])
def test_every_distinct_slice_is_held(tp_size, heads):
    ranks = [head_slices(rank, tp_size, heads) for rank in range(tp_size)]
    num_slices = {r[1] for r in ranks}
    assert len(num_slices) == 1
    (count,) = num_slices
    assert {r[0] for r in ranks} == set(range(count))
    for slice_idx in range(count):
        replicas = [r for r in ranks if r[0] == slice_idx]
        assert sorted(r[2] for r in replicas) == list(range(len(replicas)))
        assert {r[3] for r in replicas} == {len(replicas)}
    if heads is None:
        assert count == 1
    elif tp_size % heads == 0 or heads % tp_size == 0:
        assert count == min(tp_size, heads)
        per_head = max(1, tp_size // heads)
        assert [r[0] for r in ranks] == [rank // per_head for rank in range(tp_size)]


@given(
    num_objects=st.integers(0, 200),
    num_replicas=st.integers(1, 16),
    turn=st.integers(0, 10**9),
)
def test_replicas_share_all_objects_once(num_objects, num_replicas, turn):
    rows = [
        row
        for replica in range(num_replicas)
        for row in range(num_objects)[
            cache(replica_idx=replica, num_replicas=num_replicas).replica_rows(num_objects, turn)
        ]
    ]
    assert sorted(rows) == list(range(num_objects))


def test_replica_shares_rotate_and_are_even():
    sizes = []
    for turn in range(4):
        part = cache(replica_idx=1, num_replicas=4).replica_rows(10, turn)
        sizes.append(part.stop - part.start)
    assert sorted(sizes) == [2, 2, 3, 3]


def cache(**changes):
    facts = {
        "index": 0,
        "name": "layer.0",
        "base_address": 1 << 40,
        "block_stride_bytes": 10000,
        "page_bytes": 4096,
        "num_blocks": 100,
        "blocks_per_chunk": 3,
    }
    return CacheGeometry(**(facts | changes))


def test_slice_lies_behind_those_before_it():
    third = cache(slice_idx=2, num_slices=4)
    assert third.slice_bytes == 3 * 4096
    assert third.slice_offset == 2 * 3 * 4096
    assert third.object_bytes == 4 * 3 * 4096


def test_stack_addresses_every_page():
    caches = [cache(), cache(base_address=5, block_stride_bytes=7, page_bytes=6, num_blocks=50)]
    stack = CacheStack(caches)
    positions = np.array([0, 1, 1])
    blocks = np.array([[0, 1, 49], [2, -1, 0], [-1, -1, 3]])
    found = stack.page_addresses(positions, blocks, unwanted=99)
    for row, column in itertools.product(range(3), range(3)):
        of, block = caches[positions[row]], blocks[row, column]
        expected = 99 if block < 0 else of.base_address + block * of.block_stride_bytes
        assert found[row, column] == expected
    with pytest.raises(TransferError, match="block 50"):
        stack.page_addresses(positions[:1], np.array([[0, 50, 1]]), unwanted=0)


@pytest.mark.parametrize("second", [{}, {"page_bytes": 2048}])
def test_shares_count_every_object_of_every_cache(second):
    stack = CacheStack([cache(), cache(index=8, **second), cache(index=16)])
    positions = np.array([0, 0, 0, 1, 2, 2])
    counted = []
    for mine, counts in stack.shares(positions):
        assert (mine is None) is (not second)
        chosen = positions if mine is None else positions[mine]
        assert counts == [(n, int((chosen == n).sum())) for n in dict.fromkeys(chosen.tolist())]
        counted += counts
    assert sorted(counted) == [(0, 3), (1, 1), (2, 2)]


def test_stack_tells_shapes_apart():
    stack = CacheStack(
        [
            cache(),
            cache(index=8, base_address=7),
            cache(page_bytes=2048),
            cache(slice_idx=1, num_slices=2),
            cache(blocks_per_chunk=6, page_bytes=2048),
            cache(name="other", page_bytes=2048),
        ]
    )
    assert stack.shape_ids.tolist() == [0, 0, 1, 2, 3, 1]


def test_addresses_do_not_wrap():
    far = cache(base_address=(1 << 46), block_stride_bytes=1 << 31, num_blocks=1 << 12)
    found = CacheStack([far]).page_addresses(np.array([0]), np.array([[4095]]), 0)
    assert found[0, 0] == (1 << 46) + 4095 * (1 << 31)


def test_layers_have_the_same_number_on_every_stage():
    names = [f"model.layers.{i}.self_attn.attn" for i in range(20)]
    names += [f"model.layers.{i}.self_attn.indexer.k_cache" for i in range(0, 20, 2)]
    whole = layer_indices(names)
    assert len(set(whole.values())) == len(names)
    stages = [[n for n in names if int(n.split(".")[2]) // 7 == stage] for stage in range(3)]
    for stage in stages:
        assert layer_indices(list(reversed(stage))) == {n: whole[n] for n in stage}


def test_layer_number_is_the_first_in_the_name():
    assert layer_indices(["a.12.b.3.c"]) == {"a.12.b.3.c": 96}
    assert layer_indices([]) == {}


@pytest.mark.parametrize("names", [["model.attn"], [f"l.3.{c}" for c in "abcdefghi"]])
def test_names_that_can_not_be_numbered_are_refused(names):
    with pytest.raises(ConfigError):
        layer_indices(names)
    assert len(layer_indices([f"l.3.{c}" for c in "abcdefgh"])) == 8


def replica(index, rank, num_ranks):
    return CacheGeometry(index, "l", 0, 64, 64, 8, 1, 0, 1, rank, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("num_chunks", [1, 2, 7, 16])
def test_replicas_store_every_object_once(num_ranks, num_chunks):
    for index in (0, 1, 8, 9, 16):
        rows = [replica(index, r, num_ranks).replica_rows(num_chunks, 5) for r in range(num_ranks)]
        stored = [row for part in rows for row in range(num_chunks)[part]]
        assert sorted(stored) == list(range(num_chunks))


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_one_chunk_is_stored_by_all_ranks_in_turn(num_ranks):
    """A decode step saves a chunk of every layer: no rank should gather all of it."""
    caches = [layer * 8 + kind for layer in range(16) for kind in range(2)]
    stored = [
        sum(len(range(1)[replica(index, rank, num_ranks).replica_rows(1, 3)]) for index in caches)
        for rank in range(num_ranks)
    ]
    assert max(stored) - min(stored) <= 2
    assert sum(stored) == len(caches)


def state(**changes):
    """Convolution and state of a page side by side, padded to 1024 bytes: 10 blocks."""
    conv = {"address": 4096, "shape": (10, 3, 32), "strides": (512, 32, 1), "item_bytes": 2}
    ssm = {"address": 4288, "shape": (10, 4, 16), "strides": (256, 16, 1), "item_bytes": 4}
    return [View(**(conv | changes)), View(**ssm)]


def test_tensors_of_a_state_are_one_page_without_its_padding():
    for views in (state(), state()[::-1]):
        address, pages = joined_pages("s", views, 10)
        assert address == 4096
        assert (pages.page_bytes, pages.block_stride_bytes) == (192 + 256, 1024)


def test_one_tensor_is_joined_to_itself():
    alone = dense_pages("s", (10, 3, 32), (512, 32, 1), 2, 10)
    assert joined_pages("s", state()[:1], 10) == (4096, alone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": 4032}, "not side by side"),
        ({"strides": (256, 32, 1)}, "not side by side"),
        ({"shape": (10, 2, 32)}, "not side by side"),
        ({"strides": (512, 64, 1)}, "not contiguous"),
    ],
)
def test_tensors_of_a_state_that_lie_otherwise_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        joined_pages("s", state(**changes), 10)


def test_state_larger_than_its_stride_is_refused():
    views = [View(4096, (10, 32), (64, 1), 2), View(4096 + 64, (10, 65), (128, 1), 1)]
    with pytest.raises(ConfigError, match="overlap"):
        joined_pages("s", views, 10)

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adp_kv.kernels.reference import copy_pages_reference

GUARD = 0xA5


@settings(max_examples=60, deadline=None)
@given(
    page_bytes=st.integers(1, 300),
    order=st.permutations(range(9)),
    gap=st.sampled_from([0, 1, 40]),
    count=st.integers(0, 9),
)
def test_reference_any_order_copies_exactly_the_pages(page_bytes, order, gap, count):
    rng = np.random.default_rng(1)
    pitch = page_bytes + gap
    source = rng.integers(0, 256, 9 * pitch, dtype=np.uint8)
    target = np.full(9 * pitch, GUARD, np.uint8)
    to = np.array(order[:count], dtype=np.int64)
    expected = target.copy()
    for page, slot in enumerate(to.tolist()):
        piece = source[page * pitch : page * pitch + page_bytes]
        expected[slot * pitch : slot * pitch + page_bytes] = piece
    src_addrs = source.ctypes.data + np.arange(count, dtype=np.int64) * pitch
    copy_pages_reference(src_addrs, target.ctypes.data + to * pitch, page_bytes)
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("page_bytes", [1, 4096])
def test_reference_joins_pages_that_follow(page_bytes, monkeypatch):
    calls = []
    monkeypatch.setattr("ctypes.memmove", lambda *call: calls.append(call))
    src = np.array([0, 1, 2, 4, 5], dtype=np.int64) * page_bytes
    dst = np.array([7, 8, 9, 11, 20], dtype=np.int64) * page_bytes
    copy_pages_reference(src, dst, page_bytes)
    assert [length for _, _, length in calls] == [3 * page_bytes, page_bytes, page_bytes]

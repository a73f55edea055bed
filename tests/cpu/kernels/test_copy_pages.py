"""The kernel against its reference, run by Triton's interpreter (TRITON_INTERPRET=1)."""

import numpy as np
import pytest
import torch
import triton

from adp_kv.kernels.alignment import common_alignment
from adp_kv.kernels.launch import copy_pages

pytestmark = [
    pytest.mark.skipif(
        not triton.knobs.runtime.interpret, reason="on a GPU tests/gpu/kernels runs the kernel"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning:triton"),
]
GUARD = 0xA5


@pytest.mark.parametrize("page_bytes", [1, 7, 8, 24, 1001, 4096, 4104, 8192 + 16])
@pytest.mark.parametrize("shift", [0, 8, 3])
@pytest.mark.parametrize("num_programs", [1, 3])
def test_copy_pages_equals_reference(page_bytes, shift, num_programs):
    pages = 5
    pitch = (page_bytes + 63) // 16 * 16
    source = torch.randint(0, 256, (pages * pitch + 16,), dtype=torch.uint8)
    target = torch.full_like(source, GUARD)
    order = torch.tensor([3, 1, 4, 0, 2])
    src = source.data_ptr() + shift + torch.arange(pages) * pitch
    dst = target.data_ptr() + order * pitch
    expected = target.clone()
    for page, slot in enumerate(order.tolist()):
        first = page * pitch + shift
        expected[slot * pitch : slot * pitch + page_bytes] = source[first : first + page_bytes]
    align = common_alignment(page_bytes, src.numpy(), dst.numpy())
    copy_pages(src, dst, page_bytes, align=align, num_programs=num_programs)
    assert torch.equal(target, expected)


@pytest.mark.parametrize(
    ("page_bytes", "addrs", "align"),
    [(4096, [16, 4096], 16), (4096, [8, 16], 8), (4104, [16], 8), (4096, [4], 1), (6, [16], 1)],
)
def test_common_alignment_is_the_weakest(page_bytes, addrs, align):
    assert common_alignment(page_bytes, np.array(addrs, dtype=np.int64)) == align

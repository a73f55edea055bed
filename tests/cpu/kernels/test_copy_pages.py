"""The kernel against its reference, run by Triton's interpreter (TRITON_INTERPRET=1)."""

import numpy as np
import pytest
import torch
import triton

from adp_kv.kernels import launch
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


class Counted:
    """The kernel, and how many pages each of its launches had."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.pages = []

    def __getitem__(self, grid):
        def run(sources, targets, num_pages, *how, **shape):
            self.pages.append(num_pages)
            self.kernel[grid](sources, targets, num_pages, *how, **shape)

        return run


@pytest.mark.parametrize(("most", "launches"), [(7, [3, 3, 1]), (1, [1] * 7), (14, [7])])
def test_more_units_than_a_launch_counts_are_several_launches(most, launches, monkeypatch):
    page_bytes, num = 4096, 7  # a page is two units of 2 KiB
    counted = Counted(launch.copy_pages_kernel)
    monkeypatch.setattr(launch, "copy_pages_kernel", counted)
    monkeypatch.setattr(launch, "MAX_UNITS", most)
    source = torch.randint(0, 256, (num * page_bytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    inside = torch.arange(num) * page_bytes
    tables = source.data_ptr() + inside, target.data_ptr() + inside.flip(0)
    copy_pages(*tables, page_bytes, align=8, num_programs=2)
    assert torch.equal(target.view(num, -1).flip(0), source.view(num, -1))
    assert counted.pages == launches


@pytest.mark.parametrize(
    ("page_bytes", "addrs", "align"),
    [(4096, [16, 4096], 16), (4096, [8, 16], 8), (4104, [16], 8), (4096, [4], 1), (6, [16], 1)],
)
def test_common_alignment_is_the_weakest(page_bytes, addrs, align):
    assert common_alignment(page_bytes, np.array(addrs, dtype=np.int64)) == align

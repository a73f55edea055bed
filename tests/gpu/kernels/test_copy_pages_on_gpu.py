"""The page kernel on a device: every size, alignment and far address, with guard bands."""

import numpy as np
import pytest
import torch

from adp_kv.kernels.alignment import common_alignment
from adp_kv.units import KiB, MiB
from tests.support.cuda_rig import GUARD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # of Triton, whatever version is there
]


@pytest.fixture
def copy_pages():
    from adp_kv.kernels.launch import copy_pages

    return copy_pages


SIZES = [8, 16, 24, 1000, 1001, 4104, 8 * KiB, 18432, 41984, 73728, 3 * MiB + 8, 4 * MiB]


@pytest.mark.parametrize("page_bytes", SIZES)
@pytest.mark.parametrize("shift", [0, 8, 3])
@pytest.mark.parametrize("tables", ["device", "pinned"])
def test_copy_pages_moves_exactly_the_pages(pool, copy_pages, page_bytes, shift, tables):
    num_pages = max(2, min(300, 16 * MiB // page_bytes))
    pitch = (page_bytes + 64) // 16 * 16
    data = torch.randint(0, 256, (num_pages, pitch), dtype=torch.uint8, device="cuda")
    room = (pool.numel() - shift) // pitch
    chosen = np.random.default_rng(page_bytes).choice(room - 1, num_pages - 1, replace=False)
    targets = np.append(chosen, room - 1).astype(np.int64) * pitch + shift
    src = data.data_ptr() + np.arange(num_pages, dtype=np.int64) * pitch
    dst = pool.data_ptr() + targets
    align = common_alignment(page_bytes, src, dst)
    src_table, dst_table = torch.from_numpy(src), torch.from_numpy(dst)
    place = torch.Tensor.pin_memory if tables == "pinned" else torch.Tensor.cuda
    src_table, dst_table = place(src_table), place(dst_table)
    copy_pages(src_table, dst_table, page_bytes, align=align, num_programs=24)
    torch.cuda.synchronize()
    for page, target in enumerate(targets.tolist()):
        assert torch.equal(pool[target : target + page_bytes], data[page, :page_bytes])
        pool[target : target + page_bytes] = GUARD
    for part in pool.split(1 << 30):
        assert bool((part == GUARD).all())


@pytest.mark.parametrize("num_programs", [1, 8, 132])
def test_copy_pages_any_number_of_programs(copy_pages, num_programs):
    source = torch.randint(0, 256, (1000, 4104), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    order = torch.randperm(1000, device="cuda")
    src = source.data_ptr() + torch.arange(1000, device="cuda") * 4104
    dst = target.data_ptr() + order * 4104
    copy_pages(src, dst, 4104, align=8, num_programs=num_programs)
    assert torch.equal(target[order], source)


@pytest.mark.parametrize("align", [16, 8, 1])
def test_prepared_launch_moves_the_same_bytes(pool, align):
    """Without it a fan-out's scatter goes through Triton's dispatch, at 25 µs a launch."""
    import torch

    from adp_kv.kernels.prepared import prepare

    stream = torch.cuda.current_stream()
    copy = prepare(torch.empty(256, dtype=torch.uint8, device="cuda"), stream, align)
    assert copy is not None, "this Triton is launched in another way"
    page_bytes, num = 3 * 1024 + align, 37
    sources = torch.randint(0, 256, (num, page_bytes), dtype=torch.uint8, device="cuda")
    targets = torch.zeros(num, page_bytes + 64, dtype=torch.uint8, device="cuda")
    rows = torch.arange(num, device="cuda")
    src = sources.data_ptr() + rows * page_bytes
    dst = targets.data_ptr() + rows.flip(0) * (page_bytes + 64)
    copy.launch(stream.cuda_stream, src.data_ptr(), dst.data_ptr(), num, page_bytes, 8)
    assert torch.equal(targets[:, :page_bytes], sources.flip(0))
    assert not targets[:, page_bytes:].any()

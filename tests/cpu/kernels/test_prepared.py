"""The launch of the page kernel without Triton's dispatch, from a kernel that is made up."""

import ctypes
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from adp_kv.kernels import prepared  # noqa: E402
from adp_kv.kernels.copy_pages import copy_pages_kernel  # noqa: E402
from adp_kv.kernels.launch import BYTES, MAX_UNITS, WORDS  # noqa: E402
from adp_kv.kernels.prepared import PreparedCopy, prepare  # noqa: E402


class Compiled:
    """Notes its launches."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.launches = []

    def run(self, *args):
        self.launches.append(args)


@pytest.mark.parametrize(("align", "shape"), [(16, WORDS), (8, WORDS), (1, BYTES)])
def test_launch_hands_over_every_parameter_in_order(align, shape):
    kernel = Compiled()
    PreparedCopy(kernel, align, shape).launch(7, 4096, 8192, 100, 73728, 64)
    (launch,) = kernel.launches
    assert launch[:6] == (64, 1, 1, 7, "function", "metadata")
    args = list(launch[9:])
    assert len(args) == len(copy_pages_kernel.arg_names)
    assert args == [4096, 8192, 100, 73728 // align, align, shape.rows, shape.cols]


@pytest.mark.parametrize(("num_pages", "programs"), [(1, 1), (16, 1), (17, 2), (2000, 64)])
def test_few_pages_take_few_programs(num_pages, programs):
    kernel = Compiled()
    PreparedCopy(kernel, 16, WORDS).launch(7, 4096, 8192, num_pages, 2048, 64)
    assert kernel.launches[0][0] == programs


def test_more_units_than_the_kernel_counts_are_refused():
    with pytest.raises(AssertionError):
        PreparedCopy(Compiled(), 16, WORDS).launch(7, 0, 0, MAX_UNITS, 4096, 64)


class Tried(Compiled):
    """Moves the first bytes of one page, as many as a test wants."""

    def __init__(self, num_bytes):
        super().__init__()
        self.num_bytes = num_bytes

    def __getitem__(self, _grid):
        return lambda *_tables, **_shape: self

    def run(self, *args):
        if self.num_bytes is None:
            raise TypeError("a Triton that is launched otherwise")
        source, target = (ctypes.c_int64.from_address(table).value for table in args[9:11])
        ctypes.memmove(target, source, self.num_bytes)


@pytest.mark.parametrize("align", [16, 8, 1])
def test_launch_is_used_only_where_it_moves_the_right_bytes(align, monkeypatch):
    stream = SimpleNamespace(cuda_stream=7)
    for num_bytes, is_right in ((align, True), (0, False), (align + 1, False), (None, False)):
        monkeypatch.setattr(prepared, "copy_pages_kernel", Tried(num_bytes))
        made = prepare(torch.zeros(256, dtype=torch.uint8), stream, align)
        assert (made is not None) == is_right, num_bytes


def test_interpreter_has_nothing_to_prepare():
    if torch.cuda.is_available():
        pytest.fail("only where kernels are interpreted")
    scratch = torch.zeros(256, dtype=torch.uint8)
    assert prepare(scratch, None, 16) is None

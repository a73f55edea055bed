"""What TorchDevice keeps between calls, on a torch whose CUDA is not there."""

import ctypes
import threading
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from adp_kv.transfer import device as module  # noqa: E402
from adp_kv.transfer.device import TorchDevice  # noqa: E402
from adp_kv.transfer.tables import TablePool  # noqa: E402

GLOBAL, RELAXED = 0, 2


class FakeCuda:
    """Current streams and capture modes, one of each a thread."""

    def __init__(self, monkeypatch):
        self._mine = threading.local()
        self.made = 0
        driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=self._exchange)
        monkeypatch.setattr(module.ctypes, "CDLL", lambda _: driver)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_stream", self._stream)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", self._name, raising=False)

    def use(self, number):
        self._mine.stream = number

    @property
    def mode(self):
        return getattr(self._mine, "mode", GLOBAL)

    def _name(self, index):
        assert index == 3
        return (self._mine.stream, index, 1)

    def _stream(self, index):
        self.made += 1
        return SimpleNamespace(name=self._name(index))

    def _exchange(self, reference):
        self._mine.mode, reference._obj.value = reference._obj.value, self.mode


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def test_current_stream_is_that_of_now_and_of_the_thread(cuda):
    device = TorchDevice(torch.device("cuda", 3), None)
    seen = []

    def look(*numbers):
        for number in numbers:
            cuda.use(number)
            seen.append((number, device.current_stream().name[0]))

    look(5, 5, 6, 5)
    other = threading.Thread(target=look, args=(7,))
    other.start()
    other.join(10)
    cuda.use(5)
    seen.append((5, device.current_stream().name[0]))
    assert len(seen) == 6
    assert all(want == got for want, got in seen), seen


def test_same_current_stream_is_looked_up_once(cuda):
    device = TorchDevice(torch.device("cuda", 3), None)
    cuda.use(5)
    assert device.current_stream() is device.current_stream()
    assert cuda.made == 1


def test_capture_mode_is_what_it_was_each_time(cuda):
    safe = TorchDevice(torch.device("cuda", 3), None).capture_safe()
    for _ in range(3):
        assert cuda.mode == GLOBAL
        with safe:
            assert cuda.mode == RELAXED
    with pytest.raises(RuntimeError), safe:
        raise RuntimeError
    assert cuda.mode == GLOBAL


def words_at(address, count):
    return list((ctypes.c_int64 * count).from_address(address))


@pytest.mark.parametrize("is_prepared", [True, False])
def test_table_launches_its_own_rows(cuda, monkeypatch, is_prepared):
    device = TorchDevice(torch.device("cuda", 3), None)
    monkeypatch.setattr(
        device, "allocate_pinned", lambda num_words: torch.zeros(num_words, dtype=torch.int64)
    )
    seen = []

    def prepared(stream, sources, targets, num_pages, page_bytes, num_programs):
        assert sources % 16 == targets % 16 == 0
        rows = words_at(sources, num_pages), words_at(targets, num_pages)
        seen.append((stream, *rows, page_bytes, num_programs))

    def launch(stream, sources, targets, page_bytes, *, align, num_programs):
        assert align == 8
        rows = sources.tolist(), targets.tolist()
        seen.append((stream.cuda_stream, *rows, page_bytes, num_programs))

    if is_prepared:
        device._prepared[8] = SimpleNamespace(launch=prepared)
    monkeypatch.setattr(device, "launch", launch)
    pool = TablePool(device, 40)
    stream = SimpleNamespace(cuda_stream=77)
    wanted = []
    for count in (1, 3, 17, 40):
        sources = np.arange(count, dtype=np.int64) + 1000 * count
        table = pool.take(sources, -sources)
        device.launch_table(stream, table, 24, align=8, num_programs=5)
        wanted.append((77, sources.tolist(), (-sources).tolist(), 24, 5))
    assert seen == wanted

"""What NVML says of links decides who reaches whom, and only on one host."""

import ctypes

import pytest

torch = pytest.importorskip("torch")
from adp_kv.errors import TransferError  # noqa: E402
from adp_kv.fanout import nvml, start  # noqa: E402

UUIDS = ["GPU-0", "GPU-1", "GPU-2"]
READ, WRITE, NVLINK = range(3)


class Library:
    """Devices of a host; `missing` are (device, device, capability) that are not there."""

    def __init__(self):
        self.visible = set(UUIDS)
        self.missing = set()
        self.answer = 0
        self.open = 0

    def nvmlInit_v2(self):  # noqa: N802
        self.open += 1
        return 0

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):  # noqa: N802
        if uuid.decode() not in self.visible:
            return 6
        handle._obj.value = 1 + UUIDS.index(uuid.decode())
        return 0

    def nvmlDeviceGetP2PStatus(self, one, other, capability, status):  # noqa: N802
        is_missing = (one.value - 1, other.value - 1, capability) in self.missing
        status._obj.value = 1 if is_missing else 0
        return self.answer


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: made)
    return made


def reached(mine):
    asked = nvml.Nvml()
    try:
        return asked.reached(mine, UUIDS)
    finally:
        asked.close()


def test_linked_devices_reach_each_other(library):
    assert [reached(uuid) for uuid in UUIDS] == [[True] * 3] * 3
    assert library.open == 0


@pytest.mark.parametrize("capability", [READ, WRITE, NVLINK])
def test_link_that_lacks_anything_is_none(library, capability):
    library.missing = {(0, 2, capability)}
    assert reached("GPU-0") == [True, True, False]


def test_answer_that_is_an_error_is_no_link(library):
    library.answer = 3
    assert reached("GPU-1") == [False, True, False]


def test_device_that_is_not_visible_here_is_not_reached(library):
    library.visible = {"GPU-0", "GPU-2"}
    assert reached("GPU-0") == [True, False, True]
    with pytest.raises(TransferError, match="does not know device GPU-1"):
        reached("GPU-1")


def test_host_without_nvml_is_an_error_that_says_so(monkeypatch):
    def no_library(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    with pytest.raises(TransferError, match="not an NVIDIA device"):
        nvml.Nvml()


def test_device_of_another_host_is_not_reached_whatever_nvml_says(library):
    facts = [["one", "GPU-0"], ["one", "GPU-1"], ["two", "GPU-2"]]
    assert [start._row(facts, rank) for rank in range(3)] == [
        [True, True, False],
        [True, True, False],
        [False, False, True],
    ]
    assert library.open == 0, "NVML is not let go of"
